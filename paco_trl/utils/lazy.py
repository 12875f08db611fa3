# SPDX-License-Identifier: Apache-2.0
"""Lazy imports of the names of a package."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_imports(package: str, modules: dict[str, list[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build `__getattr__` and `__dir__` of a package that imports a module when one of its names is first used."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name], package), name)

    return get, lambda: sys.modules[package].__all__
