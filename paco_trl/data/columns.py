# SPDX-License-Identifier: Apache-2.0
"""Check the columns of datasets: types, lists of images, lengths."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..utils.text import shorten


if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset, Features


def column_types(**kinds: Any) -> "Features":
    """Return the types of columns: by the names of Arrow or `"image"`, a list of one for a list, or a dictionary."""
    from datasets import Features, Image, List, Value

    def feature_type(kind: Any) -> Any:
        if isinstance(kind, list):
            return List(feature_type(kind[0]))
        if isinstance(kind, dict):
            return {name: feature_type(part) for name, part in kind.items()}
        return Image() if kind == "image" else Value(kind)

    return Features({name: feature_type(kind) for name, kind in kinds.items()})


def check_is_dataset(dataset: Any, name: str) -> None:
    """Check that an object is a loaded dataset with rows."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise TypeError(f"`{name}` is a `{kind}`. Pass a `datasets.Dataset`: one split, without `streaming=True`.")
    if len(dataset) == 0:
        raise ValueError(f"`{name}` has no rows. Check the file, the split or the filter that it comes from.")


def check_image_column(
    dataset: "Dataset", column: str, name: str, decoded: bool = True, is_list: bool = False
) -> None:
    """Check that a column holds images, or lists of them, decoded when they are read unless `decoded` is `False`."""
    from datasets import Image, LargeList, List

    feature = inner = dataset.features[column]
    kind, call = "an image", "datasets.Image()"
    if is_list:
        inner = feature.feature if isinstance(feature, (List, LargeList)) else None
        kind, call = "a list of images", "datasets.List(datasets.Image())"
    if not isinstance(inner, Image) or decoded and not inner.decode:
        problem = f"The column `{column}` of `{name}` has the type {shorten(feature)}, but must be {kind}"
        raise ValueError(f'{problem}: `dataset.cast_column("{column}", {call})`.')


def typed_dataset(rows: Sequence[tuple[Any, ...]], /, **kinds: Any) -> "Dataset":
    """Build a dataset of rows; `kinds` are its columns, see [`column_types`]."""
    from datasets import Dataset

    columns = dict(zip(kinds, map(list, zip(*rows, strict=True)), strict=True))
    return Dataset.from_dict(columns, features=column_types(**kinds))


def by_id(dataset: "Dataset", column: str) -> dict[Any, Any]:
    """Read a column by the `id` of the rows; images are not decoded."""
    from datasets import Image

    if isinstance(dataset.features[column], Image):
        dataset = dataset.cast_column(column, Image(decode=False))
    columns = dataset.with_format(None).select_columns(["id", column])[:]
    return dict(zip(columns["id"], columns[column], strict=True))


def list_lengths(dataset: "Dataset", column: str) -> "np.ndarray":
    """Compute the lengths of the lists in a column without reading what is in them."""
    import pyarrow.compute as pc

    # Arrow stores the lengths apart from the values: the bytes of the images are not touched
    lengths = pc.fill_null(pc.list_value_length(dataset.data.column(column)), -1).to_numpy()
    # `select`, `shuffle` and `filter` leave the table alone and keep the numbers of the chosen rows
    return lengths if dataset._indices is None else lengths[dataset._indices.column(0).to_numpy()]
