# SPDX-License-Identifier: Apache-2.0
"""The user's diffusers pipeline as a policy: draw images and record what is needed to score the same steps again.

Nothing of the pipeline is rewritten. Its scheduler is replaced by a subclass that draws the stochastic steps, and
hooks on its transformer record the calls made at those steps; replaying them through the trained model gives the new
log-probability of the very same samples.
"""

import inspect
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from accelerate.utils import recursively_apply, send_to_device
from PIL import Image
from torch import nn

from .families import Family
from .noise import keyed_generator
from .scheduler import FlowMatchSDEScheduler, SDESettings
from .sde import SDEStep, sde_step, step_std


@dataclass
class RecordedStep:
    """
    One stochastic step of a batch of images: what went in, what came out, and how probable it was.

    Attributes:
        index (`int`):
            Index of the step in the schedule.
        sigma (`float`), sigma_next (`float`), sigma_max (`float`):
            Times before and after the step, and the second sigma of the schedule.
        sample (`torch.Tensor` of shape `(B, ...)`), prev_sample (`torch.Tensor` of shape `(B, ...)`):
            Latents before and after the step, float32.
        log_prob (`torch.Tensor` of shape `(B,)`):
            Log-probability of `prev_sample` under the policy that drew it. `None` for a step without noise.
        calls (`list[dict]`):
            Arguments, by name, of each call of the transformer in this step.
        mean (`torch.Tensor` of shape `(B, ...)`, *optional*):
            Mean of the step under the policy that drew it, float32, where it was asked for.
    """

    index: int
    sigma: float
    sigma_next: float
    sigma_max: float
    sample: torch.Tensor
    prev_sample: torch.Tensor
    log_prob: torch.Tensor | None
    calls: list[dict[str, Any]]
    mean: torch.Tensor | None = None

    def to(self, device: torch.device) -> "RecordedStep":
        """
        The step with all arguments of its calls on a device.

        Args:
            device (`torch.device`):
                Device.

        Returns:
            [`RecordedStep`].
        """
        return replace(self, calls=send_to_device(self.calls, device))

    def offloaded(self, arguments: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> "RecordedStep":
        """
        The step with copies that are kept elsewhere in place of the prompt's embeddings.

        Args:
            arguments (`dict[str, torch.Tensor]`):
                Arguments that the pipeline was called with, from whose memory calls may have taken theirs.
            kept (`dict[str, torch.Tensor]`):
                The same values in CPU memory.

        Returns:
            [`RecordedStep`]: arguments that the pipeline has computed itself stay where they are.
        """

        pairs = [
            pair
            for name, argument in arguments.items()
            for pair in zip(_views(argument), _views(kept[name]), strict=True)
        ]

        def swap(tensor: torch.Tensor) -> torch.Tensor:
            for argument, copy in pairs:
                is_same = tensor.data_ptr() == argument.data_ptr() and tensor.shape == argument.shape
                if is_same and tensor.stride() == argument.stride() and tensor.dtype == argument.dtype:
                    return copy
            return tensor

        return replace(self, calls=recursively_apply(swap, self.calls))


@dataclass(frozen=True)
class EncodedImage:
    """
    A source image, encoded.

    Attributes:
        image (`PIL.Image.Image`):
            From [`Family.prepare_image`].
        latents (`torch.Tensor` of shape `(1, ...)`):
            What the pipeline's VAE makes of it.
    """

    image: Image.Image
    latents: torch.Tensor


class PipelinePolicy:
    """
    Draws images with an unmodified diffusers pipeline and replays its stochastic steps.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Flow-matching pipeline. Its `scheduler` is replaced by a [`FlowMatchSDEScheduler`] with the same settings,
            its `transformer` by `model`.
        family ([`Family`]):
            Page of the pipeline's family.
        model (`nn.Module`):
            Transformer with the adapter; the pipeline calls this very object, so that what is trained is what draws.
        forward_signature ([`inspect.Signature`]):
            Signature of the transformer's own `forward` (the adapter's wrapper takes anything).

    Raises:
        TypeError: the pipeline's call does not take an argument that the family's page gives it.
        ValueError: the scheduler is not flow matching.
    """

    def __init__(self, pipeline, family: Family, model: nn.Module, forward_signature: inspect.Signature):
        self.pipeline = pipeline
        self.family = family
        self.scheduler = FlowMatchSDEScheduler.from_scheduler(pipeline.scheduler)
        # Past DiffusionPipeline.__setattr__, which would write these classes into the pipeline's config: what the user
        # saves from the pipeline later must load without this package
        object.__setattr__(pipeline, "scheduler", self.scheduler)
        object.__setattr__(pipeline, "transformer", model)
        pipeline.set_progress_bar_config(disable=True)
        # Before anything is encoded or drawn
        images = [Image.new("RGB", (64, 64))] * min(family.max_images, 1)
        check_arguments(
            type(pipeline).__call__,
            family.call_arguments(64, 64, 1.0, images) | dict.fromkeys(("num_inference_steps", "generator")),
            type(pipeline).__name__,
        )
        self.model = model
        self._signature = forward_signature
        self._recording = False
        self._calls: list[dict[str, Any]] = []
        self._outputs: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._record_call, with_kwargs=True)
        model.register_forward_hook(self._record_output)
        decoder = getattr(pipeline.vae, "decoder", None)
        if decoder is not None:
            decoder.register_forward_hook(_check_pixels)

    def draw(
        self,
        prompt_arguments: dict[str, torch.Tensor],
        height: int,
        width: int,
        num_inference_steps: int,
        guidance_scale: float,
        noise_keys: list[tuple[int, ...]],
        sde: SDESettings | None = None,
        record_mean: bool = False,
        record_last_step: bool = False,
        sources: list[EncodedImage] = (),
    ) -> tuple[list[Image.Image], list[RecordedStep]]:
        """
        Draws a batch of images.

        Args:
            prompt_arguments (`dict[str, torch.Tensor]`):
                Encoded prompts, as arguments of the pipeline's call, batch dimension B.
            height (`int`), width (`int`):
                Size in pixels.
            num_inference_steps (`int`):
                Number of denoising steps.
            guidance_scale (`float`):
                Guidance scale of the family's rule.
            noise_keys (`list[tuple[int, ...]]`):
                For each image, the integers that its noise is a function of.
            sde ([`SDESettings`], *optional*):
                Stochastic steps. Without it the images are drawn by the pipeline's own ODE and nothing is recorded.
            record_mean (`bool`, *optional*, defaults to `False`):
                Whether the means of the stochastic steps are recorded too, which costs a latent each.
            record_last_step (`bool`, *optional*, defaults to `False`):
                Whether the last step, which has no noise, is recorded too: its `prev_sample` is the images' latents.
            sources (`list[EncodedImage]`, *optional*):
                Source images, the same for all images of the batch.

        Returns:
            `tuple[list[PIL.Image.Image], list[RecordedStep]]`: the images, and the recorded steps in order.

        Raises:
            TypeError: the pipeline's call does not take an argument that the family's page gives it.
            RuntimeError: the family's guidance rule does not give what the scheduler received, a stochastic step was
                not reached, the pipeline encoded other images than `sources`, or an image is not finite or has another
                size.
        """
        records: list[RecordedStep] = []

        def on_sde_step(index: int, model_output: torch.Tensor, sample: torch.Tensor, step: SDEStep) -> None:
            self._check_guidance_rule(model_output, sample, guidance_scale, index)
            sigma, sigma_next, sigma_max = self.scheduler.sigmas_of(index)
            records.append(
                RecordedStep(
                    index,
                    sigma,
                    sigma_next,
                    sigma_max,
                    sample=sample.float(),
                    prev_sample=step.prev_sample,
                    log_prob=step.log_prob,
                    calls=self._calls,
                    mean=step.mean if record_mean else None,
                )
            )
            self._calls, self._outputs = [], []

        def on_ode_step(index: int, model_output: torch.Tensor, sample: torch.Tensor, prev_sample: torch.Tensor):
            if index in steps:
                on_sde_step(index, model_output, sample, SDEStep(prev_sample, log_prob=None, mean=None, std=None))
            if index == num_inference_steps - 1:
                _check_latents(prev_sample)

        steps = sde.steps if sde is not None and sde.noise_level > 0 else ()
        if record_last_step:
            steps = (*steps, num_inference_steps - 1)
        self.scheduler.sde = sde
        self.scheduler.on_sde_step = on_sde_step
        self.scheduler.on_ode_step = on_ode_step
        # Step 0 of the key is the initial latent, step i + 1 the noise of denoising step i
        self.scheduler.step_generators = lambda index: [keyed_generator(*key, index + 1) for key in noise_keys]
        prepared = [source.image for source in sources]
        arguments = self.family.batch_arguments(prompt_arguments) | self.family.call_arguments(
            height, width, guidance_scale, prepared
        )
        arguments["num_inference_steps"] = num_inference_steps
        arguments["generator"] = [keyed_generator(*key, 0) for key in noise_keys]
        check_arguments(type(self.pipeline).__call__, arguments, type(self.pipeline).__name__)
        with self._record(steps), self._encoding(sources), self.family.drawing(self.pipeline, prepared):
            images = self.pipeline(**arguments).images
        if len(records) != len(steps):
            kind = "steps" if record_last_step else "stochastic steps"
            raise RuntimeError(
                f"{len(records)} {kind} were recorded, but {len(steps)} were asked for ({steps}): "
                f"the pipeline made other steps than the {num_inference_steps} of its schedule."
            )
        if images[0].size != (width, height):
            raise RuntimeError(
                f"{type(self.pipeline).__name__} was asked for images of {width} x {height} pixels and drew "
                f"{images[0].width} x {images[0].height}. Correct `size_multiple` or `call_arguments` of "
                f"{type(self.family).__name__}."
            )
        return images, _with_shared(records, prompt_arguments)

    @contextmanager
    def _encoding(self, sources: list[EncodedImage]):
        """Gives the pipeline the latents of the source images where it asks its VAE for them."""
        waiting = list(sources)

        def encode(pixels: torch.Tensor, *args, **kwargs) -> SimpleNamespace:
            expected = waiting[0].image.size if waiting else None  # (width, height)
            if expected is None or (pixels.shape[-1], pixels.shape[-2]) != expected or len(pixels) != 1:
                raise RuntimeError(
                    f"{type(self.pipeline).__name__} gives its VAE pixels of the shape {tuple(pixels.shape)} where "
                    f"{type(self.family).__name__} expects an image of {expected} (width, height) next. Correct "
                    "`prepare_image` and `call_arguments` of the family's page."
                )
            return SimpleNamespace(latents=waiting.pop(0).latents)

        vae = self.pipeline.vae
        if sources:
            vae.encode = encode
        try:
            yield
        finally:
            if sources:
                del vae.encode
        if waiting:
            raise RuntimeError(
                f"{type(self.pipeline).__name__} did not look at {len(waiting)} of {len(sources)} source image(s). "
                f"Correct `call_arguments` of {type(self.family).__name__}."
            )

    @contextmanager
    def _record(self, steps: tuple[int, ...]):
        self._recording = bool(steps)
        self._recorded_steps = steps
        self._calls, self._outputs = [], []
        try:
            yield
        finally:
            self._recording = False
            self.scheduler.sde = self.scheduler.step_generators = None
            self.scheduler.on_sde_step = self.scheduler.on_ode_step = None
            self._calls, self._outputs = [], []

    def _record_call(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._recording and self.scheduler.next_step_index in self._recorded_steps:
            bound = self._signature.bind(*args, **kwargs).arguments
            self._calls.append(_with_fresh_containers(dict(bound)))

    def _record_output(self, module: nn.Module, args: tuple, output) -> None:
        if self._recording and self.scheduler.next_step_index in self._recorded_steps:
            self._outputs.append(output[0])

    def _check_guidance_rule(
        self, model_output: torch.Tensor, sample: torch.Tensor, guidance_scale: float, index: int
    ) -> None:
        combined = self.family.combine(self._outputs, guidance_scale, sample)
        if combined is model_output or torch.equal(combined, model_output):
            return
        if combined.shape != model_output.shape:
            raise RuntimeError(
                f"At step {index} the scheduler received a velocity of the shape {tuple(model_output.shape)}, but "
                f"{type(self.family).__name__}.combine gives {tuple(combined.shape)}. {self.family.advice}"
            )
        difference = (combined.float() - model_output.float()).abs().max().item()
        scale = model_output.float().abs().max().item()
        # Another order of the same operations is not another rule. Half a unit in the last place of bf16 is 2^-9 of the
        # value; where the transformer computes in float32, 2^-18 is some units of it.
        precision = 2**-18 if _dtypes(self._outputs) == {torch.float32} else 2**-8
        if difference > precision * scale:
            is_negated = (combined.float() + model_output.float()).abs().max().item() <= precision * scale
            raise RuntimeError(
                f"At step {index} the scheduler received something else than {type(self.family).__name__}.combine "
                f"makes of the transformer's {len(self._outputs)} output(s): they differ by up to {difference:.3g} "
                f"(largest value {scale:.3g}, guidance scale {guidance_scale})"
                f"{': it has the opposite sign' if is_negated else ''}. Training would follow a wrong guidance rule. "
                f"{self.family.advice}"
            )


def _dtypes(outputs: list) -> set[torch.dtype]:
    """Dtypes of outputs, which may be lists of tensors."""
    return {each.dtype for output in outputs for each in (output if isinstance(output, list) else [output])}


def _with_fresh_containers(call: dict[str, Any]) -> dict[str, Any]:
    # The tensors stay the same, but a transformer may take items out of a dict it was given
    return recursively_apply(lambda tensor: tensor, call)


def _with_shared(records: list[RecordedStep], arguments: dict[str, torch.Tensor]) -> list[RecordedStep]:
    """
    The records with the arguments of the pipeline's call in place of copies that it made of them.

    Many pipelines repeat embeddings for the images of a prompt, once is no exception: every micro-batch of a round
    would hold its own.
    """
    known: dict[int, torch.Tensor] = {}

    views = [view for argument in arguments.values() for view in _views(argument)]

    def share(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            same = (view for view in views if view.shape == tensor.shape and view.dtype == tensor.dtype)
            known[id(tensor)] = next((view for view in same if torch.equal(view, tensor)), tensor)
        return known[id(tensor)]

    return [replace(record, calls=recursively_apply(share, record.calls)) for record in records]


def _views(argument: Any) -> list[torch.Tensor]:
    """An encoded prompt of a batch in the forms in which pipelines take it: whole, once for all images, in a list."""
    return [argument, argument[:1], *argument] if isinstance(argument, torch.Tensor) else []


def check_arguments(function, arguments: dict, owner: str) -> None:
    """
    Checks that a pipeline's method takes the arguments that a family's page gives it.

    Args:
        function (`Callable`):
            Method of the pipeline.
        arguments (`dict`):
            Arguments by name.
        owner (`str`):
            Name of the pipeline, for the error.

    Raises:
        TypeError: it does not take one of them.
    """
    parameters = inspect.signature(function).parameters
    unknown = [name for name in arguments if name not in parameters]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise TypeError(
            f"{owner}.{function.__name__} of diffusers {diffusers.__version__} takes no argument "
            f"{', '.join(f'`{name}`' for name in unknown)}, which the page of its family passes. The pipeline's "
            f"signature has changed; it takes {', '.join(name for name in parameters if name != 'self')}. Install "
            "another version of diffusers, or correct the page."
        )


def replay(
    model: nn.Module,
    record: RecordedStep,
    family: Family,
    guidance_scale: float,
    sde: SDESettings,
    detach_unconditional: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Scores a recorded step with the model as it is now.

    One forward for each call of the recorded step: one for a guidance-distilled model.

    Args:
        model (`nn.Module`):
            The model, wrapped as training wraps it.
        record ([`RecordedStep`]):
            Recorded step.
        family ([`Family`]):
            Page of the family, for its guidance rule.
        guidance_scale (`float`):
            Guidance scale of the rollout.
        sde ([`SDESettings`]):
            Settings of the rollout.
        detach_unconditional (`bool`, *optional*, defaults to `False`):
            Whether no gradient flows through the unconditional prediction of true guidance. Where it has a call of its
            own, nothing is kept for its backward.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: log-probability `(B,)` of the recorded sample, mean
        `(B, ...)` and standard deviation of the step's Gaussian.
    """
    model_output = predict(model, record.calls, family, guidance_scale, record.sample, detach_unconditional)
    step = sde_step(
        model_output,
        record.sample,
        record.sigma,
        record.sigma_next,
        sde.noise_level,
        sde.sde_type,
        prev_sample=record.prev_sample,
        sigma_max=record.sigma_max,
    )
    return step.log_prob, step.mean, step_std(step.std, record.sigma, record.sigma_next, sde.sde_type)


def predict(
    model: nn.Module,
    calls: list[dict[str, Any]],
    family: Family,
    guidance_scale: float,
    sample: torch.Tensor,
    detach_unconditional: bool = False,
) -> torch.Tensor:
    """
    Velocity that a model predicts in the calls of one step.

    Args:
        model (`nn.Module`):
            The model, wrapped as training wraps it.
        calls (`list[dict]`):
            Arguments, by name, of each call of the step.
        family ([`Family`]):
            Page of the family, for its guidance rule.
        guidance_scale (`float`):
            Guidance scale of the rollout.
        sample (`torch.Tensor` of shape `(B, ...)`):
            Sample, for its shape.
        detach_unconditional (`bool`, *optional*, defaults to `False`):
            As in [`replay`].

    Returns:
        `torch.Tensor` of shape `(B, ...)`.
    """
    outputs = []
    for number, call in enumerate(calls):
        # The unconditional prediction is the second call in every pipeline that makes two
        with torch.no_grad() if detach_unconditional and number > 0 else nullcontext():
            outputs.append(model(**_with_fresh_containers(call))[0])
    return family.combine(outputs, guidance_scale, sample, detach_unconditional)


def calls_at(record: RecordedStep, family: Family, sample: torch.Tensor, sigma: torch.Tensor) -> list[dict[str, Any]]:
    """
    The calls of a recorded step, for another sample and time.

    Args:
        record ([`RecordedStep`]):
            Recorded step.
        family ([`Family`]):
            Page of the family, which says where sample and time stand in a call.
        sample (`torch.Tensor` of shape `(B, ...)`):
            Sample.
        sigma (`torch.Tensor` of shape `(B,)`):
            Time of each image, float32.

    Returns:
        `list[dict]`.

    Raises:
        RuntimeError: the family's page does not give the recorded calls back for the recorded sample and time.
    """
    own = torch.full_like(sigma, record.sigma)
    for call in record.calls:
        again = family.call_at(call, record.sample, own)
        wrong = sorted(name for name in call.keys() | again.keys() if not _is_same(call.get(name), again.get(name)))
        if wrong:
            raise RuntimeError(
                f"At step {record.index} the pipeline called its transformer with other arguments than "
                f"{type(family).__name__}.call_at makes of the same sample and time: {', '.join(wrong)} differ. The "
                "images would be trained at other times than they say; correct the family's page."
            )
    return [family.call_at(call, sample, sigma) for call in record.calls]


def _check_pixels(module: nn.Module, args: tuple, pixels: Any) -> None:
    # The pipeline would make black of NaN and white of infinity, and the image would be scored
    if torch.is_tensor(pixels) and not torch.isfinite(pixels).all():
        raise RuntimeError(
            "The decoded images are not finite, although their latents are: the VAE overflows in its dtype, "
            f"{pixels.dtype}. Train with `bf16=True` or in float32, or use another VAE."
        )


def _check_latents(latents: torch.Tensor) -> None:
    is_finite = torch.isfinite(latents).flatten(1).all(dim=1)  # (B,)
    if not is_finite.all():
        raise RuntimeError(
            f"The latents of image(s) {(~is_finite).nonzero().flatten().tolist()} of a batch of {len(latents)} are not "
            "finite after the last denoising step; their pixels would be black, and scored like any others. The weights "
            "are not finite any more, or overflow in their dtype: look at `grad_norm` and the learning rate, and go on "
            "from an earlier checkpoint."
        )


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first is second or (first.dtype == second.dtype and torch.equal(first, second))
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_same, first, second))
    return first is second


def cast_floating_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """
    Lets a low-precision module take the float32 tensors that the pipeline computes with.

    Registered once, it acts on the rollout's calls and the replay's alike, so that both see the same numbers. What has
    one number for each image stays as it is: times and guidance scales, which some transformers read in float32.

    Args:
        module (`nn.Module`):
            Module called without autocast.
        dtype (`torch.dtype`):
            Dtype that its floating-point inputs are cast to.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.ndim > 1 else tensor

    def hook(module: nn.Module, args: tuple, kwargs: dict):
        return recursively_apply(cast, args), recursively_apply(cast, kwargs)

    module.register_forward_pre_hook(hook, with_kwargs=True)
