# SPDX-License-Identifier: Apache-2.0
"""Find, load and read the files of datasets, reject unsafe paths, and report broken rows."""

import json
import logging
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, Image, List, Value, config, load_dataset, load_from_disk
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE

from ..utils.addresses import refuse_address
from ..utils.names import is_local
from ..utils.stage_folder import is_saved
from ..utils.text import is_text
from .columns import criteria_list


logger = logging.getLogger(__name__)

_MAX_LISTED = 20
_COMPRESSED = (".gz", ".bz2", ".xz")
_JSON = (".jsonl", ".json")
_BUILDERS = {".csv": "csv", ".tsv": "csv", ".txt": "text", ".parquet": "parquet"}  # of `datasets`


def find_dataset_folder(path: str | Path, patterns: list[str]) -> Path:
    """Find the directory of a published dataset on disk, else on the Hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if isinstance(path, Path) or is_local(path):
        raise FileNotFoundError(f"There is no directory {str(path)!r}. Check the path, or give a Hub id.")
    return Path(snapshot_download(path, repo_type="dataset", allow_patterns=patterns))


def load_split(
    path: str | Path, split: str, images: Sequence[str] = (), image_folder: str | Path | None = None
) -> Dataset:
    """Load a split, also of a file or of a saved dataset. The columns `images` become images, see [`image_file`]."""
    folder = Path(path).expanduser().absolute()
    folders = [folder] if folder.is_dir() else []
    if folder.is_file():
        folders = [folder.parent]
        if split != "train":
            raise ValueError(f"'{path}' is a file, whose rows are all in the split `train`, not {split!r}.")
        dataset = _load_file(folder)
    elif is_saved(folder):
        saved = load_from_disk(str(folder))
        # A dataset alone is all there is, also where its split has another name than the default
        splits = {*saved} if isinstance(saved, DatasetDict) else {"train", str(saved.split or "train")}
        if split not in splits:
            raise ValueError(f"There is no split {split!r} in {path}, only {', '.join(sorted(splits))}.")
        dataset = saved[split] if isinstance(saved, DatasetDict) else saved
        # The result of a stage names images of earlier ones, which are next to it
        stages = [stage for stage in folder.parents[:2] if (stage / "report.json").is_file()]  # of all splits, or one
        folders += [report.parent / "images" for stage in stages for report in stage.parent.glob("*/report.json")]
    elif folder.is_dir():
        dataset = load_dataset(str(folder), split=split)
    elif isinstance(path, Path) or is_local(path) or folder.suffix in (*_JSON, *_BUILDERS):
        raise FileNotFoundError(f"There is no file or directory '{path}'. Check the path.")
    else:
        dataset = load_dataset(path, split=split)
    dataset = with_image_types(dataset, images)
    named = named_images(dataset)
    if image_folder is not None:
        if not any(named.values()):
            raise ValueError(f"`image_folder` is '{image_folder}', but '{path}' names no paths. Leave it out.")
        folders.insert(0, Path(image_folder).expanduser().absolute())
    return _with_image_files(dataset, named, folders)


def _load_file(path: Path) -> Dataset:
    suffix = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    if suffix in _JSON:
        return dataset_of_rows(read_rows(path))
    if suffix not in _BUILDERS:
        endings = ", ".join([*_JSON, *_BUILDERS])
        raise ValueError(f"'{path}' is not a file of rows: it must end in {endings}, or those with .gz.")
    options = {} if suffix == ".parquet" else {"encoding": "utf-8-sig"}  # of spreadsheets
    options |= {"sep": "\t"} if suffix == ".tsv" else {}
    return load_dataset(_BUILDERS[suffix], data_files=str(path), split="train", **options)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file of JSON or JSON lines, compressed or not."""
    # Not `load_dataset`, which names no line of a broken file
    import fsspec  # type: ignore[import-untyped]

    with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
        text = file.read()
    # Not `splitlines`, which would also cut at characters that JSON allows inside a string
    parts = [text] if text.lstrip().startswith("[") else text.split("\n")
    rows: list[dict[str, Any]] = []
    for number, part in enumerate(parts, start=1):
        try:
            value = json.loads(part) if part.strip() else []
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not valid JSON ({error}). Correct or replace it.") from error
        rows += value if isinstance(value, list) else [value]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"Row {index} of {path} is {row!r}. It must be a JSON object with the columns as keys.")
    return rows


def dataset_of_rows(rows: list[dict[str, Any]]) -> Dataset:
    """Build a dataset with the keys of all rows (`Dataset.from_list`: of the first)."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    if "criteria" in columns:
        columns["criteria"] = [criteria_list(each) if isinstance(each, dict) else each for each in columns["criteria"]]
    return Dataset.from_dict(columns)


def with_image_types(dataset: Dataset, columns: Sequence[str]) -> Dataset:
    """Let columns of paths, or of lists of them, be images."""
    for name in dataset.column_names:
        feature = dataset.features[name]
        if name in columns and feature in (Value("string"), Value("large_string"), List(Value("string"))):
            dataset = dataset.cast_column(name, Image() if isinstance(feature, Value) else List(Image()))
    return dataset


def named_images(dataset: Dataset) -> dict[str, list[str]]:
    """Return the paths of the images that are not embedded, by column; of the full table, also if rows are selected."""
    named = {}
    for column, feature in dataset.features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, Image):
            images = dataset.data.column(column)
            images = images if inner is feature else pc.list_flatten(images)
            paths = pc.struct_field(images, "path").filter(pc.struct_field(images, "bytes").is_null())
            named[column] = pc.unique(paths.drop_null()).to_pylist()
    return named


def _with_image_files(dataset: Dataset, named: dict[str, list[str]], folders: list[Path]) -> Dataset:
    """Check the images that rows name, and name their files. No image is opened."""
    for column, names in named.items():
        try:
            files = {name: str(image_file(name, folders)) for name in names}
        except ValueError as error:
            raise ValueError(f"An image of the column `{column}`: {error}") from error
        if any(name != file for name, file in files.items()):
            rename = partial(_rename_images, column=column, files=files)
            # As Arrow tables, which have the images as stored; a cache file would be in the dataset's directory
            renamed = dataset.with_format("arrow").map(
                rename, batched=True, batch_size=100, features=dataset.features, keep_in_memory=True
            )
            dataset = renamed.with_format(None)
    return dataset


def _rename_images(batch: pa.Table, column: str, files: dict[str, str]) -> pa.Table:
    def rename(image: Any) -> Any:
        if isinstance(image, list):
            return [rename(part) for part in image]
        return image if image is None or image["bytes"] is not None else {**image, "path": files.get(image["path"])}

    index = batch.schema.get_field_index(column)
    renamed = pa.array(rename(batch[column].to_pylist()), batch.schema.field(index).type)
    return batch.set_column(index, batch.schema.field(index), renamed)


def image_file(name: Any, folders: Sequence[Path]) -> Path:
    """Find the file that a row names in the first of the folders. It may leave them, or follow a link, into caches only."""
    if not is_text(name):
        raise ValueError(f"an image is {name!r}, but it must be a path relative to the directory.")
    refuse_address(name)
    path = Path(*folders[:1], name)
    caches = [config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, config.EXTRACTED_DATASETS_PATH, HF_HUB_CACHE]
    # A download into a cache elsewhere: `snapshots/<commit>/` has links to `blobs/`
    caches += [folder.parents[1] / "blobs" for folder in folders if folder.parent.name == "snapshots"]
    target = path.resolve()
    if not any(target.is_relative_to(_resolved(str(allowed))) for allowed in [*folders, *caches]):
        cure = "Put the images there, or name their real directory (`image_folder`) where a loader takes one"
        raise ValueError(f"the path {name!r} is absolute or leaves (by a link?) the dataset's directory. {cure}.")
    return path


@cache
def _resolved(folder: str) -> Path:
    return Path(folder).resolve()


def report_broken(broken: list[str], total: int, what: str, skip_broken: bool) -> None:
    """Raise an error for broken rows, or warn that they are left out."""
    if not broken:
        return
    if not skip_broken:
        count = f" ({len(broken)} of {total} {what} are broken; this is the first one.)" if len(broken) > 1 else ""
        raise ValueError(f"{broken[0]} Correct it, or leave such {what} out with `skip_broken=True`.{count}")
    more = [f"and {len(broken) - _MAX_LISTED} more."] * (len(broken) > _MAX_LISTED)
    logger.warning(
        "\n".join([f"Left out {len(broken)} of {total} {what} that are broken:", *broken[:_MAX_LISTED], *more])
    )
