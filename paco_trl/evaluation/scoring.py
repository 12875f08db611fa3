# SPDX-License-Identifier: Apache-2.0
"""Scoring of a dataset's images by a judge or another scorer, and means of scores with their intervals."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from datasets import Dataset
from PIL import Image
from tqdm.auto import tqdm

from ..rewards import yes_probability
from ..rewards.fingerprint import describe_scorer
from ..utils.files import digest
from ..utils.fingerprint import describe
from ..utils.images import open_image, reading, to_rgb
from ..utils.journals import Journal
from ..utils.names import public_text
from ..utils.option_checks import PROTOCOLS
from ..utils.statistics import bootstrap_interval
from ..utils.text import shorten_path


# Texts before the two images in the published scripts
PUBLISHED_LABELS = ("<img1>: ", "<img2>: ")


def _without_alpha(image: Image.Image, where: str) -> Image.Image:
    image = image.convert("RGB")
    image.info.pop("transparency", None)  # otherwise `to_rgb` would still put this color on white
    return image


class RowImages:
    """Images of a dataset's rows in column order, converted for a judge."""

    def __init__(self, dataset: Dataset, columns: Sequence[str], protocol: str = "default"):
        self.dataset = dataset.select_columns(list(columns)).with_format("arrow")
        self.columns = columns
        self.convert = _without_alpha if protocol == "published" else to_rgb

    def __getitem__(self, index: int) -> list[Image.Image]:
        images = []
        for where, source in self._sources(index):
            with reading(where):
                image = open_image(source)
                image.load()  # detects truncated files, and closes the file
                images.append(self.convert(image, "the image"))
        return images

    def check_headers(self) -> None:
        """Open each image without decoding it, so that a missing or broken file shows before a judge is loaded."""
        opened_paths = set[str | None]()
        for index in range(len(self.dataset)):
            for where, source in self._sources(index):
                path = source["path"] if source and source["bytes"] is None else None
                if path is None or path not in opened_paths:
                    with reading(where), open_image(source):
                        opened_paths.add(path)

    def _sources(self, index: int) -> list[tuple[str, Any]]:
        """Return a name for errors and the stored image, for each image of a row."""
        (row,) = self.dataset[index].to_pylist()
        named_sources: list[tuple[str, Any]] = []
        for column in self.columns:
            if isinstance(row[column], list):
                named_sources += [(f"`{column}[{position}]`", image) for position, image in enumerate(row[column])]
            else:
                named_sources.append((f"`{column}`", row[column]))
        return [
            (f"{name} of row {index} ({shorten_path(source and source['path'] or 'embedded')})", source)
            for name, source in named_sources
        ]


def check_protocol(protocol: str) -> None:
    """Check the name of a protocol."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"`protocol` is {protocol!r}, but must be one of {', '.join(PROTOCOLS)}.")


@dataclass(frozen=True)
class ScorerTraits:
    """
    Optional attributes of a scorer. A scorer with only `name` and `score(images, prompts)` has the defaults.

    Attributes:
        compares (`bool`):
            Whether it is shown both edits of a pair, as (source, edit, edit), and returns 1 if the first edit is
            better, 0 if the second is, 0.5 for a tie, or `None`, which is never correct ([`ComparingJudge`]).
        rates (`bool`):
            Whether it returns scores of an edit by dimension, with `overall`, or `None`
            ([`~paco_trl.rewards.WordsJudge`]).
        template (`str`):
            Name of the prompt of a scorer that compares or rates. It gets the instruction in place of a question.
        question (`str`):
            The only question that the scorer was trained on.
        reads_questions (`bool`):
            Whether scores depend on the question. Such a scorer needs `top_logprobs` for the published protocol.
    """

    compares: bool = False
    rates: bool = False
    template: str | None = None
    question: str | None = None
    reads_questions: bool = True

    @property
    def judges_edits(self) -> bool:
        """Return whether the scorer has a prompt of its own about edits, rather than reading questions about pairs."""
        return self.compares or self.rates


def read_traits(scorer: Any) -> ScorerTraits:
    """Read the optional attributes of a scorer."""
    values: dict[str, Any] = {field.name: getattr(scorer, field.name, field.default) for field in fields(ScorerTraits)}
    return ScorerTraits(**values)


class RecordQuestions(NamedTuple):
    """Questions about images of a row, whose scores become one record. Each is about the first image and another."""

    key: Any
    row: int
    questions: Sequence[tuple[tuple[int, ...], str]]  # positions of the other images after the first, and the question


class ScoringRun:
    """Scoring of a dataset by one scorer, which resumes from the file of an interrupted run with the same settings."""

    def __init__(
        self,
        scorer: Any,
        dataset: Dataset,
        settings: dict[str, Any],
        columns: Sequence[str],
        image_columns: Sequence[str],
        output_path: str | Path | None,
        batch_size: int,
    ):
        self.scorer = scorer
        self.traits = read_traits(scorer)
        self.protocol = settings["protocol"]
        self.output_path = output_path
        self.batch_size = batch_size
        self.images = RowImages(dataset, image_columns, self.protocol)
        self.is_served = "://" in scorer.name  # another server is another run
        self.settings = settings | {
            "dataset_size": len(dataset),
            "dataset_fingerprint": dataset_fingerprint(dataset, [*columns, *image_columns]),
            "scorer": scorer.name if self.is_served else public_text(scorer.name),
            "judge": describe_scorer(scorer),
        }
        self.records: dict[Any, dict[str, Any]] = {}

    def score(
        self,
        key: str,
        items: Sequence[RecordQuestions],
        to_record: Callable[[RecordQuestions, list[Any]], dict[str, Any]],
        answers: tuple[Sequence[str], Sequence[str]] = (("Yes",), ("No",)),
        resizes: bool = False,
    ) -> dict[Any, dict[str, Any]]:
        """Score items without a record in the file, and return all records by their `key`."""
        journal = Journal(self.output_path, self.settings)
        records = self.records = {saved[key]: saved for saved in journal.records}
        rows = [list(row_items) for _, row_items in groupby(items, key=lambda item: item.row)]
        title = f"{self.settings['benchmark']}, {self.scorer.name}"
        with tqdm(total=len(items), initial=len(records), desc=title, unit=key) as progress:
            # Same batches as in an uninterrupted run, since the last bits of a score can depend on its batch
            for batch in batches(rows, lambda row: sum(len(item.questions) for item in row), self.batch_size):
                if not (unscored := [item for row in batch for item in row if item.key not in records]):
                    continue
                results = iter(self._query(*self._pairs_and_questions(unscored, resizes), answers))
                new_records = []
                for item in unscored:
                    scores, unanswered = zip(*islice(results, len(item.questions)), strict=True)
                    new_records.append(to_record(item, list(scores)) | {"unanswered": sum(unanswered)})
                journal.append(*new_records)
                records |= {record[key]: record for record in new_records}
                progress.update(len(unscored))
        return records

    def summarize(self) -> dict[str, Any]:
        """Return what the results of all benchmarks have in common."""
        # Published results should not have the server's address
        settings = self.settings | ({"scorer": self.scorer.model_name} if self.is_served else {})
        num_unanswered = sum(record["unanswered"] for record in self.records.values())
        return {
            "settings": settings,
            "num_instances": settings["dataset_size"],
            "num_unanswered": num_unanswered,
        }

    def _pairs_and_questions(
        self, items: Sequence[RecordQuestions], resizes: bool
    ) -> tuple[list[tuple[Image.Image, ...]], list[str]]:
        """Load the images of the items, with the first image of a row as one object in all of its pairs."""
        pairs, questions = [], []
        for row, row_items in groupby(items, key=lambda item: item.row):
            first, *candidates = self.images[row]
            candidates = [candidate.resize(first.size) for candidate in candidates] if resizes else candidates
            for positions, question in (question for item in row_items for question in item.questions):
                pairs.append((first, *(candidates[position] for position in positions)))
                questions.append(question)
        return pairs, questions

    def _query(
        self,
        pairs: list[tuple[Image.Image, ...]],
        questions: list[str],
        answers: tuple[Sequence[str], Sequence[str]],
    ) -> list[tuple[Any, bool]]:
        """Return the score of each pair, and whether its answer is missing: a score of 0, or `None` about edits."""
        scores: list[tuple[Any, bool]] = []
        if self.protocol == "published" and self.traits.reads_questions:
            for tokens in self.scorer.top_logprobs(pairs, questions, PUBLISHED_LABELS):
                score = math.nan if tokens is None else yes_probability(tokens, *answers)  # NaN is rejected below
                scores.append((0.0, True) if score is None else (score, False))
        else:
            for score in self.scorer.score(pairs, questions):
                if score is None:
                    scores.append((None, self.traits.judges_edits))
                else:
                    scores.append((score if isinstance(score, Mapping) else float(score), False))
        name = self.scorer.name
        if len(scores) != len(pairs):
            raise ValueError(
                f"The scorer {name!r} gave {len(scores)} scores for {len(pairs)} pairs, but must give one per pair."
            )
        for (score, is_unanswered), question in zip(scores, questions, strict=True):
            values = score.values() if isinstance(score, Mapping) else [score]
            if not is_unanswered and not all(value is not None and math.isfinite(value) for value in values):
                raise ValueError(f"The scorer {name!r} gave no finite score for the question {question!r}.")
        return scores


def dataset_fingerprint(dataset: Dataset, columns: Sequence[str]) -> str:
    """Compute a digest of the columns of a dataset that are read."""
    return digest(describe(dataset.select_columns(list(columns))))[:16]


def batches(items: Iterable[Any], size: Callable[[Any], int], batch_size: int) -> Iterator[list[Any]]:
    """Group consecutive items into batches of total size up to `batch_size`; larger items are their own batch."""
    batch: list[Any] = []
    total = 0
    for item in items:
        if batch and total + size(item) > batch_size:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


def mean_over_rows(
    values: Sequence[float], groups: Sequence[Hashable] | None, strata: Sequence[str] | None = None
) -> dict[str, Any]:
    """Compute the mean of defined values (or of the means of strata), and its interval, with groups resampled."""
    mean = float(pd.Series(values, dtype=float).groupby(strata or [""] * len(values)).mean().mean())
    if math.isnan(mean):
        return {"mean": mean, "interval": [mean, mean]}
    return {"mean": mean, "interval": list(bootstrap_interval(values, groups, strata=strata))}
