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
    """
    Give the order in which an annotator meets instances, where nothing else decides.

    Args:
        annotator (`str`):
            Name of the annotator.
        instances (`Iterable[str]`):
            Ids of the instances.

    Returns:
        `list[str]`: the ids in an order of the annotator's own, in whatever order they were given.
    """
    return sorted(instances, key=lambda instance: _number("instance", annotator, instance))


def shown_order(annotator: str, instance: str, count: int) -> list[int]:
    """
    Give the order in which the candidates of an instance are shown.

    Args:
        annotator (`str`):
            Name of the annotator.
        instance (`str`):
            Id of the instance.
        count (`int`):
            Number of its candidates.

    Returns:
        `list[int]`: the indices of the candidates, the one shown first first.
    """
    return sorted(range(count), key=lambda index: _number("candidate", annotator, instance, index))


def is_gold_turn(annotator: str, number: int) -> bool:
    """
    Whether an annotator's next instance is a gold question: one of each ten in a row, at a place that changes.

    Args:
        annotator (`str`):
            Name of the annotator.
        number (`int`):
            Number of instances that the annotator has done.

    Returns:
        `bool`.
    """
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
    """
    Choose what an annotator ranks next.

    Args:
        annotator (`str`):
            Name of the annotator.
        order (`Sequence[str]`):
            Ids of the instances that are no gold questions, in the annotator's order (see [`keyed_order`]).
        gold_order (`Sequence[str]`):
            Ids of the gold questions, in the annotator's order.
        done (`Collection[str]`):
            Ids of all that the annotator has ranked or skipped.
        counts (`Mapping[str, int]`):
            Number of rankings by instance, over all annotators; 0 where it has none.
        annotations_per_instance (`int`):
            Number of rankings that an instance needs.

    Returns:
        `str` or `None`: the id; of the instances with the fewest rankings the first in the annotator's order, or, if it
        is the turn of one, a gold question. `None` if nothing is left that needs a ranking of this annotator.
    """
    left = (name for name in order if name not in done and counts.get(name, 0) < annotations_per_instance)
    # Of equals, `min` gives the first
    chosen = min(left, key=lambda name: counts.get(name, 0), default=None)
    if chosen is not None and is_gold_turn(annotator, len(done)):
        return next((name for name in gold_order if name not in done), chosen)
    return chosen
