# SPDX-License-Identifier: Apache-2.0
"""Checks and types of dataset columns."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, Image, LargeList, List, Value

from ..utils.text import shorten


# The properties of a reference that an output can keep, in the terms of the paper and T2IS-Bench
REFERENCE_ROLES = ("identity", "style", "logic")
CRITERIA_TYPE = [{"dimension": "string", "name": "string", "text": "string"}]


def column_types(**types: Any) -> Features:
    """Build `Features` from Arrow's type names or `"image"`, with `[type]` for lists and dictionaries for structs."""

    def feature_type(spec: Any) -> Any:
        if isinstance(spec, list):
            return List(feature_type(spec[0]))
        if isinstance(spec, dict):
            return {name: feature_type(field) for name, field in spec.items()}
        return Image() if spec == "image" else Value(spec)

    return Features({name: feature_type(spec) for name, spec in types.items()})


def check_is_dataset(dataset: Any, name: str, required: Sequence[str] = ()) -> None:
    """Check that an object is a loaded dataset with rows and the required columns."""
    if dataset is None:
        raise TypeError(f"`{name}` is missing. Pass a `datasets.Dataset`.")
    if not isinstance(dataset, Dataset):
        type_name = type(dataset).__name__
        raise TypeError(
            f"`{name}` is a `{type_name}`. Pass a `datasets.Dataset`: one split, without `streaming=True`."
        )
    if dataset.format["type"] == "custom":
        raise ValueError(
            f"`{name}` has a transform, which would be ignored. Apply it with `dataset.map` instead of "
            "`set_transform`."
        )
    if len(dataset) == 0:
        raise ValueError(f"`{name}` has no rows. Check its file, split or filter.")
    if missing := [column for column in required if column not in dataset.column_names]:
        raise ValueError(f"`{name}` needs the columns {missing}, but has only {dataset.column_names}.")


def check_image_column(dataset: Dataset, column: str, name: str, decoded: bool = True, is_list: bool = False) -> None:
    """Check that a column has images, or lists of them, which are decoded on reading unless `decoded` is `False`."""
    feature = inner = dataset.features[column]
    expected = "an image"
    feature_call = "datasets.Image()"
    example = '"a.png"'
    if is_list:
        inner = feature.feature if isinstance(feature, (List, LargeList)) else None
        expected = "a list of images"
        feature_call = "datasets.List(datasets.Image())"
        example = '["a.png", "b.png"]'
    if not isinstance(inner, Image) or decoded and not inner.decode:
        raise ValueError(
            f"The column `{column}` of `{name}` has the type {shorten(feature)}, but must be {expected}"
            f': in a file `{example}`, in Python `dataset.cast_column("{column}", {feature_call})`.'
        )


def typed_dataset(rows: Sequence[tuple[Any, ...]], /, **types: Any) -> Dataset:
    """Build a dataset from rows. `types` are its columns, see [`column_types`]."""
    if not rows:
        raise ValueError("No row is left. Leave fewer rows out.")
    columns = dict(zip(types, map(list, zip(*rows, strict=True)), strict=True))
    return Dataset.from_dict(columns, features=column_types(**types))


def check_values(dataset: Dataset, name: str, column: str, is_valid: Callable[[Any], bool], expected: str) -> None:
    """Check the values of a column, if the dataset has it."""
    for row, value in enumerate(dataset.with_format(None)[column] if column in dataset.column_names else ()):
        if not is_valid(value):
            raise ValueError(f"`{column}` of row {row} of `{name}` is {shorten(value)}. It must be {expected}.")


def is_size(value: Any) -> bool:
    """Return whether a value is a number of pixels, or `None`."""
    return value is None or type(value) is int and value > 0


def check_references(dataset: Dataset, name: str = "the dataset") -> Dataset:
    """Check the references of prompts and their roles, if there are any, without opening images."""
    if "references" not in dataset.column_names:
        return dataset
    check_image_column(dataset, "references", name, decoded=False, is_list=True)
    has_roles = "reference_roles" in dataset.column_names
    roles = dataset.with_format(None)["reference_roles"] if has_roles else [None] * len(dataset)
    for row, (count, row_roles) in enumerate(zip(list_lengths(dataset, "references").tolist(), roles, strict=True)):
        roles_of(count, row_roles, f"row {row} of {name}")
    return dataset


def roles_of(count: int, roles: Any, where: str) -> list[str]:
    """Return the roles of a row's references, by default identity."""
    if count < 1:
        raise ValueError(f"`references` of {where} has no image. Add one, or leave the row out.")
    roles = [None] * count if roles is None else roles
    if not isinstance(roles, list) or len(roles) != count:
        raise ValueError(f"`reference_roles` of {where} is {shorten(roles)}. List {count}, one per reference.")
    roles = [REFERENCE_ROLES[0] if role is None else role for role in roles]
    if unknown := [role for role in roles if role not in REFERENCE_ROLES]:
        raise ValueError(
            f"`reference_roles` of {where} has {shorten(unknown[0])}, but a role is one of "
            f"{', '.join(REFERENCE_ROLES)}."
        )
    return roles


def is_json_text(value: Any) -> bool:
    """Return whether a value is a text that holds a JSON object or list, as a cell of a CSV file does."""
    return isinstance(value, str) and value.lstrip()[:1] in ("{", "[")


def criteria_dict(criteria: Any) -> dict[str, dict[str, str]]:
    """
    Convert the criteria of one row to dimension -> name -> text.

    Criteria are the list of `{"dimension", "name", "text"}` that [`convert_t2is`] writes, or map each dimension to a
    text, to texts, or to texts by name, as T2IS-Bench's files do. Texts without a name are numbered, and a text or a
    list of texts without dimensions is the dimension `""`. Text that begins with a brace or a bracket is read as JSON. Names whose text is `None` are left out; `None` gives no
    criteria. Anything else is a `ValueError`.
    """
    if is_json_text(criteria):
        try:
            criteria = json.loads(criteria)
        except ValueError as error:
            raise ValueError(f"`criteria` is {shorten(criteria)}, which is not JSON: {error}.") from None
    by_dimension = criteria if isinstance(criteria, Mapping) else {"": criteria}
    result: dict[str, dict[str, str]] = {}
    for dimension, entries in by_dimension.items():
        for number, entry in enumerate(entries if isinstance(entries, list | tuple) else [entries], 1):
            texts: Any = entry
            name = dimension
            if entry is None or isinstance(entry, str):
                texts = {str(number): entry}
            elif isinstance(entry, Mapping) and entry.keys() == {"dimension", "name", "text"}:
                name, texts = entry["dimension"], {entry["name"]: entry["text"]}
            if not isinstance(texts, Mapping) or any(not isinstance(t, str) for t in texts.values() if t is not None):
                raise ValueError(
                    f"`criteria` is {shorten(criteria)}, but must have texts by dimension, such as "
                    '{"Identity": ["It is the same fox."], "Style": ["All are painted alike."]}.'
                )
            for text_name, text in texts.items():
                if text is not None:
                    result.setdefault(name, {})[text_name] = text
    return result


def criteria_list(criteria: Any) -> list[dict[str, str]]:
    """Convert criteria to a list of entries, which Arrow stores unchanged."""
    return [
        {"dimension": dimension, "name": name, "text": text}
        for dimension, texts in criteria_dict(criteria).items()
        for name, text in texts.items()
    ]


def column_by_id(dataset: Dataset, column: str) -> dict[Any, Any]:
    """Map the `id` of each row to its value in a column; images are not decoded."""
    if isinstance(dataset.features[column], Image):
        dataset = dataset.cast_column(column, Image(decode=False))
    columns = dataset.with_format(None).select_columns(["id", column])[:]
    return dict(zip(columns["id"], columns[column], strict=True))


def list_lengths(dataset: Dataset, column: str) -> np.ndarray:
    """Compute the lengths of the lists in a column without reading their values."""
    # Arrow stores lengths apart from values, so that image bytes are not touched
    lengths = pc.fill_null(pc.list_value_length(dataset.data.column(column)), -1).to_numpy()
    # `select`, `shuffle` and `filter` keep the table and store the numbers of the selected rows
    return lengths if dataset._indices is None else lengths[dataset._indices.column(0).to_numpy()]
