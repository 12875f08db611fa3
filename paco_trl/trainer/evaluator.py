# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the prompts drawn at full resolution, with the trained weights and without them."""

import hashlib
import json
import math
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from PIL import Image
from tqdm.auto import tqdm

from ..evaluation import bootstrap_interval, grid_artifact_score
from ..plots.contact_sheet import MAX_IMAGES, MAX_PROMPTS, thumbnail
from ..rewards import aggregate_rewards
from ..rewards.reward_calls import RewardError
from ..rollout.prompt_rows import PromptRows


if TYPE_CHECKING:
    from ..rewards.scorer import RewardScorer
    from .paco_grpo_config import PaCoGRPOConfig
    from .paco_grpo_trainer import PaCoGRPOTrainer


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


def draw_evaluation(
    trainer: "PaCoGRPOTrainer",
    scorer: "RewardScorer",
    weights: torch.Tensor,
    rows: PromptRows,
    description: str,
    row_numbers: list[int] | None = None,
    at_training_size: bool = False,
) -> Evaluation:
    """
    Draws and scores prompts by the pipeline's ODE, with the model as it is now. Every process calls it.

    The noise of an image is a function of the seed, its row and its number: the same in every evaluation of a run.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer.
        scorer ([`RewardScorer`]):
            Rewards.
        weights (`torch.Tensor` of shape `(rewards,)`):
            Their weights in the total.
        rows ([`PromptRows`]):
            Rows of the dataset.
        description (`str`):
            Title of the progress bar.
        row_numbers (`list[int]`, *optional*):
            Numbers of the rows to draw. If `None`, all.
        at_training_size (`bool`, *optional*, defaults to `False`):
            Whether they are drawn at the size they are trained at, not at their inference size.

    Returns:
        [`Evaluation`].
    """
    args, accelerator, generations = trainer.args, trainer.accelerator, trainer.args.num_generations_eval
    row_numbers = list(range(len(rows))) if row_numbers is None else row_numbers
    sizes = rows.training_sizes if at_training_size else rows.inference_sizes
    scale = args.resolution_scale if at_training_size else 1.0
    trainer.prompt_encoder.encode(rows, row_numbers, scale)

    # Each process draws the same number of images, as ZeRO-3 needs; what was added for that is not counted
    processes = accelerator.num_processes
    total = len(row_numbers) * generations
    padded = (np.arange(-(-total // processes) * processes) % total).reshape(-1, processes)
    mine, artifacts, pictures = [], [], []
    scorer.start()
    with trainer._rollout_components():
        for numbers in tqdm(
            padded.tolist(), desc=description, disable=args.disable_tqdm or not accelerator.is_main_process
        ):
            fetched = [row_numbers[number // generations] for number in numbers]
            encoded = trainer.prompt_encoder.fetch(rows, fetched, scale)
            number = numbers[accelerator.process_index]
            place, generation = divmod(number, generations)
            row_number = row_numbers[place]
            row = rows.row(row_number)
            images, _ = trainer.policy.draw(
                trainer._prompt_arguments([encoded[row_number]])[0],
                *sizes[row_number],
                args.num_inference_steps_eval,
                args.guidance_scale,
                noise_keys=[trainer._noise_key("evaluation", 0, place, generation)],
                sources=trainer._encoded_images(
                    trainer._prepare_images(rows.images_in(row), scale), encoded[row_number]
                ),
            )
            scorer.add([row], images, trainer.state)
            artifacts.append(_grid_artifact(images[0], trainer.size_multiple, row))
            if place < MAX_PROMPTS and generation < MAX_IMAGES:
                pictures.append((number, thumbnail(images[0])))
            mine.append(number)
    order = padded.T.reshape(-1)  # process by process
    scores = scorer.finish(order, trainer.state)
    _, first = np.unique(order, return_index=True)
    gathered = accelerator.gather(torch.tensor(artifacts, dtype=torch.float64, device=accelerator.device)).cpu()
    summed, _ = aggregate_rewards(scores.rewards, weights, "sum_then_normalize")
    return Evaluation(
        scores.rewards,
        summed,
        gathered[torch.from_numpy(first)],
        scores.extra,
        scores.metrics,
        dict(gather_object(pictures)) if accelerator.num_processes > 1 else dict(pictures),
    )


def _grid_artifact(image: Image.Image, period: int, row: dict) -> float:
    try:
        score = grid_artifact_score(image, period, row["rows"], row["cols"])
    except ValueError:  # panels of less than two patches show no grid
        return math.nan
    return score if math.isfinite(score) else math.nan  # an image of nothing but lines has no mean to be part of


def check_best_metric(args: "PaCoGRPOConfig", eval_dataset) -> None:
    """
    Checks that the metric by which checkpoints are compared will exist, before a model is loaded.

    Args:
        args ([`PaCoGRPOConfig`]):
            Settings.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Evaluation data.

    Raises:
        ValueError: with several evaluation datasets, the metric of none of them is named.
    """
    if not (args.load_best_model_at_end or args.save_strategy == "best") or not isinstance(eval_dataset, dict):
        return
    name = args.metric_for_best_model.removeprefix("eval_")
    if not any(name.startswith(f"{dataset}_") for dataset in eval_dataset):
        metrics = ", ".join(f"'{dataset}_{name}'" for dataset in eval_dataset)
        raise ValueError(
            f"`metric_for_best_model` is '{args.metric_for_best_model}', but there are {len(eval_dataset)} evaluation "
            f"datasets, and each has its own. Choose one of {metrics}."
        )


def check_scored(evaluation: Evaluation, names: list[str], is_needed: torch.Tensor, ceiling: float) -> None:
    """
    Stops where too much of an evaluation could not be scored: a mean of the rest would pass for the model's.

    Args:
        evaluation ([`Evaluation`]):
            Evaluation.
        names (`list[str]`):
            Names of the rewards.
        is_needed (`torch.Tensor` of shape `(rewards,)`, bool):
            Which rewards an image must have: those that are required and have a weight.
        ceiling (`float`):
            Largest share of images without one of these (`max_excluded_images`).

    Raises:
        RewardError: there are more, or all are.
    """
    missing = torch.isnan(evaluation.rewards[:, is_needed]).any(dim=1)
    if not missing.all() and missing.float().mean().item() <= ceiling:
        return
    counts = zip(names, torch.isnan(evaluation.rewards).sum(dim=0).tolist(), strict=True)
    raise RewardError(
        f"{missing.sum().item()} of {len(missing)} evaluation images could not be scored, more than "
        f"`max_excluded_images` = {ceiling:g} allows. Images without a value (None), by reward: "
        f"{', '.join(f'{name} {count}' for name, count in counts)}. Look at why None is returned."
    )


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


def baseline_key(trainer: "PaCoGRPOTrainer", names: list[str], rows: PromptRows) -> str:
    """
    A digest of all that a baseline depends on: with another one it is drawn anew.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer.
        names (`list[str]`):
            Names of the rewards.
        rows ([`PromptRows`]):
            Rows of the dataset.

    Returns:
        `str`.
    """
    args = trainer.args
    settings = [
        trainer.base_model,
        names,
        trainer.eval_reward_weights.tolist(),
        args.seed,
        args.num_generations_eval,
        args.num_inference_steps_eval,
        args.guidance_scale,
        args.negative_prompt,
        args.vae_tiling,
        str(trainer.compute_dtype),
        rows.inference_sizes,
        [rows.content(number) for number in range(len(rows))],  # rewards read any of their columns
    ]
    return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:16]


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
