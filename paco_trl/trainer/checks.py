# SPDX-License-Identifier: Apache-2.0
"""Early checks of data and settings, and of both against the pipeline."""

import math
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from torch import nn

from ..data.columns import check_is_dataset
from ..data.texts import describe_repeated
from ..rewards.runner import RewardRunner, offloadable_models
from ..rollout import Family
from ..rollout.prompt_rows import PromptRows
from ..utils.generation import check_call
from .config_utils import check_best_metric
from .evaluator import metric_names
from .paco_grpo_config import PaCoGRPOConfig


logger = get_logger(__name__)


def check_train_dataset(dataset: Dataset, args: PaCoGRPOConfig, rewards: RewardRunner) -> PromptRows:
    """Read the training prompts, and check that they fill a round and fit the rewards."""
    check_is_dataset(dataset, "train_dataset")
    rows, layout = PromptRows(dataset, args, "the dataset"), args.round_plan
    if len(dataset) < layout.num_prompts:
        raise ValueError(
            f"The dataset has {len(dataset)} prompt{'s' * (len(dataset) != 1)}, but a round takes {layout.num_prompts} different ones: "
            f"{layout.describe()} Set `num_prompts_per_generation` to at most {len(dataset)}, or add prompts."
        )
    rewards.check_dataset(rows.dataset, "the dataset")
    # An instruction is often repeated, with other source images
    if rows.sources is None and (repeated := describe_repeated(rows.prompts)) is not None:
        logger.warning(f"{repeated} It is trained on more often than the others.")
    return rows


def check_eval_datasets(
    eval_dataset: Dataset | dict[str, Dataset] | None, args: PaCoGRPOConfig, rewards: RewardRunner
) -> list[PromptRows]:
    """Read the evaluation prompts, and check them against the evaluation settings."""
    datasets = eval_dataset if isinstance(eval_dataset, dict) else {"evaluation": eval_dataset}
    datasets = {name: dataset for name, dataset in datasets.items() if dataset is not None}
    if not datasets and (args.eval_strategy != "no" or args.eval_on_start):
        raise ValueError(
            f"`eval_strategy` is {args.eval_strategy.value!r} and `eval_on_start` {args.eval_on_start}, but there "
            "is no `eval_dataset` to evaluate on. Pass one, or switch them off."
        )
    if datasets:
        names, logged = metric_names(rewards.names), tuple(f"{name}/" for name in rewards.names)  # `log_metric`
        check_best_metric(args, names, eval_dataset if isinstance(eval_dataset, dict) else (), logged)
    rows = []
    for name, dataset in datasets.items():
        check_is_dataset(dataset, "eval_dataset" if dataset is eval_dataset else f"eval_dataset[{name!r}]")
        rows.append(PromptRows(dataset, args, f"the dataset '{name}'"))
        rewards.check_dataset(rows[-1].dataset, f"the dataset '{name}'")
    return rows


def check_model_settings(args: PaCoGRPOConfig, pipeline, family: Family, negative_prompt: str | None) -> None:
    """Check the settings against the pipeline."""
    name = type(pipeline).__name__
    if args.detach_unconditional and negative_prompt is None:
        problem = f"{name} makes no unconditional prediction at `guidance_scale` = {args.guidance_scale}"
        raise ValueError(f"`detach_unconditional` is for true guidance, but {problem}. Unset it.")
    if args.adapter_fraction < 1:
        check_call(
            pipeline, ["callback_on_step_end"], "switch its adapter off between steps. Unset `adapter_fraction`."
        )
    most, layout = family.max_batch_size, args.round_plan
    options = {layout.rollout_batch_option: layout.rollout_batch_size}
    for option, size in (options | {"per_device_eval_batch_size": args.per_device_eval_batch_size}).items():
        if most is not None and size > most:
            raise ValueError(
                f"`{option}` is {size}, but {type(family).__name__} generates at most {most} with {name}. Set it to "
                f"{most}{' and `branch_size=1`' if args.branch_size > 1 else ''}."
            )


def check_micro_batches(args: PaCoGRPOConfig, pipeline, family: Family, rows: PromptRows) -> None:
    """Check that a batch crosses prompts only where one call of the pipeline can generate it."""
    layout, sizes = args.round_plan, set(rows.training_sizes)
    if args.num_generations % layout.rollout_batch_size == 0:
        return
    if len(sizes) > 1:
        reason = f"The dataset has images of {len(sizes)} training sizes ({sorted(sizes)})"
    elif rows.sources is not None:
        reason = "Each prompt has its own source images"
    elif not family.has_fixed_length:
        reason = f"{type(pipeline).__name__} encodes prompts to different lengths"
    else:
        return
    raise ValueError(
        f"{reason}, so a batch must not cross prompts: `{layout.rollout_batch_option}` ({layout.rollout_batch_size}) "
        f"must divide `num_generations` ({args.num_generations})."
    )


def check_quantization(quantization: str | None, is_full: bool, is_deepspeed: bool, is_compiled: bool) -> None:
    """Refuse a quantized transformer, by option or description, that cannot be trained in the requested way."""
    is_bitsandbytes = (quantization or "").endswith(("nf4", "bitsandbytes"))
    for applies, reason in (
        (is_full, "without a `peft_config` its own weights are trained, which get no gradients. Train an adapter"),
        (is_deepspeed, "DeepSpeed is supported for unquantized weights only. Use `multi_gpu.yaml` (DDP)"),
        (is_compiled and not is_bitsandbytes, "only 'nf4' works with `compile_repeated_blocks`. Unset it"),
    ):
        if quantization is not None and applies:
            raise ValueError(f"The transformer is quantized ({quantization}), but {reason}, or do not quantize it.")


def vae_tiling_warning(vae: Any, rows: PromptRows) -> str | None:
    """Return a warning if the rewards of training see the seams between the VAE's tiles, else `None`."""
    # Smaller images are not tiled. Some VAEs have a size for each side
    size = getattr(vae, "tile_sample_min_size", math.inf)
    tile = [getattr(vae, f"tile_sample_min_{side}", size) for side in ("height", "width")]
    height, width = max(rows.training_sizes, key=lambda each: max(each[0] / tile[0], each[1] / tile[1]))
    if not getattr(vae, "use_tiling", False) or height <= tile[0] and width <= tile[1]:
        return None
    return (  # https://github.com/XueZeyue/DanceGRPO/issues/117
        "The VAE tiles (`vae_tiling`, or `vae.enable_tiling()` of a given pipeline), and training images of "
        f"{height} x {width} pixels are decoded in tiles of {tile[0]} x {tile[1]}: every image of a group has the seams, "
        "rewards see them, and they have spoiled training elsewhere. "
        "Do not tile, or lower `resolution_scale` until an image is one tile; `evaluate()` still tiles."
    )


def offload_models(args: PaCoGRPOConfig, *runners: RewardRunner) -> dict[RewardRunner, list[nn.Module]]:
    """Move the models of rewards to the CPU with `offload_rewards`, and return them; refuse it if there are none."""
    models = {
        each: offloadable_models(each.functions, args.device) if args.offload_rewards else [] for each in runners
    }
    if args.offload_rewards and not any(models.values()):
        raise ValueError(
            "`offload_rewards=True` moves the `model` of each reward, or of its `judge`, but none is a `torch.nn.Module` "
            f"on the CPU or on {args.device}. Unset it, or give your reward this attribute."
        )
    return models


def check_evaluation_is_possible(eval_dataset: Dataset | None, is_engine_missing: bool) -> None:
    """Refuse an evaluation without prompts, or before DeepSpeed has placed the model."""
    if eval_dataset is None:
        raise ValueError("`evaluate()` requires an `eval_dataset`: pass it to the trainer or to this call.")
    if is_engine_missing:
        raise RuntimeError(
            "`evaluate()` was called before `train()`, but DeepSpeed places the model on the accelerator only when "
            "training begins. To evaluate the untrained model, set `eval_on_start=True`."
        )
