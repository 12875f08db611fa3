# SPDX-License-Identifier: Apache-2.0
"""The stochastic step of flow-matching policies, its log-probability, and the pipeline's own scheduler that makes it.

Notation (variable -> paper): `sample` -> x_t, `prev_sample` -> x', `model_output` -> v(x_t, t), `sigma` -> t,
`sigma_next` -> t_next, `noise_level` -> a. Time runs from 1 (noise) to 0 (image), so that dt = t_next - t < 0.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput

from ..utils.tensors import to_device


SDE_TYPES = ("flow_sde", "dance_sde", "cps")
# Second word of a key: a number for each purpose, so that no two share a random stream
STREAMS = {"prompts": 0, "batches": 1, "sde steps": 2, "training": 3, "evaluation": 4, "other prompts": 5}


class SDEStep(NamedTuple):
    """
    One step of the sampler and its density.

    `prev_sample` is the sample after the step, newly sampled or the one that was passed, and `mean` is the mean of the
    Gaussian, both `(B, ...)` in float32. `log_prob` `(B,)` is the log-density of `prev_sample`, averaged over all
    non-batch dimensions. `std` is the standard deviation, broadcastable to `mean`. A step without noise has no
    density: its `log_prob` is `None` and its `std` 0.
    """

    prev_sample: torch.Tensor
    log_prob: torch.Tensor | None
    mean: torch.Tensor
    std: torch.Tensor


def _as_scale(value: float | torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    value = torch.as_tensor(value, dtype=torch.float32)
    if value.ndim == 0:
        return value  # a 0-d CPU tensor combines with tensors of any device
    return value.to(sample.device).view(-1, *[1] * (sample.ndim - 1))  # (B, 1, ...)


def gaussian_log_prob(value: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """
    Compute the log-density `(B,)` of a Gaussian, averaged over the non-batch dimensions (PaCo-RL, Part 3; Flow-GRPO).

    log p = mean[ -(x' - mean)^2 / (2 std^2) - log std - log sqrt(2 pi) ], `value` and `mean` `(B, ...)` in float32.

    The mean instead of the sum keeps ratios close to 1 at every resolution; clip ranges of 1e-4 rely on it.
    """
    log_prob = -((value - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return log_prob.flatten(1).mean(dim=1)  # (B,)


def sde_step(
    model_output: torch.Tensor,
    sample: torch.Tensor,
    sigma: float | torch.Tensor,
    sigma_next: float | torch.Tensor,
    noise_level: float,
    sde_type: str = "flow_sde",
    prev_sample: torch.Tensor | None = None,
    sigma_max: float | torch.Tensor | None = None,
    generator: torch.Generator | list[torch.Generator] | None = None,
) -> SDEStep:
    """
    Sample one stochastic step of a flow-matching sampler, or score a given one. All arithmetic is float32.

    With dt = t_next - t, `a` the noise level, x the sample and v the model output:

    - `"flow_sde"` ([Flow-GRPO](https://huggingface.co/papers/2505.05470), the paper's):
      s_t = a * sqrt(t / (1 - t)),
      mean = x * (1 + s_t^2 / (2 t) * dt) + v * (1 + s_t^2 * (1 - t) / (2 t)) * dt, standard deviation
      s_t * sqrt(-dt). At t = 1 the denominator uses `sigma_max` for t.
    - `"dance_sde"` ([DanceGRPO](https://huggingface.co/papers/2505.07818)): the same with a constant s_t = a.
    - `"cps"` (coefficients-preserving sampling, [Flow-CPS](https://huggingface.co/papers/2509.05952)):
      std = t_next * sin(a * pi / 2), x0 = x - t * v, x1 = x + (1 - t) * v,
      mean = (1 - t_next) * x0 + sqrt(t_next^2 - std^2) * x1. The log-probability is the log-density of this Gaussian;
      the published code of Flow-CPS leaves its variance out.

    At noise level 0 each of them is the Euler step x + v * dt.

    Args:
        model_output (`torch.Tensor` of shape `(B, ...)`):
            Velocity the scheduler receives, after guidance.
        sample (`torch.Tensor` of shape `(B, ...)`):
            Sample before the step.
        sigma (`float` or `torch.Tensor`):
            Time before the step, in (0, 1]; a tensor is 0-d or `(B,)`.
        sigma_next (`float` or `torch.Tensor`):
            Time after the step, smaller than `sigma`.
        noise_level (`float`):
            The paper's `a` (0.7 for FLUX.1-dev). 0 makes the step deterministic.
        sde_type (`str`, *optional*, defaults to `"flow_sde"`):
            Type of step, see above.
        prev_sample (`torch.Tensor` of shape `(B, ...)`, *optional*):
            Sample after the step to score. If `None`, one is sampled.
        sigma_max (`float` or `torch.Tensor`, *optional*):
            The second sigma of the schedule; needed by `"flow_sde"` at `sigma` = 1 only.
        generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
            Source of the noise; a list has one generator for each image of the batch.

    Returns:
        [`SDEStep`]: `prev_sample`, `log_prob` (`(B,)`, or `None` for a step without noise), `mean`, `std`.

    Raises:
        ValueError: unknown `sde_type`, negative `noise_level`, or `sigma` = 1 without `sigma_max`.
    """
    if sde_type not in SDE_TYPES:
        raise ValueError(f"Unknown `sde_type` {sde_type!r}: it must be one of {', '.join(map(repr, SDE_TYPES))}.")
    if noise_level < 0:
        raise ValueError(f"`noise_level` is {noise_level}: it scales a standard deviation and cannot be negative.")

    # bf16 would lose the small difference between x' and the mean, on which the ratio depends
    x = sample.float()
    v = model_output.float()
    t = _as_scale(sigma, x)
    t_next = _as_scale(sigma_next, x)
    dt = t_next - t

    if sde_type == "cps":
        std = t_next * math.sin(noise_level * math.pi / 2)
        x0 = x - t * v
        x1 = x + (1 - t) * v
        mean = (1 - t_next) * x0 + torch.sqrt(t_next**2 - std**2) * x1
    else:
        if noise_level == 0:
            scale = torch.zeros_like(t)
        elif sde_type == "flow_sde":
            if sigma_max is None and bool((t == 1).any()):
                raise ValueError(
                    "`sigma` is 1, where the noise scale a * sqrt(t / (1 - t)) is infinite. Pass `sigma_max` (the "
                    "second sigma of the schedule) for the denominator, or do not make the first step stochastic."
                )
            t_denominator = t if sigma_max is None else torch.where(t == 1, _as_scale(sigma_max, x), t)
            scale = noise_level * torch.sqrt(t / (1 - t_denominator))  # s_t
        else:
            scale = torch.full_like(t, noise_level)
        mean = x * (1 + scale**2 / (2 * t) * dt) + v * (1 + scale**2 * (1 - t) / (2 * t)) * dt
        std = scale * torch.sqrt(-dt)

    # The noise of CPS vanishes with t_next, so its last step is deterministic whatever the noise level
    is_noise_free = noise_level == 0 or (sde_type == "cps" and bool((t_next == 0).all()))
    if prev_sample is None:
        prev_sample = mean if is_noise_free else mean + std * _noise_like(mean, generator)
    else:
        prev_sample = prev_sample.float()
    log_prob = None if is_noise_free else gaussian_log_prob(prev_sample, mean, std)
    return SDEStep(prev_sample, log_prob, mean, std)


def second_order_velocity(
    velocity: torch.Tensor, x0: torch.Tensor, x0_previous: torch.Tensor, times: Sequence[float]
) -> torch.Tensor:
    """
    Return the velocity whose Euler step is a step of DPM-Solver++(2M) (https://huggingface.co/papers/2211.01095).

    With `times` t_previous, t and t_next, x0 = x - t * v, lambda = log((1 - t) / t), h = lambda_next - lambda and
    D1 = (x0 - x0_previous) * h / h_previous, the step
    x_next = (t_next / t) * x - (1 - t_next) * (exp(-h) - 1) * (x0 + D1 / 2) is the Euler step of v - D1 / (2 t). Its
    first-order version, without D1, is the Euler step of v.
    """
    previous, now, after = (math.log((1 - t) / t) for t in times)
    return velocity - (x0 - x0_previous) * (after - now) / (now - previous) / (2 * times[1])


def _noise_like(mean: torch.Tensor, generator: torch.Generator | list[torch.Generator] | None) -> torch.Tensor:
    # Noise is sampled for each image on the generator's device, so that it does not depend on device and batch
    if not isinstance(generator, list):
        device = mean.device if generator is None else generator.device
        return torch.randn(mean.shape, generator=generator, device=device, dtype=torch.float32).to(mean.device)
    if len(generator) != len(mean):  # the noise of a single generator would broadcast
        raise ValueError(f"Got {len(generator)} generators for a batch of {len(mean)} images; pass one for each.")
    noise = [torch.randn(mean.shape[1:], generator=g, device=g.device, dtype=torch.float32) for g in generator]
    return to_device(torch.stack(noise), mean.device)  # (B, ...)


def keyed_generator(*key: int) -> torch.Generator:
    """
    Return a CPU generator whose state depends only on the key: its stream is the same for every accelerator.

    The same image of the same round gets the same noise, whatever the number of processes, the order of the images or
    the step at which a run resumed.

    The key has integers from 0 to 2**32 - 1, here `(seed, stream, round, prompt index, generation, step)`: the prompt
    index is the row of the dataset, or counts the separate images of all rows; step 0 is the initial latent, step
    i + 1 the noise of denoising step i. Keys of one length that differ anywhere give independent streams. Keys of
    different lengths may not: [`numpy.random.SeedSequence`] pads short keys with zeros. The CPU generator uses 32 bits
    of a seed: of 100,000 keys about one pair shares its stream.
    """
    state = np.random.SeedSequence(key).generate_state(2, dtype=np.uint32)
    # `manual_seed` accepts any seed of 63 bits, and the generator uses the lower 32
    return torch.Generator().manual_seed((int(state[0]) << 31) | (int(state[1]) >> 1))


@dataclass(frozen=True)
class SDESettings:
    """
    Stochastic steps of the sampler.

    `steps` are their indices; all other steps are the Euler steps of the pipeline's scheduler. `noise_level` is the
    paper's `a`, and 0 makes every step deterministic. For `sde_type` see [`sde_step`]. `tail_steps` is the number of
    steps after the last stochastic one, made by DPM-Solver++(2M). If `None`, the schedule's own steps follow.
    """

    steps: tuple[int, ...]
    noise_level: float
    sde_type: str = "flow_sde"
    tail_steps: int | None = None

    @property
    def stochastic_steps(self) -> tuple[int, ...]:
        """Indices of the steps that add noise."""
        return self.steps if self.noise_level > 0 else ()

    def last_step(self, num_inference_steps: int) -> int:
        """Return the index of the last step of an image."""
        return num_inference_steps - 1 if self.tail_steps is None else max(self.steps) + self.tail_steps


def check_flow_matching(scheduler_class: type) -> None:
    """Raise a `ValueError` for a scheduler class for which the policy's step is not defined."""
    if not issubclass(scheduler_class, FlowMatchEulerDiscreteScheduler):
        raise ValueError(
            f"The pipeline's scheduler is a {scheduler_class.__name__}, which is not flow matching: the policy's step "
            "is only defined for a velocity and a straight path from noise to image. Use a pipeline whose scheduler "
            "is a FlowMatchEulerDiscreteScheduler (FLUX, Stable Diffusion 3.5, Qwen-Image ...)."
        )


# Return one generator for each image, for the step of an index
StepGenerators = Callable[[int], list[torch.Generator]]
# Called with the index of a step, the model's output, the sample before the step, and the step
OnStep = Callable[[int, torch.Tensor, torch.Tensor, SDEStep], None]


class FlowMatchSDEScheduler(FlowMatchEulerDiscreteScheduler):
    """
    [`~diffusers.FlowMatchEulerDiscreteScheduler`] that samples an SDE step at chosen indices; see [`from_scheduler`].

    Outside of [`sampling`], or with noise level 0 and no `tail_steps`, it acts as its parent. Samples keep the dtype
    of the pipeline's latents: with float32 latents the full trajectory is float32, whatever the dtype of the model.
    """

    sde: SDESettings | None = None
    _step_generators: StepGenerators | None = None
    _on_step: OnStep | None = None
    sigmas: torch.Tensor
    timesteps: torch.Tensor
    times: list[float]  # the sigmas on the host, because reading a tensor waits for the device
    _tail_start: float = math.inf  # index of the first step of a short tail
    _x0: torch.Tensor | None = None  # image that the tail's last velocity points to

    @classmethod
    def from_scheduler(cls, scheduler) -> "FlowMatchSDEScheduler":
        """Build it with the settings of a pipeline's scheduler. Raise a `ValueError` if that makes other steps."""
        check_flow_matching(type(scheduler))
        if not isinstance(scheduler, cls) and type(scheduler).step is not FlowMatchEulerDiscreteScheduler.step:
            raise ValueError(
                f"The pipeline's scheduler {type(scheduler).__name__} replaces the Euler step, so its steps without "
                "noise would differ from the trained ones. Set `pipeline.scheduler = "
                "FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config)` first."
            )
        for option in ("stochastic_sampling", "invert_sigmas"):
            if scheduler.config.get(option):
                raise ValueError(
                    f"The pipeline's scheduler has `{option}=True`, so its steps are not those from noise to image "
                    f"that SDE steps replace. Load it with `{option}=False`."
                )
        new = cls.from_config(scheduler.config)
        new.set_shift(scheduler.shift)  # a pipeline may set the shift after construction
        return new

    @contextmanager
    def sampling(
        self,
        sde: SDESettings | None,
        step_generators: StepGenerators | None = None,
        on_step: OnStep | None = None,
    ) -> Iterator[None]:
        """
        Sample stochastic steps within the context.

        Args:
            sde ([`SDESettings`] or `None`):
                Stochastic steps. With `None`, all steps are made by the parent.
            step_generators (`Callable[[int], list[torch.Generator]]`, *optional*):
                Returns the generators of a stochastic step, one for each image. If `None`, the pipeline's generator is
                used.
            on_step (`Callable`, *optional*):
                Called after each step with its index, the model's output, the sample before it, and the [`SDEStep`].
        """
        self.sde, self._step_generators, self._on_step = sde, step_generators, on_step
        try:
            yield
        finally:
            self.sde = self._step_generators = self._on_step = None

    @functools.wraps(FlowMatchEulerDiscreteScheduler.set_timesteps)  # pipelines look for `sigmas` in its signature
    def set_timesteps(self, num_inference_steps=None, device=None, *args, **kwargs) -> None:
        """Set the timesteps, shorten the tail, and store the sigmas as floats so that a step needs no device sync."""
        super().set_timesteps(num_inference_steps, "cpu", *args, **kwargs)
        self._tail_start, self._x0 = math.inf, None
        if self.sde is not None and self.sde.tail_steps is not None:
            # The tail has evenly spaced indices of the schedule. Sigmas between two steps are interpolated.
            self._tail_start = start = max(self.sde.steps) + 1
            indices = np.linspace(start, len(self.timesteps), self.sde.tail_steps + 1)
            tail = np.interp(indices, np.arange(len(self.sigmas)), self.sigmas.tolist())
            tail = torch.from_numpy(tail).to(self.sigmas)
            self.sigmas = torch.cat([self.sigmas[:start], tail])
            tail = tail[:-1] * self.config.num_train_timesteps
            self.timesteps = torch.cat([self.timesteps[:start], tail.to(self.timesteps)])
        self.times = self.sigmas.tolist()
        self.sigmas, self.timesteps = (to_device(times, device or "cpu") for times in (self.sigmas, self.timesteps))

    @property
    def next_step_index(self) -> int:
        """Return the index of the next step, for which the transformer is being called."""
        return self.step_index if self.step_index is not None else self.begin_index or 0

    def step(self, model_output, timestep, sample, *, return_dict=True, **kwargs):
        """Make one step, stochastic at `sde.steps` and by the parent elsewhere. Return the same type as the parent."""
        if self.step_index is None:
            self._init_step_index(timestep)
        index = self.step_index

        if self.sde is None or index not in self.sde.stochastic_steps:
            # Float32 in, so that the parent does not round the sample to a low-precision model's dtype
            velocity = model_output.float()
            if index >= self._tail_start:
                velocity = self._second_order(velocity, sample, index)
            output = super().step(velocity, timestep, sample, return_dict=return_dict, **kwargs)
            if self._on_step is not None:
                self._on_step(index, model_output, sample, SDEStep(output[0], None, output[0], torch.zeros(())))
            if return_dict:
                output.prev_sample = output.prev_sample.to(sample.dtype)
                return output
            return (output[0].to(sample.dtype), *output[1:])

        settings = (self.times[index], self.times[index + 1], self.sde.noise_level, self.sde.sde_type)
        step = functools.partial(sde_step, model_output, sample, *settings, sigma_max=self.times[1])
        sampled = step(generator=self._step_generators(index) if self._step_generators else kwargs.get("generator"))
        prev_sample = sampled.prev_sample.to(sample.dtype)
        if sample.dtype != torch.float32:
            # Score the sample as it is stored, rounded to its dtype
            sampled = step(prev_sample=prev_sample)
        if self._on_step is not None:
            self._on_step(index, model_output, sample, sampled)
        self._step_index += 1
        if not return_dict:
            return (prev_sample,)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=prev_sample)

    def _second_order(self, velocity: torch.Tensor, sample: torch.Tensor, index: int) -> torch.Tensor:
        """Return the velocity of a step of the short tail, by DPM-Solver++(2M)."""
        x0_previous = self._x0
        times = self.times[index - 1 : index + 2]
        self._x0 = sample.float() - times[1] * velocity
        if x0_previous is None or times[2] == 0:  # the first and the last step of the tail are of first order
            return velocity
        return second_order_velocity(velocity, self._x0, x0_previous, times)
