# SPDX-License-Identifier: Apache-2.0
"""Find, load and read the files of datasets, reject unsafe paths, and report broken rows."""

import csv
import hashlib
import io
import json
import logging
import os.path
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ..utils.addresses import refuse_address
from ..utils.files import write_atomically
from ..utils.names import is_local
from .columns import column_types
from .texts import is_text


if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


logger = logging.getLogger(__name__)

_MAX_LISTED = 20
_SAVED = ("state.json", "dataset_dict.json")  # by `save_to_disk`
_ROW_FILES = (".jsonl", ".json", ".csv", ".tsv", ".txt")  # as they are, or compressed
_COMPRESSED = (".gz", ".bz2", ".xz")
_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}  # of `datasets`


def find_dataset_folder(path: str | Path, patterns: list[str]) -> Path:
    """Find the directory of a published dataset on disk, else on the Hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if folder.is_file() or isinstance(path, Path) or is_local(path):
        raise FileNotFoundError(f"There is no directory {str(path)!r}. Check the path, or give a Hub id.")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, repo_type="dataset", allow_patterns=patterns))


def find_prompts(name: str | Path, what: str) -> Path:
    """Find a file or directory of prompts; a path that does not exist can be a Hub id."""
    path = Path(name).expanduser()
    is_readable = _file_type(path) in _ROW_FILES or path.suffix == ".parquet"
    if not path.exists() and (isinstance(name, Path) or is_local(name) or is_readable):
        raise FileNotFoundError(f"There is no file or directory {str(name)!r} with {what}. Check the path.")
    if path.is_file() and not is_readable:
        raise ValueError(
            f"The file {str(path)!r} cannot be read as {what}. Save it as {', '.join(_ROW_FILES)} (also with .gz) or .parquet."
        )
    return path


def _file_type(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix


def has_rows_as_text(path: Path) -> bool:
    """Tell whether [`read_rows`] reads a path; [`load_split`] reads what else there is."""
    return path.is_file() and _file_type(path) in _ROW_FILES


def is_saved(path: str | Path) -> bool:
    """Tell whether `save_to_disk` wrote a directory."""
    return any((Path(path).expanduser() / marker).is_file() for marker in _SAVED)


def load_split(path: str | Path, split: str, allow_remote_images: bool = False) -> "Dataset":
    """
    Load a split of a dataset: saved with `save_to_disk`, or anything that [`~datasets.load_dataset`] reads.

    Images that its rows name must be in its directory, see [`image_file`].
    """
    from datasets import DatasetDict, load_dataset, load_from_disk

    folder = Path(path).expanduser().absolute()
    if folder.is_file():
        if split != "train":
            raise ValueError(f"'{path}' is a file, whose rows are all in the split `train`, not {split!r}.")
        builder = _BUILDERS.get(folder.suffix)
        if builder is None:
            raise ValueError(f"'{path}' is not a file of rows: it must end in {', '.join(_BUILDERS)}.")
        dataset = load_dataset(builder, data_files=str(folder), split="train")
        return _with_image_files(dataset, [folder.parent], allow_remote_images)
    if not is_saved(folder):
        dataset = load_dataset(str(folder if folder.is_dir() else path), split=split)
        return _with_image_files(dataset, [folder] if folder.is_dir() else [], allow_remote_images)
    dataset = load_from_disk(str(folder))
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise ValueError(f"There is no split {split!r} in {path}, only {list(dataset)}.")
        dataset = dataset[split]
    # The result of a stage names images of earlier ones, which are next to it
    stages = [stage for stage in folder.parents[:2] if (stage / "report.json").is_file()]  # of all splits, or one
    others = [report.parent / "images" for stage in stages for report in stage.parent.glob("*/report.json")]
    return _with_image_files(dataset, [folder, *others], allow_remote_images)


def _with_image_files(dataset: "Dataset", folders: list[Path], allow_remote_images: bool) -> "Dataset":
    """Check the images that rows name, and put the files of downloaded ones in their place. No image is opened."""
    import pyarrow.compute as pc
    from datasets import Image

    for column, feature in dataset.features.items():
        inner = getattr(feature, "feature", feature)
        if not isinstance(inner, Image):
            continue
        images = dataset.data.column(column)
        images = images if inner is feature else pc.list_flatten(images)
        named = pc.struct_field(images, "path").filter(pc.struct_field(images, "bytes").is_null())
        files: dict[str, str] = {}
        for name in pc.unique(named.drop_null()).to_pylist():
            try:
                files[name] = str(image_file(name, folders, allow_remote_images))
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


def _rename_images(batch: "pa.Table", column: str, files: dict[str, str]) -> "pa.Table":
    import pyarrow as pa

    def rename(image: Any) -> Any:
        if isinstance(image, list):
            return [rename(part) for part in image]
        return image if image is None or image["bytes"] is not None else {**image, "path": files.get(image["path"])}

    index = batch.schema.get_field_index(column)
    renamed = pa.array(rename(batch[column].to_pylist()), batch.schema.field(index).type)
    return batch.set_column(index, batch.schema.field(index), renamed)


def image_file(name: str, folders: Sequence[Path], allow_remote_images: bool = False) -> Path:
    """
    Find the file of an image that a row of a dataset names. The rules are the same for every loader.

    A path is relative to the first of the `folders` and stays in one of them, or in a cache of `datasets` or of the Hub;
    symbolic links are followed first. An address is refused, or its image downloaded once if `allow_remote_images=True`.
    """
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    cache_folder = Path(datasets.config.HF_DATASETS_CACHE)
    if "://" in name:
        if not (allow_remote_images and name.startswith(("http://", "https://"))):
            refuse_address(name)
        return _download(name, cache_folder / "paco_trl" / "images")
    path = Path(*folders[:1], name)
    config = datasets.config
    caches = [cache_folder, config.DOWNLOADED_DATASETS_PATH, config.EXTRACTED_DATASETS_PATH, HF_HUB_CACHE]
    # A download into a cache elsewhere: `snapshots/<commit>/` has links to `blobs/`
    caches += [folder.parents[1] / "blobs" for folder in folders if folder.parent.name == "snapshots"]
    target = path.resolve()
    if not any(target.is_relative_to(_resolved(str(allowed))) for allowed in [*folders, *caches]):
        raise ValueError(
            f"the path {name!r} is absolute or leaves the directory of the dataset, perhaps by a link. Put the images there, "
            "or name their real directory (`image_folder`) where a loader takes one."
        )
    return path


@cache
def _resolved(folder: str) -> Path:
    return Path(folder).resolve()


def _download(url: str, folder: Path) -> Path:
    from ..utils.images import read_url

    file = folder / hashlib.sha256(url.encode()).hexdigest()
    if not file.is_file():
        try:
            write_atomically(file, read_url(url))
        except (OSError, ValueError) as error:  # requests raises the first
            raise ValueError(f"{url!r} cannot be downloaded ({type(error).__name__}: {error}).") from error
    return file


def dataset_of_rows(rows: list[dict[str, Any]], images: tuple[str, ...]) -> "Dataset":
    """Build a dataset with the keys of all rows (`Dataset.from_list`: of the first), `images` by [`with_image_files`]."""
    from datasets import Dataset

    names = list(dict.fromkeys(name for row in rows for name in row))
    dataset = Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    for name, feature in column_types(image="image", images=["image"], references=["image"]).items():
        dataset = dataset.cast_column(name, feature) if name in names and name in images else dataset
    return dataset


def with_image_files(
    rows: list[dict[str, Any]], path: Path, folder: Path, columns: tuple[str, ...], allow_remote_images: bool = False
) -> list[dict[str, Any]]:
    """Put the paths of their files in the place of the images that the rows of a file name."""
    named = {name for row in rows for name in row}
    for number, row in enumerate(rows):
        for name in filter(named.__contains__, columns):
            where, value = f"Row {number} of {path}", row.get(name)
            if name == "image":
                row[name] = find_image(value, folder, where, allow_remote_images)
            elif not isinstance(value, list) or not value:
                raise ValueError(f"{where}: `{name}` is {value!r}. It must be a list of at least one path.")
            else:
                row[name] = [find_image(image, folder, where, allow_remote_images) for image in value]
    return rows


def find_image(path: Any, folder: Path, where: str, allow_remote_images: bool) -> str:
    """Find the file of an image that a row names, as [`image_file`] does, and name the row in errors."""
    try:
        if not is_text(path):
            raise ValueError(f"an image is {path!r}, but it must be a path relative to the directory.")
        file = image_file(path, [folder], allow_remote_images)
        if not file.is_file():
            raise ValueError(f"there is no image {file}. Check the path, `image_folder`, and the extraction.")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return str(file)


def find_dataset_file(folder: Path, name: str) -> Path:
    """Find a file of a dataset."""
    if not (folder / name).is_file():
        raise FileNotFoundError(f"There is no file {name!r} in {folder}. Check the download.")
    return folder / name


def _read_text(path: Path) -> str:
    import fsspec  # type: ignore[import-untyped]

    try:
        # Spreadsheets begin a file with a mark of UTF-8
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            return file.read()
    except (UnicodeDecodeError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Save it as UTF-8, or download it again.") from error


def _parse_json(text: str, where: str | Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error}). Correct it, or download it with Git LFS.") from error


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return _parse_json(_read_text(path), path)


def read_json_lines(path: Path) -> list[tuple[str, Any]]:
    """Read the JSON of each line, with its place."""
    # Not `splitlines`, which would also cut at characters that JSON allows inside a string
    lines = enumerate(_read_text(path).split("\n"), start=1)
    places = [(f"{path.name}, line {number}", line) for number, line in lines if line.strip()]
    return [(place, _parse_json(line, place)) for place, line in places]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of one file: JSON, the cells of a table, or the lines of a text as prompts."""
    # Not `load_dataset`: it names no line of a broken file, and what it makes of T2IS's `criteria`, with other names in
    # every row, depends on its version
    suffix = _file_type(path)
    if suffix == ".txt":
        return [{"prompt": line.strip()} for line in _read_text(path).split("\n") if line.strip()]
    if suffix in (".csv", ".tsv"):
        return _read_table(path, "\t" if suffix == ".tsv" else ",")
    is_list = suffix == ".json" and _read_text(path).lstrip().startswith("[")
    rows = read_json(path) if is_list else [row for _, row in read_json_lines(path)]
    for index, row in enumerate(rows):
        if type(row) is not dict:
            raise ValueError(f"Row {index} of {path} is {row!r}. It must be a JSON object with the columns as keys.")
    return rows


def _read_table(path: Path, delimiter: str) -> list[dict[str, Any]]:
    rows = list(csv.DictReader(io.StringIO(_read_text(path)), delimiter=delimiter))
    for index, row in enumerate(rows):
        if None in row:
            raise ValueError(
                f"Row {index} of {path} has more cells than the header. Put a text with the separator in quotes."
            )
        for name in row.keys() & {"height", "width"}:  # a table has no types
            row[name] = int(row[name]) if (row[name] or "").isdecimal() else row[name] or None
    return rows


def read_json_objects(path: Path) -> dict[str, dict[str, Any]]:
    """Read a JSON object of objects."""
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(value, dict) for value in content.values()):
        raise ValueError(f"{path} must be a JSON object of objects.")
    return content


def path_inside(path: str) -> PurePath:
    """Normalize a path that a dataset names, if it stays in the dataset's directory."""
    if not isinstance(path, str) or not path:
        raise ValueError(f"an image is {path!r}, but it must be a path relative to the directory.")
    inside = PurePath(os.path.normpath(path))
    if inside.anchor or inside.parts[:1] == ("..",):
        raise ValueError(f"the path {path!r} is absolute or leaves the directory of the dataset. It must stay inside.")
    return inside


def report_broken(broken: list[str], total: int, what: str, skip_broken: bool) -> None:
    """Raise an error for broken rows, or warn that they are left out."""
    if not broken:
        return
    if not skip_broken:
        count = f" ({len(broken)} of {total} {what} are broken; this is the first one.)" if len(broken) > 1 else ""
        raise ValueError(f"{broken[0]} Correct it, or leave such {what} out with `skip_broken=True`.{count}")
    if len(broken) == total:
        raise ValueError(f"All {total} {what} are broken, so `skip_broken=True` leaves none. The first: {broken[0]}")
    more = [f"and {len(broken) - _MAX_LISTED} more."] * (len(broken) > _MAX_LISTED)
    logger.warning(
        "\n".join([f"Left out {len(broken)} of {total} {what} that are broken:", *broken[:_MAX_LISTED], *more])
    )
