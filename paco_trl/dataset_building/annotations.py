# SPDX-License-Identifier: Apache-2.0
"""
Annotations: in which order an annotator puts the candidates of a ranking instance.

A file has a record for each instance that an annotator ranked: JSON lines, a list in a `.json` file, or a `.csv` file.

    {"annotator": "anna", "instance": "fox/0/1/3", "ranking": [2, 0, 1, 3]}           # candidates, best first
    {"annotator": "judge", "instance": "fox/0/1/3", "ranks": [2, 3, 1, 3]}            # rank of each, equal = tied
    {"annotator": "anna", "instance": "fox/0/1/4", "skipped": true}                   # looked at, not ranked

In CSV the columns are `annotator`, `instance` and `ranking`, a text such as `2>0>1=3` (empty for a skipped instance).

`digest`, where a record has it, is that of the instance's images ([`instance_digest`]): a ranking of other images under
the same id is an error.
"""

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..utils.files import digest, write_atomically
from ..utils.journals import append_lines, read_lines
from ..utils.text import shorten
from .label_studio import LABELING_CONFIG, is_label_studio, label_studio_tasks, records_of_label_studio


if TYPE_CHECKING:
    from datasets import Dataset


# The annotator that stands for the construction
AUTOMATIC = "automatic"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_REMEDY = "Nothing of this file was taken. Correct it and try again."


class Annotation(NamedTuple):
    """
    What one annotator says of one instance.

    Attributes:
        annotator (`str`):
            Name of the annotator.
        instance (`str`):
            Id of the ranking instance.
        ranks (`tuple[int, ...]` or `None`):
            Rank of each candidate: 1 is the most consistent, equal ranks are tied. `None` for a skipped instance.
    """

    annotator: str
    instance: str
    ranks: tuple[int, ...] | None


def instance_digest(reference: str, candidates: Sequence[str]) -> str:
    """Give a digest of what an instance shows, in its order."""
    return digest([reference, *candidates])[:16]


def check_annotator(name: Any) -> str:
    """Check the name of an annotator, which is the name of a file too."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("."):
        raise ValueError(
            f"The annotator's name is {shorten(name)}. It must be 1 to 40 letters (a to z), digits, `.`, `_` or `-`, "
            "and not begin with a full stop, because it names a file."
        )
    return name


def ranks_of_ranking(ranking: Sequence[int]) -> tuple[int, ...]:
    """
    Give the rank of each candidate from their order.

    Args:
        ranking (`Sequence[int]`):
            Indices of the candidates, best first: a permutation of 0 to n - 1.

    Returns:
        `tuple[int, ...]`: the ranks, 1 for the best.

    Raises:
        ValueError: If it is no permutation.

    Example:

    ```python
    >>> from paco_trl.dataset_building import ranks_of_ranking

    >>> ranks_of_ranking([2, 0, 1])
    (2, 3, 1)
    ```
    """
    is_order = all(type(index) is int for index in ranking)
    if not is_order or sorted(ranking) != list(range(len(ranking))):
        raise ValueError(
            f"the ranking {shorten(list(ranking))} does not name each of {len(ranking)} candidates exactly once."
        )
    ranks = [0] * len(ranking)
    for rank, index in enumerate(ranking, start=1):
        ranks[index] = rank
    return tuple(ranks)


def format_ranking(ranks: Sequence[int]) -> str:
    """Write ranks as a text, candidates by index: `2>0>1=3` is 2 before 0, and 1 and 3 tied behind them."""
    groups = [[index for index, rank in enumerate(ranks) if rank == value] for value in sorted(set(ranks))]
    return ">".join("=".join(map(str, group)) for group in groups)


def parse_ranking(text: str) -> tuple[int, ...]:
    """Read the ranks from a text such as `2>0>1=3`; the inverse of [`format_ranking`]."""
    groups = [group.split("=") for group in text.split(">")]
    names = [name.strip() for group in groups for name in group]
    if not all(re.fullmatch(r"[0-9]+", name) for name in names):
        raise ValueError(
            f"the ranking {shorten(text)} is not of the form `2>0>1=3`, with the numbers of the candidates from 0."
        )
    ranks_of_ranking([int(name) for name in names])
    ranks, before = [0] * len(names), 0
    for group in groups:
        for name in group:
            ranks[int(name)] = before + 1
        before += len(group)
    return tuple(ranks)


def ranks_of_record(record: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    """Read the ranks of one record. The errors go on after `<file>, line <number>: `."""
    if record.get("skipped") is True:
        return None
    ranking, ranks = record.get("ranking"), record.get("ranks")
    if (ranking is None) == (ranks is None):
        raise ValueError(
            f"it has the keys {list(record)}, but must have one of `ranking`, `ranks` and `skipped: true`."
        )
    if isinstance(ranking, str):
        ranks = parse_ranking(ranking)
    elif ranking is not None:
        if not isinstance(ranking, list):
            raise ValueError(f"`ranking` is {shorten(ranking)}, but must be a list of candidate indices, best first.")
        ranks = ranks_of_ranking(ranking)
    elif not isinstance(ranks, list) or not all(type(rank) is int and rank >= 1 for rank in ranks):
        raise ValueError(f"`ranks` is {shorten(ranks)}, but must be a list of whole numbers from 1.")
    if len(ranks) != count:
        raise ValueError(f"it ranks {len(ranks)} candidates, but the instance has {count}: the ranking is incomplete.")
    return tuple(ranks)


def _read_records(path: Path) -> list[tuple[str, Any]]:
    """Give each record with the place that it is at."""
    if path.suffix == ".jsonl":
        return [(f"{path.name}, line {number}", record) for number, record in read_lines(path)]
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
        return _parse_records(path, text)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path} cannot be read ({error}). Save it as UTF-8, with each quote closed. {_REMEDY}"
        ) from error


def _parse_records(path: Path, text: str) -> list[tuple[str, Any]]:
    if path.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        missing = [name for name in ("annotator", "instance", "ranking") if name not in (reader.fieldnames or [])]
        if missing:
            raise ValueError(
                f"{path.name} has the columns {reader.fieldnames}, but needs {missing} besides. {_REMEDY}"
            )
        rows = []
        for row in reader:
            place = f"{path.name}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ValueError(f"{place} has another number of cells than the first line. {_REMEDY}")
            record = {name: row[name] for name in ("annotator", "instance", "ranking")}
            # The empty cell of an instance that cannot be ranked
            rows.append((place, record if row["ranking"].strip() else record | {"skipped": True}))
        return rows
    if path.suffix != ".json":
        raise ValueError(f"{path} is no file of annotations. It must end in .jsonl, .json or .csv.")
    try:
        records = json.loads(text)
        if not isinstance(records, list):
            raise ValueError("it is not a list of records")
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). {_REMEDY}") from error
    if is_label_studio(records):
        records = records_of_label_studio(records)
    return [(f"{path.name}, record {number}", record) for number, record in enumerate(records)]


def read_annotations(paths: Iterable[str | Path], instances: "Dataset") -> list[Annotation]:
    """
    Read annotations, and check each of them.

    Args:
        paths (`Iterable[str | Path]`):
            Files of annotations.
        instances ([`~datasets.Dataset`]):
            The ranking instances, with `id` and `candidates`.

    Returns:
        `list[Annotation]`: the last one of each annotator and instance, by annotator and in the order of the instances.

    Raises:
        ValueError: If a file cannot be read, or a record has an instance that does not exist, a ranking that is not
            complete, or a name that is none; the error names file and line.
    """
    columns = instances.with_format(None).select_columns(
        [name for name in ("id", "candidates", "digest") if name in instances.column_names]
    )[:]
    counts = {name: len(candidates) for name, candidates in zip(columns["id"], columns["candidates"], strict=True)}
    digests = dict(zip(columns["id"], columns.get("digest", [None] * len(counts)), strict=True))
    place_of = {name: place for place, name in enumerate(counts)}
    found: dict[tuple[str, str], Annotation] = {}
    for path in paths:
        for place, record in _read_records(Path(path)):
            if not isinstance(record, dict):
                raise ValueError(f"{place} is {shorten(record)}, but must be an object. {_REMEDY}")
            try:
                annotator, instance = check_annotator(record.get("annotator")), record.get("instance")
                if not isinstance(instance, str) or instance not in counts:
                    raise ValueError(
                        f"there is no instance {shorten(instance)}; the first is {next(iter(counts))!r}. (Were fewer "
                        "instances asked for since it was ranked?)"
                    )
                if digests[instance] is not None and record.get("digest", digests[instance]) != digests[instance]:
                    raise ValueError(
                        f"the instance {instance!r} has other images now than those that were ranked. Move the "
                        "annotations of before away, and rank again."
                    )
                ranks = ranks_of_record(record, counts[instance])
            except ValueError as error:
                raise ValueError(f"{place}: {error} {_REMEDY}") from error
            found[annotator, instance] = Annotation(annotator, instance, ranks)
    return sorted(found.values(), key=lambda annotation: (annotation.annotator, place_of[annotation.instance]))


def append_annotation(folder: str | Path, record: Mapping[str, Any]) -> None:
    """
    Save one annotation, at once and onto the disk, in the file of its annotator.

    Args:
        folder (`str` or `Path`):
            Folder of the annotations.
        record (`Mapping`):
            The record; what is beside `annotator`, `instance` and the ranking is kept and not read.

    Raises:
        ValueError: If the name of the annotator is none.
    """
    append_lines(Path(folder) / f"{check_annotator(record.get('annotator'))}.jsonl", [record])


def annotation_files(folder: str | Path, annotators: Sequence[str] | None = None) -> list[Path]:
    """
    Find the files of annotations in a folder.

    Args:
        folder (`str` or `Path`):
            The folder.
        annotators (`Sequence[str]`, *optional*):
            Names of those to take; all when left out.

    Returns:
        `list[Path]`: the files, by name.

    Raises:
        FileNotFoundError: If there are none, or one of `annotators` has none.
    """
    files = {path.stem: path for path in sorted(Path(folder).glob("*.jsonl"))}
    missing = [name for name in annotators or [] if name not in files]
    if not files or missing:
        raise FileNotFoundError(
            f"There are no annotations{f' of {missing}' if missing else ''} in {folder}; it has those of "
            f"{list(files) or 'nobody'}. Rank first: by people, a judge, or automatically."
        )
    return [files[name] for name in annotators or files]


def import_annotations(path: str | Path, folder: str | Path, instances: "Dataset") -> dict[str, int]:
    """
    Take over the annotations of a file that another tool wrote, all of them or none.

    Args:
        path (`str` or `Path`):
            The file (`.jsonl`, `.json` or `.csv`; `.json` may be a project that Label Studio exported).
        folder (`str` or `Path`):
            Folder of the annotations. What an annotator already has there stays, and is replaced where the file has
            the same instance.
        instances ([`~datasets.Dataset`]):
            The ranking instances.

    Returns:
        `dict[str, int]`: number of annotations by annotator.

    Raises:
        ValueError: As [`read_annotations`].
    """
    if Path(path).suffix == ".jsonl":
        _check_last_line(Path(path))
    annotations = read_annotations([path], instances)
    if any(annotation.annotator == AUTOMATIC for annotation in annotations):
        raise ValueError(
            f"{path} has annotations by {AUTOMATIC!r}, the name of rankings by construction. Name another."
        )
    digests = digests_by_instance(instances)
    records: dict[str, list[dict]] = defaultdict(list)
    for annotation in annotations:
        records[annotation.annotator].append(_record(annotation) | digests.get(annotation.instance, {}))
    for annotator, own in records.items():
        append_lines(Path(folder) / f"{annotator}.jsonl", own)
    return {annotator: len(own) for annotator, own in records.items()}


def _check_last_line(path: Path) -> None:
    """A last line that is not whole is no work of a process that was killed here: the file itself is not whole."""
    last = path.read_bytes().rstrip().rpartition(b"\n")[2]
    try:
        json.loads(last)
    except ValueError as error:
        raise ValueError(f"The last line of {path} is not valid JSON ({error}). {_REMEDY}") from error


def digests_by_instance(instances: "Dataset") -> dict[str, dict[str, str]]:
    """Give what ties an annotation to the images of its instance."""
    if "digest" not in instances.column_names:
        return {}
    columns = instances.with_format(None).select_columns(["id", "digest"])[:]
    return {name: {"digest": value} for name, value in zip(columns["id"], columns["digest"], strict=True)}


def _record(annotation: Annotation) -> dict[str, Any]:
    known = {"annotator": annotation.annotator, "instance": annotation.instance}
    return known | ({"skipped": True} if annotation.ranks is None else {"ranks": list(annotation.ranks)})


def _to_csv(rows: list[dict[str, Any]]) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _write(rows: list[dict[str, Any]], path: str | Path) -> None:
    path = Path(path)
    if not rows:
        raise ValueError(f"There is nothing to write to {path}.")
    if path.suffix == ".csv":
        write_atomically(path, _to_csv(rows))
    elif path.suffix == ".json":
        write_atomically(path, json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    else:
        raise ValueError(f"{path} must end in .csv or .json.")


def export_annotations(annotations: Iterable[Annotation], path: str | Path) -> None:
    """
    Write annotations for other tools; [`import_annotations`] reads them back.

    Args:
        annotations (`Iterable[Annotation]`):
            The annotations.
        path (`str` or `Path`):
            The file, `.csv` or `.json`.

    Raises:
        ValueError: If there are none, or the file has another ending.
    """
    rows = [
        {
            "annotator": annotation.annotator,
            "instance": annotation.instance,
            "ranking": "" if annotation.ranks is None else format_ranking(annotation.ranks),
        }
        for annotation in annotations
    ]
    if Path(path).suffix != ".csv":
        rows = [row if row["ranking"] else {**row, "ranking": None, "skipped": True} for row in rows]
    _write(rows, path)


def export_tasks(instances: "Dataset", panels: "Dataset", prompts: "Dataset", path: str | Path) -> None:
    """
    Write the ranking instances for other tools: one row each, with the image files.

    Args:
        instances ([`~datasets.Dataset`]):
            The ranking instances.
        panels ([`~datasets.Dataset`]):
            The panels, with images given by path.
        prompts ([`~datasets.Dataset`]):
            The prompts.
        path (`str` or `Path`):
            The file, `.csv` or `.json`, with `instance`, `prompt`, `reference` and `candidate_0`, `candidate_1` ...,
            whose numbers are those of the `ranking` that comes back.

    Raises:
        ValueError: If there are none, or the file has another ending.
    """
    from datasets import Image

    columns = panels.cast_column("image", Image(decode=False)).select_columns(["id", "image"])[:]
    files = {name: image["path"] for name, image in zip(columns["id"], columns["image"], strict=True)}
    texts = dict(zip(prompts["id"][:], prompts["prompt"][:], strict=True))
    most = max((len(candidates) for candidates in instances["candidates"][:]), default=0)
    rows = []
    for instance in instances.with_format(None):
        names = [files[name] for name in instance["candidates"]]
        rows.append(
            {
                "instance": instance["id"],
                "prompt": texts[instance["prompt_id"]],
                "reference": files[instance["reference"]],
                **{f"candidate_{number}": name for number, name in enumerate(names + [""] * (most - len(names)))},
            }
        )
    _write(rows, path)


def export_label_studio(
    instances: "Dataset", panels: "Dataset", prompts: "Dataset", path: str | Path, root: str | Path
) -> Path:
    """
    Write the ranking instances as tasks for Label Studio, and beside them the labeling configuration.

    Args:
        instances ([`~datasets.Dataset`]):
            The ranking instances.
        panels ([`~datasets.Dataset`]):
            The panels, with images given by path.
        prompts ([`~datasets.Dataset`]):
            The prompts.
        path (`str` or `Path`):
            The file of the tasks, `.json`. [`import_annotations`] reads the JSON file that Label Studio exports.
        root (`str` or `Path`):
            Directory that Label Studio serves files from (`LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT`).

    Returns:
        `Path`: the file of the labeling configuration, with the ending `.xml`.

    Raises:
        ValueError: If there are no instances, `path` does not end in `.json`, or a panel is not below `root`.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"{path} must end in .json.")
    _write(label_studio_tasks(instances, panels, prompts, root), path)
    config = path.with_suffix(".xml")
    write_atomically(config, LABELING_CONFIG)
    return config
