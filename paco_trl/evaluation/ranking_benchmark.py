# SPDX-License-Identifier: Apache-2.0
"""Evaluation of judges on human rankings: of images by their consistency with a reference, and of pairs of edits."""

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from datasets import Dataset

from ..data.columns import check_values, criteria_dict
from ..data.questions import criterion_question, plain_question, question
from ..data.rankings import check_ranking_columns, default_question
from ..utils.text import is_text, shorten, without_nan
from .metrics import list_order_metrics, ranking_metrics
from .scoring import RecordQuestions, ScoringRun, check_protocol, mean_over_rows, read_traits


logger = logging.getLogger(__name__)

_TEMPLATES = ("theme", "criteria", "plain")
_METRICS = ("accuracy", "kendall_tau", "spearman_rho", "top1_bottom1")
IMAGE_COLUMNS = ("reference", "candidates")
_COLUMNS = ("prompt", "theme", "criteria", "ranking", "group", "id")
_COLUMNS += ("dimension", "task_type", "candidate_ids", "is_tie")  # of pairs of edits
# Protocol -> benchmarks of pairs of edits for which it exists
EDIT_BENCHMARKS = {
    "default": ("edits", "edit_reward", "vc_reward", "editreward_compass", "mmrb2"),
    "published": ("edit_reward",),
}
_DIMENSIONS = ("prompt_following", "consistency", "overall")
# Protocol -> question of each dimension, from the editing reward or the published evaluation. `overall` asks both
_QUESTIONS = {
    "default": {"prompt_following": "edit_following", "consistency": "edit_consistency"},
    "published": {"prompt_following": "edit_reward_bench_following", "consistency": "edit_reward_bench_consistency"},
}
# Tokens that count as Yes and as No in the published script
_PUBLISHED_ANSWERS = ("yes", "Yes", "YES", "y", "Y"), ("no", "No", "NO", "n", "N")
# Scores that differ by less are a tie (EditReward-Compass)
_TIE = 1e-5


def evaluate_rankings(
    scorer: Any,
    dataset: Dataset,
    template: str | None = None,
    output_path: str | Path | None = None,
    batch_size: int = 16,
    protocol: str = "default",
    benchmark: str | None = None,
) -> dict[str, Any]:
    """
    Score the candidates of each row by their consistency with the reference, and measure the agreement with people.

    Rows with a `dimension` are pairs of edits: the reference is the source image, the prompt the instruction. An edit,
    first resized to its source, is scored by the editing reward's question of the dimension, for `overall` by the
    geometric mean of both questions.

    Interrupted runs resume from `output_path`. A file of another scorer (by name or weights; a server's weights are
    unknown), protocol, template or dataset is rejected.

    `protocol="published"` repeats the scripts behind the paper's figures, and only its results compare with
    [`published_tables`]. `<img1>: ` and `<img2>: ` are before the images, a score is 0 if no answer is among the 20
    likeliest tokens, and transparency is dropped instead of put on white. For ConsistencyRank, the judge is asked the
    question of `template="plain"`, and tau and rho are those of [`list_order_metrics`]. For EditReward-Bench, it is
    asked two questions for a one-word answer, with P(Yes) summed over yes, Yes, YES, y and Y, and P(No) over no, No,
    NO, n and N. (The script also counts the token that it samples at random.)

    Args:
        scorer (`Any`):
            Object with `score(images, prompts) -> list[float]` and a `name`: [`~paco_trl.PaCoReward`],
            [`ClipIScorer`] or your own. It gets RGB images (transparency on white, as in training). Within a row, the
            reference is the same object in all pairs, so that it can be encoded once.

            A judge of edits with a prompt of its own ([`ComparingJudge`], [`~paco_trl.rewards.WordsJudge`]) has more
            attributes: `ScorerTraits` in `evaluation/scoring.py` lists all.
        dataset ([`~datasets.Dataset`]):
            Rankings: `reference` (image), `candidates` (list of images), `ranking` (indices of the candidates, best
            first), `prompt`, and optionally `theme`, `criteria`, `group` (rows that are not independent) and `id`.

            Pairs of edits also have `dimension` (`prompt_following`, `consistency` or `overall`), and optionally
            `task_type`, `candidate_ids` (two names; an edit is scored once, even if several rows have its name) and
            `is_tie` (whether people see a tie: scores must differ by less than 1e-5).
        template (`str`, *optional*):
            Question about each pair; not for edits. If `None`, the question that the judge was trained on, if its
            `paco_trl.json` records a single one, otherwise `"theme"`; with `protocol="published"` `"plain"`.

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
        benchmark (`str`, *optional*):
            Name of the benchmark in [`load_rankings`]. If `None`, `"rankings"` or, with `dimension`, `"edits"`.
            As in the benchmarks' scripts, accuracies are averaged over rows, but with `"edit_reward"` over task types.

    Returns:
        `dict[str, Any]`: `settings`, `num_instances` (rows), `num_groups` and `num_unanswered` (questions without an
        answer among the 20 likeliest tokens, or a readable one). Of rankings `metrics`, with the `mean` of each over
        the rows and its bootstrap `interval` over the groups; `num_undefined_correlations` (rows without tau and rho
        because all scores are equal) and `num_ties` (rows with equal scores of two candidates). Of pairs of edits
        `num_keys` (distinct edits) and, in `dimensions`, for each dimension in the dataset `strict` and `geq` (`mean`
        and `interval`), `num_rows`, `num_ties` and `task_types`. `strict` is the fraction of rows whose preferred edit
        scores higher; `geq` also counts ties.

    Raises:
        ValueError: If a row is broken, an image cannot be read, an argument does not fit the dataset, the file belongs
            to another run, or a score is not finite, or negative for `overall`.

    Example:

    ```python
    >>> from paco_trl import PaCoReward
    >>> from paco_trl.evaluation import evaluate_rankings, load_rankings

    >>> judge = PaCoReward.from_pretrained("X-GenGroup/PaCo-Reward-7B", device="cuda")
    >>> dataset = load_rankings("rankings", "X-GenGroup/ConsistencyRank-Bench")
    >>> results = evaluate_rankings(judge, dataset, output_path="results/paco-reward-7b.jsonl")
    >>> results["metrics"]["accuracy"]["mean"]
    ```
    """
    check_protocol(protocol)
    check_ranking_columns(dataset)
    dataset = dataset.with_format(None)  # plain Python values
    has_edits = "dimension" in dataset.column_names
    benchmark = benchmark or ("edits" if has_edits else "rankings")
    names = EDIT_BENCHMARKS[protocol] if has_edits else ("rankings",)
    if benchmark not in names:
        kind = f"`protocol` {protocol!r} and {'a' if has_edits else 'no'} column `dimension`"
        raise ValueError(f"`benchmark` is {benchmark!r}, but with {kind} must be {' or '.join(names)}.")
    template = _template_of(scorer, template, protocol, has_edits)
    columns = [name for name in _COLUMNS if name in dataset.column_names]
    rows = [_with_defaults(index, row) for index, row in enumerate(dataset.select_columns(columns))]
    groups = [row["group"] for row in rows]
    settings = {"benchmark": benchmark, "protocol": protocol, **({} if template is None else {"template": template})}
    run = ScoringRun(scorer, dataset, settings, columns, IMAGE_COLUMNS, output_path, batch_size)
    if has_edits:
        _check_edits(dataset, rows)
        measured = _edit_results(rows, _score_edits(run, rows), groups, is_macro=benchmark == "edit_reward")
    else:
        measured = _ranking_results(_score_rows(run, rows, template or "theme"), groups)
    return {**run.summarize(), "num_groups": len(set(groups)), **measured}


def _template_of(scorer: Any, template: str | None, protocol: str, has_edits: bool) -> str | None:
    """Return the template, or the judge's own question or prompt; `None` if each dimension has its question."""
    traits = read_traits(scorer)
    if has_edits:
        if template is not None:
            raise ValueError(f"`template` is {template!r}, but pairs of edits have their own questions. Leave it out.")
        if traits.judges_edits:
            return traits.template
        _warn_if_untrained(scorer.name, traits.question, "about edits")
        return None
    if traits.judges_edits:
        raise ValueError(f"The scorer {scorer.name!r} judges edits, but the dataset has no `dimension`. Add it.")
    if template is None:
        template = "plain" if protocol == "published" else traits.question or "theme"
        if template == traits.question:
            return template
    if template not in (names := ("plain",) if protocol == "published" else _TEMPLATES):
        raise ValueError(f"`template` is {template!r}, but with the {protocol} protocol must be {' or '.join(names)}.")
    _warn_if_untrained(scorer.name, traits.question, f"the question of the template '{template}'")
    return template


def _warn_if_untrained(name: str, trained_question: str | None, what: str) -> None:
    """Warn if the judge was trained on a single question, and is asked another one."""
    if trained_question is not None:
        message = f"The judge {name!r} is asked {what}, but was only trained on the question"
        logger.warning(f"{message} {trained_question!r}.")


def _with_defaults(index: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its optional columns."""
    ids = [f"{index}/{position}" for position in range(len(row["ranking"]))]
    defaults = {"id": str(index), "group": index, "candidate_ids": ids, "task_type": "", "is_tie": False}
    # A row of JSON lines may lack columns of other rows
    return defaults | {name: value for name, value in row.items() if value is not None or name not in defaults}


def _questions(row: Mapping[str, Any], template: str) -> list[list[str]]:
    """Return lists of questions about each pair of a row. A score is the mean over lists of the mean in a list."""
    if template == "theme":  # the question that `rankings_to_pairs` trains on
        return [[default_question(row)]]
    if template != "criteria":
        return [[plain_question() if template == "plain" else template]]
    criteria = criteria_dict(row.get("criteria"))
    if not criteria:
        raise ValueError(
            f"The row with the prompt {row['prompt']!r} has no `criteria`. Add them, or use `template='theme'`."
        )
    return [[criterion_question(text) for text in texts.values()] for texts in criteria.values()]


def _score_rows(run: ScoringRun, rows: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Score the candidates of each row by the questions of the template, and compute its metrics."""
    questions = [_questions(row, template) for row in rows]
    items = []
    for index, row in enumerate(rows):
        texts = sum(questions[index], [])
        asked = [((position,), text) for position in range(len(row["ranking"])) for text in texts]
        items.append(RecordQuestions(index, index, asked))
    metrics_of = list_order_metrics if run.protocol == "published" else ranking_metrics

    def to_record(item: RecordQuestions, answers: list[float]) -> dict[str, Any]:
        row = rows[item.key]
        rest = iter(answers)
        scores = [fmean(fmean(islice(rest, len(texts))) for texts in questions[item.key]) for _ in row["ranking"]]
        metrics = without_nan(metrics_of(scores, row["ranking"]))
        return {"index": item.key, "id": row["id"], "scores": scores, "ranking": row["ranking"], "metrics": metrics}

    records = run.score("index", items, to_record)
    return [records[index] for index in range(len(rows))]


def _ranking_results(records: list[dict[str, Any]], groups: Sequence[Hashable]) -> dict[str, Any]:
    return {
        "num_undefined_correlations": sum(record["metrics"]["kendall_tau"] is None for record in records),
        "num_ties": sum(len(set(record["scores"])) < len(record["scores"]) for record in records),
        # None becomes NaN
        "metrics": {
            name: mean_over_rows([record["metrics"][name] for record in records], groups) for name in _METRICS
        },
    }


def _check_edits(dataset: Dataset, rows: list[dict[str, Any]]) -> None:
    """Check the columns that only pairs of edits have."""
    check_values(dataset, "dataset", "dimension", _DIMENSIONS.__contains__, f"one of {', '.join(_DIMENSIONS)}")
    check_values(dataset, "dataset", "task_type", lambda value: isinstance(value, str), "a text")
    check_values(dataset, "dataset", "is_tie", lambda value: isinstance(value, bool | None), "true or false")
    check_values(dataset, "dataset", "ranking", lambda value: len(value) == 2, "of two edits")
    check_values(
        dataset, "dataset", "candidate_ids",
        lambda ids: isinstance(ids, list) and len({*filter(is_text, ids)}) == len(ids) == 2, "two different names",
    )  # fmt: skip
    prompt_of: dict[str, str] = {}
    for index, row in enumerate(rows):
        if any(prompt_of.setdefault(name, row["prompt"]) != row["prompt"] for name in row["candidate_ids"]):
            ids = shorten(row["candidate_ids"])
            raise ValueError(f"Row {index} has names of an earlier row with another prompt, {ids}. Rename them.")


def _score_edits(run: ScoringRun, rows: list[dict[str, Any]]) -> list[Sequence[float]]:
    """Score both candidates of each row in one comparison, or each candidate by the questions of all its rows."""
    if run.traits.compares:
        items = [RecordQuestions(index, index, [((0, 1), row["prompt"])]) for index, row in enumerate(rows)]
        records = run.score("row", items, lambda item, scores: {"row": item.key, "first": scores[0]})
        firsts = [records[index]["first"] for index in range(len(rows))]
        return [(math.nan, math.nan) if first is None else (first, 1 - first) for first in firsts]
    rates = run.traits.rates
    question_names = _QUESTIONS[run.protocol]
    items, names_of = [], {}
    for candidate, (index, position, dimensions) in _uses(rows).items():
        prompt = rows[index]["prompt"]
        names_of[candidate] = [name for name in question_names if dimensions & {name, "overall"}]
        texts = [question(question_names[name], instruction=prompt) for name in names_of[candidate]]
        asked = [((position,), text) for text in ([prompt] if rates else texts)]
        items.append(RecordQuestions(candidate, index, asked))

    def to_record(item: RecordQuestions, scores: Sequence[Any]) -> dict[str, Any]:
        by_name = scores[0] if rates else dict(zip(names_of[item.key], scores, strict=True))
        return {"key": item.key, "scores": by_name}

    records = run.score("key", items, to_record, _PUBLISHED_ANSWERS, resizes=True)
    scores_of = {candidate: found["scores"] for candidate, found in records.items()}
    return [[_edit_score(row["dimension"], scores_of[name]) for name in row["candidate_ids"]] for row in rows]


def _uses(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int, set[str]]]:
    """Return the first row and position of each candidate, and the dimensions of its rows."""
    uses: dict[str, tuple[int, int, set[str]]] = {}
    for index, row in enumerate(rows):
        for position, candidate in enumerate(row["candidate_ids"]):
            uses.setdefault(candidate, (index, position, set()))[2].add(row["dimension"])
    return uses


def _edit_score(dimension: str, scores: dict[str, float] | None) -> float:
    """Return the score of a dimension; `overall` is sqrt(consistency * prompt_following) (PaCo-RL, Part 2)."""
    if scores is None or "overall" in scores:  # of a judge that rates
        return math.nan if scores is None else scores.get(dimension, scores["overall"])
    if dimension != "overall":
        return scores[dimension]
    if min(scores.values()) < 0:
        raise ValueError(f"The scores are {scores}, but a geometric mean requires scores >= 0. Leave `overall` out.")
    return math.sqrt(scores["consistency"] * scores["prompt_following"])


def _hits(row: Mapping[str, Any], scores: Sequence[float]) -> tuple[float, float]:
    """Return whether scores agree with people, first strictly, then with ties counted."""
    preferred, rejected = (scores[index] for index in row["ranking"])
    if row["is_tie"]:
        return (float(abs(preferred - rejected) < _TIE),) * 2
    return float(preferred > rejected), float(preferred >= rejected)


def _edit_results(
    rows: list[dict[str, Any]], scores: list[Sequence[float]], groups: list[Hashable], is_macro: bool
) -> dict[str, Any]:
    table = pd.DataFrame(map(_hits, rows, scores), columns=["strict", "geq"])
    table["dimension"], table["task_type"] = zip(*((row["dimension"], row["task_type"]) for row in rows), strict=True)
    dimensions = {}
    for name in filter({*table["dimension"]}.__contains__, _DIMENSIONS):
        part = table[table["dimension"] == name]
        labels = ([groups[index] for index in part.index], [*part["task_type"]] if is_macro else None)
        dimensions[name] = {
            **{hit: mean_over_rows([*part[hit]], *labels) for hit in ("strict", "geq")},
            "num_rows": len(part),
            "num_ties": int(sum(part["geq"]) - sum(part["strict"])),
            "task_types": {
                kind: {"strict": fmean(hits["strict"]), "geq": fmean(hits["geq"]), "num_rows": len(hits)}
                for kind, hits in part.groupby("task_type")
            },
        }
    return {"num_keys": len({name for row in rows for name in row["candidate_ids"]}), "dimensions": dimensions}
