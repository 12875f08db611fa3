# SPDX-License-Identifier: Apache-2.0
"""What a model card says. A field that is `None` or empty is not on the card."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..hub.licenses import License
from ..utils.paper import PAPER


@dataclass
class LoRA:
    """
    A LoRA adapter.

    Args:
        rank (`int`):
            Rank.
        alpha (`float`):
            Scale.
        layers (`list[str]`, *optional*):
            Names of the adapted layers.
        continued_from (`str`, *optional*):
            Name of the adapter that training went on from.
    """

    rank: int
    alpha: float
    layers: list[str] | None = None
    continued_from: str | None = None

    def rows(self) -> Iterator[tuple[str, str]]:
        """The rows of the card's table: what a setting is called and its value."""
        continued = f", continued from {self.continued_from}" if self.continued_from else ""
        yield "LoRA", f"rank {self.rank}, alpha {self.alpha:g}{continued}"
        if self.layers:
            yield "adapted layers", ", ".join(f"`{name}`" for name in self.layers)


@dataclass
class ImageSettings:
    """
    Settings of a PaCo-GRPO or DiffusionNFT run, by the names that they have in [`PaCoGRPOConfig`].

    Args:
        training_size (`list[int]`, *optional*), inference_size (`list[int]`, *optional*):
            Height and width in pixels, where all images have one size.
        num_trained_steps (`int`, *optional*):
            Times at which DiffusionNFT trains each image.
        trained_weights (`str`, *optional*):
            What is trained, where it is no adapter.
        saved_weights (`str`, *optional*):
            What is saved, where there is a choice.
        precision (`str`, *optional*):
            Compute dtype.
    """

    optimizer_steps: int | None = None
    num_prompts_per_generation: int | None = None
    num_generations: int | None = None
    optimizer_steps_per_generation: int | None = None
    per_device_train_batch_size: int | None = None
    training_size: list[int] | None = None
    inference_size: list[int] | None = None
    resolution_scale: float | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    sde_type: str | None = None
    noise_level: float | None = None
    sde_steps: list[int] | None = None
    num_sde_steps: int | None = None
    nft_beta: float | None = None
    num_trained_steps: int | None = None
    trained_weights: str | None = None
    saved_weights: str | None = None
    loss_type: str | None = None
    learning_rate: float | None = None
    lr_scheduler_type: str | None = None
    weight_decay: float | None = None
    epsilon: float | None = None
    beta: float | None = None
    advantage_clip: float | None = None
    multi_objective_aggregation: str | None = None
    log_tame_threshold: float | str | None = None
    precision: str | None = None
    seed: int | None = None

    def rows(self, lora: LoRA | None) -> Iterator[tuple[str, str]]:
        """The rows of the card's table: what a setting is called and its value."""
        yield from _given(("optimizer steps", self.optimizer_steps))
        if self.num_prompts_per_generation is not None and self.num_generations is not None:
            steps = self.optimizer_steps_per_generation
            yield (
                "round",
                f"{self.num_prompts_per_generation} prompts x {self.num_generations} images, {steps} optimizer steps",
            )
            images = self.num_prompts_per_generation * self.num_generations
            batch = f", {self.per_device_train_batch_size} at a time on a device"
            yield (
                "effective batch",
                f"{images // steps} images{batch if self.per_device_train_batch_size is not None else ''}",
            )
        if self.training_size and self.inference_size:
            yield (
                "resolution",
                f"{_pixels(self.training_size)} in training, {_pixels(self.inference_size)} in inference",
            )
        elif self.resolution_scale is not None:
            yield "resolution", f"{self.resolution_scale} of the inference size per side"
        if self.num_inference_steps is not None:
            against = f" against the negative prompt {json.dumps(self.negative_prompt, ensure_ascii=False)}"
            yield (
                "sampler",
                f"{self.num_inference_steps} steps, guidance {self.guidance_scale}"
                + (against if self.negative_prompt is not None else ""),
            )
        if self.nft_beta is not None:
            yield "trained times", f"{self.num_trained_steps} for each image, nft_beta {self.nft_beta}"
        elif self.sde_type is not None:
            chosen = f", {self.num_sde_steps} of them at random in each round" if self.num_sde_steps else ""
            yield (
                "stochastic steps",
                f"{self.sde_type}, noise level {self.noise_level}, steps {self.sde_steps}{chosen}",
            )
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
            ("KL weight", self.beta),
            ("advantages clipped at", self.advantage_clip),
            ("reward aggregation", f"{aggregation}{threshold}" if aggregation else None),
            ("precision", self.precision),
            ("seed", self.seed),
        )


@dataclass
class JudgeSettings:
    """
    Settings of a training of a judge, by the names that they have in [`PaCoRewardConfig`].

    Args:
        pairs (`int`, *optional*):
            Pairs to train on.
        effective_batch (`int`, *optional*):
            Pairs of an optimizer step, on all processes.
        first_token_weight (`float`, *optional*):
            Weight of the decision; with a `loss_variant`, `None` is plain likelihood.
        precision (`str`, *optional*):
            Dtype of the model.
    """

    optimizer_steps: int | None = None
    pairs: int | None = None
    effective_batch: int | None = None
    per_device_train_batch_size: int | None = None
    first_token_weight: float | None = None
    loss_variant: str | None = None
    learning_rate: float | None = None
    lr_scheduler_type: str | None = None
    warmup_steps: float | None = None
    num_train_epochs: float | None = None
    max_pixels: int | None = None
    precision: str | None = None
    seed: int | None = None

    def rows(self, lora: LoRA | None) -> Iterator[tuple[str, str]]:
        """The rows of the card's table: what a setting is called and its value."""
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
    """
    A reward of a run.

    Args:
        name (`str`):
            Name.
        weight (`float`, *optional*):
            Weight in the sum.
        model (`str`, *optional*):
            Name of the model behind it.
        first (`float`, *optional*), last (`float`, *optional*):
            Mean over the images of the first round, and of the last.
    """

    name: str
    weight: float | None = None
    model: str | None = None
    first: float | None = None
    last: float | None = None


@dataclass
class Evaluation:
    """
    What an evaluation says of a reward.

    Args:
        reward (`str`):
            Name of the reward.
        mean (`float`):
            Mean over the evaluation prompts, after training.
        baseline (`float`, *optional*):
            That of the model without training.
        gain_ci_low (`float`, *optional*), gain_ci_high (`float`, *optional*):
            95 % bootstrap interval of the difference, over prompts.
        dataset (`str`, *optional*):
            Which of several datasets.
        model (`str`, *optional*):
            Name of the model behind the reward.
        step (`int`, *optional*):
            Optimizer step after which it was made.
    """

    reward: str
    mean: float
    baseline: float | None = None
    gain_ci_low: float | None = None
    gain_ci_high: float | None = None
    dataset: str | None = None
    model: str | None = None
    step: int | None = None


@dataclass
class Result:
    """
    A figure for the metadata, which the Hub shows beside the card.

    Args:
        metric (`str`):
            Kind of metric, such as `"accuracy"`.
        value (`float`):
            Value.
        name (`str`):
            Name of the metric.
        dataset (`str`):
            Name of the dataset.
        dataset_id (`str`, *optional*):
            Its Hub id.
    """

    metric: str
    value: float
    name: str
    dataset: str
    dataset_id: str | None = None


@dataclass
class Table:
    """
    A table of published figures.

    Args:
        title (`str`):
            What it shows.
        columns (`list[str]`):
            Head.
        rows (`list[list]`):
            Cells.
    """

    title: str
    columns: list[str]
    rows: list[list[str | float]]


@dataclass
class Published:
    """
    What a reference card says of a published model: figures that were not measured here.

    Args:
        example (`str`), config (`str`):
            Files that would train it here.
        command (`str`):
            How.
        tables (`list[Table]`, *optional*):
            The paper's figures.
        results (`list[Result]`, *optional*):
            Those of them that are in the metadata.
        notes (`list[str]`, *optional*):
            What to know about them.
    """

    example: str
    config: str
    command: str
    tables: list[Table] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Card:
    """
    What all cards have.

    Args:
        title (`str`):
            Title.
        repo_id (`str`):
            Hub id, or the name of the folder: what the snippets load.
        base_model (`str`):
            Hub id or folder of the base model. A card shows the last part of a folder's path.
        lora ([`LoRA`], *optional*):
            The adapter; of a merged model the one that was merged in.
        merged_adapter (`str`, *optional*):
            Hub id or folder of the adapter that was merged in.
        license ([`~paco_trl.hub.licenses.License`], *optional*):
            Licence. If `None`, the card sends the reader to the base model's.
        datasets (`list[str]`, *optional*), tags (`list[str]`, *optional*):
            For the metadata.
        hardware (`str`, *optional*), seconds (`float`, *optional*), versions (`dict[str, str]`, *optional*):
            What it was trained with, how long, and the versions of the libraries.
        paper (`dict[str, str]`, *optional*):
            Title, arXiv id and citation of the method's paper.
        published ([`Published`], *optional*):
            Of a reference card.
    """

    title: str
    repo_id: str
    base_model: str
    lora: LoRA | None = None
    merged_adapter: str | None = None
    license: License | None = None
    datasets: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=lambda: ["paco-trl"])
    hardware: str | None = None
    seconds: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    paper: dict[str, str] = field(default_factory=lambda: PAPER)
    published: Published | None = None


@dataclass
class ImageModelCard(_Card):
    """
    The card of an adapter of an image model, or of a whole transformer, trained or with an adapter merged into it.

    Args:
        weights (`str`, *optional*, defaults to `"adapter"`):
            `"adapter"`, or `"transformer"` for one in a folder of that name.
        formats (`list[str]`, *optional*, defaults to `["diffusers", "peft"]`):
            Libraries that an adapter's files are for.
        pipeline_class (`str`, *optional*, defaults to `"DiffusionPipeline"`), transformer_class (`str`, *optional*):
            Names of the classes that load it.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Dtype to load it in.
        call (`str`, *optional*, defaults to `""`):
            Arguments of the pipeline's call beside the prompt, as code.
        is_editing (`bool`, *optional*, defaults to `False`):
            Whether it changes images.
        method (`str`, *optional*):
            How it was trained: `"PaCo-GRPO"` or `"DiffusionNFT"`.
        settings ([`ImageSettings`], *optional*), rewards (`list[Reward]`, *optional*):
            Settings and rewards of the run.
        evaluations (`list[Evaluation]`, *optional*):
            Its last evaluations.
        pictures (`dict[str, Path]`, *optional*):
            Pictures beside the card, by their names there.
    """

    weights: str = "adapter"
    formats: list[str] = field(default_factory=lambda: ["diffusers", "peft"])
    pipeline_class: str = "DiffusionPipeline"
    transformer_class: str | None = None
    dtype: str = "bfloat16"
    call: str = ""
    is_editing: bool = False
    method: str | None = None
    settings: ImageSettings | None = None
    rewards: list[Reward] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    pictures: dict[str, Path] = field(default_factory=dict)


@dataclass
class JudgeCard(_Card):
    """
    The card of a judge of consistency: of an adapter, or of a model that one was merged into.

    Args:
        weights (`str`, *optional*, defaults to `"adapter"`):
            `"adapter"` or `"merged"`.
        image_size (`dict[str, int]`, *optional*):
            Limits of an image in pixels, as its processor names them, which vLLM has to be told of an adapter.
        settings ([`JudgeSettings`], *optional*):
            Settings of the training.
        evaluations (`dict[str, dict]`, *optional*):
            The last evaluation on each dataset.
        pictures (`list[str]`, *optional*):
            Names of the pictures beside the card.
    """

    weights: str = "adapter"
    image_size: dict[str, int] | None = None
    settings: JudgeSettings | None = None
    evaluations: dict[str, dict] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)


def _given(*rows: tuple[str, object]) -> Iterator[tuple[str, str]]:
    return ((name, str(value)) for name, value in rows if value is not None)


def _scheduled(learning_rate: float | None, schedule: str | None) -> str | None:
    return None if learning_rate is None else f"{learning_rate}{f', {schedule}' if schedule else ''}"


def _pixels(size: list[int]) -> str:
    height, width = size
    return f"{width} x {height} pixels"
