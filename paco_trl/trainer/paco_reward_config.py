# SPDX-License-Identifier: Apache-2.0
"""Settings of [`PaCoRewardTrainer`]."""

from dataclasses import dataclass, field

import torch
from transformers import SchedulerType
from trl import SFTConfig

from ..utils.deepspeed import complete_config
from ..utils.errors import raise_errors
from ..utils.fsdp import activate_on_cpu
from ..utils.stopping import SIGNALS
from .config_checks import choice_errors, reward_config_errors
from .config_utils import (
    REFUSED_SFT_FIELDS,
    check_optimizer,
    defaults_of,
    flag_errors,
    help_from_docstring,
    keep_warmup,
    name_checkpointing,
    whole_number_fields,
)
from .first_token_loss import LOSS_VARIANTS


@help_from_docstring
@dataclass
class PaCoRewardConfig(SFTConfig):
    # docstyle-ignore
    r"""
    Configuration class for the [`PaCoRewardTrainer`].

    This class includes only the parameters that are new here, or whose defaults differ from [`~trl.SFTConfig`]; for
    the others refer to [`~trl.SFTConfig`] and [`~transformers.TrainingArguments`]. Fields of [`~trl.SFTConfig`] that
    cannot work for pairs of images are refused when set. The defaults are the paper's
    ([PaCo-RL](https://huggingface.co/papers/2512.04784)) unless another source is given.

    Parameters:
        > Parameters that control the loss

        first_token_weight (`float`, *optional*, defaults to `0.1`):
            Weight `a` of the decision token, Yes or No, in the loss of a completion (Sec. 3.2). `None` is plain
            likelihood. In the paper's loss a label without reasoning has the weight 1.
        loss_variant (`str`, *optional*, defaults to `"paper"`):
            Loss of a completion of n tokens, including the chat template's terminators: `"paper"` gives the decision
            the weight a and every other token (1 - a) / (n - 1), `"released"` is the published training code's, where
            the decision has the weight a / n. See [`~paco_trl.trainer.first_token_weighted_loss`].

        > Parameters that control the data

        max_pixels (`int`, *optional*, defaults to `2097152`):
            Pixels to which larger images are scaled down. Saved with the processor. `None` keeps the processor's
            limit.
        max_length (`int`, *optional*, defaults to `16384`):
            Tokens at which a sequence is truncated (published code). Only reasoning is truncated: a sequence whose
            images or decision do not fit is an error. `None` never truncates.

        > Parameters that control the training

        learning_rate (`float`, *optional*, defaults to `2e-4`):
            Peak learning rate of AdamW.
        lr_scheduler_type (`str`, *optional*, defaults to `"cosine"`):
            Learning-rate schedule.
        warmup_steps (`float`, *optional*, defaults to `0.1`):
            Warmup steps, or their fraction of all steps if below 1. If you set them, `lr_scheduler_type="constant"`
            becomes `"constant_with_warmup"`.
        num_train_epochs (`float`, *optional*, defaults to `2.0`):
            Number of epochs.
        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Pairs of a micro-batch on one process (the published code accumulates 4 of them).
        dataloader_num_workers (`int`, *optional*):
            Worker processes that open images and collate batches. If `None`, 2 with a CUDA GPU and 0, the training
            process itself, without one. Batches are in shared memory.
        ddp_find_unused_parameters (`bool`, *optional*, defaults to `False`):
            Whether DDP looks for unused parameters. There are none, since every batch has images.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `True`):
            Whether SIGTERM and SIGUSR1 finish the optimizer step, or give up an evaluation, write a checkpoint and end
            the process with code 75 (`EX_TEMPFAIL`). So does Ctrl-C, which then raises `KeyboardInterrupt`. If
            `False`, they end it at once.
        jit_checkpoint_signals (`list[str]`, *optional*, defaults to `["SIGTERM", "SIGUSR1"]`):
            Names of these signals.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Whether training that does not resume deletes what an earlier run has left in `output_dir`: its
            checkpoints, curves and figures of evaluations. If `False`, a directory with checkpoints or a saved model
            is refused. Other files stay.
    """

    choices = {"loss_variant": LOSS_VARIANTS}

    # Parameters that control the loss
    first_token_weight: float | None = 0.1
    loss_variant: str = "paper"

    # Parameters that control the data
    max_pixels: int | None = 2_097_152
    max_length: int | None = 16384

    # Parameters that control the training
    learning_rate: float = 2e-4
    lr_scheduler_type: SchedulerType | str = "cosine"
    warmup_steps: float = 0.1
    num_train_epochs: float = 2.0
    per_device_train_batch_size: int = 8
    dataloader_num_workers: int | None = None
    ddp_find_unused_parameters: bool | None = False
    enable_jit_checkpoint: bool = True
    jit_checkpoint_signals: list[str] = field(default_factory=lambda: list(SIGNALS))
    overwrite_output_dir: bool = False

    def __post_init__(self):
        if self.router_aux_loss_coef == 0.0:
            self.router_aux_loss_coef: float | None = None  # set below, seen by `dataclasses.replace`
        errors = reward_config_errors(
            self, defaults_of(type(self)), REFUSED_SFT_FIELDS, whole_number_fields(type(self))
        )
        raise_errors([*errors, *choice_errors(self, self.choices), *flag_errors(self)])
        if self.report_to is None:  # type: ignore[has-type]
            self.report_to = "none"
        if self.dataloader_num_workers is None:
            self.dataloader_num_workers = 2 if torch.cuda.is_available() and not self.use_cpu else 0
        if self.dataloader_num_workers and self.dataloader_multiprocessing_context is None:
            # Python's default until 3.14: the collator has a method of the model, which no other process can get
            self.dataloader_multiprocessing_context: str | None = "fork"
        self.router_aux_loss_coef = 0.0  # a model's own default would add the loss of its frozen router
        if self.greater_is_better is None and (self.metric_for_best_model or "").endswith("ece"):
            self.greater_is_better: bool | None = False
        name_checkpointing(self)
        keep_warmup(self)
        super().__post_init__()
        activate_on_cpu(self)
        complete_config(self)
        check_optimizer(self)
        # It waits for the device in each micro-step, and hides a loss that is not a number
        self.logging_nan_inf_filter = False
