# SPDX-License-Identifier: Apache-2.0
"""Score images of any prompts with rewards, and compute the figures of one system or two."""

import asyncio
import hashlib
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .score_store import open_scores
from .statistics import Line, Unit, table


if TYPE_CHECKING:
    from ..rewards.runner import RewardRunner
    from ..rollout.prompt_rows import PromptRows


# Row of the prompt and number of the image
Place = tuple[int, int]


def image_files(folder: Path, num_prompts: int, num_generations: int) -> dict[Place, Path]:
    """Name the files of all images, prompt by prompt."""
    places = [(row, image) for row in range(num_prompts) for image in range(num_generations)]
    return {(row, image): folder / str(row) / f"{image}.png" for row, image in places}


def score_images(
    rewards: "RewardRunner", rows: "PromptRows", files: Mapping[Place, Path], folder: Path
) -> dict[str, dict[Unit, float]]:
    """Score the images of a system with each reward, NaN where one gives none; the next run asks about it again."""
    import torch
    from PIL import Image
    from tqdm.auto import tqdm
    from transformers import TrainerState

    from ..data import split_grid
    from ..rewards.runner import IMAGES_PER_CALL

    places = {f"{row}/{image}": (row, image) for row, image in files}
    digests = {key: hashlib.sha256(files[place].read_bytes()).hexdigest() for key, place in places.items()}
    values: dict[str, dict[Unit, float]] = {}
    for index, name in enumerate(rewards.names):
        with (
            open_scores(folder, name, rewards.descriptions[name], digests) as store,
            asyncio.Runner() as runner,
            torch.no_grad(),
            tqdm(total=len(store.pending), desc=f"Scoring {name}", disable=not store.is_main_process) as progress,
        ):
            pending = set(store.pending)
            batches = [store.pending[i : i + IMAGES_PER_CALL] for i in range(0, len(pending), IMAGES_PER_CALL)]
            if rewards.compares_group[index]:  # all images of a prompt
                batches = [list(keys) for _, keys in itertools.groupby(places, key=lambda key: places[key][0])]
                batches = [keys for keys in batches if not pending.isdisjoint(keys)]
            for keys in batches:
                batch = []
                for key in keys:
                    row = rows.row(places[key][0])
                    with Image.open(files[places[key]]) as image:
                        panels = split_grid(image.convert("RGB"), row["rows"], row["cols"])
                        batch.append({**row, "completions": image.convert("RGB"), "panel_images": panels})
                columns = {each: [row[each] for row in batch] for each in batch[0] if each != "prompt"}
                scores = rewards.call(
                    index, prompts=[row["prompt"] for row in batch], completion_ids=None, trainer_state=TrainerState(),
                    num_generations=len(places) // len({row for row, _ in files}),
                    log_extra=lambda *_: None, log_metric=lambda *_: None, **columns,
                )  # fmt: skip
                scores = runner.run(scores) if inspect.iscoroutine(scores) else scores
                records = [
                    {"key": key, "score": None if score is None else float(score), "incomplete": score is None}
                    for key, score in zip(keys, scores, strict=True)
                    if key in pending
                ]
                store.append(*records)
                progress.update(len(records))
            found = {key: record["score"] for key, record in store.finish().items()}
        values[name] = {places[key]: math.nan if score is None else score for key, score in found.items()}
    return values


def own_results(
    dataset: str, rows: "PromptRows", names: list[str], systems: Sequence[dict[str, Any]], sources: Path
) -> dict[str, Any]:
    """Compute the mean of each reward and of their sum, with intervals over prompts and the paired gain."""
    columns = [dict(system["scores"]) for system in systems]
    labels = {name: name for name in names} | ({"sum": "sum of the rewards"} if len(names) > 1 else {})
    described, alerts = [], []
    for system, values in zip(systems, columns, strict=True):
        total, name = len(system["files"]), system["name"]
        failed = {each: sum(map(math.isnan, values[each].values())) for each in names}
        counts = {"images": total} | {f"images without {each}": count for each, count in failed.items()}
        described.append({each: system[each] for each in ("role", "name", "settings")} | {"counts": counts})
        alerts += [
            f"{each} gave no score for {count} of {total} images of {name}, which are left out of its figures."
            for each, count in failed.items()
            if count
        ]
        if "sum" in labels:
            values["sum"] = {place: sum(values[each][place] for each in names) for place in system["files"]}
    lines = [
        Line(name, label, "dimension" if name in names else "average", "", [name]) for name, label in labels.items()
    ]
    known = rows.dataset["id"] if "id" in rows.dataset.column_names else None
    several = len(systems[0]["files"]) > len(rows)
    sets = [
        {
            "key": (f"prompt {row + 1}" if known is None else str(known[row])) + f", image {image + 1}" * several,
            "prompt": rows.prompts[row],
            "source": None if rows.sources is None else str(sources / f"{row}.png"),
            "pictures": [[str(system["files"][row, image])] for system in systems],
            "panels": list(rows.layouts[row]),
            "scores": [{name: values[name][row, image] for name in labels} for values in columns],
        }
        for row, image in systems[0]["files"]
    ]
    leakage = "An adapter that was trained on these prompts can be better on them alone: this was not checked."
    noise = "Image k of a prompt starts from the same noise for all models, that of `evaluate()` in training with this seed."
    return {
        "benchmark": None, "dataset": dataset, "num_prompts": len(rows), "systems": described, "scorers": {},
        "tables": [table("Rewards", lines, columns)], "breakdowns": [], "alerts": alerts,
        "notes": [noise, leakage], "sets": sets, "headline": list(labels)[-1],
    }  # fmt: skip
