# SPDX-License-Identifier: Apache-2.0
"""
What was trained and how: `paco_trl.json` beside every saved model, of which cards and programs are made.

A field that is `None` or empty is not on the card.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..data.image_sets import PANEL_TEMPLATE
from ..utils.files import write_atomically
from ..utils.model_files import find_model_file
from ..utils.names import public_name
from ..utils.option_checks import check_panel_options
from ..utils.paper import PAPER
from .files import SETTINGS
from .licenses import License


@dataclass
class LoRA:
    """A LoRA adapter."""

    rank: int
    alpha: float
    layers: list[str] | None = None  # names of the adapted layers
    continued_from: str | None = None  # name of the adapter that training started from
    quantization: str | None = None  # how the base model was quantized in training

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the card's table: a setting and its value."""
        continued = f", continued from {self.continued_from}" if self.continued_from else ""
        yield "LoRA", f"rank {self.rank}, alpha {self.alpha:g}{continued}"
        if self.layers:
            yield "adapted layers", ", ".join(f"`{name}`" for name in self.layers)
        if self.quantization:
            yield "base model in training", f"quantized: {self.quantization}"


@dataclass
class RewardRow:
    """A reward of a run, a row of the card's table."""

    name: str
    weight: float | None = None
    model: str | None = None  # name of the model behind it
    first: float | None = None  # mean over the images of the first round
    last: float | None = None  # and of the last


@dataclass
class EvaluationRow:
    """The evaluation of a reward, a row of the card's table."""

    reward: str
    mean: float  # over the evaluation prompts, after training
    baseline: float | None = None  # the same without training
    gain_ci_low: float | None = None  # 95 % bootstrap interval of the difference, over prompts
    gain_ci_high: float | None = None
    dataset: str | None = None  # one of several datasets
    model: str | None = None  # name of the model behind the reward
    step: int | None = None  # optimizer step of the evaluation


@dataclass
class _Card:
    """The fields of all cards."""

    title: str
    repo_id: str  # Hub id, or the name of the directory: what the snippets load
    base_model: str  # Hub id or directory; a card shows the last part of its path
    base_revision: str | None = None  # commit of a base model on the Hub
    lora: LoRA | None = None  # the adapter, also where it was merged
    merged_adapter: str | None = None  # Hub id or directory of the merged adapter
    license: License | None = None  # if `None`, the card refers to the base model's
    datasets: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=lambda: ["paco-trl"])
    hardware: str | None = None
    seconds: float | None = None  # duration of the training
    saved_at: str | None = field(default=None, compare=False)  # in UTC, as ISO 8601
    versions: dict[str, str] = field(default_factory=dict)  # libraries and their versions
    paper: dict[str, str] = field(default_factory=lambda: PAPER)  # title, arXiv id and citation
    settings: dict[str, Any] = field(default_factory=dict)  # training settings, mostly with the names of its config
    published: dict[str, Any] = field(
        default_factory=dict
    )  # only in a reference card: `config`, `command`, `tables`, ...


@dataclass
class ImageModelCard(_Card):
    """The card of an adapter of an image model, or of a full transformer, trained or with an adapter merged into it."""

    weights: str = "adapter"  # or "transformer", in a directory of that name
    formats: list[str] = field(default_factory=lambda: ["diffusers", "peft"])  # libraries that load the adapter
    family: str | None = None  # class that knows the model's guidance, layers and sizes
    pipeline_class: str = "DiffusionPipeline"
    transformer_class: str | None = None
    dtype: str = "bfloat16"
    # How the pipeline was loaded, as `load_for_inference` does it again: `quantization`, `offload`, `vae_tiling`
    loading: dict[str, Any] = field(default_factory=dict)
    device: str = "cuda"  # where the snippets run
    prompt: str | list[str] | None = None  # in the snippets: one, or one per image of a set; if `None`, a packaged one
    layout: list[int] = field(default_factory=lambda: [1, 1])  # rows and columns of its image
    call: dict[str, Any] = field(default_factory=dict)  # arguments of the pipeline's call besides the prompt
    trained_on: str = "sets"  # or "single images" or "edits"
    method: str | None = None  # "PaCo-GRPO", "DiffusionNFT" or "AWM"
    rewards: list[RewardRow] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)  # the last ones
    pictures: list[str] = field(default_factory=list)  # file names of the card's images
    gallery: dict[str, str] = field(default_factory=dict)  # prompts of those that the Hub's widget shows

    def __post_init__(self):
        check_panel_options(
            self.settings.get("panel_template", PANEL_TEMPLATE), self.settings.get("panel_generation", "independent")
        )
        # They become code of the card and of a Space, and may come from a stranger's `paco_trl.json`
        for name in ("family", "pipeline_class", "transformer_class", "dtype", "device"):
            value = getattr(self, name)
            if value is not None and not str(value).isidentifier():
                raise ValueError(f"`{name}` is {value!r}; it must be a name.")
        for name, value in self.call.items():
            values = value if isinstance(value, list | tuple) else [value]
            if not name.isidentifier() or not all(isinstance(part, str | int | float | None) for part in values):
                raise ValueError(f"`call` has {name!r}: {value!r}; it must have names, with texts or numbers.")
        if len(self.layout) != 2 or not all(isinstance(count, int) and count > 0 for count in self.layout):
            raise ValueError(f"`layout` is {self.layout!r}; it must be numbers of rows and columns.")


@dataclass
class JudgeCard(_Card):
    """The card of a judge: an adapter, or a model that one was merged into."""

    weights: str = "adapter"  # or "merged"
    evaluations: dict[str, dict] = field(default_factory=dict)  # the last one on each dataset
    pictures: list[str] = field(default_factory=list)  # file names of the card's images


def save_settings(card: ImageModelCard | JudgeCard, folder: str | Path) -> None:
    """Save `paco_trl.json`, without paths of this machine."""
    write_atomically(Path(folder) / SETTINGS, settings_text(card), durable=False)


def settings_text(card: ImageModelCard | JudgeCard) -> str:
    """Return the content of `paco_trl.json`."""
    from ..utils.statistics import without_nan  # imports NumPy; reading cards does without

    values = {"kind": "judge" if isinstance(card, JudgeCard) else "image model", **asdict(card)}
    values["license"] = card.license and card.license._asdict()
    for name in ("base_model", "merged_adapter"):
        values[name] = values[name] and public_name(values[name])
    filled = {name: without_nan(value) for name, value in values.items() if value not in (None, [], {})}
    return json.dumps(filled, indent=2, ensure_ascii=False) + "\n"


def load_settings(model: str | Path) -> ImageModelCard | JudgeCard | None:
    """
    Load what was saved with a model (Hub id or directory); `None` for one without `paco_trl.json`.

    Raises:
        ValueError: If the file is not what [`save_settings`] writes.
    """
    path = find_model_file(str(model), SETTINGS)
    if path is None:
        return None
    try:
        return card_from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"The {SETTINGS} of '{model}' cannot be read ({type(error).__name__}: {error}). Save the model again."
        ) from error


def card_from_dict(values: dict[str, Any]) -> ImageModelCard | JudgeCard:
    """Make a card of what is in `paco_trl.json`: its `kind`, `"image model"` or `"judge"`, and fields."""
    is_judge = {"judge": True, "image model": False}[values.pop("kind")]
    values["settings"] = {name: value for name, value in (values.get("settings") or {}).items() if value is not None}
    parts: dict[str, Any] = {
        name: kind(**values[name]) for name, kind in (("lora", LoRA), ("license", License)) if values.get(name)
    }
    if not is_judge:
        parts["rewards"] = [RewardRow(**reward) for reward in values.get("rewards", ())]
        parts["evaluations"] = [EvaluationRow(**row) for row in values.get("evaluations", ())]
    return (JudgeCard if is_judge else ImageModelCard)(**{**values, **parts})
