# SPDX-License-Identifier: Apache-2.0
"""Memory plans of the training commands, and what the commands decide by them."""

import logging
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import LoraConfig

from .. import PaCoGRPOConfig, PaCoNFTConfig
from ..planning import MemoryPlan, plan_memory
from ..planning.plan import USABLE_FRACTION, format_size
from .messages import print_message
from .reward import JudgeScriptArguments
from .script_arguments import ScriptArguments, find_judges, get_peft_config, parse_target_modules


logger = logging.getLogger(__name__)

# A plan without gradient checkpointing must fit this many times: a micro-batch at full width took 1.24 times its plan
# (benchmarks/full_size)
_MARGIN = 1.25
_CHECKPOINTING = {"gradient_checkpointing", "activation_checkpointing"}


def judge_plan(script_args: JudgeScriptArguments, args: Any) -> MemoryPlan:
    """Plan the memory of a judge's training."""
    peft_config = LoraConfig(
        r=script_args.lora_r, target_modules=parse_target_modules(script_args.lora_target_modules)
    )
    quantization = "nf4" if script_args.load_in_4bit else "int8" if script_args.load_in_8bit else None
    return plan_memory(script_args.model_name_or_path, args, None, peft_config, judge_quantization=quantization)


def image_plan(
    script_args: ScriptArguments, args: PaCoGRPOConfig, train_dataset: Dataset, eval_dataset: Dataset | None = None
) -> MemoryPlan:
    """Plan the memory of a PaCo-GRPO, DiffusionNFT or AWM run."""
    rewards = {*script_args.rewards, *(script_args.eval_rewards or ())}
    models = [model for model, url in find_judges(script_args) if url is None]
    models += [script_args.clip_model] * len(rewards & {"clip_t", "clip_i"})
    peft_config = get_peft_config(script_args, args.model_init_kwargs)
    arguments = (script_args.model_name_or_path, args, train_dataset, peft_config, models)
    return plan_memory(*arguments, script_args.judge_quantization, eval_dataset)


def skip_checkpointing(plan: MemoryPlan, script_args: ScriptArguments, total: int) -> MemoryPlan:
    """Return the plan without gradient checkpointing, if it fits `total` bytes with a margin and nobody has chosen it."""
    skipped = replace(plan, gradient_checkpointing=False)
    is_chosen = _CHECKPOINTING & script_args.chosen
    return plan if is_chosen or _MARGIN * skipped.peak > USABLE_FRACTION * total else skipped


def fit_checkpointing(
    script_args: ScriptArguments, args: PaCoGRPOConfig, train_dataset: Dataset, eval_dataset: Dataset | None
) -> None:
    """Switch off gradient checkpointing, which recomputes a forward of each trained step, where it is not needed."""
    if not args.gradient_checkpointing or _CHECKPOINTING & script_args.chosen:
        return
    device = args.device  # starts the processes
    has_gpu = device.type == "cuda"
    totals = gather_object([torch.cuda.get_device_properties(device).total_memory if has_gpu else None])
    if None in totals:
        return
    # One process decides, since those that share the weights must make the same forwards
    plan = None
    if PartialState().is_main_process:
        try:
            plan = image_plan(script_args, args, train_dataset, eval_dataset)
            plan = skip_checkpointing(plan, script_args, min(totals))
        except Exception as error:  # such as of a pipeline that cannot be built without weights: the run needs no plan
            logger.warning(f"Gradient checkpointing stays on, since the memory cannot be planned: {error}")
    is_kept = [plan is None or plan.gradient_checkpointing]
    broadcast_object_list(is_kept)
    if is_kept[0]:
        return
    args.gradient_checkpointing = args.activation_checkpointing = False
    if plan is not None:
        print_message(
            "nft" if isinstance(args, PaCoNFTConfig) else "grpo",
            f"gradient checkpointing is off, which saves a forward of each trained step: the run is planned to take "
            f"{format_size(plan.peak)} of {format_size(min(totals))}. `--gradient_checkpointing True` keeps it on.",
        )
