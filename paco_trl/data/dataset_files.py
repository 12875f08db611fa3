# SPDX-License-Identifier: Apache-2.0
"""Find, load and read the files of datasets, reject unsafe paths, and report broken rows."""

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
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE

from ..utils.addresses import refuse_address
from ..utils.names import LINES, PARQUET, TABLES, TEXT_DATA, check_dataset_name, data_ending, is_local
from ..utils.stage_folder import is_saved
from ..utils.text import is_text, read_text, shorten, some_of
from .columns import criteria_list


logger = logging.getLogger(__name__)

_MAX_LISTED = 20
# A dataset that comes with the package, by its name
DEMO = "demo"
DEMO_FILE = Path(__file__).parent / "prompts" / "demo.jsonl"
# What a file stores for an image that `datasets` does not know for one
_STORED_IMAGES = [Value(f"{size}{kind}") for size in ("", "large_") for kind in ("string", "binary")]


class _JsonAsWritten(Json):
    """JSON whose numbers are decoded to the last digit; that of `datasets` makes 0.7000000000000001 of 0.7."""

    def decode_example(self, example_data: Any, token_per_repo_id: Any = None) -> Any:
        return None if example_data is None else json.loads(example_data)


def find_dataset_folder(path: str | Path, patterns: list[str]) -> Path:
    """Find the directory of a published dataset on disk, else on the Hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if isinstance(path, Path) or is_local(path):
        raise FileNotFoundError(f"There is no directory {str(path)!r}. Check the path, or give a Hub id.")
    return Path(snapshot_download(path, repo_type="dataset", allow_patterns=patterns))


def load_split(
    path: str | Path,
    split: str,
    images: Sequence[str] = (),
    image_folder: str | Path | None = None,
    config: str | None = None,
) -> Dataset:
    """Load a split, also of a file or of a saved dataset. The columns `images` become images, see [`image_file`]."""
    path = DEMO_FILE if path == DEMO and not os.path.exists(DEMO) else path
    folder = Path(os.path.expanduser(path)).absolute()
    folders = [folder.parent if folder.is_file() else folder] if folder.exists() else []
    check_dataset_name(path)
    if config is not None and (folder.is_file() or is_saved(folder)):
        raise ValueError(f"`dataset_config` is {config!r}, but '{path}' is no repository with several. Leave it out.")
    if is_saved(folder):
        # The result of a stage names images of earlier ones, which are next to it
        stages = [stage for stage in folder.parents[:2] if (stage / "report.json").is_file()]  # of all splits, or one
        folders += [report.parent / "images" for stage in stages for report in stage.parent.glob("*/report.json")]
    parts = _read(str(folder if folders else path), split, config)
    dataset = with_image_types(_take(parts, split, path), images, str(path))
    named = named_images(dataset)
    if image_folder is not None:
        if not any(named.values()):
            raise ValueError(f"`image_folder` is '{image_folder}', but '{path}' names no paths. Leave it out.")
        folders.insert(0, Path(image_folder).expanduser().absolute())
    dataset = _with_image_files(dataset, named, folders)
    features = dataset.info.features
    features.update({name: _JsonAsWritten() for name, kind in features.items() if isinstance(kind, Json)})
    return dataset


def _read(path: str, split: str, config: str | None) -> Mapping[str, Dataset]:
    """Read the splits of a file, a directory or a repository. Texts on disk are not left to `datasets`, which fills gaps."""
    files = {"train": [path]}
    try:
        if is_saved(path):
            saved = datasets.load_from_disk(path)
            # A dataset alone is all there is, also where its split has another name than the default
            return {str(saved.split or "train"): saved, "train": saved} if isinstance(saved, Dataset) else saved
        if os.path.isfile(path) and data_ending(Path(path)) == PARQUET:
            return {"train": Dataset.from_parquet(glob.escape(path))}
        if not os.path.isfile(path):
            with _no_patterns():
                builder = datasets.load_dataset_builder(path, config)
            files = builder.config.data_files or {}
            if os.path.isdir(path) and builder.name in ("json", "csv", "text", "parquet"):
                for of_split in files.values():  # `datasets` also takes train.jsonl.bak
                    of_split[:] = [file for file in of_split if data_ending(Path(file)) in (*TEXT_DATA, PARQUET)]
            read = [Path(file) for of_split in files.values() for file in of_split]
            is_text = all(data_ending(file) in TEXT_DATA for file in read)
            if os.path.isdir(path):  # `datasets` reads the format that most files have
                beside = {file for folder in {file.parent for file in read} for file in folder.glob("[!.]*")} - {*read}
                if left_out := sorted(file.name for file in beside if data_ending(file) in (*TEXT_DATA, PARQUET)):
                    logger.warning(
                        f"Of '{path}' only {some_of([file.name for file in read])} are read, not {some_of(left_out)}."
                    )
            if not os.path.exists(path) or not is_text or builder.info.features is not None:
                builder.download_and_prepare()
                return builder.as_dataset()
    except ConnectionError as error:
        raise ConnectionError(
            f"'{path}' cannot be read: {error}. Name a file or directory, or load it once with a connection (without "
            "`HF_HUB_OFFLINE`): it is then in the cache."
        ) from error
    except (DatasetGenerationError, ValueError) as error:
        if not str(error).startswith("Config name is missing"):
            raise ValueError(f"'{path}' cannot be read: {error.__cause__ or error}") from error
        with _no_patterns():
            names = ", ".join(datasets.get_dataset_config_names(path))
        raise ValueError(f"'{path}' has several configurations: {names}. Choose one by `dataset_config`.") from error
    wanted = [name for name in files if str(name) in split] or files  # of a split that there is not, all are named
    rows = {str(name): [row for file in files[name] for row in read_rows(Path(file))] for name in wanted}
    return {name: dataset_of_rows(of_split, path) for name, of_split in rows.items()}


@contextmanager
def _no_patterns() -> Iterator[None]:
    """Let `datasets` take a directory for a path, not for a part of a pattern."""
    # https://github.com/huggingface/datasets/issues/7468
    resolve = datasets.data_files.resolve_pattern
    datasets.data_files.resolve_pattern = lambda pattern, base_path, *args, **kwargs: resolve(
        pattern, glob.escape(base_path), *args, **kwargs
    )
    try:
        yield
    finally:
        datasets.data_files.resolve_pattern = resolve


def _take(parts: Mapping[str, Dataset], split: str, path: str | Path) -> Dataset:
    """Take a split or a slice, such as `train[:50%]`, as [`~datasets.load_dataset`] does."""
    try:
        lengths = {name: len(part) for name, part in parts.items()}
        slices = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"There is no split {split!r} in '{path}', only {', '.join(sorted(parts))}.") from error
    filled = [part for part in slices if part.from_ < part.to]  # `select` refuses a slice beyond the end
    if not filled:
        if count := sum(lengths[name] for name in {part.splitname for part in slices}):
            raise ValueError(
                f"The split {split!r} takes no row of '{path}', which has {count} of them. Choose another slice."
            )
        raise ValueError(f"'{path}' has no rows (split {split!r}). Add some, or choose another file or split.")
    dataset = concatenate_datasets([parts[part.splitname].select(range(part.from_, part.to)) for part in filled])
    if dataset.builder_name == "csv" and "__index_level_0__" in dataset.column_names:
        raise ValueError(f"A row of a CSV file of '{path}' has more fields than its header. Download and correct it.")
    return dataset


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file of JSON, JSON lines, CSV, TSV or plain lines (as `text`), compressed or not."""
    ending = data_ending(path)
    if ending not in TEXT_DATA:
        raise ValueError(f"'{path}' has no rows: it must end in {', '.join(TEXT_DATA)}, also with .gz, or {PARQUET}.")
    text = read_text(path)
    if ending == LINES:
        return [{"text": line} for line in re.split(r"\r\n?|\n", text) if line.strip()]
    return _read_table(path, text) if ending in TABLES else _read_json_rows(path, text)


def _read_json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    # A list, objects on lines, or over several lines as `jq` writes them: whatever follows on one another
    decoder, space, rows, end = json.JSONDecoder(), re.compile(r"\s*"), list[Any](), 0
    while (start := space.match(text, end).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}). Correct or replace it.") from error
        rows += value if isinstance(value, list) else [value]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"Row {index} of {path} is {shorten(row)}, not an object with the columns as keys.")
    return rows


def _read_table(path: Path, text: str) -> list[dict[str, Any]]:
    marks = "\t" if data_ending(path) == ".tsv" else ",;\t"
    separator = next((mark for mark in marks if mark in text.partition("\n")[0]), marks[0])
    csv.field_size_limit(max(len(text), csv.field_size_limit()))  # an image in base64 is longer than the default
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    rows: list[list[str]] = []
    try:
        names = [name.strip() for name in next(lines, [])]
        for row in filter(None, lines):
            if len(row) != len(names):
                raise ValueError(
                    f"'{path}', line {lines.line_num} has {len(row)} fields, not {len(names)} as the header: "
                    f"{shorten(row)}. Quote texts with {separator!r}."
                )
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"'{path}', line {lines.line_num} cannot be read: {error}. Correct its quotes.") from error
    columns = {name: _typed([row[index] or None for row in rows]) for index, name in enumerate(names)}
    if len(columns) < len(names) or "" in names[1:]:
        raise ValueError(f"The header of '{path}' is {shorten(names)}. Each column needs a name of its own.")
    columns.pop("", None)  # the index that pandas writes
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _typed(texts: list[str | None]) -> list[Any]:
    """Convert a column of texts that are all numbers, or all true or false."""
    for kind in (pa.int64(), pa.float64(), pa.bool_()):
        with suppress(pa.ArrowInvalid):
            values = pa.array(texts, pa.string()).cast(kind).to_pylist()
            pairs = zip(texts, values, strict=True)
            # "007" is a name, as is what has more digits than a number
            is_whole = kind == pa.int64()  # also of "0x1f"
            is_name = any(text and (is_whole or text.isdigit()) and str(int(value)) != text for text, value in pairs)
            return texts if is_name else values
    return texts


def dataset_of_rows(rows: list[dict[str, Any]], where: str = "the dataset") -> Dataset:
    """
    Build a dataset with the keys of all rows (`Dataset.from_list`: of the first). A column that Arrow cannot store, or would
    change (it gives each dictionary the keys of all), is kept as JSON: its values are those of the rows.
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
    """Let columns of paths or files, as other programs store them, or of lists of them, be images."""
    for name in filter(columns.__contains__, dataset.column_names):
        feature = dataset.features[name]
        is_list = isinstance(feature, List | LargeList)
        inner = feature.feature if is_list else feature
        if isinstance(inner, Json):
            values = dataset[name][:]
            row = next((row for row, value in enumerate(values) if type(value) is not type(values[0])), 0)
            raise ValueError(
                f"`{name}` of row {row} of '{where}' is {shorten(values[row])}. Give each row a path, or each a list."
            )
        is_struct = isinstance(inner, dict) and {*inner} <= {"bytes", "path"}
        if is_struct or inner in _STORED_IMAGES or isinstance(feature, LargeList) and isinstance(inner, Image):
            column = dataset.select_columns(name).cast_column(name, List(Image()) if is_list else Image())
            dataset = _with_column(dataset, name, column)
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
            _find_first_beside(names, folders)
        except ValueError as error:
            raise ValueError(f"An image of the column `{column}`: {error}") from error
        if any(name != file for name, file in files.items()):
            rename = partial(_rename_images, column=column, files=files)
            # As Arrow tables, which have the images as stored; a cache file would be in the dataset's directory
            images = dataset.select_columns(column)
            renamed = images.with_format("arrow").map(
                rename, batched=True, batch_size=100, features=images.features, keep_in_memory=True
            )
            dataset = _with_column(dataset, column, renamed.with_format(None))
    return dataset


def _with_column(dataset: Dataset, name: str, column: Dataset) -> Dataset:
    """Replace a column by what became of it alone: `map` would encode JSON in the others again."""
    other_columns = dataset.remove_columns(name)
    if other_columns.column_names:
        column = concatenate_datasets([other_columns, column], axis=1)
    return column.select_columns(dataset.column_names)


def _find_first_beside(names: list[str], folders: list[Path]) -> None:
    """Name the directory that has the images, where it is not the one that is searched but one in it."""
    if names and folders and not (folders[0] / names[0]).exists():
        for folder in filter(Path.is_dir, folders[0].iterdir()):
            if (folder / names[0]).is_file():
                raise ValueError(
                    f"{names[0]!r} is not in {folders[0]}, but in its directory '{folder.name}'. Pass `--image_folder "
                    f"'{folder}'`, or write '{folder.name}/{names[0]}'."
                )


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
        raise ValueError(f"an image is {shorten(name)}, but it must be a path relative to the directory.")
    refuse_address(name)
    path = Path(*folders[:1], name)
    known = datasets.config
    caches = [known.HF_DATASETS_CACHE, known.DOWNLOADED_DATASETS_PATH, known.EXTRACTED_DATASETS_PATH, HF_HUB_CACHE]
    # A download into a cache elsewhere: `snapshots/<commit>/` has links to `blobs/`
    caches += [folder.parents[1] / "blobs" for folder in folders if folder.parent.name == "snapshots"]
    target = path.resolve()
    if not any(target.is_relative_to(_resolved(str(allowed))) for allowed in [*folders, *caches]):
        raise ValueError(
            f"the path {name!r} is absolute or leaves (by a link?) the dataset's directory. Put the images there, or "
            "name their real directory (`image_folder`) where a loader takes one."
        )
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
    lines = [f"Left out {len(broken)} of {total} {what} that are broken:", *broken[:_MAX_LISTED], *more]
    logger.warning("\n".join(lines))
