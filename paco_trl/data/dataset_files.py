# SPDX-License-Identifier: Apache-2.0
"""Loading of dataset files, rejection of unsafe paths, and reports of broken rows."""

import csv
import glob
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image, Json, LargeList, List, Value, concatenate_datasets
from datasets.data_files import EmptyDatasetError
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE

from ..utils.images import refuse_address
from ..utils.names import LINES, PARQUET, TABLES, TEXT_DATA, check_dataset_name, data_ending, is_local
from ..utils.stage_folder import is_saved
from ..utils.text import is_text, join_first, read_text, shorten
from .caption_folders import read_caption_folder
from .columns import criteria_list


logger = logging.getLogger(__name__)

_MAX_LISTED = 20
# Name and file of the dataset that comes with the package
DEMO = "demo"
DEMO_FILE = Path(__file__).parent / "prompts" / "demo.jsonl"
# Types of image columns that `datasets` does not recognize as images
_STORED_IMAGES = [Value(f"{size}{kind}") for size in ("", "large_") for kind in ("string", "binary")]


class _ExactJson(Json):
    """JSON that decodes numbers exactly, where `Json` of `datasets` turns 0.7 into 0.7000000000000001."""

    def decode_example(self, example_data: Any, token_per_repo_id: Any = None) -> Any:
        return None if example_data is None else json.loads(example_data)


def find_dataset_folder(path: str | Path, patterns: list[str]) -> Path:
    """Find the directory of a published dataset on disk, or download it from the Hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if isinstance(path, Path) or is_local(path):
        raise FileNotFoundError(f"There is no directory {str(path)!r}. Check the path, or pass a Hub id.")
    return Path(snapshot_download(path, repo_type="dataset", allow_patterns=patterns))


def load_split(
    path: str | Path,
    split: str,
    images: Sequence[str] = (),
    image_folder: str | Path | None = None,
    config: str | None = None,
) -> Dataset:
    """Load a split of a dataset, file or saved dataset. The columns `images` become images, see [`image_file`]."""
    if not os.fspath(path):
        raise ValueError("The name of the dataset is empty. Give a file, a directory, or a Hub id.")
    path = DEMO_FILE if path == DEMO and not os.path.exists(DEMO) else path
    folder = Path(os.path.expanduser(path)).absolute()
    folders = [folder.parent if folder.is_file() else folder] if folder.exists() else []
    check_dataset_name(path)
    if config is not None and (folder.is_file() or is_saved(folder)):
        raise ValueError(f"`dataset_config` is {config!r}, but '{path}' has no configurations. Leave it out.")
    if is_saved(folder):
        # The output of a build stage refers to images of earlier stages, in sibling directories. `folder` is a split
        # of the output, or all of it
        stages = [stage for stage in folder.parents[:2] if (stage / "report.json").is_file()]
        folders += [report.parent / "images" for stage in stages for report in stage.parent.glob("*/report.json")]
    captioned = read_caption_folder(folder) if folder.is_dir() and config is None and not is_saved(folder) else None
    splits = {"train": captioned} if captioned else _read_splits(str(folder if folders else path), split, config)
    dataset = with_image_types(_select_split(splits, split, path), images, str(path))
    paths = unembedded_paths(dataset)
    if image_folder is not None:
        if not any(paths.values()):
            raise ValueError(f"`image_folder` is '{image_folder}', but '{path}' has no image paths. Leave it out.")
        if not Path(image_folder).expanduser().is_dir():
            raise FileNotFoundError(f"There is no directory '{image_folder}'. Check `image_folder`.")
        folders.insert(0, Path(image_folder).expanduser().absolute())
    dataset = _with_image_files(dataset, paths, folders)
    features = dataset.info.features
    features.update({name: _ExactJson() for name, feature in features.items() if isinstance(feature, Json)})
    return dataset


def _read_splits(path: str, split: str, config: str | None) -> Mapping[str, Dataset]:
    """Read the splits of a file, directory or repository; local text files without `datasets`, which fills gaps."""
    files = {"train": [path]}
    try:
        if is_saved(path):
            saved_dataset = datasets.load_from_disk(path)
            # A single dataset is also available as the default split, whatever its own split is called
            return (
                {str(saved_dataset.split or "train"): saved_dataset, "train": saved_dataset}
                if isinstance(saved_dataset, Dataset)
                else saved_dataset
            )
        if os.path.isfile(path) and data_ending(Path(path)) == PARQUET:
            return {"train": Dataset.from_parquet(glob.escape(path))}
        if not os.path.isfile(path):
            with _no_patterns():
                builder = datasets.load_dataset_builder(path, config)
            files = builder.config.data_files or {}
            if os.path.isdir(path) and builder.name in ("json", "csv", "text", "parquet"):
                for split_files in files.values():  # `datasets` also takes train.jsonl.bak
                    split_files[:] = [file for file in split_files if data_ending(Path(file)) in (*TEXT_DATA, PARQUET)]
            data_files = [Path(file) for split_files in files.values() for file in split_files]
            is_text = all(data_ending(file) in TEXT_DATA for file in data_files)
            if os.path.isdir(path):  # `datasets` only reads the most common format
                folders = {file.parent for file in data_files}
                others = {file for folder in folders for file in folder.glob("[!.]*")} - {*data_files}
                if ignored_files := sorted(file.name for file in others if data_ending(file) in (*TEXT_DATA, PARQUET)):
                    logger.warning(
                        f"Of '{path}' only {join_first([file.name for file in data_files])} are read, not "
                        f"{join_first(ignored_files)}."
                    )
            if not os.path.exists(path) or not is_text or builder.info.features is not None:
                builder.download_and_prepare()
                return builder.as_dataset()
    except ConnectionError as error:
        raise ConnectionError(
            f"'{path}' cannot be read: {error}. Pass a file or directory, or load the dataset once with a connection "
            "(without `HF_HUB_OFFLINE`), to have it in the cache."
        ) from error
    except (DataFilesNotFoundError, EmptyDatasetError) as error:
        endings = ", ".join((*TEXT_DATA, PARQUET))
        raise FileNotFoundError(
            f"'{path}' has no data files ({endings}). Name a file, or another directory."
        ) from error
    except (DatasetGenerationError, ValueError) as error:
        if not str(error).startswith("Config name is missing"):
            raise ValueError(f"'{path}' cannot be read: {error.__cause__ or error}") from error
        with _no_patterns():
            names = ", ".join(datasets.get_dataset_config_names(path))
        raise ValueError(f"'{path}' has several configurations: {names}. Choose one with `dataset_config`.") from error
    names = [name for name in files if str(name) in split] or files  # all splits if none matches, for the error
    rows = {str(name): [row for file in files[name] for row in read_rows(Path(file))] for name in names}
    return {name: dataset_of_rows(split_rows, path) for name, split_rows in rows.items()}


@contextmanager
def _no_patterns() -> Iterator[None]:
    """Let `datasets` treat a directory as a path instead of a glob pattern."""
    # https://github.com/huggingface/datasets/issues/7468
    resolve = datasets.data_files.resolve_pattern
    datasets.data_files.resolve_pattern = lambda pattern, base_path, *args, **kwargs: resolve(
        pattern, glob.escape(base_path), *args, **kwargs
    )
    try:
        yield
    finally:
        datasets.data_files.resolve_pattern = resolve


def _select_split(splits: Mapping[str, Dataset], split: str, path: str | Path) -> Dataset:
    """Select a split or a slice, such as `train[:50%]`, like [`~datasets.load_dataset`]."""
    try:
        lengths = {name: len(dataset) for name, dataset in splits.items()}
        slices = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        if str(error).startswith("Unrecognized instruction format") and "[" in split:
            raise ValueError(
                f"In '{path}' the split {split!r} is not a slice of rows. Write one as `train[:18]`, `train[18:]` or "
                "`train[:50%]`."
            ) from error
        raise ValueError(f"There is no split {split!r} in '{path}', only {', '.join(sorted(splits))}.") from error
    nonempty = [span for span in slices if span.from_ < span.to]  # `select` rejects a slice beyond the end
    if not nonempty:
        if count := sum(lengths[name] for name in {span.splitname for span in slices}):
            raise ValueError(
                f"The split {split!r} selects none of the {count} rows of '{path}'. Choose another slice."
            )
        raise ValueError(f"'{path}' has no rows (split {split!r}). Add some, or choose another file or split.")
    dataset = concatenate_datasets([splits[span.splitname].select(range(span.from_, span.to)) for span in nonempty])
    if dataset.builder_name == "csv" and "__index_level_0__" in dataset.column_names:
        raise ValueError(
            f"A row of a CSV file of '{path}' has more fields than the header. Download the file and correct it."
        )
    return dataset


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON, JSON lines, CSV or TSV file, or of plain lines (as `text`), compressed or not."""
    ending = data_ending(path)
    if ending not in TEXT_DATA:
        raise ValueError(
            f"'{path}' is not a data file: its name must end in {', '.join(TEXT_DATA)}, optionally with .gz, or "
            f"{PARQUET}."
        )
    text = read_text(path)
    if ending == LINES:
        return [{"text": line} for line in re.split(r"\r\n?|\n", text) if line.strip()]
    return _read_table(path, text) if ending in TABLES else _read_json_rows(path, text)


def _read_json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    # One list, or any sequence of values: an object per line, or over several lines as `jq` writes them
    decoder = json.JSONDecoder()
    space = re.compile(r"\s*")
    rows = list[Any]()
    end = 0
    while (start := space.match(text, end).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError as error:
            line = text.count("\n", 0, start) + 1
            raise ValueError(f"{path}: what begins on line {line} is not valid JSON ({error}). Correct it.") from error
        rows += value if isinstance(value, list) else [value]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"Row {index} of {path} is {shorten(row)}, not an object with the columns as keys.")
    return rows


def _read_table(path: Path, text: str) -> list[dict[str, Any]]:
    separators = "\t" if data_ending(path) == ".tsv" else ",;\t"
    separator = next((char for char in separators if char in text.partition("\n")[0]), separators[0])
    csv.field_size_limit(max(len(text), csv.field_size_limit()))  # an image in base64 is longer than the default
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    rows: list[list[str]] = []
    try:
        names = [name.strip() for name in next(lines, [])]
        for row in filter(None, lines):
            if len(row) != len(names):
                raise ValueError(
                    f"'{path}', line {lines.line_num} has {len(row)} fields, not {len(names)} like the header: "
                    f"{shorten(row)}. Quote texts that contain {separator!r}."
                )
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"'{path}', line {lines.line_num} cannot be read: {error}. Correct its quotes.") from error
    columns = {name: _parse_column([row[index] or None for row in rows]) for index, name in enumerate(names)}
    if len(columns) < len(names) or "" in names[1:]:
        raise ValueError(f"The header of '{path}' is {shorten(names)}. Give each column its own name.")
    columns.pop("", None)  # the index that pandas writes
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _parse_column(texts: list[str | None]) -> list[Any]:
    """Convert a column of texts if all are numbers, or all are true or false."""
    for arrow_type in (pa.int64(), pa.float64(), pa.bool_()):
        with suppress(pa.ArrowInvalid):
            values = pa.array(texts, pa.string()).cast(arrow_type).to_pylist()
            pairs = zip(texts, values, strict=True)
            # "007" is an identifier, as is a number with too many digits
            is_integer = arrow_type == pa.int64()  # parses "0x1f", too
            is_identifier = any(
                text and (is_integer or text.isdigit()) and str(int(value)) != text for text, value in pairs
            )
            return texts if is_identifier else values
    return texts


def dataset_of_rows(rows: list[dict[str, Any]], where: str = "the dataset") -> Dataset:
    """
    Build a dataset with the keys of all rows; `Dataset.from_list` only takes those of the first.

    Columns that Arrow cannot store, or would change (it gives each dictionary the keys of all), are stored as JSON.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name == "criteria":
            values = [criteria_list(value) if isinstance(value, dict) else value for value in values]
        columns[name] = _arrow_column(name, values, where)
    return Dataset(pa.table(columns))


def _arrow_column(name: str, values: list[Any], where: str) -> pa.Array:
    with suppress(pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        try:
            column = pa.array(values)
        except UnicodeEncodeError as error:
            row = next(row for row, value in enumerate(values) if "\\ud" in json.dumps(value))
            raise ValueError(f"`{name}` of row {row} of '{where}' has half a character: {error}.") from error
        if column.to_pylist() == values:
            return column
    texts = [None if value is None else json.dumps(value) for value in values]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def with_image_types(dataset: Dataset, columns: Sequence[str], where: str = "the dataset") -> Dataset:
    """Cast columns of paths or files, or of lists of them, to images, whatever program stored them."""
    for name in filter(columns.__contains__, dataset.column_names):
        feature = dataset.features[name]
        is_list = isinstance(feature, List | LargeList)
        inner = feature.feature if is_list else feature
        if isinstance(inner, Json):
            values = dataset[name][:]
            row = next((row for row, value in enumerate(values) if type(value) is not type(values[0])), 0)
            raise ValueError(
                f"`{name}` of row {row} of '{where}' is {shorten(values[row])}. Give every row a path, or every row a "
                "list."
            )
        is_struct = isinstance(inner, dict) and {*inner} <= {"bytes", "path"}
        if is_struct or inner in _STORED_IMAGES or isinstance(feature, LargeList) and isinstance(inner, Image):
            column = dataset.select_columns(name).cast_column(name, List(Image()) if is_list else Image())
            dataset = _with_column(dataset, name, column)
    return dataset


def unembedded_paths(dataset: Dataset) -> dict[str, list[str]]:
    """Return the paths of images that are not embedded, by column, for all rows of the table, selected or not."""
    paths_by_column = {}
    for column, feature in dataset.features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, Image):
            images = dataset.data.column(column)
            images = images if inner is feature else pc.list_flatten(images)
            paths = pc.struct_field(images, "path").filter(pc.struct_field(images, "bytes").is_null())
            paths_by_column[column] = pc.unique(paths.drop_null()).to_pylist()
    return paths_by_column


def _with_image_files(dataset: Dataset, paths: dict[str, list[str]], folders: list[Path]) -> Dataset:
    """Check the image paths of rows and replace them with absolute ones. No image is opened."""
    for column, names in paths.items():
        try:
            files = {name: image_file(name, folders) for name in names}
            if names and folders and not files[names[0]].exists():
                images = _find_image_folder(names[0], folders[0])
                files = {name: image_file(name, [images, *folders]) for name in names}
        except ValueError as error:
            raise ValueError(f"An image of the column `{column}`: {error}") from error
        if any(name != str(file) for name, file in files.items()):
            paths_by_name = {name: str(file) for name, file in files.items()}
            rename = partial(_rename_images, column=column, files=paths_by_name)
            # As Arrow tables, which do not decode; in memory, since a cache file would be in the dataset's directory
            images = dataset.select_columns(column)
            renamed = images.with_format("arrow").map(
                rename, batched=True, batch_size=100, features=images.features, keep_in_memory=True
            )
            dataset = _with_column(dataset, column, renamed.with_format(None))
    return dataset


def _with_column(dataset: Dataset, name: str, column: Dataset) -> Dataset:
    """Replace a column without a `map` over the others, which would encode their JSON again."""
    other_columns = dataset.remove_columns(name)
    if other_columns.column_names:
        column = concatenate_datasets([other_columns, column], axis=1)
    return column.select_columns(dataset.column_names)


def _find_image_folder(name: str, folder: Path) -> Path:
    """Find the directory of images that are not in `folder`: `images`, as Flow-Factory has it, or say which."""
    if (folder / "images" / name).is_file():
        return folder / "images"
    for inner in filter(Path.is_dir, folder.iterdir()):
        if (inner / name).is_file():
            raise ValueError(
                f"{name!r} is not in {folder}, but in its directory '{inner.name}'. Pass `--image_folder '{inner}'`, "
                f"or write '{inner.name}/{name}'."
            )
    return folder


def _rename_images(batch: pa.Table, column: str, files: dict[str, str]) -> pa.Table:
    def rename(image: Any) -> Any:
        if isinstance(image, list):
            return [rename(item) for item in image]
        return image if image is None or image["bytes"] is not None else {**image, "path": files.get(image["path"])}

    index = batch.schema.get_field_index(column)
    renamed = pa.array(rename(batch[column].to_pylist()), batch.schema.field(index).type)
    return batch.set_column(index, batch.schema.field(index), renamed)


def image_file(name: Any, folders: Sequence[Path]) -> Path:
    """Resolve an image path in the first folder. It may only leave the folders, also by a link, into caches."""
    if not is_text(name):
        raise ValueError(f"an image is {shorten(name)}, but must be a path relative to the dataset's directory.")
    refuse_address(name)
    path = Path(*folders[:1], name)
    config = datasets.config
    caches = [config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, config.EXTRACTED_DATASETS_PATH, HF_HUB_CACHE]
    # A Hub cache in another place: `snapshots/<commit>/` links to `blobs/`
    caches += [folder.parents[1] / "blobs" for folder in folders if folder.parent.name == "snapshots"]
    target = path.resolve()
    if not any(target.is_relative_to(_resolved(str(allowed_folder))) for allowed_folder in [*folders, *caches]):
        raise ValueError(
            f"the path {name!r} leaves the dataset's directory {folders[0]} (by a link?). Move the images into it, or "
            "move the dataset's file next to the images."
        )
    return path


@cache
def _resolved(folder: str) -> Path:
    return Path(folder).resolve()


def report_broken_rows(broken: list[str], total: int, item_name: str, skip_broken: bool) -> None:
    """Raise an error for broken rows, or warn that they are left out."""
    if not broken:
        return
    if not skip_broken:
        count = (
            f" ({len(broken)} of {total} {item_name} are broken; this is the first one.)" if len(broken) > 1 else ""
        )
        raise ValueError(f"{broken[0]} Correct it, or leave such {item_name} out with `skip_broken=True`.{count}")
    more = [f"and {len(broken) - _MAX_LISTED} more."] * (len(broken) > _MAX_LISTED)
    lines = [f"Left out {len(broken)} of {total} {item_name} that are broken:", *broken[:_MAX_LISTED], *more]
    logger.warning("\n".join(lines))
