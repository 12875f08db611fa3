# SPDX-License-Identifier: Apache-2.0
"""What all trainers do before a model is loaded."""

import copy
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from transformers import TrainingArguments


Config = TypeVar("Config", bound=TrainingArguments)


def copy_config(args: Config) -> Config:
    """Copy a config with its lists and dictionaries: trainers, also Trainer and SFTTrainer, write to theirs."""
    args = copy.copy(args)
    for name, value in vars(args).items():
        setattr(args, name, _copied(value))
    return args


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def check_best_metric(
    args: TrainingArguments, names: Iterable[str], datasets: Iterable[str], logged: tuple = ()
) -> None:
    """Refuse a `metric_for_best_model` that no evaluation gives: Trainer looks for it after the first one."""
    if args.metric_for_best_model is None:
        return
    metric = args.metric_for_best_model.removeprefix("eval_")
    prefixes = [f"{name}_" for name in datasets] or [""]
    known = [prefix + name for prefix in prefixes for name in names]
    if metric in known or metric.startswith(tuple(prefix + start for prefix in prefixes for start in logged)):
        return
    # One that is only not found in several datasets, or misspelled
    close = [prefix + metric for prefix in prefixes if prefix + metric in known] or get_close_matches(metric, known, 3)
    raise ValueError(
        f"`metric_for_best_model` is '{args.metric_for_best_model}', which no evaluation gives. Did you mean "
        f"{' or '.join(map(repr, close or known[:6]))}?"
    )
