# SPDX-License-Identifier: Apache-2.0
"""Evaluation of judges on labeled pairs, such as those that were held out of a judge's training."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from ..data import check_pair_columns, decision_of
from ..data.pairs import content_text, iter_texts
from .metrics import auroc, expected_calibration_error
from .scoring import RecordQuestions, ScoringRun, mean_over_rows


def evaluate_pairs(
    scorer: Any, dataset: Dataset, output_path: str | Path | None = None, batch_size: int = 16
) -> dict[str, Any]:
    """
    Score pairs, and compare the scores with their labels.

    Interrupted runs resume from `output_path`, as in [`evaluate_rankings`].

    Args:
        scorer (`Any`), output_path (`str` or `Path`, *optional*), batch_size (`int`, *optional*, defaults to `16`):
            See [`evaluate_rankings`]. Scores must be probabilities.
        dataset ([`~datasets.Dataset`]):
            Pairs in the format of [`~paco_trl.PaCoRewardTrainer`]: `images`, `prompt`, `completion`.

    Returns:
        `dict[str, Any]`: `settings`, `num_instances` and `num_unanswered` as in [`evaluate_rankings`], and `metrics`:
        `accuracy` (`mean` and bootstrap `interval`), the fraction of pairs whose more probable answer is the label,
        and `auroc` and `ece` (`mean`). AUROC is NaN if all pairs have the same label.

    Raises:
        ValueError: If a row is broken, the file belongs to another run, or a score is not a probability.
    """
    check_pair_columns(dataset, "dataset")
    dataset = dataset.with_format(None)  # plain Python values
    questions, labels = [], []
    for row, prompt, completion in iter_texts(dataset):
        if len(prompt) > 1:
            raise ValueError(
                f"`prompt` of row {row} has a system turn, but a judge is scored by a question alone. Leave it out."
            )
        questions.append(content_text(prompt[0]["content"]))
        labels.append(decision_of(completion) == "Yes")
    items = [RecordQuestions(index, index, [((0,), text)]) for index, text in enumerate(questions)]
    settings = {"benchmark": "pairs", "protocol": "default"}
    run = ScoringRun(scorer, dataset, settings, ("prompt", "completion"), ("images",), output_path, batch_size)
    records = run.score("index", items, lambda item, scores: {"index": item.key, "score": scores[0]})
    scores = [records[index]["score"] for index in range(len(questions))]
    correct = [float((score > 0.5) == label) for score, label in zip(scores, labels, strict=True)]
    return {
        **run.summarize(),
        "metrics": {
            "accuracy": mean_over_rows(correct, None),
            "auroc": {"mean": auroc(scores, labels)},
            "ece": {"mean": expected_calibration_error(scores, labels)},
        },
    }
