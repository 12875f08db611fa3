# SPDX-License-Identifier: Apache-2.0
"""
Train with fewer forwards of the transformer than half the tail needs, and read the truth on the way.

    python benchmarks/miniature/fewer_forwards.py --seeds 0 1 2  # about two and a half hours on one core; another
    python benchmarks/miniature/fewer_forwards.py --seeds 3 4 5  # process can do other seeds at the same time
    python benchmarks/miniature/fewer_forwards.py                # in seconds: results and plot of finished runs
    python benchmarks/miniature/fewer_forwards.py --times        # the processor time of a round, ten minutes

Each run is kept in `--work_dir` and not repeated; a killed one resumes. Sets (the judge of the demo) and edits. The
trainers that leave out images of a group, cache the tail, or use a round twice, are below and not in the package: see
README.md, (l).
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import TaylorSeerCacheConfig
from matplotlib.figure import Figure
from scipy import stats

from claims.common import USUAL, prepared, read_truth
from claims.speed import LEVELS, STEPS_BETWEEN_READINGS, time_to_reach
from miniature.edits import EditMiniature, edit_and_read
from miniature.generator_step import train_generator, train_with_rewards
from miniature.models import load_toy_kontext, toy_edit_judge_path
from miniature.settings import EDITS
from paco_trl import PaCoGRPOTrainer, PaCoReward
from paco_trl.rewards import EditReward, RubricReward
from paco_trl.rollout import Family, RecordedStep
from paco_trl.rollout.policy import compute_log_prob
from paco_trl.rollout.recording_pipeline import _batched
from paco_trl.rollout.rounds import Batch
from paco_trl.trainer.round_schedule import TrainingRound


# ---- Only some images of a group are trained ----


def widest(values: np.ndarray, count: int) -> np.ndarray:
    """Return which `count` of some values have the largest variance: the smallest and the largest, `(N,)` of bool."""
    order = np.argsort(values, kind="stable")
    choices = [np.concatenate([order[:low], order[len(values) - (count - low) :]]) for low in range(count + 1)]
    best = max(choices, key=lambda choice: values[choice].var())
    chosen = np.zeros(len(values), dtype=bool)
    chosen[best] = True
    return chosen


def select(record: RecordedStep, rows: torch.Tensor, family: Family) -> RecordedStep:
    """Return the step of some images of a batch."""
    tensors = {name: value[rows] for name, value in vars(record).items() if torch.is_tensor(value)}
    calls = [call | {name: value[rows] for name, value in _batched(call, family).items()} for call in record.calls]
    return replace(record, calls=calls, **tensors)


class ChosenRound(TrainingRound):
    """A round that trains only `num_trained` images of each group, with the advantages of the whole group."""

    num_trained: int

    def assign_advantages(self, advantages, is_trained, family):
        groups = advantages.view(-1, self.num_generations).numpy()
        chosen = torch.from_numpy(np.concatenate([widest(group, self.num_trained) for group in groups]))
        super().assign_advantages(advantages, is_trained & chosen, family)
        for number, batch in enumerate(self.micro_batches):
            rows = batch.column("weight").nonzero().flatten()
            samples = [batch.samples[row] for row in rows.tolist()]
            self.micro_batches[number] = Batch(samples, [select(step, rows, family) for step in batch.steps])


def training_only(count: int) -> type[PaCoGRPOTrainer]:
    """Return a trainer of as many images of each group, whose others cost no forward. For one process."""

    class Chosen(ChosenRound):
        num_trained = count

    class TrainerOfChosen(PaCoGRPOTrainer):
        def _plan_round(self, index):
            return Chosen(self.schedule, self.train_rows, index, 0, self.state.global_step)

    return TrainerOfChosen


# ---- A cached tail ----


class CachedTail(PaCoGRPOTrainer):
    """
    Predict most blocks after the stochastic step by diffusers' TaylorSeer, in the rollout alone: of the 6 steps of
    the tail, the first and the third are computed. The stochastic step and its replay stay exact.
    """

    @contextmanager
    def _generating(self, training_round):
        transformer = self.accelerator.unwrap_model(self.model).get_base_model()
        config = TaylorSeerCacheConfig(
            cache_interval=4,
            disable_cache_before_step=max(training_round.sde.steps) + 2,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=["transformer_blocks\\.[0-9]+", "single_transformer_blocks\\.[0-9]+"],
        )
        transformer.enable_cache(config)
        with ExitStack() as stack:
            stack.callback(transformer.disable_cache)
            # FluxKontextPipeline does not open it itself, and each call's end resets it
            opened = stack.enter_context(ExitStack())
            hook = transformer.register_forward_pre_hook(
                lambda *_: opened.enter_context(transformer.cache_context("cond"))
            )
            stack.callback(hook.remove)
            yield stack.enter_context(super()._generating(training_round))


# ---- A round used twice ----


class UsedTwice(PaCoGRPOTrainer):
    """
    Correct the second pass over a round as OP-GRPO does (arXiv 2604.04142): clip around the policy that begins the
    pass, and multiply advantages by its sequence-level ratio to the policy that generated the images.
    """

    def _prepare_inputs(self, inputs):
        if self._step % self.schedule.micro_steps_per_round == self.schedule.plan.steps_per_generation:
            for batch in self.round.micro_batches:
                batch.steps = [self._recenter(batch, step) for step in batch.steps]
        return super()._prepare_inputs(inputs)

    @torch.no_grad()
    def _recenter(self, batch: Batch, step: RecordedStep) -> RecordedStep:
        log_prob, mean, _ = compute_log_prob(self._velocities(self.model, step)[0], step, self.round.sde)
        ratios = torch.exp(log_prob - step.log_prob)  # (B,), of the step that is trained: the whole sequence
        for sample, ratio in zip(batch.samples, ratios.tolist(), strict=True):
            sample.advantage *= ratio
        return replace(step, log_prob=log_prob, mean=mean)


# ---- The settings ----


@dataclass(frozen=True)
class Arm:
    """A setting: the tail's steps that are computed, the trained images of 16, and what else differs from (e)."""

    tail: int
    trained: int = 16
    steps: int = 8
    iterations: int = 1
    recentered: int = 0  # forwards without gradients between the passes
    trainer: type[PaCoGRPOTrainer] = PaCoGRPOTrainer
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def forwards(self) -> float:
        """Forwards of the transformer for an image of a round, of which a backward counts as one."""
        return 2 + self.tail + 2 * self.iterations * self.trained / 16 + self.recentered

    def training(self) -> dict[str, Any]:
        """Return the trainer and the options that make the setting."""
        trainer = self.trainer if self.trained == 16 else training_only(self.trained)
        short = {} if self.trainer is CachedTail or self.tail == self.steps - 2 else {"tail_steps": self.tail}
        many = {"num_iterations": self.iterations, "max_steps": USUAL["max_steps"] * self.iterations}
        return {"trainer_class": trainer, "num_inference_steps": self.steps, **short, **many, **self.options}


SEEDS = range(6)
DEFAULTS, HALF_TAIL = "defaults", "half the tail"
ARMS = {
    DEFAULTS: Arm(6),
    HALF_TAIL: Arm(3),
    "half the images": Arm(3, trained=8),
    "6 steps": Arm(2, steps=6),
    "6 steps, half the images": Arm(2, trained=8, steps=6),
    "cached tail": Arm(2, trainer=CachedTail),
    "each round twice": Arm(3, iterations=2, recentered=1, trainer=UsedTwice),
}
# What is read of each world, and the levels of the first
TRUTHS = {"sets": ("consistency", "prompt_following"), "edits": ("success", "done", "unchanged")}
REACHED = {"sets": LEVELS, "edits": (0.5, 0.55, 0.6)}
WORLDS = tuple(TRUTHS)


def options_of(world: str, arm: str, seed: int) -> dict[str, Any]:
    usual = USUAL if world == "sets" else {"max_steps": USUAL["max_steps"]}
    return usual | {"sde_steps": [1], "seed": seed, "log_completions": False} | ARMS[arm].training()


def training_of(world: str, seed: int, work: Path) -> Callable[..., PaCoGRPOTrainer]:
    """Return what trains an adapter in a directory with some options."""
    if world == "sets":
        miniature = prepared(work, seed)
        return lambda folder, **options: train_generator(
            folder, miniature.step_folder("judge"), miniature.prompts("train"), miniature.settings, **options
        )
    edits = EditMiniature(work / f"edits-{seed}", replace(EDITS, seed=seed), say=print)
    judge = PaCoReward.from_pretrained(toy_edit_judge_path(), batch_size=128, dtype="float32")
    rewards = [EditReward(judge), RubricReward(judge, "instruction")]
    size = EDITS.num_generations  # each prompt has its own source
    return lambda folder, **options: train_with_rewards(
        folder, load_toy_kontext(), rewards, edits.prompts("train"), edits.settings,
        **({"per_device_train_batch_size": size} | options),
    )  # fmt: skip


def read(world: str, seed: int, work: Path, folder: Path, adapter: Path | None) -> dict[str, list[float]]:
    if world == "sets":
        return read_truth(folder, adapter, prepared(work, seed))
    edits = EditMiniature(work / f"edits-{seed}", replace(EDITS, seed=seed), say=print)
    truths = edit_and_read(folder, adapter, edits.prompts("test"), edits.settings)
    return {f"{prompt}/{noise}": [float(value) for value in truth] for (prompt, noise), truth in truths.items()}


def folder_of(world: str, arm: str, seed: int, work: Path) -> Path:
    return work / "fewer-forwards" / world / f"{arm.replace(', ', '_').replace(' ', '-')}_seed-{seed}"


def do_run(world: str, arm: str, seed: int, work: Path) -> None:
    folder = folder_of(world, arm, seed, work)
    if (folder / "result.json").exists():
        return
    print(f"{world}, {arm}, seed {seed}", flush=True)
    between = STEPS_BETWEEN_READINGS * ARMS[arm].iterations
    options = options_of(world, arm, seed)
    trainer = training_of(world, seed, work)(folder / "adapter", save_steps=between, save_total_limit=None, **options)
    curves = {
        name: [round(log[name], 4) for log in trainer.state.log_history if name in log][:: 2 * ARMS[arm].iterations]
        for name in trainer.state.log_history[0]
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    steps = range(between, options["max_steps"] + 1, between)
    result = {
        "rewards": curves,
        "before": read(world, seed, work, folder.parent / f"before-{seed}", None),
        "after": {
            step // ARMS[arm].iterations: read(
                world, seed, work, folder / f"step-{step}", folder / "adapter" / f"checkpoint-{step}"
            )
            for step in steps
        },
    }
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def time_rounds(world: str, arms: Sequence[str], work: Path, folder: Path) -> dict[str, float]:
    """Return the processor time of a round of each setting, as a fraction of half the tail's: two rounds less one."""

    def seconds(arm: str, rounds: int) -> float:
        options = options_of(world, arm, 0) | {"max_steps": 2 * rounds * ARMS[arm].iterations, "save_strategy": "no"}
        train, start = training_of(world, 0, work), time.process_time()
        train(folder / f"{arm}-{rounds}", **options)
        return time.process_time() - start

    times = {arm: seconds(arm, 2) - seconds(arm, 1) for arm in arms}
    return {arm: round(value / times[HALF_TAIL], 3) for arm, value in times.items()}


# ---- What came of them ----


def finished(world: str, arm: str, work: Path, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the finished runs of a setting by seed, with the readings in order, the one before training first."""
    files = {seed: folder_of(world, arm, seed, work) / "result.json" for seed in seeds}
    return {seed: json.loads(file.read_text(encoding="utf-8")) for seed, file in files.items() if file.exists()}


def means_of(run: dict[str, Any], place: int) -> list[float]:
    """Return a figure of the truth at each reading."""
    return [float(np.mean([truth[place] for truth in at.values()])) for at in (run["before"], *run["after"].values())]


def paired(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of differences of seeds, with a 95 % t-interval."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval() if len(values) > 1 else (np.nan, np.nan)
    return {"mean": round(float(np.mean(values)), 3), "interval": [round(float(low), 3), round(float(high), 3)]}


def to_reach(level: float, arm: str, readings: Sequence[float]) -> float | None:
    """Return the forwards until the truth is at a level, as a fraction of all of half the tail."""
    paid = [ARMS[arm].forwards * number for number in range(len(readings))]
    reached = time_to_reach(level, paid, readings)
    return None if reached is None else round(reached / (ARMS[HALF_TAIL].forwards * (len(readings) - 1)), 2)


def summarize(world: str, work: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Compare the settings, over the seeds that each has in common with half the tail."""
    base = finished(world, HALF_TAIL, work, seeds)
    results: dict[str, Any] = {}
    for arm in ARMS:
        runs = {seed: run for seed, run in finished(world, arm, work, seeds).items() if seed in base}
        if not runs:
            continue
        result: dict[str, Any] = {"forwards per image": ARMS[arm].forwards, "seeds": list(runs)}
        for place, name in enumerate(TRUTHS[world]):
            readings = np.array([means_of(run, place) for run in runs.values()])
            half = np.array([means_of(base[seed], place) for seed in runs])
            difference = readings[:, -1] - half[:, -1]
            result[name] = {
                "readings": np.round(readings.mean(axis=0), 3).tolist(),
                "of each seed": np.round(readings[:, -1], 3).tolist(),
                "difference from half the tail": paired(difference.tolist()) | {
                    "of each seed": np.round(difference, 3).tolist()
                },
            }  # fmt: skip
            if place == 0:
                reached = {f"{level:.2f}": to_reach(level, arm, readings.mean(axis=0)) for level in REACHED[world]}
                result[name]["forwards to a level, as a fraction of all of half the tail"] = reached
        results[arm] = result
    return results


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot the truth over the forwards of the transformer."""
    figure = Figure(figsize=(13, 5.4), layout="constrained")
    for axis, (world, by_arm) in zip(
        figure.subplots(1, len(results), squeeze=False).flat, results.items(), strict=True
    ):
        name = TRUTHS[world][0]
        for number, arm in enumerate(ARMS):
            if arm not in by_arm:
                continue
            readings = by_arm[arm][name]["readings"]
            share = ARMS[arm].forwards / ARMS[DEFAULTS].forwards / (len(readings) - 1)
            label = f"{arm}, {len(by_arm[arm]['seeds'])} seeds"
            axis.plot(np.arange(len(readings)) * share, readings, "o-", color=f"C{number}", markersize=4, label=label)
        axis.set_title(f"{world}: {name.replace('_', ' ')}, read from pixels", loc="left", fontsize=11)
        axis.set_xlabel("forwards of the transformer, as a fraction of all of the defaults")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.suptitle("Fewer forwards than half the tail, in miniature: means over seeds", fontsize=13)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    parser.add_argument("--work_dir", type=Path, default=Path("miniature-benchmark"))
    parser.add_argument("--times", action="store_true", help="measure the time of a round of the --arms, too")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    for arm in arguments.arms:
        for world in arguments.worlds:
            for seed in arguments.seeds:
                do_run(world, arm, seed, arguments.work_dir)
    results = {world: summarize(world, arguments.work_dir, SEEDS) for world in WORLDS}
    times_file = arguments.work_dir / "fewer-forwards" / "times.json"
    times = json.loads(times_file.read_text(encoding="utf-8")) if times_file.exists() else {}
    for world in arguments.worlds if arguments.times else ():
        with tempfile.TemporaryDirectory() as folder:
            times[world] = time_rounds(world, arguments.arms, arguments.work_dir, Path(folder))
        times_file.write_text(json.dumps(times), encoding="utf-8")
    for world, times_of_world in times.items():
        for arm in results[world].keys() & times_of_world.keys():
            results[world][arm]["time of a round, as a fraction of half the tail's"] = times_of_world[arm]
    record = {
        "setting": {"device": "cpu", "threads": 1, "rounds": USUAL["max_steps"] // 2},
        "torch": torch.__version__,
        "ratios": {
            f"{world}: difference of {TRUTHS[world][0]} from half the tail": {
                arm: result[TRUTHS[world][0]]["difference from half the tail"]["mean"]
                for arm, result in of_world.items()
                if arm != HALF_TAIL
            }
            for world, of_world in results.items()
        },
        "results": results,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot(results, arguments.output.with_suffix(".png"))
    print(json.dumps(record["ratios"], indent=1))


if __name__ == "__main__":
    main()
