# SPDX-License-Identifier: Apache-2.0
"""Generate images of a dataset's rows with a policy."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from PIL import Image

from ..utils.devices import to_device
from .policy import EncodedImage, PipelinePolicy, RecordedStep, share_tensors
from .prompt_encoder import PromptEmbeddings, PromptEncoder, placed
from .prompt_rows import PromptRows


class FetchedRows:
    """Rows of a dataset, read and prepared once each, with their embeddings."""

    def __init__(
        self, rows: PromptRows, encoded: dict[int, PromptEmbeddings], prepare: Callable[[Image.Image], Image.Image]
    ):
        self.rows = rows
        self.encoded = encoded
        read = functools.lru_cache(8)(rows.row)  # decodes source images, which may be large
        self.read = read
        # Not `self.read`: a reference cycle would keep embeddings on the accelerator until garbage collection
        self.source_images = functools.cache(lambda number: [prepare(image) for image in rows.images_in(read(number))])


class RolloutSampler:
    """Generate images of rows; each prompt and source image is encoded once. `placed` puts the weights in place."""

    def __init__(
        self,
        policy: PipelinePolicy,
        prompt_encoder: PromptEncoder,
        accelerator: Accelerator,
        guidance_scale: float,
        offload_embeddings: bool = False,
        placed: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.policy = policy
        self.prompt_encoder = prompt_encoder
        self.accelerator = accelerator
        self.guidance_scale = guidance_scale
        self.offload_embeddings = offload_embeddings
        self.placed = placed

    @property
    def size_multiple(self) -> int:
        """Return the number of pixels that heights and widths must be multiples of."""
        return self.policy.family.size_multiple(self.policy.pipeline)

    def encode(self, rows: PromptRows, numbers: list[int], scale: float = 1.0) -> None:
        """Encode what is new in some rows. Every process calls it with the same numbers."""
        self.prompt_encoder.encode(rows, numbers, scale)

    def fetch(self, rows: PromptRows, numbers: list[int], scale: float = 1.0) -> FetchedRows:
        """Return some encoded rows with their embeddings."""
        family, pipeline = self.policy.family, self.policy.pipeline
        return FetchedRows(
            rows,
            self.prompt_encoder.fetch(rows, numbers, scale),
            lambda image: family.prepare_image(pipeline, image, scale),
        )

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Move the VAE and the weights to the accelerator, and enable autocast."""
        # Autocast as in the training step: Trainer adds it to the model only when training begins
        with placed([self.policy.pipeline.vae], self.accelerator.device), self.placed(), self.accelerator.autocast():
            yield

    def inputs(
        self, fetched: FetchedRows, numbers: list[int]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[EncodedImage]]:
        """Return a micro-batch's prompts on the accelerator, the stored tensors behind them, and its source images."""
        device = self.accelerator.device
        encoded = [fetched.encoded[number] for number in numbers]
        embeddings = [each.place("cpu" if self.offload_embeddings else device) for each in encoded]
        if all(each is encoded[0] for each in encoded):
            kept = {name: tensor.expand(len(encoded), *tensor.shape[1:]) for name, tensor in embeddings[0].items()}
        else:
            kept = {name: torch.cat([each[name] for each in embeddings]) for name in embeddings[0]}  # (B, ...)
        latents = [to_device(each, device) for each in encoded[0].image_latents]
        images = fetched.source_images(numbers[0])
        sources = [EncodedImage(image, each) for image, each in zip(images, latents, strict=True)]
        return {name: to_device(tensor, device) for name, tensor in kept.items()}, kept, sources

    def generate(
        self,
        fetched: FetchedRows,
        numbers: list[int],
        noise_keys: list[tuple[int, ...]],
        size: tuple[int, int],
        num_inference_steps: int,
        finish: Callable[[list[RecordedStep]], list] | None = None,
        **recording,
    ) -> tuple[list[Image.Image], list]:
        """Generate a micro-batch within `ready`; `finish` gets its steps while prompts are on the accelerator."""
        arguments, kept, sources = self.inputs(fetched, numbers)
        images, records = self.policy.generate(
            arguments, *size, num_inference_steps, self.guidance_scale, noise_keys, sources=sources, **recording
        )
        if finish is not None:
            records = finish(records)
        if self.offload_embeddings:
            records = share_tensors(records, arguments, kept)
        return images, records
