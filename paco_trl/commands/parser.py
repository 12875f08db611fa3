# SPDX-License-Identifier: Apache-2.0
"""Options and parser of the commands, and commands in stages."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from typing import Any, NoReturn, get_args, get_type_hints

from trl import TrlParser

from .main import read_config


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
    return options


class CommandParser(TrlParser):
    """
    Parser that hides the `hidden` options, names the nearest of an unknown one, and reads a file as the command line.

    `positional` is an option that may be given first without its name: `paco-trl push paco-flux`. `presets` returns
    defaults that depend on the options that are given.
    """

    def __init__(
        self,
        dataclass_types: type | tuple[type, ...],
        hidden: Collection[str] = (),
        positional: str | None = None,
        is_launched: bool = False,
        presets: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        **kwargs,
    ):
        named = "" if positional is None else f"{positional.removesuffix('_name_or_path').upper()} "
        kwargs = {"usage": f"%(prog)s {named}[--config FILE] [options]", **kwargs}
        super().__init__(dataclass_types, formatter_class=argparse.HelpFormatter, allow_abbrev=False, **kwargs)
        self.positional, self.is_launched, self.presets = positional, is_launched, presets
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
        required, usual, own, others = self.sections.values()
        classes = [base for each in self.dataclass_types for base in each.__mro__]
        foreign = [each for each in classes if each.__module__.split(".")[0] in ("transformers", "trl")]
        names = set().union(*map(inspect.get_annotations, {*classes} - {*foreign}))
        for action in self._actions:
            # `--learning-rate` is taken too, but shown once
            action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
            is_own = not foreign or action.dest in {"help", *names}
            is_usual = bool(foreign) and action.dest in _USUAL
            group = required if action.required else usual if is_usual else own if is_own else others
            group.append(action)
            if action.dest in hidden or action.dest == "fsdp_config" or action.option_strings[0].startswith("--no_"):
                action.help = argparse.SUPPRESS  # training refuses FSDP
                continue
            action.help = _HELP.get(action.dest, action.help)
            if action.default not in (None, argparse.SUPPRESS):
                action.help = f"{action.help} (default: %(default)s)"
        usual.sort(key=lambda action: _USUAL.index(action.dest))

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

    def parse_known_args(self, args=None, namespace=None):
        """Parse the options; refuse an unknown one, and name the nearest."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]  # its value may be a token
            known = [name for each in self._actions if each.help != argparse.SUPPRESS for name in each.option_strings]
            near = get_close_matches(f"--{word.lstrip('-').replace('-', '_')}", known, 1, cutoff=0.7)
            raise ValueError(
                f"there is no option `{word}`. " + (f"Did you mean `{near[0]}`?" if near else "See `--help`.")
            )
        return namespace, unknown

    def parse_args_and_config(self, args: Sequence[str] | None = None, **kwargs) -> tuple:
        """Parse the options of the YAML file that `--config` names, then those of the command line."""
        config, words = read_config(sys.argv[1:] if args is None else args)
        # As `TrlParser` does
        os.environ |= {name: str(value) for name, value in (config.pop("env", None) or {}).items()}
        if self.positional is not None and words and not words[0].startswith("-"):
            words = [f"--{self.positional}", *words]
        more, defaults = self._read(config)
        words = [*more, *words]
        if self.presets is not None:
            unset = argparse.Namespace(**{action.dest: None for action in self._actions})
            parsed, _ = self.parse_known_args(words, unset)
            given = {name: value for name, value in vars(parsed).items() if value is not None}
            self.set_defaults(**self.presets(given | defaults))
        self.set_defaults(**defaults)
        try:
            return super().parse_args_and_config(words, **kwargs)
        except ValueError as error:  # also of TRL's and transformers' settings
            raise ValueError(str(error)) from error

    def _read(self, config: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Return the options of a file as words of a command line, and those that have no such form as defaults."""
        hints = {name: hint for each in self.dataclass_types for name, hint in get_type_hints(each).items()}
        words: list[str] = []
        defaults: dict[str, Any] = {}
        for name, value in config.items():
            option = f"--{str(name).replace('-', '_')}"
            action = self._option_string_actions.get(option)
            if self.is_launched and option in ("--num_processes", "--accelerate_config"):
                continue  # `main` has started them
            if value is None and action is not None:
                if type(None) not in get_args(hints[action.dest]):
                    raise ValueError(f"`{name}` has no value in the file. Give it one, or leave the line out.")
                defaults[action.dest] = None
            elif isinstance(value, list) and action is not None and (action.nargs == "+" or action.type is str):
                # Words may begin with dashes, and `report_to` takes a text or a list
                defaults[action.dest] = [self._get_value(action, str(each)) for each in value]
            else:
                words.append(f"{option}={json.dumps(value) if isinstance(value, dict) else value}")
        return words, defaults


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
