# SPDX-License-Identifier: Apache-2.0
"""Evaluation at full resolution, with and without the trained weights."""

import hashlib
import io
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import PeftModel
from PIL import Image
from torch import nn
from transformers import TrainerState

from ..checkpointing.weights import local_weights, use_weights
from ..data.columns import check_is_dataset
from ..evaluation import bootstrap_interval, grid_artifact_score
from ..plots.contact_sheet import MAX_IMAGES, MAX_PROMPTS, thumbnail
from ..rewards.image_statistics import image_metrics, measure_images
from ..rewards.limits import check_evaluation_scores
from ..rewards.scoring import RewardScorer
from ..rollout.encoder import ROWS_AHEAD
from ..rollout.policy import Policy
from ..rollout.prompt_rows import PromptRows, ResolvedRows
from ..rollout.rounds import Batch, Round, Sample, pad_batches
from ..rollout.sde import STREAMS
from ..utils.files import write_atomically
from ..utils.fingerprint import describe
from ..utils.logs import get_logger
from .paco_grpo_config import PaCoGRPOConfig
from .resuming import preserve_rng_state
from .run_settings import evaluation_settings


logger = get_logger(__name__)


@dataclass
class Evaluation:
    """Scores of a dataset's completions, the same on every process except for the thumbnails."""

    rewards: torch.Tensor  # (completions, rewards), group by group, NaN where one could not be computed
    total: torch.Tensor  # (completions,), weighted sum of the rewards
    grid_artifacts: torch.Tensor  # (completions,)
    extra: dict[str, list] = field(default_factory=dict)  # columns that rewards logged
    logged: dict[str, float] = field(default_factory=dict)  # metrics that rewards logged, and of the images
    pictures: dict[int, Image.Image] = field(default_factory=dict)  # thumbnails by completion, on the main process


@dataclass(frozen=True)
class Comparison:
    """An evaluation, and the evaluation of the untrained model (`eval_baseline`), if there is one."""

    after: Evaluation
    before: Evaluation | None
    # Until something is trained, both are the same object: the same weights and noise give the same images
    is_untrained: bool = False


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run: it is evaluated with its averaged weights, and as it was before training."""

    model: nn.Module
    average: dict[str, torch.Tensor] | None  # this process's part of the averaged weights; `None` without `ema_decay`
    zero_stage: int
    engine: nn.Module | None  # engine of ZeRO-3, or FSDP2's model, whose weights are gathered for generation
    state: TrainerState
    is_resumed: bool

    def with_average(self) -> AbstractContextManager:
        """Return the context in which the model has its averaged weights, if there is an average."""
        return use_weights(self.model, self.average, self.zero_stage)

    def without_training(self) -> AbstractContextManager | None:
        """Return the context in which the model is its base model, or `None` if those weights are gone."""
        if isinstance(self.model, PeftModel):
            return self.model.disable_adapter()
        if self.state.global_step == 0:
            return nullcontext()
        logger.warning(
            "All weights are trained, and the evaluation prompts were not generated before training: there is "
            "no baseline to compare with. Set `eval_on_start=True`, or `eval_strategy`."
        )
        return None

    def has_zero_adapter(self, accelerator: Accelerator) -> bool:
        """Return whether the adapter changes nothing yet: every LoRA `B` is 0. Collective: call on all ranks."""
        is_zero = _is_zero_adapter(local_weights(self.model, self.zero_stage))
        is_zero = is_zero and (self.average is None or _is_zero_adapter(self.average))
        verdict = torch.tensor([float(is_zero)], device=accelerator.device)
        return accelerator.gather(verdict).min().item() == 1.0


def _is_zero_adapter(weights: dict[str, torch.Tensor]) -> bool:
    matrices = [weight for name, weight in weights.items() if ".lora_B." in name]
    return bool(matrices) and not torch.stack([matrix.any() for matrix in matrices]).any()


class Evaluator:
    """Generate prompts with a model in training, score them, and keep the scores that it had before training."""

    def __init__(
        self,
        policy: Policy,
        scorer: RewardScorer,
        args: PaCoGRPOConfig,
        rows: Sequence[PromptRows],
        fingerprints: dict[str, str],
    ):
        self.policy = policy
        self.scorer = scorer
        self.rewards = scorer.rewards
        self.args = args
        self.fingerprints = fingerprints  # component -> digest of its loaded weights
        self._rows = list(rows)
        self._baselines: dict[str, Evaluation] = {}

    def rows_of(self, dataset: Dataset) -> ResolvedRows:
        """Return a dataset's rows for the pipeline, with the sizes of the current settings; read the trainer's once."""
        check_is_dataset(dataset, "eval_dataset")
        read = (rows for rows in self._rows if rows.original_dataset is dataset)
        rows = next(read, None) or PromptRows(dataset, self.args, "the evaluation dataset")
        return rows.resolve_for_pipeline(self.policy.pipeline, self.policy.family)

    def compare(self, rows: ResolvedRows, name: str, trained: TrainedModel) -> Comparison:
        """
        Evaluate the averaged weights, and with `eval_baseline` the model before training. Collective: call on all
        ranks.
        """
        num_known = len(self._baselines)
        before = self.ensure_baseline(rows, name, trained) if self.args.eval_baseline else None
        if before is not None:
            is_new = len(self._baselines) > num_known
            # The untrained weights of full fine-tuning are those at the start; an adapter may continue a trained one
            is_start = is_new and trained.state.global_step == 0 and not isinstance(trained.model, PeftModel)
            if is_start or trained.has_zero_adapter(self.policy.accelerator):
                return Comparison(before, before, is_untrained=True)
        with trained.with_average():
            return Comparison(self._evaluate(rows, "Evaluating", trained), before)

    def _evaluate(self, rows: ResolvedRows, description: str, trained: TrainedModel) -> Evaluation:
        """
        Generate and score all rows at their inference size. Collective: call on all ranks.

        The noise of an image depends on the seed, its row and its generation.
        """
        args = self.args
        policy = self.policy
        accelerator = policy.accelerator
        generations = args.num_generations_eval
        period = policy.family.size_multiple(policy.pipeline)
        self.rewards.check_group_size(generations, "num_generations_eval")
        eval_round = self._evaluation_round(rows)
        local_batches = eval_round.batches[accelerator.process_index]
        artifacts = []
        pictures = []
        measured = []
        progress = None if args.disable_tqdm or not accelerator.is_main_process else description
        policy.encoder.prefetch(rows, eval_round.row_indices_of(local_batches)[:ROWS_AHEAD])
        num_steps = args.num_inference_steps_eval
        with self.scorer.scoring(eval_round, trained.state) as scoring, policy.on_device(trained.engine):
            for completions in policy.rollout(eval_round, local_batches, num_steps, progress=progress):
                scoring.add(completions)
                measured += measure_images(completions)
                for completion in completions:
                    layout = rows.layouts[completion.row_index]
                    artifacts.append((completion.index, _grid_artifact(completion.image, period, *layout)))
                    if completion.group < MAX_PROMPTS and completion.generation < MAX_IMAGES:
                        pictures.append((completion.index, thumbnail(completion.image, len(completion.samples))))
                    completion.image = None
        scores = scoring.scores
        check_evaluation_scores(self.rewards, scores.rewards, args.max_excluded_images)
        logged = scores.metrics | image_metrics(measured, generations)
        by_completion = dict(gather_object(artifacts))
        all_artifacts = torch.tensor([artifact for _, artifact in sorted(by_completion.items())], dtype=torch.float64)
        total = self.rewards.total(scores.rewards)
        thumbnails = dict(gather_object(pictures))
        return Evaluation(scores.rewards, total, all_artifacts, scores.extra, logged, thumbnails)

    def _evaluation_round(self, rows: ResolvedRows) -> Round:
        """Plan an evaluation round with the same number of batches on every process (ZeRO-3)."""
        args = self.args
        family = self.policy.family
        processes = self.policy.accelerator.num_processes
        key = (args.seed, STREAMS["evaluation"], 0)
        eval_round = Round(rows, range(len(rows)), args.num_generations_eval, key, rows.inference_sizes)
        # A batch crosses prompts where one call of the pipeline can generate it
        crosses = family.has_fixed_prompt_length and rows.sources is None and not rows.is_anchored
        groups: dict[Any, list[tuple[int, Sample]]] = defaultdict(list)
        for position, sample in enumerate(eval_round.samples):
            groups[sample.size if crosses else sample.prompt_index].append((position, sample))
        size = args.per_device_eval_batch_size
        batches = [group[first : first + size] for group in groups.values() for first in range(0, len(group), size)]
        dealt = [Batch([sample for _, sample in batch]) for batch in sorted(batches, key=lambda batch: batch[0][0])]
        dealt = pad_batches(dealt, -(-len(dealt) // processes) * processes, dealt[0])
        eval_round.batches = [dealt[process::processes] for process in range(processes)]
        return eval_round

    def ensure_baseline(self, rows: ResolvedRows, name: str, trained: TrainedModel) -> Evaluation | None:
        """Return the evaluation of the untrained model, which is made once in a run; `None` if it is too late."""
        key = self.baseline_key(rows)
        if key in self._baselines:
            return self._baselines[key]
        path = Path(self.args.output_dir) / "evaluation" / f"{name}_baseline.pt"
        baseline = load_baseline(path, key) if trained.is_resumed else None
        if baseline is None:
            if (untrained := trained.without_training()) is None:
                return None
            # A resumed run, which loads the baseline instead, must have the same random state
            with untrained, preserve_rng_state(self.policy.accelerator.device):
                baseline = self._evaluate(rows, "Generating the baseline", trained)
            if self.policy.accelerator.is_main_process:
                save_baseline(path, key, baseline)
        self._baselines[key] = baseline
        return baseline

    def baseline_key(self, rows: ResolvedRows) -> str:
        """Compute a digest of everything that a baseline depends on."""
        settings = [
            self.fingerprints, describe(self.policy.family), evaluation_settings(self.args),
            list(self.rewards.descriptions.items()), rows.inference_sizes, describe(rows.dataset),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:16]


def _grid_artifact(image: Image.Image, period: int, rows: int, cols: int) -> float:
    try:
        score = grid_artifact_score(image, period, rows, cols)
        return score if math.isfinite(score) else math.nan
    except ValueError:  # panels of less than two patches
        return math.nan


def evaluation_metrics(
    names: list[str], generations: int, after: Evaluation, before: Evaluation | None
) -> dict[str, float]:
    """Compute means with 95 % intervals over prompts, and their gain over the baseline."""
    # Undefined values, such as the deviation of one image or the interval of one prompt, are left out
    metrics: dict[str, float] = {}

    def columns(evaluation: Evaluation) -> list[torch.Tensor]:
        return [*evaluation.rewards.T, evaluation.total, evaluation.grid_artifacts]

    # Prefix of the metrics of a column, and the name of its mean
    prefixes = [(f"rewards/{name}/", f"rewards/{name}/mean") for name in names]
    prefixes += [("reward_", "reward"), ("grid_artifact_", "grid_artifact")]
    baselines = [None] * len(prefixes) if before is None else columns(before)
    for (prefix, mean_name), values, baseline in zip(prefixes, columns(after), baselines, strict=True):
        _add_mean(metrics, mean_name, prefix + "ci", values, generations)
        is_known = ~torch.isnan(values)
        if is_known.sum() > 1 and mean_name != "grid_artifact":
            metrics[prefix + "std"] = values[is_known].std().item()
        if baseline is not None:
            _add_mean(metrics, prefix + "baseline", None, baseline, generations)
            gains = values - baseline
            _add_mean(metrics, prefix + "gain", prefix + "gain_ci", gains, generations)
            if not torch.equal(gains.isnan(), values.isnan() & baseline.isnan()):
                logger.warning(
                    f"`{prefix}gain` is over the {(~gains.isnan()).sum()} of {len(gains)} images that both models "
                    f"have a value for, and not the difference of `{mean_name}` and `{prefix}baseline`, each of its "
                    "own images."
                )
    for k, name in enumerate(names):
        metrics[f"rewards/{name}/failure_rate"] = torch.isnan(after.rewards[:, k]).float().mean().item()
    return after.logged | metrics


def metric_names(names: list[str]) -> list[str]:
    """List all metrics that an evaluation by these rewards can have."""
    values = torch.arange(3.0)
    example = Evaluation(values.unsqueeze(1).expand(-1, len(names)), values, values)
    return list(evaluation_metrics(names, 1, example, example))


def _add_mean(
    metrics: dict[str, float], name: str, interval: str | None, values: torch.Tensor, generations: int
) -> None:
    valid = ~torch.isnan(values)
    if valid.any():
        metrics[name] = values[valid].mean().item()
    if interval is None or not valid.any():
        return
    low, high = bootstrap_interval(values.tolist(), groups=[index // generations for index in range(len(values))])
    if not math.isnan(low):
        metrics[f"{interval}_low"], metrics[f"{interval}_high"] = low, high


def save_baseline(path: Path, key: str, baseline: Evaluation) -> None:
    """Save a baseline, so that a resumed run does not generate it again: with all weights trained it could not."""
    pictures = {number: torch.tensor(np.asarray(picture)) for number, picture in baseline.pictures.items()}
    logged = json.dumps([baseline.extra, baseline.logged], default=str)
    content = vars(baseline) | {"key": key, "pictures": pictures, "extra": logged, "logged": None}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def load_baseline(path: Path, key: str) -> Evaluation | None:
    """Load the baseline with this key on every process, or return `None`."""
    contents: list[dict | None] = [None]
    if PartialState().is_main_process and path.exists():
        content = torch.load(path, weights_only=True)
        if content.pop("key") == key:
            pictures = {number: Image.fromarray(pixels.numpy()) for number, pixels in content["pictures"].items()}
            extra, logged = json.loads(content["extra"])
            contents = [content | {"pictures": pictures, "extra": extra, "logged": logged}]
    broadcast_object_list(contents)
    return None if contents[0] is None else Evaluation(**contents[0])
