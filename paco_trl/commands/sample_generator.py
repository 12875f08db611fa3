# SPDX-License-Identifier: Apache-2.0
"""Generation of images for `paco-trl doctor`, as in training."""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, cast

import diffusers
import torch

from .. import PaCoGRPOConfig
from ..rollout import RecordedStep, SDESettings, compute_log_prob, keyed_generator
from ..rollout.encoder import EncodedRows
from ..rollout.policy import Policy, RecordingOptions
from ..rollout.prompt_rows import ResolvedRows
from ..rollout.rounds import Batch, Round
from ..rollout.sde import STREAMS
from ..utils.model_files import hub_arguments


class Generation(NamedTuple):
    """Final latents (B, ...) of images of one prompt, and the recorded stochastic steps."""

    latents: torch.Tensor
    records: list[RecordedStep]


class SampleGenerator:
    """Generates images of the first prompt with the smallest training size, by the model as training wraps it."""

    def __init__(self, policy: Policy, rows: ResolvedRows, args: PaCoGRPOConfig, is_new_adapter: bool):
        self.policy = policy
        self.rows = rows
        self.args = args
        self.pipeline, self.family = policy.pipeline, policy.family
        self.is_new_adapter = is_new_adapter
        self.height, self.width = min(self.rows.training_sizes, key=math.prod)
        self.row_index = self.rows.training_sizes.index((self.height, self.width))
        # Train mode, gradient checkpointing, autocast, DDP
        policy.model.train()
        if args.activation_checkpointing:
            policy.model.activation_checkpointing_enable()
        self.model = policy.accelerator.prepare_model(policy.model)

    def generate(self, count: int = 1, sde: SDESettings | None = None) -> Generation:
        """Generate images of the prompt, or the first one of a set, with the policy, always from the same noise."""
        samples = self._plan(count).samples[:count]

        def generate(encoded: EncodedRows) -> list[RecordedStep]:
            recording = RecordingOptions(sde)
            self.policy.generate(batch := Batch(samples), encoded, self.args.num_inference_steps, recording)
            return cast(list[RecordedStep], batch.steps)

        return self._generate(generate)

    def rollout(self) -> Round:
        """Generate and record a group of at least two completions for the row, like in a round."""
        size = self.args.round_plan.rollout_batch_size
        round = self._plan(max(size, 2))
        round.batches = [[Batch(round.samples[i : i + size]) for i in range(0, len(round.samples), size)]]
        with self.policy.on_device():
            for _ in self.policy.rollout(
                round, round.batches[0], self.args.num_inference_steps, encoded=self._encode(), is_collective=False,
                recording=RecordingOptions(self.sde_settings(self.args.noise_level)),
            ):  # fmt: skip
                pass
        return round

    def _plan(self, num_generations: int) -> Round:
        """Return a round of the row, with the noise of the first training round."""
        key = (self.args.seed, STREAMS["training"], 0)
        return Round(self.rows, [self.row_index], num_generations, key, self.rows.training_sizes)

    def generate_untouched(self) -> Generation:
        """Generate the prompt with the pipeline and its scheduler as loaded."""
        _, class_name = self.pipeline.config["scheduler"]
        scheduler_arguments = {"subfolder": "scheduler", **hub_arguments(self.args.model_init_kwargs or {})}
        scheduler = getattr(diffusers, class_name).from_pretrained(self.pipeline.name_or_path, **scheduler_arguments)

        def call_pipeline(encoded: EncodedRows) -> list[RecordedStep]:
            inputs = self.policy.inputs(encoded, [self.rows.prompt_indices[self.row_index][0]])
            images = [source.image for source in inputs.sources]
            with self.family.generation_context(self.pipeline, images):
                self.pipeline(
                    **self.family.batch_arguments(inputs.arguments),
                    **self.family.call_arguments(self.height, self.width, self.args.guidance_scale, images),
                    num_inference_steps=self.args.num_inference_steps,
                    generator=[keyed_generator(*self._plan(1).samples[0].initial_noise_key, 0)],
                )
            return []

        # Disable a new adapter, which must not change anything; an existing one is part of the pipeline
        adapter_context = self.policy.model.disable_adapter() if self.is_new_adapter else nullcontext()
        policy_scheduler = self.pipeline.scheduler
        # Bypass DiffusionPipeline.__setattr__, like the policy
        object.__setattr__(self.pipeline, "scheduler", scheduler)
        try:
            with adapter_context:
                return self._generate(call_pipeline)
        finally:
            object.__setattr__(self.pipeline, "scheduler", policy_scheduler)

    def sde_settings(self, noise_level: float) -> SDESettings:
        """Return SDE settings with all steps that may be stochastic in a round."""
        tail_steps = self.args.tail_steps if noise_level > 0 else None
        return SDESettings(tuple(sorted(self.args.sde_steps)), noise_level, self.args.sde_type, tail_steps)

    def replay(self, record: RecordedStep) -> torch.Tensor:
        """Compute the log-probability (B,) of a recorded step, with gradient, as in a training step."""
        record = record.to(self.policy.accelerator.device)  # its prompts may be in CPU memory
        sde = self.sde_settings(self.args.noise_level)
        return compute_log_prob(self.policy.predict(self.model, record), record, sde)[0]

    def _encode(self) -> EncodedRows:
        scale = self.args.resolution_scale
        return self.policy.encoder.encode(self._plan(1), [self.row_index], scale)

    def _generate(self, call: Callable[[EncodedRows], list[RecordedStep]]) -> Generation:
        """Return the output of the scheduler's last step, since 8 bits per channel of an image hide differences."""
        encoded = self._encode()
        latents = list[torch.Tensor]()
        with self.policy.on_device():
            scheduler = self.pipeline.scheduler
            step = scheduler.step

            @functools.wraps(step)  # pipelines inspect its signature for options
            def record_latents(*args, **kwargs):
                output = step(*args, **kwargs)
                latents[:] = [output[0]]
                return output

            scheduler.step = record_latents
            try:
                records = call(encoded)
            finally:
                del scheduler.step
        return Generation(latents[0].float(), records)
