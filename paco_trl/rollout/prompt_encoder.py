# SPDX-License-Identifier: Apache-2.0
"""Encode each distinct prompt and source image once in a run, then move the text encoders off the accelerator."""

import logging
from collections import Counter
from collections.abc import Iterable
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
class PromptEmbeddings:
    """Embeddings of a row's prompts and latents of its source images, batch dimension 1; rows share the tensors."""

    prompt: dict[str, torch.Tensor]
    negative_prompt: dict[str, torch.Tensor] = field(default_factory=dict)
    image_latents: list[torch.Tensor] = field(default_factory=list)

    def place(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Move the embeddings to a device for all rows that share them, as float32, and return them as arguments."""
        for arguments in (self.prompt, self.negative_prompt):
            for name, tensor in arguments.items():
                arguments[name] = tensor.to(device, torch.float32 if tensor.is_floating_point() else None)
        self.image_latents[:] = [latents.to(device) for latents in self.image_latents]
        return self.prompt | {f"negative_{name}": tensor for name, tensor in self.negative_prompt.items()}


class PromptEncoder:
    """Encodes prompts and source images on one process each, and keeps the results in its CPU memory."""

    # A FLUX.1-dev prompt takes 4 MB in bf16. Prompts are encoded one at a time: none depends on its neighbors

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
        """Encode what is new in some rows. Every process calls it with the same numbers."""
        self._read_digests(rows, numbers)
        prompts: dict[Condition, int] = {}  # -> a row with its source images
        images: dict[tuple[str, float], tuple[int, int]] = {}  # -> a row and the place in it
        for number in dict.fromkeys(numbers):
            condition = rows.condition(number, scale)
            for distinct in self._text_conditions(condition):
                if distinct not in self._known:
                    prompts.setdefault(distinct, number)
            for place, digest in enumerate(condition.images):
                if (digest, scale) not in self._known:
                    images.setdefault((digest, scale), (number, place))
        self._encode_images(rows, images)  # first, since it finds damaged files
        self._encode_prompts(rows, prompts)

    def fetch(self, rows: PromptRows, numbers: list[int], scale: float = 1.0) -> dict[int, PromptEmbeddings]:
        """Return the embeddings of some rows, on the CPU, by number. Every process calls it with the same numbers."""
        conditions = {number: rows.condition(number, scale) for number in numbers}
        distinct = dict.fromkeys(
            each for condition in conditions.values() for each in self._text_conditions(condition)
        )
        digests = dict.fromkeys((digest, scale) for condition in conditions.values() for digest in condition.images)
        prompts = self._exchange([(key, dict(self._prompts[key])) for key in distinct if key in self._prompts])
        images = self._exchange([(key, self._images[key]) for key in digests if key in self._images])
        embeddings = {}
        for number, condition in conditions.items():
            prompt, *negative = [prompts[each] for each in self._text_conditions(condition)]
            latents = [images[digest, scale] for digest in condition.images]
            embeddings[number] = PromptEmbeddings(prompt, negative[0] if negative else {}, latents)
        return embeddings

    def _read_digests(self, rows: PromptRows, numbers: list[int]) -> None:
        """Read the files of source images, each on one process."""
        if rows.sources is None:
            return
        new = [number for number in dict.fromkeys(numbers) if not rows.sources.is_read(number)]
        if not new:
            return
        mine = new[self.accelerator.process_index :: self.accelerator.num_processes]
        is_hidden = len(new) < 1000 or not self.accelerator.is_main_process
        read = [(number, rows.sources.digests(number)) for number in tqdm(mine, "Reading images", disable=is_hidden)]
        rows.sources.remember(self._exchange(read))

    def _text_conditions(self, condition: Condition) -> list[Condition]:
        """Return what the text encoders see: of the prompt and, with true guidance, of the negative prompt."""
        seen = condition if self.family.prompt_sees_images else Condition(condition.prompt)
        return [seen] if self.negative_prompt is None else [seen, replace(seen, prompt=self.negative_prompt)]

    def _exchange(self, mine: list[tuple]) -> dict:
        return dict(gather_object(mine) if self.accelerator.num_processes > 1 else mine)

    def _local_part(self, new: dict, progress: str) -> Iterable[tuple]:
        mine = list(new.items())[self.accelerator.process_index :: self.accelerator.num_processes]
        return tqdm(mine, progress, disable=not self.accelerator.is_main_process)

    def _encode_prompts(self, rows: PromptRows, new: dict[Condition, int]) -> None:
        if not new:
            return
        device, count = self.accelerator.device, sum(each.prompt != self.negative_prompt for each in new)
        with self._on_accelerator(self.family.text_encoders), self._count_truncations(count) as truncations:
            for condition, number in self._local_part(new, "Encoding prompts"):
                images = rows.images(number) if condition.images else []
                arguments = (condition.prompt, device, images, condition.scale)
                with rows.row_named_in_errors(number):
                    encoded = self.family.encode_prompt(self.pipeline, *arguments)
                self._prompts[condition] = send_to_device(encoded, "cpu")
                if self.family.is_truncated(self.pipeline, condition.prompt):
                    name = type(self.pipeline).__name__
                    truncations[f"the end of the text was truncated, because it is longer than {name} reads"] += 1
        self._known.update(new)
        if self._prompts:
            size = sum(tensor.nbytes for tensor in next(iter(self._prompts.values())).values())
            logger.info(
                f"{sum(isinstance(known, Condition) for known in self._known)} distinct prompts are encoded, "
                f"{size / 2**20:.1f} MiB each, in the CPU memory of {self.accelerator.num_processes} process(es)."
            )

    def _encode_images(self, rows: PromptRows, new: dict[tuple[str, float], tuple[int, int]]) -> None:
        if not new:
            return
        vae, device = self.pipeline.vae, self.accelerator.device
        with self._on_accelerator(("vae",)), _untiled(vae):
            for (digest, scale), (number, place) in self._local_part(new, "Encoding source images"):
                with rows.row_named_in_errors(number):
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
    def _count_truncations(self, count: int):
        """Log the number of truncated prompts of all processes, for each kind. Every process enters it."""
        # Prompts of image sets are always longer than CLIP reads, and the pipeline logs each prompt with its full text
        truncations: Counter[str] = Counter()

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
    """Switch off `vae_tiling`, which is for generated images: a pipeline encodes source images without it."""
    is_tiled = getattr(vae, "use_tiling", False)
    if is_tiled:
        vae.disable_tiling()
    try:
        yield
    finally:
        if is_tiled:
            vae.enable_tiling()
