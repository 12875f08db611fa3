# SPDX-License-Identifier: Apache-2.0
"""Extension of griffe for the site: docstrings in TRL's style become Markdown."""

import sys
from pathlib import Path

from griffe import Extension


sys.path.append(str(Path(__file__).parent))
from site_hooks import addresses, render_docstring  # noqa: E402


class Docstrings(Extension):
    """Render the docstring of every function and class."""

    names = addresses()

    def on_object(self, *, obj, **kwargs):
        """Replace the docstring, which griffe then takes for plain Markdown."""
        if obj.docstring:
            obj.docstring.value = render_docstring(obj.docstring.value, self.names)
