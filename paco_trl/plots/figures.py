# SPDX-License-Identifier: Apache-2.0
"""Make figures without pyplot, which keeps global state and open figures."""

import io
import warnings
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.text import Text


# Fonts with letters and symbols that Matplotlib's font lacks, where they are installed. Colored emoji do not scale
_OTHER_FONTS = [
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback"),
    *("Arial Unicode MS", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Emoji", "Symbola"),
]


def new_figure(width: float, height: float, dpi: int = 110, layout: Any = None) -> Figure:
    """Make a white figure of a size in inches."""
    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _font_families() -> list[str]:
    installed = {font.name for font in fontManager.ttflist}
    return [*FontProperties().get_family(), *(name for name in _OTHER_FONTS if name in installed)]


def font_of(text: str) -> str:
    """Return the file of the first font that has all letters of a text, or else the file of the default font."""
    files = [findfont(FontProperties(family=[name])) for name in _font_families()]
    letters = {ord(char) for char in text if not char.isspace()}
    return next((file for file in files if all(map(get_font(file).get_char_index, letters))), files[0])


def png_bytes(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    for text in figure.findobj(Text):
        if not text.get_text().isascii():
            text.set_fontfamily(_font_families())
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box takes its place
        # Level 6 takes three times as long for 4 % less
        figure.savefig(buffer, format="png", pil_kwargs={"compress_level": 4})
    return buffer.getvalue()
