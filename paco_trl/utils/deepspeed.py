# SPDX-License-Identifier: Apache-2.0
"""Models outside of DeepSpeed ZeRO-3, their partitioning, and checks of the configuration."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.integrations import deepspeed as hf_deepspeed

from .errors import OptionError


logger = logging.getLogger(__name__)


@contextmanager
def without_zero3_init() -> Iterator[None]:
    """Load models unpartitioned, even while a ZeRO-3 configuration is live."""
    # Once `TrainingArguments` with ZeRO-3 exist, `from_pretrained` partitions all weights, also those of a frozen
    # model, which DeepSpeed never wraps: it would keep parameters of shape (0,). transformers has no getter for the
    # object (only `deepspeed_config()` for the dictionary inside), and keeps a weak reference: `config` keeps
    # it alive meanwhile.
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    config = reference() if reference is not None else None
    if config is None:
        yield
        return

    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed.set_hf_deepspeed_config(config)


def complete_config(args: TrainingArguments) -> None:
    """Set the batch sizes of a DeepSpeed configuration from the arguments; raise an error for other contradictions."""
    if args.deepspeed_plugin is None:
        return
    config, batch_size = args.deepspeed_plugin.deepspeed_config, args.per_device_train_batch_size
    sizes = {
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": batch_size,
    }
    sizes["train_batch_size"] = args.world_size * batch_size * args.gradient_accumulation_steps
    for name, size in sizes.items():
        # `accelerate config` writes 1, also where nobody chose it
        if (value := config.get(name, "auto")) not in ("auto", 1, size):
            logger.warning(f"The DeepSpeed configuration has `{name}` {value}; the run's, {size}, is used.")
        config[name] = "auto"
    # Trainer compares them when the models are loaded
    compared = args.hf_deepspeed_config if args.deepspeed else None
    with without_zero3_init():
        compared = compared or hf_deepspeed.HfTrainerDeepSpeedConfig(copy.deepcopy(config))
        compared.mismatches = []
        compared.trainer_config_process(args)
    if compared.mismatches:
        differing = "; ".join(mismatch.removeprefix("- ") for mismatch in compared.mismatches)
        raise ValueError(f"The DeepSpeed configuration contradicts the arguments: {differing}. Change one of the two.")


def check_compiled_blocks(args: TrainingArguments) -> None:
    """Refuse compiled blocks with ZeRO-3, whose hooks gather the weights of each layer within them."""
    if args.compile_repeated_blocks and args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        raise OptionError(
            "`compile_repeated_blocks=True` does not work with DeepSpeed ZeRO-3: compiling does not end, as its hooks "
            "break the graphs. Unset it, or launch with `multi_gpu.yaml` or `zero2.yaml`.", "compile_repeated_blocks",
        )  # fmt: skip


def partition(model: nn.Module, device: torch.device, dtype: torch.dtype, config: dict) -> None:
    """Partition a model in CPU memory for ZeRO-3; DeepSpeed's engine would move all of it to the device first."""
    import deepspeed

    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):  # by an earlier `train()`
        return
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # the engine casts weights only before they are partitioned
    deepspeed.init_distributed()  # or the configuration is taken as that of one process
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


@contextmanager
def gathered_weights(model: nn.Module, engine: nn.Module) -> Iterator[None]:
    """Gather a model's weights for many forwards, and keep its ZeRO-3 engine from partitioning them meanwhile."""
    if engine is model:  # before training there is no engine
        yield
        return
    import deepspeed
    from trl.models.utils import add_hooks, remove_hooks

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        remove_hooks(engine)
        try:
            yield
        finally:
            add_hooks(engine)
