# SPDX-License-Identifier: Apache-2.0
"""Evaluation of edits on GEdit-Bench (https://huggingface.co/papers/2504.17761) by a served vision-language model."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast

from datasets import Dataset
from tqdm.auto import tqdm

from ..data.source_images import SourceImages
from ..evaluation.scoring import dataset_fingerprint
from ..generation.edits import edit_keys
from ..utils.chat import ChatEndpoint, ChatRequest
from ..utils.files import digest, write_atomically
from ..utils.images import to_png
from ..utils.text import join_first, shorten
from .gedit_protocols import PLACEHOLDER, EditProtocol, compute_overall, load_edit_protocol
from .leakage import leakage_text
from .paired_results import (
    NOTES,
    BenchmarkResults,
    MetricRow,
    ResultTable,
    SampleKey,
    System,
    check_systems,
    compute_breakdowns,
    compute_table,
    system_alerts,
)
from .score_store import ScoreStore, open_scores, read_scores
from .system_images import SystemImages, load_image_file


logger = logging.getLogger(__name__)

BENCHMARK = "GEdit-Bench"
METRICS = {
    name: name.replace("_", " ").capitalize() for name in ("semantic_consistency", "perceptual_quality", "overall")
}
LANGUAGES = {"en": "English", "cn": "Chinese"}
_QUESTIONS = ("semantic", "quality")
# Scoring stops after this many answers if none of them is readable
_MAX_UNREADABLE = 24


class EditScore(NamedTuple):
    """Scores of an edit, each from 0 to 10."""

    semantic_consistency: float  # the lower of following the instruction and preserving the rest
    perceptual_quality: float  # the lower of naturalness and absence of flaws
    overall: float  # geometric mean of both


def score_edits(
    endpoint: ChatEndpoint,
    prompts: Dataset,
    edits: SystemImages,
    folder: str | Path,
    max_attempts: int | None = None,
    protocol: str = "default",
    gedit_repo: str | Path | None = None,
) -> dict[str, EditScore | None]:
    """
    Score each edit by two questions to a served vision-language model, each answered with two numbers from 0 to 10:
    from the source and the edit, how well the instruction was followed and the rest preserved; from the edit alone,
    how natural and free of flaws it is. The lower number of each answer counts, and their geometric mean is the
    overall score.

    By default, images are sent with an area of 512 x 512 pixels and their original aspect ratio, the source first, at
    temperature 0; unreadable answers are requested again at 0.7 with another seed. `protocol="published"` queries the
    judge and reads its answers like the benchmark's script for GPT-4.1, with `input_image` as source
    (`load_edit_prompts(..., source_column="input_image")`).

    Each answer is saved immediately, so that interrupted runs resume, on any number of processes. The next run repeats
    questions without a readable answer, or about changed edits.

    > [!WARNING]
    > The default prompts are this project's own, and scores depend on the prompt and the judge, so that they do not
    > compare with published tables. With the published protocol, they only compare for the same judge.

    Args:
        endpoint ([`~paco_trl.dataset_building.ChatEndpoint`]):
            Judge.
        prompts ([`~datasets.Dataset`]):
            Editing prompts with `id` and one source each.
        edits ([`SystemImages`]):
            Edited images, from [`find_edits`]. Prompts without one are skipped.
        folder (`str` or `Path`):
            Directory of the system. Answers are saved in its folder `scores`.
        max_attempts (`int`, *optional*):
            Attempts per question in a run. Defaults to 3, or with the published protocol to 2, as in its script.
        protocol (`str`, *optional*, defaults to `"default"`):
            `"default"` or `"published"`.
        gedit_repo (`str` or `Path`, *optional*):
            Clone of `stepfun-ai/Step1X-Edit`, for the published prompts.

    Returns:
        `dict[str, EditScore | None]`: key (`"<language>/<id>"`, or the id if there is no column `language`) -> scores,
        `None` for an edit with an unreadable answer, which is also logged.

    Raises:
        EndpointUnavailableError: If the judge cannot be queried. Earlier answers are kept.
        ValueError: If no answer is readable.
    """
    prompting = load_edit_protocol(protocol, gedit_repo)
    max_attempts = prompting.max_attempts if max_attempts is None else max_attempts
    sources = _read_sources(prompts)
    row_by_key = {key: row for row, key in enumerate(edit_keys(prompts))}
    instructions = prompts.with_format(None)["prompt"][:]

    def request(name: str, attempt: int) -> ChatRequest:
        kind, _, key = name.partition("/")
        row = row_by_key[key]
        question = prompting.questions[kind]
        file = cast(Path, edits.sets[key].files[0])
        if kind == "semantic":
            question = question.replace(PLACEHOLDER, instructions[row])  # not `format`, which would read braces
        if protocol == "published":
            # The script drops the edit's transparency and resizes it to the source
            (source,) = sources.load(row, in_rgb=False)
            images = [source, load_image_file(file, lambda image: image.convert("RGB").resize(source.size))]
        else:
            images = [*sources.load(row), load_image_file(file)]
        return prompting.request(question, images if kind == "semantic" else images[-1:], name, attempt)

    settings = {"benchmark": BENCHMARK, "kind": "edits", "scorer": endpoint.model, "protocol": protocol}
    settings["rubric"] = digest(list(prompting.questions.values()))[:16]
    digests = _digests(prompts, sources, edits)
    with open_scores(folder, f"{BENCHMARK} {protocol} {endpoint.model}", settings, digests) as store:
        _query(endpoint, store, request, prompting, max_attempts)
        scores = _edit_scores(store.finish())
    unanswered = [key for key, score in scores.items() if score is None]
    if unanswered and store.is_main_process:
        logger.warning(
            f"{endpoint.model} gave no readable answer about {len(unanswered)} of {len(scores)} edits in "
            f"{max_attempts} attempt(s): {join_first(unanswered)}. Its answers are in {store.folder}. Rerun to "
            "query it about these again."
        )
    return scores


def check_gedit_prompts(prompts: Dataset) -> SourceImages:
    """Reject prompts whose edits could be generated, but not scored and reported; return their source images."""
    sources = _read_sources(prompts)
    if "task_type" not in prompts.column_names or None in prompts["task_type"][:]:
        raise ValueError("GEdit-Bench averages over task types, so all prompts need a `task_type`. Add it.")
    return sources


def _read_sources(prompts: Dataset) -> SourceImages:
    """Read the headers of the source images, and reject a prompt with several, since the judge sees one."""
    sources = SourceImages(prompts, "the prompts")
    if sources.max_count > 1:
        raise ValueError(
            f"Row {sources.row_with_most} of the prompts has {sources.max_count} source images, but the judge sees "
            "only one. Leave such rows out: `load_edit_prompts(..., max_images=1)`."
        )
    return sources


def _query(
    endpoint: ChatEndpoint, store: ScoreStore, request: Callable, protocol: EditProtocol, max_attempts: int
) -> None:
    """Ask the judge this process's share of the questions, and repeat questions with unreadable answers."""
    if not (names := store.pending):
        return
    endpoint.check()
    num_replies = 0
    is_readable = not store.is_new
    title = f"Querying {endpoint.model} about edits"
    with tqdm(total=len(names), desc=title, unit="question", disable=not store.is_main_process) as bar:
        for attempt in range(max_attempts):
            # Count attempts of earlier runs, whose seeds would give the same answers again
            attempt_numbers = [store.earlier.get(name, {"attempts": 0})["attempts"] + attempt for name in names]
            unreadable = []
            with closing(endpoint.ask_all(map(request, names, attempt_numbers))) as replies:
                for index, reply in replies:
                    name = names[index]
                    num_replies += 1
                    scores = None if reply.text is None else protocol.read(reply.text, attempt > 0)
                    is_readable = is_readable or scores is not None
                    if not is_readable and num_replies >= _MAX_UNREADABLE:
                        answer = reply.reason if reply.text is None else shorten(reply.text)
                        raise ValueError(
                            f"None of {num_replies} answers of {endpoint.name} can be read as scores. The answer for "
                            f"{name!r} is {answer}. Use a model that sees images and follows instructions, and "
                            "disable long thinking."
                        )
                    if scores is None and attempt + 1 < max_attempts:
                        unreadable.append(name)
                        continue
                    record = {"key": name, "scores": scores and list(scores), "incomplete": scores is None}
                    about = {"attempts": attempt_numbers[index] + 1, "answer": reply.text, "reason": reply.reason}
                    store.append(record | about)
                    bar.update()
            names = unreadable


def _digests(prompts: Dataset, sources: SourceImages, edits: SystemImages) -> dict[str, str]:
    """Digest the subject of each question (`"semantic/<key>"`, `"quality/<key>"`), except for missing edits."""
    instructions = prompts.with_format(None)["prompt"][:]
    edit_digests = {}
    for row, key in enumerate(edit_keys(prompts)):
        if (file := edits.sets[key].files[0]) is not None:
            edit_digest = hashlib.sha256(file.read_bytes()).hexdigest()
            edit_digests[key] = digest([edit_digest, *sources.digests(row), instructions[row]])
    # All semantic questions first, so that processes share both kinds evenly
    return {f"{kind}/{key}": value for kind in _QUESTIONS for key, value in edit_digests.items()}


def _edit_scores(records: Mapping[str, Mapping[str, Any]]) -> dict[str, EditScore | None]:
    scores: dict[str, EditScore | None] = {}
    for key in [name.partition("/")[2] for name in records if name.startswith(_QUESTIONS[0])]:
        pair = [records[f"{kind}/{key}"]["scores"] for kind in _QUESTIONS]
        lowest = None if None in pair else (float(min(pair[0])), float(min(pair[1])))
        scores[key] = lowest and EditScore(*lowest, compute_overall(*lowest))
    return scores


def gedit_results(
    prompts: Dataset,
    systems: Sequence[System],
    missing: str = "error",
    dataset_name: str | None = None,
    leakage: dict[str, Any] | None = None,
    seed: int = 0,
    source_folder: str | Path | None = None,
    protocol: str = "default",
) -> BenchmarkResults:
    """
    Compute the results of GEdit-Bench: for each language, over all instructions and over the `intersection` subset,
    the mean over task types of the mean over their edits, with intervals, by task type, and as a paired difference of
    two systems.

    Edits without a readable answer are left out, counted and named; a difference is over the edits that have scores of
    both systems. Missing edits are an error or count 0; only the published protocol leaves them out, as the
    benchmark's own script does silently.

    Args:
        prompts ([`~datasets.Dataset`]):
            Editing prompts with `id` and `task_type`, and optionally `language` and `intersection`.
        systems (`Sequence[System]`):
            One system, or two to compare the second with the first. `images` has its edits ([`find_edits`]), and
            `folder` the scores of [`score_edits`].
        missing (`str`, *optional*, defaults to `"error"`), dataset_name (`str`, *optional*), leakage (`dict[str,
        Any]`, *optional*):
            See [`t2is_results`].
        seed (`int`, *optional*, defaults to `0`):
            Seed that the edits were generated with.
        source_folder (`str` or `Path`, *optional*):
            Directory for copies of the sources as PNG. If `None`, results do not include sources.
        protocol (`str`, *optional*, defaults to `"default"`):
            Protocol of the scores: `"default"` or `"published"`.

    Returns:
        `BenchmarkResults`: all results as JSON values, for [`save_generation_report`].
    """
    sources = check_gedit_prompts(prompts)
    prompts = prompts.with_format(None)
    runs = [
        read_scores(system.folder, _digests(prompts, sources, system.images), benchmark=BENCHMARK, protocol=protocol)
        for system in systems
    ]
    check_systems(systems, runs, missing, protocol)
    if not runs[0]:
        raise ValueError(
            f"No judge has scored the edits of {systems[0].name!r} with the protocol {protocol!r}. Score them first."
        )
    rubrics = {run.settings["scorer"]: run.settings["rubric"] for run in runs[0]}
    scores = [{run.settings["scorer"]: _edit_scores(run.records) for run in system_runs} for system_runs in runs]

    columns = ("id", "prompt", "task_type", "language", "intersection")
    names = [name for name in columns if name in prompts.column_names]
    rows = dict(zip(edit_keys(prompts), prompts.select_columns(names), strict=True))
    tables: list[ResultTable] = []
    breakdown_tables: list[ResultTable] = []
    for judge in rubrics:
        values = [
            _values(system, system_scores[judge], seed, protocol)
            for system, system_scores in zip(systems, scores, strict=True)
        ]
        suffix = f", judge: {judge}" * (len(rubrics) > 1)
        judge_tables, judge_breakdowns = _tables(judge, values, rows, seed, suffix)
        tables = tables + judge_tables
        breakdown_tables = breakdown_tables + judge_breakdowns
    unanswered_keys = [
        {
            judge: [key for key, score in judge_scores.items() if score is None]
            for judge, judge_scores in system_scores.items()
        }
        for system_scores in scores
    ]
    notes = [NOTES[f"edits_{protocol}"].format(judge=judge, rubric=rubric) for judge, rubric in rubrics.items()]
    return {
        "benchmark": BENCHMARK,
        "protocol": protocol,
        "dataset": dataset_name,
        "dataset_fingerprint": dataset_fingerprint(prompts, [*names, sources.column]),
        "num_prompts": len(rows),
        "seeds": [seed],
        "systems": [system.entry(keys) for system, keys in zip(systems, unanswered_keys, strict=True)],
        "scorers": {"consistency": list(rubrics)},
        "tables": tables,
        "breakdowns": breakdown_tables,
        "leakage": leakage,
        "alerts": system_alerts(
            systems, unanswered_keys, protocol, "are left out, where the benchmark's own script gives a random score"
        ),
        "notes": [*notes, NOTES["edits_means"], leakage_text(leakage)],
        "sets": [
            {
                "key": key,
                "prompt": row["prompt"],
                "category": row["task_type"],
                "subcategory": row.get("language"),
                "source": _source_file(sources, number, source_folder),
                "pictures": [system.images.sets[key].paths for system in systems],
                "panels": [1, 1],
                "scores": [
                    score._asdict()
                    if (score := next(iter(system_scores.values())).get(key))
                    else dict.fromkeys(METRICS)
                    for system_scores in scores
                ],
            }
            for number, (key, row) in enumerate(rows.items())
        ],
        "headline": "overall",
    }


def _values(
    system: System, scores: Mapping[str, EditScore | None], seed: int, protocol: str
) -> dict[str, dict[SampleKey, float]]:
    """Return the scores of edits by metric. Missing edits count 0, or are left out by the published protocol."""
    zero = dict.fromkeys(system.images.missing if protocol == "default" else (), EditScore(0.0, 0.0, 0.0))
    known_scores = {key: score for key in system.images.sets if (score := zero.get(key, scores.get(key))) is not None}
    return {metric: {(key, seed): getattr(score, metric) for key, score in known_scores.items()} for metric in METRICS}


def _tables(
    judge: str, values: Sequence[Mapping], rows: Mapping[str, dict], seed: int, suffix: str
) -> tuple[list[ResultTable], list[ResultTable]]:
    """Compute the tables of a judge by language, and the breakdowns by task type."""
    tables: list[ResultTable] = []
    breakdown_tables: list[ResultTable] = []
    kinds = dict.fromkeys(METRICS, "dimension") | {"overall": "average"}
    strata: dict[SampleKey, Any] = {(key, seed): row["task_type"] for key, row in rows.items()}
    for language in dict.fromkeys(row.get("language") for row in rows.values()):
        language_rows = {key: row for key, row in rows.items() if row.get("language") == language}
        label = "All languages" if language is None else LANGUAGES.get(language, language)
        subsets = {
            "all instructions": language_rows,
            "intersection subset": [key for key in language_rows if language_rows[key].get("intersection")],
        }
        for subset, subset_keys in subsets.items():
            scorer = f"{label}: {subset}, judge {judge}"
            metric_rows = [MetricRow(name, title, kinds[name], scorer, [name]) for name, title in METRICS.items()]
            tables += (
                [compute_table(f"{label}: {subset}{suffix}", metric_rows, values, subset_keys, strata)]
                if subset_keys
                else []
            )
        metric_rows = [metric_row._replace(scorer=f"judge {judge}") for metric_row in metric_rows]
        task_types = {key: row["task_type"] for key, row in language_rows.items()}
        breakdown_tables += compute_breakdowns(f"By task type, {label}", metric_rows, values, task_types)
    return tables, breakdown_tables


def _source_file(sources: SourceImages, row: int, source_folder: str | Path | None) -> str | None:
    """Write the first source of a row to `source_folder`, and return its path."""
    if source_folder is None:
        return None
    path = Path(source_folder).expanduser().absolute() / f"{sources.digests(row)[0][:32]}.png"
    if not path.exists():
        write_atomically(path, to_png(sources.load(row)[0]))
    return str(path)
