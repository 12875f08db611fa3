# SPDX-License-Identifier: Apache-2.0
"""Sharing of the language model's work between questions that begin with the same images."""

from collections.abc import Hashable
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..utils.tensors import to_device


def order_for_sharing(images: list[tuple[Hashable, ...]], prompts: list[str]) -> list[int]:
    """Sort questions by length, keeping those that begin with the same images next to each other."""
    beginnings = [[keys[: level + 1] for level in range(len(keys))] for keys in images]
    longest: dict[tuple, int] = {}
    earliest: dict[tuple, int] = {}
    for index, prompt in enumerate(prompts):
        for beginning in beginnings[index]:
            longest[beginning] = max(longest.get(beginning, 0), len(prompt))
            earliest.setdefault(beginning, index)

    def sort_key(index: int) -> list[tuple[int, int]]:
        levels = [(longest[beginning], earliest[beginning]) for beginning in beginnings[index]]
        return [*levels, (len(prompts[index]), index)]

    return sorted(range(len(prompts)), key=sort_key)


def share_prefixes(model: PreTrainedModel, inputs: dict, images: list[tuple[Hashable, ...]]) -> dict:
    """Run the language model once over each distinct beginning of rows; return what remains, with the cache."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    count = len(images[0])  # the six pairs of a 2x2 grid have three first images
    features = inputs["mm_encoder_outputs"]["image"].pooler_output  # images of each row in turn
    features = [features[start : start + count] for start in range(0, len(features), count)]
    positions, _ = model.model.get_rope_index(
        ids, inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"], attention_mask=mask
    )  # (3, B, T)
    starts = mask.argmax(dim=1).tolist()  # after the padding
    image_ends = [_image_ends(*row) for row in zip(inputs["mm_token_type_ids"], features, strict=True)]
    # Rows are cut after each image, and at their end
    cuts = [*zip(*image_ends, strict=True), [ids.shape[1]] * len(ids)]
    # Label of each row's beginning up to each cut: images and tokens, since a chat template may vary what precedes an
    # image. At the last cut each row is distinct.
    beginnings: list[list] = [
        [
            (keys[: level + 1], tuple(row[start:end].tolist()))
            for keys, row, start, end in zip(images, ids, starts, cuts[level], strict=True)
        ]
        for level in range(count)
    ] + [list(range(len(ids)))]

    num_seen = 0  # images of earlier parts
    cache, cache_rows, past_mask = None, mask, mask  # the latter are set with the cache
    for level, (ends, labels) in enumerate(zip(cuts, beginnings, strict=True)):
        distinct = {label: index for index, label in enumerate(dict.fromkeys(labels))}
        if level < count and len(distinct) == len(set(beginnings[level + 1])):
            continue  # the same rows also share the next part
        rows = [labels.index(label) for label in distinct]  # one row per beginning
        part = {
            "input_ids": _left_padded([ids[row, starts[row] : ends[row]] for row in rows]),
            "attention_mask": _left_padded([mask[row, starts[row] : ends[row]] for row in rows]),
            "position_ids": _left_padded([positions[:, row, starts[row] : ends[row]].T for row in rows]).permute(
                2, 0, 1
            ),
        }
        if cache is not None:
            selected = cache_rows[rows]
            cache.batch_select_indices(to_device(selected, model.device))
            part["attention_mask"] = torch.cat([past_mask[selected], part["attention_mask"]], dim=1)
        past_mask = part["attention_mask"]
        part = {name: to_device(tensor, model.device) for name, tensor in part.items()}
        if cache is not None:
            part["past_key_values"] = cache
        encoded = [image for row in rows for image in features[row][num_seen : level + 1]]
        if encoded:
            part["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=tuple(encoded))}
        if level < count:
            cache = model.model(**part, use_cache=True).past_key_values
            cache_rows = torch.tensor([distinct[label] for label in labels])  # (B,)
            starts, num_seen = ends, level + 1
    return part


def _image_ends(token_types: torch.Tensor, encoded: list[torch.Tensor]) -> list[int]:
    """Return the positions after the last token of each image of a row."""
    positions = (token_types == 1).nonzero().flatten().tolist()
    return [positions[total - 1] + 1 for total in accumulate(len(image) for image in encoded)]


def _left_padded(sequences: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(sequences, batch_first=True, padding_side="left")
