# SPDX-License-Identifier: Apache-2.0
"""The doctor's row on memory: the plan of a run by phase, and what fits a device."""

import functools
from argparse import ArgumentParser
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils.modeling import convert_file_size_to_int
from datasets import Dataset
from peft import LoraConfig
from rich.table import Table
from transformers import CLIPConfig, CLIPModel

from .. import PaCoGRPOConfig, PaCoRewardConfig
from ..rollout.loading import read_peft_config
from ..trainer.paco_reward_trainer import complete_peft_config
from ..utils.files import find_model_file
from . import reward
from .memory import ImagePlan, JudgePlan, Phase, largest_batch, peak, smallest_change, weights_bytes
from .options import option
from .report import FAILED, OK, WARNING, Row
from .script_arguments import ScriptArguments, get_peft_config, judges_of


# Fraction of a device that a plan may take: the rest is for CUDA, fragmentation, and what the plan leaves out
USABLE = 0.9


@dataclass
class PlanArguments:
    """What the memory is planned for."""

    device_memory: str | None = option(
        None,
        "Memory of the card to plan for, such as 24GiB; no weights are loaded. If `None`, that of this machine's.",
    )
    trainer: str = option("grpo", "Trainer to plan for: `grpo`, `nft`, or `reward` (options of `paco-trl reward`).")

    def is_for_another(self) -> bool:
        """Return whether the plan is for another card or trainer than the checks use."""
        return self.device_memory is not None or self.trainer != "grpo"

    def memory_of(self, args: Any) -> int | None:
        """Return the memory of the card."""
        if self.device_memory is not None:
            return parse_memory(self.device_memory)
        if torch.cuda.is_available() and not args.use_cpu:
            return torch.cuda.get_device_properties(args.device).total_memory
        return None


def read_trainer(arguments: list[str]) -> str:
    """Return the trainer that a command line names."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trainer", default="grpo")
    trainer = parser.parse_known_args(arguments)[0].trainer
    if trainer not in ("grpo", "nft", "reward"):
        raise ValueError(f"`--trainer` is {trainer!r}; it must be 'grpo', 'nft' or 'reward'.")
    return trainer


def judge_plan(script_args: reward.ScriptArguments, args: PaCoRewardConfig) -> JudgePlan:
    """Plan the memory of the training of a judge."""
    model = script_args.model_name_or_path
    peft_config = LoraConfig(r=script_args.lora_r, target_modules=script_args.lora_target_modules)
    peft_config = complete_peft_config(peft_config, model, None, args.trust_remote_code)
    quantization = "nf4" if script_args.load_in_4bit else "int8" if script_args.load_in_8bit else None
    return JudgePlan(model, args, peft_config, quantization)


def parse_memory(text: str) -> int:
    """Read a size such as "24GiB"."""
    try:
        size = convert_file_size_to_int(text.strip().upper())  # a lower-case b would be bits
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        problem = f"`--device_memory` is {text!r}, which is not a size"
        raise ValueError(f"{problem}: give a number with a unit, such as 24GiB or 80GB.")
    return size


def image_plan(script_args: ScriptArguments, args: PaCoGRPOConfig, dataset: Dataset) -> ImagePlan:
    """Plan the memory of a run of PaCo-GRPO, DiffusionNFT or AWM."""
    peft_config = get_peft_config(script_args)
    is_copied = isinstance(peft_config, str) and args.has_reference and args.reference == "initial"
    if isinstance(peft_config, str):
        peft_config = read_peft_config(peft_config)
        peft_config.inference_mode = False
    init, hub = args.model_init_kwargs or {}, ("revision", "cache_dir", "token")
    where = {name: init[name] for name in hub if name in init}
    names = [model for model, url in judges_of(script_args) if url is None]
    plans = {name: _plan_reward_judge(name, script_args.judge_quantization) for name in set(names)}
    judges = [plans[name] for name in names]
    clip_bytes, rewards = 0, {*script_args.rewards, *(script_args.eval_rewards or ())}
    if count := len(rewards & {"clip_t", "clip_i"}):
        with init_empty_weights():
            clip_bytes = count * weights_bytes(CLIPModel(CLIPConfig.from_pretrained(script_args.clip_model)))
    plan = ImagePlan(script_args.model_name_or_path, args, peft_config, dataset, judges, clip_bytes, **where)
    if is_copied:  # the adapter `ref`
        plan.reference_bytes = plan.element_size * plan.num_trained
    return plan


def _plan_reward_judge(name: str, quantization: str | None) -> JudgePlan:
    if find_model_file(name, "adapter_config.json") is not None:
        name = read_peft_config(name).base_model_name_or_path
    # A `PaCoRewardConfig` would reset the device of the trainer that earlier checks have made
    return JudgePlan(name, SimpleNamespace(bf16=True, max_pixels=None, max_length=None), None, quantization)


def memory_row(plan: ImagePlan | JudgePlan, total: int | None) -> Row:
    """Show the phases of a run, and compare them with a device of `total` bytes."""
    setting = plan.setting()
    phases = plan.phases(setting)
    largest, needed = max(phases, key=lambda phase: peak([phase])), peak(phases)
    lines = [
        f"Micro-batches of {setting.batch_size} at {plan.size}: {format_size(needed)} on the device of each "
        f"process, in `{largest.name}`."
    ]
    optim = getattr(plan.args.optim, "value", plan.args.optim)
    if not optim.startswith("adamw_torch") or "8bit" in optim or "4bit" in optim:
        fraction = "; 8-bit: a quarter of the states" if "8bit" in optim else ""
        lines.append(f"The optimizer `{optim}` is counted as AdamW in float32{fraction}.")
    verdict, advice = OK, ""
    if total is None:
        lines.append("No CUDA device to compare with; `--device_memory 24GiB` plans for one.")
    else:
        limit = USABLE * total
        lines.append(f"The device has {format_size(total)}, of which the plan may take {USABLE:.0%}.")
        if needed > limit:
            verdict = FAILED if needed > total else WARNING
            changes = smallest_change(plan, setting, limit)
            nothing = (
                "Nothing that the plan can change makes it fit: use a larger device, or smaller images or models."
            )
            advice = f"The smallest change that fits: {' with '.join(changes)}." if changes else nothing
        else:
            fits = [f"{largest_batch(plan.phases, setting, limit)} at {plan.size}"]
            if isinstance(plan, ImagePlan) and plan.sizes[0] != plan.sizes[1]:
                batch = largest_batch(functools.partial(plan.phases, is_full=True), setting, limit)
                fits.append("{} at {} x {}".format(batch or "none", *plan.sizes[1]))
            lines.append(f"The largest micro-batch that fits: {', '.join(fits)}.")
            without = replace(setting, gradient_checkpointing=False)
            if without != setting and peak(plan.phases(without)) <= limit:
                lines.append("`--gradient_checkpointing False` fits too, and saves a forward of each image.")
    return Row(verdict, "\n".join(lines), advice, table=_table(phases))


def _table(phases: list[Phase]) -> Table:
    table = Table("phase", "device", "host", "on the device", box=None, pad_edge=False)
    for name, device, host in phases:
        parts = sorted(device.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{part} {format_size(size)}" for part, size in parts if size > sum(device.values()) / 100)
        table.add_row(name, format_size(sum(device.values())), format_size(sum(host.values())), shown)
    return table


def format_size(num_bytes: int) -> str:
    """Format a number of bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
