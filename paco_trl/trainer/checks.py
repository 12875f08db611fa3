# SPDX-License-Identifier: Apache-2.0
"""Checks of the data, and of the data against the model that is trained on them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from datasets import Dataset
from qwen_vl_utils.vision_process import MAX_RATIO
from torch import nn
from transformers import ProcessorMixin

from ..data import check_pair_columns, decision_of, is_label_only
from ..data.columns import check_is_dataset
from ..data.image_sets import PANEL_OPTIONS
from ..data.pairs import content_text, iter_texts
from ..rewards.checks import check_columns
from ..rewards.paco_reward import decision_token_ids
from ..rewards.scoring import move_models_to_cpu
from ..rewards.weighting import Rewards
from ..rollout import Family
from ..rollout.prompt_rows import PromptRows, ResolvedRows
from ..utils.fingerprint import describe_rows
from ..utils.logs import get_logger
from ..utils.vision_language import check_text, find_control_tokens, load_image, patch_size_of, pixel_limit
from .config_utils import check_best_metric
from .data_collator import PairRows, apply_template, count_tokens, named_images, too_long
from .evaluator import metric_names
from .paco_grpo_config import PaCoGRPOConfig
from .paco_reward_config import PaCoRewardConfig
from .round_plan import RoundPlan


logger = get_logger(__name__)


def read_train_rows(dataset: Dataset, args: PaCoGRPOConfig, rewards: Rewards) -> PromptRows:
    """Read the training prompts, and check that they fit the rewards."""
    check_is_dataset(dataset, "train_dataset")
    rows = PromptRows(dataset, args, "the dataset")
    check_columns(rewards.functions, rows.dataset, "the dataset")
    return rows


def fit_round_to_dataset(args: PaCoGRPOConfig, rows: PromptRows) -> None:
    """Fit a round of the default size to the training prompts; refuse fewer prompts than a round takes."""
    count = len(rows.image_prompts)
    args.fit_round(count)
    if count < (plan := args.round_plan).num_prompts:
        fitting = args.fitting_prompts(count)
        how = f"No number of prompts up to {count} fills one. {_smaller_batches(plan)}"
        if fitting:
            how = f"Set `num_prompts_per_generation` to {fitting[-1]}"
        raise ValueError(
            f"The dataset has {count} prompt(s), but a round takes {plan.num_prompts}: {plan.summary()} {how}, or add "
            "prompts."
        )


def _smaller_batches(plan: RoundPlan) -> str:
    """Say what to set so that few prompts fill the batches of a round."""
    if plan.batch_size > 1:
        return "Lower `per_device_train_batch_size`"
    if plan.micro_batches_per_rollout_batch > 1:
        return "Lower `per_device_rollout_batch_size`"
    return f"Set `num_generations` to a multiple of {plan.num_processes * plan.num_optimizer_steps}"


def check_has_evaluation(args: Any, has_dataset: bool) -> None:
    """Check that there is a dataset for the evaluations that are asked for."""
    if not has_dataset and (args.eval_strategy != "no" or args.eval_on_start):
        settings = [f"`eval_strategy` is {args.eval_strategy.value!r}"] * (args.eval_strategy != "no")
        settings += ["`eval_on_start` is True"] * args.eval_on_start
        raise ValueError(
            f"{' and '.join(settings)}, but there is no `eval_dataset` (on the command line `--eval_split`). Pass one, "
            "or switch the evaluation off."
        )


def read_eval_rows(
    eval_dataset: Dataset | dict[str, Dataset] | None, args: PaCoGRPOConfig, rewards: Rewards
) -> list[PromptRows]:
    """Read the evaluation prompts, and check them against the evaluation settings."""
    if isinstance(eval_dataset, dict):
        datasets = eval_dataset
    else:
        datasets = {} if eval_dataset is None else {"evaluation": eval_dataset}
    check_has_evaluation(args, bool(datasets))
    if datasets:
        names, logged = metric_names(rewards.names), tuple(f"{name}/" for name in rewards.names)  # `log_metric`
        check_best_metric(args, names, eval_dataset if isinstance(eval_dataset, dict) else (), logged)
        if args.eval_strategy != "no" or args.eval_on_start:
            rewards.check_group_size(args.num_generations_eval, "num_generations_eval")
    rows = []
    for name, dataset in datasets.items():
        check_is_dataset(dataset, "eval_dataset" if dataset is eval_dataset else f"eval_dataset[{name!r}]")
        rows.append(PromptRows(dataset, args, f"the dataset '{name}'"))
        check_columns(rewards.functions, rows[-1].dataset, f"the dataset '{name}'")
    return rows


def warn_of_trained_rows(train_rows: PromptRows, eval_rows: Sequence[PromptRows]) -> None:
    """Warn of evaluation prompts that are also trained on, which do not show whether others get better."""
    for rows in eval_rows:
        prompts = {*train_rows.prompts} & {*rows.prompts}
        trained_on = {*_conditions(train_rows, prompts)}
        _warn_of_trained(trained_on, _conditions(rows, prompts), len(rows), rows.where, "prompts get")


def warn_of_trained_pairs(train_pairs: Dataset, eval_pairs: Mapping[str, Dataset]) -> None:
    """Warn of evaluation pairs that are also trained on, whatever the answer; the datasets are by their names."""
    columns = ["images", "prompt"]
    trained_on = {*describe_rows(train_pairs.select_columns(columns))} if eval_pairs else set()
    for name, pairs in eval_pairs.items():
        rows = describe_rows(pairs.select_columns(columns))
        _warn_of_trained(trained_on, rows, len(pairs), f"`{name}`", "pairs are judged")


def _warn_of_trained(trained_on: Set, conditions: Iterable, total: int, where: str, others: str) -> None:
    if count := sum(condition in trained_on for condition in conditions):
        logger.warning(
            f"{count} of {total} rows of {where} are also trained on, and do not show whether other {others} better. "
            "Hold rows out: train on the split `train[:90%]`, and evaluate on `train[90%:]`."
        )


def _conditions(rows: PromptRows, prompts: Set[str]) -> Iterator[tuple]:
    """Return what the images of rows with these prompts are generated from."""
    for row_index in [n for n, prompt in enumerate(rows.prompts) if prompt in prompts]:
        yield rows.prompts[row_index], *(images.digests(row_index) for images in rows.image_columns)


def check_panels_used(args: PaCoGRPOConfig, *rows: PromptRows) -> None:
    """Check that some dataset has the separate images that settings are for."""
    for name in PANEL_OPTIONS:
        if (value := getattr(args, name)) != getattr(PaCoGRPOConfig, name) and not any(r.has_separate for r in rows):
            raise ValueError(
                f"`{name}` is {value!r}, but no dataset has a set of separate images. Unset it, or set "
                "`set_layout='separate'`."
            )


def check_prompts(
    args: PaCoGRPOConfig, pipeline: Any, family: Family, train_rows: PromptRows, eval_rows: Sequence[PromptRows]
) -> ResolvedRows:
    """Check prompts and settings against the pipeline; return the training prompts as resolved for it."""
    resolved_rows, *_ = [rows.resolve_for_pipeline(pipeline, family) for rows in (train_rows, *eval_rows)]
    if args.detach_unconditional and None in resolved_rows.negative_prompts:
        raise ValueError(
            f"`detach_unconditional` is for true CFG, but {type(pipeline).__name__} has none at `guidance_scale` "
            f"= {args.guidance_scale}. Unset it."
        )
    _check_micro_batches(args, pipeline, family, resolved_rows)
    _warn_of_tiles(pipeline.vae, resolved_rows, args.vae_tiling)
    return resolved_rows


def _check_micro_batches(args: PaCoGRPOConfig, pipeline, family: Family, rows: ResolvedRows) -> None:
    """Check that one call of the pipeline can generate a batch, also where it crosses prompts."""
    most = family.max_batch_size
    plan = args.round_plan
    sizes = set(rows.training_sizes)
    batches = {plan.rollout_batch_option: plan.rollout_batch_size}
    batches["per_device_eval_batch_size"] = args.per_device_eval_batch_size
    for option, size in batches.items():
        if most is not None and size > most:
            raise ValueError(
                f"`{option}` is {size}, but {type(family).__name__} generates at most {most} with "
                f"{type(pipeline).__name__}. Set it to {most}."
            )
        if size > 1 and rows.is_anchored and not family.batches_sources:
            raise ValueError(
                f"`{option}` is {size} and `panel_generation` 'anchored', but images of a batch share their source "
                f"images with {type(pipeline).__name__}. Set it to 1."
            )
    if args.num_generations % plan.rollout_batch_size == 0:
        return
    if len(sizes) > 1:
        reason = f"The dataset has images of {len(sizes)} training sizes ({sorted(sizes)})"
    elif rows.sources is not None or rows.is_anchored:
        reason = "Each prompt has its own source images"
    elif not family.has_fixed_prompt_length:
        reason = f"{type(pipeline).__name__} encodes prompts to different lengths"
    else:
        return
    raise ValueError(
        f"{reason}, so a batch must not cross prompts: `{plan.rollout_batch_option}` ({plan.rollout_batch_size}) must "
        f"divide `num_generations` ({args.num_generations})."
    )


def _warn_of_tiles(vae: Any, rows: ResolvedRows, is_tiled: bool) -> None:
    """Warn if the rewards of training see the seams between the VAE's tiles."""
    # Smaller images are not tiled. Some VAEs have a size for each side
    size = getattr(vae, "tile_sample_min_size", math.inf)
    tile = [getattr(vae, f"tile_sample_min_{side}", size) for side in ("height", "width")]
    height, width = max(rows.training_sizes, key=lambda size: max(size[0] / tile[0], size[1] / tile[1]))
    if not (is_tiled or getattr(vae, "use_tiling", False)) or height <= tile[0] and width <= tile[1]:
        return
    logger.warning(  # https://github.com/XueZeyue/DanceGRPO/issues/117
        f"Training images of {height} x {width} pixels are decoded in tiles of {tile[0]} x {tile[1]}: rewards see the "
        "seams, which have spoiled training elsewhere. Do not tile (`vae_tiling`), or lower `resolution_scale`."
    )


def offload_models(args: PaCoGRPOConfig, *rewards: Rewards) -> dict[Rewards, list[nn.Module]]:
    """Move the models of rewards to the CPU with `offload_rewards`, and return them."""
    if not args.offload_rewards:
        return {scored: [] for scored in rewards}
    models = {scored: move_models_to_cpu(scored.functions, args.device) for scored in rewards}
    if not any(models.values()):
        logger.warning(
            "`offload_rewards` has nothing to offload: no reward or its `judge` has a `model`, a `torch.nn.Module`, "
            f"that this process may move between the CPU and {args.device}."
        )
    return models


# ---- Pairs ----

# More tokens than a chat template writes around a question
_MAX_TEMPLATE_TOKENS = 256


def check_pairs(
    dataset: Dataset, name: str, processor: ProcessorMixin, args: PaCoRewardConfig, is_training: bool = False
) -> None:
    """Check columns, texts, decision and length of each pair in one pass, without decoding all of its images."""
    check_pair_columns(dataset, name)
    can_count_tokens = hasattr(processor, "_get_num_multimodal_tokens")  # without opening images
    if is_training and args.train_sampling_strategy == "group_by_length" and not can_count_tokens:
        kind = type(processor).__name__
        raise ValueError(f"`train_sampling_strategy` is 'group_by_length', but a {kind} cannot count image tokens.")
    rows = PairRows(dataset)
    tokenizer = processor.tokenizer
    for image, image_name in named_images(rows[0]["images"], f"row 0 of `{name}`"):
        load_image(image, patch_size_of(processor), image_name)
    control_tokens = find_control_tokens(processor)
    decision_ids = decision_token_ids(tokenizer)
    max_length = args.max_length if can_count_tokens else None
    largest = _largest_number_of_tokens(processor)
    labels = set()
    label_only = []
    for row, prompt, completion in iter_texts(dataset):
        where = f"row {row} of `{name}`"
        for turn in [*prompt, *completion]:
            check_text(content_text(turn["content"]) or "", control_tokens, f"R{where[1:]}")
        # The first row is read as the chat template writes it: it may add a token in front
        text = content_text(completion[0]["content"]) or ""
        text = apply_template(prompt, completion, processor)["completion"] if row == 0 else text
        token = tokenizer.encode(text, add_special_tokens=False)[0]
        if token not in decision_ids:
            raise ValueError(
                f"The completion of {where} begins with the token {tokenizer.decode([token])!r}, not with Yes or No: "
                "it is merged with what follows (put a period after it), or the chat template writes in front of it."
            )
        if max_length is not None:
            # A token has at least one byte. Where two of the largest images fit, no header is read
            length = sum(len((content_text(turn["content"]) or "").encode()) for turn in prompt)
            if largest is None or 2 * largest + length + _MAX_TEMPLATE_TOKENS >= max_length:
                position, _ = count_tokens(rows[row]["images"], prompt, completion, processor, where)
                if position >= max_length:
                    raise too_long(f"R{where[1:]}", position, max_length)
        labels.add(decision_of(completion))
        if is_label_only(completion):
            label_only.append(row)
    if is_training:
        _check_labels(len(dataset), labels, label_only, args)


def _check_labels(count: int, labels: set[str], label_only: list[int], args: PaCoRewardConfig) -> None:
    if len(labels) == 1:
        logger.warning(
            f"All {count} pairs of `train_dataset` are labeled {labels.pop()}: a judge learns to give this answer "
            "about any images. Add pairs with the other label."
        )
    if label_only and args.first_token_weight not in (None, 1):
        summary = f"{len(label_only)} of {count} completions have no reasoning, the first in row {label_only[0]}"
        if args.loss_variant != "paper":
            # The terminators that the chat template adds would get nearly all of the weight
            raise ValueError(
                f"{summary}, for which `loss_variant={args.loss_variant!r}` has no sensible loss. Use 'paper', "
                "`first_token_weight=1`, or leave such rows out (`paco_trl.data.is_label_only`)."
            )
        logger.warning(f"{summary}: their loss is -log p(y_0), that of n = 1.")


def _largest_number_of_tokens(processor: ProcessorMixin) -> int | None:
    """Return the most tokens that an image of the Qwen-VL families takes; `None` for others."""
    limit = pixel_limit(processor)
    merge_size = getattr(processor.image_processor, "merge_size", None)
    if limit is None or merge_size is None:
        return None
    side = patch_size_of(processor) * merge_size
    # An image of one row of patches may exceed the limit
    return max(limit // side**2, math.ceil(math.sqrt(limit * MAX_RATIO) / side) + 1)
