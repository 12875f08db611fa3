# SPDX-License-Identifier: Apache-2.0
"""What the Dockerfiles name exists. They are not built here."""

import re
from pathlib import Path

import pytest

from test_package import setup_cfg


ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_is_enough(path):
    text = path.read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"^COPY (.*)$", text, flags=re.M) for name in line.split()[:-1]}
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), flags=re.M)
    assert {"paco_trl", "setup.cfg", "setup.py", "pyproject.toml", "README.md"} <= copied <= set(allowed)
    assert all((ROOT / name).exists() for name in copied)
    (extras,) = re.findall(r'pip install --no-cache-dir "\.\[(\S+)\]"', text)
    assert set(extras.split(",")) <= set(setup_cfg()["options.extras_require"])
    assert "not\n# built yet" in text or "not built yet" in text


def test_the_judge_has_the_vllm_of_the_tests():
    (path,) = (path for path in FILES if path.name == "judge.Dockerfile")
    (version,) = re.findall(r"^ARG VLLM=(\S+)$", path.read_text(encoding="utf-8"), flags=re.M)
    assert f"=={version}\n" in (ROOT / "tests/vllm_environment/requirements.txt").read_text(encoding="utf-8")
