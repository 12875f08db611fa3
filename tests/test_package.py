# SPDX-License-Identifier: Apache-2.0
"""The package itself: light to import, whole when installed, plain to read."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paco_trl


ROOT = Path(__file__).parent.parent


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_is_light():
    loaded = run_python("import sys, paco_trl; print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))")
    assert "paco_trl" in loaded.split()
    for heavy in ("torch", "diffusers", "deepspeed", "transformers", "trl", "datasets"):
        assert heavy not in loaded.split()
    # The names themselves bring them in
    loaded = run_python("import sys; from paco_trl import PaCoGRPOConfig; print('torch' in sys.modules)")
    assert loaded == "True"


def test_public_names():
    names = ["PaCoGRPOConfig", "PaCoGRPOTrainer", "PaCoNFTConfig", "PaCoNFTTrainer"]
    names += ["PaCoReward", "PaCoRewardConfig", "PaCoRewardTrainer"]
    assert sorted(paco_trl.__all__) == [*names, "__version__"]
    for name in paco_trl.__all__:
        assert getattr(paco_trl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        paco_trl.Nothing  # noqa: B018


def test_every_all_is_true():
    for module in pkgutil.walk_packages(paco_trl.__path__, "paco_trl."):
        imported = importlib.import_module(module.name)
        for name in getattr(imported, "__all__", []):
            assert hasattr(imported, name), f"{module.name}.{name}"


def test_public_functions_and_classes_have_docstrings():
    missing = []
    for module in pkgutil.walk_packages(paco_trl.__path__, "paco_trl."):
        imported = importlib.import_module(module.name)
        assert imported.__doc__, module.name
        for name, thing in vars(imported).items():
            if name.startswith("_") or getattr(thing, "__module__", None) != module.name:
                continue
            if callable(thing) and not (thing.__doc__ or "").strip():
                missing.append(f"{module.name}.{name}")
    assert not missing


def test_wheel_holds_data_and_templates(tmp_path):
    pytest.importorskip("setuptools")
    code = "from setuptools import build_meta; import os, sys; os.chdir(sys.argv[1]); print(build_meta.build_wheel(sys.argv[2]))"
    import shutil
    import zipfile

    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(
            ".venv*", ".git", "demo-output", "miniature-benchmark", "build", "*.egg-info", "*cache*"
        ),
    )
    subprocess.run([sys.executable, "-c", code, str(source), str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {str(path.relative_to(ROOT)) for path in (ROOT / "paco_trl").rglob("*") if path.is_file()}
    packaged = {name for name in packaged if "__pycache__" not in name}
    assert packaged <= set(names), packaged - set(names)
    assert not [name for name in names if name.startswith(("tests/", "examples/"))]


def test_sources_are_in_the_house_style():
    sources = [*(ROOT / "paco_trl").rglob("*.py"), *(ROOT / "tests").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert len(sources) > 20
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        if "tests" not in path.parts:
            assert not re.search(r"\bassert \b", re.sub(r'""".*?"""', "", text, flags=re.S)), path
