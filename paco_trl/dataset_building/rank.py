# SPDX-License-Identifier: Apache-2.0
"""Stage 4, without people: rank instances by the construction of the grids, or with a judge."""

import itertools
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from ..data.columns import by_id
from ..data.rankings import default_question
from ..utils.files import write_atomically
from ..utils.journals import read_lines
from .annotations import (
    AUTOMATIC,
    annotation_files,
    append_annotation,
    check_annotator,
    digests_by_instance,
    read_annotations,
)


if TYPE_CHECKING:
    from datasets import Dataset

    from ..rewards import Judge


logger = logging.getLogger(__name__)


def rank_automatically(instances: "Dataset", panels: "Dataset", folder: str | Path) -> int:
    """
    Rank all instances by construction: a candidate of the reference's grid is more consistent with it than any other.

    The annotator is `automatic`, whose earlier annotations in `folder` are replaced. Returns the number of instances.
    """
    seeds = by_id(panels, "seed")
    digests, lines = digests_by_instance(instances), []
    for instance in tqdm(instances.with_format(None), desc="Ranking by construction", unit="instance"):
        ranks = [1 if seeds[name] == seeds[instance["reference"]] else 2 for name in instance["candidates"]]
        record = {"annotator": AUTOMATIC, "instance": instance["id"], "ranks": ranks}
        lines.append(json.dumps(record | digests.get(instance["id"], {})))
    write_atomically(Path(folder) / f"{AUTOMATIC}.jsonl", "".join(f"{line}\n" for line in lines))
    return len(lines)


def judge_annotator_name(name: str) -> str:
    """Return the annotator's name of a judge: the last part of its Hub id or directory."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(name.rstrip("/")).name)[:40].strip(".-") or "judge"


def annotator_kinds(folder: str | Path, annotators: Sequence[str] | None = None) -> dict[str, str]:
    """Map annotators (all if `None`) to `"people"`, `"judge"` (its annotations have scores) or `"automatic"`."""
    if not any(Path(folder).glob("*.jsonl")):
        return {}
    kinds = {}
    for path in annotation_files(folder, annotators):
        has_scores = any("scores" in record for _, record in read_lines(path))
        kinds[path.stem] = AUTOMATIC if path.stem == AUTOMATIC else "judge" if has_scores else "people"
    return kinds


def _done_by_judge(folder: str | Path, annotator: str, judge: str, instances: "Dataset") -> set[str]:
    """Find the instances that a judge has ranked already, if the annotator's name is its own."""
    file = Path(folder) / f"{annotator}.jsonl"
    if annotator == AUTOMATIC:
        raise ValueError(f"{AUTOMATIC!r} is the name of rankings by construction. Give another `annotator`.")
    if not file.exists():
        return set()
    others = sorted({str(record.get("judge", "a person")) for _, record in read_lines(file)} - {judge})
    if others:
        raise ValueError(f"The annotator {annotator!r} is {others[0]!r} already, not {judge!r}. Choose another name.")
    return {annotation.instance for annotation in read_annotations([file], instances)}


def rank_with_judge(
    instances: "Dataset", panels: "Dataset", prompts: "Dataset", judge: "Judge", annotator: str, folder: str | Path
) -> dict[str, int]:
    """
    Rank the instances with a judge: by P(Yes) that the reference and the candidate are consistent.

    The instances of a prompt are scored in one call, so that a judge in the process encodes each panel once.
    Annotations are saved after each prompt, and interrupted runs resume automatically. Instances that the judge could
    not score are left out, counted, and scored by the next run.

    Args:
        instances, panels, prompts ([`~datasets.Dataset`]):
            Results of the earlier stages. The judge is given the theme of the prompts.
        judge ([`~paco_trl.rewards.Judge`]):
            [`~paco_trl.PaCoReward`] in the process, or [`~paco_trl.rewards.ServedJudge`] on a server.
        annotator (`str`):
            Name under which it annotates.
        folder (`str` or `Path`):
            Directory of the annotations.

    Returns:
        `dict[str, int]`: `ranked` (now), `found` (by an earlier run), `unanswered`.
    """
    from datasets import Image

    done = _done_by_judge(folder, check_annotator(annotator), judge.name, instances)
    digests = digests_by_instance(instances)
    rows = [row for row in instances.with_format(None) if row["id"] not in done]

    # Paths, or bytes if the panels came from the Hub, which are read by prompt
    stored = panels.cast_column("image", Image(decode=False)).select_columns(["id", "image"])
    rows_by_id = {name: row for row, name in enumerate(stored["id"][:])}
    questions = {row["id"]: default_question(row) for row in prompts.with_format(None)}

    unanswered = 0
    with tqdm(total=len(instances), initial=len(done), desc=f"Ranking by {annotator}", unit="instance") as bar:
        for prompt_id, group in itertools.groupby(rows, key=lambda row: row["prompt_id"]):
            same_prompt = list(group)
            names = {name for row in same_prompt for name in (row["reference"], *row["candidates"])}
            images = {name: stored[rows_by_id[name]]["image"] for name in names}
            images = {name: image["bytes"] or image["path"] for name, image in images.items()}
            pairs = [(images[row["reference"]], images[name]) for row in same_prompt for name in row["candidates"]]
            scores = iter(judge.score(pairs, [questions[prompt_id]] * len(pairs)))
            for row in same_prompt:
                yes: list = [next(scores) for _ in row["candidates"]]
                if None in yes:
                    unanswered += 1
                    continue
                # 1 for the highest score, equal ones tied
                ranks = [1 + sum(other > score for other in yes) for score in yes]
                record = {"annotator": annotator, "instance": row["id"], "ranks": ranks, "scores": yes}
                append_annotation(folder, record | {"judge": judge.name} | digests.get(row["id"], {}))
            bar.update(len(same_prompt))
    if unanswered:
        logger.warning(f"{annotator} did not score {unanswered} of {len(rows)} instances. Rerun to score them.")
    return {"ranked": len(rows) - unanswered, "found": len(done), "unanswered": unanswered}
