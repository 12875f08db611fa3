# SPDX-License-Identifier: Apache-2.0
"""Evaluation: prompts generated at full resolution and scored, with the trained weights and without them."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from PIL import Image
from tqdm.auto import tqdm
from transformers import TrainerState

from ..data.columns import check_is_dataset
from ..evaluation import bootstrap_interval, grid_artifact_score
from ..plots.contact_sheet import MAX_IMAGES, MAX_PROMPTS, thumbnail
from ..plots.scored_sheets import ScoredImages
from ..rewards.reward_set import RewardSet
from ..rewards.scorer import RewardScorer
from ..rollout.noise import STREAMS
from ..rollout.prompt_rows import PromptRows
from ..rollout.sampler import RolloutSampler
from ..utils.random_state import kept_random_state
from .paco_grpo_config import PaCoGRPOConfig


@dataclass
class Evaluation:
    """
    What was drawn for a dataset and how it scored, the same on every process except for the pictures.

    Attributes:
        rewards (`torch.Tensor` of shape `(images, rewards)`):
            Rewards, prompt-major, NaN where one could not be computed.
        total (`torch.Tensor` of shape `(images,)`):
            Weighted sum of the rewards.
        grid_artifacts (`torch.Tensor` of shape `(images,)`):
            [`~paco_trl.evaluation.grid_artifact_score`] of each image.
        extra (`dict[str, list]`):
            Columns that rewards logged themselves.
        logged (`dict[str, float]`):
            Metrics that rewards logged themselves.
        pictures (`dict[int, PIL.Image.Image]`):
            Thumbnails by number, of the images that a sheet shows; on the main process only.
    """

    rewards: torch.Tensor
    total: torch.Tensor
    grid_artifacts: torch.Tensor
    extra: dict[str, list] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    pictures: dict[int, Image.Image] = field(default_factory=dict)


class Evaluator:
    """
    Generates prompts with the model as it is, scores them, and remembers how the untrained model did.

    Args:
        sampler ([`RolloutSampler`]):
            Sampler of the model that is evaluated.
        rewards ([`RewardSet`]):
            Rewards.
        scorer ([`RewardScorer`]):
            Scorer of these rewards.
        args ([`PaCoGRPOConfig`]):
            Settings.
        rows (`list[PromptRows]`, *optional*):
            Rows that were read already.
        base_model (`str`, *optional*), dtype (`str`, *optional*):
            What else a baseline depends on.
    """

    def __init__(
        self,
        sampler: RolloutSampler,
        rewards: RewardSet,
        scorer: RewardScorer,
        args: PaCoGRPOConfig,
        rows: list[PromptRows] = (),
        base_model: str = "",
        dtype: str = "",
    ):
        self.sampler, self.rewards, self.scorer, self.args = sampler, rewards, scorer, args
        self.base_model, self.dtype = base_model, dtype
        self._rows = list(rows)
        self._baselines: dict[str, Evaluation] = {}

    def rows_of(self, dataset: Dataset) -> PromptRows:
        """Read a dataset's rows, once where it is the trainer's own."""
        check_is_dataset(dataset, "eval_dataset")
        known = (rows for rows in self._rows if rows.dataset is dataset)
        rows = next(known, None) or PromptRows(dataset, self.args, "the evaluation dataset")
        return rows.measure(self.sampler.policy.pipeline, self.sampler.policy.family)

    def evaluate(self, rows: PromptRows, description: str, state: TrainerState) -> Evaluation:
        """Generate and score all rows at their inference size. Every process calls it."""
        evaluation = self.generate(rows, description, state, list(range(len(rows))), rows.inference_sizes)
        # Here, so that a baseline that could not be scored is neither kept nor compared with
        self.rewards.check_scored(evaluation.rewards, self.args.max_excluded_images)
        return evaluation

    def generate(
        self,
        rows: PromptRows,
        description: str,
        state: TrainerState,
        numbers: list[int],
        sizes: list[tuple[int, int]],
        scale: float = 1.0,
    ) -> Evaluation:
        """
        Generate and score rows by the pipeline's ODE. Every process calls it.

        The noise of an image is a function of the seed, its row and its number: the same in every evaluation of a run.

        Args:
            rows ([`PromptRows`]):
                Rows of the dataset.
            description (`str`):
                Title of the progress bar.
            state ([`~transformers.TrainerState`]):
                State of the run.
            numbers (`list[int]`):
                Numbers of the rows to generate.
            sizes (`list[tuple[int, int]]`):
                Height and width of every row of the dataset.
            scale (`float`, *optional*, defaults to `1.0`):
                Factor per side at which source images are read.

        Returns:
            [`Evaluation`].
        """
        args, sampler, accelerator = self.args, self.sampler, self.sampler.accelerator
        generations, period = args.num_generations_eval, sampler.size_multiple
        sampler.encode(rows, numbers, scale)

        # Each process generates the same number of images, as ZeRO-3 needs; what was added for that is not counted
        processes = accelerator.num_processes
        total = len(numbers) * generations
        padded = (np.arange(-(-total // processes) * processes) % total).reshape(-1, processes)
        artifacts, pictures = [], []
        self.scorer.start()
        with sampler.ready():
            for images_of_all in tqdm(
                padded.tolist(), desc=description, disable=args.disable_tqdm or not accelerator.is_main_process
            ):
                fetched = sampler.fetch(rows, [numbers[image // generations] for image in images_of_all], scale)
                image = images_of_all[accelerator.process_index]
                place, generation = divmod(image, generations)
                row = fetched.read(numbers[place])
                images, _ = sampler.generate(
                    fetched,
                    [numbers[place]],
                    [(args.seed, STREAMS["evaluation"], 0, place, generation)],
                    sizes[numbers[place]],
                    args.num_inference_steps_eval,
                )
                self.scorer.add([row], images, state)
                artifacts.append(_grid_artifact(images[0], period, row))
                if place < MAX_PROMPTS and generation < MAX_IMAGES:
                    pictures.append((image, thumbnail(images[0])))
        order = padded.T.reshape(-1)  # process by process
        scores = self.scorer.finish(order, state)
        _, first = np.unique(order, return_index=True)
        gathered = accelerator.gather(torch.tensor(artifacts, dtype=torch.float64, device=accelerator.device)).cpu()
        return Evaluation(
            scores.rewards,
            self.rewards.total(scores.rewards),
            gathered[torch.from_numpy(first)],
            scores.extra,
            scores.metrics,
            dict(gather_object(pictures)) if processes > 1 else dict(pictures),
        )

    def baseline(
        self,
        rows: PromptRows,
        name: str,
        state: TrainerState,
        untrained: Callable[[], AbstractContextManager | None],
        may_load: bool,
    ) -> tuple[Evaluation | None, bool]:
        """
        Evaluate the model without training, once in a run. Every process calls it.

        Args:
            rows ([`PromptRows`]):
                Rows.
            name (`str`):
                Name of the evaluation, for the folder in which it is kept.
            state ([`~transformers.TrainerState`]):
                State of the run.
            untrained (`Callable`):
                Gives the context in which the model is untrained, or `None` if there is none anymore.
            may_load (`bool`):
                Whether to look in the folder. Of another run nothing is taken: its rewards may have been others of the
                same names.

        Returns:
            `tuple[Evaluation | None, bool]`: the baseline, and whether it was generated by this call.
        """
        key = self.baseline_key(rows)
        if key in self._baselines:
            return self._baselines[key], False
        folder = Path(self.args.output_dir) / "evaluation" / f"{name}_baseline"
        baseline = load_baseline(folder, key) if may_load else None
        is_new = baseline is None
        if is_new:
            weights = untrained()
            if weights is None:
                return None, False
            # As if nothing had been generated: a resumed run finds the baseline in the folder
            with weights, kept_random_state(self.sampler.accelerator.device):
                baseline = self.evaluate(rows, "Generating the baseline", state)
            if self.sampler.accelerator.is_main_process:
                save_baseline(folder, key, baseline)
        self._baselines[key] = baseline
        return baseline, is_new

    def shown(self, evaluation: Evaluation) -> ScoredImages:
        """Give the images of a sheet."""
        return ScoredImages(
            evaluation.pictures,
            self.args.num_generations_eval,
            self.rewards.names,
            evaluation.rewards,
            evaluation.extra,
        )

    def baseline_key(self, rows: PromptRows) -> str:
        """Digest all that a baseline depends on."""
        args = self.args
        settings = [
            self.base_model,
            self.rewards.names,
            self.rewards.weights.tolist(),
            args.seed,
            args.num_generations_eval,
            args.num_inference_steps_eval,
            args.guidance_scale,
            args.negative_prompt,
            args.vae_tiling,
            self.dtype,
            rows.inference_sizes,
            [rows.content(number) for number in range(len(rows))],  # rewards read any of their columns
        ]
        return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:16]


def _grid_artifact(image: Image.Image, period: int, row: dict) -> float:
    try:
        score = grid_artifact_score(image, period, row["rows"], row["cols"])
    except ValueError:  # panels of less than two patches show no grid
        return math.nan
    return score if math.isfinite(score) else math.nan  # an image of nothing but lines has no mean to be part of


def evaluation_metrics(
    names: list[str], generations: int, after: Evaluation, before: Evaluation | None
) -> dict[str, float]:
    """
    Means with 95 % intervals over prompts, and what they were before training.

    Args:
        names (`list[str]`):
            Names of the rewards.
        generations (`int`):
            Images of each prompt. Images of one prompt are drawn together by the bootstrap.
        after ([`Evaluation`]):
            With the trained weights.
        before ([`Evaluation`], *optional*):
            Without them.

    Returns:
        `dict[str, float]`: `reward`, `rewards/<name>/mean` and `grid_artifact`, each with `..._std` or `.../std`,
        `ci_low`, `ci_high`, and with `before` also `baseline`, `gain`, `gain_ci_low`, `gain_ci_high` (the mean
        difference of the same image with and without training). What cannot be said (the deviation of one image, the
        interval of one prompt) is left out. `rewards/<name>/failure_rate` is the share of images without the reward.
    """
    metrics: dict[str, float] = {}
    columns = [
        (f"rewards/{name}/", after.rewards[:, k], None if before is None else before.rewards[:, k])
        for k, name in enumerate(names)
    ]
    columns.append(("reward_", after.total, None if before is None else before.total))
    columns.append(("grid_artifact_", after.grid_artifacts, None if before is None else before.grid_artifacts))
    for prefix, values, baseline in columns:
        mean_name = prefix + "mean" if prefix.endswith("/") else prefix[:-1]
        _add_mean(metrics, mean_name, prefix + "ci", values, generations)
        if len(values) > 1 and (~torch.isnan(values)).sum() > 1 and not prefix.startswith("grid"):
            metrics[prefix + "std"] = values[~torch.isnan(values)].std().item()
        if baseline is not None:
            _add_mean(metrics, prefix + "baseline", None, baseline, generations)
            _add_mean(metrics, prefix + "gain", prefix + "gain_ci", values - baseline, generations)
    for k, name in enumerate(names):
        metrics[f"rewards/{name}/failure_rate"] = torch.isnan(after.rewards[:, k]).float().mean().item()
    return after.logged | metrics


def _add_mean(
    metrics: dict[str, float], name: str, interval: str | None, values: torch.Tensor, generations: int
) -> None:
    valid = ~torch.isnan(values)
    if not valid.any():
        return
    metrics[name] = values[valid].mean().item()
    if interval is None:
        return
    low, high = bootstrap_interval(values.tolist(), groups=[number // generations for number in range(len(values))])
    if not math.isnan(low):
        metrics[f"{interval}_low"], metrics[f"{interval}_high"] = low, high


def save_baseline(folder: Path, key: str, baseline: Evaluation) -> None:
    """
    Saves a baseline, so that a resumed run does not draw it again.

    Args:
        folder (`Path`):
            Folder.
        key (`str`):
            From [`baseline_key`].
        baseline ([`Evaluation`]):
            Baseline.
    """
    # Under another name first: where all weights are trained, a baseline that is cut short cannot be drawn again
    staged = folder.with_name(f"{folder.name}.saving")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    for number, picture in baseline.pictures.items():
        picture.save(staged / f"{number}.png")
    content = {
        "key": key,
        "rewards": [[None if math.isnan(value) else value for value in row] for row in baseline.rewards.tolist()],
        "total": [None if math.isnan(value) else value for value in baseline.total.tolist()],
        "grid_artifacts": [None if math.isnan(value) else value for value in baseline.grid_artifacts.tolist()],
        "extra": baseline.extra,
        "pictures": sorted(baseline.pictures),
    }
    (staged / "scores.json").write_text(json.dumps(content, default=str), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(staged, folder)


def load_baseline(folder: Path, key: str) -> Evaluation | None:
    """
    Loads a baseline that an earlier part of the run has saved. Every process calls it, and gets what the
    main one finds.

    Args:
        folder (`Path`):
            Folder.
        key (`str`):
            What it must have been drawn for.

    Returns:
        [`Evaluation`] or `None` when there is none, or one for something else.
    """
    found: list[Evaluation | None] = [None]
    try:
        content = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        if content["key"] == key:
            pictures = {}
            for number in content["pictures"]:
                with Image.open(folder / f"{number}.png") as picture:
                    pictures[number] = picture.convert("RGB")
            to_tensor = lambda values: torch.tensor(np.array(values, dtype=float))  # noqa: E731  (None becomes NaN)
            found = [
                Evaluation(
                    to_tensor(content["rewards"]).float(),
                    to_tensor(content["total"]).float(),
                    to_tensor(content["grid_artifacts"]),
                    content["extra"],
                    pictures=pictures,
                )
            ]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or it was cut short: it is drawn again
    broadcast_object_list(found)
    return found[0]
