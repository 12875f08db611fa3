# SPDX-License-Identifier: Apache-2.0
"""Loading of splits of files, directories and repositories, and reports of broken rows."""

import glob
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, Json, concatenate_datasets
from datasets.data_files import EmptyDatasetError
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from ..utils.data_names import DEMO, PARQUET, TEXT_DATA, check_dataset_name, data_ending
from ..utils.names import is_local
from ..utils.stage_folder import StageFolder, is_saved
from ..utils.text import join_first
from .caption_folders import read_caption_folder
from .image_paths import unembedded_paths, with_image_files, with_image_types
from .text_tables import dataset_of_rows, read_rows


logger = logging.getLogger(__name__)

_MAX_LISTED = 20
# File of the dataset that comes with the package
DEMO_FILE = Path(__file__).parent / "prompts" / "demo.jsonl"


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
    try:
        return Path(snapshot_download(path, repo_type="dataset", allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"The Hub cannot be reached for the dataset {path}, which is not in the cache. Pass a directory, or download "
            "it once: the cache needs no network then."
        ) from error


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
        # The output of a build stage refers to images of earlier stages
        folders += StageFolder.image_folders(folder)
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
    dataset = with_image_files(dataset, paths, folders)
    features = dataset.info.features
    features.update({name: _ExactJson() for name, feature in features.items() if isinstance(feature, Json)})
    return dataset


def _read_splits(path: str, split: str, config: str | None) -> Mapping[str, Dataset]:
    """Read the splits of a file, directory or repository."""
    if os.path.isfile(path) and data_ending(Path(path)) != PARQUET:
        return _read_text_files({"train": [path]}, split, path)
    with _explain_errors(path):
        if is_saved(path):
            return _read_saved(path)
        if os.path.isfile(path):
            return {"train": Dataset.from_parquet(glob.escape(path))}
        with _no_patterns():
            builder = datasets.load_dataset_builder(path, config)
        files = _list_files(builder, path)
        is_text = all(data_ending(Path(file)) in TEXT_DATA for split_files in files.values() for file in split_files)
        if not os.path.exists(path) or not is_text or builder.info.features is not None:
            builder.config.data_files = files
            builder.download_and_prepare()
            return builder.as_dataset()
    return _read_text_files(files, split, path)


def _read_saved(path: str) -> Mapping[str, Dataset]:
    dataset = datasets.load_from_disk(path)
    # A single dataset is also available as the default split, whatever its own split is called
    return {str(dataset.split or "train"): dataset, "train": dataset} if isinstance(dataset, Dataset) else dataset


def _list_files(builder: datasets.DatasetBuilder, path: str) -> dict[str, list[str]]:
    """Return the files by split that `datasets` finds, without backups; warn of data files that it does not read."""
    files = builder.config.data_files or {}
    if not os.path.isdir(path):
        return files
    if builder.name in ("json", "csv", "text", "parquet"):  # `datasets` also takes train.jsonl.bak
        files = {name: list(filter(_is_data_file, split_files)) for name, split_files in files.items()}
    read_files = [Path(file) for split_files in files.values() for file in split_files]
    # `datasets` only reads the most common format
    folders = {file.parent for file in read_files}
    other_files = {file for folder in folders for file in folder.glob("[!.]*")} - {*read_files}
    if ignored_files := sorted(file.name for file in filter(_is_data_file, other_files)):
        logger.warning(
            f"Of '{path}' only {join_first([file.name for file in read_files])} are read, not "
            f"{join_first(ignored_files)}."
        )
    return files


def _is_data_file(path: str | Path) -> bool:
    return data_ending(Path(path)) in (*TEXT_DATA, PARQUET)


def _read_text_files(files: Mapping[str, list[str]], split: str, path: str) -> Mapping[str, Dataset]:
    """Read local text files by [`read_rows`]: `datasets` gives every nested object the keys of all others."""
    names = [name for name in files if str(name) in split] or files  # all splits if none matches, for the error
    rows = {str(name): [row for file in files[name] for row in read_rows(Path(file))] for name in names}
    return {name: dataset_of_rows(split_rows, path) for name, split_rows in rows.items()}


@contextmanager
def _explain_errors(path: str) -> Iterator[None]:
    """Convert errors of `datasets` to errors that name the dataset and say what to do."""
    try:
        yield
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


@contextmanager
def _no_patterns() -> Iterator[None]:
    """Let `datasets` treat a directory as a path instead of a glob pattern."""
    # Until https://github.com/huggingface/datasets/issues/7468 is fixed
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


def report_broken_rows(broken: list[str], total: int, item_name: str, skip_broken: bool | None) -> None:
    """Raise an error for broken rows, or warn that they are left out; `skip_broken=None` if that is no option."""
    if not broken:
        return
    if not skip_broken:
        count = (
            f" ({len(broken)} of {total} {item_name} are broken; this is the first one.)" if len(broken) > 1 else ""
        )
        remedy = "" if skip_broken is None else f", or leave such {item_name} out with `skip_broken=True`"
        raise ValueError(f"{broken[0]} Correct it{remedy}.{count}")
    more = [f"and {len(broken) - _MAX_LISTED} more."] * (len(broken) > _MAX_LISTED)
    lines = [f"Left out {len(broken)} of {total} {item_name} that are broken:", *broken[:_MAX_LISTED], *more]
    logger.warning("\n".join(lines))
