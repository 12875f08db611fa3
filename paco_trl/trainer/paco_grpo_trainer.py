# SPDX-License-Identifier: Apache-2.0
"""PaCo-GRPO: group-relative policy optimisation of a flow-matching pipeline, at reduced resolution."""

import atexit
import inspect
import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL import Image
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.models.utils import add_hooks, remove_hooks
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import identity, is_async_callable, shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from ..data import check_image_set_columns, panel_size, split_grid
from ..rewards import aggregate_rewards
from ..rollout import PipelinePolicy, RecordedStep, SDESettings, cast_floating_inputs, family_of, replay
from .advantages import group_advantages
from .contact_sheet import (
    MAX_IMAGES,
    MAX_PROMPTS,
    TRACKERS_WITH_PICTURES,
    SheetImage,
    save_contact_sheet,
    send_to_trackers,
    thumbnail,
)
from .export import PUBLISHED_FILES, save_adapter, trainable_state_dict
from .loading import add_adapter, check_peft_config, load_pipeline
from .losses import clipped_surrogate, gaussian_kl
from .model_card import PAPER, render_model_card
from .paco_grpo_config import PaCoGRPOConfig
from .prompt_encoder import PromptEncoder
from .publishing import push_checkpoint
from .resolution import check_inference_size, training_size
from .reward_calls import check_reward_functions, check_reward_weights


logger = get_logger(__name__)

# What a random stream is for: the second word of its key, so that no two purposes share numbers
_STREAM_PROMPTS, _STREAM_BATCHES, _STREAM_SDE_STEPS, _STREAM_TRAIN_NOISE, _STREAM_EVAL_NOISE = range(5)


class PaCoGRPOTrainer(GRPOTrainer):
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
            `None` for an image that could not be scored: it is left out of its group's statistics and of the loss.
        args ([`PaCoGRPOConfig`], *optional*):
            Settings. If `None`, the paper's, with an output folder named after the model.
        train_dataset ([`~datasets.Dataset`]):
            Image-set prompts with the columns `prompt`, `rows`, `cols` and `panels`, optionally `height`, `width`, and
            any others that the rewards take. See [`~paco_trl.data.load_image_set_prompts`].
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Prompts of the same format for `evaluate()`.
        callbacks (`list[~transformers.TrainerCallback]`, *optional*):
            Callbacks.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler, as in [`~transformers.Trainer`].
        peft_config ([`~peft.LoraConfig`]):
            Adapter to train. `target_modules` are the family's when left out.

    Raises:
        ValueError: data, settings or model that cannot work; the message says what to do. What can be found out
            without the model is found out before it is loaded.
    """

    # The loss is divided by the images of the whole optimizer step, see `compute_loss`
    loss_is_scaled_for_ga = True

    _tag_names = ["paco-trl", "trl", "paco-grpo", "grpo", "lora"]
    _name = "PaCo-GRPO"
    _paper = PAPER

    def __init__(
        self,
        model: str | DiffusionPipeline,
        reward_funcs: Callable | list[Callable],
        args: PaCoGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        peft_config: LoraConfig | None = None,
    ):
        # 1. What can be checked without the model
        if args is None:
            # A pipeline that was put together in memory has no name
            name = model if isinstance(model, str) else model.name_or_path or type(model).__name__
            args = PaCoGRPOConfig(f"{Path(name).name}-PaCo-GRPO")
        if peft_config is None:
            raise ValueError(
                "`peft_config` is missing. The paper's adapter is `LoraConfig(r=64, lora_alpha=128, "
                "init_lora_weights='gaussian')`; training all weights of the transformer is not supported."
            )
        check_peft_config(peft_config)
        self.reward_funcs, self.reward_func_names = check_reward_functions(reward_funcs)
        self.reward_weights = check_reward_weights(
            args.reward_weights, self.reward_func_names, args.multi_objective_aggregation
        )
        self.layout = args.round_layout
        self._check_train_dataset(train_dataset, args)
        eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"evaluation": eval_dataset}
        eval_datasets = {name: dataset for name, dataset in eval_datasets.items() if dataset is not None}
        for name, dataset in eval_datasets.items():
            check_image_set_columns(dataset)
            self._check_panel_sizes(dataset, args, f"the dataset '{name}'")

        # 2. The pipeline, frozen, and its adapter. The adapter's weights are random: seed first.
        set_seed(args.seed)
        self.compute_dtype = torch.bfloat16 if args.bf16 else torch.float32
        is_deepspeed = args.deepspeed_plugin is not None
        self.pipeline = load_pipeline(
            model, self.compute_dtype, args.trust_remote_code, **(args.model_init_kwargs or {})
        )
        self.family = family_of(self.pipeline)
        self.size_multiple = self.family.size_multiple(self.pipeline)
        training_sizes = self._check_sizes(train_dataset, args, "the dataset")
        if len(training_sizes) > 1 and args.num_generations % args.per_device_train_batch_size != 0:
            raise ValueError(
                f"The dataset has images of {len(training_sizes)} training sizes ({sorted(training_sizes)}), so a "
                f"micro-batch must not cross prompts: `per_device_train_batch_size` "
                f"({args.per_device_train_batch_size}) must divide `num_generations` ({args.num_generations})."
            )
        for name, dataset in eval_datasets.items():
            self._check_sizes(dataset, args, f"the dataset '{name}'")
        signature = inspect.signature(self.pipeline.transformer.forward)
        if is_deepspeed:
            # Its default is the dtype of the model: hundreds of micro-batches would be added up in bf16
            args.deepspeed_plugin.deepspeed_config.setdefault("data_types", {"grad_accum_dtype": "fp32"})
        # DeepSpeed keeps one dtype and its own float32 masters: mixed dtypes fail in ZeRO-3 (trl#6089)
        peft_model = add_adapter(self.pipeline, self.family, peft_config, autocast_adapter_dtype=not is_deepspeed)
        self.policy = PipelinePolicy(self.pipeline, self.family, peft_model, signature)
        if self.compute_dtype != torch.float32:
            # The pipeline's latents are float32. Autocast takes care of the transformer, but not under DeepSpeed,
            # which switches it off; and nothing does for the VAE.
            if is_deepspeed:
                cast_floating_inputs(peft_model, self.compute_dtype)
            for name in ("post_quant_conv", "decoder"):
                module = getattr(self.pipeline.vae, name, None)
                if module is not None:
                    cast_floating_inputs(module, self.compute_dtype)

        # 3. Trainer. GRPOTrainer's own __init__ assumes a language model with a tokenizer, so it is skipped; what its
        # inherited methods read is set below (tests/test_contract.py lists it).
        _BaseTrainer.__init__(
            self,
            model=peft_model,
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

        # 4. Read by the inherited training_step, _calculate_rewards, log and _save_checkpoint
        self.reward_processing_classes = [None] * len(self.reward_funcs)
        self.environments = None
        self.log_completions = False  # TRL's table of texts; the contact sheets take its place
        self.use_adaptive_entropy = False
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._pending_extra_logs = defaultdict(list)
        self._pending_metrics = defaultdict(list)
        self._current_train_step_time = 0.0
        self._step = 0
        self._buffered_inputs = None
        if any(is_async_callable(function) for function in self.reward_funcs):
            self.async_loop_thread, self.async_loop, self.async_loop_ready_event = start_event_loop_in_daemon(
                name="PaCoGRPOTrainer-AsyncLoop"
            )
            self.async_loop_ready_event.wait()
            atexit.register(shutdown_event_loop_in_daemon, self.async_loop_thread, self.async_loop)

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
        self.prompt_encoder = PromptEncoder(self.pipeline, self.family, self.accelerator)
        self._buffered_round: int | None = None
        self._buffer_global_step: int | None = None
        self._window_stats: list[torch.Tensor] = []
        self._last_sheet: Image.Image | None = None
        self._encoded_for_max_steps: int | None = None
        self._round_metrics: dict[str, float] = {}
        self._round_time = self._drawing_time = self._train_time = 0.0
        if self.accelerator.is_main_process and not args.disable_tqdm:
            tqdm.write(self.layout.describe())  # with the progress bars: a log at level info would not be seen

    def _send_telemetry(self) -> None:
        """Nothing is sent. (TRL's telemetry also reads a model type that a diffusers config lacks.)"""

    # ---- Checks ----

    def _check_train_dataset(self, dataset: Dataset | None, args: PaCoGRPOConfig) -> None:
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"`train_dataset` must be a `datasets.Dataset`, got {type(dataset).__name__}: a round takes rows by "
                "number. Load a streamed dataset without `streaming=True`."
            )
        check_image_set_columns(dataset)
        if len(dataset) < self.layout.num_prompts:
            raise ValueError(
                f"The dataset has {len(dataset)} prompts, but a round takes {self.layout.num_prompts} different ones. "
                f"Set `num_prompts_per_generation` to at most {len(dataset)}, or add prompts. (A round: "
                f"{self.layout.describe()})"
            )
        self._check_panel_sizes(dataset, args, "the dataset")

    def _check_panel_sizes(self, dataset: Dataset, args: PaCoGRPOConfig, where: str) -> None:
        for index, (rows, cols, height, width) in enumerate(self._layouts_and_sizes(dataset, args)):
            try:
                panel_size(height, width, rows, cols)
            except ValueError as error:
                raise ValueError(f"Row {index} of {where}: {error}") from error

    def _check_sizes(self, dataset: Dataset, args: PaCoGRPOConfig, where: str) -> set[tuple[int, int]]:
        """Checks the sizes against the pipeline's needs; returns the training sizes."""
        training_sizes = set()
        for index, (rows, cols, height, width) in enumerate(self._layouts_and_sizes(dataset, args)):
            check_inference_size(height, width, rows, cols, self.size_multiple, f"row {index} of {where}")
            training_sizes.add(training_size(height, width, rows, cols, args.resolution_scale, self.size_multiple))
        return training_sizes

    @staticmethod
    def _layouts_and_sizes(dataset: Dataset, args: PaCoGRPOConfig):
        columns = dataset.column_names
        heights = dataset["height"] if "height" in columns else [None] * len(dataset)
        widths = dataset["width"] if "width" in columns else [None] * len(dataset)
        for rows, cols, height, width in zip(dataset["rows"], dataset["cols"], heights, widths, strict=True):
            yield rows, cols, height or args.height, width or args.width

    # ---- Data ----

    def get_train_dataloader(self) -> DataLoader:
        """
        A loader that only counts the micro-steps of an epoch.

        TRL's sampler yields every row again for each micro-step of a round (451,584 fetches for 672 images at the
        defaults). Here `_prepare_inputs` fetches the rows of a round once, by number, so that the order of prompts
        depends on the seed and the step alone: not on workers, and not on where a run was resumed.
        """
        # Trainer asks for it when training begins: what an earlier `train()` left behind is not this one's
        self._buffered_inputs, self._window_stats = None, []
        self._step, self._train_time = 0, 0.0
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
            order = np.random.default_rng((self.args.seed, _STREAM_PROMPTS, epoch)).permutation(order)
        return order[position * self.layout.num_prompts : (position + 1) * self.layout.num_prompts]

    def _sde_settings(self, round_index: int) -> SDESettings:
        """Stochastic steps of a round, the same for every image of every process."""
        steps = self.args.sde_steps
        if self.args.num_sde_steps is not None:
            generator = np.random.default_rng((self.args.seed, _STREAM_SDE_STEPS, round_index))
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
                    f"Training was resumed in the middle of round {round_index}, whose images are not in the "
                    "checkpoint: they are drawn again, with the weights as they are now. To resume exactly, save at "
                    "the end of a round: `save_steps` a multiple of "
                    f"{self.layout.num_optimizer_steps * self.num_iterations}."
                )
            started = time.perf_counter()
            self._buffered_inputs = None  # frees the old round before the new one is drawn
            self._buffered_inputs = self._generate_and_score_completions(round_index)
            self._round_time = time.perf_counter() - started
            self._drawing_time += self._round_time
            self._buffered_round = round_index
            self._buffer_global_step = self.state.global_step
        return self._buffered_inputs[position % self.layout.steps_per_generation]

    def _encode_prompts_of_run(self, first_round: int) -> None:
        """Encodes every prompt that the rest of the run needs, once; the text encoders are not used after it."""
        if self._encoded_for_max_steps == self.state.max_steps:
            return
        self._encoded_for_max_steps = self.state.max_steps
        steps_per_round = self.layout.num_optimizer_steps * self.num_iterations
        needed = set()
        for round_index in range(first_round, -(-self.state.max_steps // steps_per_round)):
            needed.update(self._rows_of_round(round_index).tolist())
            if len(needed) == len(self.train_dataset):
                break
        prompts = self.train_dataset["prompt"]
        self.prompt_encoder.encode([prompts[row] for row in sorted(needed)])

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
        row_numbers = self._rows_of_round(round_index)
        rows = self.train_dataset[row_numbers.tolist()]
        rows = [{name: column[i] for name, column in rows.items()} for i in range(len(row_numbers))]
        sizes = [
            training_size(
                row.get("height") or args.height,
                row.get("width") or args.width,
                row["rows"],
                row["cols"],
                args.resolution_scale,
                self.size_multiple,
            )
            for row in rows
        ]
        assignment = layout.assign(sizes, (args.seed, _STREAM_BATCHES, round_index))  # (processes, micro-batches, B)
        sde = self._sde_settings(round_index)
        self._encode_prompts_of_run(round_index)
        encoded = self.prompt_encoder.fetch([row["prompt"] for row in rows])
        encode_time = time.perf_counter() - started

        # 2. Draw
        started = time.perf_counter()
        mine = assignment[self.accelerator.process_index]  # (micro-batches, B)
        images, records = self._draw_round(round_index, mine, rows, row_numbers, sizes, encoded, sde)
        rollout_time = time.perf_counter() - started

        # 3. Score. Every process holds all rewards afterwards, in the order of the round.
        started = time.perf_counter()
        my_rows = [rows[image // layout.num_generations] for image in mine.flatten()]
        rewards_per_func, extra = self._score(my_rows, images, assignment.reshape(-1))  # prompt-major
        reward_time = time.perf_counter() - started

        # 4. Aggregate and normalise
        aggregated, details = aggregate_rewards(
            rewards_per_func.cpu(),
            self.reward_weights,
            args.multi_objective_aggregation,
            args.log_tame_threshold,
            layout.num_generations,
        )
        advantages, is_valid, has_spread = group_advantages(
            aggregated, layout.num_generations, args.scale_rewards, args.advantage_clip
        )
        if not is_valid.any():
            raise RuntimeError(
                f"No image of round {round_index} could be scored: every group of {layout.num_generations} has fewer "
                f"than two images that got a value from every reward ({', '.join(self.reward_func_names)}). There is "
                "nothing to learn from: look at why None is returned."
            )

        # 5. What is logged with each optimizer step of the round
        metrics = self._reward_metrics(rewards_per_func, aggregated)
        for name, h, tamed in zip(
            self.reward_func_names, details.coefficient_of_variation, details.tamed, strict=True
        ):
            if h is not None:  # undefined for a reward whose mean is not positive
                metrics[f"rewards/{name}/h"] = h
            metrics[f"rewards/{name}/tamed"] = float(tamed)
        metrics["frac_reward_zero_std"] = 1 - has_spread.float().mean().item()
        metrics["images_excluded"] = (~is_valid).sum().item()
        metrics["time/encode"] = encode_time
        metrics["time/rollout"] = rollout_time
        metrics["time/reward"] = reward_time
        metrics["rollout_images_per_second"] = layout.num_images / rollout_time
        self._round_metrics = metrics
        if args.log_completions:
            self._save_contact_sheet(
                f"round_{round_index:05d}", f"Round {round_index}, step {self.state.global_step}", rows,
                mine.flatten().tolist(), layout.num_generations, images, rewards_per_func, extra, advantages,
            )  # fmt: skip

        # 6. Keep what the training steps need
        return self._fill_buffer(assignment, records, sde, advantages, is_valid)

    def _draw_round(
        self,
        round_index: int,
        micro_batches: np.ndarray,
        rows: list[dict],
        row_numbers: np.ndarray,
        sizes: list[tuple[int, int]],
        encoded: dict,
        sde: SDESettings,
    ) -> tuple[list[Image.Image], list[list[RecordedStep]]]:
        """Draws this process's images of a round, and the stochastic steps of each micro-batch."""
        generations = self.layout.num_generations
        images: list[Image.Image] = []
        records: list[list[RecordedStep]] = []
        with self._rollout_components():
            for micro_batch in tqdm(
                micro_batches.tolist(),
                desc=f"Round {round_index}: drawing",
                disable=self.args.disable_tqdm or not self.accelerator.is_main_process,
                leave=False,
            ):
                prompts = [image // generations for image in micro_batch]
                drawn, recorded = self.policy.draw(
                    self._prompt_arguments([rows[prompt]["prompt"] for prompt in prompts], encoded),
                    *sizes[prompts[0]],
                    self.args.num_inference_steps,
                    self.args.guidance_scale,
                    noise_keys=[
                        self._noise_key(
                            _STREAM_TRAIN_NOISE, round_index, int(row_numbers[prompt]), image % generations
                        )
                        for prompt, image in zip(prompts, micro_batch, strict=True)
                    ],
                    sde=sde,
                )
                images.extend(drawn)
                records.append(recorded)
        return images, records

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

    def _noise_key(self, stream: int, round_index: int, row: int, generation: int) -> tuple[int, ...]:
        return (self.args.seed, stream, round_index, row, generation)

    def _prompt_arguments(self, prompts: list[str], encoded: dict) -> dict[str, torch.Tensor]:
        """
        Arguments of the pipeline's call for a micro-batch, float32 on the accelerator.

        Float32 embeddings make the pipeline keep its latents in float32. Images of one prompt share one copy, which
        the recorded calls refer to as well.
        """
        for prompt in dict.fromkeys(prompts):
            encoded[prompt] = {
                name: tensor.to(self.accelerator.device, torch.float32 if tensor.is_floating_point() else None)
                for name, tensor in encoded[prompt].items()
            }
        if len(set(prompts)) == 1:
            return {
                name: tensor.expand(len(prompts), *tensor.shape[1:]) for name, tensor in encoded[prompts[0]].items()
            }
        return {
            name: torch.cat([encoded[prompt][name] for prompt in prompts]) for name in encoded[prompts[0]]
        }  # (B, ...)

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
        is_zero3 = self.is_deepspeed_enabled and self.accelerator.deepspeed_plugin.zero_stage == 3
        if not is_zero3 or not self.args.ds3_gather_for_generation or self.model_wrapped is self.model:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            remove_hooks(self.model_wrapped)
            try:
                yield
            finally:
                add_hooks(self.model_wrapped)

    def _score(self, rows: list[dict], images: list[Image.Image], order: np.ndarray) -> tuple[torch.Tensor, dict]:
        """
        Scores this process's images and gathers the scores of all.

        `order` has, process by process, the number of each image; the results are sorted by it, and what appears twice
        counts once. Returns the rewards `(images, rewards)`, NaN where missing, and the columns that rewards logged
        (`log_extra`).
        """
        # Panels are cut once for all rewards
        inputs = [
            {**row, "panel_images": split_grid(image, row["rows"], row["cols"])}
            for row, image in zip(rows, images, strict=True)
        ]
        gathered = self._calculate_rewards(inputs, [row["prompt"] for row in rows], images, None)
        for column, values in self._pending_extra_logs.items():
            if len(values) != len(images):
                raise ValueError(
                    f"Rewards logged {len(values)} values in the column '{column}' (`log_extra`) for {len(images)} "
                    "images: give one for each image, and each reward columns of its own."
                )
        _, first = np.unique(order, return_index=True)  # where image 0, 1, 2 ... is
        extra = {}
        for column in sorted(set(gather_object(list(self._pending_extra_logs)))):
            values = gather_object(self._pending_extra_logs.get(column, [None] * len(images)))
            extra[column] = [values[index] for index in first]
        self._pending_extra_logs.clear()
        return gathered[torch.from_numpy(first).to(gathered.device)], extra

    def _reward_metrics(self, rewards_per_func: torch.Tensor, aggregated: torch.Tensor) -> dict[str, float]:
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
            metrics[f"rewards/{name}/missing"] = torch.isnan(rewards).sum().item()
        add_statistics("reward", "reward_std", aggregated)
        # Metrics that rewards logged themselves (`log_metric`), averaged over the processes
        for name in sorted(set(gather_object(list(self._pending_metrics)))):
            values = self._pending_metrics.get(name, [])
            local = torch.tensor([sum(values), len(values)], dtype=torch.float32, device=self.accelerator.device)
            total, count = self.accelerator.gather(local).view(-1, 2).sum(dim=0).tolist()
            metrics[name] = total / count
        self._pending_metrics.clear()
        return metrics

    def _save_contact_sheet(
        self,
        name: str,
        title: str,
        rows: list[dict],
        numbers: list[int],
        num_generations: int,
        images: list[Image.Image],
        rewards_per_func: torch.Tensor,
        extra: dict[str, list],
        advantages: torch.Tensor | None = None,
    ) -> None:
        """Saves pictures and scores of the first prompts; `numbers` are those of `images` in the round."""
        mine = []
        for number, image in zip(numbers, images, strict=True):
            prompt, generation = divmod(number, num_generations)
            if prompt < MAX_PROMPTS and generation < MAX_IMAGES:
                mine.append(SheetImage(prompt, generation, thumbnail(image), rows[prompt]["prompt"]))
        gathered = gather_object(mine)
        if not self.accelerator.is_main_process:
            return
        scores = []
        for number, values in enumerate(rewards_per_func.tolist()):
            values = [None if value != value else round(value, 6) for value in values]  # NaN is missing
            score = dict(zip(self.reward_func_names, values, strict=True))
            if advantages is not None:
                score["advantage"] = round(advantages[number].item(), 6)
            scores.append(score)
        for image in gathered:
            score = scores[image.prompt * num_generations + image.generation]
            image.caption = "\n".join(f"{key} {'none' if v is None else f'{v:.3f}'}" for key, v in score.items())
        folder = Path(self.args.output_dir) / "contact_sheets"
        sheet = save_contact_sheet(gathered, title, folder / f"{name}.png")
        if advantages is not None:
            self._last_sheet = sheet  # of a training round, for the card
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for number, score in enumerate(scores):
                prompt, generation = divmod(number, num_generations)
                columns = {column: values[number] for column, values in extra.items()}
                entry = {"prompt": rows[prompt]["prompt"], "generation": generation, **score, **columns}
                file.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
        send_to_trackers(sheet, "contact_sheet", self.state.global_step, self.callback_handler.callbacks)

    # ---- Loss ----

    def training_step(self, model, inputs, num_items_in_batch=None):
        """As in TRL; times the forwards and backwards of an optimizer step, without the drawing of its round."""
        started, drawn_before = time.perf_counter(), self._drawing_time
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._train_time += time.perf_counter() - started - (self._drawing_time - drawn_before)
        if self.accelerator.sync_gradients:
            steps_per_round = self.layout.num_optimizer_steps * self.num_iterations
            metrics = self._metrics["train"]
            metrics["time/train"].append(self._train_time)
            metrics["images_per_second"].append(
                self.layout.num_images / (self._round_time + steps_per_round * self._train_time)
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
            # The reference is the model without its adapter
            with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
                _, ref_mean, _ = replay(model, record, self.family, self.args.guidance_scale, sde)

        log_prob, mean, std = replay(model, record, self.family, self.args.guidance_scale, sde)
        surrogate = clipped_surrogate(log_prob, record.log_prob, advantages, self.epsilon_low, self.epsilon_high)
        loss = surrogate.loss  # (B,)
        kl = torch.zeros_like(loss)
        if ref_mean is not None:
            kl = gaussian_kl(mean, ref_mean, std)
            loss = loss + self.beta * kl
        self._record_step(record, surrogate, kl.detach(), inputs["weights"])
        return (loss * inputs["weights"]).sum() * self.accelerator.num_processes

    def _record_step(self, record: RecordedStep, surrogate, kl: torch.Tensor, weights: torch.Tensor) -> None:
        """Collects what is logged, and gathers it once for each optimizer step; tests the ratio before the first."""
        columns = [
            torch.full_like(kl, record.index),
            (surrogate.ratio - 1).abs(),
            surrogate.is_low_clipped.float(),
            surrogate.is_high_clipped.float(),
            kl,
            (weights > 0).float(),
            torch.full_like(kl, record.sigma),
        ]
        self._window_stats.append(torch.stack(columns, dim=1))  # (B, 7)

        is_on_policy = self.state.global_step == self._buffer_global_step
        if is_on_policy and self.state.global_step == self._initial_global_step:
            if len(self._window_stats) % self.layout.num_trained_steps == 0:  # an image's steps are complete
                self._test_ratio()

        if not self.accelerator.sync_gradients:
            return
        stats = self.accelerator.gather(torch.cat(self._window_stats)).cpu()  # (images and steps, 7)
        self._window_stats = []
        index, deviation, low, high, kl, valid, _ = stats.T
        if not torch.isfinite(stats).all():
            raise RuntimeError(
                f"The probability ratio or the KL divergence is not finite at optimizer step {self.state.global_step} "
                f"({int((~torch.isfinite(stats).all(dim=1)).sum())} of {len(stats)} micro-batch rows). The weights or "
                "the latents have overflowed; lower `learning_rate`, or train in float32."
            )
        metrics = self._metrics["train"]
        for name, value in self._round_metrics.items():
            metrics[name].append(value)
        # Until the first update of a round, model and rollout are the same: a deviation is numerical noise
        name = "ratio_deviation_on_policy" if is_on_policy else "ratio_deviation"
        for step in index.unique():
            metrics[f"{name}/step_{int(step)}"].append(deviation[index == step].mean().item())
        count = valid.sum().clamp(min=1)
        metrics["clip_ratio/low_mean"].append(((low * valid).sum() / count).item())
        metrics["clip_ratio/high_mean"].append(((high * valid).sum() / count).item())
        metrics["clip_ratio/region_mean"].append((((low + high) * valid).sum() / count).item())
        if self.beta > 0:
            metrics["kl"].append(((kl * valid).sum() / count).item())

    def _test_ratio(self) -> None:
        """Stops a run whose replay does not give the rollout's log-probabilities, before it has learned from them."""
        local = torch.cat(self._window_stats[-self.layout.num_trained_steps :])
        stats = self.accelerator.gather(local).cpu()  # every process sees the same and stops, or none does
        worst = stats[:, 1].max().item()
        if worst <= self.args.ratio_tolerance:
            return
        lines = ["step    sigma   mean |ratio - 1|    max |ratio - 1|"]
        for step in stats[:, 0].unique():
            of_step = stats[stats[:, 0] == step]
            lines.append(
                f"{int(step):4d}   {of_step[0, 6]:.4f}   {of_step[:, 1].mean():16.3e}   {of_step[:, 1].max():16.3e}"
            )
        raise RuntimeError(
            f"Before the first update the replayed log-probabilities must be those of the rollout, but |ratio - 1| is "
            f"up to {worst:.3g}, above `ratio_tolerance` = {self.args.ratio_tolerance:.3g} (`epsilon` is "
            f"{self.args.epsilon:g}):\n"
            + "\n".join(lines)
            + "\nThe model draws with other numbers than it is trained "
            "with: look for dropout, for layers that behave differently with gradients, for a compiled replay. In bf16 "
            "on an accelerator a deviation below `epsilon` can be rounding: measure it, and set `ratio_tolerance`."
        )

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Draws the evaluation prompts at full inference resolution, by the pipeline's ODE and with fixed noise for each
        prompt, and scores them with the training rewards.

        Args:
            eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
                Prompts. If `None`, the trainer's `eval_dataset`.
            ignore_keys (`list[str]`, *optional*):
                Not used.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`):
                Prefix of the metrics.

        Returns:
            `dict[str, float]`: `eval_reward` (the weighted sum) and `eval_reward_std`, `eval_rewards/<name>/mean`,
            `.../std` and `.../missing`. What cannot be said (the deviation of a single image) is left out.
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
        args, generations = self.args, self.args.num_generations_eval
        check_image_set_columns(eval_dataset)
        self._check_sizes(eval_dataset, args, "the evaluation dataset")
        rows = list(eval_dataset)
        self.prompt_encoder.encode([row["prompt"] for row in rows])

        # Each process draws the same number of images, as ZeRO-3 needs; what was added for that is not counted
        processes = self.accelerator.num_processes
        total = len(rows) * generations
        padded = (np.arange(-(-total // processes) * processes) % total).reshape(-1, processes)
        mine = padded[:, self.accelerator.process_index].tolist()
        was_training = self.model.training
        self.model.eval()
        images = []
        with self._rollout_components():
            for numbers in tqdm(
                padded.tolist(), desc="Evaluating", disable=args.disable_tqdm or not self.accelerator.is_main_process
            ):
                encoded = self.prompt_encoder.fetch([rows[number // generations]["prompt"] for number in numbers])
                row_number, generation = divmod(numbers[self.accelerator.process_index], generations)
                row = rows[row_number]
                drawn, _ = self.policy.draw(
                    self._prompt_arguments([row["prompt"]], encoded),
                    row.get("height") or args.height,
                    row.get("width") or args.width,
                    args.num_inference_steps_eval,
                    args.guidance_scale,
                    noise_keys=[self._noise_key(_STREAM_EVAL_NOISE, 0, row_number, generation)],
                )
                images.extend(drawn)
        # Process by process; the padding repeats numbers
        rewards_per_func, extra = self._score([rows[n // generations] for n in mine], images, padded.T.reshape(-1))
        weighted, _ = aggregate_rewards(rewards_per_func.cpu(), self.reward_weights, "sum_then_normalize")
        metrics = {
            f"{metric_key_prefix}_{name}": value
            for name, value in self._reward_metrics(rewards_per_func, weighted).items()
        }
        if args.log_completions:
            self._save_contact_sheet(
                f"{metric_key_prefix}_step_{self.state.global_step:06d}",
                f"Evaluation, step {self.state.global_step}",
                rows,
                mine,
                generations,
                images,
                rewards_per_func,
                extra,
            )
        self.log(dict(metrics))
        self.model.train(was_training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # ---- Checkpoints and the Hub ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Saves the adapter in PEFT's and diffusers' formats, with its card. Every process calls it.

        Args:
            output_dir (`str`, *optional*):
                Folder. If `None`, `args.output_dir`.
        """
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        # An engine exists from the beginning of `train()` on
        has_engine = self.is_deepspeed_enabled and self.model_wrapped is not self.model
        state_dict = trainable_state_dict(self.model, has_engine)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            save_adapter(self.model, self.pipeline, state_dict, folder)
            if self._last_sheet is not None:
                self._last_sheet.save(folder / "contact_sheet.png")
            render_model_card(self).save(folder / "README.md")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """
        Writes the model card into `args.output_dir`.

        Args:
            model_name (`str`, *optional*):
                Title of the card. If `None`, the name of the Hub repository or of the output folder.
            dataset_name (`str`, *optional*):
                Hub id of the dataset.
            tags (`str` or `list[str]`, *optional*):
                Further tags.
        """
        if self.is_world_process_zero():
            card = render_model_card(self, model_name, dataset_name, tags)
            card.save(Path(self.args.output_dir) / "README.md")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        push_checkpoint(self, checkpoint_folder, PUBLISHED_FILES)
