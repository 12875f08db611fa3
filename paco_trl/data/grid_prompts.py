# SPDX-License-Identifier: Apache-2.0
"""The T2IS format of image-set prompts: a text that names its grid and describes each panel."""

import itertools
import re
from collections.abc import Callable
from numbers import Integral
from typing import NamedTuple

from ..utils.text import shorten


GRID = re.compile(r"([1-9]\d*)\s*[xX×]\s*([1-9]\d*)")
GRID_LAYOUT = re.compile(GRID.pattern + r"[\s-]+grid\s+layout", re.IGNORECASE)
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
    enumerate(
        "ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE TEN ELEVEN TWELVE".split(), start=1
    )  # larger numbers are in digits
)


class ImageSetPrompt(NamedTuple):
    """
    A parsed image-set prompt.

    Attributes:
        theme (`str`): Text before the first panel marker: the layout, the subject and what all panels share.
        rows (`int`), cols (`int`): Layout of the grid.
        panels (`list[str]`): Texts of the `rows * cols` panels, row by row from the upper left.
    """

    theme: str
    rows: int
    cols: int
    panels: list[str]


def ends_sentence(text: str) -> bool:
    """Return whether a text ends with a complete sentence, so that a panel marker may follow."""
    return text.rstrip(_CLOSING_MARKS).endswith(_SENTENCE_ENDS)


def find_markers(prompt: str) -> list[re.Match]:
    """Find the markers that open a panel: after the end of a sentence, or directly after another marker."""
    markers: list[re.Match] = []
    for match in _MARKER.finditer(prompt):
        before = prompt[: match.start()].rstrip()
        # Directly after a marker: the empty panel in between is reported later
        if markers and len(before) == markers[-1].end() or ends_sentence(before):
            markers.append(match)
    return markers


def _panel_markers(rows: int, cols: int) -> list[list[str]]:
    """Return the possible markers of a grid, row by row: by position, if all positions have names, and by number."""
    numbers = [f"PANEL-{panel_number}:" for panel_number in range(1, rows * cols + 1)]
    if rows not in _ROW_NAMES or cols not in _COL_NAMES or rows == cols == 1:
        return [numbers]
    positions = [filter(None, names) for names in itertools.product(_ROW_NAMES[rows], _COL_NAMES[cols])]
    return [["-".join(f"[{name}]" for name in names) + ":" for names in positions], numbers]


def parse_image_set_prompt(prompt: str) -> ImageSetPrompt:
    """
    Parse an image-set prompt in the T2IS format.

    The format is `FOUR-PANEL Images with a 2x2 grid layout <subject>. <shared description> [TOP]-[LEFT]:<panel 1>
    [TOP]-[RIGHT]:<panel 2> ...`. A grid of one row has `[LEFT]:`, `[MIDDLE]:`, `[RIGHT]:`; any grid may have
    `PANEL-1:`, `PANEL-2:` ... instead. A marker only opens a panel after the end of a sentence; inside one it is text.

    Raises:
        ValueError: If the layout is missing, the panel markers do not fit it, or a panel is empty.
    """
    markers = find_markers(prompt)
    excerpt = shorten(prompt)
    theme = prompt[: markers[0].start()].strip() if markers else prompt.strip()
    layout = GRID_LAYOUT.search(theme)
    if layout is None:
        raise ValueError(
            f"The prompt {excerpt} names no `RxC grid layout` before its first panel. Write "
            '"FOUR-PANEL Images with a 2x2 grid layout ...".'
        )
    rows = int(layout[1])
    cols = int(layout[2])
    names = [marker[0] for marker in markers]
    # Compare the number first, to build no markers for a grid of a billion panels
    if len(names) != rows * cols or names not in _panel_markers(rows, cols):
        num_ignored = len(_MARKER.findall(prompt)) - len(names)
        position_markers = "`[TOP]-[LEFT]:`, `[TOP]-[RIGHT]:` ... or " if rows > 1 else "`[LEFT]:`, `[RIGHT]:` ... or "
        ignored = f" {num_ignored} more are inside sentences, and do not count." if num_ignored else ""
        raise ValueError(
            f"The prompt {excerpt} has {len(names)} panel markers ({' '.join(names)}) that do not fit its "
            f"{rows}x{cols} grid. Write {position_markers}`PANEL-1:` to `PANEL-{rows * cols}:`, in this order."
            f"{ignored}"
        )

    ends = [marker.start() for marker in markers[1:]] + [len(prompt)]
    panels = [prompt[marker.end() : end].strip() for marker, end in zip(markers, ends, strict=True)]
    if "" in panels:
        raise ValueError(f"The panel {names[panels.index('')]} of the prompt {excerpt} is empty. Describe it.")
    return ImageSetPrompt(theme, rows, cols, panels)


def format_image_set_prompt(theme: str, rows: int, cols: int, panels: list[str]) -> str:
    """
    Format an image-set prompt in the T2IS format, the inverse of [`parse_image_set_prompt`].

    Panels are marked by position (`[TOP]-[LEFT]:`) if all positions of the layout have names, otherwise by number
    (`PANEL-1:`).

    Args:
        theme (`str`):
            Subject and what all panels share. Unless it names its layout, `"FOUR-PANEL Images with a 2x2 grid layout:
            "` (or another number and layout) is prepended.
        rows (`int`), cols (`int`):
            Layout of the grid.
        panels (`list[str]`):
            Texts of the panels, row by row. The theme and all panels but the last must end with a sentence.

    Returns:
        `str`: the prompt, which parses into the same panels, layout and theme (with the layout prepended). Use
        [`find_truncated_panels`] to check that a model reads all of it.

    Raises:
        ValueError: If the prompt would parse into other texts.
    """
    if not (isinstance(rows, Integral) and isinstance(cols, Integral)):
        raise ValueError(f"`rows` is {rows!r} and `cols` {cols!r}; they must be whole numbers.")
    if isinstance(panels, str):
        raise ValueError(f"`panels` is {shorten(panels)}; it must be a list of texts.")
    if len(panels) != rows * cols:
        raise ValueError(f"There are {len(panels)} panel texts for a {rows}x{cols} grid. Pass {rows * cols}.")
    theme = theme.strip()
    panels = [panel.strip() for panel in panels]
    if GRID_LAYOUT.search(theme) is None:
        number_word = _NUMBER_WORDS.get(rows * cols, str(rows * cols))
        theme = f"{number_word}-PANEL Images with a {rows}x{cols} grid layout: {theme}"
    for part, text in [("theme", theme), *((f"panel {index}", text) for index, text in enumerate(panels[:-1]))]:
        if not ends_sentence(text):
            raise ValueError(f"The {part} does not end with a sentence: {shorten(text)}. End it with `.` or `!`.")
    marked_panels = zip(_panel_markers(rows, cols)[0], panels, strict=True)
    prompt = " ".join([theme, *(f"{marker}{panel}" for marker, panel in marked_panels)])
    if parse_image_set_prompt(prompt) != (theme, rows, cols, panels):
        raise ValueError(
            f"The theme names another grid, or a text contains a panel marker: {shorten(prompt)}. Reword it."
        )
    return prompt


def find_truncated_panels(prompt: str, is_truncated: Callable[[str], bool]) -> list[int]:
    """
    Find the panels of an image-set prompt that a model truncates or drops because the prompt is too long.

    Args:
        prompt (`str`):
            Image-set prompt in the T2IS format.
        is_truncated (`Callable[[str], bool]`):
            Function that returns whether the model truncates a text.

    Returns:
        `list[int]`: numbers of the panels, from 1. Empty for a prompt without panels.

    Example:

    ```python
    >>> from transformers import AutoTokenizer

    >>> tokenizer = AutoTokenizer.from_pretrained("black-forest-labs/FLUX.1-dev", subfolder="tokenizer_2")
    >>> find_truncated_panels(prompt, lambda text: len(tokenizer(text).input_ids) > 512)  # [4]: shorten the texts
    ```
    """
    markers = find_markers(prompt)
    ends = [*(marker.start() for marker in markers), len(prompt)][1:]
    return [number for number, end in enumerate(ends, start=1) if is_truncated(prompt[:end].rstrip())]


def default_grid(count: int) -> tuple[int, int]:
    """Return T2IS's grid for a number of panels: 1x2, 1x3, 2x2, 1x5, 2x3, 1x7, 2x4."""
    rows = 2 if count % 2 == 0 and count > 2 else 1
    return rows, count // rows
