# SPDX-License-Identifier: Apache-2.0
"""Lazy imports of the names of a package."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_imports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build `__getattr__` and `__dir__` of a package that imports what is under `TYPE_CHECKING` on first use."""
    # The source is read as in transformers' `define_import_structure`: names are then listed once
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: f"{'.' * node.level}{node.module}" for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name], package), name)

    return get, lambda: sys.modules[package].__all__
