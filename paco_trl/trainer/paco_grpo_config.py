# SPDX-License-Identifier: Apache-2.0
"""Settings of [`PaCoGRPOTrainer`]."""

import dataclasses
import math
import os
from dataclasses import dataclass, field

from accelerate.logging import get_logger
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import GRPOConfig

from ..rollout.sde import SDE_TYPES
from ..utils.deepspeed import check_gradient_accumulation
from .refusals import refuse_fields
from .round_layout import RoundLayout, lay_out_round


logger = get_logger(__name__)

LOSS_TYPES = ("grpo", "grpo_guard")
AGGREGATIONS = ("log_tamed", "sum_then_normalize", "normalize_then_sum", "geometric_mean")

_TEXT_SAMPLING = "images are drawn by a diffusion sampler, not token by token"
_VLLM = "vLLM generates text; images are drawn by the diffusers pipeline itself"
_TOKENS = "it acts on tokens, and an image has none: its policy is a Gaussian step of the sampler"
_REFERENCE = "the reference is the model with its adapter disabled, there is no second model to synchronise"
_COMPILE = (
    "it would compile the replay and not the rollout, whose numbers would then differ; call "
    "`pipeline.transformer.compile_repeated_blocks()` and pass the pipeline instead, before anything is drawn with it"
)
_ROWS = "the rows of a round are fetched by number, in an order that depends on `seed` and the step alone"
_FSDP = "the pipeline draws with the model that is trained, which FSDP takes apart; use DeepSpeed ZeRO-3"
_ONE_LOSS = "it belongs to a token loss; the losses here are clipped by `epsilon` and `epsilon_high`"

# Fields of GRPOConfig that mean nothing for images. Set to anything but TRL's default, they are refused with the
# reason: an option without effect would be a silent error in somebody's experiment.
REFUSED_FIELDS = {
    "max_completion_length": _TEXT_SAMPLING,
    "temperature": f"{_TEXT_SAMPLING}; the noise of the sampler is `noise_level`",
    "generation_kwargs": f"{_TEXT_SAMPLING}; see `num_inference_steps` and `guidance_scale`",
    **dict.fromkeys((
        "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation", "use_transformers_paged",
        "use_transformers_continuous_batching", "transformers_continuous_batching_config",
    ), _TEXT_SAMPLING),
    "chat_template_kwargs": "prompts are plain text, not conversations",
    "mask_truncated_completions": "an image is never cut short",
    "max_tool_calling_iterations": "an image model calls no tools",
    **dict.fromkeys((
        "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex",
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
        "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
        "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap",
    ), _VLLM),
    "router_aux_loss_coef": "the transformer of a flow-matching pipeline has no router loss",
    "cast_lm_head_to_fp32": "an image model has no language-model head",
    **dict.fromkeys((
        "pad_to_multiple_of", "importance_sampling_level", "off_policy_mask_threshold", "top_entropy_quantile",
        "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
        "entropy_target", "average_tokens_across_devices",
    ), _TOKENS),
    **dict.fromkeys((
        "delta", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
        "vespo_lambda_neg",
    ), _ONE_LOSS),
    "use_bias_correction_kl": "the KL divergence of two Gaussians is exact and needs no correction",
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _REFERENCE),
    "disable_dropout": "dropout is always refused: with it the ratio before the first update would be noise",
    "log_multimodal": "contact sheets are pictures; switch them off with `log_completions=False`",
    "num_completions_to_print": "images cannot be printed; contact sheets have a fixed size",
    "log_unique_prompts": "a contact sheet has one row for each prompt",
    "log_completions_hub_repo": "contact sheets are saved in `output_dir`, which `push_to_hub` uploads",
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILE),
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "Liger's kernels are for language models"),
    **dict.fromkeys((
        "data_seed", "dataloader_num_workers", "dataloader_drop_last", "dataloader_in_order",
        "dataloader_multiprocessing_context", "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "train_sampling_strategy", "length_column_name", "ignore_data_skip",
    ), _ROWS),
    **dict.fromkeys((
        "batch_eval_metrics", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
        "include_for_metrics", "prediction_loss_only",
    ), "`evaluate()` draws and scores images, without Trainer's evaluation loop"),
    **dict.fromkeys(("label_smoothing_factor", "label_names"), "there are no labels"),
    "neftune_noise_alpha": "there are no token embeddings to add noise to",
    "remove_unused_columns": "rewards get every column of the dataset",
    "use_cache": "the transformer of a flow-matching pipeline has no key-value cache",
    "fsdp": _FSDP,
    "parallelism_config": "the pipeline draws with the whole transformer; use data parallelism or DeepSpeed",
    "auto_find_batch_size": "the batch is part of the arithmetic of a round, and of what the replay must repeat",
    "save_only_model": "a checkpoint without the optimizer's state cannot be continued exactly",
    "enable_jit_checkpoint": "it saves amid an optimizer step; a killed run resumes exactly from its last checkpoint",
    **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), "`evaluate()` draws in the precision of training"),
    "fp16": "log-probabilities of flow-matching models are not reliable in fp16; use bf16 or float32",
}  # fmt: skip


@dataclass
class PaCoGRPOConfig(GRPOConfig):
    # docstyle-ignore
    r"""
    Configuration class for the [`PaCoGRPOTrainer`].

    Only the parameters that are new here, or whose defaults differ from [`~trl.GRPOConfig`], are listed; for the
    others refer to [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. Fields of [`~trl.GRPOConfig`] that
    mean nothing for images are refused when set. The defaults are the paper's for text-to-image-set training of
    FLUX.1-dev ([PaCo-RL](https://huggingface.co/papers/2512.04784), settings of Part 3) where it names one.

    Parameters:
        > Parameters that control the resolution

        height (`int`, *optional*, defaults to `1024`):
            Height in pixels at which images are generated in the end, for rows without a `height` column (paper).
            Edited images then have the aspect ratio of their source, and `height * width` pixels.
        width (`int`, *optional*, defaults to `1024`):
            Width in pixels at which images are generated in the end, for rows without a `width` column (paper).
        resolution_scale (`float`, *optional*, defaults to `0.5`):
            Factor per side from the inference size to the size that is drawn, scored and trained (paper: 512 for 1024,
            resolution-decoupled training). Sizes are rounded to what the pipeline and the panels need.

        > Parameters that control the sampler

        num_inference_steps (`int`, *optional*, defaults to `10`):
            Denoising steps of a rollout (paper).
        num_inference_steps_eval (`int`, *optional*, defaults to `20`):
            Denoising steps of an image drawn by `evaluate()` (published code).
        guidance_scale (`float`, *optional*, defaults to `3.5`):
            Guidance scale, in training and evaluation (paper). Of the kind that the model has: distilled into it, or
            true guidance between a conditional and an unconditional prediction.
        negative_prompt (`str`, *optional*):
            Negative prompt of true guidance. If `None`, the pipeline's own, an error without one (Qwen-Image).
        detach_unconditional (`bool`, *optional*, defaults to `False`):
            Whether no gradient flows through the unconditional prediction of true guidance. The policy's own gradient
            flows through both.
        sde_type (`str`, *optional*, defaults to `"flow_sde"`):
            Kind of stochastic step, see [`~paco_trl.rollout.sde_step`]: `"flow_sde"` (paper), `"dance_sde"`, `"cps"`.
        sde_steps (`list[int]`, *optional*, defaults to `[1]`):
            Indices of the denoising steps that may be stochastic, and are trained (paper). Never the last step.
        num_sde_steps (`int`, *optional*):
            Number of steps chosen at random from `sde_steps`, in each round for all of its images. If `None`, all.
        noise_level (`float`, *optional*, defaults to `0.7`):
            Noise level `a` of the stochastic steps (paper).

        > Parameters that control the round

        num_generations (`int`, *optional*, defaults to `16`):
            Images drawn for each prompt, the group whose rewards are compared (paper).
        num_prompts_per_generation (`int`, *optional*, defaults to `42`):
            Prompts of a generation round (paper), rounded up to a number that divides over the processes. Ignored when
            `generation_batch_size` or `steps_per_generation` is set.
        optimizer_steps_per_generation (`int`, *optional*, defaults to `2`):
            Optimizer steps made with the images of a round (paper). `gradient_accumulation_steps`, if set, decides.
        generation_batch_size (`int`, *optional*):
            Images of a round over all processes. If `None`, `num_prompts_per_generation * num_generations`.
        steps_per_generation (`int`, *optional*):
            Training micro-steps of one process in a round: one for each micro-batch of images and trained step. If
            `None`, they follow from `generation_batch_size`.
        gradient_accumulation_steps (`int`, *optional*):
            Training micro-steps for each optimizer step. If `None`, they follow from the optimizer steps of a round.
        per_device_train_batch_size (`int`, *optional*, defaults to `1`):
            Images drawn, and trained, at a time on one process (paper).
        num_generations_eval (`int`, *optional*, defaults to `1`):
            Images drawn for each prompt by `evaluate()`.

        > Parameters that control the rewards

        multi_objective_aggregation (`str`, *optional*, defaults to `"log_tamed"`):
            How several rewards become one: `"log_tamed"` (paper, Eq. 3-4: a reward whose coefficient of variation
            exceeds `log_tame_threshold` is replaced by log(1 + R), then the weighted sum), `"sum_then_normalize"`,
            `"normalize_then_sum"` (as in TRL: each reward is normalized within its group, their weighted sum over the
            batch, whatever `scale_rewards` is) or `"geometric_mean"`.
        log_tame_threshold (`float` or `str`, *optional*, defaults to `0.2`):
            Coefficient of variation above which `"log_tamed"` tames a reward (paper: 0.2, or `"mean"` for the mean of
            the rewards' coefficients).
        advantage_clip (`float`, *optional*, defaults to `5.0`):
            Advantages are clipped to [-advantage_clip, advantage_clip] (paper). `None` does not clip.
        reward_required (`list[bool]`, *optional*):
            Whether each reward is required, in the order of the rewards; if `None`, all are. An image without a
            required one is left out; without an optional one, the images of its prompt are compared without it.
        max_reward_failures (`float`, *optional*, defaults to `0.01`):
            Largest share of a round's images for which a required reward may give `None`. Above it the run stops. Not
            the paper's.
        max_excluded_images (`float`, *optional*, defaults to `0.5`):
            Largest share of a round's images that may have been left out because a reward gave `None`. Above it the
            run stops. Not the paper's.
        max_excluded_groups (`float`, *optional*, defaults to `0.5`):
            Largest share of a round's prompts with fewer than two scored images, or the run stops. Not the paper's.

        > Parameters that control the training

        learning_rate (`float`, *optional*, defaults to `3e-4`):
            Initial learning rate of AdamW (paper).
        lr_scheduler_type (`str`, *optional*, defaults to `"constant"`):
            Learning-rate schedule. The paper names none.
        weight_decay (`float`, *optional*, defaults to `1e-4`):
            Weight decay (published code).
        epsilon (`float`, *optional*, defaults to `1e-4`):
            Clip range of the probability ratio (paper), small because log-probabilities are means over the latent.
        ratio_tolerance (`float`, *optional*):
            Largest |ratio - 1| accepted before the first update, when model and rollout are still the same. If `None`,
            a tenth of `epsilon`. It is 0 in float32 and depends on the kernels in bf16: see the logged
            `ratio_deviation_on_policy`.
        loss_type (`str`, *optional*, defaults to `"grpo"`):
            Loss, averaged over the images and their stochastic steps: `"grpo"` (paper), PPO's clipped objective, or
            `"grpo_guard"` ([GRPO-Guard](https://huggingface.co/papers/2510.22319)), the same on a log-ratio without
            its bias and with the same spread at every step, and with weights that balance the steps. Its ratio has
            another scale: choose `epsilon` anew.
        ema_decay (`float`, *optional*, defaults to `0.9`):
            Decay of the exponential moving average of the trained weights, for each optimizer step (the published
            code's 0.9; with its update interval of 8 it keeps the weights of a recent step, which `None` is nearer to).
            The average is evaluated and saved; training and rollout use the weights themselves. `None` keeps none.
        ema_offload (`bool`, *optional*, defaults to `False`):
            Whether the average is kept in CPU memory.

        > Parameters that control the memory

        offload_embeddings (`bool`, *optional*, defaults to `False`):
            Whether the prompt embeddings of a round wait in CPU memory for their micro-batch.
        vae_tiling (`bool`, *optional*, defaults to `False`):
            Whether the VAE decodes in tiles: less memory at large sizes, and slightly different pixels at the seams.

        > Parameters that control the evaluation

        resolution_transfer_prompts (`int`, *optional*, defaults to `0`):
            Prompts that are drawn at training and at inference size before training, to measure how far each reward
            agrees between the two; 0 draws none. The results go to `output_dir/evaluation`, with a warning where the
            correlation is low. An interval that says something needs 10.

        > Parameters that control the logging

        logging_steps (`int` or `float`, *optional*, defaults to `1`):
            Optimizer steps between two logs.
        log_completions (`bool`, *optional*, defaults to `True`):
            Whether to save a contact sheet of each round's images with their scores in `output_dir/contact_sheets`,
            and send it to the trackers of `report_to`.
        plot_curves (`bool`, *optional*, defaults to `True`):
            Whether to plot the logged metrics to `output_dir/curves.png`. The table `curves.csv` is always written.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]: `num_generations` (`16`),
    > `num_generations_eval` (`1`), `per_device_train_batch_size` (`1`), `gradient_accumulation_steps` (derived),
    > `multi_objective_aggregation` (`"log_tamed"`), `learning_rate` (`3e-4`), `lr_scheduler_type` (`"constant"`),
    > `weight_decay` (`1e-4`), `epsilon` (`1e-4`), `loss_type` (`"grpo"`), `logging_steps` (`1`), `log_completions`
    > (`True`), `logging_nan_inf_filter` (always `False`: a loss that is not a number is an error).
    """

    # Parameters that control the resolution
    height: int = field(
        default=1024, metadata={"help": "Height in pixels of the images in the end, for rows without a `height`."}
    )
    width: int = field(
        default=1024, metadata={"help": "Width in pixels of the images in the end, for rows without a `width`."}
    )
    resolution_scale: float = field(
        default=0.5, metadata={"help": "Factor per side from the inference size to the size of training."}
    )

    # Parameters that control the sampler
    num_inference_steps: int = field(default=10, metadata={"help": "Denoising steps of a rollout."})
    num_inference_steps_eval: int = field(
        default=20, metadata={"help": "Denoising steps of an image drawn by `evaluate()`."}
    )
    guidance_scale: float = field(default=3.5, metadata={"help": "Guidance scale, in training and evaluation."})
    negative_prompt: str | None = field(
        default=None, metadata={"help": "Negative prompt of true guidance. If `None`, the pipeline's own."}
    )
    detach_unconditional: bool = field(
        default=False, metadata={"help": "Whether true guidance's unconditional prediction gets no gradient."}
    )
    sde_type: str = field(
        default="flow_sde", metadata={"help": "Kind of stochastic step: 'flow_sde', 'dance_sde' or 'cps'."}
    )
    sde_steps: list[int] = field(
        default_factory=lambda: [1], metadata={"help": "Indices of the stochastic denoising steps that are trained."}
    )
    num_sde_steps: int | None = field(
        default=None, metadata={"help": "Number of steps chosen at random from `sde_steps`. If `None`, all."}
    )
    noise_level: float = field(default=0.7, metadata={"help": "Noise level `a` of the stochastic steps."})

    # Parameters that control the round
    num_generations: int | None = field(
        default=16, metadata={"help": "Images drawn for each prompt, the group whose rewards are compared."}
    )
    num_prompts_per_generation: int = field(
        default=42, metadata={"help": "Prompts of a round, rounded up to what divides over the processes."}
    )
    optimizer_steps_per_generation: int = field(
        default=2, metadata={"help": "Optimizer steps made with the images of a round."}
    )
    generation_batch_size: int | None = field(
        default=None, metadata={"help": "Images of a round. If `None`, it follows from the prompts of a round."}
    )
    steps_per_generation: int | None = field(
        default=None, metadata={"help": "Training micro-steps of one process in a round. If `None`, derived."}
    )
    gradient_accumulation_steps: int | None = field(
        default=None, metadata={"help": "Training micro-steps for each optimizer step. If `None`, derived."}
    )
    per_device_train_batch_size: int = field(
        default=1, metadata={"help": "Images drawn, and trained, at a time on one process."}
    )
    num_generations_eval: int | None = field(
        default=1, metadata={"help": "Images drawn for each prompt by `evaluate()`."}
    )

    # Parameters that control the rewards
    multi_objective_aggregation: str = field(
        default="log_tamed",
        metadata={
            "help": "How several rewards become one: 'log_tamed' (a weighted sum with log(1 + R) for a reward R that "
            "varies too much), 'sum_then_normalize', 'normalize_then_sum' or 'geometric_mean'."
        },
    )
    # `None` is in the type for the command line only: argparse reads a union with it as a string, so that both 0.3
    # and "mean" can be given.
    log_tame_threshold: float | str | None = field(
        default=0.2,
        metadata={"help": "Coefficient of variation above which a reward is tamed: number, or 'mean'."},
    )
    advantage_clip: float | None = field(
        default=5.0,
        metadata={"help": "Advantages are clipped to [-advantage_clip, advantage_clip]. `None` does not clip."},
    )
    # `str` is in the type for the command line only, where argparse would make True of every word
    reward_required: list[str] | None = field(
        default=None, metadata={"help": "Whether each reward is required, in their order. If `None`, all are."}
    )
    max_reward_failures: float = field(
        default=0.01, metadata={"help": "Share of a round's images without a required reward that stops the run."}
    )
    max_excluded_images: float = field(
        default=0.5, metadata={"help": "Share of images left out because of a reward above which the run stops."}
    )
    max_excluded_groups: float = field(
        default=0.5, metadata={"help": "Share of prompts without two scored images above which the run stops."}
    )

    # Parameters that control the training
    learning_rate: float = field(default=3e-4, metadata={"help": "Initial learning rate of AdamW."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Learning-rate schedule."})
    weight_decay: float = field(default=1e-4, metadata={"help": "Weight decay."})
    epsilon: float = field(default=1e-4, metadata={"help": "Clip range of the probability ratio."})
    ratio_tolerance: float | None = field(
        default=None, metadata={"help": "Largest |ratio - 1| before the first update. If `None`, `epsilon / 10`."}
    )
    loss_type: str = field(
        default="grpo",
        metadata={"help": "Loss: 'grpo', PPO's clipped objective, or 'grpo_guard', with its steps balanced."},
    )
    ema_decay: float | None = field(
        default=0.9,
        metadata={"help": "Decay of the average of the weights that is evaluated and saved. `None` keeps none."},
    )
    ema_offload: bool = field(default=False, metadata={"help": "Whether the average is kept in CPU memory."})

    # Parameters that control the memory
    offload_embeddings: bool = field(
        default=False, metadata={"help": "Whether the prompt embeddings of a round wait in CPU memory."}
    )
    vae_tiling: bool = field(
        default=False, metadata={"help": "Whether the VAE decodes in tiles: less memory at large sizes."}
    )

    # Parameters that control the evaluation
    resolution_transfer_prompts: int = field(
        default=0, metadata={"help": "Prompts drawn at training and inference size before training. 0: none."}
    )

    # Parameters that control the logging
    logging_steps: float = field(default=1, metadata={"help": "Optimizer steps between two logs."})
    log_completions: bool = field(
        default=True, metadata={"help": "Whether to save a contact sheet of each round's images with their scores."}
    )
    plot_curves: bool = field(
        default=True, metadata={"help": "Whether to plot the logged metrics to `output_dir/curves.png`."}
    )

    def __post_init__(self):
        self._refuse_text_fields()
        self._check_values()
        if (self.load_best_model_at_end or self.save_strategy == "best") and self.metric_for_best_model is None:
            # Trainer's default is a loss, which an evaluation of images has not
            self.metric_for_best_model = "reward"
        if (self.metric_for_best_model or "").endswith("grid_artifact") and self.greater_is_better is None:
            self.greater_is_better = False
        if self.num_generations_eval is None:  # TRL's default: as many as in training
            self.num_generations_eval = self.num_generations
        # TRL wants it to hold whole groups; `evaluate()` draws one image at a time on each process
        self.per_device_eval_batch_size = self.num_generations_eval
        requested_prompts = self.num_prompts_per_generation
        requested = (self.generation_batch_size, self.steps_per_generation, self.gradient_accumulation_steps)

        # TrainingArguments copies the accumulation into the DeepSpeed config, so the round is laid out before it; the
        # launchers say the number of processes in WORLD_SIZE
        num_processes = int(os.environ.get("WORLD_SIZE", 1))
        # TRL sets `gradient_checkpointing`, which transformers has renamed and warns of
        if self.activation_checkpointing is None:
            self.activation_checkpointing = self.gradient_checkpointing
        if self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        layout = self._lay_out(requested_prompts, *requested, num_processes)
        self.gradient_accumulation_steps = layout.gradient_accumulation_steps
        self.steps_per_generation, self.generation_batch_size = layout.steps_per_generation, None  # TRL takes one
        super().__post_init__()
        check_gradient_accumulation(self)
        self._check_launcher()
        if self.world_size != num_processes:
            if self.deepspeed:
                raise ValueError(
                    f"This run has {self.world_size} processes, but WORLD_SIZE is {num_processes}: the DeepSpeed "
                    "config was filled in for the latter. Start the run with `accelerate launch` or `torchrun`."
                )
            layout = self._lay_out(requested_prompts, *requested, self.world_size)
            self.gradient_accumulation_steps = layout.gradient_accumulation_steps
            self.steps_per_generation = layout.steps_per_generation
        self.generation_batch_size = layout.num_images
        self.num_prompts_per_generation = layout.num_prompts
        self.optimizer_steps_per_generation = layout.num_optimizer_steps
        if self.ratio_tolerance is None:
            self.ratio_tolerance = self.epsilon / 10
        # A loss that is not a number is an error here, never the average of its neighbours
        self.logging_nan_inf_filter = False

        if requested[:2] == (None, None) and layout.num_prompts != requested_prompts:
            logger.warning(
                f"A round of {requested_prompts} prompts does not divide over {self.world_size} processes: "
                f"`num_prompts_per_generation` is rounded up to {layout.num_prompts}."
            )

    @property
    def num_trained_steps(self) -> int:
        """Stochastic denoising steps of each image in a round."""
        return self.num_sde_steps if self.num_sde_steps is not None else len(self.sde_steps)

    @property
    def round_layout(self) -> RoundLayout:
        """How a generation round is divided over processes, micro-batches and optimizer steps."""
        return RoundLayout(
            num_prompts=self.num_prompts_per_generation,
            num_generations=self.num_generations,
            batch_size=self.per_device_train_batch_size,
            num_processes=self.world_size,
            num_trained_steps=self.num_trained_steps,
            num_optimizer_steps=self.optimizer_steps_per_generation,
        )

    def _lay_out(self, *requested: int | None) -> RoundLayout:
        """Lays out a round of the requested sizes on a number of processes, see [`lay_out_round`]."""
        return lay_out_round(
            *requested,
            num_generations=self.num_generations,
            batch_size=self.per_device_train_batch_size,
            num_trained_steps=self.num_trained_steps,
            num_optimizer_steps=self.optimizer_steps_per_generation,
        )

    def _refuse_text_fields(self) -> None:
        refuse_fields(self, GRPOConfig, REFUSED_FIELDS, "but has no meaning for images")

    def _check_launcher(self) -> None:
        if self.mixed_precision != ("bf16" if self.bf16 else "no"):
            raise ValueError(
                f"`bf16` is {self.bf16}, but the launcher's configuration says `mixed_precision: "
                f"{self.mixed_precision}`: weights and arithmetic would differ. Start with `accelerate launch "
                f"--mixed_precision {'bf16' if self.bf16 else 'no'}`, or set `bf16` accordingly."
            )
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes"):
            raise ValueError(f"The launcher's configuration uses FSDP, which cannot be used: {_FSDP}.")
        # Only now, because the command line gives them as strings of JSON
        for name in ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler"):
            if getattr(self.accelerator_config, name) != getattr(AcceleratorConfig(), name):
                raise ValueError(f"`accelerator_config` sets `{name}`, which has no effect here: {_ROWS}. Unset it.")
        if set(self.activation_checkpointing_kwargs or {}) - {"use_reentrant"}:
            raise ValueError(
                f"`activation_checkpointing_kwargs` is {self.activation_checkpointing_kwargs}, but diffusers' "
                "checkpointing takes no options. Unset it."
            )
        if (self.activation_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "`activation_checkpointing_kwargs` (or `gradient_checkpointing_kwargs`) asks for reentrant "
                "checkpointing, which gives no gradients here: none of the transformer's inputs requires one. Unset it."
            )

    def _check_values(self) -> None:
        if self.num_generations is None or self.num_generations < 2:
            raise ValueError(
                f"`num_generations` is {self.num_generations}, but an advantage compares an image with others of the "
                "same prompt: it must be at least 2 (the paper uses 16)."
            )
        for name in (
            "num_prompts_per_generation", "optimizer_steps_per_generation", "per_device_train_batch_size",
            "num_generations_eval", "generation_batch_size", "steps_per_generation", "gradient_accumulation_steps",
            "num_iterations", "height", "width", "num_inference_steps_eval",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; it must be at least 1.")
        if self.num_inference_steps < 2:
            raise ValueError(
                f"`num_inference_steps` is {self.num_inference_steps}: the last is not stochastic, at least 2 are needed."
            )
        if not 0 < self.resolution_scale <= 1:
            raise ValueError(
                f"`resolution_scale` is {self.resolution_scale}; it shrinks the inference size for training and must "
                "be in (0, 1] (the paper trains at 0.5, and finds that 0.25 fails)."
            )
        for name, choices in (("sde_type", SDE_TYPES), ("multi_objective_aggregation", AGGREGATIONS)):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, choices))}.")
        if not self.sde_steps or len(set(self.sde_steps)) != len(self.sde_steps):
            raise ValueError(f"`sde_steps` is {self.sde_steps}; it must name at least one step, each once.")
        last = self.num_inference_steps - 1
        for index in self.sde_steps:
            if not 0 <= index < last:
                problem = (
                    f"the last of {last + 1} denoising steps, whose noise would stay in the image"
                    if index == last
                    else f"outside the schedule of `num_inference_steps` = {last + 1} steps"
                )
                raise ValueError(f"`sde_steps` has {index}, {problem}. Choose from 0 to {last - 1}.")
        self.sde_steps = sorted(self.sde_steps)
        if self.num_sde_steps is not None and not 1 <= self.num_sde_steps <= len(self.sde_steps):
            raise ValueError(
                f"`num_sde_steps` is {self.num_sde_steps}, but {len(self.sde_steps)} steps are named in `sde_steps` "
                f"({self.sde_steps}) to choose from."
            )
        if not self.noise_level > 0 or (self.sde_type == "cps" and self.noise_level > 1):
            raise ValueError(
                f"`noise_level` is {self.noise_level}. A policy gradient needs the log-probability of a drawn step, "
                "and a step without noise has none: it must be above 0"
                + (", and at most 1 for 'cps'." if self.sde_type == "cps" else " (the paper uses 0.7).")
            )
        # `not >` instead of `<=`: it refuses NaN as well
        if not self.epsilon > 0:
            raise ValueError(f"`epsilon` is {self.epsilon}; a clip range must be above 0 (the paper uses 1e-4).")
        for name in ("epsilon_high", "ratio_tolerance", "advantage_clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` is {value}; it must be above 0, or None.")
        if self.scale_rewards not in ("group", "batch", "none", True, False):
            raise ValueError(f"`scale_rewards` is {self.scale_rewards!r}; it must be 'group', 'batch' or 'none'.")
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards in ("none", False):
            raise ValueError(
                f"`scale_rewards` is {self.scale_rewards!r}, but 'normalize_then_sum' scales each reward by its group "
                "and their sum by the batch, as in TRL. Unset it, or choose another `multi_objective_aggregation`."
            )
        if not self.beta >= 0:
            raise ValueError(f"`beta` is {self.beta}; the weight of the KL divergence cannot be negative.")
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"`loss_type` is {self.loss_type!r}; it must be one of {', '.join(map(repr, LOSS_TYPES))}: TRL's other "
                "losses are defined on tokens, and DiffusionNFT ('nft') has no ratio and is a trainer of its own, "
                "`PaCoNFTTrainer`."
            )
        default = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}["per_device_eval_batch_size"]
        if self.per_device_eval_batch_size not in (default, self.num_generations_eval or self.num_generations):
            raise ValueError(
                f"`per_device_eval_batch_size` is {self.per_device_eval_batch_size}, but `evaluate()` draws one image "
                "at a time on each process. Unset it; `num_generations_eval` is the number of images for each prompt."
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(
                f"`ema_decay` is {self.ema_decay}; it must be between 0 and 1 (the published code uses 0.9), or `None` "
                "for no average."
            )
        if self.reward_required is not None:
            self.reward_required = [_parse_flag(value) for value in self.reward_required]
        for name in ("max_reward_failures", "max_excluded_images", "max_excluded_groups"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it is a share of a round, from 0 to 1.")
        if self.resolution_transfer_prompts != 0 and self.resolution_transfer_prompts < 3:
            raise ValueError(
                f"`resolution_transfer_prompts` is {self.resolution_transfer_prompts}; a correlation needs at least 3 "
                "prompts (10 for an interval that says something), and 0 measures none."
            )
        self.log_tame_threshold = _parse_threshold(self.log_tame_threshold)


def _parse_flag(value: bool | str) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in ("true", "false"):
        raise ValueError(f"`reward_required` has {value!r}; it must have true or false for each reward.")
    return str(value).lower() == "true"


def _parse_threshold(threshold: float | str | None) -> float | str:
    if threshold == "mean":
        return threshold
    try:
        value = float(threshold)
    except (TypeError, ValueError):
        value = math.nan
    if not value >= 0:
        raise ValueError(f"`log_tame_threshold` is {threshold!r}; it must be a number >= 0, or 'mean'.")
    return value
