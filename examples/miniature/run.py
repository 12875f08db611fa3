# SPDX-License-Identifier: Apache-2.0
"""Run the five steps of the miniature in one directory, together or one at a time."""

import dataclasses
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paco_trl.dataset_building import StageFolder
from paco_trl.utils.files import write_atomically

from .data import make_prompts
from .report import loading_lines, summary, write_report
from .settings import ADAPTER, COMMAND, EDIT_ADAPTER, MiniatureSettings


if TYPE_CHECKING:
    from datasets import Dataset

SETTINGS_FILE, RESULT_FILE = "miniature.json", "result.json"

# What the last step writes next to the directories of the steps
OUTPUTS = ("report.html", "before_and_after.png", "curves.png", "calibration.png", ADAPTER, EDIT_ADAPTER)

# Directory of each step of each world, and what it does
STEPS = {
    "sets": {
        "dataset": ("1-dataset", "generates sets and pairs their panels"),
        "judge": ("2-judge", "trains PaCo-Reward on the pairs"),
        "generator": ("3-generator", "trains the generator with PaCo-GRPO at half resolution"),
        "evaluation": ("4-evaluation", "measures the truth at full resolution, before and after"),
        "report": ("5-report", "writes the report"),
    },
    "edits": {
        "generator": ("1-generator", "trains the editor with PaCo-GRPO at half resolution"),
        "evaluation": ("2-evaluation", "measures the truth at full resolution, before and after, and the judge"),
        "report": ("3-report", "writes the report"),
    },
}


def read_settings(folder: Path) -> MiniatureSettings:
    """Return the settings that a directory was made with."""
    values = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    try:
        return MiniatureSettings(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )
    except TypeError:
        raise ValueError(f"'{folder}' was made by another version. Give another directory, or `--restart`.") from None


def clear(folder: Path) -> None:
    """Delete the results of a miniature and nothing else; the settings last, as they mark its directory."""
    settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))  # also those of other versions
    for name, _ in reversed(STEPS[settings.get("world", "sets")].values()):
        _delete(folder / name)
    for name in OUTPUTS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (folder / SETTINGS_FILE).unlink()


def _delete(step_folder: Path) -> None:
    # The result first: an interrupted deletion must not look like a finished step
    (step_folder / RESULT_FILE).unlink(missing_ok=True)
    if step_folder.exists():
        shutil.rmtree(step_folder)


class StepError(RuntimeError):
    """Report which step failed, why, and how to run it again."""


class Miniature:
    """Run the five steps in one directory; finished steps are skipped, interrupted ones resume."""

    def __init__(
        self,
        folder: str | Path,
        settings: MiniatureSettings | None = None,
        say: Callable[[str], None] | None = None,
    ):
        self.folder = Path(folder).expanduser().absolute()
        self.settings = MiniatureSettings() if settings is None else settings
        self.steps = STEPS[self.settings.world]
        self.say = say or (lambda line: None)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / SETTINGS_FILE
        now = json.loads(json.dumps(dataclasses.asdict(self.settings)))  # as read back
        if file.exists():
            old = json.loads(file.read_text(encoding="utf-8"))
            changed = [name for name in {**old, **now} if old.get(name) != now.get(name)]
            if changed:
                listed = ", ".join(f"`{name}` {old.get(name)}, now {now.get(name)}" for name in changed)
                raise ValueError(
                    f"'{self.folder}' was made with other settings: {listed}. Give another directory, or `--restart`."
                )
        else:
            write_atomically(file, json.dumps(now, indent=2) + "\n")

    def step_folder(self, name: str) -> Path:
        """Return the directory of a step."""
        return self.folder / self.steps[name][0]

    def result(self, name: str) -> dict[str, Any] | None:
        """Return the results of a finished step, or `None`."""
        file = self.step_folder(name) / RESULT_FILE
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def run(self, alone: str | None = None) -> dict[str, dict[str, Any]]:
        """Run the unfinished steps, or a single step again."""
        if alone is not None:
            self._prepare_alone(alone)
        todo = [name for name in self.steps if self.result(name) is None and alone in (None, name)]
        expected = self.expected_seconds()
        pace = 1.0  # measured seconds of the last step / expected ones
        for number, name in enumerate(self.steps, start=1):
            title = f"Step {number} of {len(self.steps)}, {name}"
            if name not in todo:
                if alone is None:
                    self.say(f"{title}: found in {self.step_folder(name)}.")
                continue
            left = pace * sum(expected[other] for other in todo[todo.index(name) :])
            self.say(f"{title}: {self.steps[name][1]} (about {describe_time(left)} left).")
            started = time.monotonic()
            with self._failing_as(name):
                result = getattr(self, f"_{name}")(self.step_folder(name))
            result["seconds"] = round(time.monotonic() - started, 1)
            pace = result["seconds"] / expected[name]
            write_atomically(self.step_folder(name) / RESULT_FILE, json.dumps(result, indent=2) + "\n")
        return self._results()

    def _results(self) -> dict[str, dict[str, Any]]:
        return {name: result for name in self.steps if (result := self.result(name)) is not None}

    def _prepare_alone(self, alone: str) -> None:
        if alone not in self.steps:
            raise ValueError(f"There is no step {alone!r}. The steps are {', '.join(self.steps)}.")
        names = list(self.steps)
        before, after = names[: names.index(alone)], names[names.index(alone) :]
        if missing := [name for name in before if self.result(name) is None]:
            raise ValueError(
                f"The step {alone!r} requires the results of {missing[0]!r}. Run that first, or all steps."
            )
        for name in reversed(after):
            _delete(self.step_folder(name))

    @contextmanager
    def _failing_as(self, name: str) -> Iterator[None]:
        try:
            self.step_folder(name).mkdir(exist_ok=True)
            yield
        except Exception as error:
            raise StepError(
                f"The step {name!r} failed: {type(error).__name__}: {error} The results of the earlier steps are in "
                f"{self.folder}. `{COMMAND} --output_dir {shlex.quote(str(self.folder))} --step {name}` runs it again."
            ) from error

    def summary(self) -> list[str]:
        """Summarize the results in five lines, and say how to load the adapter; all steps must be finished."""
        return [*summary(self.folder, self._results()), *loading_lines(self.folder)]

    def expected_seconds(self) -> dict[str, float]:
        """Estimate how long each step takes on one core."""
        settings = self.settings
        images = settings.num_rounds * settings.num_prompts_per_round * settings.num_generations
        return {  # measured: startup, and per set, pair, image of a round, set
            "dataset": 3 + 0.1 * 4 * settings.num_dataset_prompts,
            "judge": 6 + 0.0115 * settings.num_pairs,
            "generator": 6 + 0.087 * images,
            "evaluation": 2 + 0.08 * 2 * settings.num_test_prompts * settings.test_seeds,
            "report": 1,
        }

    def prompts(self, part: str) -> "Dataset":
        """Return the prompts of one part; no prompt is in two of them."""
        tests = self.settings.num_test_prompts
        if part == "dataset":
            # They leave the figure open, so that four sets of a prompt show four figures and pairs differ
            return make_prompts(self.settings.num_dataset_prompts, self.settings.seed, named=False)
        start, end = (0, tests) if part == "test" else (tests, tests + self.settings.num_train_prompts)
        prompts = make_prompts(tests + self.settings.num_train_prompts, self.settings.seed)
        return prompts.select(range(start, end))

    def _dataset(self, folder: Path) -> dict[str, Any]:
        from .dataset_step import build_dataset

        return build_dataset(folder, self.prompts("dataset"), self.settings)

    def _judge(self, folder: Path) -> dict[str, Any]:
        from .judge_step import compare_judges, train_judge

        shutil.rmtree(folder)  # of an interrupted attempt
        dataset = self.step_folder("dataset")
        metrics = train_judge(folder, StageFolder(dataset / "pairs").load(), self.settings)
        return {"held_out_pairs": metrics, **compare_judges(folder, StageFolder(dataset / "rankings").load())}

    def _generator(self, folder: Path) -> dict[str, Any]:
        from .generator_step import train_generator

        trainer = train_generator(folder / ADAPTER, self.step_folder("judge"), self.prompts("train"), self.settings)
        names = ["rewards/consistency/mean", "rewards/clip_t/mean"]
        logs = [log for log in trainer.state.log_history if all(name in log for name in names)]
        rounds = logs[::2]  # both optimizer steps of a round log the same rewards
        return {name: [log[name] for log in rounds] for name in names}

    def _evaluation(self, folder: Path) -> dict[str, Any]:
        from .before_and_after import plot_before_and_after
        from .evaluation_step import compare, generate_and_read

        prompts, truths = self.prompts("test"), {}
        for name, adapter in (("before", None), ("after", self.step_folder("generator") / ADAPTER)):
            truths[name] = generate_and_read(folder / name, adapter, prompts, self.settings)
        results = compare(truths["before"], truths["after"])
        rows = list(prompts.with_format(None))
        sides = list(truths.values())
        plot_before_and_after(folder, folder / "before_and_after.png", rows, sides, results)
        plot_before_and_after(folder, folder / "before_and_after_narrow.png", rows, sides, columns=2)
        return results

    def _report(self, folder: Path) -> dict[str, Any]:
        steps = {name: self.step_folder(name) for name in self.steps}
        page = write_report(self.folder, steps, self._results(), self.settings)
        return {"page": os.path.relpath(page, self.folder)}


def describe_time(seconds: float) -> str:
    """Format a duration for people."""
    if seconds < 55:
        return f"{max(1, round(seconds / 10)) * 10} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minute{'s' * (minutes > 1)}"
