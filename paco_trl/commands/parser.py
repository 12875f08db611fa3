# SPDX-License-Identifier: Apache-2.0
"""Options and parser of the commands, and commands in stages."""

import argparse
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any, NoReturn, get_args, get_type_hints

from transformers import AttentionInterface, TrainingArguments
from trl import TrlParser

from ..utils.text import shorten
from .main import read_config, say


# What a run usually sets, in the order of the help
_USUAL = (
    *("model_name_or_path", "output_dir", "max_steps", "num_train_epochs", "resume_from_checkpoint", "seed"),
    *("num_prompts_per_generation", "num_generations", "optimizer_steps_per_generation", "num_inference_steps"),
    *("height", "width", "resolution_scale", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("rewards", "reward_weights", "judge_model", "judge_url", "edits", "dataset_name", "dataset_split"),
    *("learning_rate", "beta", "nft_beta", "lora_r", "lora_alpha", "adapter", "use_peft"),
    *("bf16", "use_cpu", "gradient_checkpointing", "quantization", "load_in_4bit"),
    *("eval_strategy", "eval_steps", "eval_dataset_name", "eval_split", "save_steps", "logging_steps", "report_to"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "accelerate_config", "num_processes"),
)

# Where the help of TRL or transformers speaks of language models, or does not say what an option does here
_HELP = {
    "model_init_kwargs": "Arguments of the model's `from_pretrained`, as JSON, such as a revision.",
    "max_steps": "Number of optimizer steps, instead of `num_train_epochs`.",
    "resume_from_checkpoint": "`auto`: the latest checkpoint in `output_dir`, or from scratch without one; `True`: the "
    "latest; or the directory of one.",
}


# What a file says about an option is not for another value of it. All other contradictions are found by trying.
_REPLACED = {
    "rewards": ("reward_weights", "reward_required"),
    "adapter": ("lora_r", "lora_alpha", "lora_target_modules"),
    "lora_r": ("lora_alpha",),
    "num_train_epochs": ("max_steps",),
    "save_steps": ("save_strategy",),
    "logging_steps": ("logging_strategy",),
}
# The paper's number of prompts is not for another effective batch, and its layers are not those of another model
_REPLACED_IN_RECIPES = {
    "gradient_accumulation_steps": ("num_prompts_per_generation",),
    "model_name_or_path": ("lora_target_modules",),
}
_UNSET = object()
# In an error: with another value it is the same one
_VALUES = re.compile(r"'[^']*'|[\d.]+")

# Help of options of several commands
JUDGE_QUANTIZATION = "Quantization of a judge in the process: `nf4`, `int8` or `fp8`."
JUDGE_ATTENTION = "Attention of a judge in the process, such as `flash_attention_2`. If `None`, transformers' default."


def option(default: Any, help: str, *aliases: str, **kwargs) -> Any:
    """Declare a field of a dataclass of arguments, as [`~trl.TrlParser`] reads it; `kwargs` are for argparse."""
    metadata = {"help": help, "aliases": list(aliases), **kwargs}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def judge_options(args: Any, url: str | None) -> dict[str, Any]:
    """Return the options of a judge in the process, as arguments of its loading; refuse them for a judge at `url`."""
    options = {name: getattr(args, f"judge_{name}") for name in ("quantization", "attn_implementation")}
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if url is not None:
            raise ValueError(f"`--judge_{name}` is {value!r}, but a served judge is quantized and run by its server.")
    attention = options.get("attn_implementation", "eager")
    if "/" not in attention and attention not in (known := ("eager", *AttentionInterface().valid_keys())):
        raise ValueError(
            f"`--judge_attn_implementation` is {attention!r}; it must be {', '.join(known)} or a kernel on the Hub."
        )
    return options


def refuse_unused(args: Any, names: Iterable[str], where: str) -> None:
    """Refuse options that were typed and would do nothing; `where` says in which case."""
    if unused := [f"`--{name}`" for name in names if name in getattr(args, "typed", ())]:
        raise ValueError(f"{', '.join(unused)} would do nothing {where}. Leave it out.")


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {option: value for option, value in options.items() if option != name}


class CommandParser(TrlParser):
    """
    Parser that hides the `hidden` options, names the nearest of an unknown one, and knows which options were typed.

    `positional` is an option that may be given first without its name: `paco-trl push paco-flux`. `presets` returns
    defaults that depend on the options that are given, `foreign` names those of a file that are not for this run,
    with the reason, and `check` refuses options that contradict one another.
    """

    def __init__(
        self,
        dataclass_types: type | tuple[type, ...],
        hidden: Collection[str] = (),
        positional: str | None = None,
        is_launched: bool = False,
        presets: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        foreign: Callable[[dict[str, Any]], dict[str, str]] = lambda options: {},
        check: Callable[..., None] = lambda *parsed: None,
        **kwargs,
    ):
        named = "" if positional is None else f"{positional.removesuffix('_name_or_path').upper()} "
        kwargs = {"usage": f"%(prog)s {named}[--config FILE] [options]", **kwargs}
        super().__init__(dataclass_types, formatter_class=argparse.HelpFormatter, allow_abbrev=False, **kwargs)
        self.positional, self.is_launched, self.presets = positional, is_launched, presets
        self.foreign, self.check = foreign, check
        hints = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        self.nullable = {name for name, hint in hints.items() if type(None) in get_args(hint)}
        if is_launched:  # by `main`, before the options are parsed
            texts = {
                "num_processes": "Start that many processes, one for each GPU.",
                "accelerate_config": "A file of `accelerate`, or the name of a packaged one, such as `zero3`.",
            }
            for name, text in texts.items():
                self.add_argument(f"--{name}", help=text, default=argparse.SUPPRESS)
        # What must be set, what usually is, the package's other options, and those of TRL and transformers
        titles = ("required", "usual options", "options", "options of TRL and transformers")
        self.sections: dict[str, list[argparse.Action]] = {title: [] for title in titles}
        self.required, usual, package, others = self.sections.values()
        classes = [base for kind in self.dataclass_types for base in kind.__mro__]
        libraries = [kind for kind in classes if kind.__module__.split(".")[0] in ("transformers", "trl")]
        names = set().union(*map(inspect.get_annotations, {*classes} - {*libraries}))
        for action in self._actions:
            # `--learning-rate` is taken too, but shown once
            action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
            is_ours = not libraries or action.dest in {"help", *names}
            is_usual = bool(libraries) and action.dest in _USUAL
            section = self.required if action.required else usual if is_usual else package if is_ours else others
            section.append(action)
            if action.dest in hidden or action.dest == "fsdp_config" or action.option_strings[0].startswith("--no_"):
                action.help = argparse.SUPPRESS  # training refuses FSDP
                continue
            action.help = _HELP.get(action.dest, action.help)
            if action.default not in (None, argparse.SUPPRESS):
                action.help = f"{action.help} (default: %(default)s)"
        usual.sort(key=lambda action: _USUAL.index(action.dest))
        for action in self.required:
            action.required = False  # for argparse, which would hide a misspelled one behind it

    def format_help(self) -> str:
        """List the options in sections."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in self.sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of ending the process: of several processes one says it."""
        raise ValueError(message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        is_none = arg_string.lower() in ("none", "null") and arg_string != action.default  # a value of `report_to`
        return None if is_none and action.dest in self.nullable else super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value is not None:
            super()._check_value(action, value)

    def parse_args_and_config(self, args: Sequence[str] | None = None) -> tuple:
        """
        Parse the options of the command line, and of the YAML file or recipe that `--config` names.

        What contradicts the command line in the file is left out, in one line. The command's own dataclasses get
        `typed`, the options that the user gave, on the command line or in a file that is no recipe of the package.
        """
        config, words, recipe = read_config(sys.argv[1:] if args is None else args)
        # As `TrlParser` does
        os.environ |= {name: str(value) for name, value in (config.pop("env", None) or {}).items()}
        if self.positional is not None and words and not words[0].startswith("-"):
            words = [f"--{self.positional}", *words]
        typed, given = self._parse(words), self._read(config, recipe)
        for action in self.required:
            if (typed | given).get(action.dest) is None:
                raise ValueError(f"`--{action.dest}` is required.")
        replaced = _REPLACED | (_REPLACED_IN_RECIPES if recipe else {})
        left_out = {name: f"`--{by}`" for by in typed for name in replaced.get(by, ()) if given.get(name) != "steps"}
        left_out |= self.foreign(given)
        left_out = {name: by for name, by in left_out.items() if name in given and name not in typed}
        defaults = {name: value for name, value in given.items() if name not in left_out}
        defaults = ({} if self.presets is None else self.presets(defaults | typed)) | defaults
        chosen = {*typed} if recipe else {*typed, *given}
        try:
            parsed = self._build(defaults | typed, chosen)
        except ValueError as error:
            conflicts = self._find_conflicts(typed, defaults, chosen, error)
            given, left_out = defaults | given, left_out | conflicts
            parsed = self._build({name: defaults[name] for name in defaults if name not in conflicts} | typed, chosen)
        for by in dict.fromkeys(left_out.values() if os.environ.get("RANK", "0") == "0" else ()):
            listed = ", ".join(f"{name}={shorten(given[name])}" for name in left_out if left_out[name] == by)
            say(self.prog.removeprefix("paco-trl "), f"without {listed} of {recipe or 'the file'}, because of {by}.")
        return parsed

    def _build(self, options: dict[str, Any], chosen: Collection[str]) -> tuple:
        """Build the dataclasses, and check them together."""
        parsed: list[Any] = []
        for kind in self.dataclass_types:
            names = [known.name for known in fields(kind) if known.init and known.name in options]
            parsed.append(kind(**{name: options[name] for name in names}))
            for name in names:
                if name.endswith("_dir") and isinstance(options[name], str) and os.path.isfile(options[name]):
                    raise ValueError(f"`--{name}` is {options[name]!r}, which is a file. Name a directory.")
            if issubclass(kind, TrainingArguments):  # which checks itself
                continue
            parsed[-1].typed = {name for name in chosen if options.get(name) is not None}
            for name, value in vars(parsed[-1]).items():
                values, least = value if isinstance(value, list) else [value], 0 if "seed" in name else 1
                if any(type(number) is int and number < least for number in values):
                    raise ValueError(f"`--{name}` is {value}, but must be at least {least}.")
        self.check(*parsed)
        return tuple(parsed)

    def _find_conflicts(
        self, typed: dict[str, Any], defaults: dict[str, Any], chosen: Collection[str], error: ValueError
    ) -> dict[str, str]:
        """Find what contradicts the command line in `defaults`, and which option it contradicts, by leaving each out."""

        def error_of(typed: dict[str, Any], defaults: dict[str, Any]) -> str:
            try:
                self._build(defaults | typed, chosen)
            except ValueError as found:
                return _VALUES.sub("", str(found))
            return ""

        conflicts, left, text = {}, defaults, _VALUES.sub("", str(error))
        logging.disable(logging.WARNING)  # of each trial
        try:
            while text:
                # Without `--use_cpu` the machine refuses other things
                needed = {"use_cpu", *(action.dest for action in self.required)}
                words = [name for name in typed if name not in needed]
                by = next((name for name in words if error_of(_without(typed, name), left) != text), None)
                given = [name for name in left if name not in typed]
                name = next((name for name in given if error_of(typed, _without(left, name)) != text), None)
                if by is None or name is None:
                    raise ValueError(str(error)) from error  # also of TRL's and transformers' settings
                conflicts[name], left = f"`--{by}`", _without(left, name)
                text = error_of(typed, left)
            for name in list(conflicts):  # what only seemed to be in the way
                if not error_of(typed, left | {name: defaults[name]}):
                    del conflicts[name]
                    left[name] = defaults[name]
        finally:
            logging.disable(logging.NOTSET)
        return conflicts

    def _parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options that are among these words."""
        unset = argparse.Namespace(**{action.dest: _UNSET for action in self._actions})
        parsed, unknown = self.parse_known_args(words, unset)
        if unknown:
            raise ValueError(self._describe_unknown(unknown[0]))
        options = {name: value for name, value in vars(parsed).items() if value is not _UNSET}
        return self._split_weights({name: None if value == [None] else value for name, value in options.items()})

    def _describe_unknown(self, word: str) -> str:
        """Name the nearest option."""
        actions = [action for section in self.sections.values() for action in section]
        known = [name for action in actions if action.help != argparse.SUPPRESS for name in action.option_strings]
        if not word.startswith("-"):
            needed = [f" Did you mean `{action.option_strings[0]} {word}`?" for action in self.required]
            return f"`{word}` belongs to no option.{''.join(needed[:1]) or ' See `--help`.'}"
        word = word.partition("=")[0]  # its value may be a token
        full = f"--{word.lstrip('-').replace('-', '_')}"
        starts = {name[: len(full)]: name for name in reversed(known)}
        near = get_close_matches(full, known, 1, cutoff=0.7)
        near = near or [starts[start] for start in get_close_matches(full, starts, 1, cutoff=0.8)]
        return f"there is no option `{word}`. " + (f"Did you mean `{near[0]}`?" if near else "See `--help`.")

    def _split_weights(self, options: dict[str, Any]) -> dict[str, Any]:
        """Move the weights of `rewards` (`consistency=0.2 clip_t`) to `reward_weights`; those without one have 1."""
        names, weights = [], []
        for word in options.get("rewards") or ():
            name, _, number = word.rpartition("=")
            try:
                weight = float(number) if name else None
            except ValueError:  # of a path with a `=`
                weight = None
            names.append(word if weight is None else name)
            weights.append(weight)
        if not any(weight is not None for weight in weights):
            return options
        if "reward_weights" not in self.nullable:
            raise ValueError(f"`rewards` has weights, but `{self.prog}` takes none. Leave them out.")
        if options.get("reward_weights") is not None:
            raise ValueError("`rewards` has weights, and `reward_weights` is set too. Give them once.")
        return options | {
            "rewards": names,
            "reward_weights": [1.0 if weight is None else weight for weight in weights],
        }

    def _read(self, config: dict[str, Any], recipe: str | None) -> dict[str, Any]:
        """Return the options of a file: most are read as words of a command line."""
        words: list[str] = []
        options: dict[str, Any] = {}
        for name, value in config.items():
            option = f"--{str(name).replace('-', '_')}"
            action = self._option_string_actions.get(option)
            if self.is_launched and option in ("--num_processes", "--accelerate_config"):
                continue  # `main` has started them
            if action is None and recipe is not None:
                raise ValueError(f"{recipe} is no recipe for `{self.prog}`, which has no option `{name}`.")
            if value is None and action is not None:
                if action.dest not in self.nullable:
                    raise ValueError(f"`{name}` has no value in the file. Give it one, or leave the line out.")
                options[action.dest] = None
                continue
            if action is not None and action.nargs == "+":  # rewards and their weights
                entries = value if isinstance(value, list) else [value]
                pairs = [entry if isinstance(entry, dict) else {entry: None} for entry in entries]
                value = [
                    key if weight is None else f"{key}={weight}" for pair in pairs for key, weight in pair.items()
                ]
            if value is False and action is not None and "no" in (action.choices or ()):
                value = "no"  # as YAML reads it
            if isinstance(value, list) and action is not None and (action.nargs == "+" or action.type is str):
                # Words may begin with dashes, and `report_to` takes a text or a list
                options[action.dest] = [self._get_value(action, str(word)) for word in value]
            else:
                words.append(f"{option}={json.dumps(value) if isinstance(value, dict) else value}")
        return self._split_weights(self._parse(words) | options)


def run_stage(
    words: list[str],
    stages: Mapping[str, tuple[type, Any]],
    program: str,
    text: str | None,
    positional: Mapping[str, str] | None = None,
) -> int:
    """Run the stage that the first word names, with the options behind it."""
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<9} {arguments.__doc__}" for name, (arguments, _) in stages.items()]
        sys.stdout.write("\n".join([(text or "").strip(), "", "Stages:", *lines, ""]))
        return 0
    if words[0] not in stages:
        raise ValueError(f"There is no stage {words[0]!r}. It must be one of: {', '.join(stages)}.")
    stage, *words = words
    arguments, run = stages[stage]
    parser = CommandParser(
        arguments, positional=(positional or {}).get(stage), is_launched=True, prog=f"{program} {stage}"
    )
    run(*parser.parse_args_and_config(words))
    return 0
