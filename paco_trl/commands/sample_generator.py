# SPDX-License-Identifier: Apache-2.0
"""Images that `paco-trl doctor` generates, as training generates them."""

import functools
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import diffusers
import torch
from PIL import Image

from .. import PaCoGRPOConfig
from ..rollout import RecordedStep, SDESettings, keyed_generator, replay
from ..rollout.prompt_rows import Completions, PromptRows
from ..rollout.sampler import EncodedRows, RolloutSampler
from ..rollout.sde import STREAMS
from ..utils.files import hub_arguments


class Generation(NamedTuple):
    """The last latents (B, ...) of images of one prompt, and the recorded stochastic steps."""

    latents: torch.Tensor
    records: list[RecordedStep]


class SampleGenerator:
    """Generator of the first prompt of the smallest training size, as in training."""

    def __init__(self, sampler: RolloutSampler, rows: PromptRows, args: PaCoGRPOConfig, is_new_adapter: bool):
        self.sampler, self.rows, self.args = sampler, rows, args
        self.policy, self.pipeline, self.family = sampler.policy, sampler.policy.pipeline, sampler.policy.family
        self.is_new_adapter = is_new_adapter
        self.sizes = Counter(self.rows.training_sizes)
        self.height, self.width = min(self.sizes, key=math.prod)
        self.number = self.rows.training_sizes.index((self.height, self.width))
        self.row = self.rows.row(self.number)

    def prepare(self) -> None:
        """Wrap the model as training does: train mode, checkpointing, autocast, DDP."""
        self.policy.model.train()
        if self.args.activation_checkpointing:
            self.policy.model.activation_checkpointing_enable()
        self.model = self.sampler.accelerator.prepare_model(self.policy.model)

    def generate(self, count: int = 1, sde: SDESettings | None = None) -> Generation:
        """Generate images of the prompt, of a set's first one, with the policy, from the same noise each time."""
        keys: list[tuple[int, ...]] = [(self.args.seed, image) for image in range(count)]
        calls, size = [self.rows.calls_of[self.number][0]] * count, (self.height, self.width)
        steps = self.args.num_inference_steps
        return self._generate(lambda fetched: self.sampler.generate(fetched, calls, keys, size, steps, sde=sde)[1])

    def rollout(self) -> tuple[list[Image.Image], list[RecordedStep]]:
        """Generate a group of two or more for the row, with all panels of a set, and record it as a round does."""
        size = self.args.round_plan.rollout_batch_size
        completions = Completions(self.rows, [self.number], max(size, 2))
        images = range(len(completions.calls) * completions.num_generations)
        with self.sampler.ready():
            generated = [*self.sampler.rollout(
                completions, [[*images[first : first + size]] for first in images[::size]],
                (self.args.seed, STREAMS["training"], 0), self.rows.training_sizes, self.args.num_inference_steps,
                fetched=self._fetch(), is_collective=False, sde=self.sde_settings(self.args.noise_level),
            )]  # fmt: skip
        return [image for each in generated for image in each.images], [r for each in generated for r in each.records]

    def generate_untouched(self) -> Generation:
        """Generate the prompt with the pipeline as it was loaded, with its own scheduler."""
        _, class_name = self.pipeline.config["scheduler"]
        where = {"subfolder": "scheduler", **hub_arguments(self.args.model_init_kwargs or {})}
        own = getattr(diffusers, class_name).from_pretrained(self.pipeline.name_or_path, **where)

        def with_own_scheduler(fetched: EncodedRows) -> list[RecordedStep]:
            arguments, _, sources = self.sampler.inputs(fetched, [self.rows.calls_of[self.number][0]])
            images = [source.image for source in sources]
            with self.family.generation_context(self.pipeline, images):
                self.pipeline(
                    **self.family.batch_arguments(arguments),
                    **self.family.call_arguments(self.height, self.width, self.args.guidance_scale, images),
                    num_inference_steps=self.args.num_inference_steps,
                    generator=[keyed_generator(self.args.seed, 0, 0)],
                )
            return []

        # A new adapter is switched off, as it must change nothing; an existing one is part of the pipeline
        adapter_off = self.policy.model.disable_adapter() if self.is_new_adapter else nullcontext()
        replaced = self.pipeline.scheduler
        object.__setattr__(
            self.pipeline, "scheduler", own
        )  # past DiffusionPipeline.__setattr__, as the policy does it
        try:
            with adapter_off:
                return self._generate(with_own_scheduler)
        finally:
            object.__setattr__(self.pipeline, "scheduler", replaced)

    def sde_settings(self, noise_level: float) -> SDESettings:
        """Return the settings with all steps that may be stochastic in a round."""
        tail_steps = self.args.tail_steps if noise_level > 0 else None
        return SDESettings(tuple(sorted(self.args.sde_steps)), noise_level, self.args.sde_type, tail_steps)

    def replay(self, record: RecordedStep) -> torch.Tensor:
        """Compute the log-probability of a recorded step (B,), with gradient, as in the training step."""
        record = record.to(self.sampler.accelerator.device)  # its prompts may wait in CPU memory
        sde = self.sde_settings(self.args.noise_level)
        return replay(self.model, record, self.family, self.args.guidance_scale, sde)[0]

    def _fetch(self) -> EncodedRows:
        scale = self.args.resolution_scale
        self.sampler.prompt_encoder.encode(self.rows, [self.number], scale)
        return self.sampler.prompt_encoder.fetch(self.rows, [self.number], scale)

    def _generate(self, call: Callable[[EncodedRows], list[RecordedStep]]) -> Generation:
        """Keep what the last step of the scheduler returns: the 8 bits per channel of an image hide differences."""
        fetched, latents = self._fetch(), list[torch.Tensor]()
        with self.sampler.ready():
            scheduler = self.pipeline.scheduler
            step = scheduler.step

            @functools.wraps(step)  # pipelines look for options in its signature
            def keeping(*args, **kwargs):
                output = step(*args, **kwargs)
                latents[:] = [output[0]]
                return output

            scheduler.step = keeping
            try:
                records = call(fetched)
            finally:
                del scheduler.step
        return Generation(latents[0].float(), records)
