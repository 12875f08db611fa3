# SPDX-License-Identifier: Apache-2.0
"""What the workflows of GitHub run is run here, or by `.ci/run`, with the same arguments."""

import configparser
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parent.parent
WORKFLOWS = {path.name: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}
# These need GitHub, PyPI's account or Docker
ELSEWHERE = {
    "uv pip install --python .venv/bin/python --requirements .github/upstream.txt",
    'uv pip install --python .venv/bin/python mlflow-skinny comet_ml "swanlab<0.8"',
    "uv publish --trusted-publishing always",
    "docker build --file docker/train.Dockerfile --tag paco-trl .",
    "docker run --rm paco-trl paco-trl env",
}
# Run by tests of this file
TAG = 'grep -qx "version = ${GITHUB_REF_NAME#v}" setup.cfg'
LINKS = "python3 .github/absolute_links.py"


def jobs_of(matrix: dict) -> Iterator[dict]:
    """The values of a matrix's jobs: the products of its lists, and those of `include`."""
    lists = {name: values for name, values in matrix.items() if name != "include"}
    yield from (dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values()))
    yield from matrix.get("include", [])


def commands() -> list[str]:
    found = set()
    for job in (job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()):
        text = "\n".join(step.get("run", "") for step in job.get("steps", ()))
        for values in jobs_of(job.get("strategy", {}).get("matrix", {})):
            filled = text
            for name, value in values.items():
                filled = filled.replace(f"${{{{ matrix.{name} }}}}", value)
            found |= {*filled.split("\n")} - {""}
    return sorted(found)


MAKES = [command for command in commands() if command.startswith("make ")]


def ci_commands() -> list[str]:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith((" ", "#"))]


def test_every_command_is_run():
    assert len(MAKES) > 5 and ELSEWHERE < {*commands()}
    assert {*commands()} - {*MAKES} - ELSEWHERE - {TAG, LINKS} <= {*ci_commands()}
    # A version of Python, as there: a shell does not take it for an interpreter
    run = [command for command in ci_commands() if command.startswith("make ")]
    assert run and all('PYTHON="$VERSION"' in command for command in run)
    targets = {word for command in run for word in command.split()}
    assert {"quality", "docs", "test", "test-cuda"} <= targets


@pytest.mark.parametrize("command", MAKES)
def test_a_target_calls_what_is_there(command):
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    printed = subprocess.run(
        [*shlex.split(command), "--dry-run", "--always-make", "--no-print-directory"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not printed.stderr
    lines = printed.stdout.replace("\\\n", " ").splitlines()
    calls = [re.sub(r"^@?(\w+=\S* )*", "", line) for line in lines]
    programs = {shlex.split(call)[0] for call in calls if not call.startswith("make ")}
    assert len(programs) > 1
    missing = {program for program in programs if not program.startswith(".venv") and shutil.which(program) is None}
    assert missing - {"uv"} == set()


def test_actions_have_the_hash_of_a_commit():
    jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    used = [step["uses"] for job in jobs for step in job.get("steps", ()) if "uses" in step]
    assert len(used) > 5
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used), used


def test_a_release_waits_for_the_tests():
    jobs = WORKFLOWS["release.yml"]["jobs"]
    called = {name: job["uses"] for name, job in jobs.items() if "uses" in job}
    assert set(called) == {*jobs["publish"]["needs"]}
    assert {"tests.yml", "quality.yml"} == {Path(path).name for path in called.values()}
    for path in called.values():
        workflow = WORKFLOWS[Path(path).name]
        assert "workflow_call" in workflow[True]  # YAML reads `on` as a truth value
        # There `github.workflow` is the calling one, and two of one group would cancel each other
        assert "github.workflow" not in workflow["concurrency"]["group"]


def test_a_release_has_the_version_of_its_tag():
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    version = config["metadata"]["version"]
    for name, code in ((f"v{version}", 0), ("v9.9.9", 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": name}
        assert subprocess.run(["bash", "-e", "-c", TAG], cwd=ROOT, env=environment).returncode == code


def test_the_links_of_a_release(tmp_path, monkeypatch):
    for name in ("README.md", "setup.cfg", ".github/absolute_links.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    script = tmp_path / LINKS.split()[1]
    settings = (tmp_path / "setup.cfg").read_text("utf-8")
    monkeypatch.setattr(sys, "argv", [str(script)])
    if "\nurl = " not in settings:
        with pytest.raises(SystemExit, match="no `url`"):
            runpy.run_path(str(script), run_name="__main__")
        (tmp_path / "setup.cfg").write_text(settings.replace("[metadata]\n", "[metadata]\nurl = https://g.com/h\n"))
    assert "](docs/" in (tmp_path / "README.md").read_text("utf-8")
    runpy.run_path(str(script), run_name="__main__")
    assert "](docs/" not in (tmp_path / "README.md").read_text("utf-8")
