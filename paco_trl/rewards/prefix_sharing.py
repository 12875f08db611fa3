# SPDX-License-Identifier: Apache-2.0
"""Pairs with the same first image begin alike: the language model reads that beginning once."""

from collections.abc import Hashable

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling


def share_prefixes(model: PreTrainedModel, inputs: dict, firsts: list[Hashable]) -> dict:
    """
    Runs the language model over the beginning of the rows, up to the end of the first image, once for each beginning.

    What a token becomes depends on the tokens before it alone, so that rows which begin alike share this part of the
    work: keys and values of the beginning are computed once and stand in the cache of all rows it belongs to. The six
    pairs of a 2x2 grid have three first images.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model of the Qwen2-VL or Qwen2.5-VL family, without an adapter's wrapper.
        inputs (`dict`):
            Inputs for B pairs on the CPU, padded on the left, with encoded images on the model's device.
        firsts (`list`):
            For each row what identifies its first image.

    Returns:
        `dict`: inputs on the model's device: of the rest of the rows, with the cache of their beginnings, or the whole
        when no two rows begin alike.
    """
    features = inputs["mm_encoder_outputs"]["image"].pooler_output  # first and second image of each row in turn
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    starts = mask.argmax(dim=1).tolist()  # behind the padding
    first_images = (inputs["mm_token_type_ids"] == 1).int().argmax(dim=1).tolist()
    ends = [start + len(image) for start, image in zip(first_images, features[::2], strict=True)]
    # A chat template may put something that is the row's own in front of the image
    beginnings = [
        (first, tuple(row[start:end].tolist()))
        for first, row, start, end in zip(firsts, ids, starts, ends, strict=True)
    ]
    distinct = list(dict.fromkeys(beginnings))
    tensors = {name: value.to(model.device) for name, value in inputs.items() if torch.is_tensor(value)}
    if len(distinct) == len(beginnings):
        return {**inputs, **tensors}
    owner = torch.tensor([distinct.index(beginning) for beginning in beginnings])  # (B,)
    rows = [beginnings.index(beginning) for beginning in distinct]  # a row for each beginning
    positions, _ = model.model.get_rope_index(
        ids, inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"], attention_mask=mask
    )  # (3, B, T)

    def cut(spans: list[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
        parts = {
            "input_ids": _left_padded([ids[row, start:end] for row, start, end in spans]),
            "attention_mask": _left_padded([mask[row, start:end] for row, start, end in spans]),
        }
        position_ids = _left_padded([positions[:, row, start:end].T for row, start, end in spans])  # (rows, length, 3)
        return {**parts, "position_ids": position_ids.permute(2, 0, 1)}

    def encoded(images) -> dict[str, BaseModelOutputWithPooling]:
        return {"image": BaseModelOutputWithPooling(pooler_output=tuple(images))}

    beginning = cut([(row, starts[row], ends[row]) for row in rows])
    rest = cut([(row, end, ids.shape[1]) for row, end in enumerate(ends)])
    rest["attention_mask"] = torch.cat([beginning["attention_mask"][owner], rest["attention_mask"]], dim=1)
    beginning, rest = ({name: tensor.to(model.device) for name, tensor in part.items()} for part in (beginning, rest))
    cache = model.model(
        **beginning, mm_encoder_outputs=encoded(features[2 * row] for row in rows), use_cache=True
    ).past_key_values
    cache.batch_select_indices(owner.to(model.device))
    return {**rest, "mm_encoder_outputs": encoded(features[1::2]), "past_key_values": cache}


def _left_padded(sequences: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(sequences, batch_first=True, padding_side="left")
