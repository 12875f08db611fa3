# SPDX-License-Identifier: Apache-2.0
"""
Image-set prompts: one text that asks for a grid of images which belong together.

Columns: `prompt`, `rows`, `cols`, `panels` and, where known, `theme`, `criteria`, `height`, `width` and `id`. A set of
separate images has `layout: "separate"`, `theme` and `panels`; `prompt`, `rows` (1) and `cols` are filled in.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..utils.text import shorten
from .columns import check_references, column_types
from .dataset_files import (
    dataset_of_rows,
    find_dataset_file,
    find_dataset_folder,
    find_prompts,
    has_rows_as_text,
    is_saved,
    load_split,
    read_json_objects,
    read_rows,
    with_image_files,
)
from .grids import panel_size
from .texts import is_text


if TYPE_CHECKING:
    from datasets import Dataset, Features


# Layout of a set whose panels are images of their own
SEPARATE = "separate"
SET_LAYOUTS = (None, "grid", SEPARATE)
# Settings of separate images: the default prompt, and how they are generated
PANEL_OPTIONS = ("panel_template", "panel_generation")
PANEL_TEMPLATE = "{theme} {panel}"
PANEL_GENERATIONS = ("independent", "shared_noise", "anchored")
CRITERIA_TYPE = [{"dimension": "string", "name": "string", "text": "string"}]
_GRID_COLUMNS = ["rows", "cols", "panels"]
_NEEDED_COLUMNS = ["prompt", *_GRID_COLUMNS]
_SIZE_COLUMNS = ["height", "width"]
_T2IS_COLUMNS = ["idx", "prompt", "layout", "height", "width"]
_T2IS_BENCH = "T2IS-Bench.json"
_T2IS_CRITERIA = "prompt_consistency.json"
_T2IS_PANEL = 512  # pixels, in the README of the benchmark's code

_LAYOUT = re.compile(r"(\d+)\s*[xX×]\s*(\d+)")
_LAYOUT_PHRASE = re.compile(_LAYOUT.pattern + r"[\s-]+grid\s+layout", re.IGNORECASE)
# What a theme says of its grid
_GRID_INTRODUCTION = re.compile(
    rf"(?:[\w-]+-PANEL\s+images?\s+with\s+(?:an?\s+)?)?{_LAYOUT_PHRASE.pattern}(?:\s*:|\s+of\b)?\s*", re.IGNORECASE
)
_GRID_PHRASE = re.compile(_LAYOUT.pattern + r"[\s-]+grid\b", re.IGNORECASE)

# "[LEFT]:", "[TOP]-[MIDDLE-LEFT]:" or "PANEL-3:"
_MARKER = re.compile(r"(?:\[[A-Z-]+\](?:-\[[A-Z-]+\])?|PANEL-\d+):")
_SENTENCE_ENDS = (".", "!", "?", "…", "。", "！", "？")
_CLOSING_MARKS = "\"'”’»)]"

_ROW_NAMES = {1: [""], 2: ["TOP", "BOTTOM"], 3: ["TOP", "MIDDLE", "BOTTOM"]}
_COL_NAMES = {
    1: [""],
    2: ["LEFT", "RIGHT"],
    3: ["LEFT", "MIDDLE", "RIGHT"],
    4: ["LEFT", "MIDDLE-LEFT", "MIDDLE-RIGHT", "RIGHT"],
}
_NUMBER_WORDS = dict(
    enumerate("ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE TEN ELEVEN TWELVE".split(), start=1)  # then in digits
)


class ImageSetPrompt(NamedTuple):
    """
    The parts of an image-set prompt.

    Attributes:
        theme (`str`): Text in front of the first panel marker: the layout, the subject and what all panels share.
        rows (`int`), cols (`int`): Layout of the grid.
        panels (`list[str]`): Texts of the `rows * cols` panels, row by row from the upper left.
    """

    theme: str
    rows: int
    cols: int
    panels: list[str]


def ends_sentence(text: str) -> bool:
    """Tell whether a text ends with a sentence, so that a panel marker may come next."""
    return text.rstrip(_CLOSING_MARKS).endswith(_SENTENCE_ENDS)


def _find_markers(prompt: str) -> list[re.Match]:
    """Find the markers that open a panel: those after the end of a sentence or directly after a marker."""
    markers: list[re.Match] = []
    for match in _MARKER.finditer(prompt):
        before = prompt[: match.start()].rstrip()
        # Directly after a marker: the panel in between is empty, and reported as such
        if markers and len(before) == markers[-1].end() or ends_sentence(before):
            markers.append(match)
    return markers


def _position_markers(rows: int, cols: int) -> list[str] | None:
    """Return the markers by position, row by row; None for a layout whose positions have no names."""
    if rows not in _ROW_NAMES or cols not in _COL_NAMES or rows == cols == 1:
        return None
    positions = [filter(None, place) for place in itertools.product(_ROW_NAMES[rows], _COL_NAMES[cols])]
    return ["-".join(f"[{name}]" for name in names) + ":" for names in positions]


def _number_markers(count: int) -> list[str]:
    return [f"PANEL-{number}:" for number in range(1, count + 1)]


def parse_image_set_prompt(prompt: str) -> ImageSetPrompt:
    """
    Parse an image-set prompt in the T2IS format.

    The format is `FOUR-PANEL Images with a 2x2 grid layout <subject>. <shared description> [TOP]-[LEFT]:<panel 1>
    [TOP]-[RIGHT]:<panel 2> ...`. A grid of one row has `[LEFT]:`, `[MIDDLE]:`, `[RIGHT]:`; any grid may have
    `PANEL-1:`, `PANEL-2:` ... instead. A marker opens a panel only after the end of a sentence; inside one it is text.

    Args:
        prompt (`str`):
            The prompt.

    Returns:
        [`ImageSetPrompt`].

    Raises:
        ValueError: If the layout is missing, the panel markers do not fit it, or a panel is empty.
    """
    markers = _find_markers(prompt)
    theme = prompt[: markers[0].start()].strip() if markers else prompt.strip()
    shown = shorten(prompt)
    layout = _LAYOUT_PHRASE.search(theme)
    if layout is None:
        raise ValueError(
            f"The prompt {shown} names no `RxC grid layout` in front of its first panel, so its rows and columns are "
            'unknown. Write for example "FOUR-PANEL Images with a 2x2 grid layout ...".'
        )
    rows, cols = int(layout[1]), int(layout[2])
    if rows < 1 or cols < 1:
        raise ValueError(f"The prompt {shown} asks for a {rows}x{cols} grid, which has no panels.")

    names = [marker[0] for marker in markers]
    # The number first: nothing is built for a grid of a billion panels
    if len(names) != rows * cols or names not in (_position_markers(rows, cols), _number_markers(rows * cols)):
        by_position = _position_markers(rows, cols)
        expected = f"`{' '.join(by_position)}` or " if by_position is not None else ""
        inside = len(_MARKER.findall(prompt)) - len(names)
        raise ValueError(
            f"The prompt {shown} has {len(names)} panel markers ({' '.join(names)}) that do not fit its {rows}x{cols} grid. "
            f"Write {expected}`PANEL-1:` to `PANEL-{rows * cols}:`, in this order; {inside} more inside a sentence do not count."
        )

    ends = [marker.start() for marker in markers[1:]] + [len(prompt)]
    panels = [prompt[marker.end() : end].strip() for marker, end in zip(markers, ends, strict=True)]
    if "" in panels:
        raise ValueError(f"The panel {names[panels.index('')]} of the prompt {shown} is empty. Describe it.")
    return ImageSetPrompt(theme, rows, cols, panels)


def format_image_set_prompt(theme: str, rows: int, cols: int, panels: list[str]) -> str:
    """
    Format an image-set prompt in the T2IS format, the inverse of [`parse_image_set_prompt`].

    Panels are marked by position (`[TOP]-[LEFT]:`) if all positions of the layout have names, else `PANEL-1:` ...

    Args:
        theme (`str`):
            Subject and what all panels share. `"FOUR-PANEL Images with a 2x2 grid layout: "` (with the number and the
            layout) is put in front unless the theme names its layout.
        rows (`int`), cols (`int`):
            Layout of the grid.
        panels (`list[str]`):
            Texts of the panels, row by row. The theme and all panels but the last must end with a sentence.

    Returns:
        `str`: the prompt, which parses into the same layout, panels and theme (with the layout in front).

    Raises:
        ValueError: If the prompt would be parsed into other texts.
    """
    if rows < 1 or cols < 1 or len(panels) != rows * cols:
        raise ValueError(f"There are {len(panels)} panel texts for a {rows}x{cols} grid. Give {rows * cols}.")
    theme, panels = theme.strip(), [panel.strip() for panel in panels]
    if not theme:
        raise ValueError("The theme is empty, but it must say what all panels show.")
    if _LAYOUT_PHRASE.search(theme) is None:
        number = _NUMBER_WORDS.get(rows * cols, str(rows * cols))
        theme = f"{number}-PANEL Images with a {rows}x{cols} grid layout: {theme}"
    markers = _position_markers(rows, cols) or _number_markers(rows * cols)
    prompt = " ".join([theme, *map("".join, zip(markers, panels, strict=True))])
    for what, text in [("theme", theme), *((f"panel {index}", text) for index, text in enumerate(panels[:-1]))]:
        if not ends_sentence(text):
            raise ValueError(f"The {what} does not end a sentence: {shorten(text)}. End it with `.` or `!`.")
    try:
        parsed = parse_image_set_prompt(prompt)
    except ValueError as error:
        raise ValueError(f"These texts do not make an image-set prompt: {error}") from error
    if parsed != (theme, rows, cols, panels):
        raise ValueError(f"The theme names another grid, or a text has a panel marker: {shorten(prompt)}.")
    return prompt


def criteria_dict(criteria: Mapping[str, Any] | Iterable[Mapping[str, Any]] | None) -> dict[str, dict[str, str]]:
    """
    Convert the criteria of one row to dimension -> name -> text, whichever way they are stored.

    Args:
        criteria (`Mapping` or `Iterable` or `None`):
            The list of `{"dimension", "name", "text"}` that [`convert_t2is`] writes, or a dictionary of dictionaries
            or of lists of dictionaries, as in T2IS-Bench's files. Names whose text is `None` are left out.

    Returns:
        `dict[str, dict[str, str]]`: the criteria of this row only; empty for `None`.
    """
    if isinstance(criteria, Mapping):
        entries = [
            (dimension, name, text)
            for dimension, texts in criteria.items()
            for part in (texts if isinstance(texts, list) else [texts])
            for name, text in (part or {}).items()
        ]
    else:
        entries = [(entry["dimension"], entry["name"], entry["text"]) for entry in criteria or []]
    result: dict[str, dict[str, str]] = {}
    for dimension, name, text in entries:
        if text is not None:
            result.setdefault(dimension, {})[name] = text
    return result


def criteria_list(criteria: Mapping[str, Any] | Iterable[Mapping[str, Any]] | None) -> list[dict[str, str]]:
    """Convert criteria to a list of entries, which Arrow stores unchanged."""
    return [
        {"dimension": dimension, "name": name, "text": text}
        for dimension, texts in criteria_dict(criteria).items()
        for name, text in texts.items()
    ]


def _convert_t2is_row(row: Mapping[str, Any]) -> dict[str, Any]:
    missing = [name for name in _T2IS_COLUMNS if row.get(name) is None]
    if missing:
        raise ValueError(f"A raw T2IS row lacks {missing} of {_T2IS_COLUMNS}. Other rows need no conversion.")
    try:
        parsed = parse_image_set_prompt(row["prompt"])
        layout = _LAYOUT.fullmatch(row["layout"].strip())
        if layout is None or (int(layout[1]), int(layout[2])) != (parsed.rows, parsed.cols):
            asked = f"{parsed.rows}x{parsed.cols}"
            raise ValueError(f"`layout` is {row['layout']!r}, but the prompt asks for a {asked} grid layout.")
        panel_size(row["height"], row["width"], parsed.rows, parsed.cols)
    except ValueError as error:
        raise ValueError(f"T2IS row with idx {row['idx']!r}: {error}") from error
    columns = {name: row[name] for name in ("prompt", "height", "width")} | {"id": str(row["idx"])}
    optional = {"category": "category", "subcategory": "task_name", "case_id": "original_idx"}
    columns |= {name: row.get(raw_name) for name, raw_name in optional.items()}
    columns |= {"criteria": criteria_list(row.get("criteria"))} | parsed._asdict()
    return columns | {"theme": row.get("theme") or parsed.theme}


def convert_t2is(row_or_dataset: "Mapping[str, Any] | Dataset") -> "dict[str, Any] | Dataset":
    """
    Convert raw rows of T2IS-Bench (https://huggingface.co/papers/2506.23275) to image-set prompts.

    The result has the columns `id`, `prompt`, `theme`, `rows`, `cols`, `panels`, `criteria`, `height`, `width`,
    `category`, `subcategory` (raw `task_name`) and `case_id` (raw `original_idx`). `criteria` becomes a list of
    `{"dimension", "name", "text"}`: a column of the raw dictionaries would give every row the names of all rows.
    Inverse: [`criteria_dict`].

    Args:
        row_or_dataset (`Mapping` or [`~datasets.Dataset`]):
            One raw row, or a dataset of them, with `idx`, `prompt`, `layout`, `height`, `width` and, optionally,
            `theme`, `criteria`, `category`, `task_name` and `original_idx`.

    Returns:
        `dict` or [`~datasets.Dataset`]: the converted row or dataset.
    """
    from datasets import Dataset

    if not isinstance(row_or_dataset, Dataset):
        return _convert_t2is_row(row_or_dataset)
    return row_or_dataset.map(
        _convert_t2is_row,
        remove_columns=row_or_dataset.column_names,
        features=_t2is_features(),
        desc="Converting T2IS prompts",
    )


def _t2is_features() -> "Features":
    """Return the types of the columns, which the first rows may not show."""
    texts = ("id", "prompt", "theme", "category", "subcategory", "case_id")
    numbers = ("rows", "cols", "height", "width")
    lists = {"panels": ["string"], "criteria": CRITERIA_TYPE}
    return column_types(**dict.fromkeys(texts, "string"), **dict.fromkeys(numbers, "int64"), **lists)


def find_t2is_bench(path_or_id: str | Path) -> Path | None:
    """Find the directory of T2IS-Bench's own files, downloaded if needed; None for data in another layout."""
    path = Path(path_or_id).expanduser()
    if path.name == _T2IS_BENCH:
        path = path.parent
    if (path / _T2IS_BENCH).is_file():
        return path
    return find_dataset_folder(path_or_id, ["*.json"]) if path_or_id == "ChengyouJia/T2IS-Bench" else None


def read_t2is_bench(folder: Path) -> "Dataset":
    """Read T2IS-Bench's own files as [`convert_t2is`] does raw rows; a case without a grid prompt has no `panels`."""
    from datasets import Dataset

    cases, criteria = (read_json_objects(find_dataset_file(folder, name)) for name in (_T2IS_BENCH, _T2IS_CRITERIA))
    lacking = [name for name in cases if name not in criteria]
    if lacking:
        raise ValueError(f"{folder / _T2IS_CRITERIA} lacks {len(lacking)} of {len(cases)} cases: {lacking[0]!r}, ...")
    rows = []
    for name, case in cases.items():
        try:
            rows.append(_convert_t2is_case(name, case, criteria[name]))
        except ValueError as error:
            raise ValueError(f"{folder / _T2IS_BENCH}, case {name!r}: {error}") from error
    return Dataset.from_list(rows, features=_t2is_features())


def _convert_t2is_case(name: str, case: dict[str, Any], criteria: dict[str, Any]) -> dict[str, Any]:
    try:
        listed = criteria_list(criteria)
    except AttributeError:
        listed = None
    if listed is None or not all(isinstance(entry["text"], str) for entry in listed):
        raise ValueError(f"criteria in {_T2IS_CRITERIA} are {shorten(criteria)}, not dimension -> [{{name: text}}].")
    # Only `task_name_case_id` and `output_image_count` are named in the benchmark's code: the prompt is the text of a
    # case that describes a grid, else the longest one
    texts = sorted((text for text in case.values() if isinstance(text, str)), key=len, reverse=True)
    grid, count = next(filter(_LAYOUT_PHRASE.search, texts), None), case.get("output_image_count")
    if grid is not None:
        parsed = parse_image_set_prompt(grid)
    elif not texts or type(count) is not int or count < 1:
        raise ValueError(f"it has no prompt of a grid, or no instruction with `output_image_count`: {list(case)}.")
    else:
        parsed = ImageSetPrompt(texts[0], *_usual_grid(count), [])
    rows, cols = parsed.rows, parsed.cols
    if count is not None and count != rows * cols:
        raise ValueError(f"`output_image_count` is {count!r}, but its prompt asks for a {rows}x{cols} grid.")
    columns = {"id": name, "case_id": name, "category": case.get("category"), "criteria": listed}
    columns |= {"prompt": grid or parsed.theme, "height": _T2IS_PANEL * rows, "width": _T2IS_PANEL * cols}
    columns["subcategory"] = str(case.get("task_name_case_id", "")).rpartition("_")[0] or None
    return columns | parsed._asdict()


def _usual_grid(count: int) -> tuple[int, int]:
    # The layouts of the prompts in the PaCo-RL code: 1x2, 1x3, 2x2, 1x5, 2x3, 1x7, 2x4
    rows = 2 if count % 2 == 0 and count > 2 else 1
    return rows, count // rows


def check_image_set_columns(dataset_or_rows: "Dataset | Iterable[Mapping[str, Any]]") -> None:
    """
    Check that data are image-set prompts, before any model is loaded.

    Args:
        dataset_or_rows ([`~datasets.Dataset`] or `Iterable[Mapping]`):
            The dataset, of which only the needed columns are read, or its rows.

    Raises:
        ValueError: If there are no rows, `prompt`, `rows`, `cols` or `panels` is missing, or a row has an empty
        prompt, an empty panel, another number of panels than its grid, another grid than its prompt names, or a size
        that is not in pixels.
    """
    from datasets import Dataset

    if isinstance(dataset_or_rows, Dataset):
        names = dataset_or_rows.column_names
        rows = list(_columns_of(dataset_or_rows, [*_NEEDED_COLUMNS, *_SIZE_COLUMNS, "layout", "theme"]))
    else:
        rows = list(dataset_or_rows)
        names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    if len(rows) == 0:
        raise ValueError("The image-set prompts have no rows. Check the file or the split that they come from.")
    missing = [name for name in _NEEDED_COLUMNS if name not in names]
    if missing:
        remedy = "Rows with images to edit are editing prompts: add `--edits`, or use `load_edit_prompts`."
        if "image" not in names and "images" not in names:
            remedy = "Convert raw T2IS rows with `convert_t2is`; others need a `prompt`, which may name the grid."
        raise ValueError(f"Image-set prompts need the columns {missing}, but there are only {names}. {remedy}")
    for index, row in enumerate(rows):
        check_row(index, *(row[name] for name in _NEEDED_COLUMNS))
        if row.get("layout") != SEPARATE:
            _check_grid_of_prompt(index, row["prompt"], row["rows"], row["cols"])
        elif row["rows"] != 1:
            problem = f"Row {index} has rows={row['rows']}, but its images are separate, and shown side by side"
            raise ValueError(f"{problem}. Leave `rows` and `cols` out.")
        elif not is_text(row.get("theme")):
            needs = "A set of separate images needs a text of what all of them show."
            raise ValueError(f"`theme` of row {index} is {shorten(row.get('theme'))}. {needs}")
        for name in _SIZE_COLUMNS:
            value = row.get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"`{name}` of row {index} is {value!r}. It must be a number of pixels, such as 1024.")


def _columns_of(dataset: "Dataset", names: list[str]) -> "Dataset":
    """Select the columns of these names that a dataset has: no images are read."""
    return dataset.with_format(None).select_columns([name for name in names if name in dataset.column_names])


def check_row(index: int, prompt: Any, rows: Any, cols: Any, panels: Any) -> None:
    """Check the prompt, the layout and the panels of a row."""
    _check_prompt(index, prompt)
    for name, value in (("rows", rows), ("cols", cols)):
        if type(value) is not int or value < 1:
            raise ValueError(f"`{name}` of row {index} is {value!r}. It must be an int of at least 1.")
    if type(panels) not in (list, tuple) or len(panels) != rows * cols or not all(map(is_text, panels)):
        expected = f"a text for each panel of its {rows}x{cols} grid (rows x cols)"
        raise ValueError(f"`panels` of row {index} is {shorten(panels)}. It must be a list with {expected}.")


def _check_prompt(index: int, prompt: Any) -> None:
    if not is_text(prompt):
        raise ValueError(f"The `prompt` of row {index} is {shorten(prompt)}. It must be a text that is not empty.")


def _check_grid_of_prompt(index: int, prompt: str, rows: int, cols: int) -> None:
    """Check that an image is cut as its prompt asks the model to arrange it."""
    markers = _find_markers(prompt)
    theme = prompt[: markers[0].start()] if markers else prompt
    named = _LAYOUT_PHRASE.findall(theme)
    if not named and rows * cols > 1:  # "2x2 grid" of a single image can be windows of a house
        named = _GRID_PHRASE.findall(theme)
    if named and (rows, cols) not in [(int(first), int(second)) for first, second in named]:
        asked = "x".join(named[0])
        raise ValueError(
            f"Row {index} has rows={rows} and cols={cols}, but its prompt asks for a {asked} grid: {shorten(prompt)}."
        )


def _complete_row(index: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a row leaves out from its prompt: the layout and the panels, or the theme alone."""
    if row.get("layout") == SEPARATE:
        return _complete_separate_row(row)
    is_bare = all(row.get(name) is None for name in _GRID_COLUMNS)
    is_other = row.get("layout") is not None or not {"image", "images"}.isdisjoint(row)
    if "prompt" not in row or is_bare and is_other:
        return dict(row)  # of another format, which the check reports
    prompt = row["prompt"]
    _check_prompt(index, prompt)
    if not is_bare and row.get("theme") is not None:
        return dict(row)
    parsed = ImageSetPrompt(prompt, 1, 1, [prompt])
    try:
        if _LAYOUT_PHRASE.search(prompt) is not None:
            parsed = parse_image_set_prompt(prompt)
    except ValueError as error:
        if is_bare:
            raise ValueError(f"Row {index}: {error}") from error
    parts = parsed._asdict()
    if not is_bare:  # the theme, if the text is about this grid
        parts = {"theme": parsed.theme} if (parsed.rows, parsed.cols) == (row.get("rows"), row.get("cols")) else {}
    return {**row, **{name: part for name, part in parts.items() if row.get(name) is None}}


def _complete_separate_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the prompt and the layout of a set of separate images: its panels side by side."""
    theme, panels = row.get("theme"), row.get("panels")
    count = len(panels) if isinstance(panels, list | tuple) else 1  # the check reports others
    prompt = " ".join(map(str, [theme, *(panels or ())]))
    filled = {"prompt": prompt, "rows": 1, "cols": count}
    return {**row, **{name: value for name, value in filled.items() if row.get(name) is None}}


def check_panel_options(panel_template: str, panel_generation: str) -> None:
    """Check that a template gives each panel a prompt of its own, and that there is this way to generate separate images."""
    try:  # a name, a format and a conversion; no name after the last field
        fields = {tuple(field) for _, *field in Formatter().parse(panel_template)} - {(None,) * 3}
    except (TypeError, ValueError):
        fields = set()
    if ("panel", "", None) not in fields or not fields <= {("panel", "", None), ("theme", "", None)}:
        needs = "a text with `{panel}`, and `{theme}` where the text of the set belongs, and no other field"
        raise ValueError(f"`panel_template` is {panel_template!r}; it must be {needs}.")
    if panel_generation not in PANEL_GENERATIONS:
        choices = ", ".join(map(repr, PANEL_GENERATIONS))
        raise ValueError(f"`panel_generation` is {panel_generation!r}; it must be one of {choices}.")


def prompts_of_row(row: Mapping[str, Any], panel_template: str) -> list[str]:
    """Return the prompts of a row's images: its own, or one for each panel of separate images."""
    if row.get("layout") != SEPARATE:
        return [row["prompt"]]
    return [panel_template.format(theme=row["theme"], panel=panel).strip() for panel in row["panels"]]


def arrange_sets(dataset: "Dataset", layout: str | None) -> "Dataset":
    """
    Let all sets of completed prompts be separate images, or grids; `None` leaves them as their rows say.

    A row that is arranged anew loses its `height` and `width`, which are of what it was. A grid's theme becomes the text
    that its prompt has for all panels, without the layout. A grid is that of T2IS: 1x2, 1x3, 2x2, 1x5, 2x3, 1x7, 2x4.
    """
    if layout is None:
        return dataset
    rows = list(_columns_of(dataset, [*_NEEDED_COLUMNS, "theme", *_SIZE_COLUMNS, "layout"]))
    return _with_columns(dataset, rows, [_arrange_row(index, row, layout) for index, row in enumerate(rows)])


def prompt_texts(dataset: "Dataset") -> list[str]:
    """Return the prompts of image sets as `paco-trl space` shows them: of separate images the theme, and a line for each panel."""
    return [
        "\n".join(" ".join(text.split()) for text in [row["theme"], *row["panels"]])
        if row.get("layout") == SEPARATE
        else row["prompt"]
        for row in dataset
    ]


def _arrange_row(index: int, row: dict[str, Any], layout: str) -> dict[str, Any]:
    count, is_separate = row["rows"] * row["cols"], row.get("layout") == SEPARATE
    if count == 1 or is_separate == (layout == SEPARATE):
        return row
    theme, prompt, own_sizes = row.get("theme") or "", row["prompt"], dict.fromkeys(_SIZE_COLUMNS)
    if layout == SEPARATE:
        if _LAYOUT_PHRASE.search(prompt) is not None and _find_markers(prompt):
            theme = prompt[: _find_markers(prompt)[0].start()]
        theme = _GRID_INTRODUCTION.sub("", theme).strip()
        if not theme:
            needs = "Separate images would not show what they share. Add it, or leave the row a grid"
            raise ValueError(f"Row {index} has no `theme`, and its prompt tells none: {shorten(prompt)}. {needs}.")
        prompt = " ".join([theme, *row["panels"]])
        return {**row, **own_sizes, "layout": SEPARATE, "theme": theme, "prompt": prompt, "rows": 1, "cols": count}
    grid = _usual_grid(count)
    try:
        prompt = format_image_set_prompt(_as_sentence(theme), *grid, [_as_sentence(text) for text in row["panels"]])
    except ValueError as error:
        raise ValueError(f"Row {index} cannot become a grid. {error}") from error
    return {**row, **own_sizes, "layout": None, "prompt": prompt, **dict(zip(("rows", "cols"), grid, strict=True))}


def _as_sentence(text: str) -> str:
    return text if ends_sentence(text) else f"{text}."


def _with_columns(dataset: "Dataset", before: list[dict[str, Any]], after: list[dict[str, Any]]) -> "Dataset":
    """Replace the columns of a dataset that differ between its rows and new ones."""
    for name in [*_NEEDED_COLUMNS, "theme", "layout", *_SIZE_COLUMNS]:
        column = [row.get(name) for row in after]
        if column != [row.get(name) for row in before]:
            known = dataset.remove_columns(name) if name in dataset.column_names else dataset
            dataset = known.add_column(name, column)
    return dataset


def complete_image_sets(dataset: "Dataset") -> "Dataset":
    """
    Complete and check image-set prompts, whichever way they were loaded.

    A row with a `prompt` alone gets its layout and its panels: a text that names an `RxC grid layout` is parsed, any
    other is a single image. A row without a `theme` gets it from such a text. The given dataset is not changed.
    """
    from datasets import Value

    for name in _SIZE_COLUMNS:  # pandas has no integers next to missing values
        if dataset.features.get(name) in (Value("float32"), Value("float64")):
            dataset = dataset.cast_column(name, Value("int64"))
    marks = {name: None for name in ("image", "images") if name in dataset.column_names}
    rows = [{**row, **marks} for row in _columns_of(dataset, [*_NEEDED_COLUMNS, "theme", *_SIZE_COLUMNS, "layout"])]
    dataset = _with_columns(dataset, rows, [_complete_row(index, row) for index, row in enumerate(rows)])
    check_image_set_columns(dataset)
    return check_references(dataset)


def read_prompt_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of one file; raw T2IS rows are converted."""
    rows = read_rows(path)
    for index, row in enumerate(rows):
        if "layout" in row and "panels" not in row:
            rows[index] = _convert_t2is_row(row)
        elif "criteria" in row:
            rows[index] = {**row, "criteria": criteria_list(row["criteria"])}
    return rows


def _json_lines_of_split(folder: Path, split: str) -> list[Path]:
    """Find a split's files as `load_dataset` does: by the start of the name; names of no split are `train`."""
    others = tuple({"train", "validation", "test"} - {split})
    return [
        path
        for path in sorted(folder.glob("*.jsonl"))
        if path.name.startswith(split) or split == "train" and not path.name.startswith(others)
    ]


def load_image_set_prompts(
    path_or_id: str | Path, split: str = "train", allow_remote_images: bool = False
) -> "Dataset":
    """
    Load image-set prompts from the Hub or from disk, and check them. Raw T2IS rows are converted.

    A row with a `prompt` and without `rows`, `cols` and `panels` is completed: a text that names an `RxC grid layout` is
    parsed by [`parse_image_set_prompt`], any other is a single image (`rows = cols = 1`). A missing `theme` is parsed
    too. A row with `layout: "separate"`, `theme` and `panels` is a set of separate images, one for each panel, of its
    `height` and `width`. The trainers complete a dataset that you pass them in the same way.

    Args:
        path_or_id (`str` or `Path`):
            A `.jsonl`, `.json`, `.csv` or `.tsv` file, or a `.txt` file with a prompt on each line, also compressed
            (`.gz`); a `.parquet` file; a directory of such files, or by `save_to_disk`; T2IS-Bench's own directory or Hub
            id, if its cases have prompts of grids; or what else [`~datasets.load_dataset`] reads.
        split (`str`, *optional*, defaults to `"train"`):
            Split to load. A file, or a saved `Dataset`, is one split, whatever its name.
        allow_remote_images (`bool`, *optional*, defaults to `False`):
            Download references that rows name by `http(s)` addresses, each once. Only for datasets that you trust.

    Returns:
        [`~datasets.Dataset`]: the checked prompts.

    Raises:
        ValueError: If there is no such split, or the rows are not image-set prompts.
    """
    bench = find_t2is_bench(path_or_id)
    if bench is not None:
        dataset = read_t2is_bench(bench)
        if not all(dataset["panels"]):
            raise ValueError(
                f"{bench / _T2IS_BENCH} has cases with an instruction alone. Give the copy of the prompts in the PaCo-RL "
                "code, PaCo-GRPO/dataset/T2IS/all/test_metadata.jsonl."
            )
        check_image_set_columns(dataset)
        return dataset

    path = find_prompts(path_or_id, "image-set prompts")
    paths = [path] if has_rows_as_text(path) else [] if is_saved(path) else _json_lines_of_split(path, split)
    if paths:
        rows: list[dict[str, Any]] = []
        images = ("references",)
        for file in paths:
            folder = file.absolute().parent
            rows += with_image_files(read_prompt_rows(file), file, folder, images, allow_remote_images)
        rows = [_complete_row(index, row) for index, row in enumerate(rows)]
        # Before Arrow sees the rows: its error for a wrong type names neither row nor column
        check_image_set_columns(rows)
        return check_references(dataset_of_rows(rows, images))

    dataset = load_split(path_or_id, split, allow_remote_images)
    if "layout" in dataset.column_names and "panels" not in dataset.column_names:
        dataset = cast("Dataset", convert_t2is(dataset))
    if dataset.column_names == ["text"]:  # text files
        dataset = dataset.rename_column("text", "prompt").filter(is_text, input_columns="prompt")
    return complete_image_sets(dataset)


def demo_prompts_path() -> Path:
    """Return the path of the 24 image-set prompts that come with the package, a `.jsonl` file."""
    return Path(str(files("paco_trl.data") / "prompts" / "demo.jsonl"))
