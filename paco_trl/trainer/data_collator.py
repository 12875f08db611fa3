# SPDX-License-Identifier: Apache-2.0
"""Collator of pairs, their order, and the number of their tokens."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from qwen_vl_utils.vision_process import SPATIAL_MERGE_SIZE, smart_resize
from transformers import ProcessorMixin
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl.data_utils import apply_chat_template, prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..data import is_label_only
from ..data.pairs import iter_texts
from ..utils.images import open_image
from ..utils.vision_language import load_image, patch_size_of


# Tensors of shape (batch, tokens) in a batch of TRL's collator
TOKEN_TENSORS = {"input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"}


def named_images(images: list, where: str) -> list[tuple[Any, str]]:
    """Return the images of a pair with their names in errors."""
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
    # The model's `get_rope_index`, if it has one: on an accelerator it waits for the device a dozen times a pair
    get_rope_index: Callable | None = None

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate rows of [`PairRows`]."""
        rows = [example["row"] for example in examples]
        patch_size = patch_size_of(self.processor)
        pairs = []
        for row, example in zip(rows, examples, strict=True):
            named = named_images(example["images"], f"row {row}")
            images = [load_image(image, patch_size, name) for image, name in named]
            pairs.append({"images": images, "prompt": example["prompt"], "completion": example["completion"]})
        batch = super().torch_call(pairs)
        is_completion = batch["labels"] != -100
        for row, has_decision in zip(rows, is_completion.any(dim=1).tolist(), strict=True):
            if not has_decision:
                raise too_long(f"Row {row}", f"at least {self.max_length}", self.max_length)
        decision = is_completion.int().argmax(dim=1)  # (B,), position of the first token of the completion
        is_label = [self.label_only_without_eos and is_label_only(example["completion"]) for example in examples]
        has_one_token = torch.tensor(is_label) | self.decision_only_loss  # (B,)
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
            position, answer = count_tokens(rows[row]["images"], prompt, completion, self.processor, where)
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


def too_long(where: str, count: int | str, max_length: int | None) -> ValueError:
    """Return the error for a pair whose decision is truncated."""
    return ValueError(
        f"{where} has {count} tokens of images and question before its decision, which `max_length` = {max_length} "
        "truncates. Raise it (None never truncates), or lower `max_pixels`."
    )


def apply_template(prompt: list[dict], completion: list[dict], processor: ProcessorMixin) -> dict[str, str]:
    """Write a pair as the chat template does."""
    example = {
        "prompt": prepare_multimodal_messages(prompt, images=[Image.new("RGB", (1, 1))] * 2),
        "completion": prepare_multimodal_messages(completion),
    }
    return apply_chat_template(example, processor)


def count_tokens(
    images: list[dict], prompt: list[dict], completion: list[dict], processor: ProcessorMixin, where: str
) -> tuple[int, int]:
    """Count the tokens of a pair before its decision, and of its completion, using image headers only."""
    sizes = []
    for stored, name in named_images(images, where):
        try:
            with open_image(stored) as image:
                width, height = image.size
            sizes.append(smart_resize(height, width, factor=patch_size_of(processor) * SPATIAL_MERGE_SIZE))
        except Exception:
            load_image(stored, patch_size_of(processor), name)  # its error has the reason
            raise
    image_tokens = sum(processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"])
    texts = apply_template(prompt, completion, processor)
    encode = functools.partial(processor.tokenizer, add_special_tokens=False)
    prompt_tokens, completion_tokens = (len(encode(texts[part])["input_ids"]) for part in ("prompt", "completion"))
    # The processor replaces the one token that the text has for each image
    return prompt_tokens - 2 + image_tokens, completion_tokens
