# SPDX-License-Identifier: Apache-2.0
"""Collator of pairs, their order, and the checks of a dataset of pairs before a model is loaded."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset
from PIL import Image
from qwen_vl_utils.vision_process import MAX_RATIO, SPATIAL_MERGE_SIZE, smart_resize
from transformers import ProcessorMixin
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl.data_utils import apply_chat_template, prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..data import decision_of, is_label_only
from ..data.pairs import content_text, iter_texts
from ..rewards.paco_reward import decision_token_ids
from ..utils.images import check_text, find_control_tokens, load_image, open_image, patch_size_of, pixel_limit
from .paco_reward_config import PaCoRewardConfig


logger = get_logger(__name__)

# More tokens than a chat template writes around a question
_MAX_TEMPLATE_TOKENS = 256
# Tensors of shape (batch, tokens) in a batch of TRL's collator
TOKEN_TENSORS = {"input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"}


def _named_images(images: list, where: str) -> list[tuple[Any, str]]:
    return list(zip(images, (f"First image of {where}", f"Second image of {where}"), strict=True))


class PairRows(torch.utils.data.Dataset):
    """Number the rows of a dataset of pairs, without decoding their images."""

    def __init__(self, dataset: Dataset):
        # As Arrow: casting the column to undecoded images would copy the dataset into the cache
        columns = ["images", "prompt", "completion"]
        self.dataset = dataset.select_columns(columns).with_format("arrow")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (row,) = self.dataset[int(index)].to_pylist()
        return {**row, "row": int(index)}


@dataclass
class PairCollator(DataCollatorForVisionLanguageModeling):
    """Collate pairs as TRL does for vision-language models; errors name the row. Adds the row numbers as `rows`."""

    decision_only_loss: bool = False  # leave out everything after the decision
    label_only_without_eos: bool = False  # leave it out of completions without reasoning: n = 1, no terminators
    # The model's `get_rope_index`, if it has one: on an accelerator it waits for the device a dozen times for each pair
    get_rope_index: Callable | None = None

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate rows of [`PairRows`]."""
        rows = [example["row"] for example in examples]
        patch_size = patch_size_of(self.processor)
        pairs = []
        for row, example in zip(rows, examples, strict=True):
            named = _named_images(example["images"], f"row {row}")
            images = [load_image(image, patch_size, name) for image, name in named]
            pairs.append({"images": images, "prompt": example["prompt"], "completion": example["completion"]})
        batch = super().torch_call(pairs)
        is_completion = batch["labels"] != -100
        for row, has_decision in zip(rows, is_completion.any(dim=1).tolist(), strict=True):
            if not has_decision:
                raise _too_long(f"Row {row}", f"at least {self.max_length}", self.max_length)
        decision = is_completion.int().argmax(dim=1)  # (B,), position of the first token of the completion
        has_one_token = torch.tensor(
            [
                self.decision_only_loss or self.label_only_without_eos and is_label_only(example["completion"])
                for example in examples
            ]
        )
        is_behind = has_one_token[:, None] & (torch.arange(is_completion.shape[1]) > decision[:, None])  # (B, T)
        batch["labels"][is_behind] = -100
        batch["attention_mask"][is_behind] = 0
        if has_one_token.all():
            for name in TOKEN_TENSORS & batch.keys():
                batch[name] = batch[name][:, : int(decision.max()) + 1]
        if self.get_rope_index is not None:
            names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
            batch["position_ids"], _ = self.get_rope_index(**{name: batch[name] for name in names})  # (3, B, T)
            batch["grids"] = batch["image_grid_thw"].tolist()  # not a tensor: it stays on the CPU
        batch["rows"] = torch.tensor(rows)
        return batch

    def lengths(self, dataset: Dataset, name: str) -> list[int]:
        """Count the tokens of each pair in a batch, without padding; of images only the headers are read."""
        rows = PairRows(dataset)
        lengths = []
        for row, prompt, completion in iter_texts(dataset):
            where = f"row {row} of `{name}`"
            position, answer = _count_tokens(rows[row]["images"], prompt, completion, self.processor, where)
            length = position + (1 if self.decision_only_loss else answer)
            lengths.append(length if self.max_length is None else min(length, self.max_length))
        return lengths


class PairSampler(LengthGroupedSampler):
    """Group pairs of similar length, in an order that depends on seed and epoch alone."""

    def __init__(self, batch_size: int, lengths: list[int], seed: int):
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.generator.manual_seed(self.seed + self.epoch)
        return super().__iter__()


def check_pairs(
    dataset: Dataset, name: str, processor: ProcessorMixin, args: PaCoRewardConfig, is_training: bool = False
) -> None:
    """Check texts, decision and length of each pair in one pass, without decoding all of its images."""
    rows, tokenizer = PairRows(dataset), processor.tokenizer
    for image, image_name in _named_images(rows[0]["images"], f"row 0 of `{name}`"):
        load_image(image, patch_size_of(processor), image_name)
    control_tokens, decision_ids = find_control_tokens(processor), decision_token_ids(tokenizer)
    max_length = args.max_length if can_count_tokens(processor) else None
    largest = _largest_number_of_tokens(processor)
    labels, label_only = set(), []
    for row, prompt, completion in iter_texts(dataset):
        where = f"row {row} of `{name}`"
        for turn in [*prompt, *completion]:
            check_text(content_text(turn["content"]) or "", control_tokens, f"R{where[1:]}")
        # Of the first row as the chat template writes it, which may add a token in front
        text = content_text(completion[0]["content"]) or ""
        text = _apply_template(prompt, completion, processor)["completion"] if row == 0 else text
        token = tokenizer.encode(text, add_special_tokens=False)[0]
        if token not in decision_ids:
            raise ValueError(
                f"The completion of {where} begins with the token {tokenizer.decode([token])!r}, not with Yes or No. Either "
                "the tokenizer merges the decision with what follows it (put a period or a newline after it), or the chat "
                "template writes something in front of it."
            )
        if max_length is not None:
            # A token has at least one byte. Where two of the largest images fit, no header is read
            length = sum(len((content_text(turn["content"]) or "").encode()) for turn in prompt)
            if largest is None or 2 * largest + length + _MAX_TEMPLATE_TOKENS >= max_length:
                position, _ = _count_tokens(rows[row]["images"], prompt, completion, processor, where)
                if position >= max_length:
                    raise _too_long(f"R{where[1:]}", position, max_length)
        labels.add(decision_of(completion))
        if is_label_only(completion):
            label_only.append(row)
    if is_training:
        _check_labels(len(dataset), labels, label_only, args)


def _check_labels(count: int, labels: set[str], label_only: list[int], args: PaCoRewardConfig) -> None:
    if len(labels) == 1:
        logger.warning(
            f"All {count} pairs of `train_dataset` are labeled {labels.pop()}: a judge learns from them to give this "
            "answer about any images. Add pairs with the other label."
        )
    if label_only and args.first_token_weight not in (None, 1):
        summary = (
            f"{len(label_only)} of {count} completions are a label without reasoning, the first in row {label_only[0]}"
        )
        if args.loss_variant != "paper":
            # The terminators that the chat template adds would get nearly all of the weight
            raise ValueError(
                f"{summary}, for which `loss_variant={args.loss_variant!r}` has no sensible loss. Use "
                '`loss_variant="paper"`, `first_token_weight=1` or None, or leave such rows out with `dataset.filter` and '
                "`paco_trl.data.is_label_only`."
            )
        logger.warning(f"{summary}: their loss is -log p(y_0), that of n = 1.")


def _too_long(where: str, count: int | str, max_length: int | None) -> ValueError:
    return ValueError(
        f"{where} has {count} tokens of images and question before its decision, which `max_length` = {max_length} truncates. "
        "Set `max_length` to more than that (None never truncates), or lower `max_pixels`."
    )


def can_count_tokens(processor: ProcessorMixin) -> bool:
    """Tell whether the lengths of pairs can be counted without opening their images."""
    return hasattr(processor, "_get_num_multimodal_tokens")


def _largest_number_of_tokens(processor: ProcessorMixin) -> int | None:
    """Return the most tokens that an image of the Qwen-VL families takes; `None` for others."""
    limit, merge_size = pixel_limit(processor), getattr(processor.image_processor, "merge_size", None)
    if limit is None or merge_size is None:
        return None
    side = patch_size_of(processor) * merge_size
    # An image of one row of patches may exceed the limit
    return max(limit // side**2, math.ceil(math.sqrt(limit * MAX_RATIO) / side) + 1)


def _apply_template(prompt: list[dict], completion: list[dict], processor: ProcessorMixin) -> dict[str, str]:
    example = {
        "prompt": prepare_multimodal_messages(prompt, images=[Image.new("RGB", (1, 1))] * 2),
        "completion": prepare_multimodal_messages(completion),
    }
    return apply_chat_template(example, processor)


def _count_tokens(
    images: list[dict], prompt: list[dict], completion: list[dict], processor: ProcessorMixin, where: str
) -> tuple[int, int]:
    """Count the tokens of a pair before its decision, and of its completion, using image headers only."""
    sizes = []
    for stored, name in _named_images(images, where):
        try:
            with open_image(stored) as image:
                width, height = image.size
            sizes.append(smart_resize(height, width, factor=patch_size_of(processor) * SPATIAL_MERGE_SIZE))
        except Exception:
            load_image(stored, patch_size_of(processor), name)  # its error has the reason
            raise
    image_tokens = sum(processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"])
    texts = _apply_template(prompt, completion, processor)
    encode = functools.partial(processor.tokenizer, add_special_tokens=False)
    prompt_tokens, completion_tokens = (len(encode(texts[part])["input_ids"]) for part in ("prompt", "completion"))
    # The processor replaces the one token that the text has for each image
    return prompt_tokens - 2 + image_tokens, completion_tokens
