# SPDX-License-Identifier: Apache-2.0
"""Read images, query scorers and compute intervals for the benchmarks of judges."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from datasets import Dataset
from PIL import Image
from tqdm.auto import tqdm

from ..rewards import yes_probability
from ..utils.files import digest
from ..utils.fingerprint import describe, describe_scorer
from ..utils.images import open_image, reading, to_rgb
from ..utils.journals import Journal
from ..utils.names import public_text
from ..utils.option_checks import PROTOCOLS
from ..utils.statistics import bootstrap_interval
from ..utils.text import shorten_path


# Text that the published scripts put in front of the two images
PUBLISHED_LABELS = ("<img1>: ", "<img2>: ")


def _without_alpha(image: Image.Image, where: str) -> Image.Image:
    image = image.convert("RGB")
    image.info.pop("transparency", None)  # a color that `to_rgb` would still put on white
    return image


class RowImages:
    """Images of a dataset's rows in the order of their columns, with the pixels that a judge sees."""

    def __init__(self, dataset: Dataset, columns: Sequence[str], protocol: str = "default"):
        self.dataset = dataset.select_columns(list(columns)).with_format("arrow")
        self.columns = columns
        self.convert = _without_alpha if protocol == "published" else to_rgb

    def __getitem__(self, index: int) -> list[Image.Image]:
        (row,) = self.dataset[index].to_pylist()
        stored: list[tuple[str, Any]] = []
        for column in self.columns:
            if isinstance(row[column], list):
                stored += [(f"`{column}[{position}]`", image) for position, image in enumerate(row[column])]
            else:
                stored.append((f"`{column}`", row[column]))
        images = []
        for name, source in stored:
            with reading(f"{name} of row {index} ({shorten_path(source and source['path'] or 'embedded')})"):
                image = open_image(source)
                image.load()  # closes the file, and finds one that is cut off
                images.append(self.convert(image, "the image"))
        return images


def check_protocol(protocol: str) -> None:
    """Check that a protocol exists."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"`protocol` is {protocol!r}, but must be one of {', '.join(PROTOCOLS)}.")


class Part(NamedTuple):
    """What becomes one record: questions about the first image of a row and others."""

    key: Any
    row: int
    questions: Sequence[tuple[tuple[int, ...], str]]  # places of the other images, and the question


def score_parts(
    settings: dict[str, Any],
    scorer: Any,
    dataset: Dataset,
    columns: Sequence[str],
    image_columns: Sequence[str],
    output_path: str | Path | None,
    key: str,
    parts: Sequence[Part],
    batch_size: int,
    record: Callable[[Part, list[Any]], dict[str, Any]],
    answers: tuple[Sequence[str], Sequence[str]] = (("Yes",), ("No",)),
    resizes: bool = False,
) -> tuple[dict[str, Any], dict[Any, dict[str, Any]]]:
    """Score the parts that the file has no record of; return what results have in common, and all records by `key`."""
    protocol = settings["protocol"]
    fingerprint = dataset_fingerprint(dataset, [*columns, *image_columns])
    settings = settings | {"dataset_size": len(dataset), "dataset_fingerprint": fingerprint}
    is_served = "://" in scorer.name  # two servers are two runs
    name = scorer.name if is_served else public_text(scorer.name)
    settings |= {"scorer": name, "judge": describe_scorer(scorer)}
    images = RowImages(dataset, image_columns, protocol)
    journal = Journal(output_path, settings)
    done = {record[key]: record for record in journal.records}
    rows = [list(of_row) for _, of_row in groupby(parts, key=lambda part: part.row)]
    title = f"{settings['benchmark']}, {scorer.name}"
    with tqdm(total=len(parts), initial=len(done), desc=title, unit=key) as progress:
        # The batches of an uninterrupted run: the last bits of a score can depend on the batch
        for batch in batches(rows, lambda of_row: sum(len(part.questions) for part in of_row), batch_size):
            missing = [part for of_row in batch for part in of_row if part.key not in done]
            pairs, questions = [], []
            for row, of_row in groupby(missing, key=lambda part: part.row):
                first, *candidates = images[row]
                candidates = [candidate.resize(first.size) for candidate in candidates] if resizes else candidates
                for positions, question in (item for part in of_row for item in part.questions):
                    pairs.append((first, *(candidates[position] for position in positions)))
                    questions.append(question)
            if missing:
                scored = iter(_score(scorer, protocol, pairs, questions, *answers))
                records = []
                for part in missing:
                    scores, unanswered = zip(*islice(scored, len(part.questions)), strict=True)
                    records.append(record(part, list(scores)) | {"unanswered": sum(unanswered)})
                journal.append(*records)
                done |= {record[key]: record for record in records}
                progress.update(len(missing))
    if is_served:  # results are shared: without the address of a judge's server
        settings["scorer"] = scorer.model_name
    num_unanswered = sum(record["unanswered"] for record in done.values())
    common = {"settings": settings, "num_instances": len(dataset), "num_unanswered": num_unanswered}
    return common, done


def _score(
    scorer: Any, protocol: str, pairs: list, questions: list[str], yes: Sequence[str], no: Sequence[str]
) -> list[tuple[float | None, bool]]:
    """Return a score for each pair, and whether there was no answer: 0 (likeliest tokens) or `None` (a comparison)."""
    scores: list[tuple[float | None, bool]]
    if protocol == "published" and getattr(scorer, "reads_questions", True):
        likeliest = scorer.top_logprobs(pairs, questions, PUBLISHED_LABELS)
        probabilities = [math.nan if tokens is None else yes_probability(tokens, yes, no) for tokens in likeliest]
        scores = [(score or 0.0, score is None) for score in probabilities]
    else:
        may_be_none = getattr(scorer, "compares", False)
        answers = scorer.score(pairs, questions)
        scores = [(None if score is None else float(score), may_be_none and score is None) for score in answers]
    if len(scores) != len(pairs):
        raise ValueError(f"The scorer {scorer.name!r} gave {len(scores)} scores for {len(pairs)} pairs.")
    for (score, is_unanswered), question in zip(scores, questions, strict=True):
        if not is_unanswered and (score is None or not math.isfinite(score)):
            raise ValueError(f"The scorer {scorer.name!r} gave no finite score for the question {question!r}.")
    return scores


def dataset_fingerprint(dataset: Dataset, columns: Sequence[str]) -> str:
    """Digest what is read of a dataset, in order."""
    return digest(describe(dataset.select_columns(list(columns))))[:16]


def batches(items: Iterable[Any], size: Callable[[Any], int], batch_size: int) -> Iterator[list[Any]]:
    """Group consecutive items into batches with a total size of up to `batch_size`; a larger item is a batch alone."""
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


def mean_and_interval(
    values: Sequence[float], groups: Sequence[Hashable] | None, strata: Sequence[str] | None = None
) -> dict[str, Any]:
    """Compute the mean of the defined values (or of the means of their strata), and its bootstrap interval."""
    mean = float(pd.Series(values, dtype=float).groupby(strata or [""] * len(values)).mean().mean())
    if math.isnan(mean):
        return {"mean": mean, "interval": [mean, mean]}
    return {"mean": mean, "interval": list(bootstrap_interval(values, groups, strata=strata))}
