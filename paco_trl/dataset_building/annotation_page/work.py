# SPDX-License-Identifier: Apache-2.0
"""What is to be ranked, what is ranked, and by whom; the page's side that knows nothing of the web."""

import logging
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...data.columns import check_is_dataset, list_lengths
from ...data.image_sets import parse_image_set_prompt
from ...utils.journals import read_lines
from ...utils.text import shorten
from ..annotations import (
    AUTOMATIC,
    append_annotation,
    check_annotator,
    digests_by_instance,
    ranks_of_ranking,
    read_annotations,
)
from .assignment import keyed_order, next_instance, shown_order


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)

# What fits on a screen
MAX_CANDIDATES = 12
_MAX_SECONDS = 1e9
_DIMENSIONS = ["identity", "style", "logic"]


class RefusedError(ValueError):
    """Something that the page was sent and that is not taken; the message is for the person in front of it."""


class _Subject(NamedTuple):
    """What an annotator reads about a prompt."""

    theme: str
    dimensions: list[str]


class AnnotationWork:
    """The instances, and the rankings of all annotators, on disk and in memory."""

    def __init__(
        self,
        instances: "Dataset",
        panels: "Dataset",
        prompts: "Dataset | None",
        folder: Path,
        annotations_per_instance: int,
        gold: Path | None = None,
        not_people: Collection[str] = (),
    ):
        if type(annotations_per_instance) is not int or annotations_per_instance < 1:
            raise ValueError(
                f"`annotations_per_instance` is {annotations_per_instance!r}. It must be an int of at least 1."
            )
        self.folder = Path(folder)
        self.annotations_per_instance = annotations_per_instance
        self.not_people = frozenset(not_people)
        self._lock = threading.RLock()
        self._read_instances(instances, panels)
        self._subjects = _read_subjects(instances, prompts)
        self.gold = self._read_gold(gold)
        self._regular = [name for name in self._row_of if name not in self.gold]
        if not self._regular:
            raise ValueError(
                f"All {len(self.gold)} instances are gold questions of {gold}, so that nothing is left to rank. Give "
                "more instances, or a file with fewer rankings."
            )
        self._orders = lru_cache(maxsize=64)(self._keyed_orders)
        self._read_annotations()

    def _read_instances(self, instances: "Dataset", panels: "Dataset") -> None:
        from datasets import Image

        for name, dataset, columns in (
            ("instances", instances, ["id", "prompt_id", "reference", "candidates"]),
            ("panels", panels, ["id", "sha256", "image"]),
        ):
            check_is_dataset(dataset, name)
            missing = [column for column in columns if column not in dataset.column_names]
            if missing:
                raise ValueError(f"`{name}` needs the columns {missing} besides {dataset.column_names}.")
        self._instances = instances.with_format(None)
        self._digests = digests_by_instance(instances)
        # Not decoded: an image is sent as it is on disk
        self._panels = panels.with_format(None).cast_column("image", Image(decode=False))
        ids = self._instances["id"][:]
        self._row_of = {name: row for row, name in enumerate(ids)}
        if len(self._row_of) < len(ids):
            twice = next(name for name, count in Counter(ids).items() if count > 1)
            raise ValueError(f"`instances` has the id {twice!r} more than once. Rankings could not be told apart.")
        for name, count in zip(ids, list_lengths(instances, "candidates").tolist(), strict=True):
            if not 2 <= count <= MAX_CANDIDATES:
                raise ValueError(
                    f"The instance {name!r} has {count} candidates, but the page shows 2 to {MAX_CANDIDATES}. Pair "
                    "fewer seeds at a time, or leave the instance out."
                )

        hashes = self._panels["sha256"][:]
        self._sha_of = dict(zip(self._panels["id"][:], hashes, strict=True))
        # A picture has one address, whatever the number of panels that show it: the address says what is in it, so
        # that a browser may keep it, and not which seed it is from
        self._panel_row_of = {sha256: row for row, sha256 in enumerate(hashes)}
        used = zip(self._instances["reference"][:], self._instances["candidates"][:], strict=True)
        for name, (reference, candidates) in zip(ids, used, strict=True):
            for panel in [reference, *candidates]:
                if panel not in self._sha_of:
                    raise ValueError(
                        f"The instance {name!r} has the panel {panel!r}, which `panels` does not have. Give the panels "
                        "that the instances were made of."
                    )

    def _read_gold(self, gold: Path | None) -> set[str]:
        if gold is None:
            return set()
        gold = Path(gold)
        if not gold.is_file():
            raise FileNotFoundError(f"There is no file {gold} with gold questions (`gold`).")
        if gold.resolve().parent == self.folder.resolve():
            raise ValueError(
                f"The gold questions {gold} are in the folder of the annotations, where they would count as those of "
                "an annotator. Move the file elsewhere."
            )
        known = read_annotations([gold], self._instances)
        return {annotation.instance for annotation in known if annotation.ranks is not None}

    def _read_annotations(self) -> None:
        paths = sorted(self.folder.glob("*.jsonl"))
        annotations = read_annotations(paths, self._instances)
        # Of each annotator, by instance, in the order in which they were first done: this is the way back
        self._done: dict[str, dict[str, tuple[int, ...] | None]] = {}
        for path in paths:
            for _, record in read_lines(path):
                self._done.setdefault(record["annotator"], {})[record["instance"]] = None
        for annotation in annotations:
            self._done[annotation.annotator][annotation.instance] = annotation.ranks
        self._counts: Counter[str] = Counter()
        self._num_gold = 0
        for annotator, done in self._done.items():
            for instance, ranks in done.items():
                self._count(annotator, instance, int(ranks is not None))

    def _count(self, annotator: str, instance: str, change: int) -> None:
        if annotator in self.not_people:
            return
        if instance in self.gold:
            self._num_gold += change
        else:
            self._counts[instance] += change

    def _keyed_orders(self, annotator: str) -> tuple[list[str], list[str]]:
        return keyed_order(annotator, self._regular), keyed_order(annotator, self.gold)

    def check_name(self, annotator: Any) -> str:
        """Check the name that a person gives."""
        try:
            name = check_annotator(annotator)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        if name in self.not_people or name == AUTOMATIC:
            raise RefusedError(f"The name {name!r} is that of an automatic ranking. Take another one.")
        return name

    def _row(self, instance: Any) -> dict[str, Any]:
        if not isinstance(instance, str) or instance not in self._row_of:
            raise RefusedError(f"There is no instance {shorten(instance)}. Reload the page.")
        return self._instances[self._row_of[instance]]

    def task(self, annotator: Any, instance: Any = None) -> dict[str, Any]:
        """Give what the page shows."""
        annotator = self.check_name(annotator)
        with self._lock:
            done = self._done.get(annotator, {})
            if instance is None:
                order, gold_order = self._orders(annotator)
                instance = next_instance(
                    annotator, order, gold_order, done, self._counts, self.annotations_per_instance
                )
            task = {"instance": None} if instance is None else self._shown(annotator, instance)
            history = list(done)
            if instance in done:
                history = history[: history.index(instance)]
            return task | {"previous": history[-1] if history else None, "progress": self._progress(done)}

    def _shown(self, annotator: str, instance: str) -> dict[str, Any]:
        row = self._row(instance)
        ranks = self._done.get(annotator, {}).get(instance)
        indices = range(len(row["candidates"]))
        subject = self._subjects.get(row["prompt_id"], _Subject("", _DIMENSIONS))
        return {
            "instance": instance,
            "theme": subject.theme,
            "dimensions": subject.dimensions,
            "reference": self._address(row["reference"]),
            "candidates": [
                {"index": index, "image": self._address(row["candidates"][index])}
                for index in shown_order(annotator, instance, len(indices))
            ],
            "order": [] if ranks is None else sorted(indices, key=ranks.__getitem__),
            "skipped": ranks is None and instance in self._done.get(annotator, {}),
        }

    def _address(self, panel: str) -> str:
        return f"/image/{self._sha_of[panel]}"

    def _progress(self, done: Mapping[str, tuple[int, ...] | None]) -> dict[str, int]:
        ranked = sum(ranks is not None for ranks in done.values())
        wanted = self.annotations_per_instance
        rankings = sum(min(count, wanted) for count in self._counts.values())
        return {
            "ranked": ranked,
            "skipped": len(done) - ranked,
            "rankings": rankings + self._num_gold,
            "needed": wanted * len(self._regular) + self._num_gold,
        }

    def save(self, sent: Any) -> str:
        """Check what the page sent, and write it to the disk."""
        if not isinstance(sent, dict):
            raise RefusedError(f"{shorten(sent)} is no ranking. Reload the page.")
        annotator, instance = self.check_name(sent.get("annotator")), sent.get("instance")
        count = len(self._row(instance)["candidates"])
        record: dict[str, Any] = {"annotator": annotator, "instance": instance}
        record |= self._digests.get(instance, {})
        if ("ranking" in sent) == ("skipped" in sent):
            raise RefusedError(f"It has the keys {list(sent)}, but must have one of `ranking` and `skipped`.")
        if "skipped" in sent:
            if sent["skipped"] is not True:
                raise RefusedError(f"`skipped` is {shorten(sent['skipped'])}, but must be true.")
            ranks = None
            record["skipped"] = True
        else:
            ranks = _check_ranking(sent["ranking"], count)
            record["ranking"] = sent["ranking"]
        record["seconds"] = _check_seconds(sent.get("seconds"))
        record["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        with self._lock:
            append_annotation(self.folder, record)
            done = self._done.setdefault(annotator, {})
            self._count(annotator, instance, int(ranks is not None) - int(done.get(instance) is not None))
            done[instance] = ranks
        return annotator

    def image(self, sha256: str) -> dict[str, Any]:
        """Give an image as the dataset has it."""
        return self._panels[self._panel_row_of[sha256]]["image"]


def _check_ranking(ranking: Any, count: int) -> tuple[int, ...]:
    if not isinstance(ranking, list):
        raise RefusedError(f"The ranking is {shorten(ranking)}, but must be a list of candidates, best first.")
    try:
        ranks = ranks_of_ranking(ranking)
    except ValueError as error:
        raise RefusedError(f"The ranking is not taken: {error} The instance has {count}.") from error
    if len(ranks) != count:
        raise RefusedError(f"The ranking is not complete: it has {len(ranks)} of {count} candidates.")
    return ranks


def _check_seconds(seconds: Any) -> float:
    # A comparison with NaN is false
    if type(seconds) not in (int, float) or not 0 <= seconds <= _MAX_SECONDS:
        raise RefusedError(f"`seconds` is {shorten(seconds)}, but must be a number from 0 to {_MAX_SECONDS:g}.")
    return round(seconds, 1)


def _read_subjects(instances: "Dataset", prompts: "Dataset | None") -> dict[str, _Subject]:
    """Give what is shown of each prompt, by its id."""
    if prompts is None:
        return {}
    prompts = prompts.with_format(None)
    missing = [name for name in ("id", "prompt") if name not in prompts.column_names]
    if missing:
        raise ValueError(f"`prompts` needs the columns {missing} besides {prompts.column_names}.")
    names = [name for name in ("id", "prompt", "theme", "dimensions") if name in prompts.column_names]
    rows = prompts.select_columns(names).to_list()
    subjects = {row["id"]: _Subject(_theme(row), row.get("dimensions") or _DIMENSIONS) for row in rows}
    unknown = next((name for name in instances["prompt_id"] if name not in subjects), None)
    if unknown is not None:
        raise ValueError(
            f"There are instances of the prompt {unknown!r}, which `prompts` does not have. Give the prompts that the "
            "instances were made of, or none."
        )
    return subjects


def _theme(row: Mapping[str, Any]) -> str:
    if row.get("theme"):
        return row["theme"]
    try:
        return parse_image_set_prompt(row["prompt"]).theme
    except ValueError:  # a prompt that is no image set is shown whole
        return row["prompt"]
