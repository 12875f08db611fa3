# SPDX-License-Identifier: Apache-2.0
"""The pipeline's own flow-matching scheduler with stochastic steps at chosen indices."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput

from ..utils.devices import to_device
from .sde import SDEStep, sde_step, second_order_velocity


@dataclass(frozen=True)
class SDESettings:
    """
    Stochastic steps of the sampler.

    `steps` are their indices; the others are the Euler steps of the pipeline's scheduler. `noise_level` is the paper's
    `a`, and 0 makes every step deterministic. For `sde_type` see [`sde_step`]. `branch_size` consecutive images
    of a batch share the initial noise and the steps before the first stochastic one. `tail_steps` is the number of
    steps after the last stochastic one, by DPM-Solver++(2M), by default those of the schedule.
    """

    steps: tuple[int, ...]
    noise_level: float
    sde_type: str = "flow_sde"
    branch_size: int = 1
    tail_steps: int | None = None

    def num_steps(self, num_inference_steps: int) -> int:
        """Return the number of denoising steps in place of a full schedule's."""
        return num_inference_steps if self.tail_steps is None else max(self.steps) + 1 + self.tail_steps


def check_flow_matching(scheduler_class: type) -> None:
    """
    Check that a scheduler class is one for which the policy's step is defined.

    Raises:
        ValueError: it is not the flow-matching Euler scheduler.
    """
    if not issubclass(scheduler_class, FlowMatchEulerDiscreteScheduler):
        raise ValueError(
            f"The pipeline's scheduler is a {scheduler_class.__name__}, which is not flow matching: the policy's step "
            "is only defined for a velocity and a straight path from noise to image. Use a pipeline whose scheduler is "
            "a FlowMatchEulerDiscreteScheduler (FLUX, Stable Diffusion 3.5, Qwen-Image ...)."
        )


class FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler):
    """
    [`~diffusers.FlowMatchEulerDiscreteScheduler`] that samples an SDE step at chosen indices.

    Without `sde`, or with noise level 0 and no `tail_steps`, it acts as its parent. Samples keep the dtype of the pipeline's latents: with
    float32 latents the full trajectory is float32, whatever the dtype of the model.

    Build it with [`FlowMatchSDEScheduler.from_scheduler`].
    """

    sde: SDESettings | None = None
    # One generator for each image, as a function of the step index
    step_generators: Callable[[int], list[torch.Generator]] | None = None
    # Called after each step with (index, model_output, sample, step); one of the ODE has only `prev_sample`, float32
    on_step: Callable[[int, torch.Tensor, torch.Tensor, SDEStep], None] | None = None
    sigmas: torch.Tensor
    timesteps: torch.Tensor
    _tail_start: float = math.inf  # index of the first step of a short tail
    _x0: torch.Tensor | None = None  # image that the tail's last velocity points to

    @classmethod
    def from_scheduler(cls, scheduler) -> "FlowMatchSDEScheduler":
        """
        Build the scheduler with the settings of a pipeline's scheduler.

        Raises:
            ValueError: the scheduler is not the flow-matching Euler scheduler, or has another step.
        """
        name = type(scheduler).__name__
        check_flow_matching(type(scheduler))
        if not isinstance(scheduler, cls) and type(scheduler).step is not FlowMatchEulerDiscreteScheduler.step:
            raise ValueError(
                f"The pipeline's scheduler {name} replaces the Euler step of FlowMatchEulerDiscreteScheduler, so its "
                "steps without noise would differ from the trained ones. Set `pipeline.scheduler = "
                "FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config)` first."
            )
        for option in ("stochastic_sampling", "invert_sigmas"):
            if scheduler.config.get(option):
                raise ValueError(
                    f"The pipeline's scheduler has `{option}=True`, so its steps are not the Euler steps from "
                    f"noise to image that SDE steps replace. Load it with `{option}=False`."
                )
        new = cls.from_config(scheduler.config)
        new.set_shift(scheduler.shift)  # may have been set after construction
        return new

    @functools.wraps(FlowMatchEulerDiscreteScheduler.set_timesteps)  # pipelines look for `sigmas` in its signature
    def set_timesteps(self, num_inference_steps=None, device=None, *args, **kwargs) -> None:
        """Set the timesteps, shorten the tail, and store the sigmas as floats so that a step needs no device sync."""
        super().set_timesteps(num_inference_steps, "cpu", *args, **kwargs)
        self._tail_start, self._x0 = math.inf, None
        if self.sde is not None and self.sde.tail_steps is not None:
            # At evenly spaced indices of the schedule, between which its sigmas are interpolated
            self._tail_start = start = max(self.sde.steps) + 1
            indices = np.linspace(start, len(self.timesteps), self.sde.tail_steps + 1)
            tail = np.interp(indices, np.arange(len(self.sigmas)), self.sigmas.tolist())
            tail = torch.from_numpy(tail).to(self.sigmas)
            self.sigmas = torch.cat([self.sigmas[:start], tail])
            tail = tail[:-1] * self.config.num_train_timesteps
            self.timesteps = torch.cat([self.timesteps[:start], tail.to(self.timesteps)])
        self._sigma_values: list[float] = self.sigmas.tolist()
        self.sigmas, self.timesteps = (to_device(each, device or "cpu") for each in (self.sigmas, self.timesteps))

    @property
    def next_step_index(self) -> int:
        """Return the index of the next step, for which the transformer is being called."""
        if self.step_index is not None:
            return self.step_index
        return self.begin_index or 0

    def sigmas_of(self, index: int) -> tuple[float, float, float]:
        """Return `(sigma, sigma_next, sigma_max)` of a step; `sigma_max` is the second sigma of the schedule."""
        return self._sigma_values[index], self._sigma_values[index + 1], self._sigma_values[1]

    def step(self, model_output, timestep, sample, *, return_dict=True, **kwargs):
        """Make one step: stochastic at `sde.steps`, the parent's elsewhere. Return what the parent does."""
        if self.step_index is None:
            self._init_step_index(timestep)
        index = self.step_index

        if self.sde is None or self.sde.noise_level == 0 or index not in self.sde.steps:
            # Float32 in, so that the parent does not round the sample to a low-precision model's dtype
            velocity = model_output.float()
            if index >= self._tail_start:
                velocity = self._second_order(velocity, sample, index)
            output = super().step(velocity, timestep, sample, return_dict=return_dict, **kwargs)
            if self.on_step is not None:
                self.on_step(index, model_output, sample, SDEStep(output[0], None, None, None))
            if return_dict:
                output.prev_sample = output.prev_sample.to(sample.dtype)
                return output
            return (output[0].to(sample.dtype), *output[1:])

        sigma, sigma_next, sigma_max = self.sigmas_of(index)
        settings = (sigma, sigma_next, self.sde.noise_level, self.sde.sde_type)
        step = functools.partial(sde_step, model_output, sample, *settings, sigma_max=sigma_max)
        sampled = step(generator=self.step_generators(index) if self.step_generators else kwargs.get("generator"))
        prev_sample = sampled.prev_sample.to(sample.dtype)
        if sample.dtype != torch.float32:
            # The stored sample is scored, after its round trip through the dtype
            sampled = step(prev_sample=prev_sample)
        if self.on_step is not None:
            self.on_step(index, model_output, sample, sampled)
        self._step_index += 1
        if not return_dict:
            return (prev_sample,)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=prev_sample)

    def _second_order(self, velocity: torch.Tensor, sample: torch.Tensor, index: int) -> torch.Tensor:
        """Return the velocity of a step of the short tail, by DPM-Solver++(2M)."""
        x0_previous, times = self._x0, self._sigma_values[index - 1 : index + 2]
        self._x0 = sample.float() - times[1] * velocity
        if x0_previous is None or times[2] == 0:  # the first and the last step of the tail are of first order
            return velocity
        return second_order_velocity(velocity, self._x0, x0_previous, times)
