# SPDX-License-Identifier: Apache-2.0
"""The images that `paco-trl doctor` draws, as training draws them."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import diffusers
import torch
from peft import PeftModel
from PIL import Image
from torch import nn

from .. import PaCoGRPOTrainer
from ..rollout import EncodedImage, RecordedStep, SDESettings, replay
from ..rollout.noise import keyed_generator
from ..rollout.prompt_encoder import Encoded


class Drawing(NamedTuple):
    """Images of one prompt, their last latents (B, ...), and the recorded stochastic steps."""

    images: list[Image.Image]
    latents: torch.Tensor
    records: list[RecordedStep]


class Studio:
    """
    The trainer, ready to draw one of its prompts as in training.

    The prompt is the first one of the smallest training size.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer, before training.
    """

    def __init__(self, trainer: PaCoGRPOTrainer):
        self.trainer, self.args, self.pipeline = trainer, trainer.args, trainer.pipeline
        self.rows = trainer.train_rows
        self.sizes = Counter(self.rows.training_sizes)
        self.height, self.width = min(self.sizes, key=math.prod)
        self.number = self.rows.training_sizes.index((self.height, self.width))
        self.row = self.rows.row(self.number)

    def prepare(self) -> None:
        """Wraps the model as training does: train mode, checkpointing, autocast, DDP."""
        self.trainer.model.train()
        if self.args.activation_checkpointing:
            self.trainer.model.activation_checkpointing_enable()
        self.model = self.trainer.accelerator.prepare_model(self.trainer.model)

    def encode(self) -> Encoded:
        """Encodes the prompt and its source images, the first time."""
        scale = self.args.resolution_scale
        self.trainer.prompt_encoder.encode(self.rows, [self.number], scale)
        return self.trainer.prompt_encoder.fetch(self.rows, [self.number], scale)[self.number]

    def draw(self, count: int = 1, sde: SDESettings | None = None) -> Drawing:
        """Draws images of the prompt with the policy."""

        def with_policy(
            prompt_arguments: dict, sources: list[EncodedImage], noise_keys: list
        ) -> tuple[list[Image.Image], list[RecordedStep]]:
            return self.trainer.policy.draw(
                prompt_arguments,
                self.height,
                self.width,
                self.args.num_inference_steps,
                self.args.guidance_scale,
                noise_keys,
                sde,
                sources=sources,
            )

        return self._draw(count, with_policy)

    def draw_untouched(self) -> Drawing:
        """
        Draws the prompt with the pipeline as it was loaded, with its own scheduler.

        A new adapter is switched off, as it must change nothing. One that exists is a part of what is drawn, and so
        are weights that are trained themselves.
        """
        _, class_name = self.pipeline.config["scheduler"]
        where = {
            name: value
            for name, value in (self.args.model_init_kwargs or {}).items()
            if name in ("revision", "cache_dir", "token")
        }
        own = getattr(diffusers, class_name).from_pretrained(
            self.pipeline.name_or_path, subfolder="scheduler", **where
        )

        def with_own_scheduler(
            prompt_arguments: dict, sources: list[EncodedImage], noise_keys: list
        ) -> tuple[list[Image.Image], list]:
            family, images = self.trainer.family, [source.image for source in sources]
            with family.drawing(self.pipeline, images):
                drawn = self.pipeline(
                    **family.batch_arguments(prompt_arguments),
                    **family.call_arguments(self.height, self.width, self.args.guidance_scale, images),
                    num_inference_steps=self.args.num_inference_steps,
                    generator=[keyed_generator(*key, 0) for key in noise_keys],
                ).images
            return drawn, []

        is_new_adapter = isinstance(self.trainer.model, PeftModel) and self.trainer.trained_from is None
        adapter_off = self.trainer.model.disable_adapter() if is_new_adapter else nullcontext()
        with self._component("scheduler", own), adapter_off:
            return self._draw(1, with_own_scheduler)

    def draw_with(self, transformer: nn.Module) -> Drawing:
        """Draws the prompt with another transformer."""
        with self._component("transformer", transformer):
            return self.draw()

    def sde_settings(self, noise_level: float) -> SDESettings:
        """All steps that may be stochastic in a round."""
        return SDESettings(tuple(sorted(self.args.sde_steps)), noise_level, self.args.sde_type)

    def replay(self, record: RecordedStep) -> torch.Tensor:
        """Log-probability of a recorded step, with gradient, as in the training step."""
        sde = self.sde_settings(self.args.noise_level)
        with self.trainer.compute_loss_context_manager():
            log_prob, _, _ = replay(self.model, record, self.trainer.family, self.args.guidance_scale, sde)
        return log_prob  # (B,)

    def _draw(self, count: int, call: Callable) -> Drawing:
        # The same noise in every drawing; generations beyond the first are further images of the group
        noise_keys = [(self.args.seed, generation) for generation in range(count)]
        encoded = self.encode()
        # What is not public: arguments as in training, the VAE on the device, and the autocast of training
        prompt_arguments, _ = self.trainer._prompt_arguments([encoded] * count)  # (B, ...)
        sources = self.trainer._encoded_images(
            self.trainer._prepare_images(self.rows.images_in(self.row), self.args.resolution_scale), encoded
        )
        with self.trainer._rollout_components(), _last_sample(self.pipeline.scheduler) as samples:
            images, records = call(prompt_arguments, sources, noise_keys)
        return Drawing(images, samples[0].float(), records)

    @contextmanager
    def _component(self, name: str, component) -> Iterator[None]:
        # Past DiffusionPipeline.__setattr__, as the policy does it
        replaced = getattr(self.pipeline, name)
        object.__setattr__(self.pipeline, name, component)
        try:
            yield
        finally:
            object.__setattr__(self.pipeline, name, replaced)


@contextmanager
def _last_sample(scheduler) -> Iterator[list[torch.Tensor]]:
    """Keeps what the last step of the scheduler returned: a picture has 8 bits a channel, which hide differences."""
    samples = []
    step = scheduler.step

    @functools.wraps(step)  # pipelines look for options in its signature
    def keeping(*args, **kwargs):
        output = step(*args, **kwargs)
        samples[:] = [output[0]]
        return output

    scheduler.step = keeping
    try:
        yield samples
    finally:
        del scheduler.step
