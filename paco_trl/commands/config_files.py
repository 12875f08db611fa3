# SPDX-License-Identifier: Apache-2.0
"""Files of options: `--config` with a YAML file or a recipe, and the files of `--accelerate_config`."""

import re
from argparse import ArgumentParser
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from ..utils.errors import OptionError
from ..utils.text import read_text
from . import flow_factory


def find_yaml(option: str, name: str, directory: str) -> str:
    """Return the path of a file, or of the packaged file with this name in a directory."""
    if Path(name).is_file():
        return name
    packaged_files = {file.stem: str(file) for file in (Path(__file__).parents[1] / directory).glob("*.yaml")}
    if name not in packaged_files:
        suggestion = "".join(f" Did you mean `{match}`?" for match in get_close_matches(name, packaged_files, 1))
        names = ", ".join(sorted(packaged_files))
        raise OptionError(
            f"`--{option}` is {name!r}: neither a file nor one of the packaged ones, {names}.{suggestion}"
        )
    return packaged_files[name]


class _Loader(yaml.SafeLoader):
    """Loader that rejects repeated keys; YAML would use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if repeated_key := next((key for key in keys if keys.count(key) > 1), None):
            raise OptionError(f"`--config` has the key {repeated_key!r} twice. Remove one.")
        return super().construct_mapping(node, deep)


# 1e-4 is text in YAML 1.1: https://github.com/yaml/pyyaml/issues/173 (6.0). Without a sign it may be a revision
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]\d+$"), None)


def read_yaml(option: str, name: str, path: str | Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Read the file of an option."""
    try:
        return yaml.load(read_text(path), loader)
    except yaml.YAMLError as error:  # YAML read a text, so the error has no file name
        reason = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise OptionError(f"`--{option}` is {name!r}, which is not YAML, {reason}.", option) from error


def read_config(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], str | None]:
    """Read the options in the file of `--config`; return them, the other arguments, and the name of a recipe."""
    parser = ArgumentParser(prog="paco-trl", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", nargs="?", default=[])
    namespace, remaining = parser.parse_known_args(argv)
    if not namespace.config:
        return {}, remaining, None
    if None in namespace.config:
        raise OptionError("`--config` lacks its value: a file, or the name of a recipe, such as flux.1-dev-24gb.")
    if len(namespace.config) > 1:
        raise OptionError(
            f"`--config` names {len(namespace.config)} files. Pass one, and other options on the command line."
        )
    (name,) = namespace.config
    path = Path(find_yaml("config", name, "recipes"))
    config = read_yaml("config", name, path, _Loader)
    if not isinstance(config, dict):
        raise OptionError(f"`--config` is {name!r}, but must contain options, such as `max_steps: 100`.")
    if flow_factory.is_flow_factory(config):
        raise OptionError(flow_factory.describe(config, name))
    is_recipe = path.resolve().parent == Path(__file__).resolve().parents[1] / "recipes"
    return config, remaining, path.stem if is_recipe else None
