# SPDX-License-Identifier: Apache-2.0
"""
Which instance an annotator ranks next, and in which order its candidates are shown.

Both come from hashes of names, not from random numbers: they are the same after a restart of the server and in every
tab of the browser, and differ from annotator to annotator, so that no instance is always ranked by tired people and no
candidate always has the first place.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence


# One gold question in as many instances
GOLD_EVERY = 10


def _number(*key: str | int) -> int:
    # As JSON, so that ("a", "bc") and ("ab", "c") are two keys
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest(), "big")


def keyed_order(annotator: str, instances: Iterable[str]) -> list[str]:
    """Give the order in which an annotator meets instances, where nothing else decides."""
    return sorted(instances, key=lambda instance: _number("instance", annotator, instance))


def shown_order(annotator: str, instance: str, count: int) -> list[int]:
    """Give the order in which the candidates of an instance are shown."""
    return sorted(range(count), key=lambda index: _number("candidate", annotator, instance, index))


def is_gold_turn(annotator: str, number: int) -> bool:
    """Whether an annotator's next instance is a gold question: one of each ten in a row, at a place that changes."""
    block, place = divmod(number, GOLD_EVERY)
    return place == _number("gold", annotator, block) % GOLD_EVERY


def next_instance(
    annotator: str,
    order: Sequence[str],
    gold_order: Sequence[str],
    done: Collection[str],
    counts: Mapping[str, int],
    annotations_per_instance: int,
) -> str | None:
    """Choose what an annotator ranks next."""
    left = (name for name in order if name not in done and counts.get(name, 0) < annotations_per_instance)
    # Of equals, `min` gives the first
    chosen = min(left, key=lambda name: counts.get(name, 0), default=None)
    if chosen is not None and is_gold_turn(annotator, len(done)):
        return next((name for name in gold_order if name not in done), chosen)
    return chosen
