# SPDX-License-Identifier: Apache-2.0
"""Read images, query scorers and compute intervals for the benchmarks of judges."""

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from ..data.dataset_files import report_broken
from ..rewards import yes_probability
from ..utils.images import open_image, to_rgb
from ..utils.journals import Journal
from ..utils.statistics import bootstrap_interval


if TYPE_CHECKING:
    from datasets import Dataset


PROTOCOLS = ("default", "published")
# Text that the published scripts put in front of the two images
PUBLISHED_LABELS = ("<img1>: ", "<img2>: ")
_ADVICE = " Replace it, or leave such rows out with `skip_broken=True`."


def _without_alpha(image: Image.Image, where: str) -> Image.Image:
    image = image.convert("RGB")
    image.info.pop("transparency", None)  # a color that `to_rgb` would still put on white
    return image


class RowImages:
    """Images of a dataset's rows in the order of their columns, with the pixels that a judge sees."""

    def __init__(self, dataset: "Dataset", columns: Sequence[str], protocol: str = "default"):
        self.dataset = dataset.select_columns(list(columns)).with_format("arrow")
        self.columns = columns
        self.convert = _without_alpha if protocol == "published" else to_rgb

    def __getitem__(self, index: int) -> list[Image.Image]:
        (row,) = self.dataset[index].to_pylist()
        images = []
        for column in self.columns:
            if isinstance(row[column], list):
                names = [f"`{column}[{place}]` of row {index}" for place in range(len(row[column]))]
                images += list(map(self._open, row[column], names))
            else:
                images.append(self._open(row[column], f"`{column}` of row {index}"))
        return images

    def _open(self, stored: dict[str, Any] | None, where: str) -> Image.Image:
        if stored is None:
            raise ValueError(f"{where} is missing (None).{_ADVICE}")
        try:
            image = open_image(stored)
            image.load()  # closes the file, and finds one that is cut off
            return self.convert(image, "the image")
        except Exception as error:  # Pillow raises half a dozen kinds, requests others
            file = stored["path"] or "embedded"
            raise ValueError(f"{where} ({file}) cannot be read: {type(error).__name__}: {error}.{_ADVICE}") from error


def check_protocol(protocol: str) -> None:
    """Check that a protocol exists."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"`protocol` is {protocol!r}, but must be one of {', '.join(PROTOCOLS)}.")


def check_scorer(scorer: Any, protocol: str) -> None:
    """Check that an object is a scorer and can follow the protocol, before anything is loaded."""
    check_protocol(protocol)
    kind = f"`scorer` is a {type(scorer).__name__}"
    if not callable(getattr(scorer, "score", None)) or not isinstance(getattr(scorer, "name", None), str):
        raise TypeError(f"{kind}, but must have a method `score(images, prompts)` and a `name` (str).")
    if protocol == "published" and _reads_questions(scorer) and not callable(getattr(scorer, "top_logprobs", None)):
        raise TypeError(
            f"{kind}, which has no `top_logprobs`: the published protocol puts text in front of each image and reads the "
            'likeliest tokens. Pass a `PaCoReward` or a `ServedJudge`, or use `protocol="default"`.'
        )


def _reads_questions(scorer: Any) -> bool:
    return getattr(scorer, "reads_questions", True)


class Part(NamedTuple):
    """What becomes one record: questions about the first image of a row and others."""

    key: Any
    row: int
    questions: Sequence[tuple[tuple[int, ...], str]]  # places of the other images, and the question


class Run:
    """Run a scorer over the rows of a dataset, without the broken ones if `skip_broken` allows that."""

    def __init__(
        self,
        settings: dict[str, Any],
        scorer: Any,
        dataset: "Dataset",
        columns: Sequence[str],
        image_columns: Sequence[str],
        skip_broken: bool,
        broken: dict[int, str],
    ):
        images = RowImages(dataset, image_columns)
        for index in range(len(dataset)) if skip_broken else ():
            try:
                index in broken or images[index]  # reads it
            except ValueError as error:
                broken[index] = str(error).removesuffix(_ADVICE)
        self.skipped = [broken[index] for index in sorted(broken)]
        report_broken(self.skipped, len(dataset), "rows", skip_broken)
        self.numbers = [index for index in range(len(dataset)) if index not in broken]
        dataset = dataset.select(self.numbers) if broken else dataset
        self.rows = list(dataset.select_columns(list(columns)))
        self.scorer, self.protocol = scorer, settings["protocol"]
        self.images = RowImages(dataset, image_columns, self.protocol)
        fingerprint = dataset_fingerprint(dataset, columns, image_columns)
        self.settings = settings | {"dataset_size": len(dataset), "dataset_fingerprint": fingerprint}

    def finish(
        self,
        output_path: str | Path | None,
        name: str,
        parts: Sequence[Part],
        batch_size: int,
        record: Callable[[Part, list[tuple[float, bool]]], dict[str, Any]],
        answers: tuple[Sequence[str], Sequence[str]] = (("Yes",), ("No",)),
        resizes: bool = False,
    ) -> dict[Any, dict[str, Any]]:
        """Score the parts that the file has no records of, and return all records by their field `name`."""
        journal = Journal(output_path, self.settings, key=name)
        rows = [list(of_row) for _, of_row in groupby(parts, key=lambda part: part.row)]
        title = f"{self.settings['benchmark']}, {self.scorer.name}"
        with tqdm(total=len(parts), initial=len(journal.by_key), desc=title, unit=name) as progress:
            # The batches of an uninterrupted run: the last bits of a score can depend on the batch
            for batch in batches(rows, lambda of_row: sum(len(part.questions) for part in of_row), batch_size):
                missing = [part for of_row in batch for part in of_row if part.key not in journal.by_key]
                pairs, questions = [], []
                for row, of_row in groupby(missing, key=lambda part: part.row):
                    first, *others = self.images[row]
                    others = [other.resize(first.size) for other in others] if resizes else others
                    for places, question in (item for part in of_row for item in part.questions):
                        pairs.append((first, *(others[place] for place in places)))
                        questions.append(question)
                if missing:
                    scores = iter(self._score(pairs, questions, *answers))
                    journal.append(*(record(part, list(islice(scores, len(part.questions)))) for part in missing))
                    progress.update(len(missing))
        return journal.by_key

    def results(self, records: Mapping[Any, dict[str, Any]], **results: Any) -> dict[str, Any]:
        """Describe the run in its results, which are shared: without the address of a judge's server."""
        name = self.scorer.model_name if "://" in self.scorer.name else self.scorer.name
        return {
            "settings": self.settings | {"scorer": name},
            "num_instances": len(self.rows),
            "skipped": self.skipped,
            "num_unanswered": sum(record["unanswered"] for record in records.values()),
            **results,
        }

    def _score(
        self, pairs: list, questions: list[str], yes: Sequence[str], no: Sequence[str]
    ) -> list[tuple[float, bool]]:
        """Return a score for each pair, and whether there was no answer: 0 (tokens) or NaN (a comparison)."""
        scorer, by_tokens = self.scorer, self.protocol == "published" and _reads_questions(self.scorer)
        labels = [PUBLISHED_LABELS] * by_tokens
        answers = list((scorer.top_logprobs if by_tokens else scorer.score)(pairs, questions, *labels))
        if len(answers) != len(pairs):
            raise ValueError(f"The scorer {scorer.name!r} gave {len(answers)} scores for {len(pairs)} pairs.")
        for answer, question in zip(answers, questions, strict=True):
            if answer is None and getattr(scorer, "compares", False):
                continue
            if answer is None or (not by_tokens and not math.isfinite(answer)):
                raise ValueError(f"The scorer {scorer.name!r} gave {answer} for the question {question!r}.")
        if not by_tokens:
            return [(math.nan if answer is None else float(answer), answer is None) for answer in answers]
        scores = [yes_probability(tokens, yes, no) for tokens in answers]
        return [(score or 0.0, score is None) for score in scores]


def dataset_fingerprint(dataset: "Dataset", text_columns: Sequence[str], image_columns: Sequence[str]) -> str:
    """Digest all texts and labels of a dataset, in order, and the images of its first row."""
    # Not the fingerprint of `datasets`, which depends on how the dataset was made. All images would have to be decoded
    digest = hashlib.sha256()
    for row in dataset.select_columns(list(text_columns)):
        digest.update(json.dumps(row, sort_keys=True).encode())
    for name in image_columns:
        for image in RowImages(dataset, [name])[0]:
            digest.update(f"{name} {image.mode} {image.size}".encode())
            digest.update(image.tobytes())
    return digest.hexdigest()[:16]


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
    values: Sequence[float], groups: Sequence[Hashable] | None, strata: Sequence[Hashable] | None = None
) -> dict[str, Any]:
    """Compute the mean of the defined values (or of the means of their strata), and its bootstrap interval."""
    values = np.asarray(values, dtype=float)
    if np.isnan(values).all():
        return {"mean": math.nan, "interval": [math.nan, math.nan]}
    by_stratum: dict[Hashable, list[float]] = {}
    for value, stratum in zip(values, strata or [None] * len(values), strict=True):
        if not np.isnan(value):
            by_stratum.setdefault(stratum, []).append(value)
    mean = float(np.mean([np.mean(part) for part in by_stratum.values()]))
    return {"mean": mean, "interval": list(bootstrap_interval(values, groups, strata=strata))}
