# SPDX-License-Identifier: Apache-2.0
"""Choose which instance an annotator ranks next, in which order its candidates are shown, and save the rankings."""

import itertools
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.columns import by_id
from ..data.rankings import theme_of
from ..utils.journals import read_lines
from ..utils.text import shorten
from .annotations import (
    AUTOMATIC,
    annotations_lock,
    append_annotation,
    check_annotator,
    digests_by_instance,
    ranks_of_record,
    read_annotations,
)
from .split import keyed_hash


if TYPE_CHECKING:
    from datasets import Dataset


# One gold question in as many instances
GOLD_EVERY = 10
_DIMENSIONS = ["identity", "style", "logic"]


def shown_order(annotator: str, instance: str, count: int) -> list[int]:
    """Return the order in which the candidates of an instance are shown."""
    # By a hash: the same after a restart and in every tab, and different between annotators
    return sorted(range(count), key=lambda index: keyed_hash("candidate", annotator, instance, index))


def is_gold_turn(annotator: str, number: int) -> bool:
    """Tell whether an annotator's next instance is a gold question: one in each ten, at a changing place."""
    block, place = divmod(number, GOLD_EVERY)
    return place == keyed_hash("gold", annotator, block) % GOLD_EVERY


def next_instance(
    annotator: str,
    names: Collection[str],
    gold: Collection[str],
    done: Collection[str],
    counts: Mapping[str, int],
    annotations_per_instance: int,
) -> str | None:
    """Choose what an annotator ranks next: what has the fewest rankings, in an order of their own."""

    def key(name: str) -> tuple[int, int]:
        return counts.get(name, 0), keyed_hash("instance", annotator, name)

    left = [name for name in names if name not in done and counts.get(name, 0) < annotations_per_instance]
    left_gold = [name for name in gold if name not in done] if is_gold_turn(annotator, len(done)) else []
    return min(left and left_gold or left, key=key, default=None)


class AnnotationWork:
    """Instances and rankings of all annotators, on disk and in memory."""

    def __init__(
        self,
        instances: "Dataset",
        panels: "Dataset",
        prompts: "Dataset",
        folder: str | Path,
        annotations_per_instance: int = 3,
        gold: str | Path | None = None,
        not_people: Collection[str] = (),
    ):
        if annotations_per_instance < 1:
            raise ValueError(f"`annotations_per_instance` is {annotations_per_instance}. It must be at least 1.")
        self.folder, self.annotations_per_instance = Path(folder), annotations_per_instance
        self._not_people = {AUTOMATIC, *not_people}
        self._lock = threading.Lock()
        self.file_lock = annotations_lock(self.folder)  # of the process that serves them
        self._rows = {row["id"]: row for row in instances.with_format(None)}
        self._digests = digests_by_instance(instances)
        self._prompts = {row["id"]: row for row in prompts.with_format(None)}
        self._sha_of = by_id(panels, "sha256")
        # The address of an image is the digest of its pixels: a browser may keep it, and it does not tell the seed
        self.image_files = {self._sha_of[name]: image["path"] for name, image in by_id(panels, "image").items()}
        self.gold = self._read_gold(gold, instances)
        self._regular = [name for name in self._rows if name not in self.gold]
        if not self._regular:
            raise ValueError(f"All {len(self.gold)} instances are gold questions of {gold}: nothing is left to rank.")
        paths = sorted(self.folder.glob("*.jsonl"))
        ranks = {
            (annotation.annotator, annotation.instance): annotation.ranks
            for annotation in read_annotations(paths, instances)
        }
        # Of each annotator, by instance, in the order in which they were first ranked: this is the way back
        self._done: dict[str, dict[str, tuple[int, ...] | None]] = {}
        for _, record in itertools.chain.from_iterable(map(read_lines, paths)):
            annotator, instance = record["annotator"], record["instance"]
            self._done.setdefault(annotator, {})[instance] = ranks[annotator, instance]

    def _read_gold(self, gold: str | Path | None, instances: "Dataset") -> set[str]:
        if gold is None:
            return set()
        if Path(gold).resolve().parent == self.folder.resolve():
            raise ValueError(f"The gold questions {gold} are in the directory of the annotations. Move them.")
        return {annotation.instance for annotation in read_annotations([gold], instances) if annotation.ranks}

    def _check_name(self, annotator: Any) -> str:
        if check_annotator(annotator) in self._not_people:
            raise ValueError(f"The name {annotator!r} is that of an automatic ranking. Choose another one.")
        return annotator

    def task(self, annotator: Any, instance: Any = None) -> dict[str, Any]:
        """Return what an annotator is shown: an instance, or the next one if it does not exist."""
        annotator = self._check_name(annotator)
        with self._lock:
            done = dict(self._done.get(annotator, {}))
            counts = Counter(
                name
                for other, rankings in self._done.items()
                for name, ranks in rankings.items()
                if other not in self._not_people and ranks is not None and name not in self.gold
            )
        needed = self.annotations_per_instance
        if instance not in self._rows:
            instance = next_instance(annotator, self._regular, self.gold, done, counts, needed)
        history = list(done)
        history = history[: history.index(instance)] if instance in done else history
        ranked = sum(ranks is not None for ranks in done.values())
        finished = sum(min(count, needed) for count in counts.values()) / (needed * len(self._regular))
        task = {
            "annotator": annotator,
            "instance": instance,
            "previous": history[-1] if history else None,
            "ranked": ranked,
            "skipped": len(done) - ranked,
            "percent": int(100 * finished),
        }
        return task if instance is None else task | self._shown(annotator, instance, done)

    def _shown(self, annotator: str, instance: str, done: Mapping[str, tuple[int, ...] | None]) -> dict[str, Any]:
        row, ranks = self._rows[instance], done.get(instance)
        prompt = self._prompts[row["prompt_id"]]
        shown = shown_order(annotator, instance, len(row["candidates"]))
        return {
            "theme": theme_of(prompt),
            "dimensions": prompt.get("dimensions") or _DIMENSIONS,
            "reference": f"/image/{self._sha_of[row['reference']]}",
            "images": [f"/image/{self._sha_of[row['candidates'][index]]}" for index in shown],
            # Places of the shown images, best first
            "order": [] if ranks is None else sorted(range(len(shown)), key=lambda place: ranks[shown[place]]),
            "was_skipped": instance in done and ranks is None,
        }

    def save(self, annotator: Any, instance: Any, order: Any, seconds: float) -> None:
        """Check an order of the shown images (`None` to skip the instance), and save it."""
        annotator = self._check_name(annotator)
        if instance not in self._rows:
            raise ValueError(f"There is no instance {shorten(instance)}. Reload the page.")
        count = len(self._rows[instance]["candidates"])
        record = {"annotator": annotator, "instance": instance, **self._digests.get(instance, {})}
        if order is None:
            ranks, record["skipped"] = None, True
        else:
            if len(order) < count:
                raise ValueError(f"Rank all candidates: {count - len(order)} of {count} are left.")
            # Checks the order before its places are looked up
            ranks_of_record({"ranking": order}, count)
            shown = shown_order(annotator, instance, count)
            record["ranking"] = [shown[place] for place in order]
            ranks = ranks_of_record(record, count)
        record |= {"seconds": round(seconds, 1), "time": datetime.now(UTC).isoformat(timespec="seconds")}
        with self._lock:
            append_annotation(self.folder, record)
            self._done.setdefault(annotator, {})[instance] = ranks
