# SPDX-License-Identifier: Apache-2.0
"""
Card data of a saved model: `paco_trl.json` beside every model, from which its card and code are generated.

Fields that are `None` or empty do not appear on the card.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import EvalResult

from ..data.image_sets import PANEL_TEMPLATE
from ..utils.files import write_atomically
from ..utils.model_files import CARD_DATA_FILE, IMAGE_MODEL, find_model_file
from ..utils.names import public_name
from ..utils.option_checks import check_panel_options
from ..utils.papers import PAPER
from ..utils.text import without_nan
from .licenses import License


# Metrics of a judge -> their Hub identifiers and labels
_JUDGE_METRICS = {
    "auroc": ("roc_auc", "AUROC"),
    "decision_accuracy": ("accuracy", "Accuracy of the decision"),
    "ece": ("ece", "Calibration error (ECE, 10 bins)"),
}


def is_stated(value: Any) -> bool:
    """Return whether a card can state the value of an argument: a text, a number, or a list of them."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(part, str | int | float | None) for part in values)


@dataclass
class LoRA:
    """Settings of a LoRA adapter."""

    rank: int
    alpha: float
    layers: list[str] | None = None  # names of the adapted layers
    continued_from: str | None = None  # name of the adapter that training started from
    quantization: str | None = None  # how the base model was quantized in training

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the settings and values for the card's table."""
        suffix = f", continued from {self.continued_from}" if self.continued_from else ""
        yield "LoRA", f"rank {self.rank}, alpha {self.alpha:g}{suffix}"
        if self.layers:
            yield "adapted layers", ", ".join(f"`{name}`" for name in self.layers)
        if self.quantization:
            yield "base model in training", f"quantized: {self.quantization}"


@dataclass
class RewardRow:
    """Row of the card's table of rewards."""

    name: str
    weight: float | None = None  # `None` for a reward of the run before it was resumed with other rewards
    model: str | None = None  # name of the underlying model
    first: float | None = None  # mean over the images of the first round
    last: float | None = None  # mean over the images of the last round


@dataclass
class EvaluationRow:
    """Row of the card's table of evaluations."""

    reward: str
    mean: float  # mean over the evaluation prompts, after training
    baseline: float | None = None  # mean before training
    gain_ci_low: float | None = None  # 95 % bootstrap interval of mean - baseline, over prompts
    gain_ci_high: float | None = None
    dataset: str | None = None  # name of the dataset, if there are several
    model: str | None = None  # name of the reward's underlying model
    step: int | None = None  # optimizer step of the evaluation


@dataclass
class _CardData:
    """Fields shared by all cards."""

    title: str
    repo_id: str  # Hub id or directory name that the snippets load
    base_model: str  # Hub id or directory; a card shows the last part of its path
    base_revision: str | None = None  # commit of a base model on the Hub
    lora: LoRA | None = None  # even if it was merged
    merged_adapter: str | None = None  # Hub id or directory of the merged adapter
    license: License | None = None  # if `None`, the card refers to the base model's license
    datasets: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=lambda: ["paco-trl"])
    hardware: str | None = None
    seconds: float | None = None  # duration of the training
    saved_at: str | None = field(default=None, compare=False)  # time in UTC, as ISO 8601
    readme_digest: str | None = field(default=None, compare=False)  # SHA-256 of `README.md` as it was saved
    versions: dict[str, str] = field(default_factory=dict)  # libraries and their versions
    paper: dict[str, str] = field(default_factory=lambda: PAPER)  # title, arXiv id and citation
    settings: dict[str, Any] = field(default_factory=dict)  # of the training, mostly named like options of the config
    # Only in reference cards: `config`, `command`, `tables`, ...
    published: dict[str, Any] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)  # file names of the card's images
    gallery: dict[str, str] = field(default_factory=dict)  # image -> prompt, for the Hub's widget

    @property
    def library_and_task(self) -> tuple[str, str]:
        """The Hub's `library_name` and `pipeline_tag`."""
        raise NotImplementedError

    def _result(self, dataset: str, metric: str, label: str, value: float) -> EvalResult:
        """Return a result of an evaluation for the Hub."""
        _, task = self.library_and_task
        return EvalResult(task, "evaluation", dataset, metric, float(value), metric_name=label)

    def published_results(self) -> Iterator[EvalResult]:
        """Yield the paper's results, which only reference cards have."""
        _, task = self.library_and_task
        url = f"https://huggingface.co/papers/{self.paper['id']}"
        source = {"source_name": f"Published figures: {self.paper['title']}", "source_url": url}
        for result in self.published["results"]:
            yield EvalResult(task_type=task, **result, **source)


@dataclass
class ImageModelCardData(_CardData):
    """Card data of an image model: an adapter, or a full transformer, trained or with an adapter merged into it."""

    kind: ClassVar[str] = IMAGE_MODEL
    template: ClassVar[str] = "paco_grpo_model_card.md.jinja"

    weights: str = "adapter"  # or "transformer", in a directory of that name
    formats: list[str] = field(default_factory=lambda: ["diffusers", "peft"])  # libraries that load the adapter
    family: str | None = None  # name of the model family's class
    pipeline_class: str = "DiffusionPipeline"
    transformer_class: str | None = None
    dtype: str = "bfloat16"
    # How the pipeline was loaded, for `load_for_inference` to repeat: `quantization`, `offload`, `vae_tiling`
    loading: dict[str, Any] = field(default_factory=dict)
    device: str = "cuda"  # device of the snippets
    # Prompt of the snippets, or one per image of a set; defaults to a packaged one
    prompt: str | list[str] | None = None
    layout: list[int] = field(default_factory=lambda: [1, 1])  # rows and columns of the prompt's image
    call: dict[str, Any] = field(default_factory=dict)  # arguments of the pipeline call besides the prompt
    trained_on: str = "sets"  # or "single images" or "edits"
    method: str | None = None  # "PaCo-GRPO", "DiffusionNFT" or "AWM"
    rewards: list[RewardRow] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)  # the last ones

    def __post_init__(self):
        check_panel_options(
            self.settings.get("panel_template", PANEL_TEMPLATE), self.settings.get("panel_generation", "independent")
        )
        # These become code in the card and in a Space, and may come from a stranger's `paco_trl.json`
        for name in ("family", "pipeline_class", "transformer_class", "dtype", "device"):
            value = getattr(self, name)
            if value is not None and not str(value).isidentifier():
                raise ValueError(f"`{name}` is {value!r}, but must be an identifier.")
        for name, value in self.call.items():
            if not name.isidentifier() or not is_stated(value):
                raise ValueError(f"`call` has {name!r}: {value!r}, but must map identifiers to texts or numbers.")
        if len(self.layout) != 2 or not all(isinstance(count, int) and count > 0 for count in self.layout):
            raise ValueError(f"`layout` is {self.layout!r}, but must be the numbers of rows and columns.")

    @property
    def library_and_task(self) -> tuple[str, str]:
        """The Hub's `library_name` and `pipeline_tag`."""
        return "diffusers", "image-to-image" if self.trained_on == "edits" else "text-to-image"

    def results(self) -> Iterator[EvalResult]:
        """Yield the mean of each reward in the last evaluations."""
        for row in self.evaluations:
            label = f"mean of the reward {row.reward}"
            yield self._result(row.dataset or "evaluation prompts", row.reward, label, row.mean)


@dataclass
class JudgeCardData(_CardData):
    """Card data of a judge: an adapter, or a model with an adapter merged into it."""

    kind: ClassVar[str] = "judge"
    template: ClassVar[str] = "paco_reward_model_card.md.jinja"

    weights: str = "adapter"  # or "merged"
    evaluations: dict[str, dict] = field(default_factory=dict)  # dataset -> its last evaluation

    @property
    def library_and_task(self) -> tuple[str, str]:
        """The Hub's `library_name` and `pipeline_tag`."""
        return "peft" if self.weights == "adapter" else "transformers", "image-text-to-text"

    def results(self) -> Iterator[EvalResult]:
        """Yield the metrics of the last evaluations."""
        for name, evaluation in self.evaluations.items():
            dataset = name.removeprefix("eval").removeprefix("_") or "evaluation pairs"
            for key, (metric, label) in _JUDGE_METRICS.items():
                if key in evaluation:
                    yield self._result(dataset, metric, label, evaluation[key])


def save_card_data(card: ImageModelCardData | JudgeCardData, folder: str | Path) -> None:
    """Save `paco_trl.json`, without local paths."""
    write_atomically(Path(folder) / CARD_DATA_FILE, card_data_text(card), durable=False)


def card_data_text(card: ImageModelCardData | JudgeCardData) -> str:
    """Return the content of `paco_trl.json`."""
    values = {"kind": card.kind, **asdict(card)}
    for name in ("base_model", "merged_adapter"):
        values[name] = values[name] and public_name(values[name])
    values = {name: without_nan(value) for name, value in values.items() if value not in (None, [], {})}
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def load_card_data(model: str | Path) -> ImageModelCardData | JudgeCardData | None:
    """
    Load the card data saved with a model (Hub id or directory). Return `None` if the model has no `paco_trl.json`.

    Raises:
        ValueError: If the file does not have the format of [`save_card_data`].
    """
    path = find_model_file(str(model), CARD_DATA_FILE)
    if path is None:
        return None
    try:
        return card_data_from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"The {CARD_DATA_FILE} of '{model}' cannot be read ({type(error).__name__}: {error}). Save the model again."
        ) from error


def card_data_from_dict(values: dict[str, Any]) -> ImageModelCardData | JudgeCardData:
    """Build card data from the content of `paco_trl.json`: its `kind`, `"image model"` or `"judge"`, and its fields."""
    values = dict(values)
    card_class = {cls.kind: cls for cls in (ImageModelCardData, JudgeCardData)}[values.pop("kind")]
    values["settings"] = {name: value for name, value in (values.get("settings") or {}).items() if value is not None}
    nested_values: dict[str, Any] = {
        name: cls(**values[name]) for name, cls in (("lora", LoRA), ("license", License)) if values.get(name)
    }
    if card_class is ImageModelCardData:
        nested_values["rewards"] = [RewardRow(**reward) for reward in values.get("rewards", ())]
        nested_values["evaluations"] = [EvaluationRow(**row) for row in values.get("evaluations", ())]
    return card_class(**{**values, **nested_values})
