# SPDX-License-Identifier: Apache-2.0
"""The site (`make docs`): every page is in the navigation, and GitHub's Markdown and docstrings are rendered for it."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

import paco_trl
from testing_utils import docstring


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def hooks():
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module("site_hooks")
    sys.path.remove(str(ROOT / "docs"))


def navigation() -> list[str]:
    return re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M)


def test_every_page_is_in_the_navigation(hooks):
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    reference = [f"reference/{package or 'paco_trl'}.md" for package in hooks.PACKAGES]
    assert len(pages) > 10
    assert sorted(navigation()) == sorted([*pages, *hooks.OUTSIDE, *reference, "options.md", "commands.md"])
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["hooks"] == ["docs/site_hooks.py"]


def test_scripts_of_other_servers_have_a_version_and_a_hash():
    scripts = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["extra_javascript"]
    assert scripts == ["mathjax.js"]
    script = (ROOT / "docs" / "mathjax.js").read_text(encoding="utf-8")
    (address,) = re.findall(r"https?://[^\s\"]+", script)
    assert re.search(r"@\d+\.\d+\.\d+/", address) and re.search(r'integrity: "sha384-[\w+/]{64}"', script)


def test_every_public_name_is_in_the_reference(hooks):
    packages = [path.parent.name for path in (ROOT / "paco_trl").glob("*/__init__.py")]
    public = {package for package in packages if hooks.public_names(package)}
    assert public == set(hooks.PACKAGES) - {""}
    for package in ("", *public):
        name = f"paco_trl.{package}".rstrip(".")
        exported = set(importlib.import_module(name).__all__) - {"__version__"}
        assert (
            set(re.findall(rf"^::: {re.escape(name)}\.(\w+)$", hooks.reference_page(package), flags=re.M)) == exported
        )


def test_every_option_is_in_the_reference(hooks):
    options = importlib.import_module("site_options")
    text = options.options_page()
    for name in options.CONFIGS:
        config = getattr(paco_trl, name)
        listed = re.findall(r"^        (\w+)(?:, (\w+))* \(`", docstring(config), flags=re.M)
        documented = {option for _, names, *_ in options.config_options(name) for option in names.split(", ")}
        assert len(documented) > 7 and documented == {option for names in listed for option in names if option}
        assert all(f"`{option}`" in text or f"{option}, " in text or f", {option}`" in text for option in documented)


def test_every_option_of_the_commands_is_in_the_reference(hooks):
    options = importlib.import_module("site_options")
    text, seen = options.commands_page(), 0
    for command, (module, _) in options.commands().items():
        source = {"nft": "grpo"}.get(module, module)
        for name in options.parts(source).values():
            fields = options.fields_of(source, name)
            found = getattr(importlib.import_module(f"paco_trl.commands.{source}"), name, None)
            if found is None:
                found = getattr(importlib.import_module(f"paco_trl.commands.{source}_arguments"), name)
            assert list(fields) and set(fields) == {field.name for field in dataclasses.fields(found)}, command
            assert all(f"`--{field}`" in text for field in fields)
            seen += 1
    assert seen > 20
