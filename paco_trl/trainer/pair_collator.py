# SPDX-License-Identifier: Apache-2.0
"""From rows of the pair format to a batch of the model, with errors that name the row."""

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..utils.images import load_image, patch_size_of


# Tensors of shape (batch, tokens) in a batch of TRL's collator
TOKEN_TENSORS = {"input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"}


class PairRows(torch.utils.data.Dataset):
    """
    Rows of a dataset of pairs with their numbers and with images that are not decoded yet.

    Decoding is left to the collator, which can say which row and file it was. Rows are read as Arrow: casting the
    column to undecoded images would copy the whole dataset into the cache.

    Args:
        dataset ([`~datasets.Dataset`]):
            Pairs.
    """

    def __init__(self, dataset: Dataset):
        columns = ["images", "prompt", "completion"]
        self.dataset = dataset.select_columns(columns).with_format("arrow")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (row,) = self.dataset[int(index)].to_pylist()
        return {**row, "row": int(index)}


@dataclass
class PairCollator(DataCollatorForVisionLanguageModeling):
    """
    TRL's collator for vision-language models, for pairs: it opens the images as the judge does, and checks the result.

    Adds `rows`, the numbers of the rows, to the batch. Padding is on the right.

    Args:
        decision_ids (`tuple[int, int]`):
            Token ids of Yes and No.
        cut_at (`int`, *optional*):
            Length at which a sequence is cut, if what is cut are reasons.
        decision_only (`bool`, *optional*, defaults to `False`):
            Whether everything behind the decision is left out: nothing that comes after a token changes it.

    Raises:
        ValueError: An image cannot be read, the completion's first token is not Yes or No, or the images or the
            decision of a row do not fit into `cut_at` tokens.
    """

    decision_ids: tuple[int, int] = ()
    cut_at: int | None = None
    decision_only: bool = False

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collates rows of [`PairRows`]."""
        rows = [example["row"] for example in examples]
        pairs = [
            {
                "images": [
                    load_image(image, patch_size_of(self.processor), f"{place} image of row {example['row']}")
                    for place, image in zip(("First", "Second"), example["images"], strict=True)
                ],
                "prompt": example["prompt"],
                "completion": example["completion"],
            }
            for example in examples
        ]
        batch = super().torch_call(pairs)
        is_completion = batch["labels"] != -100
        decision = is_completion.int().argmax(dim=1)  # (B,), position of the first token of the completion
        first = batch["labels"].gather(1, decision[:, None])[:, 0]
        for row, token, position in zip(rows, first.tolist(), decision.tolist(), strict=True):
            if token not in self.decision_ids:
                text = self.processor.tokenizer.decode([token])
                raise ValueError(
                    f"The completion of row {row} begins with the token {text!r}, not with Yes or No: the tokenizer "
                    "joins the decision with what follows it. Put a full stop or a new line behind it."
                )
            if self.cut_at is not None and position >= self.cut_at:
                raise ValueError(
                    f"Row {row} has {position} tokens of images and question before its decision; `max_length` = "
                    f"{self.cut_at} would cut them off. Raise `max_length` to at least {position + 1} (None never "
                    "cuts), or lower `max_pixels`, so that an image becomes fewer tokens."
                )
        cut_at = self.cut_at
        if self.decision_only:
            is_behind = torch.arange(is_completion.shape[1]) > decision[:, None]  # (B, T)
            batch["labels"][is_behind] = -100
            batch["attention_mask"][is_behind] = 0
            cut_at = int(decision.max()) + 1
        if cut_at is not None:
            for name in TOKEN_TENSORS & batch.keys():
                batch[name] = batch[name][:, :cut_at]
        batch["rows"] = torch.tensor(rows)
        return batch
