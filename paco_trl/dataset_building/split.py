# SPDX-License-Identifier: Apache-2.0
"""Split by prompt: held-out data share no prompt and no image with the training data."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..data.texts import normalized


if TYPE_CHECKING:
    from datasets import Dataset


def keyed_hash(*key: int | str) -> int:
    """Compute a number that looks random and depends on its key alone."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, key)).encode("utf-8", "surrogatepass")).digest(), "big")


def connected_prompts(prompts: Mapping[str, str], images: Mapping[str, set[str]]) -> list[list[str]]:
    """Group the prompts that must stay together: those with the same text or a shared image."""
    from scipy.cluster.hierarchy import DisjointSet

    groups = DisjointSet(prompts)
    first_with: dict[tuple[str, str], str] = {}
    for name, text in prompts.items():
        for content in [("text", normalized(text)), *(("image", image) for image in sorted(images.get(name, ())))]:
            groups.merge(first_with.setdefault(content, name), name)
    order = {name: number for number, name in enumerate(prompts)}
    connected = [sorted(group, key=order.__getitem__) for group in groups.subsets()]
    return sorted(connected, key=lambda group: order[group[0]])


def split_prompts(groups: list[list[str]], test_size: float, seed: int) -> set[str]:
    """Choose the held-out prompts."""
    if not 0 <= test_size < 1:
        raise ValueError(f"`test_size` is {test_size}, but must be a fraction of the prompts: from 0 to below 1.")
    total = sum(map(len, groups))
    if test_size == 0:
        return set()
    wanted = max(1, round(test_size * total))
    chosen: set[str] = set()
    for group in sorted(groups, key=lambda group: keyed_hash(seed, group[0])):
        if len(chosen) + len(group) <= min(wanted, total - 1):
            chosen.update(group)
    if not chosen:
        sizes = [len(group) for group in groups] or [0]
        raise ValueError(
            f"`test_size` is {test_size} of {total} prompts, but none of the {len(groups)} groups that share a text or an image "
            f"fits, with {min(sizes)} to {max(sizes)} prompts. Generate more prompts, or set it to 0."
        )
    return chosen


def check_disjoint(trained: Mapping[str, set[str]], held_out: Mapping[str, set[str]], train: str, test: str) -> None:
    """Check that two datasets share nothing, by kind of content."""
    for kind in trained:
        shared = sorted(trained[kind] & held_out[kind])
        if shared:
            shown = f"{len(shared)} {kind} are both in {train} and in {test}, such as {shared[0]!r}"
            raise ValueError(f"{shown}: a judge would be evaluated on what it was trained on. Split again.")


def check_no_leak(train: "Dataset", test: "Dataset", texts: Mapping[str, str], images: Mapping[str, str]) -> None:
    """Check that two datasets share no prompt, no text and no image."""

    def contents(dataset: "Dataset") -> dict[str, set[str]]:
        groups = set(dataset["group"][:])
        return {
            "prompts": groups,
            "prompt texts": {normalized(texts[name]) for name in groups},
            "images": {images[name] for names in dataset["panels"][:] for name in names},
        }

    check_disjoint(contents(train), contents(test), "the training data", "what is held out")
