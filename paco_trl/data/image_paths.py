# SPDX-License-Identifier: Apache-2.0
"""Image columns of datasets, the files that they name, and rejection of unsafe paths."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image, Json, LargeList, List, Value, concatenate_datasets
from huggingface_hub.constants import HF_HUB_CACHE

from ..utils.images import refuse_address
from ..utils.text import is_text, shorten


# Types of image columns that `datasets` does not recognize as images
_STORED_IMAGES = [Value(f"{size}{kind}") for size in ("", "large_") for kind in ("string", "binary")]


def with_image_types(dataset: Dataset, columns: Sequence[str], where: str = "the dataset") -> Dataset:
    """Cast columns of paths or files, or of lists of these, to images, whatever program stored the columns."""
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


def with_image_files(dataset: Dataset, paths: dict[str, list[str]], folders: list[Path]) -> Dataset:
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
    """Replace a column without a `map` over the other columns, which would encode their JSON again."""
    other_columns = dataset.remove_columns(name)
    if other_columns.column_names:
        column = concatenate_datasets([other_columns, column], axis=1)
    return column.select_columns(dataset.column_names)


def _find_image_folder(name: str, folder: Path) -> Path:
    """Find the directory of images that are not in `folder`: `images`, as in Flow-Factory. An error names another."""
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
