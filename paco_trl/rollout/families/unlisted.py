# SPDX-License-Identifier: Apache-2.0
"""Defaults for pipelines without a family class, if their transformer predicts the velocity in one call."""

import inspect
import io
import warnings
from contextlib import contextmanager, suppress
from typing import Any

import diffusers
import torch
from torch.utils._pytree import tree_map_only

from .base import Family, encoding_by


GUIDE = "docs/families.md"
# Components, methods and arguments of the call that a rollout requires
_REQUIRED_ARGUMENTS = ("prompt", "height", "width", "num_inference_steps", "generator")
_REQUIRED = ("transformer", "vae", "encode_prompt", "save_lora_weights", *_REQUIRED_ARGUMENTS)
# Arguments of pipelines that do something else than generate an image of the given size from text
_REFUSED_ARGUMENTS = ("strength", "mask_image", "control_image", "num_frames", "use_resolution_binning")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() if tensor.is_floating_point() else tensor).clone()


class TransformerReachedError(Exception):
    """End the pipeline's call where generation would begin."""


class UnlistedFamily(Family):
    """
    Defaults for a pipeline without a family class, stated in a warning.

    A prompt is encoded by the pipeline's own call, interrupted at its first call of the transformer. The results of
    the pipeline's `encode_prompt` are stored, and returned again during generation. They may have any form, so a
    micro-batch holds one image. `pipeline` may be the name of a class of diffusers.

    Raises:
        ValueError: the pipeline cannot be trained without a family class. The message names what is missing.
    """

    lora_target_modules = ["to_q", "to_k", "to_v", "to_out.0"]  # in most transformers of diffusers
    max_batch_size = 1
    has_fixed_prompt_length = False

    def __init__(self, pipeline):
        self.name = pipeline if isinstance(pipeline, str) else type(pipeline).__name__
        kind = getattr(diffusers, pipeline, None) if isinstance(pipeline, str) else type(pipeline)
        if kind is None:  # a class from code in a repository
            return
        missing = f"There is no family class for {self.name}"
        parameters = inspect.signature(kind.__call__).parameters
        has = {*inspect.signature(kind.__init__).parameters, *parameters, *dir(kind)}
        reasons = [f"it has no `{name}`" for name in _REQUIRED if name not in has]
        for name, parameter in parameters.items():
            is_needed = (
                parameter.default is parameter.empty
                and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                and name != "self"
            )
            if name in _REFUSED_ARGUMENTS or is_needed and name not in _REQUIRED_ARGUMENTS:
                reasons.append(f"its call takes `{name}`")
        if reasons:
            raise ValueError(
                f"{missing}, and only pipelines that generate images of a given size from text can be trained without "
                f"one: {', '.join(reasons)}. Write one: {GUIDE}."
            )
        if isinstance(pipeline, str):
            return
        self.advice = f"{missing}. Write one whose `branches` gives the velocity: {GUIDE}."
        self.takes_guidance = "guidance_scale" in parameters
        self.text_encoders = tuple(name for name in pipeline.components if name.startswith("text_encoder"))
        self._guidance_scale, self._waiting = 1.0, []
        warnings.warn(
            f"{missing}: its transformer's output is taken as the velocity (every rollout "
            "compares it with what the scheduler receives), only `encode_prompt` uses "
            f"{', '.join(self.text_encoders)}, sizes are multiples of {self.size_multiple(pipeline)} pixels, and "
            f"adapters are by default on {', '.join(self.lora_target_modules)}. If one of them is wrong, write a "
            f"family class: {GUIDE}.",
            stacklevel=3,  # where `get_family` is called
        )

    def resolve_negative_prompt(self, pipeline, guidance_scale, negative_prompt):
        if negative_prompt is not None or (guidance_scale > 1 and not self.takes_guidance):
            raise ValueError(
                f"`negative_prompt` is {negative_prompt!r} and `guidance_scale` {guidance_scale}, but there is no "
                f"family class for {self.name} that defines their effect. Set None and 1.0, or write one: {GUIDE}."
            )
        self._guidance_scale = guidance_scale
        return None

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        results: list[Any] = []

        def encode(*args, **kwargs) -> Any:
            results.append(original_encode_prompt(*args, **kwargs))
            return results[-1]

        def stop(module: torch.nn.Module, args: tuple) -> None:
            raise TransformerReachedError

        original_encode_prompt = pipeline.encode_prompt
        size = self.size_multiple(pipeline)
        handle = pipeline.transformer.register_forward_pre_hook(stop, prepend=True)
        arguments = self.call_arguments(size, size, self._guidance_scale, [])
        generator = torch.Generator().manual_seed(0)  # leaves torch's random state unchanged
        try:
            with encoding_by(pipeline, encode), suppress(TransformerReachedError):
                pipeline(prompt=prompt, num_inference_steps=2, generator=generator, **arguments)
        finally:
            handle.remove()
        if not results:
            raise ValueError(f"The call of {self.name} does not use its `encode_prompt`. {self.advice}")
        # As a tensor too, because another process may generate from it; float32 as all embeddings are
        torch.save([prompt, tree_map_only(torch.Tensor, _copy, results)], buffer := io.BytesIO())
        return {"results": torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)[None]}

    def batch_arguments(self, arguments):
        (results,) = arguments["results"]  # a batch has one image
        file = io.BytesIO(results.cpu().numpy().tobytes())
        prompt, self._waiting = torch.load(file, map_location=results.device, weights_only=True)
        return {"prompt": prompt}

    @contextmanager
    def generation_context(self, pipeline, images):
        """Let the pipeline's `encode_prompt` return what it returned when the prompt was encoded."""
        with encoding_by(pipeline, lambda *args, **kwargs: self._waiting.pop(0)):
            yield

    def call_arguments(self, height, width, guidance_scale, images):
        arguments = super().call_arguments(height, width, guidance_scale, images)
        return arguments if self.takes_guidance else {"height": height, "width": width}

    def combine(self, outputs, guidance_scale, sample, detach_unconditional=False):
        shapes = [
            tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__ for output in outputs
        ]
        if shapes == [tuple(sample.shape)]:
            return outputs[0]
        raise ValueError(
            f"The transformer of {self.name} gives {shapes} in a step with `guidance_scale` = {guidance_scale}, where "
            f"only one prediction of the sample's shape, {tuple(sample.shape)}, is the velocity. {self.advice}"
        )
