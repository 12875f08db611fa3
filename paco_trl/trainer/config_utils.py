# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the configs: help texts, unsupported fields, checks of values."""

import copy
import dataclasses
import inspect
import re
from collections.abc import Collection, Iterable, Iterator
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from trl import GRPOConfig, SFTConfig

from ..utils.errors import OptionError


Config = TypeVar("Config", bound=TrainingArguments)
ConfigClass = TypeVar("ConfigClass", bound=type)

# Fields that GRPOConfig adds to TrainingArguments are for language models, except for these
USED_GRPO_FIELDS = (
    "beta", "ds3_gather_for_generation", "epsilon", "epsilon_high", "generation_batch_size", "log_completions",
    "loss_type", "model_init_kwargs", "multi_objective_aggregation", "num_generations", "num_generations_eval",
    "num_iterations", "reward_weights", "scale_rewards", "shuffle_dataset", "steps_per_generation",
    "trust_remote_code",
)  # fmt: skip
# The same of SFTConfig, whose other fields are not for pairs of images
USED_SFT_FIELDS = (
    "activation_offloading", "chat_template_path", "dataset_num_proc", "eos_token", "max_length", "model_init_kwargs",
    "trust_remote_code",
)  # fmt: skip
# Fields of TrainingArguments that change nothing in either trainer, or would break it
_UNSUPPORTED = (
    "batch_eval_metrics", "bf16_full_eval", "dataloader_drop_last", "eval_do_concat_batches", "fp16_full_eval", "fsdp",
    "include_for_metrics", "label_names", "length_column_name", "label_smoothing_factor", "liger_kernel_config",
    "parallelism_config",
    "prediction_loss_only", "remove_unused_columns", "use_cache", "use_liger_kernel",
)  # fmt: skip
# In the trainers of images rows are fetched by number, `evaluate()` generates, and the batch is part of a round
_UNSUPPORTED_FOR_IMAGES = (
    "auto_find_batch_size", "average_tokens_across_devices", "data_seed", "dataloader_in_order",
    "dataloader_multiprocessing_context", "dataloader_num_workers", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "eval_accumulation_steps", "eval_use_gather_object", "fp16",
    "ignore_data_skip", "neftune_noise_alpha", "save_only_model", "torch_compile",
    "torch_compile_backend", "torch_compile_mode", "train_sampling_strategy",
)  # fmt: skip


def unsupported_fields(parent: type, used: Collection[str], *unsupported: str) -> set[str]:
    """Return the fields that a config adds to TrainingArguments without being `used`, and its unsupported ones."""
    names = {field.name for field in dataclasses.fields(parent)}
    return names - {field.name for field in dataclasses.fields(TrainingArguments)} - set(used) | set(unsupported)


REFUSED_GRPO_FIELDS = unsupported_fields(GRPOConfig, USED_GRPO_FIELDS, *_UNSUPPORTED, *_UNSUPPORTED_FOR_IMAGES)
REFUSED_SFT_FIELDS = unsupported_fields(SFTConfig, USED_SFT_FIELDS, *_UNSUPPORTED)


def defaults_of(config: type) -> dict[str, Any]:
    """Return the defaults of a dataclass."""
    fields = dataclasses.fields(config)
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in fields
    }


def whole_number_fields(config: type) -> list[str]:
    """Return the fields of a dataclass that have whole numbers."""
    return [field.name for field in dataclasses.fields(config) if field.type in (int, int | None, list[int])]


def flag_errors(config: Any) -> Iterator[OptionError]:
    """Check the fields that are true or false: a text, such as "False", would be true."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        takes_text = isinstance(field.default, str)  # as transformers' `include_num_input_tokens_seen`
        if field.type in (bool, bool | None) and isinstance(value, str) and not takes_text:
            yield OptionError(f"`{field.name}` is {value!r}; it must be True or False.", field.name)


def name_checkpointing(config: TrainingArguments) -> None:
    """Set `activation_checkpointing` to `gradient_checkpointing`: transformers has renamed it, TRL has not."""
    if config.activation_checkpointing is None:
        config.activation_checkpointing = config.gradient_checkpointing
    if config.activation_checkpointing_kwargs is None:
        config.activation_checkpointing_kwargs = config.gradient_checkpointing_kwargs


def check_optimizer_class(optimizer_cls_and_kwargs: Any) -> None:
    """Check a class of an optimizer and its arguments before a model is loaded, by making one."""
    try:
        optimizer_class, kwargs = optimizer_cls_and_kwargs
        optimizer_class([nn.Parameter(torch.zeros(1))], **kwargs)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`optimizer_cls_and_kwargs` is {optimizer_cls_and_kwargs}, from which no optimizer can be made ({error}). "
            'Pass a class and its arguments, such as `(torch.optim.SGD, {"lr": 0.1})`.'
        ) from error


def keep_warmup(config: TrainingArguments) -> None:
    """Let a constant schedule warm up where you set `warmup_steps`, which it would ignore."""
    if config.lr_scheduler_type == "constant" and config.warmup_steps not in (0, type(config).warmup_steps):
        config.lr_scheduler_type = "constant_with_warmup"


def check_optimizer(args: TrainingArguments) -> None:
    """Refuse an optimizer or a schedule that Trainer would refuse when the models are loaded."""
    settings = f"`optim` is '{getattr(args.optim, 'value', args.optim)}' and `optim_args` {args.optim_args!r}"
    options = ("optim", "optim_args")
    try:
        if not args.optim_target_modules:  # names of the model's layers
            Trainer.get_optimizer_cls_and_kwargs(args, nn.Linear(1, 1))
        settings = (
            f"`lr_scheduler_type` is {args.lr_scheduler_type!r} and `lr_scheduler_kwargs` {args.lr_scheduler_kwargs!r}"
        )
        options = ("lr_scheduler_type", "lr_scheduler_kwargs")
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], args.learning_rate)
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 2, scheduler_specific_kwargs=args.lr_scheduler_kwargs)
    except (ImportError, TypeError, ValueError) as error:
        raise OptionError(f"{settings}: {error}", *options) from error


def copy_config(args: Config) -> Config:
    """Copy a config with its lists and dictionaries, one level deep: trainers, also TRL's, write there."""
    args = copy.copy(args)
    for name, value in vars(args).items():
        if type(value) in (dict, list):
            setattr(args, name, copy.copy(value))
    return args


def check_best_metric(
    args: TrainingArguments, names: Iterable[str], datasets: Iterable[str], logged: tuple = ()
) -> None:
    """Refuse a `metric_for_best_model` that no evaluation gives: Trainer looks for it after the first one."""
    if args.metric_for_best_model is None:
        return
    metric = args.metric_for_best_model.removeprefix("eval_")
    prefixes = [f"{name}_" for name in datasets] or [""]
    metrics = [prefix + name for prefix in prefixes for name in names]
    if metric in metrics or metric.startswith(tuple(prefix + start for prefix in prefixes for start in logged)):
        return
    name = args.metric_for_best_model
    message = f"`metric_for_best_model` is '{name}', which no evaluation gives. Choose from {metrics}."
    raise OptionError(message, "metric_for_best_model")


# `name (`type`, ...), other (`type`, ...):` and the indented lines below it
_PARAMETER = re.compile(r"^ {4}(\w+ \(`.*\)):\n((?: {8}.*\n|\n)+)", re.MULTILINE)
# Markdown links, references and quoted values, as a terminal shows them
_MARKUP = ((r"\[([^`\]]+)\]\([^)]+\)", r"\1"), (r"\[`~?(?:\w+\.)*(\w+)`\]", r"`\1`"), (r"`\"([^`\"]*)\"`", r"'\1'"))


def help_from_docstring(config: ConfigClass) -> ConfigClass:
    """Decorate a dataclass of options: the help of each of its own fields is its description in the docstring."""
    help_of: dict[str, str] = {}
    for names, description in _PARAMETER.findall(inspect.cleandoc(config.__doc__ or "") + "\n"):
        text = " ".join(description.split())
        for pattern, shown in _MARKUP:
            text = re.sub(pattern, shown, text)
        help_of |= dict.fromkeys(re.findall(r"(\w+) \(`", names), text.replace("%", "%%"))  # argparse formats it
    documented = help_of.keys() & inspect.get_annotations(config).keys()
    for field in dataclasses.fields(config):
        if field.name in documented:
            field.metadata = MappingProxyType({**field.metadata, "help": help_of[field.name]})
    return config
