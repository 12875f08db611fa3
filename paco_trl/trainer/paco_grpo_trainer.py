# SPDX-License-Identifier: Apache-2.0
"""PaCo-GRPO: group-relative policy optimisation of a flow-matching pipeline, at reduced resolution."""

import copy
import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftModel
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models.utils import add_hooks, prepare_deepspeed, remove_hooks
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import identity

from ..cards import ImageModelCard, render_card
from ..checkpointing.checkpoint_files import EMA_WEIGHTS, POLICY_WEIGHTS, check_weights, load_rollout, write_checkpoint
from ..checkpointing.checkpoints import (
    check_output_folder,
    check_resumed_run,
    clear_staging,
    dataset_digest,
    find_checkpoint,
)
from ..checkpointing.ema import EMA
from ..checkpointing.export import save_trained
from ..checkpointing.weights import all_gradients_needed, gather_whole, load_whole, shares, swapped, zero_stage_of
from ..data.columns import check_is_dataset
from ..hub.files import PIPELINE_ADAPTER, TRANSFORMER
from ..plots.contact_sheet import MAX_PROMPTS, TRACKERS_WITH_PICTURES, start_trackers
from ..plots.curves import CurvesCallback
from ..plots.scored_sheets import ScoredImages, save_scored_sheet
from ..rewards import aggregate_rewards
from ..rewards.reward_calls import (
    RewardError,
    check_columns,
    check_required,
    check_reward_functions,
    check_reward_weights,
)
from ..rewards.scorer import RewardScorer
from ..rollout import (
    EncodedImage,
    PipelinePolicy,
    RecordedStep,
    SDESettings,
    UnlistedFamily,
    cast_floating_inputs,
    family_of,
    replay,
)
from ..rollout.loading import (
    adapter_digest,
    adapter_is_new,
    base_model_name,
    check_peft_config,
    load_pipeline,
    prepare_transformer,
)
from ..rollout.prompt_encoder import Encoded, PromptEncoder
from ..rollout.prompt_rows import PromptRows
from ..utils.deepspeed import partition
from ..utils.paper import PAPER
from ..utils.random_state import kept_random_state
from .advantages import group_advantages
from .evaluator import (
    Evaluation,
    baseline_key,
    check_best_metric,
    check_scored,
    draw_evaluation,
    evaluation_metrics,
    load_baseline,
    save_baseline,
)
from .losses import clipped_surrogate, gaussian_kl, guard_gradient_weight, guarded_surrogate
from .model_cards import evaluation_rows, image_settings, latest_pictures, lora_of, pipeline_call, reward_rows
from .paco_grpo_config import PaCoGRPOConfig
from .publishing import PushesToHub
from .refusals import refuse_methods
from .step_statistics import StepStatistics
from .training_clock import TrainingClock
from .transfer_report import report_resolution_transfer


logger = get_logger(__name__)

# What a random stream is for: the second word of its key, so that no two purposes share numbers
_STREAMS = {"prompts": 0, "batches": 1, "sde steps": 2, "training": 3, "evaluation": 4}

# Public methods of GRPOTrainer and Trainer that mean nothing for images
REFUSED_METHODS = {
    **dict.fromkeys(
        ("evaluation_loop", "get_eval_dataloader", "get_test_dataloader", "predict", "prediction_step"),
        "images are drawn, scored and compared by `evaluate(eval_dataset)`",
    ),
    **dict.fromkeys(
        ("get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask"), "it is a formula of a token loss"
    ),
    **dict.fromkeys(
        ("call_model_init", "hyperparameter_search"),
        "the trainer takes a pipeline, not a `model_init`; make a trainer, in a process of its own, for each setting",
    ),
}


class _RunCallback(TrainerCallback):
    """Tells the trainer when its own training begins and when an optimizer step has been made."""

    def __init__(self, trainer: "PaCoGRPOTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._begin_run()

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self.trainer.ema is not None:
            self.trainer.ema.step()


@refuse_methods(REFUSED_METHODS)
class PaCoGRPOTrainer(PushesToHub, GRPOTrainer):
    """
    Trainer for PaCo-GRPO: reinforcement learning of a flow-matching image pipeline on sets of images, proposed in
    [PaCo-RL: Advancing Reinforcement Learning for Consistent Image Generation with Pairwise Reward
    Modeling](https://huggingface.co/papers/2512.04784).

    Example:

    ```python
    from peft import LoraConfig
    from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
    from paco_trl.data import demo_prompts_path, load_image_set_prompts
    from paco_trl.rewards import ClipTReward

    trainer = PaCoGRPOTrainer(
        model="black-forest-labs/FLUX.1-dev",
        reward_funcs=ClipTReward(),
        args=PaCoGRPOConfig(output_dir="paco-flux", num_prompts_per_generation=24),
        train_dataset=load_image_set_prompts(demo_prompts_path()),
        peft_config=LoraConfig(r=64, lora_alpha=128, init_lora_weights="gaussian"),
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~diffusers.DiffusionPipeline`]):
            Pipeline to train. Can be either:

            - A string: Hub id or folder, loaded with [`~diffusers.DiffusionPipeline.from_pretrained`] in the compute
              dtype, with the arguments in `args.model_init_kwargs`. Only safetensors files are read.
            - A loaded pipeline. It is frozen, cast to the compute dtype, and its scheduler and transformer are
              replaced by ones that also record.
        reward_funcs (`Callable` or `list[Callable]`):
            Rewards: callables `(prompts, completions, **columns) -> list[float | None]`, sync or async. `completions`
            are PIL images; the columns are those of the dataset and `panel_images`, each image cut into its panels.
            `None` for an image that could not be scored: it is left out of its group's statistics and of the loss. A
            reward is called with 16 images at a time, on a thread beside the one that draws the next.
        args ([`PaCoGRPOConfig`], *optional*):
            Settings. If `None`, the paper's, with an output folder named after the model.
        train_dataset ([`~datasets.Dataset`]):
            Prompts, of one of two kinds, with any other columns that the rewards take:

            - Image sets: the columns `prompt`, `rows`, `cols` and `panels`, optionally `height` and `width`. See
              [`~paco_trl.data.load_image_set_prompts`].
            - Edits: `prompt`, the instruction, and the source `image` (or `images`, for pipelines that take several),
              optionally `height` and `width`. See [`~paco_trl.data.load_edit_prompts`].
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Prompts of the same format for `evaluate()`.
        eval_reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Rewards of `evaluate()`, for example another judge than the one that is trained for. `eval_reward` is then
            their plain sum. If `None`, the training rewards with their weights.
        callbacks (`list[~transformers.TrainerCallback]`, *optional*):
            Callbacks.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler, as in [`~transformers.Trainer`].
        peft_config ([`~peft.LoraConfig`] or `str`, *optional*):
            Adapter to train; `target_modules` are the family's when left out. Or the Hub id or folder of an adapter to
            go on training. If `None`, all weights of the transformer are trained.

    Raises:
        ValueError: data, settings or model that cannot work; the message says what to do. What can be found out
            without the model is found out before it is loaded.
    """

    # The loss is divided by the images of the whole optimizer step, see `compute_loss`
    loss_is_scaled_for_ga = True

    _tag_names = ["paco-trl", "trl", "paco-grpo", "grpo"]
    _name = "PaCo-GRPO"
    _paper = PAPER
    _record_class = RecordedStep  # what an entry of the buffer holds, for the checkpoint

    def __init__(
        self,
        model: str | DiffusionPipeline,
        reward_funcs: Callable | list[Callable],
        args: PaCoGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        eval_reward_funcs: Callable | list[Callable] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        peft_config: LoraConfig | str | None = None,
    ):
        # 1. What can be checked without the model
        if args is None:
            # A pipeline that was put together in memory has no name
            name = model if isinstance(model, str) else model.name_or_path or type(model).__name__
            args = PaCoGRPOConfig(f"{Path(name).name}-PaCo-GRPO")
        if peft_config is not None:
            check_peft_config(peft_config, model)
        self.reward_funcs, self.reward_func_names = check_reward_functions(reward_funcs)
        self.reward_weights = check_reward_weights(
            args.reward_weights, self.reward_func_names, args.multi_objective_aggregation
        )
        self.reward_required = check_required(args.reward_required, self.reward_func_names, self.reward_weights)
        eval_rewards = (self.reward_funcs, self.reward_func_names)
        self.eval_reward_weights, self.eval_reward_required = self.reward_weights, self.reward_required
        if eval_reward_funcs is not None:
            eval_rewards = check_reward_functions(eval_reward_funcs)
            self.eval_reward_weights = torch.ones(len(eval_rewards[0]))
            self.eval_reward_required = [True] * len(eval_rewards[0])
        self.eval_reward_func_names = eval_rewards[1]
        self.layout = args.round_layout
        self.train_rows = self._check_train_dataset(train_dataset, args)
        check_columns(reward_funcs, train_dataset, "the dataset")
        eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"evaluation": eval_dataset}
        eval_datasets = {name: dataset for name, dataset in eval_datasets.items() if dataset is not None}
        if not eval_datasets and (args.eval_strategy != "no" or args.eval_on_start):
            raise ValueError(
                f"`eval_strategy` is {args.eval_strategy.value!r} and `eval_on_start` {args.eval_on_start}, but there "
                "is no `eval_dataset` to evaluate on. Pass one, or switch them off."
            )
        check_best_metric(args, eval_dataset)
        eval_rows = []
        for name, dataset in eval_datasets.items():
            check_is_dataset(dataset, "eval_dataset" if dataset is eval_dataset else f"eval_dataset[{name!r}]")
            eval_rows.append(PromptRows(dataset, args, f"the dataset '{name}'"))
            check_columns(
                reward_funcs if eval_reward_funcs is None else eval_reward_funcs, dataset, f"the dataset '{name}'"
            )
        is_deepspeed = args.deepspeed_plugin is not None
        self.base_model = base_model_name(model)
        self.trained_from = base_model_name(peft_config) if isinstance(peft_config, str) else None
        self._identity = {
            "base_model": self.base_model,
            "adapter": adapter_digest(peft_config),
            "dataset_size": len(train_dataset),
            "dataset": dataset_digest(train_dataset, self.train_rows.sources),
            # Which round a step belongs to
            "optimizer_steps_per_generation": self.layout.num_optimizer_steps,
            "num_iterations": args.num_iterations,
            # Restored with the optimizer's state, so that other values would have no effect
            **{
                name: str(getattr(args, name))
                for name in (
                    "learning_rate",
                    "lr_scheduler_type",
                    "weight_decay",
                    "optim",
                    "adam_beta1",
                    "adam_beta2",
                    "adam_epsilon",
                )
            },
        }
        self._checked = find_checkpoint(args.output_dir, args.resume_from_checkpoint)
        if self._checked is not None:
            self._check_resumed_run(self._checked, args)
        else:
            check_output_folder(args.output_dir, self._identity)
        self.published_files = TRANSFORMER if peft_config is None else PIPELINE_ADAPTER
        self._base_model_source = model if isinstance(model, str) else getattr(model, "name_or_path", None)
        if args.push_to_hub:
            self._prepare_hub(args)

        # 2. The pipeline, frozen, and its adapter. The adapter's weights are random: seed first.
        set_seed(args.seed)
        self.compute_dtype = torch.bfloat16 if args.bf16 else torch.float32
        # DeepSpeed has float32 masters beside the weights; without it weights that are trained are float32 themselves
        is_full = peft_config is None
        self.pipeline = load_pipeline(
            model,
            self.compute_dtype,
            torch.float32 if is_full and not is_deepspeed else None,
            args.trust_remote_code,
            **(args.model_init_kwargs or {}),
        )
        self.family = family_of(self.pipeline)
        self.size_multiple = self.family.size_multiple(self.pipeline)
        if args.ddp_find_unused_parameters is None:
            # Which layers of an unlisted pipeline take part is unknown, and a whole transformer has those that do not
            has_unused = is_full and bool(self.family.unused_layers(self.pipeline.transformer))
            args.ddp_find_unused_parameters = has_unused or isinstance(self.family, UnlistedFamily)
        negative_prompt = self.family.resolve_negative_prompt(self.pipeline, args.guidance_scale, args.negative_prompt)
        if args.detach_unconditional and negative_prompt is None:
            raise ValueError(
                f"`detach_unconditional` is for true guidance, but {type(self.pipeline).__name__} makes no unconditional "
                f"prediction of its own at `guidance_scale` = {args.guidance_scale}: it would be ignored. Leave it out."
            )
        for rows in (self.train_rows, *eval_rows):
            rows.measure(self.pipeline, self.family)
        self._check_micro_batches(args)
        signature = inspect.signature(self.pipeline.transformer.forward)
        if is_deepspeed:
            # Its default is the dtype of the model: hundreds of micro-batches would be added up in bf16
            args.deepspeed_plugin.deepspeed_config.setdefault("data_types", {"grad_accum_dtype": "fp32"})
        if args.vae_tiling:
            self.pipeline.vae.enable_tiling()
        # The reference of the KL divergence: the model without its adapter, or a copy when there is none
        self.ref_model = None
        if is_full and args.beta > 0:
            self.ref_model = copy.deepcopy(self.pipeline.transformer)
            if self.ref_model.dtype != self.compute_dtype:
                self.ref_model.to(self.compute_dtype)
        # DeepSpeed keeps one dtype and its own float32 masters: mixed dtypes fail in ZeRO-3 (trl#6089)
        trained_model = prepare_transformer(
            self.pipeline, self.family, peft_config, autocast_adapter_dtype=not is_deepspeed
        )
        self.policy = PipelinePolicy(self.pipeline, self.family, trained_model, signature)
        if self.compute_dtype != torch.float32:
            # The pipeline's latents are float32. Autocast takes care of the transformer, but not under DeepSpeed,
            # which switches it off; and nothing does for the VAE.
            if is_deepspeed:
                cast_floating_inputs(trained_model, self.compute_dtype)
            for name in ("post_quant_conv", "decoder"):
                module = getattr(self.pipeline.vae, name, None)
                if module is not None:
                    cast_floating_inputs(module, self.compute_dtype)

        # 3. Trainer. GRPOTrainer's own __init__ assumes a language model with a tokenizer, so it is skipped; what its
        # inherited methods read is set below (tests/test_contract.py lists it).
        _BaseTrainer.__init__(
            self,
            model=trained_model,
            args=args,
            data_collator=identity,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs are visible to a single process, which Trainer would use with `nn.DataParallel`. "
                "Start the run with `accelerate launch`, or make one GPU visible with `CUDA_VISIBLE_DEVICES`."
            )

        if self.ref_model is not None:
            if is_deepspeed:
                cast_floating_inputs(self.ref_model, self.compute_dtype)
                self.ref_model = prepare_deepspeed(self.ref_model, self.accelerator)
            else:
                self.ref_model = self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)

        # 4. Read by the inherited training_step, log and _load_optimizer_and_scheduler
        self.log_completions = False  # TRL's table of texts; the contact sheets take its place
        self.use_adaptive_entropy = False
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._current_train_step_time = 0.0
        self._step = 0
        self._buffered_inputs = None

        unseen = sorted(set(args.report_to) - set(TRACKERS_WITH_PICTURES))
        if unseen and args.log_completions:
            logger.warning(
                f"Contact sheets are not sent to {', '.join(unseen)}, only to {', '.join(TRACKERS_WITH_PICTURES)}; they "
                "are saved in `output_dir/contact_sheets` as well. To remove this warning, set `log_completions=False`."
            )

        # 5. Own state
        self.num_generations = args.num_generations  # = G in the paper
        self.num_iterations = args.num_iterations
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon_high if args.epsilon_high is not None else args.epsilon
        self.beta = args.beta
        self.prompt_encoder = PromptEncoder(self.pipeline, self.family, self.accelerator, negative_prompt)
        self.scorer = RewardScorer(self.reward_funcs, self.reward_func_names, self.accelerator)
        self.eval_scorer = RewardScorer(*eval_rewards, self.accelerator)
        self.ema: EMA | None = None  # from the beginning of `train()`
        self._eval_rows = eval_rows
        self._baselines: dict[str, Evaluation] = {}
        self._resumed_from: Path | None = None
        self._saved_step: int | None = None  # of the last checkpoint of this `train()`
        self.loaded_step: int | None = None  # of the checkpoint that `load_best_model_at_end` has loaded
        self._statistics = StepStatistics(self.accelerator)
        self._buffered_round: int | None = None
        self._buffer_global_step: int | None = None
        self._is_first_backward = True  # of this `train()`
        self._encoded_for_max_steps: int | None = None
        self._round_metrics: dict[str, float] = {}
        self._round_time = self._drawing_time = self._train_time = 0.0
        self.add_callback(_RunCallback(self))
        self.add_callback(TrainingClock())
        self.add_callback(CurvesCallback(args.plot_curves))
        if self.accelerator.is_main_process and not args.disable_tqdm:
            tqdm.write(self.layout.describe())  # with the progress bars: a log at level info would not be seen

    def _send_telemetry(self) -> None:
        """Nothing is sent. (TRL's telemetry also reads a model type that a diffusers config lacks.)"""

    # ---- Checks ----

    def _check_train_dataset(self, dataset: Dataset | None, args: PaCoGRPOConfig) -> PromptRows:
        check_is_dataset(dataset, "train_dataset")
        rows = PromptRows(dataset, args, "the dataset")
        if len(dataset) < self.layout.num_prompts:
            raise ValueError(
                f"The dataset has {len(dataset)} prompts, but a round takes {self.layout.num_prompts} different ones. "
                f"Set `num_prompts_per_generation` to at most {len(dataset)}, or add prompts. (A round: "
                f"{self.layout.describe()})"
            )
        return rows

    def _check_micro_batches(self, args: PaCoGRPOConfig) -> None:
        """A micro-batch holds images of several prompts only where they are drawn in one call of the pipeline."""
        most = self.family.max_batch_size
        if most is not None and args.per_device_train_batch_size > most:
            raise ValueError(
                f"`per_device_train_batch_size` is {args.per_device_train_batch_size}, but "
                f"{type(self.family).__name__} draws at most {most} with {type(self.pipeline).__name__} in one call. "
                f"Set `per_device_train_batch_size={most}`."
            )
        if args.num_generations % args.per_device_train_batch_size == 0:
            return
        sizes = set(self.train_rows.training_sizes)
        if len(sizes) > 1:
            reason = f"The dataset has images of {len(sizes)} training sizes ({sorted(sizes)})"
        elif self.train_rows.sources is not None:
            reason = "Each prompt has source images of its own"
        elif not self.family.has_fixed_length:
            reason = f"{type(self.pipeline).__name__} encodes each prompt to a length of its own"
        else:
            return
        raise ValueError(
            f"{reason}, so a micro-batch must not cross prompts: `per_device_train_batch_size` "
            f"({args.per_device_train_batch_size}) must divide `num_generations` ({args.num_generations})."
        )

    def _course(self, args: PaCoGRPOConfig) -> dict:
        """What decides how a run goes on: with other values it goes on, but not as it would have."""
        layout = self.layout
        names = (
            "seed", "per_device_train_batch_size", "height", "width", "resolution_scale",
            "num_inference_steps", "guidance_scale", "negative_prompt", "detach_unconditional", "sde_type", "sde_steps", "num_sde_steps", "noise_level",
            "loss_type", "epsilon", "epsilon_high", "beta", "ema_decay",
            "multi_objective_aggregation", "log_tame_threshold", "scale_rewards", "advantage_clip",
            "shuffle_dataset", "bf16", "max_grad_norm", "warmup_steps",
        )  # fmt: skip
        return {
            "num_prompts_per_generation": layout.num_prompts,
            "num_generations": layout.num_generations,
            **{name: getattr(args, name) for name in names},
            # A schedule that ends depends on where
            "max_steps": None if args.lr_scheduler_type == "constant" else args.max_steps,
            "rewards": self.reward_func_names,
            "reward_weights": self.reward_weights.tolist(),
            "reward_required": self.reward_required,
        }

    def _check_resumed_run(self, checkpoint: Path, args: PaCoGRPOConfig) -> None:
        check_resumed_run(
            checkpoint, self._identity, self._course(args), args.world_size, args.deepspeed_plugin is not None
        )

    # ---- Data ----

    def get_train_dataloader(self) -> DataLoader:
        """
        A loader that only counts the micro-steps of an epoch.

        TRL's sampler yields every row again for each micro-step of a round (451,584 fetches for 672 images at the
        defaults). Here `_prepare_inputs` fetches the rows of a round once, by number, so that the order of prompts
        depends on the seed and the step alone: not on workers, and not on where a run was resumed.
        """
        # Trainer asks for it when training begins: what an earlier `train()` left behind is not this one's
        self._buffered_inputs = None
        self._statistics.clear()
        self._step, self._train_time = 0, 0.0
        self._is_first_backward = True
        self._encoded_for_max_steps = None  # this training may begin at an earlier round
        rounds = len(self.train_dataset) // self.layout.num_prompts
        return DataLoader(
            range(rounds * self.layout.steps_per_generation * self.num_iterations), batch_size=1, collate_fn=identity
        )

    def _rows_of_round(self, round_index: int) -> np.ndarray:
        """Row numbers of a round: slices of a permutation that is drawn anew for each epoch."""
        rounds = len(self.train_dataset) // self.layout.num_prompts
        epoch, position = divmod(round_index, rounds)
        order = np.arange(len(self.train_dataset))
        if self.args.shuffle_dataset:
            order = np.random.default_rng((self.args.seed, _STREAMS["prompts"], epoch)).permutation(order)
        return order[position * self.layout.num_prompts : (position + 1) * self.layout.num_prompts]

    def _sde_settings(self, round_index: int) -> SDESettings:
        """Stochastic steps of a round, the same for every image of every process."""
        steps = self.args.sde_steps
        if self.args.num_sde_steps is not None:
            generator = np.random.default_rng((self.args.seed, _STREAMS["sde steps"], round_index))
            steps = generator.choice(steps, self.args.num_sde_steps, replace=False).tolist()
        return SDESettings(tuple(sorted(steps)), self.args.noise_level, self.args.sde_type)

    def _prepare_inputs(self, inputs):
        """The micro-step's slice of the buffer; draws a new round when the buffer is used up."""
        accumulation = self.args.gradient_accumulation_steps
        if self._step % accumulation == 0:
            # The optimizer step is part of the checkpoint, so a resumed run lands in the right place
            self._step = self.state.global_step * accumulation
        round_index, position = divmod(self._step, self.layout.steps_per_generation * self.num_iterations)
        if self._buffered_inputs is None or self._buffered_round != round_index:
            if position > 0:
                logger.warning(
                    f"Training goes on in the middle of round {round_index}, whose images are not in the checkpoint: "
                    "they are drawn again, with the weights as they are now."
                )
            started = time.perf_counter()
            self._buffered_inputs = None  # frees the old round before the new one is drawn
            self._buffered_inputs = self._generate_and_score_completions(round_index)
            self._round_time = time.perf_counter() - started
            self._drawing_time += self._round_time
            self._buffered_round = round_index
            self._buffer_global_step = self.state.global_step
        inputs = self._buffered_inputs[position % self.layout.steps_per_generation]
        if self.args.offload_embeddings:
            inputs = {**inputs, "record": inputs["record"].to(self.accelerator.device)}
        return inputs

    @property
    def _steps_per_round(self) -> int:
        return self.layout.num_optimizer_steps * self.num_iterations

    @property
    def is_round_pending(self) -> bool:
        """Whether the round that was drawn last has optimizer steps left to give."""
        return self._buffered_inputs is not None and self.state.global_step % self._steps_per_round != 0

    def _encode_prompts_of_run(self, first_round: int) -> None:
        """Encodes every prompt that the rest of the run needs, once; the text encoders are not used after it."""
        if self._encoded_for_max_steps == self.state.max_steps:
            return
        self._encoded_for_max_steps = self.state.max_steps
        needed = set()
        for round_index in range(first_round, -(-self.state.max_steps // self._steps_per_round)):
            needed.update(self._rows_of_round(round_index).tolist())
            if len(needed) == len(self.train_dataset):
                break
        self.prompt_encoder.encode(self.train_rows, sorted(needed), self.args.resolution_scale)

    # ---- Rollout ----

    def _generate_and_score_completions(self, round_index: int) -> list[dict]:
        """
        Draws and scores a round.

        Returns the buffer of this process: an entry for each micro-step of training, that is for each micro-batch of
        images and stochastic step.
        """
        started = time.perf_counter()
        layout, args = self.layout, self.args

        # 1. The round's prompts, and which process draws which images
        row_numbers = self._rows_of_round(round_index).tolist()
        sizes = [self.train_rows.training_sizes[number] for number in row_numbers]
        assignment = layout.assign(
            sizes, (args.seed, _STREAMS["batches"], round_index)
        )  # (processes, micro-batches, B)
        sde = self._sde_settings(round_index)
        self._encode_prompts_of_run(round_index)
        encoded = self.prompt_encoder.fetch(self.train_rows, row_numbers, args.resolution_scale)
        encode_time = time.perf_counter() - started

        # 2. Draw, and score beside it
        started = time.perf_counter()
        mine = assignment[self.accelerator.process_index]  # (micro-batches, B)
        self.scorer.start()
        images, records = self._draw_round(round_index, mine, row_numbers, encoded, sde)
        rollout_time = time.perf_counter() - started

        # 3. Every process holds all rewards afterwards, in the order of the round (prompt-major)
        scores = self.scorer.finish(assignment.reshape(-1), self.state)

        # 4. Aggregate and normalise
        aggregated, details = aggregate_rewards(
            scores.rewards,
            self.reward_weights,
            args.multi_objective_aggregation,
            args.log_tame_threshold,
            layout.num_generations,
            self.reward_required,
        )
        # As in TRL, normalized rewards are summed and then scaled over the batch
        is_normalized = args.multi_objective_aggregation == "normalize_then_sum"
        advantages, is_valid, has_spread = group_advantages(
            aggregated, layout.num_generations, "batch" if is_normalized else args.scale_rewards, args.advantage_clip
        )
        self._check_failures(round_index, scores.rewards)
        self._check_excluded(round_index, scores.rewards, is_valid)

        # 5. What is logged with each optimizer step of the round
        metrics = scores.metrics | self._reward_metrics(scores.rewards)
        for name, h, tamed, share in zip(
            self.reward_func_names, details.coefficient_of_variation, details.tamed, details.share, strict=True
        ):
            if h is not None:  # undefined for a reward whose mean is not positive
                metrics[f"rewards/{name}/h"] = h
            metrics[f"rewards/{name}/tamed"] = float(tamed)
            if share is not None:  # undefined where no reward differs within a group
                metrics[f"rewards/{name}/share"] = share
        metrics["frac_reward_zero_std"] = 1 - has_spread.float().mean().item()
        metrics["images_excluded"] = (~is_valid).sum().item()
        metrics["groups_excluded"] = (~is_valid.view(-1, layout.num_generations).any(dim=1)).sum().item()
        metrics["time/encode"] = encode_time
        metrics["time/rollout"] = rollout_time
        metrics["time/reward"] = scores.waited
        metrics["time/reward_hidden"] = scores.hidden
        metrics["rollout_images_per_second"] = layout.num_images / rollout_time
        self._round_metrics = metrics
        if args.log_completions:
            # fmt: off
            shown = ScoredImages.collect(
                self.accelerator, mine.flatten().tolist(), images, layout.num_generations, self.reward_func_names,
                scores.rewards, scores.extra, advantages,
            )
            # fmt: on
            self._save_sheet(
                f"round_{round_index:05d}",
                f"Round {round_index}, step {self.state.global_step}",
                self.train_rows,
                row_numbers,
                shown,
            )

        # 6. Keep what the training steps need
        return self._fill_buffer(assignment, records, sde, advantages, is_valid)

    def _draw_round(
        self,
        round_index: int,
        micro_batches: np.ndarray,
        row_numbers: list[int],
        encoded: dict[int, Encoded],
        sde: SDESettings,
    ) -> tuple[list[Image.Image], list[list[RecordedStep]]]:
        """Draws this process's images of a round, and the stochastic steps of each micro-batch."""
        args, generations = self.args, self.layout.num_generations
        images: list[Image.Image] = []
        records: list[list[RecordedStep]] = []
        read = functools.lru_cache(8)(self.train_rows.row)  # decodes source images, which may be large
        prepare = functools.cache(
            lambda row: self._prepare_images(self.train_rows.images_in(read(row)), args.resolution_scale)
        )
        with self._rollout_components():
            for micro_batch in tqdm(
                micro_batches.tolist(),
                desc=f"Round {round_index}: drawing",
                disable=args.disable_tqdm or not self.accelerator.is_main_process,
                leave=False,
            ):
                rows = [row_numbers[image // generations] for image in micro_batch]
                arguments, kept = self._prompt_arguments([encoded[row] for row in rows])
                sources = self._encoded_images(prepare(rows[0]), encoded[rows[0]])
                noise_keys = [
                    self._noise_key("training", round_index, row, image % generations)
                    for row, image in zip(rows, micro_batch, strict=True)
                ]
                drawn, recorded = self._draw_micro_batch(
                    arguments, self.train_rows.training_sizes[rows[0]], noise_keys, sde, sources
                )
                self.scorer.add([read(row) for row in rows], drawn, self.state)
                images.extend(drawn)
                if args.offload_embeddings:
                    recorded = [record.offloaded(arguments, kept) for record in recorded]
                records.append(recorded)
        return images, records

    def _draw_micro_batch(
        self,
        arguments: dict[str, torch.Tensor],
        size: tuple[int, int],
        noise_keys: list[tuple[int, ...]],
        sde: SDESettings,
        sources: list[EncodedImage],
    ) -> tuple[list[Image.Image], list[RecordedStep]]:
        """Draws a micro-batch, and records what is trained: an entry for each trained step."""
        return self.policy.draw(
            arguments,
            *size,
            self.args.num_inference_steps,
            self.args.guidance_scale,
            noise_keys=noise_keys,
            sde=sde,
            record_mean=self.args.loss_type == "grpo_guard",
            sources=sources,
        )

    def _fill_buffer(
        self,
        assignment: np.ndarray,
        records: list[list[RecordedStep]],
        sde: SDESettings,
        advantages: torch.Tensor,
        is_valid: torch.Tensor,
    ) -> list[dict]:
        """
        An entry for each training micro-step of this process.

        The weights make an optimizer step's loss the mean over its valid images, on all processes, and their stochastic
        steps.
        """
        mine = assignment[self.accelerator.process_index]
        batches_per_step = self.layout.micro_batches_per_process // self.layout.num_optimizer_steps
        buffer = []
        for position, (micro_batch, recorded) in enumerate(zip(mine, records, strict=True)):
            step = position // batches_per_step
            images_of_step = assignment[:, step * batches_per_step : (step + 1) * batches_per_step].reshape(-1)
            num_valid = is_valid[torch.from_numpy(images_of_step)].sum().item()
            # An optimizer step without any valid image has weights of 0 and no gradient
            denominator = max(num_valid * self.layout.num_trained_steps, 1)
            batch = torch.from_numpy(micro_batch)
            for record in recorded:
                buffer.append(
                    {
                        "record": record,
                        "sde": sde,
                        "advantages": advantages[batch].to(self.accelerator.device),  # (B,)
                        "weights": (is_valid[batch] / denominator).to(self.accelerator.device),  # (B,)
                    }
                )
        return buffer

    def _noise_key(self, stream: str, round_index: int, row: int, generation: int) -> tuple[int, ...]:
        return (self.args.seed, _STREAMS[stream], round_index, row, generation)

    def _prompt_arguments(self, encoded: list[Encoded]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """
        Arguments of the pipeline's call for a micro-batch, float32: on the accelerator, and where they are kept.

        Images of one prompt share one copy, which the recorded calls refer to as well: on the accelerator, or in CPU
        memory with `offload_embeddings`.
        """
        device = self.accelerator.device
        placed = [each.place("cpu" if self.args.offload_embeddings else device) for each in encoded]
        if all(each is encoded[0] for each in encoded):
            kept = {name: tensor.expand(len(encoded), *tensor.shape[1:]) for name, tensor in placed[0].items()}
        else:
            kept = {name: torch.cat([each[name] for each in placed]) for name in placed[0]}  # (B, ...)
        return {name: tensor.to(device) for name, tensor in kept.items()}, kept

    def _prepare_images(self, images: list[Image.Image], scale: float) -> list[Image.Image]:
        """Source images at the size at which the pipeline reads them, times `scale` per side."""
        return [self.family.prepare_image(self.pipeline, image, scale) for image in images]

    def _encoded_images(self, images: list[Image.Image], encoded: Encoded) -> list[EncodedImage]:
        latents = [each.to(self.accelerator.device) for each in encoded.image_latents]
        return [EncodedImage(image, each) for image, each in zip(images, latents, strict=True)]

    @contextmanager
    def _rollout_components(self):
        """The pipeline ready to draw: VAE on the accelerator, which is the device it draws on, ZeRO-3 weights gathered."""
        self.pipeline.vae.to(self.accelerator.device)
        try:
            # The autocast of the training step; Trainer adds it to the model only when training has begun
            with self._gathered_for_rollout(), self.accelerator.autocast():
                yield
        finally:
            self.pipeline.vae.to("cpu")

    @contextmanager
    def _gathered_for_rollout(self):
        if not self._is_zero3 or not self.args.ds3_gather_for_generation or self.model_wrapped is self.model:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            remove_hooks(self.model_wrapped)
            try:
                yield
            finally:
                add_hooks(self.model_wrapped)

    def _check_failures(self, round_index: int, rewards: torch.Tensor) -> None:
        """Stops a run in which a required reward fails too often: it is not what the run is meant to learn from."""
        shares = torch.isnan(rewards).float().mean(dim=0).tolist()
        ceiling = self.args.max_reward_failures
        for name, share, weight, is_required in zip(
            self.reward_func_names, shares, self.reward_weights.tolist(), self.reward_required, strict=True
        ):
            if is_required and weight != 0 and share > ceiling:
                raise RewardError(
                    f"In round {round_index} the required reward '{name}' gave no value (None) for {share:.1%} of "
                    f"{len(rewards)} images; the ceiling is `max_reward_failures` = {ceiling:g}. Look at why, in the "
                    "warnings above; to go on nevertheless, raise the ceiling or make the reward optional "
                    "(`reward_required`)."
                )

    def _check_excluded(self, round_index: int, rewards: torch.Tensor, is_valid: torch.Tensor) -> None:
        """Stops a run in which too much could not be scored: it would train on what is left by chance."""
        args = self.args
        groups = is_valid.view(-1, self.layout.num_generations).any(dim=1)
        images_lost, groups_lost = 1 - is_valid.float().mean().item(), 1 - groups.float().mean().item()
        if is_valid.any() and images_lost <= args.max_excluded_images and groups_lost <= args.max_excluded_groups:
            return
        counts = torch.isnan(rewards).sum(dim=0).tolist()
        missing = ", ".join(f"{name} {n}" for name, n in zip(self.reward_func_names, counts, strict=True))
        raise RewardError(
            f"In round {round_index} {(~is_valid).sum().item()} of {len(is_valid)} images ({images_lost:.0%}) are "
            f"excluded and {(~groups).sum().item()} of {len(groups)} prompts ({groups_lost:.0%}) have fewer than two "
            f"scored images. The ceilings are `max_excluded_images` = {args.max_excluded_images:g} and "
            f"`max_excluded_groups` = {args.max_excluded_groups:g}. Images without a value (None), by reward: "
            f"{missing}. Look at why None is returned; to go on nevertheless, raise the ceilings."
        )

    def _reward_metrics(self, rewards_per_func: torch.Tensor) -> dict[str, float]:
        """Statistics of the rewards that could be computed; what cannot be said is left out."""
        metrics = {}

        def add_statistics(mean_name: str, std_name: str, values: torch.Tensor) -> None:
            values = values[~torch.isnan(values)]
            if len(values):
                metrics[mean_name] = values.mean().item()
            if len(values) > 1:
                metrics[std_name] = values.std().item()

        for name, rewards in zip(self.reward_func_names, rewards_per_func.T, strict=True):
            add_statistics(f"rewards/{name}/mean", f"rewards/{name}/std", rewards)
            metrics[f"rewards/{name}/failure_rate"] = torch.isnan(rewards).float().mean().item()
        # As in TRL the weighted sum, whatever the aggregation: taming would make it jump, normalizing would make it 0
        total, _ = aggregate_rewards(
            rewards_per_func, self.reward_weights, "sum_then_normalize", num_generations=self.num_generations,
            required=self.reward_required,
        )  # fmt: skip
        add_statistics("reward", "reward_std", total)
        # Each mean in units of the first one's
        first = metrics.get(f"rewards/{self.reward_func_names[0]}/mean")
        for name in self.reward_func_names[1:]:
            if first and f"rewards/{name}/mean" in metrics:
                metrics[f"rewards/{name}/ratio"] = metrics[f"rewards/{name}/mean"] / first
        return metrics

    def _save_sheet(
        self,
        name: str,
        title: str,
        rows: PromptRows,
        numbers: Sequence[int],
        shown: ScoredImages,
        before: ScoredImages | None = None,
        tracker_name: str = "contact_sheet",
    ) -> None:
        """Saves pictures and scores of the first prompts, and sends the pictures to the trackers."""
        if self.accelerator.is_main_process:
            sources = None
            if rows.sources is not None:
                sources = {prompt: rows.images(number) for prompt, number in enumerate(numbers[:MAX_PROMPTS])}
            save_scored_sheet(
                Path(self.args.output_dir) / "contact_sheets",
                name,
                title,
                [rows.prompts[number] for number in numbers],
                shown,
                before,
                tracker_name,
                self.state.global_step,
                self.callback_handler.callbacks,
                sources,
            )

    # ---- Loss ----

    def training_step(self, model, inputs, num_items_in_batch=None):
        """As in TRL; times the forwards and backwards of an optimizer step, without the drawing of its round."""
        started, drawn_before = time.perf_counter(), self._drawing_time
        if self._is_first_backward:
            has_unused = not isinstance(self.model, PeftModel) and self.args.ddp_find_unused_parameters
            unused_layers = self.family.unused_layers(self.pipeline.transformer) if has_unused else ()
            check = all_gradients_needed(self.model, unused_layers)
        else:
            check = nullcontext()
        with check:
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._is_first_backward = False
        self._train_time += time.perf_counter() - started - (self._drawing_time - drawn_before)
        if self.accelerator.sync_gradients:
            metrics = self._metrics["train"]
            metrics["time/train"].append(self._train_time)
            metrics["images_per_second"].append(
                self.layout.num_images / (self._round_time + self._steps_per_round * self._train_time)
            )
            self._train_time = 0.0
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """
        The clipped objective of one micro-batch at one stochastic step: one forward with gradient, no more.

        The loss is the micro-batch's share of the mean over all valid images of the optimizer step, on all processes;
        gradients are averaged over the processes, hence the factor.
        """
        if return_outputs:
            raise ValueError("PaCoGRPOTrainer does not support returning outputs.")
        record, sde, advantages = inputs["record"], inputs["sde"], inputs["advantages"]

        ref_mean = None
        if self.beta > 0:
            with torch.no_grad(), self._reference(model) as reference:
                _, ref_mean, _ = replay(reference, record, self.family, self.args.guidance_scale, sde)

        log_prob, mean, std = replay(
            model, record, self.family, self.args.guidance_scale, sde, self.args.detach_unconditional
        )
        if self.args.loss_type == "grpo_guard":
            surrogate = guarded_surrogate(
                log_prob, record.log_prob, mean, record.mean, std, advantages, self.epsilon_low, self.epsilon_high,
                guard_gradient_weight(record.sigma, record.sigma_next),
            )  # fmt: skip
        else:
            surrogate = clipped_surrogate(log_prob, record.log_prob, advantages, self.epsilon_low, self.epsilon_high)
        loss = surrogate.loss  # (B,)
        kl = torch.zeros_like(loss)
        if ref_mean is not None:
            kl = gaussian_kl(mean, ref_mean, std)
            loss = loss + self.beta * kl
        self._record_step(record, surrogate, kl.detach(), inputs["weights"])
        return (loss * inputs["weights"]).sum() * self.accelerator.num_processes

    @contextmanager
    def _reference(self, model):
        """The model that the KL divergence is measured from: without its adapter, or the copy of before training."""
        if self.ref_model is not None:
            with self.accelerator.autocast():
                yield self.ref_model
        else:
            with self.accelerator.unwrap_model(model).disable_adapter():
                yield model

    def _record_step(self, record: RecordedStep, surrogate, kl: torch.Tensor, weights: torch.Tensor) -> None:
        """Collects what is logged, and gathers it once for each optimizer step; tests the ratio before the first."""
        args, statistics = self.args, self._statistics
        statistics.add(record, surrogate, kl, weights)
        is_on_policy = self.state.global_step == self._buffer_global_step
        if is_on_policy and self.state.global_step == self._initial_global_step:
            if len(statistics) % self.layout.num_trained_steps == 0:  # an image's steps are complete
                statistics.test_ratio(self.layout.num_trained_steps, args.ratio_tolerance, args.epsilon)
        if self.accelerator.sync_gradients:
            step_metrics = statistics.finish(self.state.global_step, is_on_policy, self.beta > 0)
            for name, value in {**self._round_metrics, **step_metrics}.items():
                self._metrics["train"][name].append(value)

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Draws the evaluation prompts at full inference resolution, by the pipeline's ODE and with fixed noise for each
        prompt, from the averaged weights (`ema_decay`), and scores them with `eval_reward_funcs`.

        The baseline, the model without training, is drawn and scored once in a run, so that sheets and metrics show
        before and after.

        Args:
            eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
                Prompts. If `None`, the trainer's `eval_dataset`.
            ignore_keys (`list[str]`, *optional*):
                Not used.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`):
                Prefix of the metrics.

        Returns:
            `dict[str, float]`: `eval_reward` (the weighted sum), `eval_rewards/<name>/mean` and `eval_grid_artifact`
            ([`~paco_trl.evaluation.grid_artifact_score`]), each with a bootstrap interval over prompts (`ci_low`,
            `ci_high`), its `baseline`, and the `gain` over it with its interval; `.../std` and `.../failure_rate`. What
            cannot be said (the deviation of a single image, the interval of one prompt) is left out.
        """
        eval_dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if eval_dataset is None:
            raise ValueError("`evaluate()` needs an `eval_dataset`: pass it to the trainer or to this call.")
        if isinstance(eval_dataset, dict):
            metrics = {}
            for name, dataset in eval_dataset.items():
                metrics.update(self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        if self.is_deepspeed_enabled and self.model_wrapped is self.model:
            raise RuntimeError(
                "`evaluate()` was called before `train()`, but DeepSpeed places the model on the accelerator only when "
                "training begins. To evaluate the untrained model, set `eval_on_start=True`."
            )
        rows = self._rows_of(eval_dataset)
        was_training = self.model.training
        self.model.eval()
        try:
            before, after = self._draw_before_and_after(rows, metric_key_prefix)
            metrics = evaluation_metrics(self.eval_reward_func_names, self.args.num_generations_eval, after, before)
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
            start_trackers(self)
            if self.args.log_completions:
                step = self.state.global_step
                self._save_sheet(
                    f"{metric_key_prefix}_step_{step:06d}",
                    f"Evaluation, step {step}",
                    rows,
                    range(len(rows)),
                    self._shown(after),
                    None if before is None or before is after else self._shown(before),
                    f"{metric_key_prefix}_contact_sheet",
                )
            self.log(dict(metrics))
        finally:
            self.model.train(was_training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _rows_of(self, eval_dataset: Dataset) -> PromptRows:
        """Its rows, read once where the dataset is the trainer's own."""
        check_is_dataset(eval_dataset, "eval_dataset")
        known = (rows for rows in self._eval_rows if rows.dataset is eval_dataset)
        rows = next(known, None) or PromptRows(eval_dataset, self.args, "the evaluation dataset")
        return rows.measure(self.pipeline, self.family)

    def _draw_before_and_after(self, rows: PromptRows, name: str) -> tuple[Evaluation | None, Evaluation]:
        num_baselines = len(self._baselines)
        before = self._baseline(rows, name)
        is_drawn_now = len(self._baselines) > num_baselines and self.state.global_step == 0
        if before is not None and (self._is_untrained() or (is_drawn_now and not isinstance(self.model, PeftModel))):
            return before, before  # the same weights and noise would give the same images
        with swapped(self.model, self.ema.average if self.ema else None, zero_stage_of(self)):
            return before, self._draw_evaluation(rows, "Evaluating")

    def _draw_evaluation(self, rows: PromptRows, description: str) -> Evaluation:
        evaluation = draw_evaluation(self, self.eval_scorer, self.eval_reward_weights, rows, description)
        # Here, so that a baseline that could not be scored is neither kept nor compared with
        is_needed = torch.tensor(self.eval_reward_required) & (self.eval_reward_weights != 0)
        check_scored(evaluation, self.eval_reward_func_names, is_needed, self.args.max_excluded_images)
        return evaluation

    def _shown(self, evaluation: Evaluation) -> ScoredImages:
        return ScoredImages(
            evaluation.pictures, self.args.num_generations_eval, self.eval_reward_func_names, evaluation.rewards,
            evaluation.extra,
        )  # fmt: skip

    def _baseline(self, rows: PromptRows, name: str) -> Evaluation | None:
        """The evaluation of the model without training; drawn once, and kept in the output folder."""
        key = baseline_key(self, self.eval_reward_func_names, rows)
        if key not in self._baselines:
            folder = Path(self.args.output_dir) / "evaluation" / f"{name}_baseline"
            # Of another run in the same folder nothing is taken: its rewards may have been others of the same names
            baseline = load_baseline(folder, key) if self._resumed_from is not None else None
            if baseline is None:
                if isinstance(self.model, PeftModel):
                    weights = self.model.disable_adapter()
                elif self.state.global_step == 0:
                    weights = nullcontext()
                else:
                    logger.warning(
                        "All weights are trained, and the evaluation prompts were not drawn before training: there is "
                        "no baseline to compare with. Set `eval_on_start=True`, or `eval_strategy`."
                    )
                    return None
                # As if nothing had been drawn: a resumed run finds the baseline in the folder and does not draw it
                with weights, kept_random_state(self.accelerator.device):
                    baseline = self._draw_evaluation(rows, "Drawing the baseline")
                if self.accelerator.is_main_process:
                    save_baseline(folder, key, baseline)
            self._baselines[key] = baseline
        return self._baselines[key]

    def _is_untrained(self) -> bool:
        """Whether the model still is its base model, on every process."""
        is_new = adapter_is_new(shares(self.model, zero_stage_of(self)))
        if self.ema is not None:
            is_new = is_new and adapter_is_new(self.ema.average)
        verdict = torch.tensor([float(is_new)], device=self.accelerator.device)
        return self.accelerator.gather(verdict).min().item() == 1.0

    # ---- Checkpoints and the Hub ----

    @property
    def _is_zero3(self) -> bool:
        return self.is_deepspeed_enabled and self.accelerator.deepspeed_plugin.zero_stage == 3

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """
        Trains; see [`~transformers.Trainer.train`].

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint's folder, or `True` for the latest complete one of the output folder. The run goes on
                exactly as it would have.
            trial (*optional*), ignore_keys_for_eval (`list[str]`, *optional*):
                As in [`~transformers.Trainer.train`].

        Returns:
            [`~transformers.trainer_utils.TrainOutput`].

        Raises:
            ValueError: the checkpoint is incomplete or of another run, or the output folder has another run's.
        """
        checkpoint = find_checkpoint(self.args.output_dir, resume_from_checkpoint)
        if checkpoint is None:
            check_output_folder(self.args.output_dir, self._identity, self._course(self.args))
        elif checkpoint != self._checked:
            self._check_resumed_run(checkpoint, self.args)
        if checkpoint is not None:
            check_weights(self.model, checkpoint)
        if self.args.should_save:
            clear_staging(self.args.output_dir)
        self._resumed_from, self._saved_step, self.loaded_step = checkpoint, None, None
        eval_on_start = self.args.eval_on_start
        self.args.eval_on_start = eval_on_start and checkpoint is None  # a resumed run had its start
        if self._is_zero3:
            partition(
                self.model,
                self.accelerator.device,
                self.compute_dtype,
                self.accelerator.deepspeed_plugin.deepspeed_config,
            )
        try:
            return super().train(None if checkpoint is None else str(checkpoint), trial, ignore_keys_for_eval)
        except RewardError as error:
            # A judge that is down is no reason to lose what was trained. On every process, see `RewardScorer`.
            raise RewardError(f"{error} {self._keep_trained_steps()}") from error
        finally:
            self.args.eval_on_start = eval_on_start

    def _is_evaluation_due(self) -> bool:
        """Whether the evaluation of the step that a checkpoint was made at is missing: a judge was down."""
        args, step = self.args, self.state.global_step
        if args.eval_strategy != "steps" or step <= args.eval_delay or step % self.state.eval_steps != 0:
            return False
        entries = [entry for entry in self.state.log_history if entry["step"] == step]
        return not any(name.startswith("eval_") for entry in entries for name in entry)

    def _keep_trained_steps(self) -> str:
        """Saves a checkpoint of the steps that were made, if there is none yet, and says how to go on."""
        step = self.state.global_step
        if step == 0:
            return "Nothing was trained yet: start the run again when the reward works."
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        # A folder of that name may be an earlier run's
        if self._saved_step != step and self._resumed_from != folder:
            self._save_checkpoint(self.model, trial=None)
        return f"The {step} steps before it are in '{folder}': go on with `resume_from_checkpoint=True`."

    def _run_epoch(self, *args, **kwargs) -> None:
        """As in Trainer, which makes a step too many when a run is resumed that was killed after its last one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _begin_run(self) -> None:
        """What needs the weights in their place: called when training begins, before the first step."""
        zero_stage, checkpoint = zero_stage_of(self), self._resumed_from
        self.ema = None
        if self.args.ema_decay is not None:
            self.ema = EMA(self.model, self.args.ema_decay, zero_stage, self.args.ema_offload)
            if checkpoint is not None and (checkpoint / EMA_WEIGHTS).exists():
                self.ema.load(load_file(checkpoint / EMA_WEIGHTS))
        if checkpoint is not None:
            load_rollout(self, checkpoint)
        elif self.args.resolution_transfer_prompts:
            report_resolution_transfer(self)
        if not isinstance(self.model, PeftModel) and self.args.eval_strategy != "no" and not self.args.eval_on_start:
            # Now, because afterwards the untrained weights are gone; an evaluation on start draws it itself
            datasets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
            self.model.eval()
            for name, dataset in datasets.items():
                self._baseline(self._rows_of(dataset), f"eval_{name}" if name else "eval")
            self.model.train()
        if checkpoint is not None and self._is_evaluation_due():
            with kept_random_state(self.accelerator.device):
                self._determine_best_metric(self._evaluate(None, None), None)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """The trained weights themselves; what a checkpoint exports is their average."""
        load_whole(self.model, load_file(Path(resume_from_checkpoint) / POLICY_WEIGHTS), zero_stage=0)

    def _load_best_model(self) -> None:
        """The best checkpoint's weights, as they were evaluated, become the trained ones."""
        best = Path(self.state.best_model_checkpoint)
        name = EMA_WEIGHTS if (best / EMA_WEIGHTS).exists() else POLICY_WEIGHTS
        whole = load_file(best / name)
        load_whole(self.model, whole, zero_stage_of(self))
        if self.ema is not None:
            self.ema.load(whole)
        self.loaded_step = self.state.best_global_step

    def _save_checkpoint(self, model, trial) -> None:
        """A checkpoint is written beside the others and appears when it is complete."""
        folder = write_checkpoint(self)
        self._saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, use_ema: bool = True) -> None:
        """
        Saves what was trained, with its card and pictures; with `push_to_hub` it is uploaded as well. Every process
        calls it.

        It is the average of the weights (`ema_decay`), as evaluated: an adapter in PEFT's and diffusers' formats, or
        the whole transformer in diffusers'.

        Args:
            output_dir (`str`, *optional*):
                Folder. If `None`, `args.output_dir`.
            use_ema (`bool`, *optional*, defaults to `True`):
                Whether to save the average. If `False`, the weights of the last step.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        zero_stage, keep = zero_stage_of(self), self.args.should_save
        if self.ema is not None and use_ema:
            whole = self.ema.whole(keep)
        else:
            whole = gather_whole(self.model, shares(self.model, zero_stage), zero_stage, keep)
        if self.args.should_save:
            save_trained(self, whole, folder, use_ema)
        if self.args.push_to_hub and not _internal_call:
            self._push_saved(folder)

    def _save_further_weights(self, folder: Path) -> None:
        """Other weights that training goes on with, into a checkpoint's folder. Every process calls it."""

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        license: str | None = None,
        use_ema: bool = True,
    ) -> None:
        """
        Writes the model card into `args.output_dir`.

        Args:
            model_name (`str`, *optional*):
                Title of the card. If `None`, the name of the Hub repository or of the output folder.
            dataset_name (`str`, *optional*):
                Hub id of the dataset. If `None`, that which the dataset was loaded from.
            tags (`str` or `list[str]`, *optional*):
                Further tags.
            license (`str`, *optional*):
                Licence. If `None`, the base model's.
            use_ema (`bool`, *optional*, defaults to `True`):
                Whether the card is that of the averaged weights. If `False`, of those of the last step.
        """
        if self.is_world_process_zero():
            card = self._model_card(model_name, dataset_name, tags, license, use_ema)
            render_card(card).save(Path(self.args.output_dir) / "README.md")

    def _model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        license: str | None = None,
        use_ema: bool = True,
    ) -> ImageModelCard:
        """Fill in the card of what was trained, as it is now: of the averaged weights, or of the last step's."""
        args, family, prompts = self.args, self.family, self.train_rows
        step = self.state.global_step if self.loaded_step is None else self.loaded_step
        history = [entry for entry in self.state.log_history if entry["step"] <= step]
        # A pipeline that was put together in memory has no name
        base_model = self.pipeline.name_or_path or type(self.pipeline).__name__
        is_adapter = isinstance(self.model, PeftModel)
        rewards = (self.reward_funcs, self.reward_func_names, self.reward_weights.tolist())
        evaluations = []
        if use_ema or args.ema_decay is None:  # evaluations are of the average
            datasets = self.eval_dataset if isinstance(self.eval_dataset, dict) else [None]
            evaluations = evaluation_rows(history, datasets, self.eval_scorer.reward_funcs, self.eval_scorer.names)
        return ImageModelCard(
            **self._card_fields(base_model, model_name, dataset_name, tags, license, step),
            lora=lora_of(self.model, self.trained_from),
            weights="adapter" if is_adapter else "transformer",
            pipeline_class=type(self.pipeline).__name__,
            transformer_class=type(self.policy.pipeline.transformer).__name__,
            dtype=str(self.compute_dtype).removeprefix("torch."),
            call=pipeline_call(family, args.guidance_scale, args.negative_prompt),
            is_editing=prompts.sources is not None,
            method=self._name,
            settings=image_settings(args, prompts, self.prompt_encoder.negative_prompt, step, is_adapter, use_ema),
            rewards=reward_rows(history, *rewards),
            evaluations=evaluations,
            pictures=latest_pictures(args, step, use_ema),
        )

    def push_to_hub(self, *args, use_ema: bool = True, **kwargs):
        """
        Saves what was trained to `args.output_dir` and uploads it; see [`~transformers.Trainer.push_to_hub`].

        Args:
            *args:
                As there.
            use_ema (`bool`, *optional*, defaults to `True`):
                Whether it is the average of the weights. If `False`, those of the last step.
            **kwargs:
                As there, or arguments of `create_model_card`.

        Returns:
            [`~huggingface_hub.CommitInfo`] on the main process; a `Future` of it with `blocking=False`.
        """
        return super().push_to_hub(*args, use_ema=use_ema, **kwargs)

    def _save_with_card(self, use_ema: bool, **kwargs) -> None:
        self.save_model(_internal_call=True, use_ema=use_ema)
        self.create_model_card(use_ema=use_ema, **kwargs)
