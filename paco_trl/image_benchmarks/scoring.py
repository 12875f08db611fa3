# SPDX-License-Identifier: Apache-2.0
"""The scorers of T2IS-Bench at work: each goes over the sets of a system, and can be stopped at any time."""

import logging
import math
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from tqdm.auto import tqdm

from ..data.questions import shows_question, t2is_bench_question
from ..evaluation.runs import batches, dataset_fingerprint
from ..rewards.duplicates import panel_similarity
from ..utils.images import patch_size_of
from ..utils.names import public_name
from ..utils.text import some_of
from .image_sets import FoundImages, ImageSet
from .score_store import ScoreStore
from .t2is_bench import SIDE, alignment_texts, consistency_criteria


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)

# Pairs from this similarity on are near-identical: the threshold of `DuplicateReward`, which says what it is measured on
DUPLICATE = 0.9

# Columns of the benchmark that scores of a kind depend on
COLUMNS = {
    "consistency": ("id", "rows", "cols", "criteria"),
    "alignment": ("id", "rows", "cols", "alignment"),
    "aesthetics": ("id", "rows", "cols"),
    "duplicates": ("id", "rows", "cols"),
}

Record = dict[str, Any]


def score_consistency(
    judge: Any,
    found: FoundImages,
    benchmark: "Dataset",
    folder: str | Path,
    batch_size: int = 64,
    rescore_changed: bool = False,
) -> dict[str, Record]:
    """
    Visual consistency: a judge is asked about each criterion of identity, style and logic, for all unordered pairs of
    panels, with the benchmark's own question and both panels at 512 x 512 pixels.

    The panels are resized as the benchmark's script does it for Qwen2.5-VL: at once to the multiple of its patches that
    is nearest to 512, which is 504.

    Args:
        judge (`Any`):
            [`~paco_trl.PaCoReward`], [`~paco_trl.rewards.ServedJudge`] or an object with `name` and `score(images,
            prompts)`, which gives P(Yes) of each pair, or `None`.
        found ([`FoundImages`]):
            The pictures.
        benchmark ([`~datasets.Dataset`]):
            From [`load_t2is_bench`].
        folder (`str` or `Path`):
            Folder of the system, for the scores.
        batch_size (`int`, *optional*, defaults to `64`):
            Questions in one call of the judge, about: sets are not split. Scores are on the disk after each call.
        rescore_changed (`bool`, *optional*, defaults to `False`):
            Whether to score pictures anew that were changed since they were scored. Otherwise they are an error.

    Returns:
        `dict[str, dict]`: key -> record with `pairs` (of panels that are there) and `scores`: dimension -> P(Yes) of
        each pair for each criterion. `None` where there is no answer; such a set is asked about again by the next run.

    Raises:
        TypeError: If `judge` has no `score` or no `name`.
        ValueError: If the pictures were changed since they were scored, another run is writing these scores, the scores
            in the folder were made in another way (by other weights under the same name too), or the judge gives
            another number of scores than questions, or one that is no probability.
    """
    _check_has(judge, "score", "`score(images, prompts)`")
    side = _resized_side(judge)

    def questions(one: ImageSet, row: dict) -> int:
        present = one.rows * one.cols - len(one.missing)
        return sum(map(len, consistency_criteria(row).values())) * present * (present - 1) // 2

    def ask(sets: list[ImageSet], rows: list[dict]) -> list[Record]:
        asked, layout = [], []
        for one, row in zip(sets, rows, strict=True):
            panels = [None if panel is None else _resized(panel, side) for panel in one.panels()]
            pairs = list(combinations([number for number, panel in enumerate(panels) if panel is not None], 2))
            criteria = consistency_criteria(row)
            for texts in criteria.values():
                # All criteria of a pair together would be as good: the judge puts them into an order of its own
                for text in texts:
                    question = t2is_bench_question(text)
                    asked += [((panels[first], panels[second]), question) for first, second in pairs]
            layout.append((pairs, criteria))
        answers = _answers(judge, judge.score, asked)
        records = []
        for pairs, criteria in layout:
            scores = {name: [[next(answers) for _ in pairs] for _ in texts] for name, texts in criteria.items()}
            gap = any(score is None for texts in scores.values() for of_pairs in texts for score in of_pairs)
            records.append({"pairs": [list(pair) for pair in pairs], "scores": scores, "incomplete": gap})
        return records

    settings = {"question": t2is_bench_question("{criterion}"), "side": side}
    return _score(
        judge, "consistency", settings, found, benchmark, folder, batch_size, questions, ask, rescore_changed
    )


def score_alignment(
    judge: Any,
    found: FoundImages,
    benchmark: "Dataset",
    folder: str | Path,
    batch_size: int = 64,
    rescore_changed: bool = False,
) -> dict[str, Record]:
    """
    Prompt alignment: a model is asked whether each panel shows each of its texts, of entity, attribute and relation.

    The question is that of [VQAScore](https://huggingface.co/papers/2404.01291), the score P(Yes) / (P(Yes) + P(No)) of
    whatever model is given. The benchmark takes P(Yes) of CLIP-FlanT5-XXL, which transformers does not have: figures of
    another model do not compare with the published ones.

    Args:
        judge (`Any`):
            [`~paco_trl.PaCoReward`] (which loads any vision-language model), [`~paco_trl.rewards.ServedJudge`] or an
            object with `name` and `score_images(images, prompts)`.
        found ([`FoundImages`]), benchmark ([`~datasets.Dataset`]), folder (`str` or `Path`), batch_size (`int`, *optional*, defaults to `64`), rescore_changed (`bool`, *optional*, defaults to `False`):
            As of [`score_consistency`]; the benchmark needs the column `alignment`.

    Returns:
        `dict[str, dict]`: key -> record with `scores`: for each panel dimension -> P(Yes) of each text; `None` for a
        panel that is missing, and where there is no answer.

    Raises:
        TypeError: If `judge` has no `score_images` or no `name`.
        ValueError: As [`score_consistency`], and if the benchmark has no texts to align with.
    """
    _check_has(judge, "score_images", "`score_images(images, prompts)`")
    if "alignment" not in benchmark.column_names:
        raise ValueError(
            "The benchmark has no texts of what each panel should show (`alignment`). Load it with the benchmark's "
            "prompt_alignment.json: `load_t2is_bench(..., alignment_file=...)`."
        )

    def questions(one: ImageSet, row: dict) -> int:
        return sum(len(texts) for panel in alignment_texts(row) for texts in panel.values())

    def ask(sets: list[ImageSet], rows: list[dict]) -> list[Record]:
        asked, layout = [], []
        for one, row in zip(sets, rows, strict=True):
            panels, wanted = one.panels(), alignment_texts(row)
            for panel, dimensions in zip(panels, wanted, strict=True):
                if panel is not None:
                    asked += [(panel, shows_question(text)) for texts in dimensions.values() for text in texts]
            layout.append((panels, wanted))
        answers = _answers(judge, judge.score_images, asked)
        records = []
        for panels, wanted in layout:
            scores = [
                None if panel is None else {name: [next(answers) for _ in texts] for name, texts in dimensions.items()}
                for panel, dimensions in zip(panels, wanted, strict=True)
            ]
            gap = any(
                None in texts for dimensions in scores if dimensions is not None for texts in dimensions.values()
            )
            records.append({"scores": scores, "incomplete": gap})
        return records

    settings = {"question": shows_question("{text}")}
    return _score(judge, "alignment", settings, found, benchmark, folder, batch_size, questions, ask, rescore_changed)


def score_aesthetics(
    scorer: Any,
    found: FoundImages,
    benchmark: "Dataset",
    folder: str | Path,
    batch_size: int = 64,
    rescore_changed: bool = False,
) -> dict[str, Record]:
    """
    Aesthetics of each panel, by any scorer. Which one the benchmark uses is not published.

    Args:
        scorer (`Any`):
            [`AestheticScorer`], or an object with `name` and `score_images(images)`, which gives a score in [0, 1] for
            each image, or `None`.
        found ([`FoundImages`]), benchmark ([`~datasets.Dataset`]), folder (`str` or `Path`), batch_size (`int`, *optional*, defaults to `64`), rescore_changed (`bool`, *optional*, defaults to `False`):
            As of [`score_consistency`].

    Returns:
        `dict[str, dict]`: key -> record with `scores`, one for each panel; `None` for one that is missing.

    Raises:
        TypeError: If `scorer` has no `score_images` or no `name`.
        ValueError: As [`score_consistency`].
    """
    _check_has(scorer, "score_images", "`score_images(images)`")

    def ask(sets: list[ImageSet], rows: list[dict]) -> list[Record]:
        panels = [one.panels() for one in sets]
        there = [panel for of_set in panels for panel in of_set if panel is not None]
        answers = iter(_checked_scores(scorer, scorer.score_images(there) if there else [], len(there)))
        records = []
        for of_set in panels:
            scores = [None if panel is None else next(answers) for panel in of_set]
            gap = any(score is None for score, panel in zip(scores, of_set, strict=True) if panel is not None)
            records.append({"scores": scores, "incomplete": gap})
        return records

    return _score(scorer, "aesthetics", {}, found, benchmark, folder, batch_size, _panel_count, ask, rescore_changed)


def score_duplicates(
    found: FoundImages, benchmark: "Dataset", folder: str | Path, rescore_changed: bool = False
) -> dict[str, Record]:
    """
    Similarity of all pairs of panels, without a model: consistency alone is highest for copies.

    Args:
        found ([`FoundImages`]), benchmark ([`~datasets.Dataset`]), folder (`str` or `Path`), rescore_changed (`bool`, *optional*, defaults to `False`):
            As of [`score_consistency`].

    Returns:
        `dict[str, dict]`: key -> record with `pairs` (of panels that are there) and `scores`, the
        [`panel_similarity`] of each.

    Raises:
        ValueError: As [`score_consistency`].
    """

    def ask(sets: list[ImageSet], rows: list[dict]) -> list[Record]:
        records = []
        for one in sets:
            panels = one.panels()
            pairs = list(combinations([number for number, panel in enumerate(panels) if panel is not None], 2))
            scores = [panel_similarity(panels[first], panels[second]) for first, second in pairs]
            records.append({"pairs": [list(pair) for pair in pairs], "scores": scores, "incomplete": False})
        return records

    return _score(_Similarity, "duplicates", {}, found, benchmark, folder, 1, _panel_count, ask, rescore_changed)


class _Similarity:
    name = "panel_similarity"


def _panel_count(one: ImageSet, row: dict) -> int:
    return one.rows * one.cols - len(one.missing)


def _score(
    scorer: Any,
    kind: str,
    settings: dict[str, Any],
    found: FoundImages,
    benchmark: "Dataset",
    folder: str | Path,
    batch_size: int,
    size: Callable[[ImageSet, dict], int],
    ask: Callable[[list[ImageSet], list[dict]], list[Record]],
    rescore_changed: bool,
) -> dict[str, Record]:
    """Ask about all sets that have no complete record yet, in calls of about `batch_size` questions."""
    if batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size}, but must be at least 1.")
    benchmark = benchmark.with_format(None)
    row_of = {name: number for number, name in enumerate(benchmark["id"][:])}
    name = public_name(str(getattr(scorer, "model_name", None) or scorer.name))
    settings = {
        "kind": kind,
        "scorer": name,
        # What is behind the name of a served model is not known
        "weights": getattr(scorer, "fingerprint", None),
        **settings,
        "benchmark": dataset_fingerprint(benchmark, COLUMNS[kind], ()),
    }
    digests = found.digests
    with ScoreStore(folder, f"{kind}-{name}", settings, digests, rescore_changed) as store:
        sets = [found.sets[key] for key in store.pending]
        rows = [benchmark[row_of[one.prompt_id]] for one in sets]
        sizes = [size(one, row) for one, row in zip(sets, rows, strict=True)]
        title = f"Scoring {kind} with {name}"
        with tqdm(total=len(sets), desc=title, unit="set", disable=not store.is_main_process) as progress:
            for batch in batches(sizes, batch_size):
                records = ask([sets[place] for place in batch], [rows[place] for place in batch])
                store.append(
                    [
                        {
                            "key": sets[place].key,
                            "digest": digests[sets[place].key],
                            **record,
                        }
                        for place, record in zip(batch, records, strict=True)
                    ]
                )
                progress.update(len(batch))
        records = store.finish()
        if store.is_main_process:
            gaps = [key for key, record in records.items() if record["incomplete"]]
            if gaps:
                logger.warning(
                    f"{name} gave no score for {len(gaps)} of {len(records)} sets ({kind}): {some_of(gaps)}"
                    ". They are left out of its figures and counted in the report; run the "
                    "same again to ask anew."
                )
    return records


def _check_has(scorer: Any, method: str, described: str) -> None:
    if not callable(getattr(scorer, method, None)) or not isinstance(getattr(scorer, "name", None), str):
        raise TypeError(
            f"The scorer is a {type(scorer).__name__}, but must have a method {described} and a `name` (str)."
        )


def _resized_side(judge: Any) -> int:
    """The multiple of a judge's merged patches that is nearest to the benchmark's side, as `qwen_vl_utils` rounds."""
    processor = getattr(judge, "processor", None)
    patch = getattr(judge, "patch_size", None) or (patch_size_of(processor) if processor is not None else 14)
    return round(SIDE / (2 * patch)) * 2 * patch


def _resized(panel: Image.Image, side: int) -> Image.Image:
    return panel.resize((side, side))  # Pillow's default filter, as in `qwen_vl_utils`


def _answers(judge: Any, ask: Callable, asked: list[tuple[Any, str]]) -> Iterator[float | None]:
    """The judge's P(Yes) of each question."""
    if not asked:
        return iter(())
    scores = _checked_scores(judge, ask([what for what, _ in asked], [text for _, text in asked]), len(asked))
    for score, (_, text) in zip(scores, asked, strict=True):
        if score is not None and not 0 <= score <= 1:
            raise ValueError(f"{judge.name!r} gave {score} for the question {text!r}, which is no probability of Yes.")
    return iter(scores)


def _checked_scores(scorer: Any, scores: Any, count: int) -> list[float | None]:
    scores = [None if score is None else float(score) for score in scores]
    if len(scores) != count:
        raise ValueError(
            f"{scorer.name!r} gave {len(scores)} scores for {count} questions. It must give one for each, `None` where it has "
            "none."
        )
    # NaN is what many scorers give for what they cannot score
    scores = [None if score is not None and math.isnan(score) else score for score in scores]
    infinite = next((score for score in scores if score is not None and math.isinf(score)), None)
    if infinite is not None:
        raise ValueError(f"{scorer.name!r} gave {infinite}, of which there is no mean. Correct the scorer.")
    return scores
