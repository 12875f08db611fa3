# SPDX-License-Identifier: Apache-2.0
"""Base trainer: starting, contents of checkpoints, card."""

import time
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from trl import GRPOTrainer

from ..cards import ImageModelCard, save_card
from ..checkpointing.checkpoint_files import (
    EMA_WEIGHTS,
    POLICY_WEIGHTS,
    check_weights,
    load_round,
    round_file,
)
from ..checkpointing.checkpoints import (
    check_output_folder,
    check_resumed_run,
    delete_run,
    find_checkpoint,
    read_run,
)
from ..checkpointing.ema import EMA
from ..checkpointing.export import save_trained
from ..checkpointing.weights import gather_weights, load_weights, local_weights, zero_stage_of
from ..hub.files import PIPELINE_ADAPTER, TRANSFORMER
from ..plots.curves import CurvesCallback
from ..plots.figures import FigureThread
from ..rewards.reward_calls import RewardError
from ..rollout import RecordedStep
from ..rollout.loading import base_model_name, pipeline_quantization
from ..utils.deepspeed import partition
from ..utils.files import sole_writer
from .evaluator import Evaluator
from .model_cards import (
    evaluation_rows,
    gallery_of,
    image_settings,
    latest_pictures,
    lora_of,
    pipeline_call,
    reward_rows,
)
from .paco_grpo_config import PaCoGRPOConfig
from .refusals import end_explained, memory_explained
from .resuming import ResumesExactly, RunCallback
from .rounds import RoundBuffer
from .run_settings import AFTER_GENERATION, adjustable_settings, reference_setting, run_identity
from .training_time import TrainingTimeCallback
from .transfer_report import compared_rows, report_resolution_transfer, report_tail_transfer


logger = get_logger(__name__)


class PaCoBaseTrainer(ResumesExactly, GRPOTrainer):
    """Base of [`PaCoGRPOTrainer`]: exact resuming, atomic checkpoints, model card and Hub."""

    _config_class = PaCoGRPOConfig
    _record_class = RecordedStep  # in the entries of the buffer
    loaded_step: int | None = None  # of the checkpoint that `load_best_model_at_end` has loaded

    # ---- Start, resume and stop ----

    def _open_run(
        self, args: PaCoGRPOConfig, model: str | DiffusionPipeline, peft_config: LoraConfig | str | None
    ) -> None:
        """Identify the run, and check the output directory and the Hub, before a model is loaded."""
        self.base_model = base_model_name(model)
        self.trained_from = base_model_name(peft_config) if isinstance(peft_config, str) else None
        self._reference_setting = reference_setting(args, peft_config)
        self.averages: dict[str, EMA] = {}  # by file, from the start of `train()`
        loaded = pipeline_quantization(model) if isinstance(model, DiffusionPipeline) else None
        self._identity = run_identity(args, self.base_model, loaded, peft_config, self.train_rows)
        with sole_writer(args.output_dir, "checkpoints", is_inside=True):
            pass  # a run that is training refuses this one before its model is loaded
        self._checked = find_checkpoint(args.output_dir, args.resume_from_checkpoint)
        if self._checked is not None:
            self._check_resumed_run(self._checked, args)
        elif not args.overwrite_output_dir:
            check_output_folder(args.output_dir, self._identity)
        self.published_files = TRANSFORMER if peft_config is None else PIPELINE_ADAPTER
        source = model if isinstance(model, str) else getattr(model, "name_or_path", None)
        self._base_model_source = source and str(source)  # may be a Path
        if args.push_to_hub:
            self._prepare_hub(args)

    def _add_callbacks(self) -> None:
        self.figure_thread = FigureThread()
        events = {"on_optimizer_step": self._update_averages, "on_step_end": self._end_step}
        # The trackers, which get the sheets, close when training ends
        events |= {"on_train_begin": self._begin_run, "on_epoch_end": self.figure_thread.wait}
        self.add_callback(RunCallback(**events))
        self.add_callback(TrainingTimeCallback())
        self.add_callback(CurvesCallback(self.args.plot_curves, self.figure_thread.submit))

    @property
    def _is_zero3(self) -> bool:
        return self.is_deepspeed_enabled and self.accelerator.deepspeed_plugin.zero_stage == 3

    @property
    def zero_stage(self) -> int:
        """Stage of the DeepSpeed engine; 0 without one, and before `train()` creates it."""
        return zero_stage_of(self.accelerator, self.model, self.model_wrapped)

    @property
    def ema(self) -> EMA | None:
        """The average of the trained weights."""
        return self.averages.get(EMA_WEIGHTS)

    def _adjustable_settings(self, args: PaCoGRPOConfig) -> dict[str, Any]:
        settings = adjustable_settings(args, self.rewards, self.eval_rewards)
        return settings | {"reference": self._reference_setting}

    def _check_resumed_run(self, checkpoint: Path, args: PaCoGRPOConfig) -> None:
        settings = self._adjustable_settings(args)
        check_resumed_run(checkpoint, self._identity, settings, args.world_size, args.deepspeed_plugin is not None)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """
        Train as [`~transformers.Trainer.train`] does; resuming is exact, to the bit on the CPU or with deterministic kernels.

        `resume_from_checkpoint` is a directory, `True` (the latest complete checkpoint of `output_dir`), or `"auto"`: the
        latest if there is one. SIGTERM and SIGUSR1 write a checkpoint and end the process (`enable_jit_checkpoint`).
        """
        output_dir = self.args.output_dir
        with sole_writer(output_dir, "checkpoints", is_inside=True) as mark, end_explained(output_dir, mark):
            return self._train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train(self, resume_from_checkpoint, trial, ignore_keys_for_eval):
        args = self.args
        checkpoint = find_checkpoint(args.output_dir, resume_from_checkpoint)
        if checkpoint is None and args.overwrite_output_dir:
            if args.should_save:
                delete_run(args.output_dir)
        elif checkpoint is None and resume_from_checkpoint != "auto":
            check_output_folder(args.output_dir, self._identity, self._adjustable_settings(args))
        elif checkpoint not in (None, self._checked):
            self._check_resumed_run(checkpoint, args)
        if checkpoint is not None:
            check_weights(self.model, checkpoint)
        self.loaded_step = None
        if self._is_zero3:
            engine = self.accelerator.deepspeed_plugin.deepspeed_config
            partition(self.model, self.accelerator.device, self.compute_dtype, engine)
        with self._resumable(checkpoint):
            try:
                with self.figure_thread, memory_explained():
                    return super().train(None if checkpoint is None else str(checkpoint), trial, ignore_keys_for_eval)
            except RewardError as error:
                # `RewardScorer` raises it on every process
                folder = self._save_before_stop()
                how = "Nothing was trained yet: restart the run when the reward works."
                if folder is not None:
                    steps = self.state.global_step
                    how = f"The {steps} steps before it are in '{folder}': resume with `resume_from_checkpoint=True`."
                raise RewardError(f"{error} {how}") from error

    def _prepare_for_training(self, *args, **kwargs):
        """Encode the prompts of the run, then place the weights: text encoders never share the accelerator with them."""
        started = time.perf_counter()
        self._encode_run()
        self._encode_time = time.perf_counter() - started
        return super()._prepare_for_training(*args, **kwargs)

    def _encode_run(self) -> None:
        """Encode the prompts and source images that the rest of the run needs."""
        args, rows, encode = self.args, self.train_rows, self.sampler.encode
        first_round = -(-self.state.global_step // self.schedule.optimizer_steps_per_round)
        needed, compared = self.schedule.remaining_rows(self.state.max_steps, first_round), []
        if self._resumed_from is None:
            compared = compared_rows(args, "resolution_transfer", rows)
            needed += [*compared, *compared_rows(args, "tail_transfer", rows)]
        encode(rows, needed, args.resolution_scale)
        encode(rows, compared)
        if args.eval_strategy != "no" or args.eval_on_start:
            for dataset in self._eval_datasets().values():
                rows = self.evaluator.rows_of(dataset)
                encode(rows, list(range(len(rows))))

    def _eval_datasets(self) -> dict[str, Dataset]:
        """Return the evaluation datasets by the prefix of their metrics."""
        named = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        return {f"eval_{name}" if name else "eval": dataset for name, dataset in named.items()}

    def _begin_run(self) -> None:
        """Prepare the run once the weights are placed, before the first step."""
        checkpoint, args = self._resumed_from, self.args
        self.averages = {}
        for file, decay in self._average_decays().items():
            self.averages[file] = EMA(self.model, decay, self.zero_stage, args.ema_offload)
            if checkpoint is not None and (checkpoint / file).exists():
                self.averages[file].load_state_dict(load_file(checkpoint / file))
            elif checkpoint is not None and file != EMA_WEIGHTS:  # EMA may start here
                raise ValueError(
                    f"'{checkpoint}' has no {file}, the old policy's weights that this run continues with. "
                    "Pass the directory as `peft_config` and set another `output_dir` to continue from its adapter."
                )
        if checkpoint is not None:
            self._load_round(checkpoint)
        elif args.resolution_transfer_prompts or args.tail_transfer_prompts:
            self.model.eval()
            evaluator = Evaluator(self.sampler, self.rewards, self.scorer, args)
            if args.resolution_transfer_prompts:
                report_resolution_transfer(evaluator, self.train_rows, self.state)
            if args.tail_transfer_prompts:
                report_tail_transfer(evaluator, self.train_rows, self.state, self.schedule.sde(round_index=0))
            self.model.train()
        if not isinstance(self.model, PeftModel) and args.eval_strategy != "no" and not args.eval_on_start:
            # The untrained weights are lost after the first step
            self.model.eval()
            for name, dataset in self._eval_datasets().items():
                self._baseline(self.evaluator.rows_of(dataset), name)
            self.model.train()
        super()._begin_run()

    def _average_decays(self) -> dict[str, float]:
        """Return the decay of each average of the weights, by its file."""
        return {} if self.args.ema_decay is None else {EMA_WEIGHTS: self.args.ema_decay}

    def _update_averages(self) -> None:
        """Update the average after each update of the weights."""
        if self.ema is not None:
            self.ema.step()

    def _end_step(self) -> None:
        """Finish an optimizer step, before its checkpoint is written."""

    # ---- Checkpoints ----

    def _run_record(self) -> dict[str, Any]:
        identity, course = self._identity, self._adjustable_settings(self.args)
        return super()._run_record() | {
            "identity": identity, "course": course, "is_round_pending": self.is_round_pending
        }  # fmt: skip

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
                whole = average.state_dict(self.args.should_save)
                if self.args.should_save:
                    save_file(whole, folder / file)

    def _write_state(self, folder: Path) -> None:
        super()._write_state(folder)
        if self.is_round_pending:
            torch.save(self.buffer.state_dict(), round_file(folder, self.accelerator.process_index))

    def _load_round(self, checkpoint: Path) -> None:
        """Restore a pending round, if it was divided over as many processes."""
        index, run = self.accelerator.process_index, read_run(checkpoint) or {}
        if not round_file(checkpoint, index).exists() or run["num_processes"] != self.accelerator.num_processes:
            return
        settings = self._adjustable_settings(self.args)
        before = [name for name in settings | run["course"] if name.split("/")[0] not in AFTER_GENERATION]
        if changed := [name for name in before if run["course"].get(name) != settings.get(name)]:
            message = f"'{checkpoint}' is in the middle of a round that was generated with other values of"
            logger.warning(f"{message} {', '.join(changed)}: it is generated again.")
            return
        device, is_offloaded = self.accelerator.device, self.args.offload_embeddings
        state = load_round(checkpoint, index, device, is_offloaded)
        sde = self.schedule.sde(state["round"])
        self.buffer = RoundBuffer.from_state_dict(state, self._record_class, sde, device, is_offloaded)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Load the trained weights, not their average that a checkpoint exports."""
        load_weights(self.model, load_file(Path(resume_from_checkpoint) / POLICY_WEIGHTS), zero_stage=0)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights as they were evaluated."""
        best = Path(self.state.best_model_checkpoint)
        whole = load_file(best / (EMA_WEIGHTS if (best / EMA_WEIGHTS).exists() else POLICY_WEIGHTS))
        load_weights(self.model, whole, self.zero_stage)
        if self.ema is not None:
            self.ema.load_state_dict(whole)
        self.loaded_step = self.state.best_global_step

    # ---- Files, card, Hub ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, use_ema: bool = True) -> None:
        """
        Save trained weights, card and images. Every process calls it.

        With `ema_decay` (0.9 by default) the weights are their moving average, as in evaluations and checkpoints, while
        `trainer.model` holds those of the last step: `use_ema=False` saves these. `trainer.ema.average` has the average
        by name.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        keep = self.args.should_save
        if self.ema is not None and use_ema:
            whole = self.ema.state_dict(keep)
        else:
            whole = gather_weights(self.model, local_weights(self.model, self.zero_stage), self.zero_stage, keep)
        if keep:
            self._save_trained(whole, folder, use_ema)
        if self.args.push_to_hub and not _internal_call:
            self._push_saved(folder)

    def _save_trained(self, whole: dict[str, torch.Tensor], folder: str | Path, use_ema: bool = True) -> None:
        save_trained(self.model, self.pipeline, whole, folder)
        save_card(self._model_card(use_ema=use_ema), folder)

    def _model_card(self, use_ema: bool = True, **fields) -> ImageModelCard:
        """Fill in the current card of the averaged weights, or of those of the last step."""
        self.figure_thread.wait()  # the card shows it
        args, family, prompts = self.args, self.family, self.train_rows
        step = self.state.global_step if self.loaded_step is None else self.loaded_step
        history = [entry for entry in self.state.log_history if entry["step"] <= step]
        # A pipeline that was built in memory has no name
        base_model = self.pipeline.name_or_path or type(self.pipeline).__name__
        is_adapter = isinstance(self.model, PeftModel)
        rewards = (self.reward_funcs, self.reward_func_names, self.reward_weights.tolist())
        evaluations, judges = [], self.evaluator.rewards
        if use_ema or args.ema_decay is None:  # evaluations are of the average
            datasets = [*self.eval_dataset] if isinstance(self.eval_dataset, dict) else [None]
            evaluations = evaluation_rows(history, datasets, judges.functions, judges.names)
        pictures = latest_pictures(args, step, use_ema)
        return ImageModelCard(
            **self._card_fields(base_model, step=step, **fields),
            lora=lora_of(self.model, self.trained_from, self.quantization),
            weights="adapter" if is_adapter else "transformer",
            formats=[*["diffusers"] * hasattr(self.pipeline, "load_lora_weights"), "peft"],
            pipeline_class=type(self.pipeline).__name__,
            transformer_class=type(self.policy.pipeline.transformer).__name__,
            dtype=str(self.compute_dtype).removeprefix("torch."),
            device=self.accelerator.device.type,
            prompt=prompts.prompts[0],
            layout=list(prompts.layouts[0]),
            call=pipeline_call(self.pipeline, family, args, prompts),
            trained_on=prompts.kind,
            method=self._name,
            settings=image_settings(args, prompts, self.prompt_encoder.negative_prompt, step, is_adapter, use_ema),
            rewards=reward_rows(history, *rewards),
            evaluations=evaluations,
            pictures=pictures,
            gallery=gallery_of(pictures),
        )

    def _save_with_card(self, use_ema: bool = True, **kwargs) -> None:
        self.save_model(_internal_call=True, use_ema=use_ema)
        self.create_model_card(use_ema=use_ema, **kwargs)
