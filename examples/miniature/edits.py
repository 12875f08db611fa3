# SPDX-License-Identifier: Apache-2.0
"""Run the second world of the miniature: a toy FLUX Kontext edits scenes, and learns from a judge of edits."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from paco_trl import PaCoReward
from paco_trl.data import edit_consistency_question, edit_following_question
from paco_trl.evaluation import auroc
from paco_trl.image_benchmarks.paired_results import SampleKey
from paco_trl.rewards import EditReward, RubricReward
from paco_trl.rollout.adapters import SavedAdapter, load_transformer_adapter

from .before_and_after import GREEN, RED, choose_sets, remove_frame
from .edit_world import EDIT_PANELS, EDIT_SIZE, EditTruth, judge_edit, make_edits, read_edit
from .evaluation_step import compare
from .generator_step import train_with_rewards
from .models import load_toy_kontext, toy_edit_judge_path
from .report import copy_adapter, interval, render_report
from .run import Miniature
from .settings import EDIT_ADAPTER, MiniatureSettings
from .truth import read_panels


if TYPE_CHECKING:
    from datasets import Dataset


class EditMiniature(Miniature):
    """Run the three steps of the second world in one directory."""

    def expected_seconds(self) -> dict[str, float]:
        """Estimate how long each step takes on one core."""
        settings = self.settings
        images = settings.num_rounds * settings.num_prompts_per_round * settings.num_generations
        edits = 2 * settings.num_test_prompts * settings.test_seeds
        return {"generator": 6 + 0.02 * images, "evaluation": 8 + 0.05 * edits, "report": 1}

    def prompts(self, part: str) -> "Dataset":
        """Return the edits of one part; no edit is in two of them."""
        tests = self.settings.num_test_prompts
        start, end = (0, tests) if part == "test" else (tests, tests + self.settings.num_train_prompts)
        return make_edits(tests + self.settings.num_train_prompts, self.settings.seed).select(range(start, end))

    def _generator(self, folder: Path) -> dict[str, Any]:
        judge = PaCoReward.from_pretrained(toy_edit_judge_path(), batch_size=128, dtype="float32")
        trainer = train_with_rewards(
            folder / EDIT_ADAPTER,
            load_toy_kontext(),
            [EditReward(judge), RubricReward(judge, "instruction")],
            self.prompts("train"),
            self.settings,
            per_device_train_batch_size=self.settings.num_generations,  # each prompt has its own source
        )
        names = ["rewards/edit/mean", "rewards/rubric_instruction/mean"]
        logs = [log for log in trainer.state.log_history if all(name in log for name in names)]
        return {name: [log[name] for log in logs[::2]] for name in names}

    def _evaluation(self, folder: Path) -> dict[str, Any]:
        prompts, truths = self.prompts("test"), {}
        for name, adapter in (("before", None), ("after", self.step_folder("generator") / EDIT_ADAPTER)):
            truths[name] = edit_and_read(folder / name, adapter, prompts, self.settings)
        plot_edits(folder, prompts, truths)
        judged = judge_the_judge(folder / "before", prompts, truths["before"])
        return compare(truths["before"], truths["after"]) | {"judge": judged}

    def _report(self, folder: Path) -> dict[str, Any]:
        generator, evaluation = self.step_folder("generator") / EDIT_ADAPTER, self.step_folder("evaluation")
        sheets = sorted((generator / "contact_sheets" / "card").glob("round_*.png"))
        pictures = {
            "before_and_after": evaluation / "before_and_after.png",
            "curves": generator / "curves.png",
            "first_round": sheets[0],
            "last_round": sheets[-1],
        }
        for name in ("before_and_after", "curves"):
            shutil.copyfile(pictures[name], self.folder / f"{name}.png")
        copy_adapter(generator, self.folder / EDIT_ADAPTER)
        values = {"results": self._results(), "settings": self.settings}
        page = render_report(self.folder, "report_edits.html.jinja", pictures, **values)
        return {"page": os.path.relpath(page, self.folder)}

    def summary(self) -> list[str]:
        """Summarize the results in four lines; all steps must be finished."""
        truth = self._results()["evaluation"]
        lines = [
            f"{title}: {truth[name]['before']['mean']:.2f} before, {truth[name]['after']['mean']:.2f} after "
            f"({interval(truth[name]['difference'])})."
            for name, title in (
                ("success", "Edits that succeed"),
                ("done", "Done"),
                ("unchanged", "All else unchanged"),
            )
        ]
        return [*lines, f"See {self.folder / 'report.html'}; the adapter is in {self.folder / EDIT_ADAPTER}."]


def edit_and_read(
    folder: Path, adapter: Path | None, prompts: "Dataset", settings: MiniatureSettings
) -> dict[SampleKey, EditTruth]:
    """Edit the sources of the test prompts at full resolution, and read from the pixels what they show."""
    pipeline = load_toy_kontext()
    if adapter is not None:
        pipeline.transformer = load_transformer_adapter(
            pipeline.transformer, SavedAdapter.read(str(adapter), pipeline)
        )
    truths = {}
    for noise in range(settings.test_seeds):
        images = pipeline(
            image=prompts["image"][:],
            prompt=prompts["prompt"][:],
            height=EDIT_SIZE,
            width=EDIT_SIZE,
            max_area=EDIT_SIZE**2,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=1.0,
            # Its own for each edit: what goes wrong depends on the noise more than on the scene
            generator=[torch.Generator().manual_seed(len(prompts) * noise + row) for row in range(len(prompts))],
            max_sequence_length=pipeline.tokenizer_2.model_max_length,
        ).images
        panels = read_panels(images, EDIT_PANELS)
        for row, image, panel in zip(prompts.with_format(None), images, panels, strict=True):
            path = image_path(folder, (row["id"], noise))
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            truths[row["id"], noise] = judge_edit(panel, read_edit(row["edit"]))
    return truths


def image_path(folder: Path, unit: SampleKey) -> Path:
    """Return the file of an edit."""
    return folder / unit[0] / f"{unit[1]}.png"


def judge_the_judge(folder: Path, prompts: "Dataset", truths: Mapping[SampleKey, EditTruth]) -> dict[str, float]:
    """Compute how well the judge's answers about edits of the untrained generator tell the truth, as AUROC."""
    judge = PaCoReward.from_pretrained(toy_edit_judge_path(), batch_size=128, dtype="float32")
    rows = {row["id"]: row for row in prompts}
    units = sorted(truths)
    texts = [rows[name]["prompt"] for name, _ in units]
    sources = [rows[name]["image"] for name, _ in units]
    edited = [Image.open(image_path(folder, unit)) for unit in units]
    pairs = list(zip(sources, edited, strict=True))
    scores = {
        "done": judge.score(pairs, [edit_following_question(text) for text in texts]),
        "unchanged": judge.score(pairs, [edit_consistency_question(text) for text in texts]),
        "success": EditReward(judge)(texts, edited, image=sources),
    }
    return {name: auroc(of, [getattr(truths[unit], name) for unit in units]) for name, of in scores.items()}


def plot_edits(folder: Path, prompts: "Dataset", truths: Mapping[str, Mapping[SampleKey, EditTruth]]) -> None:
    """Plot edits whose success changed: the source, and from the same noise what came of it before and after."""
    rows = {row["id"]: row for row in prompts}
    chosen = choose_sets(truths["before"], truths["after"], count=8)
    figure = Figure(figsize=(1.6 * len(chosen), 5.4), layout="constrained")
    axes = figure.subplots(3, len(chosen), squeeze=False)
    for column, unit in enumerate(chosen):
        row = rows[unit[0]]
        axes[0, column].imshow(row["image"])
        axes[0, column].set_title(row["prompt"].replace(" to ", "\nto ").replace(" figure ", "\nfigure "), fontsize=10)
        for line, (side, truth) in enumerate(truths.items(), start=1):
            axis, found = axes[line, column], truth[unit]
            image = Image.open(image_path(folder / side, unit))
            axis.imshow(image, interpolation="nearest")
            if not found.success:
                frame = (1, 1), image.width - 3, image.height - 3
                axis.add_patch(Rectangle(*frame, fill=False, edgecolor=RED, linewidth=3.5))
            words = "succeeds" if found.success else "not done" if not found.done else "more changed"
            axis.set_xlabel(words, color=GREEN if found.success else "black", fontsize=10)
    for axis in axes.flat:
        remove_frame(axis)
    for axis, title in zip(axes[:, 0], ("source", *truths), strict=True):
        axis.set_ylabel(title, fontsize=12)
    figure.savefig(folder / "before_and_after.png", dpi=120)
