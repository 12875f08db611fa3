# SPDX-License-Identifier: Apache-2.0
"""Rendering of cards as Markdown with the Hub's metadata."""

import glob
import hashlib
import itertools
import json
import logging
import re
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import ModelCard, ModelCardData
from PIL.Image import Image

from ..data import demo_prompts_path, theme_question
from ..utils.files import apply_umask, read_template, write_atomically
from ..utils.images import to_png
from ..utils.model_files import CARD_DATA_FILE
from ..utils.names import is_on_hub, public_name, relative_name, repository
from ..utils.text import markdown_text
from .card_data import ImageModelCardData, JudgeCardData, load_card_data, save_card_data
from .files import (
    JUDGE_PICTURES,
    PICTURES,
    check_no_foreign_files,
    find_published_patterns,
    saved_pictures,
    select_files,
)


logger = logging.getLogger(__name__)  # one process writes; a script may have no accelerator

# Marks where evaluations add their results to a card
RESULTS = "<!-- results -->"

_CITATIONS = yaml.safe_load(read_template("citations.yaml"))
_TEMPLATES = jinja2.Environment(loader=jinja2.PackageLoader("paco_trl"))


def render_card(card: ImageModelCardData | JudgeCardData) -> ModelCard:
    """Render a card. Sections and rows without content are left out."""
    base_model = public_name(card.base_model)
    bases = _CITATIONS["bases"].items()
    base_citation = next((citation for part, citation in bases if part.lower() in base_model.lower()), None)
    lora_rows = [*card.lora.rows()] if card.lora else []
    settings = [(f"`{name}`", value) for name, value in card.settings.items()]
    context: dict[str, Any] = {
        "card": card,
        "results": RESULTS,
        "base_model": base_model,
        "base_path": relative_name(card.base_model),
        "library": f"[paco_trl]({repository()})" if repository() else "paco_trl",
        "repository": repository(),
        "base_link": f"[{base_model}](https://huggingface.co/{base_model})" if is_on_hub(base_model) else base_model,
        "is_base_on_hub": is_on_hub(base_model),  # even if it was loaded from the Hub's cache
        "merged_adapter": public_name(card.merged_adapter) if card.merged_adapter else None,
        "settings": [*lora_rows, *settings] if settings else [],
        "lora_rows": lora_rows,
        "time": _duration(card.seconds) if card.seconds else None,
        "citations": [card.paper["citation"].strip(), _CITATIONS["trl"], *filter(None, [base_citation])],
        "is_base_cited": base_citation is not None,
        "cell": markdown_text,
    }
    if isinstance(card, JudgeCardData):
        context["served_name"] = re.sub(r"[^\w.-]", "-", card.repo_id.split("/")[-1]).lower()
        context["question"] = repr(card.settings.get("question") or theme_question("A fox through the four seasons"))
        context["accuracy_intervals"] = [
            _interval(evaluation["decision_accuracy"], evaluation["pairs"]) for evaluation in card.evaluations.values()
        ]
    else:
        context |= {"code": _code, **_example(card)}
    model_card = ModelCard(_TEMPLATES.get_template(card.template).render(context, card_data=metadata(card).to_yaml()))
    model_card.text = re.sub(r"\n{3,}", "\n\n", model_card.text).rstrip() + "\n"
    return model_card


def save_card(
    card: ImageModelCardData | JudgeCardData, folder: str | Path, pictures: Mapping[str, Path | Image] | None = None
) -> None:
    """
    Save a card as `README.md` and `paco_trl.json`, with its new `pictures`. Delete the pictures of an earlier card that
    the new card does not have.

    Raises:
        ValueError: If the directory already has files of these names that paco_trl did not write.
    """
    with saving_model(card, folder, pictures or {}):
        pass  # the card alone


@contextmanager
def saving_model(
    card: ImageModelCardData | JudgeCardData,
    folder: str | Path,
    pictures: Mapping[str, Path | Image],
    published_patterns: Collection[str] = (),
) -> Iterator[None]:
    """
    Save a card and, within the body, the files of its model, which match `published_patterns`.

    The model replaces an earlier model of any kind; without patterns, only an earlier card is replaced. Where several
    processes save together, call [`check_no_foreign_files`] on all of them before, so that none fails here alone.

    Raises:
        ValueError: If the directory already has files of these names that paco_trl did not write.
    """
    names = published_patterns or [CARD_DATA_FILE, "README.md", *map(glob.escape, pictures)]
    check_no_foreign_files(folder, names)
    _remove_replaced_files(card, folder, published_patterns)
    text = str(render_card(card))
    # Before the weights: the files beside it count as paco_trl's even after a kill
    save_card_data(replace(card, readme_digest=_digest(text.encode())), folder)
    yield
    _write_card(text, folder, pictures, published_patterns)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _remove_replaced_files(
    card: ImageModelCardData | JudgeCardData, folder: str | Path, published_patterns: Collection[str]
) -> None:
    """
    Delete the files that a card, or with `published_patterns` a model of any kind, replaces.

    Overwriting the files would change a pending upload, which may hard-link to them.
    """
    folder, pictures_before = Path(folder), saved_pictures(folder)
    old_pictures = pictures_before or set()
    _keep_edited(folder)
    old_files = find_published_patterns(folder) if published_patterns and pictures_before is not None else None
    patterns = [*published_patterns, *(old_files or ()), *PICTURES, *JUDGE_PICTURES]
    for name, path in select_files(folder, patterns).items():
        is_old_picture = name in old_pictures - {*card.pictures}
        if is_old_picture or (not name.endswith(".png") and name != CARD_DATA_FILE):
            path.unlink()


def _write_card(
    text: str, folder: str | Path, pictures: Mapping[str, Path | Image], published_patterns: Collection[str]
) -> None:
    """Write the card as `README.md` with its new `pictures`, and let the umask decide who reads the weights."""
    apply_umask(select_files(folder, published_patterns).values())
    folder = Path(folder)
    for name, picture in pictures.items():
        if isinstance(picture, Image):
            write_atomically(folder / name, to_png(picture), durable=False)
        elif picture.resolve() != (folder / name).resolve():
            write_atomically(folder / name, picture.read_bytes(), durable=False)
    write_atomically(folder / "README.md", text, durable=False)


def _keep_edited(folder: Path) -> None:
    """Keep a copy of the card to replace, if somebody has edited it or an evaluation has added its results."""
    path = folder / "README.md"
    if not path.is_file():
        return
    try:
        card = load_card_data(folder)
        # Not rendered again: a card shows paths that its data do not have, and a newer template gives another text
        if card is None or _digest(path.read_bytes()) == card.readme_digest:
            return
    except ValueError:  # of another version, or damaged: whether the card was edited is unknown
        pass
    copies = (folder / f"README.before-{number}.md" for number in itertools.count(1))
    copy = next(copy for copy in copies if not copy.exists())
    shutil.copyfile(path, copy)
    logger.warning(
        f"'{path}' has text that its {CARD_DATA_FILE} does not give. The new card replaces it; '{copy}' keeps it."
    )


def replace_repo_id(card: ImageModelCardData | JudgeCardData, repo_id: str, markdown: str) -> str:
    """Replace the repository id in the code blocks of a card, so that they load the pushed model."""
    not_base_model = (
        r"(?<!Pipeline\.from_pretrained\()(?<!base = )(?<!model=)"  # keep base models, and the name of a served model
    )
    name = re.compile(rf'({not_base_model}"|--model_name_or_path ){re.escape(card.repo_id)}(?="|\s)')
    return re.sub("```.*?```", lambda code: name.sub(rf"\g<1>{repo_id}", code[0]), markdown, flags=re.DOTALL)


def metadata(card: ImageModelCardData | JudgeCardData) -> ModelCardData:
    """Return the Hub's metadata of a card."""
    is_adapter = card.weights == "adapter"
    (library, task) = card.library_and_task
    license = card.license
    base_model = public_name(card.base_model)
    on_hub = is_on_hub(base_model)  # the Hub does not know local models
    results = [*(card.published_results() if card.published else card.results())]
    return ModelCardData(
        library_name=library,
        pipeline_tag=task,
        base_model=base_model if on_hub else None,
        base_model_relation=("adapter" if is_adapter else "finetune") if on_hub else None,
        datasets=[*filter(is_on_hub, card.datasets)] or None,
        license=license.identifier if license else None,
        license_name=license.name if license else None,
        license_link=license.link if license else None,
        tags=sorted({*card.tags, *(["lora"] if is_adapter else [])}),
        # Images that the Hub's widget shows with their prompts
        widget=[{"text": prompt, "output": {"url": name}} for name, prompt in card.gallery.items()] or None,
        model_name=card.title if results else None,
        eval_results=results or None,
    )


def _example(card: ImageModelCardData) -> dict[str, Any]:
    """Return what the snippets generate: prompts as lines of code, their layout, arguments of the pipeline call."""
    prompt = card.prompt
    layout = card.layout
    arguments = card.call
    if prompt is None and card.trained_on != "sets":
        prompt = "Paint the car red." if card.trained_on == "edits" else "A red fox in the snow."
    elif prompt is None:  # in the format of the paper's prompts
        row = json.loads(demo_prompts_path().read_text(encoding="utf-8").split("\n", 1)[0])
        prompt = row["prompt"]
        layout = [row["rows"], row["cols"]]
        height, width = card.settings.get("inference_size") or (row["height"], row["width"])
        arguments = {"height": height, "width": width, **arguments}
    # The joined lines are the prompt
    wrapper = textwrap.TextWrapper(100, expand_tabs=False, replace_whitespace=False, drop_whitespace=False)
    texts = prompt if isinstance(prompt, list) else [prompt]
    prompts = [[json.dumps(line, ensure_ascii=False) for line in wrapper.wrap(text)] for text in texts]
    return {"is_set": isinstance(prompt, list), "prompts": prompts, "layout": layout, "call": arguments}


def _code(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _interval(fraction: float, count: int) -> str:
    """Compute the 95 % Wilson interval of a fraction of independent pairs."""
    from scipy.stats import binomtest  # a slow import

    interval = binomtest(round(fraction * count), count).proportion_ci(method="wilson")
    return f"{interval.low:.4f} to {interval.high:.4f}"


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    if not hours and not minutes:
        return f"{seconds:.0f} s" if seconds >= 1 else "less than a second"
    return " ".join(f"{number} {unit}" for number, unit in ((hours, "h"), (minutes, "min")) if number)
