# SPDX-License-Identifier: Apache-2.0
"""
Encode prompts and source images. Each distinct one is encoded once, ahead of the rounds that need it.

Text encoders and transformer take turns on the accelerator.
"""

import functools
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets import Dataset
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn
from tqdm.auto import tqdm

from ..data.grid_prompts import find_truncated_panels
from ..utils.files import digest, write_atomically
from ..utils.fingerprint import component_fingerprint, describe, versions
from ..utils.fsdp import is_sharded
from ..utils.logs import get_logger
from ..utils.pipelines import truncations_counted
from ..utils.placement import cpu_memory, placed_on, to_cpu
from ..utils.tensors import to_device
from .families import Family
from .prompt_rows import PromptKey, ResolvedRows
from .recording_pipeline import EncodedImage
from .rounds import Round


logger = get_logger(__name__)

# Rows that are encoded at a time outside of training: 1 GiB of embeddings for FLUX.1
ROWS_AHEAD = 256
# Prompts that a message names
_SHOWN_ROWS = 8

# Cache key: a prompt, or a source image as (digest, scale)
Condition = PromptKey | tuple[str, float]


@dataclass
class PromptEmbeddings:
    """Embeddings of a row's prompts and latents of its source images, batch dimension 1; rows share the tensors."""

    prompt: dict[str, torch.Tensor]
    negative_prompt: dict[str, torch.Tensor] = field(default_factory=dict)
    image_latents: list[torch.Tensor] = field(default_factory=list)

    def arguments_on(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Move the embeddings to a device for all rows that share them, and return them as arguments."""
        for arguments in (self.prompt, self.negative_prompt):
            for name, tensor in arguments.items():
                arguments[name] = to_device(tensor, device)
        self.image_latents[:] = [to_device(latents, device) for latents in self.image_latents]
        return self.prompt | {f"negative_{name}": tensor for name, tensor in self.negative_prompt.items()}


class PromptEncoder:
    """Encode prompts and source images for this process. Keep them while needed, with `folder` also in files."""

    # An encoded prompt of FLUX.1-dev takes 4 MB in bf16. Prompts are encoded one at a time, so that none depends on
    # its neighbors

    def __init__(
        self,
        pipeline,
        family: Family,
        accelerator: Accelerator,
        folder: str | Path | None = None,
    ):
        self.pipeline = pipeline
        self.family = family
        self.accelerator = accelerator
        self._folder: Any = None if folder is None else Path(folder).expanduser() / _models_digest(pipeline, family)
        # Whether progress bars are hidden; tqdm hides them without a terminal if this is `None`
        self._is_hidden = not accelerator.is_main_process or None
        self._encoded: dict[Condition, dict[str, torch.Tensor]] = {}
        self._reported: set[str] = set()  # kinds of truncation
        # The embeddings that rows need. The key is their dataset, because each evaluation resolves its rows again.
        self._needed: WeakKeyDictionary[Dataset, set[Condition]] = WeakKeyDictionary()
        # Layers of the transformer that make room for the text encoders. DeepSpeed and FSDP place layers themselves.
        self._frozen = [] if is_sharded(accelerator) else _frozen_layers(pipeline.transformer)
        self._frozen_memory = cpu_memory(self._frozen)

    @torch.no_grad()
    def prefetch(
        self, rows: ResolvedRows, row_indices: Iterable[int], scale: float = 1.0, ahead: Iterable[int] = ()
    ) -> None:
        """
        Encode these rows unless they already are, together with the rows `ahead`.

        Drops other embeddings of these rows, so that memory does not grow with the dataset.
        """
        needed = self._conditions(rows, row_indices, scale)
        if needed.keys() <= self._encoded.keys():
            return
        needed |= self._conditions(rows, ahead, scale)
        if rows.dataset not in self._needed:
            self._warn_of_truncated(rows)
        self._needed[rows.dataset] = set(needed)
        still_needed = set().union(*self._needed.values())
        self._encoded = {key: tensors for key, tensors in self._encoded.items() if key in still_needed}
        new = {key: where for key, where in needed.items() if key not in self._encoded and not self._read(key)}
        images = {key: where for key, where in new.items() if not isinstance(key, PromptKey)}
        prompts = {key: row_index for key, (row_index, _) in new.items() if isinstance(key, PromptKey)}
        with torch.autocast(self.accelerator.device.type, enabled=False):  # the pipeline encodes without autocast
            if images:  # before prompts, because damaged image files are found early
                self._encode_images(rows, images)
            if prompts:
                self._encode_prompts(rows, prompts)

    def encode(
        self, rollout_round: Round, row_indices: Sequence[int], scale: float = 1.0, ahead: Iterable[int] = ()
    ) -> "EncodedRows":
        """Return encoded rows of a round, with embeddings on the CPU; encode the rows `ahead` at the same time."""
        rows = rollout_round.rows
        self.prefetch(rows, row_indices, scale, ahead)
        keys = {
            prompt_index: self._keys(rows, prompt_index, scale)
            for row_index in row_indices
            for prompt_index in rows.prompt_indices[row_index]
        }
        needed: Iterable[Any] = (key for texts, sources in keys.values() for key in (*texts, *sources))
        encoded: Any = {key: dict(self._encoded[key]) for key in dict.fromkeys(needed)}
        embeddings = {}
        for prompt_index, (texts, sources) in keys.items():
            prompt, *negative = [encoded[key] for key in texts]
            latents = [encoded[key]["latents"] for key in sources]
            embeddings[prompt_index] = PromptEmbeddings(prompt, negative[0] if negative else {}, latents)

        @functools.cache
        def prepared(row_index: int) -> list[Image.Image]:
            images = rows.images_in(rollout_round.reward_row(row_index))
            return [self.family.prepare_image(self.pipeline, image, scale) for image in images]

        return EncodedRows(
            embeddings,
            lambda prompt_index: prepared(rows.image_prompts[prompt_index].row_index) if rows.sources else [],
        )

    def _keys(
        self, rows: ResolvedRows, prompt_index: int, scale: float
    ) -> tuple[list[PromptKey], list[tuple[str, float]]]:
        """Return the keys of the prompt and, with true CFG, the negative prompt, and the keys of the source images."""
        row_index, prompt = rows.image_prompts[prompt_index]
        digests = () if rows.sources is None else rows.sources.digests(row_index)
        seen = (digests, scale) if self.family.prompt_sees_images and rows.sources is not None else ()
        texts = [text for text in (prompt, rows.negative_prompts[row_index]) if text is not None]
        return [PromptKey(text, *seen) for text in texts], [(digest, scale) for digest in digests]

    def _conditions(
        self, rows: ResolvedRows, row_indices: Iterable[int], scale: float
    ) -> dict[Condition, tuple[int, int]]:
        """Map each prompt and source image of some rows to its place: (row index, index of the image in the row)."""
        places: dict[Condition, tuple[int, int]] = {}
        for row_index in row_indices:
            for prompt_index in rows.prompt_indices[row_index]:
                texts, sources = self._keys(rows, prompt_index, scale)
                for key in texts:
                    places.setdefault(key, (row_index, 0))
                for image_index, image in enumerate(sources):
                    places.setdefault(image, (row_index, image_index))
        return places

    def _file(self, key: Condition) -> Path:
        return self._folder / f"{digest(repr(key))[:32]}.safetensors"

    def _read(self, key: Condition) -> bool:
        """Read a complete file of an earlier run or of another process; return whether the key is encoded now."""
        with suppress(OSError, SafetensorError):
            if self._folder is not None:
                self._encoded[key] = load_file(self._file(key))  # the file is mapped, and takes no memory
        return key in self._encoded

    def _keep(self, key: Condition, tensors: dict[str, torch.Tensor]) -> None:
        self._encoded[key] = tensors
        if self._folder is not None:
            # safetensors refuses tensors that share memory
            tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
            write_atomically(self._file(key), save(tensors))
            self._read(key)

    def _encode_prompts(self, rows: ResolvedRows, new: dict[PromptKey, int]) -> None:
        device, size = self.accelerator.device, 0
        with self._text_encoders_placed(), truncations_counted(self.pipeline) as truncations:
            for condition, row_index in tqdm(new.items(), "Encoding prompts", disable=self._is_hidden, leave=False):
                images = rows.images(row_index) if condition.images else []
                arguments = (condition.prompt, device, images, condition.scale)
                with rows.add_row_to_errors(row_index):
                    encoded = self.family.encode_prompt(self.pipeline, *arguments)
                self._keep(condition, send_to_device(encoded, "cpu"))
                size = sum(tensor.nbytes for tensor in encoded.values())
        logger.info(f"{len(new)} prompts are encoded ({size / 2**20:.1f} MiB each).")
        is_named = type(self.family).is_truncated is not Family.is_truncated
        for message, count in truncations.items():
            # `_warn_of_truncated` has named the prompts that T5 truncates
            if message not in self._reported and not (is_named and "`max_sequence_length`" in message):
                # Two encoders of a pipeline warn of the same prompt, so a count may be twice the number of prompts
                logger.warning(f"For {min(count, len(new))} of {len(new)} prompts: {message}.")
        self._reported |= truncations.keys()

    def _warn_of_truncated(self, rows: ResolvedRows) -> None:
        """Warn of the prompts of a dataset that the pipeline truncates, whichever process encodes them."""
        if self.accelerator.is_main_process:
            with truncations_counted(self.pipeline):  # tokenizers warn of each long text
                truncated = describe_truncated(self.pipeline, self.family, rows.named_prompts, rows.where)
            if truncated is not None:
                logger.warning(truncated)

    def _encode_images(self, rows: ResolvedRows, new: dict[Any, tuple[int, int]]) -> None:
        vae, device = self.pipeline.vae, self.accelerator.device
        with nullcontext() if vae.device.type == device.type else placed_on([vae], device):
            progress = tqdm(new.items(), "Encoding source images", disable=self._is_hidden, leave=False)
            for (digest, scale), (row_index, image_index) in progress:
                with rows.add_row_to_errors(row_index):
                    image = self.family.prepare_image(self.pipeline, rows.images(row_index)[image_index], scale)
                    self._keep((digest, scale), {"latents": self.encode_image(image).latents.cpu()})

    @torch.no_grad()
    def encode_image(self, image: Image.Image) -> EncodedImage:
        """Encode a prepared source image, with the VAE on the accelerator."""
        vae, device = self.pipeline.vae, self.accelerator.device
        with _untiled(vae), torch.autocast(device.type, enabled=False):  # the pipeline encodes without autocast
            pixels = self.family.image_pixels(self.pipeline, image).to(device, vae.dtype)
            return EncodedImage(image, vae.encode(pixels).latent_dist.mode().float())

    @contextmanager
    def _text_encoders_placed(self) -> Iterator[None]:
        """Put the text encoders on the accelerator, and the frozen layers of the transformer on the CPU meanwhile."""
        names, device = self.family.text_encoders, self.accelerator.device
        encoders = [module for name in names if (module := getattr(self.pipeline, name)) is not None]
        leaving = [layer for layer in self._frozen if next(layer.parameters()).device.type == device.type != "cpu"]
        if leaving:
            to_cpu(leaving, self._frozen_memory)
        try:
            with placed_on(encoders, device):
                yield
        finally:
            for layer in leaving:
                layer.to(device)


def describe_truncated(pipeline, family: Family, prompts: Sequence[tuple[str, str]], where: str) -> str | None:
    """Describe which named prompts the pipeline truncates, and which panels are lost; `None` if it truncates none."""
    is_truncated = functools.partial(family.is_truncated, pipeline)
    described = []
    for name, prompt in prompts:
        if is_truncated(prompt):
            panels = find_truncated_panels(prompt, is_truncated)
            listed = f" (panel{'s' * (len(panels) > 1)} {', '.join(map(str, panels))})" if panels else ""
            described.append(f"{name}{listed}")
    if not described:
        return None
    shown = ", ".join(described[:_SHOWN_ROWS])
    more = f" and {len(described) - _SHOWN_ROWS} more" if len(described) > _SHOWN_ROWS else ""
    return (
        f"{len(described)} of {len(prompts)} prompts of {where} are longer than {type(pipeline).__name__} reads, and "
        f"their end is ignored: {shown}{more}. Shorten them."
    )


def _frozen_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that hold no other layers, and whose weights are all frozen."""
    layers = [layer for layer in model.modules() if not [*layer.children()] and [*layer.parameters()]]
    return [layer for layer in layers if not any(weight.requires_grad for weight in layer.parameters())]


def _models_digest(pipeline, family: Family) -> str:
    """Digest everything that decides embeddings: family, text encoders, VAE, tokenizers, processors, versions."""
    parts: list[Any] = [type(pipeline).__name__, describe(family), versions()]
    for name, component in sorted(pipeline.components.items()):
        if component is not None and name in (*family.text_encoders, "vae"):
            parts.append(component_fingerprint(component))
        elif ("tokenizer" in name or "processor" in name) and component is not None:
            with tempfile.TemporaryDirectory() as folder:
                component.save_pretrained(folder)
                files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
                parts += [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return digest(parts)[:16]


@contextmanager
def _untiled(vae):
    """Switch off `vae_tiling`: it is for generated images, and a pipeline encodes source images without it."""
    is_tiled = getattr(vae, "use_tiling", False)
    if is_tiled:
        vae.disable_tiling()
    try:
        yield
    finally:
        if is_tiled:
            vae.enable_tiling()


@dataclass
class EncodedRows:
    """Embeddings by prompt index, and a cached function that returns the prepared source images of a prompt."""

    embeddings: dict[int, PromptEmbeddings]
    source_images: Callable[[int], list[Image.Image]]
