# SPDX-License-Identifier: Apache-2.0
"""Defaults for pipelines without a family class whose transformer predicts the velocity in one call."""

import inspect
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
from PIL import Image
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from .base import Family, encoding_by


GUIDE = "docs/families.md"

# Components of the pipeline, and arguments of its call, that a rollout requires
COMPONENTS = ("transformer", "vae")
REQUIRED_ARGUMENTS = ("prompt", "height", "width", "num_inference_steps", "generator")

# Arguments of pipelines that do something else than generate an image of the given size from text
REFUSED_ARGUMENTS = {
    "strength": "it changes a given image",
    "mask_image": "it fills a mask of a given image",
    "control_image": "it follows a given image",
    "num_frames": "it generates videos",
    "use_resolution_binning": "it generates at sizes of its own and resizes the result",
}

# Those of these layers that the transformer has get an adapter
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")

# Name of the tensor that holds the prompt and what `encode_prompt` returned for it, except the tensors
STRUCTURE = "structure"


class _TransformerReachedError(Exception):
    """End the pipeline's call where generation would begin."""


class UnlistedFamily(Family):
    """
    Defaults for a pipeline without a family class, stated in a warning.

    A prompt is encoded by the pipeline's own call, which is interrupted at its first call of the transformer. What its
    `encode_prompt` returned until then is stored, and returned again during generation. It may have any form, so a
    micro-batch holds one image. `pipeline` may be the name of a class of diffusers: then only the checks that need no
    weights are made. `listed` are the names of the pipelines that have a family class, for the errors.

    Raises:
        ValueError: the pipeline cannot be trained without a family class; everything that is missing is named.
    """

    max_batch_size = 1
    has_fixed_length = False

    def __init__(self, pipeline, listed: Iterable[str]):
        is_name = isinstance(pipeline, str)
        pipeline_class = getattr(diffusers, pipeline, None) if is_name else type(pipeline)
        if pipeline_class is None:
            return
        self.name = pipeline_class.__name__
        reasons = _class_reasons(pipeline_class)
        if not is_name:
            reasons += _missing_components([name for name in COMPONENTS if getattr(pipeline, name, None) is not None])
            reasons += ["it has no attribute `vae_scale_factor`"] * (not hasattr(pipeline, "vae_scale_factor"))
        if reasons:
            raise ValueError(
                f"There is no family class for {self.name}, and without one it cannot be trained: "
                f"{'; '.join(dict.fromkeys(reasons))}. Write one: {GUIDE}. Pipelines that have one: "
                f"{', '.join(sorted(listed))}."
            )
        if is_name:
            return
        self.takes_guidance = "guidance_scale" in inspect.signature(pipeline_class.__call__).parameters
        self.text_encoders = tuple(name for name in pipeline.components if name.startswith("text_encoder"))
        # Now: a layer with an adapter has another class
        modules = pipeline.transformer.named_modules()
        linear = [f".{name}" for name, module in modules if isinstance(module, torch.nn.Linear)]
        self._targets = [each for each in LORA_TARGETS if any(name.endswith(f".{each}") for name in linear)]
        self._guidance_scale = 1.0
        self._waiting: list[Any] = []
        self._warn(pipeline)

    def _warn(self, pipeline) -> None:
        guidance = "`guidance_scale` is passed to its call" if self.takes_guidance else "its call takes no guidance"
        warnings.warn(
            f"There is no family class for {self.name}. These defaults are used: a step is one call of its transformer, "
            "whose only output is the velocity (every rollout compares it with what the scheduler receives); only "
            f"`encode_prompt` uses {', '.join(self.text_encoders)}; {guidance}; heights and widths are multiples of "
            f"{self.size_multiple(pipeline)} pixels; unless `target_modules` is set, adapters are on "
            f"{', '.join(self._targets) or 'no layer'}; micro-batches hold one image. If one of them is wrong, write a "
            f"family class: {GUIDE}.",
            stacklevel=4,  # where `family_of` is called
        )

    @property
    def lora_target_modules(self) -> list[str]:  # type: ignore[override]  # read-only
        """Return the attention projections, by the names that most transformers of diffusers have for them."""
        if not self._targets:
            raise ValueError(
                f"There is no family class for {self.name}, and its transformer has none of the layers that get an "
                f"adapter by default ({', '.join(LORA_TARGETS)}). Set `target_modules` of the `LoraConfig`."
            )
        return self._targets

    @property
    def advice(self) -> str:  # type: ignore[override]  # read-only
        """Return what to do when the scheduler received something else than the output."""
        return (
            f"There is no family class for {self.name}, so the output itself was used as the velocity. Write a "
            f"family class whose `branches` applies the pipeline's sign, factor and shape: {GUIDE}."
        )

    # ---- Prompts ----

    def resolve_negative_prompt(self, pipeline, guidance_scale: float, negative_prompt: str | None) -> str | None:
        if negative_prompt is not None:
            raise ValueError(
                f"`negative_prompt` is {negative_prompt!r}, but there is no family class for {self.name} that "
                f"defines its effect. Leave it out, or write a family class: {GUIDE}."
            )
        if guidance_scale > 1 and not self.takes_guidance:
            raise ValueError(
                f"`guidance_scale` is {guidance_scale}, but {self.name} takes none: it would be ignored. Set "
                "`guidance_scale=1.0`."
            )
        self._guidance_scale = guidance_scale
        return None

    def encode_prompt(
        self, pipeline, prompt: str, device: torch.device, images: Sequence[Image.Image] = (), scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        results: list[Any] = []

        def encode(*args, **kwargs) -> Any:
            results.append(own(*args, **kwargs))
            return results[-1]

        def stop(module: torch.nn.Module, args: tuple) -> None:
            raise _TransformerReachedError

        own, size = pipeline.encode_prompt, self.size_multiple(pipeline)
        handle = pipeline.transformer.register_forward_pre_hook(stop, prepend=True)
        try:
            with encoding_by(pipeline, encode):
                pipeline(
                    prompt=prompt,
                    num_inference_steps=2,
                    generator=torch.Generator().manual_seed(0),  # leaves torch's random state unchanged
                    **self.call_arguments(size, size, self._guidance_scale, []),
                )
            raise self._no_encoding("its call ended without calling its transformer")
        except _TransformerReachedError:
            pass
        except (AttributeError, TypeError) as error:
            # Errors of a pipeline that requires an image
            raise self._no_encoding(
                f"called with a prompt alone, it fails ({type(error).__name__}: {error})"
            ) from error
        finally:
            handle.remove()
        if not results:
            raise self._no_encoding("its call does not use its `encode_prompt`")
        leaves, form = tree_flatten(results)
        # The first dimension of a tensor may be a batch of 1 or not, as of position ids
        tensors = {
            str(place): leaf if leaf.ndim and len(leaf) == 1 else leaf[None]
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }
        others = [
            {"is_batch": bool(leaf.ndim) and len(leaf) == 1} if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        # As a tensor too, because another process may generate from it
        try:
            structure = json.dumps([prompt, others, treespec_dumps(form)]).encode()
        except (TypeError, ValueError, NotImplementedError) as error:
            raise self._no_encoding(f"its `encode_prompt` returns something else than tensors ({error})") from error
        return {**tensors, STRUCTURE: torch.frombuffer(bytearray(structure), dtype=torch.uint8)[None]}

    def _no_encoding(self, reason: str) -> ValueError:
        return ValueError(
            f"There is no family class for {self.name}, and prompts cannot be encoded without one: {reason}. Write a "
            f"family class with `encode_prompt`: {GUIDE}."
        )

    def batch_arguments(self, arguments: dict[str, torch.Tensor]) -> dict[str, Any]:
        structure = arguments[STRUCTURE]
        if len(structure) != 1:
            raise ValueError(
                f"{len(structure)} images were requested in one call, but without a family class {self.name} generates "
                "one at a time."
            )
        prompt, leaves, form = json.loads(structure.cpu().numpy().tobytes())
        for place, leaf in enumerate(leaves):
            if str(place) in arguments:
                tensor = arguments[str(place)]
                leaves[place] = tensor if leaf["is_batch"] else tensor[0]
        self._waiting = tree_unflatten(leaves, treespec_loads(form))
        return {"prompt": prompt}

    @contextmanager
    def generation_context(self, pipeline, images: list[Image.Image]) -> Iterator[None]:
        """Let the pipeline's `encode_prompt` return what it returned when the prompt was encoded."""

        def recall(*args, **kwargs) -> Any:
            if not self._waiting:
                raise RuntimeError(
                    f"{self.name} calls its `encode_prompt` more often during generation than before. {self.advice}"
                )
            return self._waiting.pop(0)

        with encoding_by(pipeline, recall):
            yield

    # ---- Sizes and calls ----

    def call_arguments(self, height: int, width: int, guidance_scale: float, images: list[Image.Image]) -> dict:
        arguments = super().call_arguments(height, width, guidance_scale, images)
        return arguments if self.takes_guidance else {"height": height, "width": width}

    # ---- Guidance ----

    def combine(
        self, outputs: list[Any], guidance_scale: float, sample: torch.Tensor, detach_unconditional: bool = False
    ) -> torch.Tensor:
        output = outputs[0] if len(outputs) == 1 else None
        if isinstance(output, torch.Tensor) and output.shape == sample.shape:
            return output
        guided = (
            f"`branches`, `guide` and `resolve_negative_prompt`, or train without guidance (`guidance_scale` is "
            f"{guidance_scale}) if the pipeline can do without"
        )
        if len(outputs) != 1:
            seen, part = f"called its transformer {len(outputs)} times in a step", f"`max_calls`, {guided}"
        elif not isinstance(output, torch.Tensor):
            seen, part = f"has a transformer whose output is a {type(output).__name__}, not a tensor", "`branches`"
        elif output.shape == (2 * len(sample), *sample.shape[1:]):
            seen, part = "called its transformer with a doubled batch: two predictions in one call", guided
        else:
            shapes = f"{tuple(output.shape)} for a sample of {tuple(sample.shape)}"
            seen, part = f"has a transformer whose output has the shape {shapes}", "`branches`"
        raise ValueError(
            f"{self.name} {seen}. There is no family class for it, so only a single prediction of the sample's shape is "
            f"supported. Write a family class ({GUIDE}) with {part}."
        )


def _class_reasons(pipeline_class: Any) -> list[str]:
    """Return why the pipelines of a class cannot be trained without a family class."""
    reasons = _missing_components(inspect.signature(pipeline_class.__init__).parameters)
    methods = ("encode_prompt", "save_lora_weights")
    reasons += [f"it has no method `{name}`" for name in methods if not hasattr(pipeline_class, name)]
    parameters = inspect.signature(pipeline_class.__call__).parameters
    reasons += [f"its call takes no `{name}`" for name in REQUIRED_ARGUMENTS if name not in parameters]
    reasons += [f"{what} (its call takes `{name}`)" for name, what in REFUSED_ARGUMENTS.items() if name in parameters]
    for name, parameter in parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if is_required and name not in ("self", *REQUIRED_ARGUMENTS):
            reasons.append(f"it cannot generate from a prompt alone (its call needs `{name}`)")
    return reasons


def _missing_components(present: Iterable[str]) -> list[str]:
    return [f"it has no component `{name}`" for name in COMPONENTS if name not in present]
