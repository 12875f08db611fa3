# SPDX-License-Identifier: Apache-2.0
"""Evaluate edits on GEdit-Bench (https://huggingface.co/papers/2504.17761), scored by a served vision-language model."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm.auto import tqdm

from ..data.source_images import SourceImages
from ..evaluation.runs import dataset_fingerprint
from ..generation.edits import edit_keys
from ..utils.chat import ChatEndpoint, ChatRequest
from ..utils.files import digest, to_png, write_atomically
from ..utils.text import shorten, some_of
from .gedit_protocols import PLACEHOLDER, EditProtocol, edit_protocol, overall
from .image_sets import FoundImages, load_image_file
from .report_content import NOTES
from .score_store import ScoreStore, read_scores
from .statistics import Unit, breakdown, metric_row, paired_cells
from .systems import System, check_results_arguments, condition_notes, package_versions


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)

BENCHMARK = "GEdit-Bench"
METRICS = {
    name: name.replace("_", " ").capitalize() for name in ("semantic_consistency", "perceptual_quality", "overall")
}
LANGUAGES = {"en": "English", "cn": "Chinese"}
_QUESTIONS = ("semantic", "quality")
# Stop after this many answers without a readable one
_ONLY_NONSENSE = 24


class EditScore(NamedTuple):
    """Scores of an edit, each from 0 to 10."""

    semantic_consistency: float  # how far the instruction was carried out, or the rest preserved: the lower of the two
    perceptual_quality: float  # how natural the image is, or how free of flaws: the lower of the two
    overall: float  # geometric mean of both


class _Scored(NamedTuple):
    """A system with the scores of each judge, by key; `None` where a judge gave no readable answer."""

    system: System
    by_judge: dict[str, dict[str, EditScore | None]]
    rubrics: dict[str, str]

    def unanswered(self, judge: str) -> list[str]:
        return [key for key, score in self.by_judge[judge].items() if score is None]


def score_edits(
    endpoint: ChatEndpoint,
    prompts: "Dataset",
    edits: FoundImages,
    folder: str | Path,
    max_attempts: int | None = None,
    rescore_changed: bool = False,
    protocol: str = "default",
    gedit_repo: str | Path | None = None,
) -> dict[str, EditScore | None]:
    """
    Query a served vision-language model with two questions about each edit, each with two numbers from 0 to 10: from source and
    edit, how far the instruction was carried out and how well the rest was preserved; from the edit alone, how natural
    and how free of flaws it is. The lower number of each pair counts, and overall their geometric mean.

    With `protocol="default"`, images are sent with an area of 512 x 512 pixels and their own aspect ratio, the source
    first. A question is asked at temperature 0, and if the answer is unreadable again at 0.7 with another seed. With
    `protocol="published"`, the judge is queried as the benchmark's own script queries GPT-4.1, and its answers are read
    as that script reads them; docs/evaluate.md lists what is different. Give `input_image` as source, as the
    script does (`load_edit_prompts(..., source_column="input_image")`).

    Each answer is saved as it comes: interrupted runs resume, on any number of processes (`accelerate launch`), which
    share the questions. A question without a readable answer is asked again by the next run.

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
            Directory of the system; the answers go to `scores` in it, also those of several protocols.
        max_attempts (`int`, *optional*):
            How often a question is asked in one run. If `None`, 3, or with the published protocol 2, as its script does.
        rescore_changed (`bool`, *optional*, defaults to `False`):
            Whether to score edits again that have changed since they were scored, and to drop the scores of those that
            are gone. Otherwise they are an error.
        protocol (`str`, *optional*, defaults to `"default"`):
            `"default"` or `"published"`.
        gedit_repo (`str` or `Path`, *optional*):
            Clone of `stepfun-ai/Step1X-Edit`, from which the published prompts are read.

    Returns:
        `dict[str, EditScore | None]`: key (`"<language>/<id>"`, or the id without the column `language`) -> scores; `None`
        for an edit with an unreadable answer, which is also logged.

    Raises:
        EndpointUnavailableError: If the judge cannot be queried. Earlier answers are kept.
        ValueError: If an image or an instruction has changed since it was scored, or no answer is readable.
    """
    asked = edit_protocol(protocol, gedit_repo)
    max_attempts = asked.max_attempts if max_attempts is None else max_attempts
    if max_attempts < 1:
        raise ValueError(f"`max_attempts` is {max_attempts}, but must be at least 1.")
    sources = _sources_of(prompts)
    row_of, files = {key: row for row, key in enumerate(edit_keys(prompts))}, _files(edits)
    instructions = list(prompts.with_format(None)["prompt"])

    def request(name: str, attempt: int) -> ChatRequest:
        kind, _, key = name.partition("/")
        row, question = row_of[key], asked.questions[kind]
        if kind == "semantic":
            question = question.replace(PLACEHOLDER, instructions[row])  # not `format`, which would read braces
        if protocol == "published":
            # As the script reads an edit: transparency is dropped, and it gets the size of the source
            (source,) = sources.load(row, in_rgb=False)
            images = [source, load_image_file(files[key], lambda image: image.convert("RGB").resize(source.size))]
        else:
            images = [*sources.load(row), load_image_file(files[key])]
        return asked.request(question, images if kind == "semantic" else images[-1:], name, attempt)

    digests = _digests(prompts, sources, files)
    settings = {"benchmark": BENCHMARK, "kind": "edits", "scorer": endpoint.model, "protocol": protocol}
    settings["rubric"] = digest(list(asked.questions.values()))[:16]
    with ScoreStore(folder, f"{BENCHMARK} {protocol} {endpoint.model}", settings, digests, rescore_changed) as store:
        _query(endpoint, store, request, asked, max_attempts)
        records = store.finish()
    scores = _edit_scores(records, files)
    unanswered = [key for key, score in scores.items() if score is None]
    if unanswered and store.is_main_process:
        logger.warning(
            f"{endpoint.model} gave no readable answer about {len(unanswered)} of {len(scores)} edits in {max_attempts} "
            f"attempt(s), so these have no score: {some_of(unanswered)}. Its answers are in {store.folder}. Re-run to "
            "query it about these alone."
        )
    return scores


def check_gedit_prompts(prompts: "Dataset") -> None:
    """Refuse prompts whose edits could be generated, but not scored and reported."""
    edit_keys(prompts)
    _sources_of(prompts)
    if "task_type" not in prompts.column_names or None in prompts["task_type"][:]:
        raise ValueError(
            "GEdit-Bench averages over task types: all prompts need a `task_type` (`convert_gedit_bench`)."
        )


def _sources_of(prompts: "Dataset") -> SourceImages:
    sources = SourceImages(prompts, "the prompts")
    if sources.max_count > 1:
        raise ValueError(
            f"Row {sources.row_with_most} of the prompts has {sources.max_count} source images, but the judge sees one: "
            "`load_edit_prompts(..., max_images=1)`."
        )
    return sources


def _query(
    endpoint: ChatEndpoint, store: ScoreStore, request: Callable, protocol: EditProtocol, max_attempts: int
) -> None:
    """Query the judge with this process's part of the questions, and again where an answer is unreadable."""
    earlier, names = _earlier_attempts(store), store.pending
    if not names:
        return
    endpoint.check()
    # If some questions are done, there were readable answers before
    num_replies, is_readable = 0, store.num_done > 0
    title = f"Querying {endpoint.model} about edits"
    with tqdm(total=len(names), desc=title, unit="question", disable=not store.is_main_process) as bar:
        for attempt in range(max_attempts):
            # Attempts of earlier runs count: their seeds would give the same answers again
            numbers = [earlier.get(name, 0) + attempt for name in names]
            unreadable = []
            with closing(endpoint.ask_all(map(request, names, numbers))) as replies:
                for place, reply in replies:
                    name = names[place]
                    num_replies += 1
                    scores = None if reply.text is None else protocol.read(reply.text, attempt > 0)
                    is_readable = is_readable or scores is not None
                    if not is_readable and num_replies >= _ONLY_NONSENSE:
                        answer = reply.problem if reply.text is None else shorten(reply.text)
                        raise ValueError(
                            f"None of {num_replies} answers of {endpoint.name} can be read as scores. That for {name!r} is "
                            f"{answer}. Use a model that sees images and follows instructions, and turn long thinking off."
                        )
                    if scores is None and attempt + 1 < max_attempts:
                        unreadable.append(name)
                        continue
                    record = {"key": name, "digest": store.digests[name], "scores": scores and list(scores)}
                    about = {"incomplete": scores is None, "attempts": numbers[place] + 1}
                    store.append({**record, **about, "answer": reply.text, "problem": reply.problem})
                    bar.update()
            names = unreadable
            if not names:
                return


def _earlier_attempts(store: ScoreStore) -> dict[str, int]:
    """Count how often each question was asked in earlier runs."""
    from accelerate.utils import gather_object

    gather_object([None])  # all files exist
    attempts: dict[str, int] = {}
    # File by file: in a run with another number of processes, another one may have asked
    for part in store.parts():
        for name, record in store.check([part]).items():
            attempts[name] = max(record["attempts"], attempts.get(name, 0))
    gather_object([None])  # no process writes before all have read
    return attempts


def _files(edits: FoundImages) -> dict[str, Path]:
    """Return the file of each edit that is not missing."""
    return {key: file for key, one in edits.sets.items() for file in one.files if file is not None}


def _digests(prompts: "Dataset", sources: SourceImages, files: Mapping[str, Path]) -> dict[str, str]:
    """Digest what each question (`"semantic/<key>"`, `"quality/<key>"`) is about."""
    instructions, seen = prompts.with_format(None)["prompt"][:], {}
    for row, key in enumerate(edit_keys(prompts)):
        if key in files:
            edited = hashlib.sha256(files[key].read_bytes()).hexdigest()
            seen[key] = digest([edited, *sources.digests(row), instructions[row]])
    # Kind by kind, so that processes share the questions of each
    return {f"{kind}/{key}": seen[key] for kind in _QUESTIONS for key in files}


def _edit_scores(records: Mapping[str, Mapping[str, Any]], keys: Iterable[str]) -> dict[str, EditScore | None]:
    scores: dict[str, EditScore | None] = {}
    for key in keys:
        pair = [records[f"{kind}/{key}"]["scores"] for kind in _QUESTIONS]
        lowest = None if None in pair else (float(min(pair[0])), float(min(pair[1])))
        scores[key] = lowest and EditScore(*lowest, overall(*lowest))
    return scores


def gedit_results(
    prompts: "Dataset",
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
            Directory for copies, as PNG, of sources that are not files. If `None`, the results name no file of these.
        protocol (`str`, *optional*, defaults to `"default"`):
            Protocol whose scores are taken: `"default"` or `"published"`.

    Returns:
        `dict[str, Any]`: all figures, as JSON has them; [`save_generation_report`] writes it.
    """
    check_results_arguments(systems, missing, protocol)
    check_gedit_prompts(prompts)
    keys, prompts = edit_keys(prompts), prompts.with_format(None)
    for system in systems:
        if system.found.sets.keys() != set(keys):
            raise ValueError(f"The edits of {system.name!r} are of other prompts. Call `find_edits` with the same.")
    sources = SourceImages(prompts, "the prompts")
    scored = [_scored(system, prompts, sources, protocol) for system in systems]
    rubrics = [one.rubrics for one in scored]
    if rubrics[0] != rubrics[-1]:
        raise ValueError(
            f"{systems[0].name!r} has scores of {', '.join(rubrics[0])} and {systems[-1].name!r} of "
            f"{', '.join(rubrics[-1])}: compare those of the same judges, asked with the same prompts."
        )

    columns = ("id", "prompt", "task_type", "language", "intersection")
    names = [name for name in columns if name in prompts.column_names]
    rows = dict(zip(keys, prompts.select_columns(names), strict=True))
    judges = list(rubrics[0])
    alerts = _alerts(scored, protocol)
    notes = [NOTES[f"edits_{protocol}"].format(judge=judge, rubric=rubric) for judge, rubric in rubrics[0].items()]
    notes += [NOTES["edits_means"]] + ([] if leakage is None else [NOTES["edits_leakage"]])
    by_judge = [_judge_tables(scored, judge, rows, seed, protocol) for judge in judges]
    return {
        "benchmark": BENCHMARK,
        "protocol": protocol,
        "dataset": dataset_name,
        "dataset_fingerprint": dataset_fingerprint(prompts, names, [sources.column]),
        "num_prompts": len(keys),
        "seeds": [seed],
        "systems": [one.system.describe(_counts(one)) for one in scored],
        "scorers": {"consistency": judges, "alignment": None, "aesthetics": None},
        "weights": None,
        "tables": [table for tables, _ in by_judge for table in tables],
        "breakdowns": [part for _, breakdowns in by_judge for part in breakdowns],
        "leakage": leakage,
        "alerts": alerts,
        "notes": [*notes, *alerts],
        "sets": [
            {
                "key": key,
                "prompt_id": row["id"],
                "prompt": row["prompt"],
                "category": row["task_type"],
                "subcategory": row.get("language"),
                "source": _source_file(sources, number, source_folder),
                "pictures": [[str(file) for file in s.found.sets[key].files if file] for s in systems],
                "panels": [1, 1],
                "scores": [
                    score._asdict() if (score := one.by_judge[judges[0]].get(key)) else dict.fromkeys(METRICS)
                    for one in scored
                ],
            }
            for number, (key, row) in enumerate(rows.items())
        ],
        "headline": "overall",
        "versions": package_versions(),
    }


def _scored(system: System, prompts: "Dataset", sources: SourceImages, protocol: str) -> _Scored:
    files = _files(system.found)
    found = read_scores(system.folder, _digests(prompts, sources, files), benchmark=BENCHMARK, protocol=protocol)
    if not found:
        raise ValueError(
            f"No judge has scored the edits of {system.name!r} ({system.folder}) under the protocol {protocol!r}."
        )
    rubrics = {scores.settings["scorer"]: scores.settings["rubric"] for scores in found}
    return _Scored(system, {s.settings["scorer"]: _edit_scores(s.records, files) for s in found}, rubrics)


def _judge_tables(
    scored: list[_Scored], judge: str, rows: dict[str, dict], seed: int, protocol: str
) -> tuple[list[dict], list[dict]]:
    """Compute the tables and breakdowns of a judge, by language."""

    def cells(metric: str, part: dict[str, dict], strata: dict | None = None) -> tuple:
        values: list[dict[Unit, float]] = [{} for _ in scored]
        for one, of_system in zip(scored, values, strict=True):
            for key, row in part.items():
                score = one.by_judge[judge].get(key)
                if score is not None:
                    of_system[row["id"], seed] = getattr(score, metric)
                elif one.system.found.sets[key].missing and protocol == "default":
                    of_system[row["id"], seed] = 0.0
        return paired_cells([[of_system] for of_system in values], strata=strata)

    def table(title: str, part: dict[str, dict]) -> dict[str, Any]:
        strata = {(row["id"], seed): row["task_type"] for row in part.values()}
        kinds = dict.fromkeys(METRICS, "dimension") | {"overall": "average"}
        lines = [metric_row(name, label, kinds[name], *cells(name, part, strata)) for name, label in METRICS.items()]
        return {"title": title, "rows": lines}

    tables, breakdowns = [], []
    of_judge = f", judge: {judge}" if len(scored[0].by_judge) > 1 else ""
    for language in dict.fromkeys(row.get("language") for row in rows.values()):
        spoken = {key: row for key, row in rows.items() if row.get("language") == language}
        label = "All languages" if language is None else LANGUAGES.get(language, language)
        title = f"{label}: all instructions{of_judge}"
        tables.append(table(title, spoken))
        members: dict[str, dict[str, dict]] = {}
        for key, row in spoken.items():
            members.setdefault(row["task_type"], {})[key] = row
        breakdowns.append(breakdown(f"By task type, {label}{of_judge}", title, list(METRICS), members, cells))
        if subset := {key: row for key, row in spoken.items() if row.get("intersection")}:
            tables.append(table(f"{label}: intersection subset{of_judge}", subset))
    return tables, breakdowns


def _counts(one: _Scored) -> dict[str, int]:
    found = one.system.found
    counts = {"edits": len(found.sets) - len(found.missing), "missing edits": len(found.missing)}
    counts |= {f"edits without an answer ({judge})": len(one.unanswered(judge)) for judge in one.by_judge}
    return counts | {"images of no prompt, left out": len(found.unknown)}


def _alerts(scored: list[_Scored], protocol: str) -> list[str]:
    """List what readers must know next to the headline."""
    alerts = condition_notes([one.system for one in scored])
    for one in scored:
        name, missing = one.system.name, list(one.system.found.missing)
        if missing:
            how = "count 0" if protocol == "default" else "are left out, as by the benchmark's own script"
            alerts.append(f"{name}: {len(missing)} missing edits {how} ({some_of(missing)}).")
        for judge in one.by_judge:
            if unanswered := one.unanswered(judge):
                script = " The benchmark's own script gives them a random score." * (protocol == "published")
                alerts.append(
                    f"{name}: {len(unanswered)} edits are left out, also of differences, because {judge} gave no readable "
                    f"answer about them ({some_of(unanswered)}).{script}"
                )
    return alerts


def _source_file(sources: SourceImages, row: int, source_folder: str | Path | None) -> str | None:
    """Name the file of a row's first source; one stored as bytes is written to `source_folder`."""
    file = sources.files(row)[0]
    if file is not None:
        return str(file.absolute())
    if source_folder is None:
        return None
    path = Path(source_folder).expanduser().absolute() / f"{sources.digests(row)[0][:32]}.png"
    if not path.exists():
        write_atomically(path, to_png(sources.load(row)[0]))
    return str(path)
