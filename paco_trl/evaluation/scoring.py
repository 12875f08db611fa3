# SPDX-License-Identifier: Apache-2.0
"""Scoring of a dataset by a judge or another scorer: its images, its calls, and what a mean of scores is."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
    image.info.pop("transparency", None)  # or `to_rgb` would still put this color on white
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
        """Return the stored images of a row, each after its name for errors."""
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


def judges_edits(scorer: Any) -> bool:
    """Return whether a scorer compares or rates edits, with a template of its own, rather than scoring pairs."""
    return getattr(scorer, "compares", False) or getattr(scorer, "rates", False)


class RecordQuestions(NamedTuple):
    """Questions about the first image of a row and others, whose scores become one record."""

    key: Any
    row: int
    questions: Sequence[tuple[tuple[int, ...], str]]  # indices of the other images, and the question


def score_records(
    *,
    settings: dict[str, Any],
    scorer: Any,
    dataset: Dataset,
    columns: Sequence[str],
    image_columns: Sequence[str],
    output_path: str | Path | None,
    batch_size: int,
    key: str,
    items: Sequence[RecordQuestions],
    record: Callable[[RecordQuestions, list[Any]], dict[str, Any]],
    answers: tuple[Sequence[str], Sequence[str]] = (("Yes",), ("No",)),
    resizes: bool = False,
) -> tuple[dict[str, Any], dict[Any, dict[str, Any]]]:
    """Score items without a record in the file; return the common part of results, and all records by `key`."""
    protocol = settings["protocol"]
    fingerprint = dataset_fingerprint(dataset, [*columns, *image_columns])
    settings = settings | {"dataset_size": len(dataset), "dataset_fingerprint": fingerprint}
    is_served = "://" in scorer.name  # another server is another run
    name = scorer.name if is_served else public_text(scorer.name)
    settings |= {"scorer": name, "judge": describe_scorer(scorer)}
    images = RowImages(dataset, image_columns, protocol)
    journal = Journal(output_path, settings)
    done = {saved[key]: saved for saved in journal.records}
    rows = [list(row_items) for _, row_items in groupby(items, key=lambda item: item.row)]
    title = f"{settings['benchmark']}, {scorer.name}"
    with tqdm(total=len(items), initial=len(done), desc=title, unit=key) as progress:
        # Same batches as in an uninterrupted run, since the last bits of a score can depend on its batch
        for batch in batches(rows, lambda row_items: sum(len(item.questions) for item in row_items), batch_size):
            unscored = [item for row_items in batch for item in row_items if item.key not in done]
            pairs, questions = [], []
            for row, row_items in groupby(unscored, key=lambda item: item.row):
                first, *candidates = images[row]
                candidates = [candidate.resize(first.size) for candidate in candidates] if resizes else candidates
                for positions, question in (question for item in row_items for question in item.questions):
                    pairs.append((first, *(candidates[position] for position in positions)))
                    questions.append(question)
            if unscored:
                results = iter(_score(scorer, protocol, pairs, questions, *answers))
                records = []
                for item in unscored:
                    scores, unanswered = zip(*islice(results, len(item.questions)), strict=True)
                    records.append(record(item, list(scores)) | {"unanswered": sum(unanswered)})
                journal.append(*records)
                done |= {saved[key]: saved for saved in records}
                progress.update(len(unscored))
    if is_served:  # published results should not have the server's address
        settings["scorer"] = scorer.model_name
    num_unanswered = sum(saved["unanswered"] for saved in done.values())
    common = {"settings": settings, "num_instances": len(dataset), "num_unanswered": num_unanswered}
    return common, done


def _score(
    scorer: Any, protocol: str, pairs: list, questions: list[str], yes: Sequence[str], no: Sequence[str]
) -> list[tuple[Any, bool]]:
    """Return the score of each pair, and whether it has no answer: then it is 0, or `None` of a judge with words."""
    if protocol == "published" and getattr(scorer, "reads_questions", True):
        top_logprobs = scorer.top_logprobs(pairs, questions, PUBLISHED_LABELS)
        probabilities = [math.nan if tokens is None else yes_probability(tokens, yes, no) for tokens in top_logprobs]
        scores = [(score or 0.0, score is None) for score in probabilities]
    else:
        may_lack = judges_edits(scorer)
        answers = scorer.score(pairs, questions)
        are_plain = (score is None or isinstance(score, Mapping) for score in answers)
        answers = [score if is_plain else float(score) for score, is_plain in zip(answers, are_plain, strict=True)]
        scores = [(score, may_lack and score is None) for score in answers]
    if len(scores) != len(pairs):
        raise ValueError(
            f"The scorer {scorer.name!r} gave {len(scores)} scores for {len(pairs)} pairs, but must give one per pair."
        )
    for (score, is_unanswered), question in zip(scores, questions, strict=True):
        values = score.values() if isinstance(score, Mapping) else [score]
        if not is_unanswered and not all(value is not None and math.isfinite(value) for value in values):
            raise ValueError(f"The scorer {scorer.name!r} gave no finite score for the question {question!r}.")
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
