# SPDX-License-Identifier: Apache-2.0
"""From what a card says to Markdown with the Hub's metadata."""

import functools
import json
import math
import re
import shutil
from importlib.resources import files
from pathlib import Path

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..data import theme_question
from ..hub.files import PICTURES
from ..utils.names import public_name
from .citations import TRL, base_citation
from .content import ImageModelCard, JudgeCard, Result


# Names under which the Hub knows a judge's metrics, and in words
_JUDGE_METRICS = {
    "auroc": ("roc_auc", "AUROC"),
    "decision_accuracy": ("accuracy", "Accuracy of the decision"),
    "ece": ("ece", "Calibration error (ECE, 10 bins)"),
}

# What vLLM takes for `--max-lora-rank`
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

_SPREAD = re.compile(r"\n{3,}")

# Code between fences, or in a line
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def render_card(card: ImageModelCard | JudgeCard) -> ModelCard:
    """
    Renders a card. A section or a row appears only when there is something to put in it.

    Args:
        card ([`ImageModelCard`] or [`JudgeCard`]):
            What it says.

    Returns:
        [`~huggingface_hub.ModelCard`].
    """
    is_judge = isinstance(card, JudgeCard)
    template = f"paco_{'reward' if is_judge else 'grpo'}_model_card.md.jinja"
    base_model = public_name(card.base_model)
    settings = card.settings
    base_citation_ = base_citation(card.base_model)
    shown = {
        "card": card,
        "base_model": base_model,
        "base_link": f"[{base_model}](https://huggingface.co/{base_model})" if _is_on_hub(card) else base_model,
        "is_base_on_hub": _is_on_hub(card),
        "merged_adapter": public_name(card.merged_adapter) if card.merged_adapter else None,
        "settings": [(_cell(name), _cell(value)) for name, value in (settings.rows(card.lora) if settings else ())],
        "lora_rows": [(_cell(name), _cell(value)) for name, value in (card.lora.rows() if card.lora else ())],
        "time": _duration(card.seconds) if card.seconds else None,
        "citations": [card.paper["citation"].strip(), TRL, *([base_citation_] if base_citation_ else [])],
        "is_base_cited": base_citation_ is not None,
        "cell": _cell,
        "number": _number,
    }
    if is_judge:
        shown["served_name"] = re.sub(r"[^\w.-]", "-", card.repo_id.split("/")[-1]).lower()
        shown["question"] = repr(theme_question("A fox through the four seasons"))
        shown["serve_options"] = _serve_options(card)
        shown["accuracy_intervals"] = [
            _interval(one["decision_accuracy"], one["pairs"]) for one in card.evaluations.values()
        ]
    data = metadata(card)
    rendered = ModelCard(_template(template).render(data.to_dict() | {"card_data": data.to_yaml()} | shown))
    rendered.text = _SPREAD.sub("\n\n", rendered.text).rstrip() + "\n"
    return rendered


@functools.cache
def _template(name: str) -> jinja2.Template:
    # `ModelCard.from_template` compiles it for every card, which takes 0.1 s
    return jinja2.Template((files("paco_trl") / "templates" / name).read_text(encoding="utf-8"))


def save_card(card: ImageModelCard, folder: str | Path) -> None:
    """
    Saves a card as `README.md` with its pictures beside it. Pictures of an earlier card that this one lacks are removed.

    Args:
        card ([`ImageModelCard`]):
            What it says, and where its pictures are.
        folder (`str` or `Path`):
            Folder, which exists.
    """
    folder = Path(folder)
    for name in PICTURES:
        source, target = card.pictures.get(name), folder / name
        if source is None and target.exists():
            target.unlink()
        elif source is not None and source.resolve() != target.resolve():
            shutil.copy(source, target)
    render_card(card).save(folder / "README.md")


def renamed(text: str, old: str, new: str) -> str:
    """
    Gives a card whose code loads the model under another name, as after an upload. The title, the text, the name of the
    base model and the name under which a server knows a judge remain.

    Args:
        text (`str`):
            Card, with or without its metadata.
        old (`str`):
            Name that the code loads, such as that of a folder.
        new (`str`):
            Name that it shall load.

    Returns:
        `str`.
    """
    name = re.escape(old)
    patterns = [
        # What a pipeline loads is the base model, which may be called the same
        rf'(?<!Pipeline)(\.from_pretrained\(\s*(?:[\w.]+,\s*)?"){name}(?=")',
        rf'(\.load_lora_weights\(\s*"){name}(?=")',
        # So is what vLLM serves below an adapter
        rf"(vllm serve ){name}(?!\S)(?!\s*(?:\\\s*)?--enable-lora)",
        rf"(--lora-modules [^\s=]+=){name}(?!\S)",
        rf"(paco-trl serve-reward --model_name_or_path ){name}(?![^\s`])",
    ]

    def in_code(code: re.Match) -> str:
        changed = code[0]
        for pattern in patterns:
            changed = re.sub(pattern, lambda found: found[1] + new, changed)
        return changed

    return _CODE.sub(in_code, text)


def metadata(card: ImageModelCard | JudgeCard) -> ModelCardData:
    """
    Gives the Hub's metadata of a card.

    Args:
        card ([`ImageModelCard`] or [`JudgeCard`]):
            What it says.

    Returns:
        [`~huggingface_hub.ModelCardData`].
    """
    is_judge, is_adapter = isinstance(card, JudgeCard), card.weights == "adapter"
    if is_judge:
        library, task = "peft" if is_adapter else "transformers", "image-text-to-text"
    else:
        library, task = "diffusers", "image-to-image" if card.is_editing else "text-to-image"
    license, on_hub = card.license, _is_on_hub(card)
    results = [
        EvalResult(
            task_type=task,
            dataset_type=result.dataset_id or "evaluation",
            dataset_name=result.dataset,
            metric_type=result.metric,
            metric_value=result.value,
            metric_name=result.name,
            # The Hub shows whose figures they are
            source_name=f"Published figures: {card.paper['title']}" if card.published else None,
            source_url=f"https://huggingface.co/papers/{card.paper['id']}" if card.published else None,
        )
        for result in _results(card)
    ]
    return ModelCardData(
        library_name=library,
        pipeline_tag=task,
        # A folder means nothing to anybody else
        base_model=public_name(card.base_model) if on_hub else None,
        base_model_relation=("adapter" if is_adapter else "finetune") if on_hub else None,
        datasets=[name for name in card.datasets if "/" in name] or None,
        license=license.identifier if license else None,
        license_name=license.name if license else None,
        license_link=license.link if license else None,
        tags=sorted({*card.tags, *(["lora"] if is_adapter else [])}),
        model_name=card.title if results else None,
        eval_results=results or None,
    )


def _is_on_hub(card: ImageModelCard | JudgeCard) -> bool:
    """Whether others can get the base model: from the Hub, or from where the Hub's clients keep it."""
    name = public_name(card.base_model)
    return "/" in name


def _results(card: ImageModelCard | JudgeCard) -> list[Result]:
    if card.published:
        return card.published.results
    if isinstance(card, JudgeCard):
        return [
            Result(_JUDGE_METRICS[key][0], float(one[key]), _JUDGE_METRICS[key][1], _dataset_of(name))
            for name, one in card.evaluations.items()
            for key in _JUDGE_METRICS
            if key in one
        ]
    return [
        Result(row.reward, float(row.mean), f"mean of the reward {row.reward}", row.dataset or "evaluation prompts")
        for row in card.evaluations
    ]


def _dataset_of(prefix: str) -> str:
    """An evaluation's dataset, from the prefix of its metrics."""
    return prefix.removeprefix("eval").removeprefix("_") or "evaluation pairs"


def _interval(share: float, count: int) -> str:
    """The 95 % interval of a share (Wilson), the pairs taken as independent."""
    z = 1.96
    middle, spread = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    low, high = ((middle + sign * spread) / (1 + z * z / count) for sign in (-1, 1))
    return f"{max(low, 0):.4f} to {min(high, 1):.4f}"


def _serve_options(card: JudgeCard) -> list[str]:
    """What `vllm serve` needs beside the model, of which the scores depend on the last two."""
    options = ['--limit-mm-per-prompt \'{"image": 2, "video": 0}\'', "--max-model-len 8192"]
    options += ["--generation-config vllm", "--load-format safetensors"]
    if card.weights == "adapter" and card.image_size:
        options.append(f"--mm-processor-kwargs '{json.dumps({'size': card.image_size})}'")
    if card.weights == "adapter" and card.lora:
        rank = next((rank for rank in _LORA_RANKS if rank >= card.lora.rank), card.lora.rank)
        options.insert(0, f"--max-lora-rank {rank}")
    return options


def _cell(value: object) -> str:
    """A value for a table: no line breaks, no bars."""
    return " ".join(str(value).split("\n")).replace("|", "\\|")


def _number(value: float | str) -> str:
    return f"{value:.4f}" if isinstance(value, float) else _cell(value)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s" if seconds >= 1 else "less than a second"
    hours, minutes = divmod(minutes, 60)
    return " ".join(f"{number} {unit}" for number, unit in ((hours, "h"), (minutes, "min")) if number)
