# SPDX-License-Identifier: Apache-2.0
"""Docstrings as they stand in the source."""

import inspect
import textwrap


def docstring(thing) -> str:
    """The docstring with its indentation, which Python 3.13 and later compile away."""
    return textwrap.indent(f"\n{inspect.cleandoc(thing.__doc__)}\n", "    ") + "    "
