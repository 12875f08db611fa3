# SPDX-License-Identifier: Apache-2.0
"""
Rules for the values of the trainers' options, without torch, diffusers and TRL: a config refuses values that break
them, and so does the command line, before it has imported these libraries.
"""

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from numbers import Integral
from types import SimpleNamespace
from typing import Any

from ..utils.errors import OptionError, collect_errors
from ..utils.option_checks import check_panel_options, uses_fsdp
from ..utils.round_sizes import RoundSizes, round_divisors, round_sizes
from ..utils.stopping import NOT_ON_WINDOWS


GRPO_LOSSES = ("grpo", "grpo_guard")
NFT_LOSSES = ("nft", "awm")
# Fields of PaCoGRPOConfig for stochastic steps. PaCoNFTConfig does not use them
UNUSED_FIELDS = (
    "sde_type", "sde_steps", "num_sde_steps", "noise_level", "tail_steps",
    "ratio_tolerance",
)  # fmt: skip
# Fields that a loss does not use
UNUSED_WITH = {"nft": ("epsilon", "epsilon_high", "awm_weighting", "old_policy_beta"), "awm": ("nft_beta",)}
_USED_BY = {"nft": "GRPO or the loss 'awm'", "awm": "the loss 'nft'"}  # users of these fields
# Refused field -> field to use instead
_ALTERNATIVES = {
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), "compile_repeated_blocks"),
    **dict.fromkeys(("temperature", "top_p", "top_k"), "noise_level"),
    "fsdp": "accelerate_config",  # its file fsdp2
    "fp16": "bf16",
    "data_seed": "seed",
}
_NFT_ALTERNATIVES = {
    **dict.fromkeys(("sde_steps", "num_sde_steps"), "num_noise_levels"),
    **dict.fromkeys(("epsilon", "epsilon_high"), "nft_beta"),
    "nft_beta": "epsilon",
}
_AT_LEAST_ONE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "height", "width", "num_iterations",
    "num_inference_steps_eval",
)  # fmt: skip
_REFUSED_FSDP = {
    "fsdp_activation_checkpointing": "which renames layers; the option `gradient_checkpointing` does the same",
    "fsdp_cpu_ram_efficient_loading": "with which all processes but the first load text encoders without weights",
    "fsdp_offload_params": "which is not supported",
}
_FSDP_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
_NONE_OR_AT_LEAST_ONE = (
    "num_prompts_per_generation", "optimizer_steps_per_generation", "generation_batch_size", "steps_per_generation",
    "gradient_accumulation_steps", "per_device_rollout_batch_size", "num_generations_eval",
)  # fmt: skip
_FRACTIONS = ("max_reward_failures", "max_excluded_images", "max_excluded_groups")
# Fields, their good values, and the rule in errors
Ranges = tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...]
_SAVING: Ranges = (
    (("save_steps",), lambda v: v > 0, "above 0: Trainer would save nothing until the end"),
    (("save_total_limit",), lambda v: v is None or v > 0, "above 0, or None"),
)
_RANGES: Ranges = (
    *_SAVING,
    (("num_generations",), lambda v: v is not None and v >= 2, "at least 2, to be compared (the paper uses 16)"),
    (_AT_LEAST_ONE, lambda v: v >= 1, "at least 1"),
    (_NONE_OR_AT_LEAST_ONE, lambda v: v is None or v >= 1, "at least 1"),
    (("sde_steps",), lambda v: isinstance(v, list | tuple | range), "a list of steps, such as [1]"),
    (("num_inference_steps",), lambda v: v >= 2, "at least 2: the last is not stochastic"),
    (("resolution_scale",), lambda v: 0 < v <= 1, "in (0, 1] (the paper trains at 0.5, and finds that 0.25 fails)"),
    (("epsilon",), lambda v: v > 0, "above 0"),
    (("epsilon_high", "ratio_tolerance", "advantage_clip"), lambda v: v is None or v > 0, "above 0, or None"),
    (("guidance_scale",), lambda v: v >= 0, "at least 0: at 1 or below most models use none"),
    (("noise_level",), lambda v: v > 0, "above 0 (the paper uses 0.7): without noise a step has no log-probability"),
    (("log_tame_threshold",), lambda v: v == "mean" or float(v) >= 0, "a number >= 0, or 'mean'"),
    (("min_reward_std",), lambda v: v is None or v >= 0, "at least 0, or None"),
    (("max_resample_times", "beta", "learning_rate"), lambda v: v >= 0, "at least 0"),
    (("ema_decay",), lambda v: v is None or 0 < v < 1, "between 0 and 1 (published code: 0.9), or None (no average)"),
    (_FRACTIONS, lambda v: 0 <= v <= 1, "a fraction of a round, from 0 to 1"),
)
_NFT_RANGES: Ranges = (
    (("nft_beta",), lambda v: v > 0, "above 0 (the published code: 1 and 0.1)"),
    (("old_policy_decay_rate", "old_policy_beta"), lambda v: v >= 0, "at least 0"),
    (("old_policy_max_decay",), lambda v: 0 <= v < 1, "from 0 to below 1"),
    (("advantage_clip",), lambda v: v is not None, "a number, by which advantages are divided (the paper uses 5)"),
)
_REWARD_RANGES: Ranges = (
    *_SAVING,
    (("learning_rate",), lambda v: v >= 0, "at least 0"),
    (
        ("first_token_weight",),
        lambda v: v is None or 0 < v <= 1,
        "in (0, 1], or None for plain likelihood: at 0 the decision would not be trained",
    ),
    (("max_pixels", "max_length"), lambda v: v is None or v >= 1, "at least 1, or None"),
    (
        ("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"),
        lambda v: v >= 1,
        "at least 1",
    ),
)
# Tracker -> its packages, of which one must be installed; azure_ml and kubeflow need none
_TRACKER_PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard", "tensorboardX"), "flyte": ("flytekit",), "azure_ml": (), "kubeflow": (),
} | {
    name: (name,) for name in (
        "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "mlflow", "neptune", "swanlab", "trackio", "wandb",
    )
}  # fmt: skip
# Fields that may be infinite, which switches the limit off
_MAY_BE_INFINITE = (
    "epsilon", "epsilon_high", "log_tame_threshold", "max_grad_norm", "max_reward_mean", "ratio_tolerance",
)  # fmt: skip


def grpo_config_errors(
    config: Any,
    defaults: Mapping[str, Any],
    unsupported: Collection[str],
    losses: tuple[str, ...],
    whole: Collection[str] = (),
) -> Iterator[OptionError]:
    """
    Check the values of a PaCoGRPOConfig or PaCoNFTConfig against each other, and yield an error for each broken rule.

    [`size_errors`] checks the sizes of a round. `unsupported` names fields of TRL's configs that this package refuses,
    and `whole` names fields that take whole numbers, which the command line has parsed already.
    """
    args = SimpleNamespace(**vars(config))
    args.scale_rewards = read_scale_rewards(args.scale_rewards)
    is_nft = losses == NFT_LOSSES
    if args.loss_type not in losses:
        if is_nft:
            alternatives = "those of stochastic steps have `PaCoGRPOTrainer`: `paco-trl grpo`"
        else:
            alternatives = "'nft' and 'awm' have a trainer, `PaCoNFTTrainer`: `paco-trl nft`"
        names = ", ".join(map(repr, losses))
        yield OptionError(
            f"`loss_type` is {args.loss_type!r}; it must be one of {names} ({alternatives}).", "loss_type"
        )
        args.loss_type = losses[0]
    yield from _unsupported_values(args, defaults, unsupported, _ALTERNATIVES)
    if is_nft:
        yield from _unsupported_values(args, defaults, UNUSED_FIELDS, _NFT_ALTERNATIVES, reason="is for GRPO")
        unused = UNUSED_WITH[args.loss_type]
        reason = f"is for {_USED_BY[args.loss_type]}, not for {args.loss_type!r}"
        yield from _unsupported_values(args, defaults, unused, _NFT_ALTERNATIVES, "loss_type", reason=reason)
        if args.loss_type == "awm" and not args.old_policy_beta > 0:  # no old policy is kept
            of_old_policy = ("old_policy_decay_rate", "old_policy_max_decay")
            reason = "needs `old_policy_beta` above 0"
            yield from _unsupported_values(
                args, defaults, of_old_policy, {}, "old_policy_beta", "loss_type", reason=reason
            )
    yield from _out_of_range(args, defaults, whole, _RANGES + (_NFT_RANGES if is_nft else ()))
    yield from _common_errors(args)
    yield from _round_errors(args)
    yield from collect_errors(check_panel_options, args.panel_template, args.panel_generation)
    if args.set_layout == "grid" and args.panel_generation != defaults["panel_generation"]:
        yield OptionError(
            f"`panel_generation` is {args.panel_generation!r}, but `set_layout` is 'grid'. Unset it.",
            "panel_generation", "set_layout",
        )  # fmt: skip
    if args.multi_objective_aggregation == "normalize_then_sum" and args.scale_rewards in ("none", False):
        yield OptionError(
            f"`scale_rewards` is {args.scale_rewards!r}, but 'normalize_then_sum' scales each reward by its group and "
            "their sum by the batch, as in TRL. Unset it.", "scale_rewards", "multi_objective_aggregation",
        )  # fmt: skip
    if not {str(value).lower() for value in args.reward_required or ()} <= {"true", "false"}:
        message = f"`reward_required` is {args.reward_required}; it must be true or false for each reward."
        yield OptionError(message, "reward_required")
    method = args.multi_objective_aggregation
    threshold = str(args.log_tame_threshold)
    if method != "log_tamed" and threshold != str(defaults["log_tame_threshold"]):
        message = f"`log_tame_threshold` is {threshold}, which {method!r} does not use. Unset it."
        yield OptionError(message, "log_tame_threshold", "multi_objective_aggregation")
    if args.reference != "initial" and not args.beta > 0:
        yield OptionError("`reference` is 'base', but no loss compares with it. Set `beta`.", "reference", "beta")
    yield from _times_errors(args) if is_nft else _step_errors(args)


def choice_errors(config: Any, choices: Mapping[str, Collection[Any]]) -> Iterator[OptionError]:
    """Check the fields that take one of a few values; a command line has parsed them."""
    for name, allowed in choices.items():
        if (value := getattr(config, name)) not in allowed:
            yield OptionError(f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, allowed))}.", name)


def read_scale_rewards(scale_rewards: Any) -> Any:
    """Return `scale_rewards` with the words of a command line or a file as truth values."""
    return {"true": True, "false": False}.get(str(scale_rewards).lower(), scale_rewards)


def size_errors(options: Any) -> Iterator[OptionError]:
    """Check the round sizes before launch, if the number of processes is known."""
    # The command line has it, unless it is in a file of `accelerate`
    launched = None if getattr(options, "accelerate_config", None) else 1
    num_processes = os.environ.get("WORLD_SIZE") or getattr(options, "num_processes", None) or launched
    if num_processes is not None:
        divisors = round_divisors(options, int(num_processes))
        yield from collect_errors(lambda: round_sizes(RoundSizes.of(options), **divisors))


def _round_errors(args: SimpleNamespace) -> Iterator[OptionError]:
    value, multiple = args.per_device_rollout_batch_size, args.per_device_train_batch_size
    if value is not None and value % multiple != 0:
        below = max(value // multiple, 1) * multiple
        yield OptionError(
            f"`per_device_rollout_batch_size` is {value}, but must be a multiple of `per_device_train_batch_size`, "
            f"{multiple}. Nearest values that work: {below} or {below + multiple}.",
            "per_device_rollout_batch_size", "per_device_train_batch_size",
        )  # fmt: skip
    batch_size = value or multiple
    if args.max_resample_times and args.min_reward_std is None and args.max_reward_mean is None:
        yield OptionError(
            f"`max_resample_times` is {args.max_resample_times}, but no prompt is left out. Set `min_reward_std` (0 "
            "for those with equal rewards) or `max_reward_mean`.", "max_resample_times", "min_reward_std",
            "max_reward_mean",
        )  # fmt: skip
    if args.max_resample_times and args.num_generations % batch_size:
        yield OptionError(
            f"`max_resample_times` generates single prompts again, but a batch of {batch_size} images would hold "
            f"parts of several. Choose a size that divides `num_generations` ({args.num_generations}).",
            "max_resample_times", "per_device_rollout_batch_size", "per_device_train_batch_size", "num_generations",
        )  # fmt: skip


def _step_errors(args: SimpleNamespace) -> Iterator[OptionError]:
    """Check the stochastic steps and the loss on them."""
    last = args.num_inference_steps - 1
    if not args.sde_steps or len({*args.sde_steps} & {*range(last)}) != len(args.sde_steps):
        yield OptionError(
            f"`sde_steps` is {args.sde_steps}; with `num_inference_steps` {last + 1} it must name at least one step, each "
            f"once, from 0 to {last - 1}: the noise of the last, {last}, would stay in the image.",
            "sde_steps", "num_inference_steps",
        )  # fmt: skip
    else:
        if args.num_sde_steps is not None and not 1 <= args.num_sde_steps <= len(args.sde_steps):
            yield OptionError(
                f"`num_sde_steps` is {args.num_sde_steps}, but {len(args.sde_steps)} steps are named in `sde_steps` "
                f"({sorted(args.sde_steps)}) to choose from.", "num_sde_steps", "sde_steps",
            )  # fmt: skip
        rest = last - max(args.sde_steps)
        if args.tail_steps is not None and not 1 <= args.tail_steps <= rest:
            yield OptionError(
                f"`tail_steps` is {args.tail_steps}, but {rest} of {last + 1} steps follow the last stochastic one, "
                f"{max(args.sde_steps)}. Choose from 1 to {rest}, or None for all.",
                "tail_steps", "num_inference_steps", "sde_steps",
            )  # fmt: skip
    if args.sde_type == "cps" and args.noise_level > 1:
        message = f"`noise_level` is {args.noise_level}; it must be at most 1 for 'cps'."
        yield OptionError(message, "noise_level", "sde_type")


def _times_errors(args: SimpleNamespace) -> Iterator[OptionError]:
    """Check the times at which NFT and AWM train an image."""
    count = args.num_inference_steps - 1  # steps without the last
    if args.num_noise_levels is not None and not 1 <= args.num_noise_levels <= count:
        message = f"`num_noise_levels` is {args.num_noise_levels}; it must be from 1 to {count}, one per step."
        yield OptionError(message, "num_noise_levels", "num_inference_steps")


def reward_config_errors(
    config: Any, defaults: Mapping[str, Any], unsupported: Collection[str], whole: Collection[str] = ()
) -> Iterator[OptionError]:
    """Check the values of PaCoRewardConfig."""
    args = SimpleNamespace(**vars(config))
    yield from _unsupported_values(args, defaults, unsupported, _ALTERNATIVES)
    yield from _out_of_range(args, defaults, whole, _REWARD_RANGES)
    yield from _common_errors(args)
    if args.train_sampling_strategy == "batch_rebalance":
        yield OptionError(
            "`train_sampling_strategy` is 'batch_rebalance', whose order does not depend on `seed` alone. Use "
            "'group_by_length'.", "train_sampling_strategy",
        )  # fmt: skip
    if args.bf16 and args.fp16:
        yield OptionError("`bf16` and `fp16` exclude each other. Unset one.", "bf16", "fp16")


def check_quantization(quantization: str | None, is_full: bool, is_sharded: bool, is_compiled: bool) -> None:
    """Refuse a quantized transformer, by option or description, that cannot be trained in the requested way."""
    is_bitsandbytes = (quantization or "").endswith(("nf4", "bitsandbytes"))
    reasons = {}
    if is_full:
        reasons["use_peft"] = (
            "without a `peft_config` its own weights are trained, which get no gradients. Train an adapter"
        )
    if is_sharded:
        reasons["deepspeed"] = (
            "DeepSpeed and FSDP are supported for unquantized weights only. Use `multi_gpu.yaml` (DDP)"
        )
    if is_compiled and not is_bitsandbytes:
        reasons["compile_repeated_blocks"] = "only 'nf4' works with `compile_repeated_blocks`. Unset it"
    for option, reason in reasons.items():
        if quantization is not None:
            message = f"The transformer is quantized ({quantization}), but {reason}, or do not quantize it."
            raise OptionError(message, "quantization", option)


def _unsupported_values(
    args: SimpleNamespace,
    defaults: Mapping[str, Any],
    unsupported: Collection[str],
    alternatives: Mapping[str, str],
    *because: str,
    reason: str = "is not supported here",
) -> Iterator[OptionError]:
    """Refuse fields that are set to anything but their default, `because` of the values of other fields."""
    for name, value in vars(args).items():
        if name in unsupported and value is not None and value != defaults[name]:
            others = [alternatives[name]] if name in alternatives else []
            hint = f"; use `{others[0]}` instead" if others else ""
            message = f"`{name}` is set to {value!r}, which {reason}. Leave it out{hint}."
            yield OptionError(message, name, *because, remedies=others)


def _out_of_range(
    args: SimpleNamespace, defaults: Mapping[str, Any], whole: Collection[str], ranges: Ranges
) -> Iterator[OptionError]:
    """Refuse values out of range, and replace them by their defaults for the next checks."""
    for name in whole:
        value = getattr(args, name)
        is_list = isinstance(value, list | tuple | range)
        if not all(number is None or isinstance(number, Integral) for number in (value if is_list else [value])):
            kind = "whole numbers" if is_list else "a whole number"
            yield OptionError(f"`{name}` is {value!r}; it must be {kind}.", name)
            setattr(args, name, defaults[name])
    for names, is_good, rule in ranges:
        for name in names:
            value = getattr(args, name)
            try:
                fits = is_good(value)
            except (TypeError, ValueError):  # a value of another type, or None
                fits = False
            if not fits:  # NaN is not either
                is_bound = isinstance(value, str) and rule.startswith(("at least", "above", "between", "in ("))
                yield OptionError(f"`{name}` is {value!r}; it must be {'a number ' * is_bound}{rule}.", name)
                setattr(args, name, defaults[name])


def _fsdp_errors(optim: Any) -> Iterator[OptionError]:
    """Refuse settings that are not supported with FSDP."""
    if not uses_fsdp():
        return
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        yield OptionError(f"`fsdp_version` of the launcher's configuration is {version}. Set it to 2.")
    for name, reason in _REFUSED_FSDP.items():
        if os.environ.get(name.upper(), "false").lower() == "true":
            yield OptionError(f"`{name}` of the launcher's configuration is true, {reason}. Set it to false.")
    if (name := getattr(optim, "value", optim)) not in _FSDP_OPTIMIZERS:
        yield OptionError(f"`optim` is '{name}'; with FSDP it must be one of {_FSDP_OPTIMIZERS}.", "optim")


def _common_errors(args: SimpleNamespace) -> Iterator[OptionError]:
    """Check options that all trainers share."""
    if sys.platform == "win32":
        raise OSError(NOT_ON_WINDOWS)
    yield from _tracker_errors(args.report_to)
    yield from _deepspeed_errors(args.deepspeed)
    yield from _signal_errors(args.jit_checkpoint_signals)
    yield from _fsdp_errors(args.optim)
    yield from _model_kwargs_errors(args.model_init_kwargs)
    yield from _number_errors(args)
    yield from _saving_errors(args)


def _tracker_errors(report_to: Any) -> Iterator[OptionError]:
    trackers = report_to if isinstance(report_to, list) else [report_to]
    for name in {*trackers} - {None, "all", "none"}:
        packages = _TRACKER_PACKAGES.get(name, (name,))
        if packages and not any(package.isidentifier() and find_spec(package) for package in packages):
            reason = f"but {name} is not installed: `pip install {packages[0]}`."
            if name not in _TRACKER_PACKAGES:
                reason = f"but must be of {', '.join(sorted(_TRACKER_PACKAGES))}, 'all' or 'none'."
            yield OptionError(f"`report_to` has {name!r}, {reason}", "report_to")


def _deepspeed_errors(deepspeed: Any) -> Iterator[OptionError]:
    if deepspeed in ("zero2", "zero3", "zero3_offload") and not os.path.isfile(deepspeed):
        message = f"`deepspeed` is {deepspeed!r}, the name of a configuration of accelerate. Launch with it: "
        yield OptionError(f"{message}`--accelerate_config {deepspeed}`.", "deepspeed")
    elif deepspeed is not None and find_spec("deepspeed") is None:
        message = '`deepspeed` is set, but not installed: pip install "paco_trl[deepspeed]".'
        yield OptionError(message, "deepspeed")


def _signal_errors(names: Iterable[str]) -> Iterator[OptionError]:
    for name in {*names} - ({*signal.Signals.__members__} - {"SIGKILL", "SIGSTOP"}):
        message = (
            f"`jit_checkpoint_signals` has {name!r}, which is no signal that a process can catch, such as 'SIGTERM'."
        )
        yield OptionError(message, "jit_checkpoint_signals")


def _model_kwargs_errors(model_init_kwargs: Any) -> Iterator[OptionError]:
    kwargs = model_init_kwargs or {}
    message = ""
    if isinstance(kwargs, str):  # typed on a command line
        try:
            kwargs = json.loads(kwargs)
        except ValueError as error:
            message = f"`model_init_kwargs` is {kwargs!r}, which is not JSON: {error}"
            kwargs = {}
    if not isinstance(kwargs, dict):
        message = f'`model_init_kwargs` is {kwargs!r}; it must be arguments by name, as JSON `{{"revision": "main"}}`.'
    elif "torch_dtype" in kwargs:
        message = "`model_init_kwargs` has `torch_dtype`, now called `dtype`. Rename it, or set `bf16`."
    if message:
        yield OptionError(message, "model_init_kwargs")


def _number_errors(args: SimpleNamespace) -> Iterator[OptionError]:
    """Check seeds, infinite numbers, and the length of the run."""
    for name in ("seed", "data_seed"):
        if (seed := getattr(args, name)) is not None and not 0 <= seed < 2**32:  # NumPy's
            yield OptionError(f"`{name}` is {seed}; it must be from 0 to {2**32 - 1}.", name)
    unbounded = (*_MAY_BE_INFINITE, "num_train_epochs") if args.max_steps >= 1 else _MAY_BE_INFINITE
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value) and (name not in unbounded or math.isnan(value)):
            yield OptionError(f"`{name}` is {value}; it must be a finite number.", name)
    if not args.max_steps >= 1 and (args.max_steps != -1 or not args.num_train_epochs > 0):
        message = f"`max_steps` is {args.max_steps}; it must be at least 1, or left out to train `num_train_epochs`."
        if args.max_steps == -1:
            message = f"`num_train_epochs` is {args.num_train_epochs}; it must be above 0, or set `max_steps`."
        yield OptionError(message, "max_steps", "num_train_epochs")


def _saving_errors(args: SimpleNamespace) -> Iterator[OptionError]:
    strategies = [str(getattr(value, "value", value)) for value in (args.save_strategy, args.eval_strategy)]
    if strategies[0] == "best" and strategies[1] == "no":
        yield OptionError(
            "`save_strategy` is 'best', but `eval_strategy` is 'no': without an evaluation nothing is saved before the "
            "end. Set `eval_strategy`, or another `save_strategy`.",
            "save_strategy", "eval_strategy",
        )  # fmt: skip
    if args.load_best_model_at_end and strategies[0] not in ("best", strategies[1]):
        yield OptionError(
            f"`save_strategy` is '{strategies[0]}', but `load_best_model_at_end` requires that of `eval_strategy`, "
            f"'{strategies[1]}': the best model must have been saved. Set it.",
            "save_strategy", "eval_strategy", "load_best_model_at_end",
        )  # fmt: skip
