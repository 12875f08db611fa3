# SPDX-License-Identifier: Apache-2.0
"""Hybrid inference: the adapter in the first denoising steps of a pipeline, its base model in the rest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper

from ..utils.pipelines import check_call


@contextmanager
def hybrid_inference(pipeline: Any, adapter_fraction: float) -> Iterator[Callable | None]:
    """
    Use the adapter of a diffusers pipeline in the first denoising steps only, and the base model in the rest.

    Hybrid inference of [MixGRPO](https://huggingface.co/papers/2507.21802) counters reward hacking. Pass the callback
    of the context to each call of the pipeline within it. The adapter is on again at the end of a call and of the
    context, also after an error.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Pipeline whose transformer has an adapter, loaded by diffusers or by PEFT.
        adapter_fraction (`float`):
            Fraction of the denoising steps that use the adapter, rounded to full steps: 0 for none, 1 for all.

    Yields:
        `Callable` or `None`: the `callback_on_step_end` of the pipeline's calls, `None` if all or no steps use the
        adapter.

    Raises:
        ValueError: The fraction is invalid, the pipeline takes no callback, or its transformer has no adapter that can be
            switched off.
        RuntimeError: In the first step of a call, if an earlier one in the same context ended before its last step.
    """
    if not 0 <= adapter_fraction <= 1:
        raise ValueError(f"`adapter_fraction` is {adapter_fraction}; it must be from 0 to 1.")
    if adapter_fraction == 1:
        yield None
        return
    if adapter_fraction > 0:
        check_call(pipeline, ["callback_on_step_end"], "switch its adapter off. Set `adapter_fraction` to 0 or 1.")
    layers: list[Any]
    layers = [m for m in pipeline.transformer.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    if not layers or any(getattr(each, "merged", False) or each.disable_adapters for each in layers):
        raise ValueError(
            f"The transformer of this {type(pipeline).__name__} has no adapter that is on and can be switched off. Load it, "
            "enable it (`enable_lora`) or unfuse it (`unfuse_lora`)."
        )
    is_on = True
    # PEFT makes adapters trainable when it enables them
    flags = [(parameter, parameter.requires_grad) for layer in layers for parameter in layer.parameters()]

    def switch(on: bool) -> None:
        nonlocal is_on
        if on != is_on:
            for layer in layers:
                layer.enable_adapters(on)
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            is_on = on

    def callback(pipeline: Any, step: int, timestep: Any, callback_kwargs: dict[str, Any]) -> dict[str, Any]:
        total = getattr(pipeline, "num_timesteps", len(pipeline.scheduler.timesteps))
        if step == 0 and not is_on:
            reason = "an earlier one in the same context ended before its last step"
            raise RuntimeError(f"This call began without the adapter: {reason}. Use a context for each.")
        is_last = step + 1 == total or getattr(pipeline, "interrupt", False)
        switch(is_last or step + 1 < round(adapter_fraction * total))
        return callback_kwargs

    try:
        switch(adapter_fraction > 0)
        yield callback if adapter_fraction > 0 else None
    finally:
        switch(True)
