# SPDX-License-Identifier: Apache-2.0
"""Stage 4, without people: rank instances by the construction of the grids, or with a judge."""

import itertools
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from datasets import Dataset
from tqdm.auto import tqdm

from ..data.columns import column_by_id
from ..data.rankings import default_question
from ..utils.files import digest, write_atomically
from ..utils.journals import read_lines
from .annotations import AUTOMATIC, append_annotation, check_annotator, checked_annotations


if TYPE_CHECKING:
    from ..rewards import Judge


logger = logging.getLogger(__name__)


def rank_automatically(instances: Dataset, panels: Dataset, folder: str | Path) -> int:
    """
    Rank all instances by construction: candidates from the reference's grid are more consistent than other candidates.

    Replaces earlier annotations of the annotator `automatic` in `folder`. Returns the number of instances.
    """
    seeds = column_by_id(panels, "seed")
    lines = []
    for row in instances.with_format(None):
        ranks = [1 if seeds[name] == seeds[row["reference"]] else 2 for name in row["candidates"]]
        record = {"annotator": AUTOMATIC, "instance": row["id"], "ranks": ranks, "digest": row["digest"]}
        lines.append(json.dumps(record) + "\n")
    write_atomically(Path(folder) / f"{AUTOMATIC}.jsonl", "".join(lines))
    return len(lines)


def judge_annotator_name(name: str) -> str:
    """Return a judge's name as annotator, the last part of its Hub id or directory."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(name.rstrip("/")).name)[:40].strip(".-") or "judge"


def rank_with_judge(
    instances: Dataset, panels: Dataset, prompts: Dataset, judge: "Judge", annotator: str, folder: str | Path
) -> dict[str, int]:
    """
    Rank instances with a judge, by P(Yes) that reference and candidate are consistent.

    Instances of a prompt are scored in one call, so that a judge in the process encodes each panel once. Annotations
    are saved after each prompt, and interrupted runs resume automatically. Instances that the judge could not score
    are left out and counted, and scored by the next run.

    Args:
        instances, panels, prompts ([`~datasets.Dataset`]):
            Outputs of the earlier stages. The question has the theme of the prompt, unless the judge was trained on a
            single question, which it is then asked.
        judge ([`~paco_trl.rewards.Judge`]):
            [`~paco_trl.PaCoReward`] in the process, or [`~paco_trl.rewards.ServedJudge`] on a server.
        annotator (`str`):
            Name of the judge as annotator.
        folder (`str` or `Path`):
            Directory of the annotations.

    Returns:
        `dict[str, int]`: `ranked` (now), `found` (from an earlier run) and `unanswered`.
    """
    from ..rewards.fingerprint import describe_scorer  # imports torch

    file = Path(folder) / f"{check_annotator(annotator)}.jsonl"
    existing_files = [file] if file.exists() else []
    scorer = digest(describe_scorer(judge))[:16]
    for _, record in read_lines(file) if existing_files else []:
        judge_name = record.get("judge", "a person")
        if (judge_name, record.get("scorer")) != (judge.name, scorer):
            conflict = f"{judge_name!r} {'with other weights or code' if judge_name == judge.name else 'already'}"
            raise ValueError(
                f"The annotator {annotator!r} is {conflict}. Rank under another name (`--annotator`), or delete "
                f"{file}."
            )
    annotations = checked_annotations(existing_files, instances)
    annotated_instances = {annotation.instance for annotation in annotations if not annotation.stale}
    rows = [row for row in instances.with_format(None) if row["id"] not in annotated_instances]
    paths = {name: image["path"] for name, image in column_by_id(panels, "image").items()}
    trained_question = getattr(judge, "question", None)
    questions = {row["id"]: trained_question or default_question(row) for row in prompts.with_format(None)}

    num_unanswered = 0
    with tqdm(
        total=len(instances), initial=len(annotated_instances), desc=f"Ranking by {annotator}", unit="instance"
    ) as bar:
        for prompt_id, group in itertools.groupby(rows, key=lambda row: row["prompt_id"]):
            prompt_rows = list(group)
            pairs = [(paths[row["reference"]], paths[name]) for row in prompt_rows for name in row["candidates"]]
            scores = iter(judge.score(pairs, [questions[prompt_id]] * len(pairs)))
            for row in prompt_rows:
                yes_scores: list = [next(scores) for _ in row["candidates"]]
                if None in yes_scores:
                    num_unanswered += 1
                    continue
                # Rank 1 is the highest score; equal scores are tied
                ranks = [1 + sum(other_score > score for other_score in yes_scores) for score in yes_scores]
                record = {"annotator": annotator, "instance": row["id"], "ranks": ranks, "scores": yes_scores}
                append_annotation(folder, record | {"judge": judge.name, "scorer": scorer, "digest": row["digest"]})
            bar.update(len(prompt_rows))
    if num_unanswered:
        logger.warning(f"{annotator} did not score {num_unanswered} of {len(rows)} instances. Rerun to score them.")
    return {"ranked": len(rows) - num_unanswered, "found": len(annotated_instances), "unanswered": num_unanswered}
