# SPDX-License-Identifier: Apache-2.0
"""Evaluation of judges on ConsistencyRank and other datasets of human rankings."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset

from ..data.columns import criteria_dict
from ..data.questions import criterion_question, plain_question
from ..data.rankings import check_ranking_columns, default_question
from ..utils.text import without_nan
from . import runs
from .metrics import list_order_metrics, ranking_metrics


TEMPLATES = ("theme", "criteria", "plain")
METRICS = ("accuracy", "kendall_tau", "spearman_rho", "top1_bottom1")
IMAGE_COLUMNS = ("reference", "candidates")


def _questions(row: Mapping[str, Any], template: str) -> list[list[str]]:
    """Return the questions about each pair of a row, whose score is the mean over lists of each list's mean."""
    if template != "criteria":  # "theme" is the question that `rankings_to_pairs` trains on
        return [[default_question(row) if template == "theme" else plain_question()]]
    criteria = criteria_dict(row.get("criteria"))
    if not criteria:
        raise ValueError(
            f"The row with the prompt {row['prompt']!r} has no `criteria`. Add them, or use `template='theme'`."
        )
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

    Interrupted runs resume from `output_path`. A file of another scorer (by name or weights; a server's weights are
    unknown), protocol, template or dataset is rejected.

    `protocol="published"` repeats the script behind the paper's figures, and only its results compare with
    [`published_tables`]`("ConsistencyRank")`. It asks the question of `template="plain"` with `<img1>: ` and `<img2>:
    ` before the images, scores 0 if no answer is among the 20 likeliest tokens, uses the tau and rho of
    [`list_order_metrics`], and drops transparency instead of putting it on white.

    Args:
        scorer (`Any`):
            Object with `score(images, prompts) -> list[float]` and a `name`: [`~paco_trl.PaCoReward`],
            [`ClipIScorer`] or your own. It gets RGB images (transparency on white, as in training). Within a row, the
            reference is the same object in all pairs, so that it can be encoded once.
        dataset ([`~datasets.Dataset`]):
            Rankings: `reference` (image), `candidates` (list of images), `ranking` (indices of the candidates, best
            first), `prompt`, and optionally `theme`, `criteria`, `group` (rows that are not independent) and `id`.
        template (`str`, *optional*):
            Question about each pair. If `None`, `"theme"`, or with `protocol="published"` `"plain"`.

            - `"theme"`: whether style, logic and identity are consistent, given the theme of an image-set prompt, or
              the full text of another prompt. The question of the published judge.
            - `"criteria"`: whether the pair meets each criterion, averaged within dimensions, then over them.
            - `"plain"`: the question without the theme.
        output_path (`str` or `Path`, *optional*):
            JSON lines file for finished rows. If `None`, nothing is saved.
        batch_size (`int`, *optional*, defaults to `16`):
            Approximate number of pairs per call of the scorer; rows are not split.
        protocol (`str`, *optional*, defaults to `"default"`):
            `"default"` or `"published"`. The latter requires a scorer with `top_logprobs` ([`~paco_trl.PaCoReward`],
            [`~paco_trl.rewards.ServedJudge`]), or one that ignores questions.

    Returns:
        `dict[str, Any]`: `settings`; `metrics`, with the `mean` of each over the rows and its bootstrap `interval`
        over the groups; and `num_instances` (rows), `num_groups`, `num_undefined_correlations` (rows without tau and
        rho because all scores are equal), `num_ties` (rows with equal scores of two candidates) and `num_unanswered`
        (questions without an answer among the 20 likeliest tokens).

    Raises:
        ValueError: If a row is broken, the file belongs to another run, or a score is not finite.

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
        raise ValueError(f"`template` is {template!r}, but the published protocol uses 'plain'. Leave it out.")
    check_ranking_columns(dataset)
    dataset = dataset.with_format(None)  # plain Python values
    columns = ("prompt", "theme", "criteria", "ranking", "group", "id")
    columns = [name for name in columns if name in dataset.column_names]
    # A column `id` replaces the row number
    rows = [{"id": str(row_number), **row} for row_number, row in enumerate(dataset.select_columns(columns))]
    questions = [_questions(row, template) for row in rows]
    items = []
    for index, (row, question_lists) in enumerate(zip(rows, questions, strict=True)):
        texts = sum(question_lists, [])
        items.append(
            runs.RecordQuestions(
                index, index, [((position,), text) for position in range(len(row["ranking"])) for text in texts]
            )
        )
    metrics_of = list_order_metrics if protocol == "published" else ranking_metrics

    def record(item: runs.RecordQuestions, answers: list[float]) -> dict[str, Any]:
        row = rows[item.key]
        remaining_answers = iter(answers)
        answers_by_candidate = [
            [[next(remaining_answers) for _ in texts] for texts in questions[item.key]] for _ in row["ranking"]
        ]
        scores = [fmean(map(fmean, answer_lists)) for answer_lists in answers_by_candidate]
        metrics = without_nan(metrics_of(scores, row["ranking"]))
        return {"index": item.key, "id": row["id"], "scores": scores, "ranking": row["ranking"], "metrics": metrics}

    settings = {"benchmark": "rankings", "protocol": protocol, "template": template}
    common, by_index = runs.score_records(
        settings, scorer, dataset, columns, IMAGE_COLUMNS, output_path, "index", items, batch_size, record
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
