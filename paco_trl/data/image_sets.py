# SPDX-License-Identifier: Apache-2.0
"""
Image-set prompts: a text that asks for a grid of related images.

Columns: `prompt`, `rows`, `cols`, `panels` and, optionally, `theme`, `criteria`, `height`, `width` and `id`. A set of
separate images has `layout: "separate"`, `theme` and `panels`; `prompt`, `rows` (1) and `cols` are filled in.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, Value

from ..utils.data_names import LINES, data_ending
from ..utils.text import is_text, join_first, shorten
from .columns import check_references, is_size
from .dataset_files import DEMO_FILE, load_split
from .grid_prompts import (
    GRID,
    GRID_LAYOUT,
    ImageSetPrompt,
    default_grid,
    ends_sentence,
    find_markers,
    format_image_set_prompt,
    parse_image_set_prompt,
)
from .t2is import convert_t2is


logger = logging.getLogger(__name__)


# Layout of a set whose panels are separate images
SEPARATE = "separate"
# Options for separate images: their prompt, and how they are generated
PANEL_OPTIONS = ("panel_template", "panel_generation")
PANEL_TEMPLATE = "{theme} {panel}"
GRID_COLUMNS = ("rows", "cols", "panels")
_REQUIRED_COLUMNS = ("prompt", *GRID_COLUMNS)
_SIZE_COLUMNS = ("height", "width")
_COLUMNS = (*_REQUIRED_COLUMNS, "theme", "layout", *_SIZE_COLUMNS)

# A theme's description of its grid
_GRID_INTRODUCTION = re.compile(
    rf"(?:[\w-]+-PANEL\s+images?\s+with\s+(?:an?\s+)?)?{GRID_LAYOUT.pattern}(?:\s*:|\s+of\b)?\s*", re.IGNORECASE
)
_GRID_PHRASE = re.compile(GRID.pattern + r"[\s-]+grid\b", re.IGNORECASE)


def check_image_set_columns(dataset: Dataset) -> None:
    """
    Check that a dataset has image-set prompts. Only the columns of such prompts are read.

    Raises a `ValueError` if there are no rows, `prompt`, `rows`, `cols` or `panels` is missing, or a row has an empty
    prompt, an empty panel, another number of panels than its grid, another grid than its prompt names, or an invalid
    size.
    """
    _check_rows(list(_prompt_columns(dataset)), dataset.column_names)


def check_image_set_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that rows are image-set prompts, like [`check_image_set_columns`]."""
    rows = list(rows)
    _check_rows(rows, list(dict.fromkeys(name for row in rows for name in row)))


def _check_rows(rows: list[Mapping[str, Any]], names: list[str]) -> None:
    """Check rows of image-set prompts; `names` are all columns of their dataset."""
    if not rows:
        if names:
            remedy = "Rename the column of the texts to `prompt`, or name the file that has it."
            if names == ["image"]:  # a directory of images
                remedy = "Put the prompt of `001.png` in a file `001.txt` beside it."
            raise ValueError(f"There is no column `prompt` among {join_first(names)}. {remedy}")
        raise ValueError("The image-set prompts have no rows. Check the file or the split.")
    if missing := [name for name in _REQUIRED_COLUMNS if any(name not in row for row in rows)]:
        if sources := sorted({*names} & {"image", "images"}):
            raise ValueError(
                f"The rows have source images (`{sources[0]}`). To edit them add `--edits`, or use "
                "`load_edit_prompts`."
            )
        remedy = "A set in a grid has `rows`, `cols` and `panels`; leave all three out for single images."
        if missing == ["prompt"] and {"theme", "panels"} <= {*names}:
            remedy = "Write it with `format_image_set_prompt(theme, rows, cols, panels)`."
        elif "layout" in names:
            remedy = "Convert raw T2IS rows with `convert_t2is`."
        raise ValueError(f"The prompts have no {' and no '.join(f'`{name}`' for name in missing)}. {remedy}")
    for index, row in enumerate(rows):
        check_grid_row(index, *(row[name] for name in _REQUIRED_COLUMNS))
        if row.get("layout") != SEPARATE:
            _check_grid_of_prompt(index, row["prompt"], row["rows"], row["cols"])
        elif row["rows"] != 1:
            raise ValueError(
                f"Row {index} has rows={row['rows']}, but its images are separate. Leave `rows` and `cols` out."
            )
        elif not is_text(row.get("theme")):
            raise ValueError(
                f"`theme` of row {index} is {shorten(row.get('theme'))}, but separate images need a text."
            )
        if not all(is_size(row.get(name)) for name in _SIZE_COLUMNS):
            sizes = {name: row.get(name) for name in _SIZE_COLUMNS}
            raise ValueError(f"Row {index} has {sizes}, but sizes must be numbers of pixels, such as 1024.")


def _prompt_columns(dataset: Dataset) -> Dataset:
    """Select the columns of image-set prompts, none of which has images."""
    return dataset.with_format(None).select_columns([name for name in _COLUMNS if name in dataset.column_names])


def check_grid_row(index: int, prompt: Any, rows: Any, cols: Any, panels: Any) -> None:
    """Check the prompt, the layout and the panels of a row."""
    _check_prompt(index, prompt)
    if not all(type(count) is int and count > 0 for count in (rows, cols)):
        raise ValueError(
            f"Row {index} has rows={shorten(rows)} and cols={shorten(cols)}; both must be whole numbers from 1 on."
        )
    if not isinstance(panels, list | tuple) or len(panels) != rows * cols or not all(map(is_text, panels)):
        raise ValueError(
            f"`panels` of row {index} is {shorten(panels)}. It must be a list with a text for each panel of its "
            f"{rows}x{cols} grid (rows x cols)."
        )


def _check_prompt(index: int, prompt: Any) -> None:
    if not is_text(prompt):
        raise ValueError(f"The `prompt` of row {index} is {shorten(prompt)}. It must be a text that is not empty.")


def _check_grid_of_prompt(index: int, prompt: str, rows: int, cols: int) -> None:
    """Check that a row has the grid that its prompt asks for, since the image is split by the row's grid."""
    markers = find_markers(prompt)
    theme = prompt[: markers[0].start()] if markers else prompt
    grids = GRID_LAYOUT.findall(theme)
    if not grids and rows * cols > 1:  # in a single image, a "2x2 grid" may be windows of a house
        grids = _GRID_PHRASE.findall(theme)
    if grids and (rows, cols) not in [(int(first), int(second)) for first, second in grids]:
        raise ValueError(
            f"Row {index} has rows={rows} and cols={cols}, but its prompt asks for a {'x'.join(grids[0])} grid: "
            f"{shorten(prompt)}."
        )


def complete_image_sets(dataset: Dataset) -> Dataset:
    """Complete image-set prompts like [`load_image_set_prompts`], and check them. The dataset is not changed."""
    for name in _SIZE_COLUMNS:  # pandas has no integers next to missing values
        if dataset.features.get(name) in (Value("float32"), Value("float64")):
            dataset = dataset.cast_column(name, Value("int64"))
    dataset, names = dataset.with_format(None), set(dataset.column_names)
    is_editing = "panels" not in names and not names.isdisjoint(("image", "images"))
    if not is_editing:  # the check below reports editing prompts
        rows = list(_prompt_columns(dataset))
        dataset = _with_columns(dataset, rows, [_complete_row(index, row) for index, row in enumerate(rows)])
    check_image_set_columns(dataset)
    return check_references(dataset)


def _complete_row(index: int, row: dict[str, Any]) -> dict[str, Any]:
    """Fill in missing columns of a row from its prompt: layout and panels, or only the theme."""
    values: dict[str, Any] = {}
    is_bare = all(row.get(name) is None for name in GRID_COLUMNS)
    prompt: Any = row.get("prompt")
    layout = row.get("layout")
    if layout not in (None, SEPARATE) and prompt is None:
        raise ValueError(
            f"`layout` of row {index} is {shorten(layout)}; it must be '{SEPARATE}', or left out for a grid."
        )
    if layout == SEPARATE:  # as if the panels were side by side
        panels = row.get("panels")
        if not isinstance(panels, list | tuple) or not panels:
            raise ValueError(
                f"`panels` of row {index} is {shorten(panels)}. It must be a list with a text for each image."
            )
        values = {"prompt": " ".join(map(str, [row.get("theme"), *panels])), "rows": 1, "cols": len(panels)}
    elif "prompt" in row and (is_bare or row.get("theme") is None):
        _check_prompt(index, prompt)
        parsed_prompt = ImageSetPrompt(prompt, 1, 1, [prompt])
        try:
            parsed_prompt = parse_image_set_prompt(prompt) if GRID_LAYOUT.search(prompt) else parsed_prompt
        except ValueError as error:
            if is_bare:
                raise ValueError(f"Row {index}: {error}") from error
        if is_bare:
            values = parsed_prompt._asdict()
        elif (parsed_prompt.rows, parsed_prompt.cols) == (
            row.get("rows"),
            row.get("cols"),
        ):  # the prompt describes the row's grid
            values = {"theme": parsed_prompt.theme}
    return {**row, **{name: value for name, value in values.items() if row.get(name) is None}}


def _with_columns(dataset: Dataset, old_rows: list[dict[str, Any]], new_rows: list[dict[str, Any]]) -> Dataset:
    """Replace the columns of a dataset that differ between its old and new rows."""
    for name in _COLUMNS:
        column = [row.get(name) for row in new_rows]
        if column != [row.get(name) for row in old_rows]:
            other_columns = dataset.remove_columns(name) if name in dataset.column_names else dataset
            dataset = other_columns.add_column(name, column)
    return dataset


def prompts_of_row(row: Mapping[str, Any], panel_template: str) -> list[str]:
    """Return the prompts of a row's images: its prompt, or one per panel for separate images."""
    if row.get("layout") != SEPARATE:
        return [row["prompt"]]
    return [panel_template.format(theme=row["theme"], panel=panel).strip() for panel in row["panels"]]


def prompt_texts(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Format prompts for `paco-trl space`: for separate images, the theme and one line per panel."""
    return [
        "\n".join(" ".join(text.split()) for text in [row["theme"], *row["panels"]])
        if row.get("layout") == SEPARATE
        else row["prompt"]
        for row in rows
    ]


def arrange_sets(dataset: Dataset, layout: str | None) -> Dataset:
    """
    Convert all sets of completed prompts to separate images, or to T2IS's grids; `None` leaves them unchanged.

    A converted row loses its `height` and `width`, and its theme becomes the part of the prompt that all panels share.
    """
    if layout is None:
        return dataset
    rows = list(_prompt_columns(dataset))
    return _with_columns(dataset, rows, [_arrange_row(index, row, layout) for index, row in enumerate(rows)])


def _arrange_row(index: int, row: dict[str, Any], layout: str) -> dict[str, Any]:
    count = row["rows"] * row["cols"]
    is_separate = row.get("layout") == SEPARATE
    if count == 1 or is_separate == (layout == SEPARATE):
        return row
    theme = row.get("theme") or ""
    prompt = row["prompt"]
    empty_sizes = dict.fromkeys(_SIZE_COLUMNS)
    if layout == SEPARATE:
        markers = find_markers(prompt)
        if markers and GRID_LAYOUT.search(prompt) is not None:
            theme = prompt[: markers[0].start()]
        theme = _GRID_INTRODUCTION.sub("", theme).strip()
        if not theme:
            raise ValueError(
                f"Row {index} has no `theme`, and its prompt names none: {shorten(prompt)}. Separate images would "
                "have nothing in common. Add a theme, or keep the row a grid."
            )
        prompt = " ".join([theme, *row["panels"]])
        return {**row, **empty_sizes, "layout": SEPARATE, "theme": theme, "prompt": prompt, "rows": 1, "cols": count}
    rows, cols = default_grid(count)
    first, *panels = (text if ends_sentence(text) else f"{text}." for text in [theme, *row["panels"]])
    try:
        prompt = format_image_set_prompt(first, rows, cols, panels)
    except ValueError as error:
        raise ValueError(f"Row {index} cannot become a grid. {error}") from error
    return {**row, **empty_sizes, "layout": None, "prompt": prompt, "rows": rows, "cols": cols}


def load_image_set_prompts(name_or_path: str | Path, split: str = "train", config: str | None = None) -> Dataset:
    """
    Load image-set prompts from the Hub or from disk, and check them. Raw T2IS rows are converted.

    Rows with a `prompt` but without `rows`, `cols` and `panels` are completed: a text that names an `RxC grid layout`
    is parsed by [`parse_image_set_prompt`], any other text is a single image (`rows = cols = 1`). A missing `theme` is
    also parsed. A row with `layout: "separate"`, `theme` and `panels` is a set of separate images, one per panel, each
    of the row's `height` and `width`. The trainers complete their datasets in the same way.

    Args:
        name_or_path (`str` or `Path`):
            A `.jsonl`, `.json`, `.csv` or `.tsv` file, or a `.txt` file with one prompt per line, optionally
            compressed (`.gz`); a `.parquet` file; a directory written by `save_to_disk`; or anything else that
            [`~datasets.load_dataset`] reads. `"demo"` loads the 24 prompts that come with the package, unless a file
            or directory has this name.
        split (`str`, *optional*, defaults to `"train"`):
            Split or slice to load, such as `"train[:50%]"`. A file or a saved `Dataset` has a single split, `"train"`.
        config (`str`, *optional*):
            Configuration of the dataset if it has several: `name` of [`~datasets.load_dataset`].

    Raises:
        ValueError: If there is no such split, or the rows are not image-set prompts.
    """
    dataset = load_split(name_or_path, split, ["references"], config=config)
    if {"layout", "prompt"} <= {*dataset.column_names} and "panels" not in dataset.column_names:
        dataset = convert_t2is(dataset)
    if dataset.column_names == ["text"]:
        path = Path(name_or_path).expanduser()
        if not any(data_ending(file) == LINES for file in (path, *path.rglob("*"))):
            logger.warning(f"'{name_or_path}' has no column `prompt`: the prompts are its only column, `text`.")
        dataset = dataset.map(lambda row: {"prompt": row["text"].removeprefix("\ufeff")}, remove_columns="text")
        dataset = dataset.filter(is_text, input_columns="prompt")
    return complete_image_sets(dataset)


def demo_prompts_path() -> Path:
    """Return the path of the `.jsonl` file with the 24 image-set prompts that come with the package."""
    return DEMO_FILE
