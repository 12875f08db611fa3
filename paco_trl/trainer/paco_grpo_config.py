# SPDX-License-Identifier: Apache-2.0
"""Settings of [`PaCoGRPOTrainer`]."""

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from accelerate.logging import get_logger
from trl import GRPOConfig

from ..data.image_sets import PANEL_TEMPLATE, SET_LAYOUTS, check_panel_options
from ..rewards.aggregation import AGGREGATION_METHODS
from ..rollout.loading import check_attention_backend, quantization_text
from ..rollout.sde import SDE_TYPES
from ..utils.deepspeed import check_compiled_blocks, complete_config
from ..utils.quantization import QUANTIZATIONS
from ..utils.stopping import SIGNALS
from .config_utils import (
    REFUSED_GRPO_FIELDS,
    check_arguments,
    check_optimizer,
    help_from_docstring,
    name_checkpointing,
    refuse_fields,
)
from .rounds import RoundPlan, nearest_multiples, plan_round


logger = get_logger(__name__)

CHOICES: dict[str, Sequence] = {
    "sde_type": SDE_TYPES,
    "multi_objective_aggregation": AGGREGATION_METHODS,
    "scale_rewards": ("group", "batch", "none", True, False),
    "reference": ("initial", "base"),
    "quantization": (None, *QUANTIZATIONS),
    "set_layout": SET_LAYOUTS,
}
_COUNTS = (
    "num_prompts_per_generation", "optimizer_steps_per_generation", "per_device_train_batch_size", "height", "width",
    "num_generations_eval", "per_device_eval_batch_size", "generation_batch_size", "steps_per_generation", "gradient_accumulation_steps",
    "num_iterations", "per_device_rollout_batch_size", "num_inference_steps_eval",
)  # fmt: skip
_FRACTIONS = ("max_reward_failures", "max_excluded_images", "max_excluded_groups")
# Fields, their good values, and the rule in errors
RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("num_generations",), lambda v: v is not None and v >= 2, "at least 2, to be compared (the paper uses 16)"),
    (_COUNTS, lambda v: v is None or v >= 1, "at least 1"),
    (("num_inference_steps",), lambda v: v >= 2, "at least 2: the last is not stochastic"),
    (("resolution_scale",), lambda v: 0 < v <= 1, "in (0, 1] (the paper trains at 0.5, and finds that 0.25 fails)"),
    (("epsilon",), lambda v: v > 0, "above 0"),
    (("epsilon_high", "ratio_tolerance", "advantage_clip"), lambda v: v is None or v > 0, "above 0, or None"),
    (("guidance_scale",), lambda v: v >= 0, "at least 0: at 1 or below most models use none"),
    (("noise_level",), lambda v: v > 0, "above 0 (the paper uses 0.7): without noise a step has no log-probability"),
    (("log_tame_threshold",), lambda v: v == "mean" or v >= 0, "a number >= 0, or 'mean'"),
    (("min_reward_std",), lambda v: v is None or v >= 0, "at least 0, or None"),
    (("max_resample_times", "beta"), lambda v: v >= 0, "at least 0"),
    (("ema_decay",), lambda v: v is None or 0 < v < 1, "between 0 and 1 (published code: 0.9), or None (no average)"),
    (_FRACTIONS, lambda v: 0 <= v <= 1, "a fraction of a round, from 0 to 1"),
)


@help_from_docstring
@dataclass
class PaCoGRPOConfig(GRPOConfig):
    # docstyle-ignore
    r"""
    Configuration class for the [`PaCoGRPOTrainer`].

    This class includes only the parameters that are new here, or whose defaults differ from [`~trl.GRPOConfig`]; for
    the others refer to [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. Fields of [`~trl.GRPOConfig`] that
    mean nothing for images are refused when set. The defaults are the paper's for text-to-image-set training of
    FLUX.1-dev ([PaCo-RL](https://huggingface.co/papers/2512.04784)) unless another source is given.

    Parameters:
        > Parameters that control the resolution

        height (`int`, *optional*, defaults to `1024`):
            Inference height in pixels, for rows without a `height`. Edited images have `height * width` pixels and the
            aspect ratio of their source.
        width (`int`, *optional*, defaults to `1024`):
            Inference width in pixels, for rows without a `width`.
        resolution_scale (`float`, *optional*, defaults to `0.5`):
            Factor per side from the inference size to the training size, at which images are generated, scored and
            trained. Sizes are rounded to multiples that the pipeline and the panels require. Rewards have to agree
            between the two: the paper trains with correlations of .725 (consistency), .753 (CLIP-T) and .848 (PickScore)
            at half, and fails at a quarter, where consistency has .669.

        > Parameters that control the image sets

        set_layout (`str`, *optional*):
            What an image set is: `"grid"`, one image with all panels, or `"separate"`, an image of its own for each panel.
            If `None`, what its row says. A row that says the other loses its own `height` and `width`; as separate images,
            its theme is what its prompt says of all panels.
        panel_template (`str`, *optional*, defaults to `"{theme} {panel}"`):
            Prompt of a separate image, with the `theme` of its set and the text of its `panel` (our choice).
        panel_generation (`str`, *optional*, defaults to `"independent"`):
            How the separate images of a set are generated: `"independent"`; `"shared_noise"`, from the same initial noise;
            or `"anchored"`, the first from its text, and then the others with it as a source image (FLUX.1 Kontext,
            FLUX.2). The noise of the stochastic steps is always their own, since log-probabilities are added.

        > Parameters that control the sampler

        num_inference_steps (`int`, *optional*, defaults to `10`):
            Denoising steps of a rollout.
        num_inference_steps_eval (`int`, *optional*, defaults to `20`):
            Denoising steps of an image generated by `evaluate()` (published code).
        guidance_scale (`float`, *optional*, defaults to `3.5`):
            Guidance scale in training and evaluation, distilled or true according to the model.
        negative_prompt (`str`, *optional*):
            Negative prompt of true guidance, of rows without one (column `negative_prompt`). If `None`, the pipeline's
            own, an error without one (Qwen-Image).
        detach_unconditional (`bool`, *optional*, defaults to `False`):
            Whether no gradient flows through the unconditional prediction of true guidance.
        sde_type (`str`, *optional*, defaults to `"flow_sde"`):
            Kind of stochastic step: `"flow_sde"`, `"dance_sde"` or `"cps"`, see [`~paco_trl.rollout.sde_step`].
        sde_steps (`list[int]`, *optional*, defaults to `[1]`):
            Indices of the stochastic denoising steps, which are trained. Never the last step.
        num_sde_steps (`int`, *optional*):
            Number of steps sampled from `sde_steps` for each round. If `None`, all.
        noise_level (`float`, *optional*, defaults to `0.7`):
            Noise level `a` of the stochastic steps.
        tail_steps (`int`, *optional*):
            Denoising steps of a rollout after its last stochastic step, by DPM-Solver++(2M). If `None`, the rest of
            `num_inference_steps`, by Euler steps. Rewards see the images of the short tail; `evaluate()` never does.

        > Parameters that control the round

        num_generations (`int`, *optional*, defaults to `16`):
            Images, or sets of separate images, generated per prompt, the group whose rewards are compared.
        num_prompts_per_generation (`int`, *optional*):
            Prompts of a round, rounded up to a number that divides. Each separate image of a set counts, as in the
            other sizes of a round: it has as many whole sets as always fit, and the rest is repeated without weight.
            If `None`, 42 (paper) or as many as the dataset has, or derived from the sizes below; set along with one of
            them, it must fit.
        optimizer_steps_per_generation (`int`, *optional*):
            Optimizer steps per round. If `None`, 2 (paper), or derived from `gradient_accumulation_steps`; set along
            with that, it must fit. With several, the images of a separate set may be in different ones: a step weighs
            sets right in expectation only.
        generation_batch_size (`int`, *optional*):
            Images of a round over all processes. If `None`, `num_prompts_per_generation * num_generations`.
        steps_per_generation (`int`, *optional*):
            Training micro-steps of a process per round, one for each micro-batch and trained step. If `None`, derived.
        gradient_accumulation_steps (`int`, *optional*):
            Training micro-steps per optimizer step. If `None`, derived. Alone, it sets the effective batch, and a round is
            two optimizer steps, or more where two have no full groups.
        per_device_train_batch_size (`int`, *optional*, defaults to `1`):
            Images trained at a time on one process.
        per_device_rollout_batch_size (`int`, *optional*):
            Images generated at a time on one process, a multiple of `per_device_train_batch_size`. If `None`, as many.
            With more the replay rounds differently, see `ratio_tolerance`.
        num_generations_eval (`int`, *optional*, defaults to `1`):
            Images generated per prompt by `evaluate()`.
        per_device_eval_batch_size (`int`, *optional*, defaults to `1`):
            Images generated at a time on one process by `evaluate()`, of one size, and of one prompt where prompts have
            source images or other lengths. An image does not depend on its batch, apart from rounding.

        > Parameters that control the rewards

        multi_objective_aggregation (`str`, *optional*, defaults to `"log_tamed"`):
            Aggregation of several rewards: `"log_tamed"` (Eq. 3-4: a weighted sum, with log(1 + R) for a reward R whose
            coefficient of variation exceeds `log_tame_threshold`; one with a negative value in the round is left as it
            is), `"sum_then_normalize"`, `"normalize_then_sum"` (as in TRL), `"rank_then_sum"`
            ([Pref-GRPO](https://huggingface.co/papers/2508.20751): each reward is replaced by the fraction of its
            group's other images that it beats) or `"geometric_mean"`.
        log_tame_threshold (`float` or `str`, *optional*, defaults to `0.2`):
            Coefficient of variation above which a reward is tamed: a number, or `"mean"` for the mean of the rewards'
            coefficients.
        advantage_clip (`float`, *optional*, defaults to `5.0`):
            Advantages are clipped to [-advantage_clip, advantage_clip]. `None` does not clip.
        min_reward_std (`float`, *optional*):
            Standard deviation that the logged `reward` must exceed within the images of a prompt, or the prompt is left
            out of the loss: what its images differ by may be the judge's noise. `0.0` leaves out equal rewards
            ([DAPO](https://huggingface.co/papers/2503.14476)), [Edit-R1](https://huggingface.co/papers/2510.16888) takes
            0.05. `None` leaves out none. A step that is left without images changes no weights.
        max_reward_mean (`float`, *optional*):
            Mean of the logged `reward` over the images of a prompt from which on it is left out of the loss, as solved
            (Edit-R1: 0.9). `None` leaves out none.
        max_resample_times (`int`, *optional*, defaults to `0`):
            How often other prompts are generated in a round in place of those that are left out by `min_reward_std` or
            `max_reward_mean`, if the dataset has others of their size (dynamic sampling of DAPO, with a limit).
        reward_required (`list[bool]`, *optional*):
            Whether each reward is required, in order. If `None`, all are. An image without a required reward is left
            out; without an optional one, its group is compared without that reward.
        max_reward_failures (`float`, *optional*, defaults to `0.01`):
            Largest fraction of a round's images, rounded up to whole images, without a required reward; above it the
            run stops (our choice). With 0 it stops at the first.
        max_excluded_images (`float`, *optional*, defaults to `0.5`):
            Largest fraction of a round's images left out because of rewards; above it the run stops (our choice).
        max_excluded_groups (`float`, *optional*, defaults to `0.5`):
            Largest fraction of a round's prompts with fewer than two scored images; above it the run stops (our
            choice).

        > Parameters that control the training

        learning_rate (`float`, *optional*, defaults to `3e-4`):
            Initial learning rate of AdamW.
        lr_scheduler_type (`str`, *optional*, defaults to `"constant"`):
            Learning-rate schedule (our choice).
        weight_decay (`float`, *optional*, defaults to `1e-4`):
            Weight decay (published code).
        epsilon (`float`, *optional*, defaults to `1e-4`):
            Clip range of the probability ratio. It is small because log-probabilities are means over the latent.
        ratio_tolerance (`float`, *optional*):
            Largest |ratio - 1| before the first update of a round: above it training stops in the first two rounds, and
            logs a warning later; above `epsilon / 10` it logs a warning, once. If `None`, `epsilon`. The deviation is 0
            in float32 and depends on the kernels in bf16: see the logged `ratio_deviation_on_policy`.
        loss_type (`str`, *optional*, defaults to `"grpo"`):
            Loss: `"grpo"`, PPO's clipped objective, or `"grpo_guard"`
            ([GRPO-Guard](https://huggingface.co/papers/2510.22319)), with its steps balanced and a ratio on another
            scale, which requires another `epsilon`.
        reference (`str`, *optional*, defaults to `"initial"`):
            Reference model of `beta` when an adapter is trained further: `"initial"`, that adapter as it was loaded (as in
            TRL), or `"base"`, the base model without it. Otherwise both are the initial model.
        ema_decay (`float`, *optional*, defaults to `0.9`):
            Decay per optimizer step of the moving average of the weights, which is evaluated and saved (published
            code, see the documentation). `None` keeps no average.
        ema_offload (`bool`, *optional*, defaults to `False`):
            Whether the average is kept in CPU memory.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `True`):
            Whether SIGTERM and SIGUSR1 finish the optimizer step, or give up what is generated or evaluated, write a
            checkpoint and end the process with code 75 (`EX_TEMPFAIL`). If `False`, they end it at once.
        jit_checkpoint_signals (`list[str]`, *optional*, defaults to `["SIGTERM", "SIGUSR1"]`):
            Names of these signals.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Whether training that does not resume deletes what an earlier run has left in `output_dir`: its checkpoints,
            curves, contact sheets and baselines of evaluations. If `False`, a directory with checkpoints is refused.
            Other files stay.

        > Parameters that control the memory and the kernels

        quantization (`str`, *optional*):
            Quantization of frozen weights, of transformer and text encoders: `"nf4"` (bitsandbytes, on a GPU), `"int8"`
            or `"fp8"` (torchao), or `"fp8_storage"` (float8, which diffusers casts in each forward of a layer). For
            others pass a [`~diffusers.PipelineQuantizationConfig`] as `quantization_config` in `model_init_kwargs`.
        offload_embeddings (`bool`, *optional*, defaults to `False`):
            Whether the prompt embeddings of a round are kept in CPU memory.
        offload_rewards (`bool`, *optional*, defaults to `False`):
            Whether models of rewards (`model` of a reward or of its `judge`) are in CPU memory except to score a round,
            which then follows its generation.
        embeddings_dir (`str`, *optional*):
            Directory in which encoded prompts and source images stay for other runs. Without it and with it, memory holds
            those of eight rounds.
        vae_tiling (`bool`, *optional*, defaults to `False`):
            Whether the VAE decodes in tiles: less memory at large sizes, slightly different pixels at the seams.
        attention_backend (`str`, *optional*):
            Attention backend of the transformer in rollout and training: a name of diffusers, whose default is `None`.
        compile_repeated_blocks (`bool`, *optional*, defaults to `False`):
            Whether the transformer's blocks are compiled, for each image size and batch; not with DeepSpeed ZeRO-3.

        > Parameters that control the evaluation

        eval_baseline (`bool`, *optional*, defaults to `True`):
            Whether `evaluate()` also generates with the untrained model, once in a run, and reports the gain.

        > Parameters that control the logging

        logging_steps (`int` or `float`, *optional*, defaults to `1`):
            Optimizer steps between two logs.
        log_completions (`bool`, *optional*, defaults to `True`):
            Whether to save a contact sheet of each round's images with their scores, and send it to the trackers.
        plot_curves (`bool`, *optional*, defaults to `True`):
            Whether to plot the logged metrics to `output_dir/curves.png`. `curves.csv` is always written.
    """

    loss_types = ("grpo", "grpo_guard")  # of this trainer
    _other_losses = "'nft' and 'awm' have a trainer, `PaCoNFTTrainer`"
    _ranges, _choices = RANGES, CHOICES

    height: int = 1024
    width: int = 1024
    resolution_scale: float = 0.5

    set_layout: str | None = None
    panel_template: str = PANEL_TEMPLATE
    panel_generation: str = "independent"

    num_inference_steps: int = 10
    num_inference_steps_eval: int = 20
    guidance_scale: float = 3.5
    negative_prompt: str | None = None
    detach_unconditional: bool = False
    sde_type: str = "flow_sde"
    sde_steps: list[int] = field(default_factory=lambda: [1])
    num_sde_steps: int | None = None
    noise_level: float = 0.7
    tail_steps: int | None = None

    num_generations: int = 16
    num_prompts_per_generation: int | None = None
    optimizer_steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    gradient_accumulation_steps: int | None = None
    per_device_train_batch_size: int = 1
    per_device_rollout_batch_size: int | None = None
    num_generations_eval: int = 1
    per_device_eval_batch_size: int = 1

    multi_objective_aggregation: str = "log_tamed"
    # `None` is in the type for argparse, which reads a union with it as a string: both 0.3 and "mean"
    log_tame_threshold: float | str | None = 0.2
    advantage_clip: float | None = 5.0
    min_reward_std: float | None = None
    max_reward_mean: float | None = None
    max_resample_times: int = 0
    # `str` is in the type for argparse, which would convert every word to True
    reward_required: list[str] | None = None
    max_reward_failures: float = 0.01
    max_excluded_images: float = 0.5
    max_excluded_groups: float = 0.5

    learning_rate: float = 3e-4
    lr_scheduler_type: str = "constant"
    weight_decay: float = 1e-4
    epsilon: float = 1e-4
    ratio_tolerance: float | None = None
    loss_type: str = "grpo"
    reference: str = "initial"
    ema_decay: float | None = 0.9
    ema_offload: bool = False
    enable_jit_checkpoint: bool = True
    jit_checkpoint_signals: list[str] = field(default_factory=lambda: list(SIGNALS))
    overwrite_output_dir: bool = False

    quantization: str | None = None
    offload_embeddings: bool = False
    offload_rewards: bool = False
    embeddings_dir: str | None = None
    vae_tiling: bool = False
    attention_backend: str | None = None
    compile_repeated_blocks: bool = False

    eval_baseline: bool = True

    logging_steps: float = 1
    log_completions: bool = True
    plot_curves: bool = True

    def __post_init__(self):
        self._refuse_fields()
        self._check_values()
        if (self.load_best_model_at_end or self.save_strategy == "best") and self.metric_for_best_model is None:
            self.metric_for_best_model: Any = "reward"
        if (self.metric_for_best_model or "").endswith("grid_artifact") and self.greater_is_better is None:
            self.greater_is_better: bool | None = False
        if self.num_generations_eval is None:  # TRL's default: as many as in training
            self.num_generations_eval = self.num_generations
        num_prompts = self.num_prompts_per_generation
        requested = (
            num_prompts, self.optimizer_steps_per_generation, self.generation_batch_size, self.steps_per_generation,
            self.gradient_accumulation_steps,
        )  # fmt: skip

        # TrainingArguments copies the accumulation into the DeepSpeed config, so the round is planned before it
        num_processes = int(os.environ.get("WORLD_SIZE", 1))
        name_checkpointing(self)
        plan = self._plan_round(*requested, num_processes=num_processes)
        self.gradient_accumulation_steps = plan.gradient_accumulation_steps
        self.steps_per_generation, self.generation_batch_size = plan.steps_per_generation, None  # TRL takes one
        eval_batch_size, self.per_device_eval_batch_size = self.per_device_eval_batch_size, self.num_generations_eval
        super().__post_init__()
        self.per_device_eval_batch_size = eval_batch_size  # TRL requires full groups, which `evaluate()` does not
        check_compiled_blocks(self)
        complete_config(self)
        check_optimizer(self)
        self._check_launcher()
        if self.world_size != num_processes:
            problem = f"This run has {self.world_size} processes, but WORLD_SIZE is {num_processes}"
            raise ValueError(f"{problem}. Start it with `accelerate launch` or `torchrun`.")
        self.generation_batch_size = plan.num_images
        self.num_prompts_per_generation = plan.num_prompts
        self.optimizer_steps_per_generation = plan.num_optimizer_steps
        self.logging_nan_inf_filter = False  # a NaN loss is an error, not to be averaged away

        self._is_default_round = num_prompts is None and requested[2:] == (None,) * 3
        expected = 42 if self._is_default_round else num_prompts
        if expected is not None and requested[2:4] == (None, None) and plan.num_prompts != expected:
            numbers = f"from {expected} to {plan.num_prompts}, which divides"
            logger.warning(f"`num_prompts_per_generation` is rounded up {numbers}: {plan.describe()}")
        if requested[1] is None and plan.num_optimizer_steps > 2:
            logger.warning(f"`gradient_accumulation_steps` makes more than 2 steps of full groups: {plan.describe()}")

    def fit_round(self, count: int) -> None:
        """Make a round of the default size as small as a dataset of that many prompts requires, if it can be."""
        plan = self.round_plan
        batch = plan.num_processes * plan.rollout_batch_size * plan.num_optimizer_steps
        fitting = [n for n in range(1, count + 1) if n * plan.num_generations % batch == 0]
        if not self._is_default_round or count >= plan.num_prompts or not fitting:
            return
        sizes = (fitting[-1], plan.num_optimizer_steps, None, None, None)
        plan = self._plan_round(*sizes, num_processes=self.world_size)
        self.num_prompts_per_generation, self.generation_batch_size = plan.num_prompts, plan.num_images
        self.steps_per_generation = plan.steps_per_generation
        self.gradient_accumulation_steps = plan.gradient_accumulation_steps
        complete_config(self)
        logger.warning(f"The dataset has {count} prompts, fewer than the 42 of a round by default: {plan.describe()}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as trackers store them."""
        plain, kwargs = copy.copy(self), self.model_init_kwargs or {}
        if "quantization_config" in kwargs:
            # transformers calls its `to_dict`, which a `PipelineQuantizationConfig` lacks
            text = quantization_text(kwargs["quantization_config"])
            plain.model_init_kwargs = {**kwargs, "quantization_config": {"config": text}}
        return super(PaCoGRPOConfig, plain).to_dict()

    @property
    def place_model_on_device(self) -> bool:
        """Whether Trainer places the model when it is created: the prompts are encoded before."""
        return False

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with the reference."""
        return self.beta > 0

    @property
    def num_trained_steps(self) -> int:
        """Number of stochastic denoising steps of each image."""
        return self.num_sde_steps if self.num_sde_steps is not None else len(self.sde_steps)

    @property
    def round_plan(self) -> RoundPlan:
        """Division of a round over processes, micro-batches and optimizer steps."""
        steps = self.optimizer_steps_per_generation
        return self._plan_round(None, steps, self.generation_batch_size, None, None, num_processes=self.world_size)

    def _plan_round(self, *requested: int | None, num_processes: int) -> RoundPlan:
        """Plan a round of the sizes that are set; see [`plan_round`]."""
        return plan_round(
            *requested, num_processes=num_processes, num_generations=self.num_generations,
            batch_size=self.per_device_train_batch_size, num_trained_steps=self.num_trained_steps,
            num_merged_batches=(self.per_device_rollout_batch_size or 0) // self.per_device_train_batch_size or 1,
        )  # fmt: skip

    def _refuse_fields(self) -> None:
        if self.loss_type not in self.loss_types:
            choices = f"{', '.join(map(repr, self.loss_types))} ({self._other_losses})"
            raise ValueError(f"`loss_type` is {self.loss_type!r}; it must be one of {choices}.")
        refuse_fields(self, GRPOConfig, REFUSED_GRPO_FIELDS)

    def _check_launcher(self) -> None:
        if self.n_gpu > 1:
            cure = "Start one for each with `accelerate launch`, or set `CUDA_VISIBLE_DEVICES`"
            raise ValueError(f"{self.n_gpu} GPUs are visible to a single process. {cure}.")
        if self.mixed_precision != ("bf16" if self.bf16 else "no"):
            launcher = f"the launcher's configuration says `mixed_precision: {self.mixed_precision}`"
            raise ValueError(f"`bf16` is {self.bf16}, but {launcher}. Set both alike.")
        # Parsed from a JSON string by TrainingArguments
        if (kwargs := self.activation_checkpointing_kwargs) not in (None, {}, {"use_reentrant": False}):
            problem = "diffusers' checkpointing takes no options, and a reentrant one has no gradients here"
            raise ValueError(f"`activation_checkpointing_kwargs` is {kwargs}, but {problem}. Unset it.")

    def _check_values(self) -> None:
        with suppress(TypeError, ValueError):  # "mean", or what is refused below
            self.log_tame_threshold = float(self.log_tame_threshold)  # type: ignore[arg-type]
        for names, is_good, rule in self._ranges:
            for name in names:
                value = getattr(self, name)
                try:
                    fits = is_good(value)
                except TypeError:  # of another type, or None
                    fits = False
                if not fits:  # NaN is not either
                    raise ValueError(f"`{name}` is {value!r}; it must be {rule}.")
        check_arguments(self)
        value, multiple = self.per_device_rollout_batch_size, self.per_device_train_batch_size
        if value is not None and value % multiple != 0:
            raise ValueError(
                f"`per_device_rollout_batch_size` is {value}, but must be a multiple of `per_device_train_batch_size`, "
                f"{multiple}. {nearest_multiples(value, multiple)}"
            )
        batch_size = self.per_device_rollout_batch_size or self.per_device_train_batch_size
        if self.max_resample_times and self.min_reward_std is None and self.max_reward_mean is None:
            cure = "Set `min_reward_std` (0 for those with equal rewards) or `max_reward_mean`"
            raise ValueError(f"`max_resample_times` is {self.max_resample_times}, but no prompt is left out. {cure}.")
        if self.max_resample_times and self.num_generations % batch_size:
            problem = f"a batch of {batch_size} images would hold parts of several"
            cure = f"Choose a size that divides `num_generations` ({self.num_generations})"
            raise ValueError(f"`max_resample_times` generates single prompts again, but {problem}. {cure}.")
        if self.attention_backend is not None:
            check_attention_backend(self.attention_backend)
        for name, choices in self._choices.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, choices))}.")
        check_panel_options(self.panel_template, self.panel_generation)
        if self.set_layout == "grid" and self.panel_generation != PaCoGRPOConfig.panel_generation:
            raise ValueError(f"`panel_generation` is {self.panel_generation!r}, but `set_layout` is 'grid'. Unset it.")
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards in ("none", False):
            problem = "'normalize_then_sum' scales each reward by its group and their sum by the batch, as in TRL"
            raise ValueError(f"`scale_rewards` is {self.scale_rewards!r}, but {problem}. Unset it.")
        if self.reward_required is not None:
            words = [str(value).lower() for value in self.reward_required]
            if not {*words} <= {"true", "false"}:
                raise ValueError(
                    f"`reward_required` is {self.reward_required}; it must be true or false for each reward."
                )
            self.reward_required = [word == "true" for word in words]  # type: ignore[misc]
        method = self.multi_objective_aggregation
        if method != "log_tamed" and self.log_tame_threshold != PaCoGRPOConfig.log_tame_threshold:
            raise ValueError(
                f"`log_tame_threshold` is {self.log_tame_threshold!r}, which {method!r} does not use. Unset it."
            )
        if self.reference != "initial" and not self.has_reference:
            raise ValueError("`reference` is 'base', but no loss compares with it. Set `beta`.")
        self._check_objective()

    def _check_objective(self) -> None:
        """Check the stochastic steps and the loss on them."""
        last = self.num_inference_steps - 1
        if not self.sde_steps or len({*self.sde_steps} & {*range(last)}) != len(self.sde_steps):
            rule = f"at least one step, each once, from 0 to {last - 1}: the noise of the last, {last}, would stay in the image"
            raise ValueError(f"`sde_steps` is {self.sde_steps}; it must name {rule}.")
        self.sde_steps = sorted(self.sde_steps)
        if self.num_sde_steps is not None and not 1 <= self.num_sde_steps <= len(self.sde_steps):
            choice = f"{len(self.sde_steps)} steps are named in `sde_steps` ({self.sde_steps}) to choose from"
            raise ValueError(f"`num_sde_steps` is {self.num_sde_steps}, but {choice}.")
        rest = last - self.sde_steps[-1]
        if self.tail_steps is not None and not 1 <= self.tail_steps <= rest:
            problem = f"{rest} of {last + 1} steps follow the last stochastic one, {self.sde_steps[-1]}"
            raise ValueError(
                f"`tail_steps` is {self.tail_steps}, but {problem}. Choose from 1 to {rest}, or None for all."
            )
        if self.sde_type == "cps" and self.noise_level > 1:
            raise ValueError(f"`noise_level` is {self.noise_level}; it must be at most 1 for 'cps'.")
