# SPDX-License-Identifier: Apache-2.0
"""Evaluate judges on ConsistencyRank and other datasets of human rankings."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset

from ..data.columns import criteria_dict
from ..data.questions import criterion_question, plain_question
from ..data.rankings import check_ranking_columns, default_question
from ..utils.statistics import without_nan
from . import runs
from .metrics import list_order_metrics, ranking_metrics


TEMPLATES = ("theme", "criteria", "plain")
METRICS = ("accuracy", "kendall_tau", "spearman_rho", "top1_bottom1")
IMAGE_COLUMNS = ("reference", "candidates")


def _questions(row: Mapping[str, Any], template: str) -> list[list[str]]:
    """List the questions about each pair of a row: the score is the mean over the lists of the mean within each."""
    if template != "criteria":  # "theme" is the question that `rankings_to_pairs` trains on
        return [[default_question(row) if template == "theme" else plain_question()]]
    criteria = criteria_dict(row.get("criteria"))
    if not criteria:
        raise ValueError(f"The row with the prompt {row['prompt']!r} has no `criteria`. Use `template='theme'`.")
    return [[criterion_question(text) for text in texts.values()] for texts in criteria.values()]


def evaluate_rankings(
    scorer: Any,
    dataset: Dataset,
    template: str | None = None,
    output_path: str | Path | None = None,
    batch_size: int = 16,
    protocol: str = "default",
) -> dict[str, Any]:
    """
    Rank the candidates of each row by their consistency with the reference, and measure the agreement with people.

    Interrupted runs resume from `output_path`. A file of another scorer (also with other weights; a server's are not
    known), protocol, template or dataset is refused.

    `protocol="published"` repeats the script that measured the paper's figures, and only its results compare with
    [`published_tables`]`("ConsistencyRank")`: the question of `template="plain"` with `<img1>: ` and `<img2>: ` in front
    of the images; a score of 0 if no answer is among the 20 likeliest tokens; tau and rho of [`list_order_metrics`]; and
    transparency dropped, not put on white.

    Args:
        scorer (`Any`):
            Object with `score(images, prompts) -> list[float]` and a `name`: [`~paco_trl.PaCoReward`],
            [`ClipIScorer`] or your own. It gets RGB images (transparency on white, as in training),
            and for one row the same object as the reference in each pair, so that it can encode it once.
        dataset ([`~datasets.Dataset`]):
            Rankings: `reference` (image), `candidates` (list of images), `ranking` (indices of the candidates, best
            first), `prompt`, and optionally `theme`, `criteria`, `group` (rows that are not independent) and `id`.
        template (`str`, *optional*):
            Question about each pair. If `None`, `"theme"`, or with `protocol="published"` `"plain"`.

            - `"theme"`: whether style, logic and identity are consistent, given the theme of an image-set prompt (of
              another one the full text). The question of the published judge.
            - `"criteria"`: whether the pair meets each criterion; the mean of each dimension, then over dimensions.
            - `"plain"`: the question without the theme.
        output_path (`str` or `Path`, *optional*):
            File for the finished rows, JSON lines. If `None`, nothing is saved.
        batch_size (`int`, *optional*, defaults to `16`):
            Approximate number of pairs in a call of the scorer: rows are not split.
        protocol (`str`, *optional*, defaults to `"default"`):
            `"default"` or `"published"`. The latter requires a scorer with `top_logprobs` ([`~paco_trl.PaCoReward`],
            [`~paco_trl.rewards.ServedJudge`]), or one that reads no questions.

    Returns:
        `dict[str, Any]`: `settings`; `metrics`, of each metric the `mean` over the rows and its bootstrap `interval` over
        the groups; and `num_instances` (rows), `num_groups`, `num_undefined_correlations` (rows in which all scores are
        equal, without tau and rho), `num_ties` (rows in which two candidates have the same score) and `num_unanswered`
        (questions without an answer among the 20 likeliest tokens).

    Raises:
        ValueError: If a row is broken, the file is of another run, or the scorer gives no finite score for a pair.

    Example:

    ```python
    >>> from paco_trl import PaCoReward
    >>> from paco_trl.data import load_consistency_rank

    >>> judge = PaCoReward.from_pretrained("X-GenGroup/PaCo-Reward-7B", device="cuda")
    >>> dataset = load_consistency_rank("X-GenGroup/ConsistencyRank-Bench")
    >>> results = evaluate_rankings(judge, dataset, output_path="results/paco-reward-7b.jsonl")
    >>> results["metrics"]["accuracy"]["mean"]
    ```
    """
    runs.check_protocol(protocol)
    if template is None:
        template = "plain" if protocol == "published" else "theme"
    if template not in TEMPLATES:
        raise ValueError(f"`template` is {template!r}, but must be one of {', '.join(TEMPLATES)}.")
    if protocol == "published" and template != "plain":
        raise ValueError(f"`template` is {template!r}, but the published protocol asks that of 'plain'. Leave it out.")
    check_ranking_columns(dataset)
    dataset = dataset.with_format(None)  # plain Python values
    columns = ("prompt", "theme", "criteria", "ranking", "group", "id")
    columns = [name for name in columns if name in dataset.column_names]
    # A column `id` takes the place of the number
    rows = [{"id": str(row_number), **row} for row_number, row in enumerate(dataset.select_columns(columns))]
    questions = [_questions(row, template) for row in rows]
    parts = []
    for index, (row, asked) in enumerate(zip(rows, questions, strict=True)):
        texts = sum(asked, [])
        parts.append(
            runs.Part(index, index, [((position,), text) for position in range(len(row["ranking"])) for text in texts])
        )
    metrics_of = list_order_metrics if protocol == "published" else ranking_metrics

    def record(part: runs.Part, answers: list[float]) -> dict[str, Any]:
        row, rest = rows[part.key], iter(answers)
        by_candidate = [[[next(rest) for _ in texts] for texts in questions[part.key]] for _ in row["ranking"]]
        scores = [fmean(map(fmean, of_candidate)) for of_candidate in by_candidate]
        metrics = without_nan(metrics_of(scores, row["ranking"]))
        return {"index": part.key, "id": row["id"], "scores": scores, "ranking": row["ranking"], "metrics": metrics}

    settings = {"benchmark": "rankings", "protocol": protocol, "template": template}
    common, by_index = runs.score_parts(
        settings, scorer, dataset, columns, IMAGE_COLUMNS, output_path, "index", parts, batch_size, record
    )
    records = [by_index[index] for index in range(len(rows))]
    groups = [row["group"] for row in rows] if "group" in columns else None
    return {
        **common,
        "num_groups": len(set(groups)) if groups is not None else len(rows),
        "num_undefined_correlations": sum(record["metrics"]["kendall_tau"] is None for record in records),
        "num_ties": sum(len(set(record["scores"])) < len(record["scores"]) for record in records),
        # None becomes NaN
        "metrics": {
            name: runs.mean_and_interval([record["metrics"][name] for record in records], groups) for name in METRICS
        },
    }
