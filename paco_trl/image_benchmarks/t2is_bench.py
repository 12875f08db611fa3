# SPDX-License-Identifier: Apache-2.0
"""
Prompts, criteria and scorers of T2IS-Bench (https://huggingface.co/papers/2506.23275). Interrupted scoring resumes.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

from datasets import Dataset
from PIL import Image
from tqdm.auto import tqdm

from ..data.columns import criteria_dict
from ..data.image_sets import load_image_set_prompts
from ..data.questions import shows_question, t2is_bench_question
from ..data.t2is import find_t2is_bench, read_t2is_bench
from ..evaluation.scoring import batches, dataset_fingerprint
from ..generation.image_files import name_prompts
from ..rewards import ServedJudge
from ..rewards.fingerprint import describe_scorer
from ..rewards.image_rewards import panel_similarity
from ..utils.names import public_name
from ..utils.text import join_first, read_json
from .score_store import open_scores
from .system_images import SystemImages


logger = logging.getLogger(__name__)

# Dimensions of visual consistency (of pairs of panels) -> their names in the benchmark's files
CONSISTENCY = {"identity": "Identity", "style": "Style", "logic": "Logic"}
# Dimensions of prompt alignment (of single panels)
ALIGNMENT = {"entity": "Entity", "attribute": "Attribute", "relation": "Relation"}
# Weights of the three groups in the average. They are not in the benchmark's code, but were fitted to the paper's
# Table 3, whose ten rows with the Qwen judge they reproduce to 0.0004
WEIGHTS = {"aesthetics": 0.2, "alignment": 0.3, "consistency": 0.5}
# Weights of the seven dimensions: a group is the mean of its dimensions
DIMENSION_WEIGHTS = {
    "aesthetics": WEIGHTS["aesthetics"],
    **dict.fromkeys(ALIGNMENT, WEIGHTS["alignment"] / 3),
    **dict.fromkeys(CONSISTENCY, WEIGHTS["consistency"] / 3),
}
# Side that both images of a pair are resized to
SIDE = 512
# Similarity from which pairs are near-identical, the threshold of `DuplicateReward`
DUPLICATE = 0.9

# Kind of scores -> columns of the benchmark that they depend on
COLUMNS: dict[str, tuple[str, ...]] = dict.fromkeys(("aesthetics", "duplicates"), ("id", "rows", "cols"))
COLUMNS |= {"consistency": ("id", "rows", "cols", "criteria"), "alignment": ("id", "rows", "cols", "alignment")}

Record = dict[str, Any]
# Of a set: the arguments of each question, and a function that takes the answers in this order and returns the record
SetQuestions = tuple[list[tuple], Callable[[Iterator], Record]]


def load_t2is_bench(
    name_or_path: str | Path,
    split: str = "train",
    alignment_file: str | Path | None = None,
    config: str | None = None,
) -> Dataset:
    """
    Load the prompts of T2IS-Bench with their criteria, from the benchmark's files or a copy such as PaCo-RL's.

    Args:
        name_or_path (`str` or `Path`):
            One of:

            - the directory of the benchmark's files, `T2IS-Bench.json` and `prompt_consistency.json`, or
              `"ChengyouJia/T2IS-Bench"`. The case id becomes the `id`, and the text that describes a grid the prompt.
              A case with only an instruction has no `panels`: its images can be scored, but not generated;
            - raw T2IS rows or image-set prompts with `id` and `criteria`, for
              [`~paco_trl.data.load_image_set_prompts`].
        split (`str`, *optional*, defaults to `"train"`):
            Split to load.
        alignment_file (`str` or `Path`, *optional*):
            `prompt_alignment.json` of the benchmark: case id -> panel (in order) -> `Entity`, `Attribute`, `Relation`
            -> texts. If `None`, prompt alignment cannot be scored, unless the rows have a column `alignment`.
        config (`str`, *optional*):
            Configuration of the dataset if it has several.

    Returns:
        [`~datasets.Dataset`]: image-set prompts with `id`, `criteria`, optionally `category`, `subcategory` and
        `case_id`, and with an alignment file `alignment` (a list of `panel`, `dimension` and `text`).
    """
    folder = find_t2is_bench(name_or_path)
    dataset = load_image_set_prompts(name_or_path, split, config) if folder is None else read_t2is_bench(folder)
    names = zip(name_prompts(dataset), dataset, strict=True)
    invalid_names = [name for name, row in names if row["rows"] * row["cols"] < 2 or not consistency_criteria(row)]
    found = {name or "texts without one" for row in dataset for name in criteria_dict(row.get("criteria"))}
    dimensions = ", ".join(CONSISTENCY.values())
    if len(invalid_names) == len(dataset):
        raise ValueError(
            f"'{name_or_path}' is no benchmark: no prompt has several panels and criteria of one of the dimensions "
            f"{dimensions} (`criteria` has {join_first(sorted(found)) or 'none'}). For your own prompts use `paco-trl "
            "evaluate prompts`."
        )
    if unknown := [name for name in sorted(found) if name.lower() not in CONSISTENCY]:
        logger.warning(f"Criteria of {join_first(unknown)} are not scored: the dimensions are {dimensions}.")
    if invalid_names:
        raise ValueError(
            f"The prompt {invalid_names[0]!r} has a single panel, or no criterion of consistency. Leave it out."
        )
    if alignment_file is not None:
        dataset = _with_alignment(dataset, Path(alignment_file))
    return dataset


def consistency_criteria(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the criteria of a prompt for pairs of panels, by dimension."""
    # The benchmark writes "Identity", and people "identity"
    criteria = {dimension.lower(): texts for dimension, texts in criteria_dict(row.get("criteria")).items()}
    texts_by_dimension = {name: list(criteria.get(name, {}).values()) for name in CONSISTENCY}
    return {name: texts for name, texts in texts_by_dimension.items() if texts}


def alignment_texts(row: Mapping[str, Any]) -> list[dict[str, list[str]]]:
    """Return the texts that each panel of a prompt should show, by dimension."""
    entries = row.get("alignment")
    if not entries:
        return []
    names = {title: name for name, title in ALIGNMENT.items()}
    panels: list[dict[str, list[str]]] = [{} for _ in range(row["rows"] * row["cols"])]
    for entry in entries:
        panels[entry["panel"]].setdefault(names[entry["dimension"]], []).append(entry["text"])
    return panels


def weighted_average(dimensions: Mapping[str, float]) -> float:
    """Compute 0.2 aesthetics + 0.3 mean(entity, attribute, relation) + 0.5 mean(identity, style, logic)."""
    return sum(weight * dimensions[name] for name, weight in DIMENSION_WEIGHTS.items())


def dimension_score(
    scores: Sequence[Sequence[float | None]], num_pairs: int, protocol: str = "default"
) -> float | None:
    """Average a dimension of a set over its criteria and `num_pairs` pairs. Pairs with missing panels count 0."""
    # With unanswered questions, the mean would be over other pairs. The published protocol averages existing pairs,
    # and drops scores of 0
    if protocol == "published":
        valid_scores = [[score for score in pairs if score is not None] for pairs in scores]
        criteria = [fmean(pairs) for pairs in valid_scores if pairs]
        return (fmean(criteria) or None) if criteria else None
    if not scores or any(None in pairs for pairs in scores):
        return None
    return fmean(sum(cast(Any, pairs)) / num_pairs for pairs in scores)


def _with_alignment(dataset: Dataset, path: Path) -> Dataset:
    cases = read_json(path)
    case_ids = dataset["case_id"][:] if "case_id" in dataset.column_names else [None] * len(dataset)
    column = list[list]()
    missing_cases = []
    for name, case_id, rows, cols in zip(dataset["id"], case_ids, dataset["rows"], dataset["cols"], strict=True):
        case = cases.get(case_id) or cases.get(name)
        case_name = case_id or name
        if case is None:
            missing_cases.append(case_name)
            continue
        if len(case) != rows * cols:
            raise ValueError(
                f"{path} has {len(case)} panels of the case {case_name!r}, but its grid has {rows * cols}."
            )
        column.append([
            {"panel": panel, "dimension": title, "text": text}
            for panel, dimensions in enumerate(case.values())
            for title in ALIGNMENT.values()
            for text in dimensions.get(title, [])
        ])  # fmt: skip
    if missing_cases:
        raise ValueError(
            f"{path} lacks {len(missing_cases)} of the {len(dataset)} cases: {join_first(missing_cases)}."
        )
    titles = {entry["dimension"] for entries in column for entry in entries}
    if missing_dimensions := [title for title in ALIGNMENT.values() if title not in titles]:
        raise ValueError(
            f"{path} has no text of {' and '.join(missing_dimensions)} in any of the {len(dataset)} cases."
        )
    return dataset.add_column("alignment", column)


def score_consistency(
    judge: Any, images: SystemImages, benchmark: Dataset, folder: str | Path, batch_size: int = 64
) -> dict[str, Record]:
    """
    Score visual consistency: ask a judge the benchmark's question about each criterion of identity, style and logic,
    for all unordered pairs of panels. Like the benchmark's script for Qwen2.5-VL, resize panels to the multiple of its
    patches that is nearest to 512, which is 504.

    Args:
        judge (`Any`):
            [`~paco_trl.PaCoReward`], [`~paco_trl.rewards.ServedJudge`] or an object with `name` and `score(images,
            prompts)`, which returns P(Yes) or `None` per pair.
        images ([`SystemImages`]):
            Images of the system.
        benchmark ([`~datasets.Dataset`]):
            From [`load_t2is_bench`].
        folder (`str` or `Path`):
            Directory of the system, for its scores. Changed images are scored again.
        batch_size (`int`, *optional*, defaults to `64`):
            Approximate number of questions per call of the judge; sets are not split. Scores are saved after each
            call.

    Returns:
        `dict[str, dict]`: key -> record with `pairs` (of existing panels) and `scores`: dimension -> P(Yes) of each
        pair for each criterion, `None` without an answer. The next run repeats unanswered questions.

    Raises:
        ValueError: If the directory has scores with other settings.
    """
    # The benchmark's side, rounded to a multiple of the judge's merged patches like in `qwen_vl_utils`
    patch = judge.find_patch_size() if isinstance(judge, ServedJudge) else getattr(judge, "patch_size", 14)
    side = round(SIDE / (2 * patch)) * 2 * patch

    def ask(panels: list[Image.Image | None], row: dict) -> SetQuestions:
        pairs = _pairs(panels)
        criteria = consistency_criteria(row)
        resized_panels = [
            panel and panel.resize((side, side)) for panel in panels
        ]  # with Pillow's default filter, like `qwen_vl_utils`
        questions = [
            ((resized_panels[first], resized_panels[second]), t2is_bench_question(text))
            for texts in criteria.values()
            for text in texts
            for first, second in pairs
        ]

        def to_record(answers: Iterator) -> Record:
            scores = {name: [[next(answers) for _ in pairs] for _ in texts] for name, texts in criteria.items()}
            return {"pairs": pairs, "scores": scores}

        return questions, to_record

    settings = {"question": t2is_bench_question("{criterion}"), "side": side}
    return _score("consistency", judge, settings, ask, judge.score, images, benchmark, folder, batch_size)


def score_alignment(
    judge: Any, images: SystemImages, benchmark: Dataset, folder: str | Path, batch_size: int = 64
) -> dict[str, Record]:
    """
    Score prompt alignment: ask a model whether each panel shows each of its texts, of entities, attributes and
    relations.

    Uses the question of [VQAScore](https://huggingface.co/papers/2404.01291) and the score P(Yes) / (P(Yes) + P(No)).
    The benchmark uses P(Yes) of CLIP-FlanT5-XXL, which transformers does not support, so that the results do not
    compare with published ones.

    Args:
        judge (`Any`):
            [`~paco_trl.PaCoReward`] (which loads any vision-language model), [`~paco_trl.rewards.ServedJudge`] or an
            object with `name` and `score_images(images, prompts)`.
        images ([`SystemImages`]), benchmark ([`~datasets.Dataset`]), folder (`str` or `Path`), batch_size (`int`,
        *optional*, defaults to `64`):
            See [`score_consistency`]. The benchmark must have the column `alignment`.

    Returns:
        `dict[str, dict]`: key -> record with `scores`: for each panel, dimension -> P(Yes) of each text; `None` for
        missing panels and answers.
    """
    if "alignment" not in benchmark.column_names:
        raise ValueError("The benchmark has no `alignment`. Load it with `load_t2is_bench(..., alignment_file=...)`.")

    def ask(panels: list[Image.Image | None], row: dict) -> SetQuestions:
        panels_with_texts = list(zip(panels, alignment_texts(row), strict=True))
        questions = [
            (panel, shows_question(text))
            for panel, dimensions in panels_with_texts
            if panel is not None
            for texts in dimensions.values()
            for text in texts
        ]

        def to_record(answers: Iterator) -> Record:
            scores = [
                None if panel is None else {name: [next(answers) for _ in texts] for name, texts in dimensions.items()}
                for panel, dimensions in panels_with_texts
            ]
            return {"scores": scores}

        return questions, to_record

    settings = {"question": shows_question("{text}")}
    return _score("alignment", judge, settings, ask, judge.score_images, images, benchmark, folder, batch_size)


def score_aesthetics(
    scorer: Any, images: SystemImages, benchmark: Dataset, folder: str | Path, batch_size: int = 64
) -> dict[str, Record]:
    """
    Score the aesthetics of each panel with any scorer, since the benchmark's is not published.

    Args:
        scorer (`Any`):
            [`AestheticScorer`], or an object with `name` and `score_images(images)`, which returns a score in [0, 1]
            or `None` per image.
        images ([`SystemImages`]), benchmark ([`~datasets.Dataset`]), folder (`str` or `Path`), batch_size (`int`,
        *optional*, defaults to `64`):
            See [`score_consistency`].

    Returns:
        `dict[str, dict]`: key -> record with `scores`, one per panel, `None` for missing panels.
    """

    def ask(panels: list[Image.Image | None], row: dict) -> SetQuestions:
        questions = [(panel,) for panel in panels if panel is not None]
        return questions, lambda answers: {"scores": [None if panel is None else next(answers) for panel in panels]}

    return _score("aesthetics", scorer, {}, ask, scorer.score_images, images, benchmark, folder, batch_size)


def score_duplicates(images: SystemImages, benchmark: Dataset, folder: str | Path) -> dict[str, Record]:
    """
    Score the similarity of all pairs of panels without a model, to detect copies: no panels are more consistent.

    Args:
        images ([`SystemImages`]), benchmark ([`~datasets.Dataset`]), folder (`str` or `Path`):
            See [`score_consistency`].

    Returns:
        `dict[str, dict]`: key -> record with `pairs` (of existing panels) and `scores`, their [`panel_similarity`].
    """

    def ask(panels: list[Image.Image | None], row: dict) -> SetQuestions:
        pairs = _pairs(panels)
        questions = [(panels[first], panels[second]) for first, second in pairs]
        return questions, lambda answers: {"pairs": pairs, "scores": list(answers)}

    def query(firsts: list[Image.Image], seconds: list[Image.Image]) -> list[float]:
        return list(map(panel_similarity, firsts, seconds))

    scorer = SimpleNamespace(name="panel_similarity")
    return _score("duplicates", scorer, {}, ask, query, images, benchmark, folder, 1)


def _pairs(panels: list[Image.Image | None]) -> list[list[int]]:
    """List the pairs of panels that exist."""
    return list(map(list, combinations([number for number, panel in enumerate(panels) if panel is not None], 2)))


def _score(
    kind: str, scorer: Any, settings: dict, ask: Callable[[list[Image.Image | None], dict], SetQuestions],
    query: Callable[..., list], images: SystemImages, benchmark: Dataset, folder: str | Path,
    batch_size: int,
) -> dict[str, Record]:  # fmt: skip
    """Score all sets without a complete record, in calls of `query` with about `batch_size` questions."""
    benchmark = benchmark.with_format(None)
    row_by_id = {name: number for number, name in enumerate(benchmark["id"][:])}
    name = public_name(str(getattr(scorer, "model_name", None) or scorer.name))
    # The weights behind a server's model name are unknown
    settings = {"kind": kind, "scorer": name, "judge": describe_scorer(scorer), **settings}
    settings["benchmark"] = dataset_fingerprint(benchmark, COLUMNS[kind])

    def ask_about(key: str) -> tuple[str, list[tuple], Callable[[Iterator], Record]]:
        return key, *ask(images.sets[key].panels(), benchmark[row_by_id[images.sets[key].prompt_id]])

    with open_scores(folder, f"{kind}-{name}", settings, images.digests) as store:
        bar = {"desc": f"Scoring {kind} with {name}", "unit": "set", "disable": not store.is_main_process}
        with tqdm(total=len(store.pending), **bar) as progress:
            for batch in batches(map(ask_about, store.pending), lambda asked: len(asked[1]), batch_size):
                questions = [question for _, set_questions, _ in batch for question in set_questions]
                scores = query(*map(list, zip(*questions, strict=True))) if questions else []
                answers = iter(_check_scores(kind, scorer.name, scores, len(questions)))
                records = []
                for key, set_questions, to_record in batch:
                    set_answers = list(islice(answers, len(set_questions)))
                    records.append({"key": key, **to_record(iter(set_answers)), "incomplete": None in set_answers})
                store.append(*records)
                progress.update(len(batch))
        records = store.finish()
    incomplete_keys = [key for key, record in records.items() if record["incomplete"]]
    if incomplete_keys and store.is_main_process:
        logger.warning(
            f"{name} gave no score for {len(incomplete_keys)} of {len(records)} sets ({kind}): "
            f"{join_first(incomplete_keys)}. Its results leave them out. Rerun to query it about them again."
        )
    return records


def _check_scores(kind: str, name: str, scores: Any, count: int) -> list[float | None]:
    """Check that there is one score per question, finite or `None`."""
    # Many scorers return NaN for what they cannot score
    scores = [None if score is None or math.isnan(score) else float(score) for score in scores]
    if len(scores) != count:
        raise ValueError(f"{name!r} gave {len(scores)} scores for {count} questions, but must give one per question.")
    is_probability = kind in ("consistency", "alignment")
    for score in scores:
        if score is not None and not (0 <= score <= 1 if is_probability else math.isfinite(score)):
            raise ValueError(
                f"{name!r} gave {score}, which is not a {'probability' if is_probability else 'finite score'}."
            )
    return scores
