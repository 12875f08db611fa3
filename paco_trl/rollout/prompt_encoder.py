# SPDX-License-Identifier: Apache-2.0
"""Each distinct prompt and source image is encoded once in a run; then the text encoders leave the accelerator."""

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object, send_to_device
from tqdm.auto import tqdm

from . import Family
from .prompt_rows import Condition, PromptRows


logger = get_logger(__name__)


@dataclass
class Encoded:
    """
    What a row's images are drawn from, encoded. Rows that have something in common hold the same tensors.

    Attributes:
        prompt (`dict[str, torch.Tensor]`):
            Arguments of the pipeline's call that stand for the prompt, batch dimension 1.
        negative_prompt (`dict[str, torch.Tensor]`):
            Those that stand for the negative prompt; none without true guidance.
        image_latents (`list[torch.Tensor]`):
            What the VAE makes of each source image, float32, batch dimension 1.
    """

    prompt: dict[str, torch.Tensor]
    negative_prompt: dict[str, torch.Tensor] = field(default_factory=dict)
    image_latents: list[torch.Tensor] = field(default_factory=list)

    def place(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """
        Moves what is encoded to a device, for all rows that share it.

        Floating-point numbers become float32, which makes the pipeline keep its latents in float32.

        Args:
            device (`torch.device` or `str`):
                Device.

        Returns:
            `dict[str, torch.Tensor]`: arguments of the pipeline's call, those of the negative prompt among them.
        """
        for arguments in (self.prompt, self.negative_prompt):
            for name, tensor in arguments.items():
                arguments[name] = tensor.to(device, torch.float32 if tensor.is_floating_point() else None)
        self.image_latents[:] = [latents.to(device) for latents in self.image_latents]
        return self.prompt | {f"negative_{name}": tensor for name, tensor in self.negative_prompt.items()}


class PromptEncoder:
    """
    Encodes prompts and source images and keeps the results in CPU memory, each on one process only.

    A FLUX.1-dev prompt takes 4 MB in bf16, so a run over many prompts fills memory quickly if every process keeps them
    all: each process encodes and keeps its share, and a round's are exchanged when they are needed. They are encoded
    one at a time, so that an embedding does not depend on its neighbours.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Pipeline with its text encoders, on the CPU.
        family ([`Family`]):
            Page of the pipeline's family.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the run.
        negative_prompt (`str`, *optional*):
            Negative prompt of true guidance, from [`Family.resolve_negative_prompt`].
    """

    def __init__(self, pipeline, family: Family, accelerator: Accelerator, negative_prompt: str | None = None):
        self.pipeline = pipeline
        self.family = family
        self.accelerator = accelerator
        self.negative_prompt = negative_prompt
        self._known: set = set()
        self._prompts: dict[Condition, dict[str, torch.Tensor]] = {}
        self._images: dict[tuple[str, float], torch.Tensor] = {}  # (digest, scale) -> latents

    @torch.no_grad()
    def encode(self, rows: PromptRows, numbers: list[int], scale: float = 1.0) -> None:
        """
        Encodes what is new in some rows. Every process calls it with the same numbers.

        Args:
            rows ([`PromptRows`]):
                Rows.
            numbers (`list[int]`):
                Numbers of the rows, repetitions allowed.
            scale (`float`, *optional*, defaults to `1.0`):
                Factor per side at which source images are read.
        """
        self._read_digests(rows, numbers)
        prompts: dict[Condition, int] = {}  # with a row that has its source images
        images: dict[tuple[str, float], tuple[int, int]] = {}  # with a row and the place in it
        for number in dict.fromkeys(numbers):
            condition = rows.condition(number, scale)
            for distinct in (self._seen(condition), self._negative(condition)):
                if distinct is not None and distinct not in self._known:
                    prompts.setdefault(distinct, number)
            for place, digest in enumerate(condition.images):
                if (digest, scale) not in self._known:
                    images.setdefault((digest, scale), (number, place))
        self._encode_images(rows, images)  # first: a damaged file is found here
        self._encode_prompts(rows, prompts)

    def fetch(self, rows: PromptRows, numbers: list[int], scale: float = 1.0) -> dict[int, Encoded]:
        """
        What was encoded for some rows. Every process calls it with the same numbers.

        Args:
            rows ([`PromptRows`]), numbers (`list[int]`), scale (`float`, *optional*, defaults to `1.0`):
                As in [`PromptEncoder.encode`], before.

        Returns:
            `dict[int, Encoded]`: by number, on the CPU.
        """
        conditions = {number: rows.condition(number, scale) for number in numbers}
        distinct = dict.fromkeys(
            each for condition in conditions.values() for each in (self._seen(condition), self._negative(condition))
        )
        digests = dict.fromkeys((digest, scale) for condition in conditions.values() for digest in condition.images)
        prompts = self._exchange([(key, dict(self._prompts[key])) for key in distinct if key in self._prompts])
        images = self._exchange([(key, self._images[key]) for key in digests if key in self._images])
        return {
            number: Encoded(
                prompts[self._seen(condition)],
                prompts.get(self._negative(condition), {}),
                [images[digest, scale] for digest in condition.images],
            )
            for number, condition in conditions.items()
        }

    def _read_digests(self, rows: PromptRows, numbers: list[int]) -> None:
        """Reads the files of source images, each on one process."""
        if rows.sources is None:
            return
        new = [number for number in dict.fromkeys(numbers) if not rows.sources.is_read(number)]
        if not new:
            return
        mine = new[self.accelerator.process_index :: self.accelerator.num_processes]
        is_hidden = len(new) < 1000 or not self.accelerator.is_main_process
        read = [(number, rows.sources.digests(number)) for number in tqdm(mine, "Reading images", disable=is_hidden)]
        rows.sources.remember(self._exchange(read))

    def _seen(self, condition: Condition) -> Condition:
        """What of a condition the text encoders see."""
        return condition if self.family.prompt_sees_images else Condition(condition.prompt)

    def _negative(self, condition: Condition) -> Condition | None:
        # Text encoders that see the source image see it with the negative prompt too
        if self.negative_prompt is None:
            return None
        return self._seen(replace(condition, prompt=self.negative_prompt))

    def _exchange(self, mine: list[tuple]) -> dict:
        return dict(gather_object(mine) if self.accelerator.num_processes > 1 else mine)

    def _share(self, new: dict) -> list[tuple]:
        return list(new.items())[self.accelerator.process_index :: self.accelerator.num_processes]

    def _encode_prompts(self, rows: PromptRows, new: dict[Condition, int]) -> None:
        if not new:
            return
        device, count = self.accelerator.device, sum(each.prompt != self.negative_prompt for each in new)
        with self._on_accelerator(self.family.text_encoders), self._truncations_counted(count) as truncations:
            for condition, number in tqdm(
                self._share(new), desc="Encoding prompts", disable=not self.accelerator.is_main_process
            ):
                images = rows.images(number) if condition.images else []
                with rows.named(number):
                    encoded = self.family.encode_prompt(
                        self.pipeline, condition.prompt, device, images, condition.scale
                    )
                self._prompts[condition] = send_to_device(encoded, "cpu")
                if self.family.is_truncated(self.pipeline, condition.prompt):
                    name = type(self.pipeline).__name__
                    truncations[f"the end of the text was truncated, because {name} reads no more of it"] += 1
        self._known.update(new)
        if self._prompts:
            size = sum(tensor.nbytes for tensor in next(iter(self._prompts.values())).values())
            logger.info(
                f"{sum(isinstance(known, Condition) for known in self._known)} distinct prompts are encoded, "
                f"{size / 2**20:.1f} MiB each, kept in the memory of "
                f"{self.accelerator.num_processes} process(es)."
            )

    def _encode_images(self, rows: PromptRows, new: dict[tuple[str, float], tuple[int, int]]) -> None:
        if not new:
            return
        vae, device = self.pipeline.vae, self.accelerator.device
        with self._on_accelerator(("vae",)), _untiled(vae):
            for (digest, scale), (number, place) in tqdm(
                self._share(new), desc="Encoding source images", disable=not self.accelerator.is_main_process
            ):
                with rows.named(number):
                    image = self.family.prepare_image(self.pipeline, rows.images(number)[place], scale)
                    pixels = self.family.image_pixels(self.pipeline, image).to(device, vae.dtype)
                    self._images[digest, scale] = vae.encode(pixels).latent_dist.mode().float().cpu()
        self._known.update(new)

    @contextmanager
    def _on_accelerator(self, names: tuple[str, ...]):
        modules = [module for name in names if (module := getattr(self.pipeline, name)) is not None]
        for module in modules:
            module.to(self.accelerator.device)
        try:
            yield
        finally:
            for module in modules:
                module.to("cpu")

    @contextmanager
    def _truncations_counted(self, count: int):
        """Warns of truncated prompts with their number on all processes, once for each kind. Every process enters it."""
        # Prompts of image sets are longer than CLIP reads, always. The pipeline says so for each prompt, with the whole
        # text; a line for each kind says as much.
        truncations = Counter()

        def count_truncations(record: logging.LogRecord) -> bool:
            message = record.getMessage()
            if "was truncated" not in message:
                return True
            truncations[message.split(":")[0]] += 1
            return False

        pipeline_logger = logging.getLogger(type(self.pipeline).__module__)
        pipeline_logger.addFilter(count_truncations)
        try:
            yield truncations
        finally:
            pipeline_logger.removeFilter(count_truncations)
        everywhere = gather_object([truncations]) if self.accelerator.num_processes > 1 else [truncations]
        for message, number in sum(everywhere, Counter()).items():
            logger.warning(f"For {number} of {count} prompts: {message}.")


@contextmanager
def _untiled(vae):
    """`vae_tiling` is for images that are drawn: a pipeline encodes its source images whole."""
    is_tiled = getattr(vae, "use_tiling", False)
    if is_tiled:
        vae.disable_tiling()
    try:
        yield
    finally:
        if is_tiled:
            vae.enable_tiling()
