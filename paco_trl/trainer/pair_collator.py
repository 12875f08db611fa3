# SPDX-License-Identifier: Apache-2.0
"""Collate rows of the pair format, with errors that name the row."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from qwen_vl_utils.vision_process import MAX_RATIO, SPATIAL_MERGE_SIZE, smart_resize
from transformers import ProcessorMixin
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl.data_utils import apply_chat_template, prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..data.pairs import content_text, is_label_only, iter_texts
from ..utils.images import load_image, open_image, patch_size_of, pixel_limit


_PLACES = ("First", "Second")
# More tokens than a chat template writes around a question
_MAX_TEMPLATE_TOKENS = 256
# Tensors of shape (batch, tokens) in a batch of TRL's collator
TOKEN_TENSORS = {"input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"}


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

    decision_ids: tuple[int, ...] = ()  # of Yes and No
    cut_at: int | None = None  # length at which a sequence is cut; only reasoning is ever cut
    decision_only: bool = False  # leave out everything after the decision
    labels_alone: bool = False  # leave it out of completions without reasoning: n = 1, no terminators
    # The model's `get_rope_index`, if it has one: on an accelerator it waits for the device a dozen times for each pair
    get_rope_index: Callable | None = None

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate rows of [`PairRows`]."""
        rows = [example["row"] for example in examples]
        patch_size = patch_size_of(self.processor)
        pairs = []
        for example in examples:
            row, places = example["row"], zip(_PLACES, example["images"], strict=True)
            images = [load_image(image, patch_size, f"{place} image of row {row}") for place, image in places]
            pairs.append({"images": images, "prompt": example["prompt"], "completion": example["completion"]})
        batch = super().torch_call(pairs)
        is_completion = batch["labels"] != -100
        decision = is_completion.int().argmax(dim=1)  # (B,), position of the first token of the completion
        first = batch["labels"].gather(1, decision[:, None])[:, 0]
        for row, token, position in zip(rows, first.tolist(), decision.tolist(), strict=True):
            check_first_token(token, self.decision_ids, self.processor, f"row {row}")
            if self.cut_at is not None:
                _check_position(position, self.cut_at, f"Row {row}")
        has_one_token = torch.tensor(
            [self.decision_only or self.labels_alone and is_label_only(example["completion"]) for example in examples]
        )
        is_behind = has_one_token[:, None] & (torch.arange(is_completion.shape[1]) > decision[:, None])  # (B, T)
        batch["labels"][is_behind] = -100
        batch["attention_mask"][is_behind] = 0
        cut_at = int(decision.max()) + 1 if has_one_token.all() else self.cut_at
        if cut_at is not None:
            for name in TOKEN_TENSORS & batch.keys():
                batch[name] = batch[name][:, :cut_at]
        if self.get_rope_index is not None:
            names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
            batch["position_ids"], _ = self.get_rope_index(**{name: batch[name] for name in names})  # (3, B, T)
            batch["grids"] = batch["image_grid_thw"].tolist()  # not a tensor: it stays on the CPU
        batch["rows"] = torch.tensor(rows)
        return batch

    def lengths(self, dataset: Dataset, name: str) -> list[int]:
        """Count the tokens of each pair in a batch, without padding; of images only the headers are read."""
        check_lengths_are_known(self.processor)
        rows = PairRows(dataset)
        lengths = []
        for row, prompt, completion in iter_texts(dataset):
            where = f"row {row} of `{name}`"
            position, answer = _count_tokens(rows[row]["images"], prompt, completion, self.processor, where)
            length = position + (1 if self.decision_only else answer)
            lengths.append(length if self.cut_at is None else min(length, self.cut_at))
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


def check_first_token(token: int, decision_ids: tuple[int, ...], processor: ProcessorMixin, where: str) -> None:
    """Check that the first token of a completion is Yes or No."""
    if token not in decision_ids:
        text = processor.tokenizer.decode([token])
        raise ValueError(
            f"The completion of {where} begins with the token {text!r}, not with Yes or No: the tokenizer merges the "
            "decision with what follows it. Put a period or a newline after it."
        )


def _check_position(position: int, max_length: int, where: str) -> None:
    if position >= max_length:
        raise ValueError(
            f"{where} has {position} tokens of images and question before its decision; `max_length` = {max_length} "
            f"would cut them off. Raise `max_length` to at least {position + 1} (None never cuts), or lower `max_pixels`."
        )


def check_lengths(dataset: Dataset, name: str, processor: ProcessorMixin, max_length: int) -> None:
    """Check that images and question of every pair fit into `max_length` tokens, as far as headers tell."""
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        return
    rows = PairRows(dataset)
    largest = _largest_number_of_tokens(processor)
    for row, prompt, completion in iter_texts(dataset):
        # A token has at least one byte. Where two of the largest images fit, no header is read
        texts = sum(len((content_text(turn["content"]) or "").encode()) for turn in prompt)
        if largest is not None and 2 * largest + texts + _MAX_TEMPLATE_TOKENS < max_length:
            continue
        where = f"row {row} of `{name}`"
        position, _ = _count_tokens(rows[row]["images"], prompt, completion, processor, where)
        _check_position(position, max_length, f"R{where[1:]}")


def check_lengths_are_known(processor: ProcessorMixin) -> None:
    """Check that the lengths of pairs can be counted without opening their images."""
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        raise ValueError(
            f"`train_sampling_strategy` is 'group_by_length', but a {type(processor).__name__} cannot report how many "
            "tokens an image takes. Add a column of lengths, named by `length_column_name`, or use 'random'."
        )


def _largest_number_of_tokens(processor: ProcessorMixin) -> int | None:
    """Return the most tokens that an image of the Qwen-VL families takes; `None` for others."""
    limit, merge_size = pixel_limit(processor), getattr(processor.image_processor, "merge_size", None)
    if limit is None or merge_size is None:
        return None
    side = patch_size_of(processor) * merge_size
    # An image of one row of patches may exceed the limit
    return max(limit // side**2, math.ceil(math.sqrt(limit * MAX_RATIO) / side) + 1)


def _size_from_header(stored: dict[str, Any], processor: ProcessorMixin, where: str) -> tuple[int, int]:
    """Return the height and width that [`load_image`] gives an image."""
    try:
        with open_image(stored) as image:
            width, height = image.size
        return smart_resize(height, width, factor=patch_size_of(processor) * SPATIAL_MERGE_SIZE)
    except Exception:
        load_image(stored, patch_size_of(processor), where)  # its error has the reason
        raise


def _count_tokens(
    images: list[dict], prompt: list[dict], completion: list[dict], processor: ProcessorMixin, where: str
) -> tuple[int, int]:
    """Count the tokens of a pair before its decision, and of its completion, as TRL's collator writes them."""
    places = zip(_PLACES, images, strict=True)
    sizes = [_size_from_header(image, processor, f"{place} image of {where}") for place, image in places]
    of_images = processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
    example = {
        "prompt": prepare_multimodal_messages(prompt, images=[Image.new("RGB", (1, 1))] * 2),
        "completion": prepare_multimodal_messages(completion),
    }
    texts = apply_chat_template(example, processor)
    encode = functools.partial(processor.tokenizer, add_special_tokens=False)
    of_prompt, of_completion = (len(encode(texts[part])["input_ids"]) for part in ("prompt", "completion"))
    # The processor replaces the one token that the text has for each image
    return of_prompt - 2 + sum(of_images), of_completion
