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

import yaml

from ..data.image_sets import PANEL_TEMPLATE, SET_LAYOUTS, check_panel_options
from ..utils.files import find_model_file
from ..utils.names import public_name
from ..utils.paper import PAPER
from .files import SETTINGS
from .licenses import License, base_license


@dataclass
class LoRA:
    """A LoRA adapter."""

    rank: int
    alpha: float
    layers: list[str] | None = None  # names of the adapted layers
    continued_from: str | None = None  # name of the adapter that training started from
    quantization: str | None = None  # of the base model in training

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the card's table: a setting and its value."""
        continued = f", continued from {self.continued_from}" if self.continued_from else ""
        yield "LoRA", f"rank {self.rank}, alpha {self.alpha:g}{continued}"
        if self.layers:
            yield "adapted layers", ", ".join(f"`{name}`" for name in self.layers)
        if self.quantization:
            yield "base model in training", f"quantized: {self.quantization}"


@dataclass
class ImageSettings:
    """Settings of a PaCo-GRPO, DiffusionNFT or AWM run, with the names of [`PaCoGRPOConfig`]."""

    optimizer_steps: int | None = None
    num_prompts_per_generation: int | None = None
    num_generations: int | None = None
    optimizer_steps_per_generation: int | None = None
    per_device_train_batch_size: int | None = None
    training_size: list[int] | None = None  # height and width in pixels, where all images have the same size
    inference_size: list[int] | None = None
    resolution_scale: float | None = None
    set_layout: str | None = None  # also where the rows of all sets say it
    panel_template: str | None = None  # of separate images
    panel_generation: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    sde_type: str | None = None
    noise_level: float | None = None
    sde_steps: list[int] | None = None
    num_sde_steps: int | None = None
    branch_size: int | None = None
    tail_steps: int | None = None
    adapter_fraction: float | None = None  # of the denoising steps of an evaluation
    nft_beta: float | None = None
    awm_weighting: str | None = None
    old_policy_beta: float | None = None
    num_trained_steps: int | None = None  # times at which DiffusionNFT and AWM train each image
    trained_weights: str | None = None  # what is trained, if not an adapter
    saved_weights: str | None = None  # what is saved, where there is a choice
    loss_type: str | None = None
    learning_rate: float | None = None
    lr_scheduler_type: str | None = None
    weight_decay: float | None = None
    epsilon: float | None = None
    divergence_threshold: float | None = None
    beta: float | None = None
    norm_penalty: float | None = None
    advantage_clip: float | None = None
    multi_objective_aggregation: str | None = None
    log_tame_threshold: float | str | None = None
    precision: str | None = None
    seed: int | None = None

    def __post_init__(self):
        if self.set_layout not in SET_LAYOUTS:
            raise ValueError(f"`set_layout` is {self.set_layout!r}; it must be one of {SET_LAYOUTS}.")
        check_panel_options(self.panel_template or PANEL_TEMPLATE, self.panel_generation or "independent")

    def rows(self, lora: LoRA | None) -> Iterator[tuple[str, str]]:
        """Yield the rows of the card's table: a setting and its value."""
        prompts, generations = self.num_prompts_per_generation, self.num_generations
        steps = self.optimizer_steps_per_generation
        yield from _given(("optimizer steps", self.optimizer_steps))
        if prompts is not None and generations is not None and steps is not None:
            batch = self.per_device_train_batch_size
            per_device = f", {batch} at a time on a device" if batch is not None else ""
            yield "round", f"{prompts} prompts x {generations} images, {steps} optimizer steps"
            yield "effective batch", f"{prompts * generations // steps} images{per_device}"
        if self.training_size and self.inference_size:
            sizes = [f"{width} x {height} pixels" for height, width in (self.training_size, self.inference_size)]
            yield "resolution", f"{sizes[0]} in training, {sizes[1]} in inference"
        elif self.resolution_scale is not None:
            yield "resolution", f"{self.resolution_scale} of the inference size per side"
        if self.panel_template is not None:
            yield "separate images of a set", f"{self.panel_generation}, with the prompts `{self.panel_template}`"
        if self.num_inference_steps is not None:
            negative = ""
            if self.negative_prompt is not None:
                negative = f" against the negative prompt {json.dumps(self.negative_prompt, ensure_ascii=False)}"
            yield "sampler", f"{self.num_inference_steps} steps, guidance {self.guidance_scale}{negative}"
        if self.num_trained_steps is not None:
            names = ("nft_beta", "awm_weighting", "old_policy_beta")
            options = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) is not None]
            yield "trained times", ", ".join([f"{self.num_trained_steps} for each image", *options])
        elif self.sde_type is not None:
            chosen = f", {self.num_sde_steps} of them at random in each round" if self.num_sde_steps else ""
            shared = self.branch_size or 1
            branches = f"; {shared} images share the steps before the first" if shared > 1 else ""
            kind = f"{self.sde_type}, noise level {self.noise_level}"
            yield "stochastic steps", f"{kind}, steps {self.sde_steps}{chosen}{branches}"
        if self.tail_steps is not None:
            yield "images seen by the rewards", f"{self.tail_steps} steps after the last stochastic one, a short tail"
        yield from lora.rows() if lora is not None else ()
        threshold = f", threshold {self.log_tame_threshold}" if self.log_tame_threshold is not None else ""
        aggregation = self.multi_objective_aggregation
        yield from _given(
            ("trained weights", self.trained_weights),
            ("saved weights", self.saved_weights),
            ("loss", self.loss_type),
            ("learning rate", _scheduled(self.learning_rate, self.lr_scheduler_type)),
            ("weight decay", self.weight_decay),
            ("clip range", self.epsilon),
            ("divergence threshold", self.divergence_threshold),
            ("KL weight", self.beta),
            ("velocity norm penalty", self.norm_penalty),
            ("advantages clipped at", self.advantage_clip),
            ("reward aggregation", f"{aggregation}{threshold}" if aggregation else None),
            ("precision", self.precision),
            ("seed", self.seed),
        )


@dataclass
class JudgeSettings:
    """Settings of a judge's training, with the names of [`PaCoRewardConfig`]."""

    optimizer_steps: int | None = None
    pairs: int | None = None  # to train on
    effective_batch: int | None = None  # pairs per optimizer step, over all processes
    per_device_train_batch_size: int | None = None
    first_token_weight: float | None = None  # of the decision; with a `loss_variant`, `None` is plain likelihood
    loss_variant: str | None = None
    learning_rate: float | None = None
    lr_scheduler_type: str | None = None
    warmup_steps: float | None = None
    num_train_epochs: float | None = None
    max_pixels: int | None = None
    precision: str | None = None
    seed: int | None = None

    def rows(self, lora: LoRA | None) -> Iterator[tuple[str, str]]:
        """Yield the rows of the card's table: a setting and its value."""
        batch, loss = self.per_device_train_batch_size, self.loss_variant
        if loss is not None:
            weight = self.first_token_weight
            loss = "plain likelihood" if weight is None else f"{loss}, weight of the decision {weight}"
        yield from _given(
            ("optimizer steps", self.optimizer_steps),
            ("pairs", self.pairs),
            ("effective batch", f"{self.effective_batch} pairs" if self.effective_batch else None),
            ("batch of a device", f"{batch} pairs" if batch else None),
            ("loss", loss),
        )
        yield from lora.rows() if lora is not None else ()
        rate = _scheduled(self.learning_rate, self.lr_scheduler_type)
        warmup = f", warm-up {self.warmup_steps}" if self.warmup_steps is not None else ""
        yield from _given(
            ("learning rate", f"{rate}{warmup}" if rate is not None else None),
            ("epochs", self.num_train_epochs),
            ("largest image", f"{self.max_pixels} pixels" if self.max_pixels else None),
            ("precision", self.precision),
            ("seed", self.seed),
        )


@dataclass
class Reward:
    """A reward of a run."""

    name: str
    weight: float | None = None
    model: str | None = None  # name of the model behind it
    first: float | None = None  # mean over the images of the first round
    last: float | None = None  # and of the last


@dataclass
class Evaluation:
    """The evaluation of a reward."""

    reward: str
    mean: float  # over the evaluation prompts, after training
    baseline: float | None = None  # the same without training
    gain_ci_low: float | None = None  # 95 % bootstrap interval of the difference, over prompts
    gain_ci_high: float | None = None
    dataset: str | None = None  # one of several datasets
    model: str | None = None  # name of the model behind the reward
    step: int | None = None  # optimizer step of the evaluation


@dataclass
class Result:
    """A result for the metadata, which the Hub shows next to the card."""

    metric: str  # kind of metric, such as `"accuracy"`
    value: float
    name: str  # of the metric
    dataset: str  # name of the dataset
    dataset_id: str | None = None  # its Hub id


@dataclass
class Table:
    """A table of published results."""

    title: str
    columns: list[str]
    rows: list[list[str | float]]


@dataclass
class Published:
    """What a reference card adds about a published model: results that were not measured here."""

    config: str  # its settings
    command: str  # how to run it
    tables: list[Table] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)  # those of the tables that are in the metadata
    notes: list[str] = field(default_factory=list)


@dataclass
class _Card:
    """The fields of all cards."""

    title: str
    repo_id: str  # Hub id, or the name of the directory: what the snippets load
    base_model: str  # Hub id or directory, of whose path a card shows the last part
    base_revision: str | None = None  # commit of a base model on the Hub
    lora: LoRA | None = None  # the adapter; of a merged model the merged one
    merged_adapter: str | None = None  # Hub id or directory of the merged adapter
    license: License | None = None  # if `None`, the card refers to the base model's
    datasets: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=lambda: ["paco-trl"])
    hardware: str | None = None
    seconds: float | None = None  # of training
    versions: dict[str, str] = field(default_factory=dict)  # of the libraries
    paper: dict[str, str] = field(default_factory=lambda: PAPER)  # title, arXiv id and citation
    published: Published | None = None  # of a reference card


@dataclass
class ImageModelCard(_Card):
    """The card of an adapter of an image model, or of a full transformer, trained or with an adapter merged into it."""

    weights: str = "adapter"  # or "transformer", in a directory of that name
    formats: list[str] = field(default_factory=lambda: ["diffusers", "peft"])  # libraries that load the adapter
    family: str | None = None  # class that knows the model's guidance, layers and sizes
    pipeline_class: str = "DiffusionPipeline"
    transformer_class: str | None = None
    dtype: str = "bfloat16"
    device: str = "cuda"  # where the snippets run
    prompt: str | list[str] | None = None  # of the snippets, or those of a set's images; if `None`, a packaged one
    layout: list[int] = field(default_factory=lambda: [1, 1])  # rows and columns of its image
    call: dict[str, Any] = field(default_factory=dict)  # arguments of the pipeline's call besides the prompt
    trained_on: str = "sets"  # or "single images" or "edits"
    method: str | None = None  # "PaCo-GRPO", "DiffusionNFT" or "AWM"
    settings: ImageSettings | None = None
    rewards: list[Reward] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)  # the last ones
    pictures: list[str] = field(default_factory=list)  # file names of the card's images
    gallery: dict[str, str] = field(default_factory=dict)  # prompts of those that the Hub's widget shows

    def __post_init__(self):
        # They become code of the card and of a Space, and may come from a stranger's `paco_trl.json`
        for name in ("family", "pipeline_class", "transformer_class", "dtype", "device"):
            value = getattr(self, name)
            if value is not None and not str(value).isidentifier():
                raise ValueError(f"`{name}` is {value!r}; it must be a name.")
        for name, value in self.call.items():
            values = value if isinstance(value, list | tuple) else [value]
            if not name.isidentifier() or not all(isinstance(each, str | int | float | None) for each in values):
                raise ValueError(f"`call` has {name!r}: {value!r}; it must have names, with texts or numbers.")
        if len(self.layout) != 2 or not all(isinstance(count, int) and count > 0 for count in self.layout):
            raise ValueError(f"`layout` is {self.layout!r}; it must be numbers of rows and columns.")


@dataclass
class JudgeCard(_Card):
    """The card of a judge: of an adapter, or of a model that one was merged into."""

    weights: str = "adapter"  # or "merged"
    image_size: dict[str, int] | None = None  # the processor's limits in pixels, which vLLM needs to serve an adapter
    settings: JudgeSettings | None = None
    evaluations: dict[str, dict] = field(default_factory=dict)  # the last one on each dataset
    pictures: list[str] = field(default_factory=list)  # file names of the card's images


def save_settings(card: ImageModelCard | JudgeCard, folder: str | Path) -> None:
    """Save `paco_trl.json`, without paths of this machine."""
    (Path(folder) / SETTINGS).write_text(settings_text(card), encoding="utf-8")  # as README.md: checkpoints are staged


def settings_text(card: ImageModelCard | JudgeCard) -> str:
    """Return the content of `paco_trl.json`."""
    from ..utils.statistics import without_nan  # imports NumPy, which reading cards does not need

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
        return _from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"The {SETTINGS} of '{model}' cannot be read ({type(error).__name__}: {error}). Save the model again."
        ) from error


def load_reference_card(path: str | Path) -> ImageModelCard | JudgeCard:
    """
    Load a reference card from a YAML file.

    The file has the fields of [`ImageModelCard`] (`kind: image model`) or [`JudgeCard`] (`kind: judge`), with mappings
    for the dataclasses in them. The license is the base model's, and the tables' results are published ones.
    """
    card = _from_dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    card.license = base_license(card.base_model)
    return card


def _from_dict(values: dict[str, Any]) -> ImageModelCard | JudgeCard:
    is_judge = {"judge": True, "image model": False}[values.pop("kind")]
    classes = {"lora": LoRA, "license": License, "settings": JudgeSettings if is_judge else ImageSettings}
    parts = {name: kind(**values[name]) for name, kind in classes.items() if values.get(name)}
    if not is_judge:
        parts["rewards"] = [Reward(**reward) for reward in values.get("rewards", ())]
        parts["evaluations"] = [Evaluation(**row) for row in values.get("evaluations", ())]
    if published := values.get("published"):
        tables = [Table(**table) for table in published["tables"]]
        results = [Result(**result) for result in published["results"]]
        parts["published"] = Published(**{**published, "tables": tables, "results": results})
    return (JudgeCard if is_judge else ImageModelCard)(**{**values, **parts})


def _given(*rows: tuple[str, object]) -> Iterator[tuple[str, str]]:
    return ((name, str(value)) for name, value in rows if value is not None)


def _scheduled(learning_rate: float | None, schedule: str | None) -> str | None:
    return None if learning_rate is None else f"{learning_rate}{f', {schedule}' if schedule else ''}"
