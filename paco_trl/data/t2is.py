# SPDX-License-Identifier: Apache-2.0
"""Conversion of T2IS-Bench (https://huggingface.co/papers/2506.23275), raw rows or files, to image-set prompts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, Features

from ..utils.text import read_json, shorten
from .columns import CRITERIA_TYPE, column_types, criteria_list
from .dataset_files import find_dataset_folder
from .grid_prompts import GRID, GRID_LAYOUT, ImageSetPrompt, default_grid, parse_image_set_prompt
from .grids import panel_size


_BENCH, _CRITERIA = "T2IS-Bench.json", "prompt_consistency.json"
_PANEL_SIDE = 512  # pixels, from the README of the benchmark's code


def convert_t2is(dataset: Dataset) -> Dataset:
    """
    Convert raw rows of T2IS-Bench (https://huggingface.co/papers/2506.23275) to image-set prompts.

    Args:
        dataset ([`~datasets.Dataset`]):
            Raw rows with `idx`, `prompt`, `layout`, `height`, `width` and, optionally, `theme`, `criteria`,
            `category`, `task_name` and `original_idx`.

    Returns:
        [`~datasets.Dataset`]: the columns `id`, `prompt`, `theme`, `rows`, `cols`, `panels`, `criteria`, `height`,
        `width`, `category`, `subcategory` (raw `task_name`) and `case_id` (raw `original_idx`). `criteria` becomes a
        list of `{"dimension", "name", "text"}`, because in a column of dictionaries every row would have the names of
        all rows. Its inverse is [`criteria_dict`].

    Raises:
        ValueError: If a column is missing, or the prompt of a row does not fit its layout and size.
    """
    names = dataset.column_names
    if missing := [name for name in ("idx", "prompt", "layout", "height", "width") if name not in names]:
        raise ValueError(f"The dataset has no column `{missing[0]}`, as raw rows of T2IS-Bench have.")
    return dataset.with_format(None).map(
        convert_t2is_row, remove_columns=names, features=_features(), desc="Converting T2IS prompts"
    )


def convert_t2is_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one raw row like [`convert_t2is`]."""
    try:
        parsed_prompt = parse_image_set_prompt(row["prompt"])
        layout = GRID.fullmatch(row["layout"].strip())
        if layout is None or (int(layout[1]), int(layout[2])) != (parsed_prompt.rows, parsed_prompt.cols):
            raise ValueError(
                f"`layout` is {shorten(row['layout'])}, but the prompt has {parsed_prompt.rows}x{parsed_prompt.cols}."
            )
        panel_size(row["height"], row["width"], parsed_prompt.rows, parsed_prompt.cols)
    except ValueError as error:
        raise ValueError(f"T2IS row with idx {shorten(row['idx'])}: {error}") from error
    columns = {name: row[name] for name in ("prompt", "height", "width")} | {"id": str(row["idx"])}
    optional = {"category": "category", "subcategory": "task_name", "case_id": "original_idx"}
    columns |= {name: row.get(raw_name) for name, raw_name in optional.items()}
    columns |= {"criteria": criteria_list(row.get("criteria"))} | parsed_prompt._asdict()
    return columns | {"theme": row.get("theme") or parsed_prompt.theme}


def _features() -> Features:
    """Return the types of the columns, which may be `None` in the first rows."""
    texts = ("id", "prompt", "theme", "category", "subcategory", "case_id")
    numbers = ("rows", "cols", "height", "width")
    lists = {"panels": ["string"], "criteria": CRITERIA_TYPE}
    return column_types(**dict.fromkeys(texts, "string"), **dict.fromkeys(numbers, "int64"), **lists)


def find_t2is_bench(name_or_path: str | Path) -> Path | None:
    """Find or download the directory of T2IS-Bench's files; return `None` for data in another format."""
    path = Path(name_or_path).expanduser()
    path = path.parent if path.name == _BENCH else path
    if (path / _BENCH).is_file():
        return path
    return find_dataset_folder(name_or_path, ["*.json"]) if name_or_path == "ChengyouJia/T2IS-Bench" else None


def read_t2is_bench(folder: Path) -> Dataset:
    """Read T2IS-Bench's files into the columns of [`convert_t2is`]; a case without a grid prompt has no `panels`."""
    cases, criteria = (read_json(folder / name) for name in (_BENCH, _CRITERIA))
    rows = []
    for name, case in cases.items():
        try:
            rows.append(_convert_case(name, case, criteria_list(criteria[name])))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{folder / _BENCH} or {_CRITERIA}, case {name!r}: {error}") from error
    return Dataset.from_list(rows, features=_features())


def _convert_case(name: str, case: dict[str, Any], criteria: list[dict[str, str]]) -> dict[str, Any]:
    # The benchmark's code only names `task_name_case_id` and `output_image_count`. The prompt is the text that
    # describes a grid, or the longest one
    texts = sorted((text for text in case.values() if isinstance(text, str)), key=len, reverse=True)
    grid = next(filter(GRID_LAYOUT.search, texts), None)
    count = case.get("output_image_count")
    if grid is not None:
        parsed_prompt = parse_image_set_prompt(grid)
    elif not texts or type(count) is not int or count < 1:
        raise ValueError(
            f"it has neither a prompt of a grid nor an instruction with `output_image_count`: {list(case)}."
        )
    else:
        parsed_prompt = ImageSetPrompt(texts[0], *default_grid(count), [])
    rows, cols = parsed_prompt.rows, parsed_prompt.cols
    if count not in (None, rows * cols):
        raise ValueError(f"`output_image_count` is {shorten(count)}, but its prompt asks for a {rows}x{cols} grid.")
    columns = {"id": name, "case_id": name, "category": case.get("category"), "criteria": criteria}
    columns |= {"prompt": grid or parsed_prompt.theme, "height": _PANEL_SIDE * rows, "width": _PANEL_SIDE * cols}
    columns["subcategory"] = str(case.get("task_name_case_id", "")).rpartition("_")[0] or None
    return columns | parsed_prompt._asdict()
