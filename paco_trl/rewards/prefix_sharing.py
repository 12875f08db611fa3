# SPDX-License-Identifier: Apache-2.0
"""Share the language model's work between questions that begin with the same images."""

from collections.abc import Hashable
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..utils.tensors import to_device


def order_for_sharing(images: list[tuple[Hashable, ...]], prompts: list[str]) -> list[int]:
    """Sort questions by length, keeping questions that begin with the same images next to each other."""
    prefixes = [[keys[: level + 1] for level in range(len(keys))] for keys in images]
    longest: dict[tuple, int] = {}
    earliest: dict[tuple, int] = {}
    for index, prompt in enumerate(prompts):
        for prefix in prefixes[index]:
            longest[prefix] = max(longest.get(prefix, 0), len(prompt))
            earliest.setdefault(prefix, index)

    def sort_key(index: int) -> list[tuple[int, int]]:
        levels = [(longest[prefix], earliest[prefix]) for prefix in prefixes[index]]
        return [*levels, (len(prompts[index]), index)]

    return sorted(range(len(prompts)), key=sort_key)


def share_prefixes(model: PreTrainedModel, inputs: dict, images: list[tuple[Hashable, ...]]) -> dict:
    """Run the language model once per distinct prefix of the rows; return the remaining inputs, with the cache."""
    ids = inputs["input_ids"]
    mask = inputs["attention_mask"]
    count = len(images[0])
    features = inputs["mm_encoder_outputs"]["image"].pooler_output  # features of the images of all rows, row by row
    features = [features[start : start + count] for start in range(0, len(features), count)]
    positions, _ = model.model.get_rope_index(
        ids, inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"], attention_mask=mask
    )  # (3, B, T)
    starts = mask.argmax(dim=1).tolist()  # first positions after the padding
    image_ends = [_image_ends(*row) for row in zip(inputs["mm_token_type_ids"], features, strict=True)]
    # Rows are cut after each image and at their end: the six pairs of a 2x2 grid share three first images
    cuts = [*zip(*image_ends, strict=True), [ids.shape[1]] * len(ids)]
    # Label of each row's prefix up to each cut: images and tokens, since a chat template may vary what precedes an
    # image. At the last cut, all rows are distinct.
    labels_by_cut: list[list] = [
        [
            (keys[: level + 1], tuple(row[start:end].tolist()))
            for keys, row, start, end in zip(images, ids, starts, cuts[level], strict=True)
        ]
        for level in range(count)
    ] + [list(range(len(ids)))]

    num_images = 0  # images in earlier segments
    cache, cache_rows, past_mask = None, mask, mask  # the last two are set with the cache
    for level, (ends, labels) in enumerate(zip(cuts, labels_by_cut, strict=True)):
        prefix_indices = {label: index for index, label in enumerate(dict.fromkeys(labels))}
        if level < count and len(prefix_indices) == len(set(labels_by_cut[level + 1])):
            continue  # the same rows also share the next segment
        rows = [labels.index(label) for label in prefix_indices]  # one row per prefix
        segment = {
            "input_ids": _left_pad([ids[row, starts[row] : ends[row]] for row in rows]),
            "attention_mask": _left_pad([mask[row, starts[row] : ends[row]] for row in rows]),
            "position_ids": _left_pad([positions[:, row, starts[row] : ends[row]].T for row in rows]).permute(2, 0, 1),
        }
        if cache is not None:
            selected_rows = cache_rows[rows]
            cache.batch_select_indices(to_device(selected_rows, model.device))
            segment["attention_mask"] = torch.cat([past_mask[selected_rows], segment["attention_mask"]], dim=1)
        past_mask = segment["attention_mask"]
        segment = {name: to_device(tensor, model.device) for name, tensor in segment.items()}
        if cache is not None:
            segment["past_key_values"] = cache
        new_features = [image for row in rows for image in features[row][num_images : level + 1]]
        if new_features:
            segment["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=tuple(new_features))}
        if level < count:
            cache = model.model(**segment, use_cache=True).past_key_values
            cache_rows = torch.tensor([prefix_indices[label] for label in labels])  # (B,)
            starts = ends
            num_images = level + 1
    return segment


def _image_ends(token_types: torch.Tensor, features: list[torch.Tensor]) -> list[int]:
    """Return the positions after the last token of each image of a row."""
    positions = (token_types == 1).nonzero().flatten().tolist()
    return [positions[total - 1] + 1 for total in accumulate(len(image) for image in features)]


def _left_pad(sequences: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(sequences, batch_first=True, padding_side="left")
