# SPDX-License-Identifier: Apache-2.0
"""Checks of a judge's training and evaluation pairs, before its model is loaded."""

from accelerate.logging import get_logger
from datasets import Dataset
from transformers import ProcessorMixin

from ..data import decision_of, is_label_only
from ..data.pairs import content_text, iter_texts
from ..rewards.decision import decision_token_ids
from ..utils.images import check_text, find_control_tokens, load_image, patch_size_of
from .paco_reward_config import PaCoRewardConfig
from .pair_collator import PairRows, check_first_token, check_lengths


logger = get_logger(__name__)


def check_label_only(dataset: Dataset, args: PaCoRewardConfig) -> None:
    """Check that the loss is defined for completions that are a label without reasoning."""
    if args.first_token_weight in (None, 1):
        return
    rows = [row for row, _, completion in iter_texts(dataset) if is_label_only(completion)]
    if not rows:
        return
    found = f"{len(rows)} of {len(dataset)} completions are a label without reasoning, the first in row {rows[0]}"
    if args.loss_variant != "paper":
        # The terminators that the chat template adds would get nearly all of the weight
        raise ValueError(
            f"{found}, for which `loss_variant={args.loss_variant!r}` has no sensible loss. Use "
            '`loss_variant="paper"`, `first_token_weight=1` or None, or leave such rows out with `dataset.filter` and '
            "`paco_trl.data.is_label_only`."
        )
    logger.warning(f"{found}: their loss is -log p(y_0), that of n = 1.")


def warn_of_one_label(dataset: Dataset) -> None:
    """Warn of pairs that all have the same decision."""
    labels = {decision_of(completion) for _, _, completion in iter_texts(dataset)}
    if len(labels) == 1:
        logger.warning(
            f"All {len(dataset)} pairs of `train_dataset` are labeled {labels.pop()}: a judge learns from them to give this "
            "answer about any images. Add pairs with the other label."
        )


def datasets_by_name(eval_dataset: Dataset | dict[str, Dataset]) -> dict[str, Dataset]:
    """Return the evaluation datasets by their names in errors."""
    if not isinstance(eval_dataset, dict):
        return {"eval_dataset": eval_dataset}
    if not eval_dataset:
        raise ValueError("`eval_dataset` is an empty dictionary: nothing to evaluate on. Add a dataset, or omit it.")
    return eval_dataset


def has_lengths(dataset: Dataset, args: PaCoRewardConfig) -> bool:
    """Return whether a dataset has a column with the lengths of its rows."""
    return args.length_column_name in dataset.column_names


def check_rows(dataset: Dataset, name: str, processor: ProcessorMixin, max_length: int | None) -> None:
    """Check each row of a dataset without decoding all of its images."""
    for place, image in zip(("First", "Second"), PairRows(dataset)[0]["images"], strict=True):
        load_image(image, patch_size_of(processor), f"{place} image of row 0 of `{name}`")
    control_tokens = find_control_tokens(processor)
    decision_ids = decision_token_ids(processor.tokenizer)
    for row, prompt, completion in iter_texts(dataset):
        for turn in [*prompt, *completion]:
            check_text(content_text(turn["content"]) or "", control_tokens, f"Row {row} of `{name}`")
        (turn,) = completion
        tokens = processor.tokenizer.encode(content_text(turn["content"]), add_special_tokens=False)
        check_first_token(tokens[0], decision_ids, processor, f"row {row} of `{name}`")
    if max_length is not None:
        check_lengths(dataset, name, processor, max_length)
