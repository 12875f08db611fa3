# SPDX-License-Identifier: Apache-2.0
"""PaCo-Reward: fine-tuning of a vision-language model to judge whether two images are consistent, and why."""

import copy
import os
import re
from collections.abc import Callable
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from accelerate.utils import recursively_apply
from datasets import Dataset
from peft import LoraConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedModel,
    ProcessorMixin,
    TrainerCallback,
)
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer_utils import IntervalStrategy
from trl import SFTTrainer
from trl.trainer.utils import get_config_model_id, maybe_gather_lm_head_ctx

from ..checkpointing.weights import gather_weights, get_zero_stage, load_weights, local_weights, trained_parameters
from ..data.pairs import common_question
from ..evaluation import auroc, expected_calibration_error
from ..hub.card_data import JudgeCardData
from ..hub.cards import saving_model
from ..hub.files import JUDGE_ADAPTER
from ..plots.reward_report import plot_calibration, plot_wrong_pairs
from ..plots.trackers import send_to_trackers
from ..rewards.paco_reward import PaCoReward, decision_direction, decision_token_ids, scales_logits
from ..rollout.adapters import check_lora_start, check_target_modules
from ..rollout.loading import base_model_name
from ..utils.deepspeed import without_zero3_init
from ..utils.errors import OptionError
from ..utils.files import write_atomically
from ..utils.fingerprint import describe, weights_fingerprint
from ..utils.fsdp import full, prepare_sharding
from ..utils.images import to_png
from ..utils.locks import sole_writer
from ..utils.logs import get_logger
from ..utils.option_checks import uses_fsdp
from ..utils.papers import PAPER
from ..utils.quantization import avoid_packed_nf4, describe_quantization
from ..utils.stopping import agree, ignore_stop_in_workers, raise_stop
from ..utils.vision_language import limit_pixels, pixel_limit, tower_arguments
from .checks import check_has_evaluation, check_pairs, warn_of_trained_pairs
from .config_utils import check_best_metric, check_optimizer_class, copy_config
from .console import use_console
from .data_collator import PairCollator, PairRows, PairSampler
from .first_token_loss import first_token_weights, num_loss_items, token_weights
from .model_cards import describe_lora, judge_settings
from .paco_reward_config import PaCoRewardConfig
from .resuming import ExactResumeMixin, FunctionCallback, end_explained, without_jit_checkpoint
from .run_settings import describe_run


logger = get_logger(__name__)

# Several processes agree at this interval on whether to stop an evaluation: it waits for the device
_BATCHES_PER_AGREEMENT = 8


# ---- Model ----


def language_model_targets(model: PreTrainedModel) -> str:
    """Match the linear layers of the language model for `LoraConfig.target_modules`; all else stays frozen."""
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    layers = {name.split(".")[-1] for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    return rf"{re.escape(name)}\..*\.({'|'.join(sorted(layers))})"


def disable_vision_tower_grad(model: PreTrainedModel, grids: list[list[int]]) -> None:
    """Run the vision tower without gradients while nothing in it trains; `grids` has the patch grids, or nothing."""
    tower = model.get_encoder("image")
    if model.get_decoder() not in tower.modules():  # else the model has no separate tower
        forward = tower.forward
        tower.forward = update_wrapper(partial(_forward_tower, tower, forward, grids), forward)


def _forward_tower(tower: PreTrainedModel, forward: Callable, grids: list[list[int]], *args, **kwargs):
    if grids:
        kwargs |= tower_arguments(tower, torch.tensor(grids), tower.device)
        grids.clear()  # another call has other images
    # With gradient checkpointing, transformers makes the tower's patches require gradients
    # (`enable_input_require_grads`), so that frozen blocks would be recomputed and differentiated for nothing
    trains = any(parameter.requires_grad for parameter in tower.parameters())
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        return forward(*args, **kwargs)


def complete_peft_config(
    peft_config: LoraConfig | None, model: str | PreTrainedModel, revision: str | None, trust_remote_code: bool
) -> LoraConfig:
    """Fill in the paper's adapter, the task type and the layers of the language model where left out; check layers."""
    if peft_config is None:
        peft_config = LoraConfig(r=32, lora_alpha=64)  # the paper's
    if not isinstance(peft_config, LoraConfig):
        raise TypeError(
            f"`peft_config` is a {type(peft_config).__name__}; it must be a `peft.LoraConfig`. To continue an "
            "adapter, pass `PeftModel.from_pretrained(model, adapter)` as `model`."
        )
    check_lora_start(peft_config)
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type, peft_config.inference_mode = "CAUSAL_LM", False  # `from_pretrained` sets it to True
    if isinstance(peft_config.target_modules, str):  # a pattern
        return peft_config
    if isinstance(model, str):
        # SFTTrainer loads it later: build it without weights for the names of its layers
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
        with without_zero3_init(), torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config, trust_remote_code=trust_remote_code)
    if peft_config.target_modules is None:
        peft_config.target_modules = language_model_targets(model)
    check_target_modules(peft_config, model)
    return peft_config


# ---- Metrics ----

# All metrics of an evaluation
METRICS = (
    "loss", "decision_loss", "decision_accuracy", "ece", "reasoning_loss", "p_yes/consistent", "p_yes/inconsistent",
    "auroc",
)  # fmt: skip


class Decisions(NamedTuple):
    """Decisions on a batch of pairs: detached float32 tensors of shape (B,)."""

    p_yes: torch.Tensor  # P(Yes) / (P(Yes) + P(No))
    is_yes: torch.Tensor  # 1 where the completion starts with Yes
    decision_loss: torch.Tensor  # -log p of the decision token in the full vocabulary
    reasoning_loss: torch.Tensor  # sum of -log p over the other tokens of the completion
    num_reasoning: torch.Tensor  # number of these


def decision_sums(decisions: Decisions) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Sum each metric of some decisions, with its denominator."""
    p_yes, is_yes, decision_loss, reasoning_loss, num_reasoning = decisions
    pairs = torch.ones_like(p_yes).sum()
    is_right = (p_yes > 0.5) == (is_yes == 1)
    return {
        "decision_loss": (decision_loss.sum(), pairs),
        "reasoning_loss": (reasoning_loss.sum(), num_reasoning.sum()),
        "decision_accuracy": (is_right.to(p_yes.dtype).sum(), pairs),
        "p_yes/consistent": ((p_yes * is_yes).sum(), is_yes.sum()),
        "p_yes/inconsistent": ((p_yes * (1 - is_yes)).sum(), (1 - is_yes).sum()),
    }


def metric_sums(decisions: Decisions, outputs, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sum each metric over a batch, with its denominator. All stays on the accelerator until the next log."""
    p_yes = decisions.p_yes
    tokens = (decisions.num_reasoning + 1).sum()
    sums = decision_sums(decisions) | {
        "entropy": (outputs.entropy.detach().float().sum(), tokens),
        "mean_token_accuracy": (outputs.is_top1.float().sum(), tokens),
        "attended": (attention_mask.float().sum().to(p_yes.device), p_yes.new_full((), attention_mask.numel())),
    }
    return {name: torch.stack(pair) for name, pair in sums.items()}


def evaluation_metrics(decisions: Decisions, first_token_weight: float | None, loss_variant: str) -> dict[str, float]:
    """Compute the metrics of an evaluation; AUROC is left out when all pairs have the same answer."""
    p_yes, is_yes, decision_loss, reasoning_loss, num_reasoning = decisions
    length = num_reasoning + 1
    first, rest = token_weights(length, first_token_weight, loss_variant)
    num_items = num_loss_items(length, first_token_weight, loss_variant).item()
    metrics = {
        "loss": (first * decision_loss + rest * reasoning_loss).sum().item() / num_items,
        "ece": expected_calibration_error(p_yes.numpy(), is_yes.numpy()),
    }
    sums = decision_sums(decisions).items()
    metrics |= {name: (total / count).item() for name, (total, count) in sums if count > 0}
    if 0 < is_yes.sum() < len(is_yes):
        metrics["auroc"] = auroc(p_yes.numpy(), is_yes.numpy())
    else:
        logger.warning(f"All {len(is_yes)} evaluation pairs have the same answer: AUROC is undefined and left out.")
    return metrics


# ---- Trainer ----


class PaCoRewardTrainer(ExactResumeMixin, SFTTrainer):
    """
    Trainer for PaCo-Reward, the pairwise consistency judge proposed in [PaCo-RL: Advancing Reinforcement Learning for
    Consistent Image Generation with Pairwise Reward Modeling](https://huggingface.co/papers/2512.04784).

    Example:

    ```python
    from paco_trl import PaCoRewardConfig, PaCoRewardTrainer
    from paco_trl.data import load_paco_dataset

    trainer = PaCoRewardTrainer(
        model="Qwen/Qwen2.5-VL-7B-Instruct",
        args=PaCoRewardConfig(output_dir="paco-reward"),
        train_dataset=load_paco_dataset("X-GenGroup/PaCo-Dataset"),
        eval_dataset=load_paco_dataset("X-GenGroup/PaCo-Dataset", files=["consistency_reward_cot_test"]),
    )
    trainer.train()
    ```

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Vision-language model: a Hub id or directory, loaded in the compute dtype with `args.model_init_kwargs`
            (only safetensors files are read), a loaded model, or one with an adapter, whose training continues.
        args ([`PaCoRewardConfig`], *optional*):
            Settings. If `None`, the paper's, with an output directory named after the model.
        train_dataset ([`~datasets.Dataset`]):
            Pairs: `images` (two), `prompt` (one user turn) and `completion` (one assistant turn that starts with Yes
            or No). See [`~paco_trl.data.load_paco_dataset`], [`~paco_trl.data.rankings_to_pairs`] and
            [`~paco_trl.data.make_pair`].
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Pairs to evaluate on, according to `eval_strategy` and always at the end of training.
        processing_class ([`~transformers.ProcessorMixin`], *optional*):
            Processor. If `None`, the model's own.
        callbacks (`list[~transformers.TrainerCallback]`, *optional*):
            Callbacks.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler, as in [`~transformers.Trainer`].
        optimizer_cls_and_kwargs (`tuple`, *optional*):
            Class of the optimizer and its arguments, as in [`~transformers.Trainer`].
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a model that is loaded by name, for QLoRA. The adapter stays in float32.
        peft_config ([`~peft.LoraConfig`], *optional*):
            Adapter to train. If `None`, the paper's: rank 32, alpha 64. `target_modules` default to all linear layers
            of the language model; the vision tower and its projector stay frozen.

    """

    # The loss is divided by the completions (or tokens) of the full optimizer step, see `compute_loss`
    loss_is_scaled_for_ga = True

    _tag_names = ["paco-trl", "trl", "paco-reward", "reward-model", "sft", "lora"]
    _name = "PaCo-Reward"
    _paper = PAPER

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        args: PaCoRewardConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: ProcessorMixin | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: LoraConfig | None = None,
    ):
        # 1. Checks without the model
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        if not isinstance(model, str | PreTrainedModel | PeftModel):
            kind = type(model).__name__
            raise TypeError(f"`model` is a {kind}; it must be a Hub id, a directory, or a vision-language model.")
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        if args is None:
            args = PaCoRewardConfig(f"{Path(name).name}-PaCo-Reward")
        if not isinstance(args, PaCoRewardConfig):
            raise TypeError(f"`args` is a {type(args).__name__}; it must be a `PaCoRewardConfig`.")
        args = copy_config(args)
        if optimizer_cls_and_kwargs is not None:
            check_optimizer_class(optimizer_cls_and_kwargs)
        named = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
        datasets: list[tuple[str, Any]] = [("train_dataset", train_dataset)]
        datasets += [(key, dataset) for key, dataset in named.items() if dataset is not None]
        check_has_evaluation(args, len(datasets) > 1)
        check_best_metric(args, METRICS, eval_dataset if isinstance(eval_dataset, dict) else ())
        if os.path.realpath(name) == os.path.realpath(args.output_dir):  # it would be replaced by what is trained
            message = f"`output_dir`, '{args.output_dir}', is the directory of the model to train. Choose another one."
            raise OptionError(message, "output_dir")
        self._open_output_dir(args, JUDGE_ADAPTER)

        # 2. The processor, with the size limit of images, and the adapter
        init_kwargs = {"dtype": "bfloat16" if args.bf16 else "float32", "use_safetensors": True}
        init_kwargs |= args.model_init_kwargs or {}
        source = {"revision": init_kwargs.get("revision"), "trust_remote_code": args.trust_remote_code}
        if processing_class is None:
            processing_class = PaCoReward.load_processor(name, **source)
        processing_class = copy.deepcopy(processing_class)  # the caller's own keeps its size limit
        tokenizer = processing_class.tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        if args.max_pixels is not None:
            limit_pixels(processing_class, args.max_pixels)
        for key, dataset in datasets:
            check_pairs(dataset, key, processing_class, args, is_training=dataset is train_dataset)
        warn_of_trained_pairs(cast(Dataset, train_dataset), dict(datasets[1:]))
        self._question = common_question(cast(Dataset, train_dataset))
        self._init_hub(args, name, JUDGE_ADAPTER)
        if isinstance(model, PeftModel):
            model.set_requires_grad(model.active_adapters)  # loaded for inference, it has none
        else:
            peft_config = complete_peft_config(peft_config, model, **source)
        adapter = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else peft_config
        pairs = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._identity, self._settings = describe_run(
            args, cast(Any, train_dataset), adapter, quantization=describe(quantization_config),
            processor=describe(processing_class), pairs_per_step=pairs,
        )  # fmt: skip
        self._identity["base_model"] = Path(base_model_name(name)).name
        self._check_run(args, name)
        if isinstance(model, str):
            args.model_init_kwargs = init_kwargs
        config = AutoConfig.from_pretrained(model, **source) if isinstance(model, str) else model.config
        if uses_fsdp() and (quantization_config or getattr(config, "quantization_config", None)):
            raise OptionError(
                "The judge is quantized, but FSDP is supported for unquantized weights only. Use `multi_gpu.yaml` "
                "(DDP), or do not quantize it.", "load_in_4bit",
            )  # fmt: skip
        if (scale := scales_logits(config)) is not None:
            raise ValueError(
                f"The model changes its logits (`{scale}` = {getattr(config.get_text_config(), scale)}): use it as a "
                "judge, but train another one."
            )

        # 3. SFTTrainer loads the model, wraps it, and gives it the fused head
        with without_jit_checkpoint(args):
            super().__init__(
                model=model,
                args=args,
                data_collator=PairCollator(
                    processing_class,
                    max_length=args.max_length,
                    completion_only_loss=True,
                    # Tokens without weight in the loss are left out
                    decision_only_loss=args.first_token_weight == 1 and args.loss_variant == "paper",
                    label_only_without_eos=args.first_token_weight is not None and args.loss_variant == "paper",
                ),
                train_dataset=cast(Any, train_dataset).with_format(None),  # SFTTrainer looks at its first row
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                quantization_config=quantization_config,
                peft_config=peft_config,
            )
        if self.is_fsdp_enabled:
            prepare_sharding(self.accelerator, self.model)
        self._identify_weights({"model": weights_fingerprint(self.model, frozen_only=True)})
        avoid_packed_nf4(self.model)
        if describe_quantization(self.model) is not None and args.deepspeed_plugin is None:
            for parameter in trained_parameters(self.model).values():
                parameter.data = parameter.data.float()  # SFTTrainer rounds adapters of 4- and 8-bit models to bf16

        # 4. Own state
        self.base_model_name = name
        self.evaluations: dict[str, dict] = {}  # the last one of each dataset
        self.pictures: dict[str, Image.Image] = {}
        self.decision_ids = decision_token_ids(tokenizer)
        self._sums: dict[str, torch.Tensor] = {}  # sums since the last log, see `metric_sums`
        self._evaluated: list[torch.Tensor] = []
        self._frozen_direction: tuple[torch.Tensor, torch.Tensor | float] | None = None
        self._last_hidden_state: Any = None
        use_console(self)
        events = {"on_train_begin": self._begin_run, "on_step_end": self._evaluate_last_step}
        self.add_callback(FunctionCallback(**events, on_prediction_step=self._give_up_evaluation))
        self._grids: list[list[int]] = []  # patch grids of the micro-batch's images
        disable_vision_tower_grad(self._inner_model(), self._grids)
        self.data_collator.get_rope_index = getattr(self._inner_model().base_model, "get_rope_index", None)
        # The fused head returns the label's log-probability only; the other answer's needs the hidden state
        self._inner_model().base_model.register_forward_hook(self._keep_hidden_state)
        self._mark_output_dir()

    def _evaluate_last_step(self) -> None:
        # Before the end of training, while the trackers still run; by epochs, Trainer itself evaluates then
        is_last = self.state.global_step >= self.state.max_steps
        if self.eval_dataset is not None and is_last and self.args.eval_strategy != IntervalStrategy.EPOCH:
            self.control.should_evaluate = True

    def _inner_model(self) -> PreTrainedModel:
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def _keep_hidden_state(self, module: nn.Module, args: tuple, output) -> None:
        self._last_hidden_state = output.last_hidden_state

    def _remove_unused_columns(self, dataset: Dataset, description: str | None = None) -> PairRows:
        return PairRows(dataset)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> torch.utils.data.Sampler:
        args = self.args
        if args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        lengths = self.data_collator.lengths(self.train_dataset, "train_dataset")
        # Over all processes, so that their number does not change the order
        pairs_of_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return PairSampler(pairs_of_step, lengths, args.seed if args.data_seed is None else args.data_seed)

    def _get_dataloader(self, *args, **kwargs) -> torch.utils.data.DataLoader:
        """Return Trainer's dataloader; its workers leave a signal for all processes to this one, which stops them."""
        dataloader = super()._get_dataloader(*args, **kwargs)
        if self.args.enable_jit_checkpoint:
            base = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's own takes it from there
            ignore_stop_in_workers(base, ["SIGINT", *self.args.jit_checkpoint_signals])
        return dataloader

    def _get_eval_sampler(self, eval_dataset: Dataset) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(eval_dataset)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """Return Trainer's dataloader; its sampler learns its epoch after resuming, too."""
        dataloader = super().get_train_dataloader()
        # With several processes, accelerate does not find a custom sampler when it skips batches
        batches = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)
        dataloader.set_sampler(batches.sampler)
        return dataloader

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        if not batch_samples:
            return None
        args = self.args
        lengths = torch.cat([(batch["labels"][:, 1:] != -100).sum(dim=1) for batch in batch_samples])
        num_items = num_loss_items(lengths, args.first_token_weight, args.loss_variant).to(device)
        if args.average_tokens_across_devices and args.world_size > 1:
            num_items = self.accelerator.gather(num_items).sum()
        return num_items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Compute the loss of a micro-batch: its fraction of the mean over the optimizer step."""
        args = self.args
        inputs = dict(inputs)
        rows = inputs.pop("rows")
        self._grids[:] = inputs.pop("grids", ())
        outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        hidden_state, self._last_hidden_state = self._last_hidden_state, None
        mask = outputs.label_mask  # (B, T - 1), at the positions that predict a token of the completion
        weights = first_token_weights(mask, args.first_token_weight, args.loss_variant)
        num_items = num_items_in_batch
        if num_items is None:
            num_items = num_loss_items(mask.sum(dim=1), args.first_token_weight, args.loss_variant)
        loss = -(weights * outputs.log_probs).sum() / num_items
        # DDP averages the gradients over the processes, and `num_items_in_batch` counts the items of all
        if args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes

        decisions = self._decide(hidden_state[:, :-1].detach(), inputs["labels"][:, 1:], outputs)
        if self.model.training:
            sums = metric_sums(decisions, outputs, inputs["attention_mask"])
            self._sums = {name: value + self._sums[name] if self._sums else value for name, value in sums.items()}
        else:
            self._evaluated.append(torch.stack([rows.to(mask.device).float(), *decisions]))
        return loss

    @torch.no_grad()
    def _decide(self, hidden_state: torch.Tensor, labels: torch.Tensor, outputs) -> Decisions:
        mask = outputs.label_mask
        log_probs = outputs.log_probs.detach().float()
        position = mask.int().argmax(dim=1)  # (B,), where the decision is predicted
        rows = torch.arange(len(position), device=position.device)
        is_yes = labels.to(position.device)[rows, position] == self.decision_ids[0]
        direction, offset = self._decision_direction()
        hidden = hidden_state.to(direction.device)[rows, position].float()  # (B, D)
        p_yes = torch.sigmoid(hidden @ direction + offset)
        decision_loss = -log_probs[rows, position]
        reasoning_loss = -(log_probs * mask).sum(dim=1) - decision_loss
        return Decisions(p_yes, is_yes.float(), decision_loss, reasoning_loss, mask.sum(dim=1).float() - 1)

    def _decision_direction(self) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return a direction (D,) and an offset: logit(Yes) - logit(No) of a hidden state. Collective."""
        if self._frozen_direction is not None:
            return self._frozen_direction
        head = self._inner_model().get_output_embeddings()
        with maybe_gather_lm_head_ctx(head.weight, head.bias):  # ZeRO-3
            direction = recursively_apply(full, decision_direction(head, self.decision_ids))
        if not head.weight.requires_grad:
            self._frozen_direction = direction
        return direction

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics of the decisions since the last log. Collective: call on all ranks."""
        if self._sums and {"loss", "train_loss"} & logs.keys():  # not the logs of an evaluation
            totals = self.accelerator.reduce(torch.stack(list(self._sums.values())), "sum").tolist()
            sums = dict(zip(self._sums, totals, strict=True))
            self._sums = {}
            self._total_train_tokens += int(sums["attended"][0])
            metrics = {name: total / count for name, (total, count) in sums.items() if count > 0}
            logs.update(metrics, padding=1 - metrics.pop("attended"), num_tokens=self._total_train_tokens)
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Evaluate the judge on pairs, as [`~transformers.Trainer.evaluate`] does: losses, accuracy, AUROC, calibration
        error, and two figures in `output_dir/evaluation`. AUROC is left out when all pairs have the same answer.
        """
        if eval_dataset is not None and not isinstance(eval_dataset, str | dict):  # a dictionary calls this for each
            check_pairs(eval_dataset, "eval_dataset", self.processing_class, self.args)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ):
        """Run [`~transformers.Trainer.evaluation_loop`], with the metrics of the judge."""
        self._evaluated = []
        output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
        evaluated = torch.cat(self._evaluated, dim=1).T.contiguous()  # (pairs of this process, 6)
        evaluated = self.accelerator.pad_across_processes(evaluated, dim=0, pad_index=-1)
        evaluated = self.accelerator.gather(evaluated).cpu().double()
        # Rows that pad the last batch occur twice, and padding has the row -1
        rows, first = np.unique(evaluated[:, 0].numpy(), return_index=True)
        first = first[rows >= 0]
        rows = rows[rows >= 0].astype(int)
        decisions = Decisions(*evaluated[first, 1:].T)
        metrics = evaluation_metrics(decisions, self.args.first_token_weight, self.args.loss_variant)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        self.evaluations[metric_key_prefix] = {"step": self._card_step, "pairs": len(rows), **metrics}
        if self.is_world_process_zero():
            self._save_figures(rows, decisions, dataloader.dataset, metric_key_prefix)
        return output

    def _save_figures(self, rows: np.ndarray, decisions: Decisions, dataset: PairRows, name: str) -> None:
        folder = Path(self.args.output_dir) / "evaluation"
        step = self._card_step
        ece = self.evaluations[name]["ece"]
        p_yes = decisions.p_yes.numpy()
        is_yes = decisions.is_yes.numpy()
        title = f"{name}, step {step}"
        pictures = {
            "calibration": plot_calibration(p_yes, is_yes, f"{title}, {len(rows)} pairs", ece),
            "wrong_pairs": plot_wrong_pairs(rows, p_yes, is_yes, dataset, self.processing_class, title),
        }
        for kind, picture in pictures.items():
            file_name = name.replace("/", "_")
            write_atomically(folder / f"{file_name}-{kind}-{step:06d}.png", to_png(picture))
            send_to_trackers(picture, f"{name}/{kind}", self.state.global_step, self.callback_handler.callbacks)
            self.pictures[f"{file_name}_{kind}.png"] = picture

    def _give_up_evaluation(self) -> None:
        """Stop an evaluation if a process has received a signal."""
        if self.accelerator.num_processes == 1 or len(self._evaluated) % _BATCHES_PER_AGREEMENT == 0:
            (stop,) = agree(self.accelerator)
            if stop:
                raise_stop(stop, by_all=True)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """
        Train as [`~transformers.Trainer.train`] does, and evaluate at the end if there is an `eval_dataset`.

        `resume_from_checkpoint` is a directory, `True` (the latest complete checkpoint of `output_dir`), or `"auto"`:
        the latest if there is one. SIGTERM and SIGUSR1 write a checkpoint and end the process
        (`enable_jit_checkpoint`).
        """
        self._sums, output_dir = {}, self.args.output_dir
        with sole_writer(output_dir, "checkpoints", is_inside=True) as mark, end_explained(output_dir, mark):
            checkpoint = self._find_checkpoint(resume_from_checkpoint)
            if checkpoint is not None:
                self._check_optimizer(checkpoint)
                self._check_resumed_run(checkpoint, self.args)
            with self._resumable(checkpoint):
                output = super().train(None if checkpoint is None else str(checkpoint), trial, ignore_keys_for_eval)
                # The callback has evaluated the last model, which may not be the best
                evaluated_steps = [evaluation["step"] for evaluation in self.evaluations.values()]
                if self.eval_dataset is not None and (
                    self.args.load_best_model_at_end or self.state.global_step not in evaluated_steps
                ):
                    self.evaluate()
        return output

    def _check_optimizer(self, checkpoint: Path) -> None:
        """Check that a checkpoint has the optimizer's state."""
        if self.args.deepspeed_plugin is None and not (checkpoint / OPTIMIZER_NAME).is_file():
            raise ValueError(
                f"'{checkpoint}' cannot be resumed: it has no state of the optimizer (`save_only_model`). Load its "
                "adapter with `PeftModel.from_pretrained` and pass it as `model`, with another `output_dir`."
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            self._load_sharded(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_sharded(self, checkpoint: Any) -> None:
        """Load a checkpoint's adapter into one that FSDP has divided."""
        names = list(trained_parameters(self.model))
        saved_names = get_peft_model_state_dict(
            self.model, state_dict=dict(zip(names, names, strict=True)), save_embedding_layers=False
        )
        saved = load_file(Path(checkpoint) / SAFETENSORS_WEIGHTS_NAME)
        load_weights(self.model, {name: saved[saved_name] for saved_name, name in saved_names.items()}, zero_stage=0)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's adapter."""
        if self.is_fsdp_enabled:
            self._load_sharded(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()
        self.loaded_step = self.state.best_global_step

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, **card_fields) -> None:
        """
        Save adapter, processor, figures of the last evaluation and card. Collective: call on all ranks.

        `card_fields` are passed to `create_model_card`.
        """
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        self._check_output_files(folder)
        zero_stage = get_zero_stage(self.accelerator, self.model, self.model_wrapped)
        local = local_weights(self.model, zero_stage)
        state_dict = gather_weights(self.model, local, zero_stage, keep=self.args.should_save)
        if self.args.should_save:
            card = self._model_card(**card_fields)
            with saving_model(card, folder, self._pictures(), self.published_patterns):
                # `save_embedding_layers="auto"` would query the Hub for the base model's vocabulary
                self.model.save_pretrained(folder, state_dict=state_dict, save_embedding_layers=False)
                self.processing_class.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            self._push_model(folder)

    def _pictures(self) -> dict[str, Image.Image]:
        return self.pictures

    def _model_card(self, **fields) -> JudgeCardData:
        """Fill in the current card of the judge."""
        args = self.args
        max_pixels = pixel_limit(self.processing_class)
        return JudgeCardData(
            **self._common_card_fields(self.base_model_name, **fields),
            lora=describe_lora(self.model, quantization=describe_quantization(self.model)),
            settings=judge_settings(args, len(self.train_dataset), self._question, max_pixels, self._card_step),
            evaluations=self.evaluations,
            pictures=sorted(self.pictures),
        )
