# SPDX-License-Identifier: Apache-2.0
"""The base model and adapters on your own prompts: generation and scores of their images."""

import asyncio
import hashlib
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image
from tqdm.auto import tqdm
from transformers import TrainerState

from ..generation.image_files import ImageCall, generate_missing
from ..generation.inference import PipelineSpec
from ..rewards.scoring import COMPLETIONS_PER_CALL, reward_arguments
from ..rewards.weighting import Rewards
from ..rollout import get_family
from ..rollout.encoder import ROWS_AHEAD
from ..rollout.kernels import keep_dtype_of_norms
from ..rollout.policy import Policy
from ..rollout.policy_building import wrap_pipeline
from ..rollout.prompt_rows import PromptRows, ResolvedRows
from ..rollout.rounds import Batch, Round
from ..rollout.sde import STREAMS
from ..utils.names import public_name
from .paired_results import ImageSystem, SampleKey, SystemEntry
from .score_store import open_scores


# Row of the prompt, and number of its image
ImageIndex = tuple[int, int]


@dataclass
class PromptSystem(ImageSystem[dict[ImageIndex, Path]]):
    """The base model or an adapter, with its images and their scores."""

    leak: str | None = None  # warns that it was trained on a prompt
    scores: dict[str, dict[SampleKey, float]] = field(default_factory=dict)  # by reward; NaN where it gave none

    def count_failures(self, reward: str) -> int:
        """Count the images without a score."""
        return sum(map(math.isnan, self.scores[reward].values()))

    def sum_scores(self) -> dict[SampleKey, float]:
        """Sum the rewards of each image; NaN if any gave none."""
        return {index: sum(values[index] for values in self.scores.values()) for index in self.images}

    def entry(self) -> SystemEntry:
        """Return the system as results have it, with the number of its images and of those without a score."""
        failures = {f"images without {name}": self.count_failures(name) for name in self.scores}
        return self.entry_with({"images": len(self.images)} | failures)


def find_leak(spec: PipelineSpec, rows: PromptRows) -> str | None:
    """Return a warning if the first training prompt of a model, by its record, is an evaluation prompt."""
    prompt = spec.card.prompt if spec.card else None
    first = prompt[0] if isinstance(prompt, list) else prompt
    row = next((image.row_index for image in rows.image_prompts if image.prompt == first), None)
    if row is None:
        return None
    name = public_name(spec.name)
    return f"{name} was trained on the prompt of row {row}, and maybe on others: it may be better on these alone."


def _describe_work(rows: ResolvedRows, files: Mapping[ImageIndex, Path], num_steps: int) -> str:
    """Describe what the missing images take, by size: `12 image(s) of 1024 x 1024, 20 steps`."""
    counts: Counter[tuple[int, int]] = Counter()
    for (row, _), path in files.items():
        counts[rows.inference_sizes[row]] += 0 if path.exists() else rows.images_per_row[row]
    sizes = [f"{count} image(s) of {height} x {width}" for (height, width), count in counts.most_common() if count]
    return f"{', '.join(sizes)}, {num_steps} steps"


def generate_images(
    spec: PipelineSpec,
    settings: dict[str, Any],
    prompt_rows: PromptRows,
    files: Mapping[ImageIndex, Path],
    accelerator: Accelerator,
    show_message: Callable[[str], None],
) -> None:
    """Generate the missing images of a system like `evaluate()` of training, from the same noise."""
    dtype = torch.bfloat16 if settings["bf16"] else torch.float32
    scale = settings["guidance_scale"]
    pipeline = spec.load("cpu")
    family = get_family(pipeline)
    model = pipeline.transformer
    rows = prompt_rows.resolve_for_pipeline(pipeline, family)
    if accelerator.is_main_process:
        show_message(_describe_work(rows, files, settings["num_inference_steps"]))
    keep_dtype_of_norms(model)
    # Frozen weights make room for the text encoders
    recording_pipeline = wrap_pipeline(pipeline, family, model.requires_grad_(False), dtype)
    policy = Policy(recording_pipeline, accelerator, scale, offload_embeddings=True)
    key = (settings["seed"], STREAMS["evaluation"], 0)
    sizes = rows.inference_sizes
    evaluation_round = Round(rows, range(len(rows)), settings["num_generations"], key, sizes)
    calls = [
        ImageCall({f"{row + 1}/{image + 1}": path}, size=sizes[row], num_panels=rows.images_per_row[row])
        for (row, image), path in files.items()
    ]

    def generate(number: int) -> dict:
        completion = evaluation_round.completions[number]
        with torch.no_grad():
            policy.encoder.prefetch(
                rows, [completion.row_index], ahead=range(completion.row_index + 1, len(rows))[:ROWS_AHEAD]
            )
            batches = [Batch([sample]) for sample in completion.samples]
            # The last image completes a set
            *_, (completed_set,) = policy.rollout(
                evaluation_round, batches, settings["num_inference_steps"], is_collective=False
            )
        image, completed_set.image = completed_set.image, None
        return dict(zip(calls[number].files, [image], strict=True))

    with policy.on_device():
        generate_missing(pipeline, calls, generate, f"images of {public_name(spec.name)}")
    accelerator.wait_for_everyone()


def score_images(
    rewards: Rewards, rows: PromptRows, files: Mapping[ImageIndex, Path], folder: Path
) -> dict[str, dict[SampleKey, float]]:
    """Score the images of a system with each reward; a missing score is NaN, and the next run requests it again."""
    indices = {f"{row}/{image}": (row, image) for row, image in files}
    digests = {key: hashlib.sha256(files[index].read_bytes()).hexdigest() for key, index in indices.items()}
    num_generations = len(indices) // len({row for row, _ in files})
    values: dict[str, dict[SampleKey, float]] = {}
    for index, name in enumerate(rewards.names):
        with (
            open_scores(folder, name, rewards.descriptions[name], digests) as store,
            asyncio.Runner() as runner,
            torch.no_grad(),
            tqdm(total=len(store.pending), desc=f"Scoring {name}", disable=not store.is_main_process) as progress,
        ):
            pending = set(store.pending)
            batches = [
                store.pending[i : i + COMPLETIONS_PER_CALL] for i in range(0, len(pending), COMPLETIONS_PER_CALL)
            ]
            if rewards.compares_group[index]:  # all images of a prompt
                batches = [list(keys) for _, keys in itertools.groupby(indices, key=lambda key: indices[key][0])]
                batches = [keys for keys in batches if not pending.isdisjoint(keys)]
            for keys in batches:
                batch = []
                for key in keys:
                    with Image.open(files[indices[key]]) as image:
                        batch.append({**rows.row(indices[key][0]), "completions": image.convert("RGB")})
                arguments = reward_arguments(
                    batch, num_generations, TrainerState(), log_extra=lambda *_: None, log_metric=lambda *_: None
                )
                scores = rewards.call(index, **arguments)
                scores = runner.run(scores) if inspect.iscoroutine(scores) else scores
                records = [
                    {"key": key, "score": None if score is None else float(score), "incomplete": score is None}
                    for key, score in zip(keys, scores, strict=True)
                    if key in pending
                ]
                store.append(*records)
                progress.update(len(records))
            score_by_key = {key: record["score"] for key, record in store.finish().items()}
        values[name] = {indices[key]: math.nan if score is None else score for key, score in score_by_key.items()}
    return values
