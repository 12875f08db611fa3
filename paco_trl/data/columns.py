# SPDX-License-Identifier: Apache-2.0
"""What the checks of datasets share."""

from typing import TYPE_CHECKING, Any

from ..utils.text import shorten


if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset


def check_is_dataset(dataset: Any, name: str) -> None:
    """Check that something is a loaded dataset with rows."""
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        raise TypeError(
            f'`{name}` is a `{type(dataset).__name__}` of the splits {list(dataset)}. Give one: `dataset["train"]`.'
        )
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"`{name}` is an `IterableDataset`, which cannot be checked before training without reading all of it. "
            "Load it without `streaming=True`."
        )
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"`{name}` is a `{type(dataset).__name__}`. It must be a `datasets.Dataset`: make one with "
            "`datasets.Dataset.from_list(rows)` or `datasets.load_dataset`."
        )
    if len(dataset) == 0:
        raise ValueError(f"`{name}` has no rows. Check the file, the split or the filter that it comes from.")


def check_image_list(dataset: "Dataset", column: str, name: str) -> None:
    """Check that a column holds lists of images that are decoded when they are read."""
    from datasets import Image, LargeList, List

    feature = dataset.features[column]
    inner = feature.feature if isinstance(feature, (List, LargeList)) else None
    if not isinstance(inner, Image) or not inner.decode:
        raise ValueError(
            f"The column `{column}` of `{name}` has the type {shorten(feature)}, but it must be a list of images. "
            f'Convert it: `dataset.cast_column("{column}", datasets.List(datasets.Image()))`.'
        )


def list_lengths(dataset: "Dataset", column: str) -> "np.ndarray":
    """Give the lengths of the lists in a column without reading what is in them."""
    import pyarrow.compute as pc

    # Arrow keeps the lengths beside the values: the bytes of the images are not touched
    lengths = pc.fill_null(pc.list_value_length(dataset.data.column(column)), -1).to_numpy()
    # `select`, `shuffle` and `filter` leave the table alone and keep the numbers of the chosen rows
    return lengths if dataset._indices is None else lengths[dataset._indices.column(0).to_numpy()]
