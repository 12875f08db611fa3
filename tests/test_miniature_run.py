# SPDX-License-Identifier: Apache-2.0
"""The miniature, shortened: every step runs, what is done is found, and what cannot be is said."""

import html
import io
import os
import re
import shutil
import signal
import subprocess
import textwrap
import time
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import launching
from miniature.before_and_after import choose_sets
from miniature.edit_world import make_edits
from miniature.evaluation_step import generate_and_read
from miniature.models import toy_flux_path
from miniature.run import Miniature, clear, read_settings
from miniature.settings import SHORT
from miniature.truth import SetTruth
from paco_trl import load_for_inference


ROOT = Path(__file__).parent.parent
DEMO = ROOT / "examples" / "miniature" / "demo.py"


def demo(folder: Path, *options: str, **kwargs) -> subprocess.CompletedProcess:
    return launching.run([DEMO, "--output_dir", folder, *options], **kwargs)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Miniature, list[str], str]:
    """As a user runs it."""
    folder = tmp_path_factory.mktemp("miniature") / "out"
    done = demo(folder, "--short")
    assert done.returncode == 0, done.stderr
    return Miniature(folder, SHORT), [line for line in done.stdout.splitlines() if line], done.stderr


class TestShownSets:
    """The figure shows sets at even ranks of those that changed, losses included."""

    @staticmethod
    def truths(values: list[float]) -> dict:
        other_noise = {(f"prompt-{number}", 1): SetTruth(0.9, 1.0, 0.0, 0.0) for number in range(len(values))}
        return {(f"prompt-{n}", 0): SetTruth(value, 1.0, 0.0, 0.0) for n, value in enumerate(values)} | other_noise

    def test_sets_at_even_ranks_of_the_change(self):
        before = self.truths([0.5] * 8)
        after = self.truths([0.5, 1.0, 0.0, 0.5, 0.8, 0.9, 0.7, 0.6])  # ranks: 1, 5, 4, 6, 7, 2
        assert [name for name, _ in choose_sets(before, after, count=3)] == ["prompt-5", "prompt-6", "prompt-2"]
        assert [name for name, _ in choose_sets(before, after)] == [f"prompt-{n}" for n in (1, 5, 4, 6, 7, 2)]


@pytest.mark.slow
class TestShortRun:
    def test_what_is_in_the_directory(self, finished):
        miniature = finished[0]
        for name in ("report.html", "before_and_after.png", "curves.png", "calibration.png"):
            assert (miniature.folder / name).stat().st_size > 1000
        card = (miniature.folder / "toy-flux-lora" / "README.md").read_text(encoding="utf-8")
        assert "# toy-flux-lora" in card and str(miniature.folder) not in card
        pipeline = load_for_inference(str(toy_flux_path()), dtype=torch.float32, device="cpu")[0]
        before = pipeline.transformer.proj_out.weight.sum()
        pipeline.load_lora_weights(miniature.folder / "toy-flux-lora")
        assert pipeline.get_active_adapters() and before == pipeline.transformer.proj_out.weight.sum()

    def test_the_lines_that_load_the_adapter(self, finished, monkeypatch):
        """As printed, and with those that generate on the page, where the demo was started."""
        monkeypatch.chdir(ROOT)
        said = finished[0].summary()
        names = {}
        exec(textwrap.dedent("\n".join(said[said.index("") + 3 :])), names)
        assert names["pipe"].get_active_adapters() == ["default_0"]
        page = (finished[0].folder / "report.html").read_text(encoding="utf-8")
        exec(html.unescape(re.search("<pre><code>(.*?)</code>", page, flags=re.S)[1]), names)
        assert names["prompt"] == finished[0].prompts("train")[0]["prompt"]
        assert [panel.size for panel in names["panels"]] == [(64, 64)] * 4
        # It takes the one length of text that the toy knows
        card = (finished[0].folder / "toy-flux-lora" / "README.md").read_text(encoding="utf-8")
        length = names["pipe"].tokenizer_2.model_max_length
        assert length < 512 and f"max_sequence_length={length}" in card
        assert (finished[0].folder / "toy-flux-lora" / "images" / "0.png").is_file()

    def test_a_step_alone_gives_the_same_again(self, finished):
        miniature = finished[0]
        before = miniature.result("evaluation")
        picture = miniature.step_folder("evaluation") / "before_and_after.png"
        made = picture.stat().st_mtime_ns
        again = miniature.run(alone="evaluation")
        assert picture.stat().st_mtime_ns > made
        assert {**before, "seconds": 0} == {**again["evaluation"], "seconds": 0}
        assert "report" not in again  # of another evaluation
        assert "report" in miniature.run()

    def test_before_is_the_untrained_generator_and_after_the_adapter(self, finished, tmp_path):
        miniature = finished[0]
        folder, prompts = miniature.step_folder("evaluation"), miniature.prompts("test").select(range(1))
        drawn = {}
        for name, adapter in (("before", None), ("after", miniature.step_folder("generator") / "toy-flux-lora")):
            generate_and_read(tmp_path / name, adapter, prompts, SHORT)
            path = Path("images") / prompts[0]["id"] / "0.png"
            drawn[name] = np.asarray(Image.open(tmp_path / name / path)).astype(int)
            kept = np.asarray(Image.open(folder / name / path)).astype(int)
            assert np.abs(drawn[name] - kept).max() <= 1  # another batch rounds otherwise
        assert np.abs(drawn["before"] - drawn["after"]).max() > 4


@pytest.mark.slow
def test_the_world_of_edits(tmp_path):
    """As a user runs it: the same command, the adapter acts on what it was trained on, and other settings are refused."""
    folder = tmp_path / "out"
    done = demo(folder, "--world", "edits", "--short")
    assert done.returncode == 0 and "Edits that succeed" in done.stdout, done.stderr
    for name in ("report.html", "before_and_after.png", "curves.png", "toy-kontext-lora/README.md"):
        assert (folder / name).stat().st_size > 1000
    settings = read_settings(folder)
    prompts = make_edits(8, settings.seed)
    pairs = [
        [np.asarray(Image.open(path)).astype(int) for path in sorted((folder / "2-evaluation" / name).rglob("*.png"))]
        for name in ("before", "after")
    ]
    assert len(pairs[0]) == len(pairs[1]) == settings.num_test_prompts
    assert np.abs(np.array(pairs[0]) - pairs[1]).max() > 1  # after two rounds
    assert np.abs(np.array(pairs[0]) - np.array([np.asarray(image) for image in prompts["image"][:4]])).mean() > 4
    done = demo(folder, "--short")
    assert done.returncode == 1 and "`world` edits, now sets" in done.stderr
    clear(folder)
    assert not any(folder.iterdir())


class TestRefusals:
    @pytest.mark.slow
    def test_other_settings_in_the_same_folder(self, finished):
        with pytest.raises(ValueError, match="`seed` 0, now 1. Give another directory, or `--restart`"):
            Miniature(finished[0].folder, replace(SHORT, seed=1))
        done = demo(finished[0].folder, "--short", "--seed", "1")
        assert done.returncode == 1 and "`seed` 0, now 1" in done.stderr and "Traceback" not in done.stderr

    @pytest.fixture
    def demo_here(self, monkeypatch, capsys):
        """Runs the demo in this process; gives its exit code and what it wrote to standard error."""
        import datasets

        from miniature.demo import main

        for name in ("HF_HUB_OFFLINE", "DS_ACCELERATOR"):
            monkeypatch.setenv(name, os.environ.get(name, ""))  # as it was afterwards
            monkeypatch.delenv(name)

        def call(folder: Path, *options: str) -> tuple[int, str]:
            try:
                code = main(["--output_dir", str(folder), *options])
            except SystemExit as exit:
                code = exit.code
            return code, capsys.readouterr().err

        yield call
        datasets.enable_progress_bars()

    def test_nobody_elses_folder_is_touched(self, demo_here, tmp_path, monkeypatch):
        (tmp_path / "thesis.txt").write_text("years of work")
        monkeypatch.setenv("HOME", str(tmp_path.parent))
        for place, options in ((tmp_path, ()), (tmp_path, ("--restart",)), (Path("~") / tmp_path.name, ())):
            code, said = demo_here(place, "--short", *options)
            assert code == 1 and "is not from a demo" in said
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

    @pytest.mark.parametrize(
        "options, message",
        [
            (["--shortt"], "--shortt"),
            (["--step", "training"], "no step 'training'"),
            (["--step", "judge"], "'dataset'"),
            (["--step", "judge", "--restart"], "Give one of the two"),
        ],
    )
    def test_options_that_do_not_exist(self, demo_here, tmp_path, options, message):
        code, said = demo_here(tmp_path / "out", *options)
        assert code in (1, 2) and message in said
        assert not (tmp_path / "out" / "1-dataset").exists()


@pytest.mark.slow
def test_ctrl_c_in_every_long_step_and_on(finished, tmp_path):
    folder, log = tmp_path / "out", tmp_path / "log"
    command = [DEMO, "--output_dir", str(folder), "--short"]
    job = {"command": command, "cwd": str(ROOT), "environment": dict(os.environ), "log": str(log)}
    for place in ("2-judge", "3-generator/toy-flux-lora/contact_sheets"):
        process = launching.fork_context().Process(target=launching._run_forked, args=(job,))
        process.start()
        while not (folder / place).is_dir():
            assert process.is_alive()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        process.join(120)
        assert process.exitcode == 130
        said = f"`python examples/miniature/demo.py --output_dir {folder} --short` resumes"
        assert said in log.with_suffix(".err").read_text()
    done = demo(folder, "--short")
    assert done.returncode == 0, done.stderr
    results = [Miniature(one, SHORT).result("evaluation") for one in (folder, finished[0].folder)]
    assert {**results[0], "seconds": 0} == {**results[1], "seconds": 0}


class TestClearing:
    @pytest.mark.slow
    def test_a_step_that_is_half_removed_is_not_done(self, finished, tmp_path, monkeypatch):
        folder = tmp_path / "out"
        shutil.copytree(finished[0].folder, folder)
        miniature = Miniature(folder, SHORT)

        def stop(path):
            raise KeyboardInterrupt

        monkeypatch.setattr(shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            miniature.run(alone="report")
        assert miniature.result("report") is None and miniature.result("evaluation") is not None
        with pytest.raises(KeyboardInterrupt):
            clear(folder)
        assert read_settings(folder) == SHORT


# ---- The notebook ----

NOTEBOOK = ROOT / "examples/notebooks/paco_trl_miniature.ipynb"
# Cells that show numbers
FOUND = {
    "labels": r"labels that are true: \{'Yes': ([\d.]+), 'No': ([\d.]+)\}",
    "untrained": r"untrained judge: ([\d.]+)% ranked correctly",
    "trained": r"\ntrained judge: ([\d.]+)% ranked correctly",
    "consistency": r"same figure: ([\d.]+)% before, ([\d.]+)% after \(95% interval ([+-][\d.]+) to ([+-][\d.]+)\)",
    "prompt": r"as the prompt says: ([\d.]+)% before, ([\d.]+)% after",
}


def outputs_of(notebook) -> tuple[dict[str, tuple[float, ...]], list[np.ndarray]]:
    """The numbers and the images that the cells show."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    text = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")
    images = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    matches = {name: re.search(pattern, text) for name, pattern in FOUND.items()}
    assert all(matches.values()), text
    numbers = {name: tuple(map(float, match.groups())) for name, match in matches.items()}
    decoded = [np.asarray(Image.open(io.BytesIO(b64decode("".join(image)))).convert("RGB")) for image in images]
    return numbers, decoded


@pytest.mark.slow
def test_all_cells_run(tmp_path):
    """With so little data that nothing is learned."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source += f"\nsettings, output_dir = sizes.SHORT, Path({str(tmp_path)!r})"
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=folder).execute()
    numbers, images = outputs_of(notebook)
    assert all(0 <= value <= 100 for values in numbers.values() for value in values[:2])
    assert numbers["labels"][1] > 0.5  # two sets rarely show the same figure
    assert len(images) == 3 and all(image.std() > 10 for image in images)
    assert {path.name for path in tmp_path.iterdir()} >= {"dataset", "judge", "toy-flux-lora", "before", "after"}
    assert (tmp_path / "toy-flux-lora" / "pytorch_lora_weights.safetensors").is_file()
