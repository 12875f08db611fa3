# SPDX-License-Identifier: Apache-2.0
"""Evaluate edits on GEdit-Bench (https://huggingface.co/papers/2504.17761), scored by a served vision-language model."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast

from datasets import Dataset
from tqdm.auto import tqdm

from ..data.source_images import SourceImages
from ..evaluation.runs import dataset_fingerprint
from ..generation.edits import edit_keys
from ..utils.chat import ChatEndpoint, ChatRequest
from ..utils.files import digest, write_atomically
from ..utils.images import to_png
from ..utils.text import shorten, some_of
from .gedit_protocols import PLACEHOLDER, EditProtocol, edit_protocol, overall
from .image_sets import FoundImages, load_image_file
from .leakage import leakage_text
from .score_store import ScoreStore, open_scores, read_scores
from .statistics import NOTES, Line, System, Unit, breakdowns, check_systems, system_alerts, table


logger = logging.getLogger(__name__)

BENCHMARK = "GEdit-Bench"
METRICS = {
    name: name.replace("_", " ").capitalize() for name in ("semantic_consistency", "perceptual_quality", "overall")
}
LANGUAGES = {"en": "English", "cn": "Chinese"}
_QUESTIONS = ("semantic", "quality")
# Stop after this many answers without a readable one
_MAX_UNREADABLE = 24


class EditScore(NamedTuple):
    """Scores of an edit, each from 0 to 10."""

    semantic_consistency: float  # how far the instruction was carried out, or the rest preserved: the lower of the two
    perceptual_quality: float  # how natural the image is, or how free of flaws: the lower of the two
    overall: float  # geometric mean of both


def score_edits(
    endpoint: ChatEndpoint,
    prompts: Dataset,
    edits: FoundImages,
    folder: str | Path,
    max_attempts: int | None = None,
    protocol: str = "default",
    gedit_repo: str | Path | None = None,
) -> dict[str, EditScore | None]:
    """
    Query a served vision-language model with two questions about each edit, each with two numbers from 0 to 10: from source
    and edit, how far the instruction was carried out and how well the rest was preserved; from the edit alone, how natural
    and how free of flaws it is. The lower number of each pair counts, and overall their geometric mean.

    By default, images are sent with an area of 512 x 512 pixels and their own aspect ratio, the source first, at
    temperature 0; an unreadable answer is asked for again at 0.7 with another seed. With `protocol="published"`, the judge
    is queried as the benchmark's own script queries GPT-4.1, and its answers are read as that script reads them, with
    `input_image` as source (`load_edit_prompts(..., source_column="input_image")`).

    Each answer is saved as it comes: interrupted runs resume, on any number of processes. A question without a readable
    answer, or about an edit that has changed, is asked again by the next run.

    > [!WARNING]
    > The default prompts are this project's own, and scores depend on prompt and judge: they do not compare with
    > published tables, nor do those of the published protocol by another judge than that of the table.

    Args:
        endpoint ([`~paco_trl.dataset_building.ChatEndpoint`]):
            The judge.
        prompts ([`~datasets.Dataset`]):
            Editing prompts with `id` and one source each.
        edits ([`FoundImages`]):
            The edited images, from [`find_edits`]. Prompts without one are skipped.
        folder (`str` or `Path`):
            Directory of the system; the answers go to `scores` in it.
        max_attempts (`int`, *optional*):
            How often a question is asked in one run. If `None`, 3, or with the published protocol 2, as its script does.
        protocol (`str`, *optional*, defaults to `"default"`):
            `"default"` or `"published"`.
        gedit_repo (`str` or `Path`, *optional*):
            Clone of `stepfun-ai/Step1X-Edit`, from which the published prompts are read.

    Returns:
        `dict[str, EditScore | None]`: key (`"<language>/<id>"`, or the id without the column `language`) -> scores; `None`
        for an edit with an unreadable answer, which is also logged.

    Raises:
        EndpointUnavailableError: If the judge cannot be queried. Earlier answers are kept.
        ValueError: If no answer is readable.
    """
    asked = edit_protocol(protocol, gedit_repo)
    max_attempts = asked.max_attempts if max_attempts is None else max_attempts
    sources = _sources_of(prompts)
    row_of = {key: row for row, key in enumerate(edit_keys(prompts))}
    instructions = prompts.with_format(None)["prompt"][:]

    def request(name: str, attempt: int) -> ChatRequest:
        kind, _, key = name.partition("/")
        row, question = row_of[key], asked.questions[kind]
        file = cast(Path, edits.sets[key].files[0])
        if kind == "semantic":
            question = question.replace(PLACEHOLDER, instructions[row])  # not `format`, which would read braces
        if protocol == "published":
            # As the script reads an edit: transparency is dropped, and it gets the size of the source
            (source,) = sources.load(row, in_rgb=False)
            images = [source, load_image_file(file, lambda image: image.convert("RGB").resize(source.size))]
        else:
            images = [*sources.load(row), load_image_file(file)]
        return asked.request(question, images if kind == "semantic" else images[-1:], name, attempt)

    settings = {"benchmark": BENCHMARK, "kind": "edits", "scorer": endpoint.model, "protocol": protocol}
    settings["rubric"] = digest(list(asked.questions.values()))[:16]
    digests = _digests(prompts, sources, edits)
    with open_scores(folder, f"{BENCHMARK} {protocol} {endpoint.model}", settings, digests) as store:
        _query(endpoint, store, request, asked, max_attempts)
        scores = _edit_scores(store.finish())
    unanswered = [key for key, score in scores.items() if score is None]
    if unanswered and store.is_main_process:
        logger.warning(
            f"{endpoint.model} gave no readable answer about {len(unanswered)} of {len(scores)} edits in "
            f"{max_attempts} attempt(s): {some_of(unanswered)}. Its answers are in {store.folder}. Re-run to query it "
            "about these alone."
        )
    return scores


def check_gedit_prompts(prompts: Dataset) -> None:
    """Refuse prompts whose edits could be generated, but not scored and reported."""
    _sources_of(prompts)
    if "task_type" not in prompts.column_names or None in prompts["task_type"][:]:
        raise ValueError("GEdit-Bench averages over task types: all prompts need a `task_type`.")


def _sources_of(prompts: Dataset) -> SourceImages:
    sources = SourceImages(prompts, "the prompts")
    if sources.max_count > 1:
        raise ValueError(
            f"Row {sources.row_with_most} of the prompts has {sources.max_count} source images, but the judge sees "
            "one: `load_edit_prompts(..., max_images=1)`."
        )
    return sources


def _query(
    endpoint: ChatEndpoint, store: ScoreStore, request: Callable, protocol: EditProtocol, max_attempts: int
) -> None:
    """Query the judge with this process's part of the questions, and again where an answer is unreadable."""
    if not (names := store.pending):
        return
    endpoint.check()
    num_replies, is_readable = 0, not store.is_new
    title = f"Querying {endpoint.model} about edits"
    with tqdm(total=len(names), desc=title, unit="question", disable=not store.is_main_process) as bar:
        for attempt in range(max_attempts):
            # Attempts of earlier runs count: their seeds would give the same answers again
            numbers = [store.earlier.get(name, {"attempts": 0})["attempts"] + attempt for name in names]
            unreadable = []
            with closing(endpoint.ask_all(map(request, names, numbers))) as replies:
                for index, reply in replies:
                    name = names[index]
                    num_replies += 1
                    scores = None if reply.text is None else protocol.read(reply.text, attempt > 0)
                    is_readable = is_readable or scores is not None
                    if not is_readable and num_replies >= _MAX_UNREADABLE:
                        answer = reply.reason if reply.text is None else shorten(reply.text)
                        raise ValueError(
                            f"None of {num_replies} answers of {endpoint.name} can be read as scores. That for {name!r} is "
                            f"{answer}. Use a model that sees images and follows instructions, and turn long thinking off."
                        )
                    if scores is None and attempt + 1 < max_attempts:
                        unreadable.append(name)
                        continue
                    record = {"key": name, "scores": scores and list(scores), "incomplete": scores is None}
                    about = {"attempts": numbers[index] + 1, "answer": reply.text, "reason": reply.reason}
                    store.append(record | about)
                    bar.update()
            names = unreadable


def _digests(prompts: Dataset, sources: SourceImages, edits: FoundImages) -> dict[str, str]:
    """Digest what each question (`"semantic/<key>"`, `"quality/<key>"`) is about; missing edits have none."""
    instructions, seen = prompts.with_format(None)["prompt"][:], {}
    for row, key in enumerate(edit_keys(prompts)):
        if (file := edits.sets[key].files[0]) is not None:
            edited = hashlib.sha256(file.read_bytes()).hexdigest()
            seen[key] = digest([edited, *sources.digests(row), instructions[row]])
    # Kind by kind, so that processes share the questions of each
    return {f"{kind}/{key}": value for kind in _QUESTIONS for key, value in seen.items()}


def _edit_scores(records: Mapping[str, Mapping[str, Any]]) -> dict[str, EditScore | None]:
    scores: dict[str, EditScore | None] = {}
    for key in [name.partition("/")[2] for name in records if name.startswith(_QUESTIONS[0])]:
        pair = [records[f"{kind}/{key}"]["scores"] for kind in _QUESTIONS]
        lowest = None if None in pair else (float(min(pair[0])), float(min(pair[1])))
        scores[key] = lowest and EditScore(*lowest, overall(*lowest))
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
) -> dict[str, Any]:
    """
    Compute the figures of GEdit-Bench: for each language, over all instructions and over those with `intersection`, the
    mean over the task types of the mean over the edits of each, with intervals, by task type, and as a paired difference
    of two systems.

    Edits without a readable answer are left out, counted and named; a difference is over the edits that have scores of
    both systems. Missing edits are an error or count 0; only the published protocol leaves them out, as the benchmark's
    own script does silently.

    Args:
        prompts ([`~datasets.Dataset`]):
            Editing prompts with `id` and `task_type`, and optionally `language` and `intersection`.
        systems (`Sequence[System]`):
            One system, or two, of which the second is compared with the first. `found` has its edits ([`find_edits`]),
            and `folder` the scores of [`score_edits`].
        missing (`str`, *optional*, defaults to `"error"`), dataset_name (`str`, *optional*), leakage (`dict[str, Any]`, *optional*):
            As in [`t2is_results`].
        seed (`int`, *optional*, defaults to `0`):
            Seed that the edits were generated with.
        source_folder (`str` or `Path`, *optional*):
            Directory for copies of the sources, as PNG. If `None`, the results name no file of them.
        protocol (`str`, *optional*, defaults to `"default"`):
            Protocol whose scores are taken: `"default"` or `"published"`.

    Returns:
        `dict[str, Any]`: all figures, as JSON has them; [`save_generation_report`] writes it.
    """
    check_gedit_prompts(prompts)
    sources, prompts = SourceImages(prompts, "the prompts"), prompts.with_format(None)
    stored = [
        read_scores(system.folder, _digests(prompts, sources, system.images), benchmark=BENCHMARK, protocol=protocol)
        for system in systems
    ]
    check_systems(systems, stored, missing, protocol)
    if not stored[0]:
        raise ValueError(f"No judge has scored the edits of {systems[0].name!r} under the protocol {protocol!r}.")
    rubrics = {run.settings["scorer"]: run.settings["rubric"] for run in stored[0]}
    scores = [{run.settings["scorer"]: _edit_scores(run.records) for run in of_system} for of_system in stored]

    columns = ("id", "prompt", "task_type", "language", "intersection")
    names = [name for name in columns if name in prompts.column_names]
    rows = dict(zip(edit_keys(prompts), prompts.select_columns(names), strict=True))
    tables: list[dict] = []
    parts: list[dict] = []
    for judge in rubrics:
        values = [
            _values(system, of_system[judge], seed, protocol)
            for system, of_system in zip(systems, scores, strict=True)
        ]
        of_judge = _tables(judge, values, rows, seed, ends=f", judge: {judge}" * (len(rubrics) > 1))
        tables, parts = tables + of_judge[0], parts + of_judge[1]
    gaps = [
        {judge: [key for key, score in of_judge.items() if score is None] for judge, of_judge in of_system.items()}
        for of_system in scores
    ]
    notes = [NOTES[f"edits_{protocol}"].format(judge=judge, rubric=rubric) for judge, rubric in rubrics.items()]
    return {
        "benchmark": BENCHMARK,
        "protocol": protocol,
        "dataset": dataset_name,
        "dataset_fingerprint": dataset_fingerprint(prompts, [*names, sources.column]),
        "num_prompts": len(rows),
        "seeds": [seed],
        "systems": [system.describe(of_system) for system, of_system in zip(systems, gaps, strict=True)],
        "scorers": {"consistency": list(rubrics)},
        "tables": tables,
        "breakdowns": parts,
        "leakage": leakage,
        "alerts": system_alerts(
            systems, gaps, protocol, "are left out, where the benchmark's own script gives a random score"
        ),
        "notes": [*notes, NOTES["edits_means"], leakage_text(leakage)],
        "sets": [
            {
                "key": key,
                "prompt": row["prompt"],
                "category": row["task_type"],
                "subcategory": row.get("language"),
                "source": _source_file(sources, number, source_folder),
                "pictures": [[file and str(file) for file in system.images.sets[key].files] for system in systems],
                "panels": [1, 1],
                "scores": [
                    score._asdict() if (score := next(iter(of_system.values())).get(key)) else dict.fromkeys(METRICS)
                    for of_system in scores
                ],
            }
            for number, (key, row) in enumerate(rows.items())
        ],
        "headline": "overall",
    }


def _values(
    system: System, scores: Mapping[str, EditScore | None], seed: int, protocol: str
) -> dict[str, dict[Unit, float]]:
    """Give each edit its scores by metric; a missing one counts 0, or is left out by the published protocol."""
    zero = dict.fromkeys(system.images.missing if protocol == "default" else (), EditScore(0.0, 0.0, 0.0))
    known = {key: score for key in system.images.sets if (score := zero.get(key, scores.get(key))) is not None}
    return {metric: {(key, seed): getattr(score, metric) for key, score in known.items()} for metric in METRICS}


def _tables(
    judge: str, values: Sequence[Mapping], rows: Mapping[str, dict], seed: int, ends: str
) -> tuple[list, list]:
    """Compute the tables of a judge by language, and those by task type."""
    tables, parts = [], []
    kinds = dict.fromkeys(METRICS, "dimension") | {"overall": "average"}
    strata: dict[Unit, Any] = {(key, seed): row["task_type"] for key, row in rows.items()}
    for language in dict.fromkeys(row.get("language") for row in rows.values()):
        spoken = {key: row for key, row in rows.items() if row.get("language") == language}
        label = "All languages" if language is None else LANGUAGES.get(language, language)
        named = {
            "all instructions": spoken,
            "intersection subset": [key for key in spoken if spoken[key].get("intersection")],
        }
        for what, part in named.items():
            scorer = f"{label}: {what}, judge {judge}"
            lines = [Line(name, title, kinds[name], scorer, [name]) for name, title in METRICS.items()]
            tables += [table(f"{label}: {what}{ends}", lines, values, part, strata)] if part else []
        lines = [line._replace(scorer=f"judge {judge}") for line in lines]
        task_types = {key: row["task_type"] for key, row in spoken.items()}
        parts += breakdowns(f"By task type, {label}", lines, values, task_types)
    return tables, parts


def _source_file(sources: SourceImages, row: int, source_folder: str | Path | None) -> str | None:
    """Write a row's first source to `source_folder`, and name the file."""
    if source_folder is None:
        return None
    path = Path(source_folder).expanduser().absolute() / f"{sources.digests(row)[0][:32]}.png"
    if not path.exists():
        write_atomically(path, to_png(sources.load(row)[0]))
    return str(path)
