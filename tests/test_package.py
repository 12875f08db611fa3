# SPDX-License-Identifier: Apache-2.0
"""The package itself: light to import, whole when installed, plain to read."""

import configparser
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement

import paco_trl


ROOT = Path(__file__).parent.parent


def setup_cfg() -> configparser.RawConfigParser:
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


@pytest.mark.slow
def test_import_is_light():
    code = (
        "import sys, paco_trl.data, paco_trl.rewards, paco_trl.plots.sample_sheet, paco_trl.dataset_building.publish\n"
    )
    code += "print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))\n"
    code += "sys.modules['openai'] = None\n"
    code += "from paco_trl import PaCoGRPOTrainer, PaCoRewardTrainer; print('torch' in sys.modules)\n"
    code += "from paco_trl.rewards import ConsistencyReward\n"
    code += "try: ConsistencyReward(base_url='http://127.0.0.1:1/v1', model='judge')\n"
    code += "except ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, is_there, error = done.stdout.strip().splitlines()
    assert "paco_trl" in loaded.split()
    for heavy in ("torch", "diffusers", "deepspeed", "transformers", "trl", "accelerate", "scipy"):
        assert heavy not in loaded.split()
    # The names themselves bring them in; only what is on a server requires its client
    assert is_there == "True" and "paco_trl[served]" in error


def test_the_version_is_in_setup_cfg_alone():
    version = setup_cfg()["metadata"]["version"]
    assert paco_trl.__version__ == version
    latest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)[1]
    assert version in re.split(r"[ ()]", latest)
    for name in ("pyproject.toml", "CITATION.cff", "paco_trl/__init__.py"):
        assert version not in (ROOT / name).read_text(encoding="utf-8"), name


def test_nothing_installs_the_name_from_an_index():
    """Anybody may register it. Until the address is known, pip and uv refuse what stands for it."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "model_cards").glob("*.md")]
    files = [*pages, *(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.sh"), *ROOT.glob("docker/*")]
    url, placeholder, found = setup_cfg()["metadata"].get("url"), "git+<address of this repository>", []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            if re.search(r"install |dependencies = ", line):
                found += [
                    (file.name, name)
                    for name in re.findall(r"(?<![./\w-])paco_trl(?:\[[\w,]+\])?(?: @ [^\"`]+)?(?=[\"`\s]|$)", line)
                ]
    installed = [(name, each) for name, each in found if each != "paco_trl"]
    assert len(installed) >= 9
    for name, each in installed:
        assert each.endswith(f" @ git+{url}" if url else f" @ {placeholder}"), name
        if not url:
            with pytest.raises(InvalidRequirement):
                Requirement(each)


def test_the_console_script_is_the_dispatch():
    assert "paco-trl = paco_trl.commands.main:main" in setup_cfg()["options.entry_points"]["console_scripts"]


def test_a_release_has_absolute_links():
    absolute = runpy.run_path(str(ROOT / ".github" / "absolute_links.py"))["absolute"]
    readme = "[a](docs/a.md) ![b](docs/b.png) [![c](../../d.svg)](../../d) [e](#e) [f](https://f.com)"
    assert absolute(readme, "https://g.com/h") == (
        "[a](https://g.com/h/blob/main/docs/a.md) ![b](https://g.com/h/raw/main/docs/b.png) "
        "[![c](https://g.com/h/d.svg)](https://g.com/h/d) [e](#e) [f](https://f.com)"
    )
    text = absolute((ROOT / "README.md").read_text(encoding="utf-8"), "https://g.com/h")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 5 and all(target.startswith(("https://", "#")) for target in targets)


def test_wheel_holds_code_templates_and_demo_prompts(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    for folder in ("paco_trl", "examples"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(source)) for path in (source / "paco_trl").rglob("*.py")}
    assert len(sources) > 100
    data = {path for path in (source / "paco_trl").rglob("*") if path.is_file() and path.suffix != ".py"}
    assert names == sources | {str(path.relative_to(source)) for path in data}
    assert 100_000 < wheel.stat().st_size < 1_000_000  # no pictures, models or datasets
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    assert "\n# " in zipfile.ZipFile(wheel).read(metadata).decode("utf-8")
