# SPDX-License-Identifier: Apache-2.0
"""
Evaluation of judges on pairs of edits: EditReward-Bench of EditScore (https://arxiv.org/abs/2509.23909),
VCReward-Bench (https://arxiv.org/abs/2603.28547), EditReward-Compass (https://arxiv.org/abs/2605.13062) and the edits
of MMRB2 (https://arxiv.org/abs/2512.16899).
"""

import logging
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset, concatenate_datasets
from datasets import Image as ImageFeature
from scipy.cluster.hierarchy import DisjointSet

from ..data.columns import list_lengths, typed_dataset
from ..data.dataset_files import image_file, load_split
from ..data.questions import question
from ..utils.text import read_json, shorten
from . import runs


logger = logging.getLogger(__name__)

# Dimension of a row -> the questions whose answers make up its score
QUESTIONS_OF = {
    "prompt_following": ("prompt_following",),
    "consistency": ("consistency",),
    "overall": ("prompt_following", "consistency"),
}
# Protocol -> templates of these questions: of the editing reward, and of the published evaluation
QUESTIONS = {
    "default": {"prompt_following": "edit_following", "consistency": "edit_consistency"},
    "published": {"prompt_following": "edit_reward_bench_following", "consistency": "edit_reward_bench_consistency"},
}
# Tokens that count as each answer in the published script
PUBLISHED_YES = ("yes", "Yes", "YES", "y", "Y")
PUBLISHED_NO = ("no", "No", "NO", "n", "N")
TEXT_COLUMNS = ("key", "instruction", "task_type", "dimension")
IMAGE_COLUMNS = ("input_image", "output_images")
# Scores that differ by less are a tie (EditReward-Compass)
TIE = 1e-5
# Columns that the benchmarks' scripts read: instruction, verdict, task type or dimension; and images
LAYOUTS = {
    "vc_reward": (["instruction", "winner", "task"], ["source_image", "edited_images"]),
    "editreward_compass": (["prompt", "label", "dimension"], ["source_image", "winner", "loser"]),
}
# Benchmarks in another layout than EditReward-Bench's
CONVERTED = (*LAYOUTS, "mmrb2")
# Human verdict -> index of the preferred edit
VERDICTS: dict[str, dict[str, int | None]] = {
    "vc_reward": {"Image A": 0, "Image B": 1},
    "editreward_compass": {"preference": 0, "tie": None},
    "mmrb2": {"A": 0, "B": 1},
}
DIMENSIONS = {"IA": "prompt_following", "VC": "consistency"}


def evaluate_edit_reward(
    scorer: Any,
    dataset: Dataset,
    output_path: str | Path | None = None,
    batch_size: int = 16,
    protocol: str = "default",
    benchmark: str = "edit_reward",
) -> dict[str, Any]:
    """
    Measure how often a scorer prefers the edit that people prefer, on EditScore's benchmark (not TIGER-Lab's), on
    VCReward-Bench (`benchmark="vc_reward"`), on EditReward-Compass (`"editreward_compass"`) or on the edits of MMRB2
    (`"mmrb2"`), see [`load_edit_pairs`].

    An edited image is scored by the question of the row's dimension about the pair (input image, edited image), and
    for the dimension `overall` by the geometric mean of both questions. It is first resized to the input image. Images
    are RGB with transparency on white, and the questions are the editing reward's. Interrupted runs resume like
    [`evaluate_rankings`].

    `protocol="published"` repeats the script behind the paper's figures, and only its results compare with the tables
    of [`published_tables`]`("EditReward-Bench")` for this protocol. Its two questions ask for a one-word answer, with
    `<img1>: ` and `<img2>: ` before the images. P(Yes) is the sum over yes, Yes, YES, y and Y, and P(No) over no, No,
    NO, n and N, if they are among the 20 likeliest tokens; the score is 0 if none is. (The script also counts the
    token that it samples at random.) Transparency is dropped instead of put on white.

    Args:
        scorer (`Any`), output_path (`str` or `Path`, *optional*), batch_size (`int`, *optional*, defaults to `16`),
        protocol (`str`, *optional*, defaults to `"default"`):
            See [`evaluate_rankings`]. A scorer with `compares = True` ([`ComparingJudge`]) gets (input, edit, edit)
            and the instruction, and returns 1 if the first edit is better, 0 if the second is, 0.5 for a tie, or
            `None`, which is never correct. One with `rates = True` ([`~paco_trl.rewards.WordsJudge`]) gets (input,
            edit) and the instruction, and returns scores by dimension with `overall`, or `None`.
        dataset ([`~datasets.Dataset`]):
            `EditScore/EditReward-Bench`: `key` (names of the two edited images), `instruction`, `input_image`,
            `output_images` (two, the preferred one first), `task_type`, and `dimension`, one of `prompt_following`,
            `consistency` and `overall`. A key shared by rows is scored once. The optional `winner` is the index of the
            preferred image, or `None` for a human tie, where scores must differ by less than 1e-5.
        benchmark (`str`, *optional*, defaults to `"edit_reward"`):
            Determines the average: over task types for EditReward-Bench, over rows for the others, like their scripts.

    Returns:
        `dict[str, Any]`: `settings`, `num_instances` and `num_unanswered` as in [`evaluate_rankings`]; `num_keys`, the
        number of distinct edited images; `num_groups` for the intervals (rows that share an image, directly or through
        other rows, or with another `benchmark` the instruction); and `dimensions`, for each dimension in the dataset
        `strict` and `geq` (`mean` and `interval`), `num_rows`, `num_ties` and `task_types`. `strict` is the fraction
        of rows whose preferred image scores higher, averaged over the task types; `geq` also counts ties.

    Raises:
        ValueError: If the dataset does not have this format, an image cannot be read, the file belongs to another run,
        or
            a score is not finite, or negative for `overall`.
    """
    runs.check_protocol(protocol)
    dataset = dataset.with_format(None)  # plain Python values
    columns = (*TEXT_COLUMNS, *["winner"] * ("winner" in dataset.column_names))
    rows = list(dataset.select_columns(list(columns)))
    _check_rows(rows, list_lengths(dataset, "output_images").tolist())
    settings = {"benchmark": benchmark, "protocol": protocol}
    run = (scorer, dataset, columns, IMAGE_COLUMNS, output_path)
    if getattr(scorer, "compares", False):
        settings["template"] = scorer.template
        items = [runs.RecordQuestions(index, index, [((0, 1), row["instruction"])]) for index, row in enumerate(rows)]
        common, records = runs.score_records(
            settings, *run, "row", items, batch_size, lambda item, scores: {"row": item.key, "first": scores[0]}
        )
        firsts = [records[index]["first"] for index in range(len(rows))]
        pairs = [(math.nan, math.nan) if first is None else (first, 1 - first) for first in firsts]
    else:
        items, questions_of_key = _list_items(rows, protocol)
        if rates := getattr(scorer, "rates", False):
            settings["template"] = scorer.template
            items = [
                item._replace(questions=[(item.questions[0][0], rows[item.row]["instruction"])]) for item in items
            ]

        def record(item: runs.RecordQuestions, scores: Sequence[Any]) -> dict[str, Any]:
            by_name = scores[0] if rates else dict(zip(questions_of_key[item.key], scores, strict=True))
            return {"key": item.key, "scores": by_name}

        answer_tokens = (PUBLISHED_YES, PUBLISHED_NO)
        common, records = runs.score_records(
            settings, *run, "key", items, batch_size, record, answer_tokens, resizes=True
        )
        pairs = [tuple(_score(row["dimension"], records[key]["scores"]) for key in row["key"]) for row in rows]
    is_macro = benchmark == "edit_reward"
    groups = _groups(rows) if is_macro else [row["instruction"] for row in rows]
    dimensions = {row["dimension"] for row in rows}
    return {
        **common,
        "num_keys": len({key for row in rows for key in row["key"]}),
        "num_groups": len(set(groups)),
        "dimensions": {
            name: _accuracies(name, rows, pairs, groups, is_macro) for name in QUESTIONS_OF if name in dimensions
        },
    }


def _check_rows(rows: list[dict[str, Any]], counts: list[int]) -> None:
    instruction_of: dict[str, str] = {}
    for index, row in enumerate(rows):
        keys = row["key"]
        if row["dimension"] not in QUESTIONS_OF:
            raise ValueError(
                f"`dimension` of row {index} is {shorten(row['dimension'])}, not one of {', '.join(QUESTIONS_OF)}."
            )
        if len(keys) != 2 or keys[0] == keys[1] or counts[index] != 2:
            raise ValueError(f"Row {index} must have two edited images with different names, not {shorten(keys)}.")
        if any(instruction_of.setdefault(key, row["instruction"]) != row["instruction"] for key in keys):
            raise ValueError(f"Row {index} has another instruction than an earlier row of the keys {shorten(keys)}.")


def _list_items(rows: list[dict[str, Any]], protocol: str) -> tuple[list[runs.RecordQuestions], dict[str, list[str]]]:
    """List the keys to score, with the first row that has them, and the questions that their rows require."""
    required: dict[str, set[str]] = {}
    first_use: dict[str, tuple[int, int]] = {}
    for index, row in enumerate(rows):
        for position, key in enumerate(row["key"]):
            first_use.setdefault(key, (index, position))
            required.setdefault(key, set()).update(QUESTIONS_OF[row["dimension"]])
    items, questions_of_key = [], {}
    for key, (index, position) in first_use.items():
        questions_of_key[key] = [name for name in QUESTIONS[protocol] if name in required[key]]
        templates = [QUESTIONS[protocol][name] for name in questions_of_key[key]]
        texts = (question(template, instruction=rows[index]["instruction"]) for template in templates)
        items.append(runs.RecordQuestions(key, index, [((position,), text) for text in texts]))
    return items, questions_of_key


def _groups(rows: list[dict[str, Any]]) -> list[str]:
    """Return the group of each row: rows of a group share a key, directly or through other rows."""
    groups = DisjointSet(key for row in rows for key in row["key"])
    for row in rows:
        groups.merge(*row["key"])
    return [groups[row["key"][0]] for row in rows]


def _hits(pair: Sequence[float], winner: int | None) -> tuple[float, float]:
    """Return whether scores agree with people, strictly, and if ties also count."""
    if winner is None:
        return (float(abs(pair[0] - pair[1]) < TIE),) * 2
    preferred = pair[winner]
    rejected = pair[1 - winner]
    return float(preferred > rejected), float(preferred >= rejected)


def _accuracies(
    dimension: str, rows: list[dict], pairs: Sequence[Sequence[float]], groups: Sequence[Hashable], is_macro: bool
) -> dict[str, Any]:
    indices = [index for index, row in enumerate(rows) if row["dimension"] == dimension]
    strict, geq = zip(*(_hits(pairs[index], rows[index].get("winner", 0)) for index in indices), strict=True)
    hits = {"strict": strict, "geq": geq}
    task_types = [rows[index]["task_type"] for index in indices]
    groups = [groups[index] for index in indices]
    strata = task_types if is_macro else None
    accuracy_by_type = {}
    for name, count in sorted(Counter(task_types).items()):
        has_type = [task_type == name for task_type in task_types]
        accuracy_by_type[name] = {variant: fmean(compress(values, has_type)) for variant, values in hits.items()}
        accuracy_by_type[name]["num_rows"] = count
    return {
        **{variant: runs.mean_and_interval(values, groups, strata=strata) for variant, values in hits.items()},
        "num_rows": len(indices),
        "num_ties": int(sum(hits["geq"]) - sum(hits["strict"])),
        "task_types": accuracy_by_type,
    }


def _score(dimension: str, scores: dict[str, float] | None) -> float:
    """Return the score of a dimension; `overall` is sqrt(consistency * prompt_following) (PaCo-RL, Part 2)."""
    if scores is None or "overall" in scores:  # of a judge that rates
        return math.nan if scores is None else scores.get(dimension, scores["overall"])
    if dimension != "overall":
        return scores[dimension]
    if min(scores.values()) < 0:
        raise ValueError(f"The scores are {scores}, but a geometric mean requires scores >= 0. Leave `overall` out.")
    return math.sqrt(scores["consistency"] * scores["prompt_following"])


def load_edit_pairs(benchmark: str, path: str | Path, split: str = "train", config: str | None = None) -> Dataset:
    """
    Load VCReward-Bench (`"vc_reward"`), EditReward-Compass (`"editreward_compass"`) or the edits of MMRB2 (`"mmrb2"`)
    for [`evaluate_edit_reward`].

    `path` is a Hub id, directory or file, and `config` its configuration if it has several. VCReward-Bench has
    `instruction`, `source_image`, `edited_images` (two), `winner` (`Image A` or `Image B`) and `task`.
    EditReward-Compass has `dimension` (`IA`, `VC` or `VQ`), `prompt`, `label` (`preference` or `tie`), and the paths
    `source_image`, `winner` and `loser`, relative to the file. Its `VQ` rows are left out, since visual quality is not
    a question about a pair. MMRB2 is the file `edit.json` that its build script writes; pairs with several source
    images, or a response without exactly one image, are left out. Raises a `ValueError` if a column is missing or a
    verdict is unknown.
    """
    if benchmark == "mmrb2":
        return _load_mmrb2(Path(path).expanduser())
    has_files = benchmark == "editreward_compass"
    verdicts = VERDICTS[benchmark]
    texts, images = LAYOUTS[benchmark]
    dataset = load_split(path, split, images, config=config).with_format(None)
    if missing := [name for name in texts + images if name not in dataset.column_names]:
        raise ValueError(f"'{path}' has no columns {missing}, only {dataset.column_names}. Check `benchmark`.")
    if has_files:
        for name in images:
            dataset = dataset.cast_column(name, ImageFeature(decode=False))
        dataset = dataset.filter(lambda dimension: dimension != "VQ", input_columns="dimension")
    rows: list[tuple[Any, ...]] = []
    for row_number, row in enumerate(dataset.select_columns(texts + images * has_files)):
        instruction, verdict, task_type = (row[name] for name in texts)
        if verdict not in verdicts:
            raise ValueError(
                f"`{texts[1]}` of {shorten(instruction)} in '{path}' is {shorten(verdict)}, not "
                f"{' or '.join(verdicts)}."
            )
        labels = (task_type, "consistency")
        row_images = []
        if has_files:
            labels = (verdict, DIMENSIONS.get(task_type, task_type))
            row_images = [row["source_image"], [row["winner"], row["loser"]]]
        rows.append(([f"{row_number}/0", f"{row_number}/1"], instruction, *labels, verdicts[verdict], *row_images))
    names = ("instruction", "task_type", "dimension")
    types: dict[str, Any] = {"key": ["string"], **dict.fromkeys(names, "string"), "winner": "int64"}
    if has_files:
        return typed_dataset(rows, **types, input_image="image", output_images=["image"])
    image_columns = dataset.select_columns(images)
    image_columns = image_columns.rename_columns(dict(zip(images, ("input_image", "output_images"), strict=True)))
    return concatenate_datasets([typed_dataset(rows, **types), image_columns], axis=1)


def _load_mmrb2(path: Path) -> Dataset:
    """Load the file of MMRB2's edits, whose images are beside it, in the layout of EditReward-Bench."""
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file '{path}'. Build MMRB2 (`python build_from_hf.py` in `benchmark` of its repository), "
            "and pass its edit.json as `dataset_name`."
        )
    content = read_json(path)
    pairs = content.get("pairs") if isinstance(content, dict) else None
    if not pairs or not all({"prompt_content", "response_a", "response_b", "chosen"} <= pair.keys() for pair in pairs):
        raise ValueError(f"'{path}' has no pairs of MMRB2 with their prompts. Pass the edit.json that it builds.")

    def images_of(content: list[list[str]]) -> list[dict[str, Any]]:
        names = [value for kind, value in content if kind == "image"]
        return [{"path": str(image_file(name, [path.parent])), "bytes": None} for name in names]

    rows: list[tuple[Any, ...]] = []
    for number, pair in enumerate(pairs):
        sources = images_of(pair["prompt_content"])
        edits = [images_of(pair[name]["response_content"]) for name in ("response_a", "response_b")]
        if pair["chosen"] not in VERDICTS["mmrb2"]:
            raise ValueError(f"`chosen` of pair {number} of '{path}' is {shorten(pair['chosen'])}, not A or B.")
        if len(sources) == 1 and all(len(images) == 1 for images in edits):
            text = " ".join(value for kind, value in pair["prompt_content"] if kind == "text")
            labels = (text, pair.get("prompt_source", ""), "overall", VERDICTS["mmrb2"][pair["chosen"]])
            rows.append(([f"{number}/0", f"{number}/1"], *labels, sources[0], [images[0] for images in edits]))
    if len(rows) < len(pairs):
        logger.warning(
            f"{len(pairs) - len(rows)} of {len(pairs)} pairs of '{path}' are left out: they have several images."
        )
    names = ("instruction", "task_type", "dimension")
    types: dict[str, Any] = {"key": ["string"], **dict.fromkeys(names, "string"), "winner": "int64"}
    return typed_dataset(rows, **types, input_image="image", output_images=["image"])
