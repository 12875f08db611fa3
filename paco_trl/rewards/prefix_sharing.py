# SPDX-License-Identifier: Apache-2.0
"""Pairs with the same first image begin alike: the language model reads that beginning once."""

from collections.abc import Hashable

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling


def share_prefixes(model: PreTrainedModel, inputs: dict, firsts: list[Hashable]) -> dict:
    """
    Runs the language model over the beginning of the rows, up to the end of the first image, once for each first image.

    What a token becomes depends on the tokens before it alone, so that rows which begin alike share this part of the
    work: keys and values of the beginning are computed once and stand in the cache of all rows it belongs to. The six
    pairs of a 2x2 grid have three first images.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model of the Qwen2-VL or Qwen2.5-VL family, without an adapter's wrapper.
        inputs (`dict`):
            Inputs for B pairs, padded on the left, with encoded images.
        firsts (`list`):
            For each row what identifies its first image.

    Returns:
        `dict`: inputs of the rest of the rows, with the cache of their beginnings; `inputs` when no two rows share one.
    """
    distinct = list(dict.fromkeys(firsts))
    if len(distinct) == len(firsts):
        return inputs
    owner = torch.tensor([distinct.index(first) for first in firsts], device=inputs["input_ids"].device)  # (B,)
    rows = [firsts.index(first) for first in distinct]  # a row for each beginning

    features = inputs["mm_encoder_outputs"]["image"].pooler_output  # first and second image of each row in turn
    positions, _ = model.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )  # (3, B, T)
    start = inputs["attention_mask"].argmax(dim=1)  # (B,), behind the padding
    is_image = inputs["mm_token_type_ids"] == 1
    end = is_image.int().argmax(dim=1) + torch.tensor([len(one) for one in features[::2]], device=start.device)  # (B,)
    width = inputs["input_ids"].shape[1]

    def cut(selected: list[int], begin: torch.Tensor, stop: torch.Tensor) -> dict[str, torch.Tensor]:
        spans = [(row, slice(int(begin[row]), int(stop[row]))) for row in selected]
        names = ("input_ids", "attention_mask")
        parts = {name: _left_padded([inputs[name][row, span] for row, span in spans]) for name in names}
        position_ids = _left_padded([positions[:, row, span].T for row, span in spans])  # (rows, length, 3)
        return {**parts, "position_ids": position_ids.permute(2, 0, 1)}

    def encoded(images) -> dict[str, BaseModelOutputWithPooling]:
        return {"image": BaseModelOutputWithPooling(pooler_output=tuple(images))}

    beginning = cut(rows, start, end)
    cache = model.model(
        **beginning, mm_encoder_outputs=encoded(features[2 * row] for row in rows), use_cache=True
    ).past_key_values
    cache.batch_select_indices(owner)
    rest = cut(list(range(len(firsts))), end, torch.full_like(end, width))
    rest["attention_mask"] = torch.cat([beginning["attention_mask"][owner], rest["attention_mask"]], dim=1)
    return {**rest, "mm_encoder_outputs": encoded(features[1::2]), "past_key_values": cache}


def _left_padded(sequences: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(sequences, batch_first=True, padding_side="left")
