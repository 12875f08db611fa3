# SPDX-License-Identifier: Apache-2.0
"""
Base class of PaCo-GRPO and PaCo-NFT: generates and scores rounds of images, and trains, evaluates and checkpoints on
them.
"""

import dataclasses
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from accelerate.utils import set_seed
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_utils import PredictionOutput
from trl import GRPOTrainer
from trl.models.utils import prepare_deepspeed
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import identity, use_adapter

from ..checkpointing.checkpoints import (
    EMA_WEIGHTS,
    POLICY_WEIGHTS,
    load_round,
    read_run,
    round_file,
)
from ..checkpointing.weights import (
    EMA,
    check_all_gradients,
    gather_weights,
    get_zero_stage,
    load_weights,
    local_weights,
    save_trained,
)
from ..hub.card_data import ImageModelCardData
from ..hub.cards import saving_model
from ..hub.files import PIPELINE_ADAPTER, TRANSFORMER
from ..plots.curves import CurvesCallback
from ..rewards.errors import RewardError
from ..rewards.limits import check_failures, warn_of_constant_rewards
from ..rewards.scoring import RewardScorer, Scores
from ..rewards.weighting import Rewards
from ..rollout import Family, TransformerStep, UnlistedFamily, get_family
from ..rollout.adapters import SavedAdapter, read_peft_config
from ..rollout.encoder import EncodedRows
from ..rollout.kernels import check_attention_backend, example_queries
from ..rollout.loading import (
    base_model_name,
    check_base_weights,
    is_buildable,
    load_pipeline,
    load_without_weights,
    pipeline_quantization,
    with_quantization,
)
from ..rollout.policy import Policy, RecordingOptions
from ..rollout.policy_building import build_recording_pipeline, check_trained
from ..rollout.prompt_rows import PromptRows, ResolvedRows
from ..rollout.rounds import Batch
from ..utils.deepspeed import partition
from ..utils.differences import changes
from ..utils.fingerprint import component_fingerprint, describe
from ..utils.fsdp import model_class, prepare_sharding, shards_weights
from ..utils.locks import sole_writer
from ..utils.logs import get_logger
from ..utils.quantization import describe_quantization
from .callbacks import AverageCallback, ContactSheetsCallback, ImageStatisticsCallback
from .checks import (
    check_panels_used,
    check_prompts,
    fit_round_to_dataset,
    offload_models,
    read_eval_rows,
    read_train_rows,
    warn_of_trained_rows,
)
from .config_checks import check_quantization
from .config_utils import check_optimizer_class, copy_config
from .console import use_console
from .evaluator import Evaluator, TrainedModel, evaluation_metrics
from .losses import (
    group_advantages,
    informative_groups,
)
from .model_cards import (
    describe_lora,
    evaluation_rows,
    image_settings,
    latest_pictures,
    loading_settings,
    pipeline_call,
    read_gallery_prompts,
    reward_rows,
)
from .paco_grpo_config import PaCoGRPOConfig
from .resuming import ExactResumeMixin, FunctionCallback, end_explained, without_jit_checkpoint
from .round_schedule import ROUNDS_AHEAD, RoundSchedule, TrainingRound
from .run_settings import describe_run, reference_setting
from .step_statistics import StepStatistics


logger = get_logger(__name__)


class RoundTrainer(ExactResumeMixin, GRPOTrainer):
    """
    Base of the trainers that learn from rounds of generated and rewarded images.

    Subclasses implement `_generating` (which steps to record) and `compute_loss`.
    """

    # The weights of the samples already divide the loss by the completions of the optimizer step: see `_mean_loss`
    loss_is_scaled_for_ga = True

    _name: str
    _config_class: type[PaCoGRPOConfig]
    _step_class: type[TransformerStep]  # kind of steps in a pending round
    _statistics_class: type[StepStatistics]

    def __init__(
        self,
        model: str | DiffusionPipeline,
        reward_funcs: Callable | str | Sequence[Callable | str],
        args: PaCoGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        eval_reward_funcs: Callable | str | Sequence[Callable | str] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        quantization_config: Any = None,
        peft_config: LoraConfig | SavedAdapter | str | None = None,
        family: Family | None = None,
    ):
        # 1. Checks without the model
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        if not isinstance(model, str | DiffusionPipeline):
            raise TypeError(
                f"`model` is a {type(model).__name__}; it must be a Hub id, a directory, or a `DiffusionPipeline`. An "
                "adapter is passed as `peft_config`."
            )
        if args is None:
            # A pipeline that was built in memory has no name
            name = model if isinstance(model, str) else model.name_or_path or type(model).__name__
            args = self._config_class(f"{Path(name).name}-{self._name}")
        if not isinstance(args, self._config_class) or args.loss_types != self._config_class.loss_types:
            raise TypeError(f"`args` is a {type(args).__name__}; it must be a `{self._config_class.__name__}`.")
        args = copy_config(args)
        if optimizer_cls_and_kwargs is not None:
            check_optimizer_class(optimizer_cls_and_kwargs)
        if quantization_config is not None:
            args.model_init_kwargs = with_quantization(args.model_init_kwargs, quantization_config, model)
        adapter = None if peft_config is None else read_peft_config(peft_config, model, args.model_init_kwargs)
        self.rewards = Rewards(
            reward_funcs, args.reward_weights, args.reward_required, args.multi_objective_aggregation,
            cast(Any, args.log_tame_threshold),
        )  # fmt: skip
        self.eval_rewards = self.rewards if eval_reward_funcs is None else Rewards(eval_reward_funcs)
        train_rows = read_train_rows(train_dataset, args, self.rewards)
        fit_round_to_dataset(args, train_rows)
        eval_rows = read_eval_rows(eval_dataset, args, self.eval_rewards)
        check_panels_used(args, train_rows, *eval_rows)
        warn_of_trained_rows(train_rows, eval_rows)
        self.schedule = RoundSchedule(args, train_rows.images_per_row)
        self._open_run(args, model, adapter, family, train_rows.dataset)
        reward_models = offload_models(args, self.rewards, self.eval_rewards)

        # 2. The frozen pipeline
        self.compute_dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.pipeline, self.family, self.train_rows = self._load_pipeline(
            model, args, adapter, family, train_rows, eval_rows
        )
        components = {
            name: component
            for name, component in sorted(self.pipeline.components.items())
            if isinstance(component, nn.Module) or name == "scheduler"
        }
        self._identify_weights({name: component_fingerprint(component) for name, component in components.items()})
        if args.vae_tiling:
            self.pipeline.vae.enable_tiling()
        if args.ddp_find_unused_parameters is None:
            # The unused layers of an unlisted pipeline are unknown, and a full transformer may have some
            has_unused = adapter is None and bool(self.family.unused_layers(self.pipeline.transformer))
            args.ddp_find_unused_parameters = has_unused or isinstance(self.family, UnlistedFamily)

        # 3. The trained weights. An adapter's are random: seed first
        set_seed(args.seed)
        is_deepspeed = args.deepspeed_plugin is not None
        if is_deepspeed:
            # The default, the model's dtype, would accumulate hundreds of micro-batches in bf16
            args.deepspeed_plugin.deepspeed_config.setdefault("data_types", {"grad_accum_dtype": "fp32"})
        recording_pipeline, self.ref_model = build_recording_pipeline(
            self.pipeline, self.family, adapter, self.compute_dtype, is_deepspeed,
            reference=args.reference if args.has_reference else None,
            attention_backend=args.attention_backend, compile_blocks=args.compile_repeated_blocks,
            quantization=args.quantization,
        )  # fmt: skip
        self.quantization = pipeline_quantization(self.pipeline)

        # 4. GRPOTrainer's own __init__ assumes a language model, so it is skipped; the attributes that its inherited
        # methods read are set below (tests/test_contract.py lists them).
        with without_jit_checkpoint(args):
            _BaseTrainer.__init__(
                self, model=recording_pipeline.model, args=args, data_collator=identity, train_dataset=train_dataset,
                eval_dataset=eval_dataset, callbacks=callbacks, optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            )  # fmt: skip
        if self.is_fsdp_enabled:
            prepare_sharding(self.accelerator, self.model)
        if self.ref_model is not None and is_deepspeed:
            self.ref_model = prepare_deepspeed(self.ref_model, self.accelerator)
        elif self.ref_model is not None and self.is_fsdp_enabled:
            self.ref_model = fsdp2_prepare_model(self.accelerator, self.ref_model)
        elif self.ref_model is not None:
            self.ref_model = self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)
        # Read by the inherited training_step, log and _load_optimizer_and_scheduler
        self.log_completions = False  # TRL's table of texts, replaced by contact sheets
        self.use_adaptive_entropy = False
        self._metrics: dict[str, dict] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._current_train_step_time = 0.0

        # 5. Components of a round
        self.reward_funcs, self.reward_func_names = self.rewards.functions, self.rewards.names
        self.reward_weights = self.rewards.weights
        self.num_generations = args.num_generations  # = G in the paper
        self.beta = args.beta
        self.policy = Policy(
            recording_pipeline, self.accelerator, args.guidance_scale, args.offload_embeddings, args.embeddings_dir
        )
        scorers = {
            rewards: RewardScorer(rewards, self.accelerator, models) for rewards, models in reward_models.items()
        }
        self.scorer = scorers[self.rewards]
        self.evaluator = Evaluator(self.policy, scorers[self.eval_rewards], args, eval_rows, self._identity["weights"])
        self.statistics: StepStatistics = self._statistics_class(self.accelerator, args)
        self._is_warned_of_constants = False
        self._average_callbacks: dict[str, AverageCallback] = {}  # by the file of the average
        self._add_callbacks()
        self._reset_run_state()
        self._mark_output_dir()
        if self.accelerator.is_main_process and not args.disable_tqdm:
            tqdm.write(self.schedule.summary())  # logs at level info are hidden

    def _load_pipeline(
        self, model: str | DiffusionPipeline, args: PaCoGRPOConfig, adapter: LoraConfig | SavedAdapter | None,
        family: Family | None, train_rows: PromptRows, eval_rows: list[PromptRows],
    ) -> tuple[DiffusionPipeline, Family, ResolvedRows]:  # fmt: skip
        """Load the frozen pipeline. If it can be built from its configs, check it without weights first."""
        is_full = adapter is None
        is_deepspeed = args.deepspeed_plugin is not None
        check_quantization(args.quantization, is_full, shards_weights(args), args.compile_repeated_blocks)
        # DeepSpeed keeps float32 masters; without it trained weights are float32 themselves
        transformer_dtype = torch.float32 if is_full and not is_deepspeed else None
        init = args.model_init_kwargs or {}
        load = partial(
            load_pipeline, model, self.compute_dtype, transformer_dtype, args.trust_remote_code, args.quantization,
            family,
            **init,
        )  # fmt: skip
        has_weights = not is_buildable(model, init, family)
        if has_weights:
            pipeline = load()
        else:
            pipeline = load_without_weights(str(model), {"default": torch.float32}, encodes=False, **init)
        family = get_family(pipeline) if family is None else family
        self._check_family(family)
        resolved_rows = self._check_pipeline(pipeline, family, args, is_full, train_rows, eval_rows)
        if not has_weights:
            check_trained(pipeline, family, adapter)
            pipeline = load()
        if not isinstance(model, str) or any(isinstance(value, nn.Module) for value in init.values()):
            check_base_weights(pipeline, ["transformer"] if is_full else [])
        return pipeline, family, resolved_rows

    def _check_family(self, family: Family) -> None:
        """Check that the family supports the method, before its weights are read."""

    def _check_pipeline(
        self,
        pipeline: DiffusionPipeline,
        family: Family,
        args: PaCoGRPOConfig,
        is_full: bool,
        train_rows: PromptRows,
        eval_rows: list[PromptRows],
    ) -> ResolvedRows:
        """Check settings and prompts against the pipeline, which may have no weights yet; return the trained rows."""
        quantization = describe_quantization(pipeline.transformer)
        check_quantization(quantization, is_full, shards_weights(args), args.compile_repeated_blocks)
        resolved_rows = check_prompts(args, pipeline, family, train_rows, eval_rows)
        if args.attention_backend is not None:  # what a device lacks is known only where it runs
            queries = example_queries(pipeline.transformer, self.compute_dtype, args.device)
            check_attention_backend(args.attention_backend, queries)
        return resolved_rows

    def _send_telemetry(self) -> None:
        """Send nothing: TRL's telemetry reads a model type that a diffusers config lacks."""

    # ---- Start, resume and stop ----

    def _open_run(
        self, args: PaCoGRPOConfig, model: str | DiffusionPipeline, adapter: LoraConfig | SavedAdapter | None,
        family: Family | None, train_dataset: Dataset,
    ) -> None:  # fmt: skip
        """Identify the run, and check the output directory and the Hub, before a model is loaded."""
        self.base_model = base_model_name(model)
        saved = adapter if isinstance(adapter, SavedAdapter) else None
        self.trained_from = base_model_name(saved.name) if saved else None
        loaded = pipeline_quantization(model) if isinstance(model, DiffusionPipeline) else None
        self._identity, self._settings = describe_run(
            args, train_dataset, saved.config if saved else adapter, family=describe(family),
            reference=reference_setting(args, saved), rewards=self.rewards.descriptions,
            eval_rewards=None if self.eval_rewards is self.rewards else self.eval_rewards.descriptions,
        )  # fmt: skip
        self._identity["base_model"] = Path(self.base_model).name  # of the Hub or a directory: its weights tell
        self._identity["quantization"] = self._identity["quantization"] or loaded
        published_patterns = TRANSFORMER if adapter is None else PIPELINE_ADAPTER
        self._open_output_dir(args, published_patterns)
        self._check_run(args, model, saved and saved.name)
        source = model if isinstance(model, str) else getattr(model, "name_or_path", None)
        self._init_hub(args, source and str(source), published_patterns)  # a name may be a Path

    def _add_callbacks(self) -> None:
        if self.args.ema_decay is not None:
            self._add_average(AverageCallback(self))
        # After the averages, which an evaluation at the start uses
        self.add_callback(FunctionCallback(on_train_begin=self._begin_run))
        use_console(self)
        self.add_callback(CurvesCallback(self.args.plot_curves))
        self.add_callback(ImageStatisticsCallback())
        if self.args.log_completions:
            trackers = self.callback_handler.callbacks
            sheets = ContactSheetsCallback(self.accelerator, self.rewards.names, self.eval_rewards.names, trackers)
            self.add_callback(sheets)

    def _add_average(self, callback: AverageCallback) -> None:
        self._average_callbacks[callback.file] = callback
        self.add_callback(callback)

    @property
    def _is_zero3(self) -> bool:
        return self.is_deepspeed_enabled and self.accelerator.deepspeed_plugin.zero_stage == 3

    @property
    def zero_stage(self) -> int:
        """Stage of the DeepSpeed engine; 0 without one, and before `train()` creates it."""
        return get_zero_stage(self.accelerator, self.model, self.model_wrapped)

    @property
    def averages(self) -> dict[str, EMA]:
        """The averages of the trained weights by their file in a checkpoint, from the start of `train()`."""
        callbacks = self._average_callbacks.items()
        return {file: callback.average for file, callback in callbacks if callback.average is not None}

    @property
    def ema(self) -> EMA | None:
        """The average that is evaluated and saved (`ema_decay`)."""
        return self.averages.get(EMA_WEIGHTS)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """
        Train as [`~transformers.Trainer.train`] does; resuming is exact, to the bit on the CPU or with deterministic
        kernels.

        `resume_from_checkpoint` is a directory, `True` (the latest complete checkpoint of `output_dir`), or `"auto"`:
        the latest if there is one. SIGTERM and SIGUSR1 write a checkpoint and end the process
        (`enable_jit_checkpoint`).
        """
        output_dir = self.args.output_dir
        with sole_writer(output_dir, "checkpoints", is_inside=True) as mark, end_explained(output_dir, mark):
            return self._train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train(self, resume_from_checkpoint, trial, ignore_keys_for_eval):
        args = self.args
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        if checkpoint not in (None, self._checked):
            self._check_resumed_run(checkpoint, args)
        if self._is_zero3:
            engine = self.accelerator.deepspeed_plugin.deepspeed_config
            partition(self.model, self.accelerator.device, self.compute_dtype, engine)
        self._reset_run_state()
        with self._resumable(checkpoint):
            try:
                return super().train(None if checkpoint is None else str(checkpoint), trial, ignore_keys_for_eval)
            except RewardError as error:
                # Raised on every process
                folder = self._save_before_stop()
                how = "Nothing was trained yet: restart the run when the reward works."
                if folder is not None:
                    steps = self.state.global_step
                    how = f"The {steps} steps before it are in '{folder}': resume with `resume_from_checkpoint=True`."
                raise RewardError(f"{error} {how}") from error.__cause__  # of the reward, with its own frames

    def _reset_run_state(self) -> None:
        """Forget what an earlier `train()` has left."""
        self.round: TrainingRound | None = None  # `None` until the first micro-step
        self._step = 0  # micro-step, which GRPOTrainer.training_step counts
        self._is_first_backward = True
        self._encode_time = self._train_time = 0.0
        self.statistics.reset()
        for callback in self._average_callbacks.values():
            callback.average = None

    def _prepare_for_training(self, *args, **kwargs):
        """Encode the prompts of the first rounds, then place the weights."""
        next_round = -(-self.state.global_step // self.schedule.optimizer_steps_per_round)
        if next_round < self._num_rounds:
            started = time.perf_counter()
            self._encode(self._plan_round(next_round))
            self._encode_time = time.perf_counter() - started
        return super()._prepare_for_training(*args, **kwargs)

    @property
    def _num_rounds(self) -> int:
        """Number of rounds of the run."""
        return -(-self.state.max_steps // self.schedule.optimizer_steps_per_round)

    def _eval_datasets(self) -> dict[str, Dataset]:
        """Return the evaluation datasets by the prefix of their metrics."""
        named = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        return {f"eval_{name}" if name else "eval": dataset for name, dataset in named.items()}

    def _begin_run(self) -> None:
        """Prepare the run once the weights are placed, before the first step."""
        checkpoint, args = self.resumed_from, self.args
        if checkpoint is not None:
            self._load_round(checkpoint)
        is_full = not isinstance(self.model, PeftModel)
        if is_full and args.eval_baseline and args.eval_strategy != "no" and not args.eval_on_start:
            # The untrained weights are lost after the first step
            self.model.eval()
            for name, dataset in self._eval_datasets().items():
                self.evaluator.ensure_baseline(self.evaluator.rows_of(dataset), name, self._trained_model)
            self.model.train()
        super()._begin_run()

    # ---- Rounds ----

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader that only counts micro-steps; `_prepare_inputs` returns their inputs."""
        micro_steps = range(self.schedule.rounds_per_epoch * self.schedule.micro_steps_per_round)
        return DataLoader(micro_steps, batch_size=1, collate_fn=identity)

    def _ensure_round(self) -> TrainingRound:
        """Return the round of the current micro-step. When the one before is used up, generate and score it first."""
        accumulation = self.args.gradient_accumulation_steps
        if self._step % accumulation == 0:
            # GRPOTrainer.training_step counts on; after a resume the count follows from the optimizer step
            self._step = self.state.global_step * accumulation
        index, position = divmod(self._step, self.schedule.micro_steps_per_round)
        if self.round is not None and self.round.index == index:
            return self.round
        if position > 0:
            logger.warning(
                f"Training resumes in the middle of round {index}, whose images are not in the checkpoint: "
                "they are generated again, with the current weights."
            )
        started, self.round = time.perf_counter(), None  # frees the old round before the new one is generated
        self.round = self._generate_and_score_completions(index)
        self.round.seconds = time.perf_counter() - started
        self._current_train_step_time += self.round.seconds  # TRL's `step_time` counts generation, too
        return self.round

    def _prepare_inputs(self, inputs):
        """Return the inputs of the current micro-step of the round."""
        training_round, device = cast(TrainingRound, self.round), self.accelerator.device
        batch, step = training_round.micro_step(self._step % self.schedule.micro_steps_per_round)
        if self.args.offload_embeddings:  # its prompts wait in CPU memory
            step = step.to(device)
        return {
            "step": step,
            "advantages": batch.column("advantage", device),
            "weights": batch.column("weight", device),
            "sde": training_round.sde,
        }

    @property
    def pending_round(self) -> TrainingRound | None:
        """The current round, if it has optimizer steps left."""
        is_pending = self.state.global_step % self.schedule.optimizer_steps_per_round != 0
        return self.round if is_pending else None

    @property
    def is_on_policy(self) -> bool:
        """Whether the weights have not been updated since the current round began."""
        return self.round is not None and self.state.global_step == self.round.global_step

    @property
    def is_idle_step(self) -> bool:
        """Whether the current optimizer step trains no image."""
        step = self.state.global_step % self.schedule.optimizer_steps_per_round
        return self.round is not None and self.round.is_idle_step(step)

    def _plan_round(self, index: int) -> TrainingRound:
        """Return a round that is not generated yet."""
        process = self.accelerator.process_index
        return TrainingRound(self.schedule, self.train_rows, index, process, self.state.global_step)

    def _encode(self, training_round: TrainingRound, batches: list[Batch] | None = None) -> EncodedRows:
        """Return the encoded rows of this process's batches, by default all; encode the next rounds' ahead of time."""
        index, scale = training_round.index, self.args.resolution_scale
        row_indices = training_round.row_indices_of(batches or training_round.local_batches)
        following = map(self._plan_round, range(index + 1, min(index + ROUNDS_AHEAD, self._num_rounds)))
        ahead = itertools.chain.from_iterable(later.row_indices_of(later.local_batches) for later in following)
        return self.policy.encoder.encode(training_round, row_indices, scale, ahead)

    def _generate_and_score_completions(self, index: int) -> TrainingRound:
        """
        Generate and score a round, and compare its completions: each sample gets an advantage and a weight.

        Unlike TRL's, it takes the index of a round and returns the round.
        """
        args, generations = self.args, self.num_generations
        training_round = self._plan_round(index)
        scores, timings = self._roll_out(training_round, training_round.local_batches)
        training_round.metrics |= timings
        num_resampled = self._resample(training_round, scores) if args.max_resample_times else 0

        aggregated, details = self.rewards.aggregate(scores.rewards, generations)
        # As in TRL, the sum of normalized rewards is scaled over the batch
        scale = "batch" if args.multi_objective_aggregation == "normalize_then_sum" else args.scale_rewards
        advantages, is_valid, has_spread = group_advantages(aggregated, generations, scale, args.advantage_clip)
        self._check_scores(training_round, scores, is_valid)
        total = self.rewards.total(scores.rewards, generations)
        is_informative = self._is_informative(total)
        is_trained = is_valid & is_informative.repeat_interleave(generations)
        if not is_trained.any():
            logger.warning(
                f"In round {index} `min_reward_std` = {args.min_reward_std} and `max_reward_mean` = "
                f"{args.max_reward_mean} leave out every prompt that has rewards: its steps change nothing."
            )
        training_round.assign_advantages(advantages, is_trained, self.family)

        training_round.metrics |= {
            **scores.metrics,
            **self.rewards.metrics(scores.rewards, total, details),
            "frac_reward_zero_std": 1 - has_spread.float().mean().item(),
            "images_excluded": (~is_valid).sum().item(),
            "groups_excluded": (~is_valid.view(-1, generations).any(dim=1)).sum().item(),
            "frac_groups_uninformative": 1 - is_informative.float().mean().item(),
            "prompts_resampled": num_resampled,
        }
        self._call_event("on_round_end", round=training_round, scores=scores, advantages=advantages)
        for completion in training_round.completions:
            completion.image = None
        return training_round

    def _roll_out(self, training_round: TrainingRound, batches: list[Batch]) -> tuple[Scores, dict[str, float]]:
        """
        Generate batches of a round, and score their completions meanwhile; return the scores, and the times that it
        took. Collective: call on all ranks.
        """
        started = time.perf_counter()
        args = self.args
        encoded = self._encode(training_round, batches)
        encode_time = self._encode_time + time.perf_counter() - started
        self._encode_time = 0.0
        is_hidden = args.disable_tqdm or not self.accelerator.is_main_process
        progress = None if is_hidden else f"Round {training_round.index}: generating"
        started = time.perf_counter()
        # The rewards that are left are computed when the VAE has left the accelerator, and gathered weights
        with self.scorer.scoring(training_round, self.state) as scoring:
            with self._generating(training_round) as recording:
                for finished in self.policy.rollout(
                    training_round, batches, args.num_inference_steps, encoded=encoded, progress=progress,
                    recording=recording,
                ):  # fmt: skip
                    scoring.add(finished)
            rollout_time = time.perf_counter() - started
        return scoring.scores, {
            "time/encode": encode_time,
            "time/rollout": rollout_time,
            "time/resample": 0.0,
            "time/reward": scoring.scores.wait_seconds,
            "time/reward_hidden": scoring.scores.hidden_seconds,
            "rollout_images_per_second": self.schedule.plan.num_images / rollout_time,
        }

    def _generating(self, training_round: TrainingRound) -> AbstractContextManager[RecordingOptions]:
        """Place the weights that generate a round, and yield what to record."""
        raise NotImplementedError

    def _is_informative(self, total: torch.Tensor) -> torch.Tensor:
        """Return which groups of a round are trained, by the summed rewards of their completions."""
        return informative_groups(total, self.num_generations, self.args.min_reward_std, self.args.max_reward_mean)

    def _check_scores(self, training_round: TrainingRound, scores: Scores, is_valid: torch.Tensor) -> None:
        """Stop where too many rewards are missing, and warn of rewards that are constant in the first round."""
        where = f"round {training_round.index}"
        check_failures(self.rewards, scores.rewards, is_valid, self.args, where)
        if not self._is_warned_of_constants:
            warn_of_constant_rewards(self.rewards, scores.rewards, self.num_generations, where)
            self._is_warned_of_constants = True

    def _resample(self, training_round: TrainingRound, scores: Scores) -> int:
        """Replace groups that teach nothing, generate and score the new ones, and return their number."""
        started = time.perf_counter()
        num_resampled = 0
        unused_row_indices = self.schedule.other_row_indices(training_round.index)
        for _ in range(self.args.max_resample_times):
            # A group that lacks rewards stays: failures are counted, and may stop the run
            is_missing = torch.isnan(scores.rewards[:, self.rewards.excludes_if_missing])
            is_missing = is_missing.view(len(training_round.row_indices), -1).any(dim=1)  # (groups,)
            is_informative = self._is_informative(self.rewards.total(scores.rewards, self.num_generations))
            groups = (~is_informative & ~is_missing).nonzero().flatten().tolist()
            replaced = training_round.replace_groups(groups, unused_row_indices)
            if not replaced:
                break
            num_resampled += len(replaced)
            new_scores, _ = self._roll_out(training_round, training_round.batches_of(replaced))
            completions = [completion for completion in training_round.completions if completion.group in replaced]
            scores.replace([completion.index for completion in completions], new_scores)
        training_round.metrics["time/resample"] = time.perf_counter() - started
        return num_resampled

    @property
    def _sharded_engine(self) -> nn.Module | None:
        """The model of ZeRO-3 or FSDP2 whose weights are gathered for generation."""
        is_sharded = self._is_zero3 or self.is_fsdp_enabled
        return self.model_wrapped if is_sharded and self.args.ds3_gather_for_generation else None

    def _call_event(self, event: str, **values: Any) -> None:
        """Call an event of this package in the callbacks that have it."""
        for callback in self.callback_handler.callbacks:
            if (function := getattr(callback, event, None)) is not None:
                changed = function(self.args, self.state, self.control, model=self.model, **values)
                self.control = self.control if changed is None else changed

    # ---- Loss ----

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Run TRL's training step on the next micro-step, after a new round was generated if one is due."""
        model.train()  # as Trainer does before the inputs are prepared, so that all rounds are generated in one mode
        training_round = self._ensure_round()
        started = time.perf_counter()
        check = nullcontext()
        if self._is_first_backward:
            has_unused = not isinstance(self.model, PeftModel) and self.args.ddp_find_unused_parameters
            unused_layers = self.family.unused_layers(self.pipeline.transformer) if has_unused else ()
            check = check_all_gradients(self.model, unused_layers)
        with self._unchanged_weights() if self.is_idle_step else nullcontext(), check:
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._is_first_backward = False
        self._train_time += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            round_time = training_round.seconds + self.schedule.optimizer_steps_per_round * self._train_time
            times = {"time/train": self._train_time, "images_per_second": self.schedule.plan.num_images / round_time}
            self._log_with_step(training_round.metrics | times)
            self._train_time = 0.0
        return loss

    @contextmanager
    def _unchanged_weights(self):
        """Keep an optimizer step from moving the weights, as Adam does also with gradients of zero."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if self.is_deepspeed_enabled:  # its update is part of the backward pass
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
        try:
            yield
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self.model.zero_grad(set_to_none=True)

    def _log_with_step(self, metrics: dict[str, float]) -> None:
        """Log metrics together with the optimizer step's, as TRL's trainers do."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _velocities(self, model, step: TransformerStep) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Predict the velocity in a step, and the reference's if the loss has one."""
        ref_velocity = None
        if self.args.has_reference:
            with torch.no_grad(), self._reference(model) as reference:
                ref_velocity = self.policy.predict(reference, step)
        return self.policy.predict(model, step, self.args.detach_unconditional), ref_velocity

    def _mean_loss(self, losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """
        Return what a micro-batch adds to the loss: the mean over the completions of the optimizer step on all
        processes, in which a panel of a set of n counts 1 / n.
        """
        # The weights divide by the completions of all processes, and gradients are averaged over processes
        return (losses * weights).sum() * self.accelerator.num_processes

    @contextmanager
    def _reference(self, model):
        """Provide the reference of the KL divergence: a copy of the initial model or adapter, or the base model."""
        if self.ref_model is not None:
            with self.accelerator.autocast():
                yield self.ref_model
        else:
            adapted = self.accelerator.unwrap_model(model)
            with use_adapter(adapted, "ref" if "ref" in adapted.peft_config else None):
                yield model

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Evaluate the averaged weights (`ema_decay`) at full resolution, with fixed noise and without stochastic steps.

        Arguments are as in [`~transformers.Trainer.evaluate`]; `ignore_keys` is not used. Returns `eval_reward`,
        the weighted sum, `eval_rewards/<name>/mean` and `eval_grid_artifact`, each with an interval over prompts, its
        `baseline` (of the untrained model, evaluated once in a run, with `eval_baseline`) and its `gain`. Undefined
        values are left out.
        """
        eval_dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(eval_dataset, dict):
            metrics = {}
            for name, dataset in eval_dataset.items():
                metrics.update(self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        is_placed = self.model_wrapped is not self.model or isinstance(self.model, FSDPModule)
        if (self.is_deepspeed_enabled or self.is_fsdp_enabled) and not is_placed:
            name = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP"
            raise RuntimeError(
                f"{name} places the model when `train()` begins. To evaluate before, set `eval_on_start`."
            )
        evaluator, was_training = self.evaluator, self.model.training
        rows = evaluator.rows_of(eval_dataset)
        self.model.eval()
        try:
            compared = evaluator.compare(rows, metric_key_prefix, self._trained_model)
            after, before = compared.after, compared.before
            metrics = evaluation_metrics(evaluator.rewards.names, self.args.num_generations_eval, after, before)
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
            self.log(dict(metrics))  # starts the trackers, which then get the sheet
            before = None if compared.is_untrained else before
            self._call_event("on_evaluation_end", rows=rows, after=after, before=before, name=metric_key_prefix)
        finally:
            self.model.train(was_training)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Evaluate on `test_dataset` with [`~PaCoGRPOTrainer.evaluate`]; return only metrics, as for a judge."""
        return PredictionOutput(None, None, self.evaluate(test_dataset, ignore_keys, metric_key_prefix))

    @property
    def _trained_model(self) -> TrainedModel:
        average = self.ema.average if self.ema else None
        is_resumed = self.resumed_from is not None
        return TrainedModel(self.model, average, self.zero_stage, self._sharded_engine, self.state, is_resumed)

    # ---- Checkpoints ----

    def _run_record(self) -> dict[str, Any]:
        return super()._run_record() | {"is_round_pending": self.pending_round is not None}

    def _write_weights(self, folder: Path) -> None:
        keep, ema = self.args.should_save, self.ema
        average = ema.state_dict(keep) if ema is not None else None
        policy: Any = None
        if self.zero_stage == 0 or ema is None:  # DeepSpeed's own files hold the weights otherwise
            policy = gather_weights(self.model, local_weights(self.model, self.zero_stage), self.zero_stage, keep)
        if keep:
            self._save_trained(policy if average is None else average, folder)
            for file, weights in ((EMA_WEIGHTS, average), (POLICY_WEIGHTS, policy)):
                if weights is not None:
                    save_file(weights, folder / file)

    def _write_further_weights(self, folder: Path) -> None:
        """Write averages that are not exported, one at a time: each may be as large as the model."""
        for file, average in self.averages.items():
            if file != EMA_WEIGHTS:
                weights = average.state_dict(self.args.should_save)
                if self.args.should_save:
                    save_file(weights, folder / file)

    def _write_state(self, folder: Path) -> None:
        super()._write_state(folder)
        if (pending := self.pending_round) is not None:
            torch.save(pending.state_dict(), round_file(folder, self.accelerator.process_index))

    def _load_round(self, checkpoint: Path) -> None:
        """Restore a pending round, if it was sharded over as many processes."""
        index = self.accelerator.process_index
        run = read_run(checkpoint)
        if not round_file(checkpoint, index).exists() or run["num_processes"] != self.accelerator.num_processes:
            return
        of_training = {name: value for name, value in self._settings.items() if "eval" not in name}
        if names := ", ".join(name for name, *_ in changes(run["settings"], of_training)):
            logger.warning(
                f"'{checkpoint}' is in the middle of a round that was generated with other values of {names}: it is "
                "generated again."
            )
            return
        device, is_offloaded = self.accelerator.device, self.args.offload_embeddings
        try:
            state = load_round(checkpoint, index, device, is_offloaded)
        except UnpicklingError as error:  # an unlisted pipeline may pass objects that `weights_only` refuses
            logger.warning(
                f"The round of '{checkpoint}' is generated again, since not all of it is data: {error}"[:400]
            )
            return
        names = {field.name for field in dataclasses.fields(self._step_class)}
        steps = [step for batch in state.get("batches", []) for step in batch["steps"]]
        if "trained_completions" not in state or any(step.keys() != names for step in steps):
            logger.warning(f"The round of '{checkpoint}' is of an older version of paco_trl: it is generated again.")
            return
        self.round = self._plan_round(state["index"])
        self.round.load_state_dict(state, self._step_class, device, is_offloaded)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Load the trained weights, not their average that a checkpoint exports."""
        load_weights(self.model, load_file(Path(resume_from_checkpoint) / POLICY_WEIGHTS), zero_stage=0)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights as they were evaluated."""
        best = Path(self.state.best_model_checkpoint)
        weights = load_file(best / (EMA_WEIGHTS if (best / EMA_WEIGHTS).exists() else POLICY_WEIGHTS))
        load_weights(self.model, weights, self.zero_stage)
        if self.ema is not None:
            self.ema.load_state_dict(weights)
        self.loaded_step = self.state.best_global_step

    # ---- Files, card, Hub ----

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False, use_ema: bool = True, **card_fields
    ) -> None:
        """
        Save trained weights, card and images. Collective: call on all ranks.

        With `ema_decay` (0.9 by default) the moving average of the weights is saved, as in evaluations and checkpoints;
        `trainer.ema.average` has the average by name. `trainer.model` holds the weights of the last step, which
        `use_ema=False` saves. `card_fields` are passed to `create_model_card`.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        self._check_output_files(folder)
        keep = self.args.should_save
        if self.ema is not None and use_ema:
            weights = self.ema.state_dict(keep)
        else:
            weights = gather_weights(self.model, local_weights(self.model, self.zero_stage), self.zero_stage, keep)
        if keep:
            self._save_trained(weights, folder, use_ema, **card_fields)
        if self.args.push_to_hub and not _internal_call:
            self._push_model(folder)

    def _save_trained(
        self, weights: dict[str, torch.Tensor], folder: str | Path, use_ema: bool = True, **card_fields
    ) -> None:
        card = self._model_card(use_ema=use_ema, **card_fields)
        with saving_model(card, folder, self._pictures(use_ema), self.published_patterns):
            save_trained(self.model, self.pipeline, weights, folder)

    def _pictures(self, use_ema: bool = True) -> dict[str, Path]:
        """Return the card's images. Single images of separate sets are left out, since no one prompt generates a set."""
        pictures = latest_pictures(self.args, self._card_step, use_ema)
        has_separate = self.train_rows.has_separate
        return {name: path for name, path in pictures.items() if not (has_separate and name.startswith("images/"))}

    def _model_card(self, use_ema: bool = True, **fields) -> ImageModelCardData:
        """Fill in the card of the averaged weights, or of the weights of the last step."""
        args = self.args
        family = self.family
        rows = self.train_rows
        first = [rows.image_prompts[prompt_index].prompt for prompt_index in rows.prompt_indices[0]]
        step = self._card_step
        history = [entry for entry in self.state.log_history if entry["step"] <= step]
        # A pipeline that was built in memory has no name
        base_model = self.pipeline.name_or_path or type(self.pipeline).__name__
        is_adapter = isinstance(self.model, PeftModel)
        rewards = (self.reward_funcs, self.reward_func_names, self.reward_weights.tolist())
        evaluations, judges = [], self.evaluator.rewards
        if use_ema or args.ema_decay is None:  # evaluations are made with the averaged weights
            datasets = [*self.eval_dataset] if isinstance(self.eval_dataset, dict) else [None]
            evaluations = evaluation_rows(history, datasets, judges.functions, judges.names)
        pictures = self._pictures(use_ema)
        return ImageModelCardData(
            **self._common_card_fields(base_model, step, **fields),
            lora=describe_lora(self.model, self.trained_from, self.quantization),
            weights="adapter" if is_adapter else "transformer",
            formats=[*["diffusers"] * hasattr(self.pipeline, "load_lora_weights"), "peft"],
            family=type(family).__name__,
            pipeline_class=type(self.pipeline).__name__,
            transformer_class=model_class(self.policy.pipeline.transformer).__name__,
            dtype=str(self.compute_dtype).removeprefix("torch."),
            loading=loading_settings(args, is_adapter),
            device=self.accelerator.device.type,
            prompt=first[0] if len(first) == 1 else first,
            layout=list(rows.image_layouts[0]),
            call=pipeline_call(self.pipeline, family, args, rows),
            trained_on=rows.kind,
            method=self._name,
            settings=image_settings(args, rows, step, is_adapter, use_ema),
            rewards=reward_rows(history, *rewards),
            evaluations=evaluations,
            pictures=sorted(pictures),
            gallery=read_gallery_prompts(pictures),
        )
