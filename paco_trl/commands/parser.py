# SPDX-License-Identifier: Apache-2.0
"""Parser of the commands, and commands in stages."""

import argparse
import inspect
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from transformers import TrainingArguments
from trl import TrlParser

from .main import read_config


# What a run usually sets, in the order of the help
_USUAL = (
    *("model_name_or_path", "output_dir", "max_steps", "num_train_epochs", "resume_from_checkpoint", "seed"),
    *("num_prompts_per_generation", "num_generations", "optimizer_steps_per_generation", "num_inference_steps"),
    *("height", "width", "resolution_scale", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("rewards", "reward_weights", "judge_model", "judge_url", "edits", "dataset_name", "dataset_split"),
    *("learning_rate", "beta", "nft_beta", "lora_r", "lora_alpha", "adapter_name_or_path", "use_peft"),
    *("bf16", "use_cpu", "gradient_checkpointing", "quantization", "load_in_4bit"),
    *("eval_strategy", "eval_steps", "eval_dataset_name", "eval_split", "save_steps", "logging_steps", "report_to"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "accelerate_config", "num_processes"),
)


_TRUTH = ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0")  # values of a switch


class CommandParser(TrlParser):
    """
    Parser that hides the `hidden` options, names the nearest of an unknown one, and checks the values of a file.

    `positional` is an option that may be given without its name: `paco-trl push paco-flux`.
    """

    def __init__(
        self,
        dataclass_types: type | tuple[type, ...],
        hidden: Collection[str] = (),
        positional: str | None = None,
        is_launched: bool = False,
        **kwargs,
    ):
        named = "" if positional is None else f"{positional.removesuffix('_name_or_path').upper()} "
        kwargs = {"usage": f"%(prog)s {named}[--config FILE] [options]", **kwargs}
        super().__init__(dataclass_types, **{"formatter_class": argparse.HelpFormatter, **kwargs})
        self.positional = positional
        if is_launched:  # by `main`, before the options are parsed
            own: Any = {"default": argparse.SUPPRESS}
            self.add_argument("--num_processes", type=int, help="Start that many processes, one for each GPU.", **own)
            self.add_argument("--accelerate_config", help="Start them as this file of `accelerate` says.", **own)
        self.required = [action for action in self._actions if action.required]
        for action in self._actions:
            action.required = False  # checked below, after unknown options, which may be misspelt ones
            # `--learning-rate` is taken too, but shown once
            action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
            if action.dest in hidden or action.dest == "fsdp_config" or action.option_strings[0].startswith("--no_"):
                action.help = argparse.SUPPRESS  # training refuses FSDP
                continue
            if action.dest == "model_init_kwargs":  # TRL's help speaks of language models
                action.help = "Arguments of the model's `from_pretrained`, as JSON, such as a revision."
            if action.default not in (None, argparse.SUPPRESS):
                action.help = f"{action.help} (default: %(default)s)"

    def format_help(self) -> str:
        """List what must be set, what usually is, the package's other options, and those of TRL and transformers."""
        classes = [base for each in self.dataclass_types for base in each.__mro__]
        own = [each for each in classes if each.__module__.split(".")[0] not in ("builtins", "transformers", "trl")]
        names = {"help"}.union(*map(inspect.get_annotations, own))
        is_training = any(issubclass(each, TrainingArguments) for each in self.dataclass_types)
        usual = {name: place for place, name in enumerate(_USUAL)} if is_training else {}
        sections: dict[str, list[argparse.Action]] = {
            title: [] for title in ("required", "usual options", "options", "options of TRL and transformers")
        }
        for action in self._actions:
            title = "options" if action.dest in names or not is_training else "options of TRL and transformers"
            title = "usual options" if action.dest in usual else title
            sections["required" if action in self.required else title].append(action)
        sections["usual options"].sort(key=lambda action: usual[action.dest])
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in sections.items():
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
            self._refuse(unknown[0].partition("=")[0])  # its value may be a token
        for action in self.required:
            if getattr(namespace, action.dest) is None:
                raise ValueError(f"`{action.option_strings[0]}` is missing. {action.help}")
        return namespace, unknown

    def _refuse(self, word: str) -> None:
        if not word.startswith("--"):
            raise ValueError(
                f"{word!r} belongs to no option. Options begin with `--`; one with several values takes them all."
            )
        shown = [each for each in self._actions if each.help != argparse.SUPPRESS]
        known = [name.lstrip("-") for each in shown for name in each.option_strings]
        near = get_close_matches(word[2:].replace("-", "_"), known, 1, cutoff=0.7)
        hint = [f" Did you mean `--{name}`?" for name in near] or [" `--help` lists all."]
        raise ValueError(f"there is no option `{word}`." + "".join(hint))

    def _get_option_tuples(self, option_string: str) -> list:
        # `--learn` is short for one option, though `--learning_rate` and `--learning-rate` begin with it
        matches: dict[str, tuple] = {}
        for match in super()._get_option_tuples(option_string):
            if match[0].help != argparse.SUPPRESS:
                matches.setdefault(match[0].dest, match)
        return list(matches.values())

    def parse_args_and_config(self, args: Sequence[str] | None = None, *more, **kwargs) -> tuple:
        """Parse the options of the command line and of the YAML file that `--config` names."""
        words = list(sys.argv[1:] if args is None else args)
        if self.positional is not None and (place := self._place_of_positional(words)) is not None:
            words.insert(place, f"--{self.positional}")
        read_config(words)  # its errors are sentences
        words = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        return super().parse_args_and_config(words, *more, **kwargs)

    def _place_of_positional(self, words: list[str]) -> int | None:
        """Find the first word that is neither an option nor the value of one."""
        place = 0
        while place < len(words) and words[place].startswith("-"):
            action = self._option_string_actions.get(words[place])
            takes_value = "=" not in words[place] and (action is None or action.nargs != 0)
            if takes_value and action is not None and action.nargs == "?":  # a switch, which may stand alone
                takes_value = words[place + 1 : place + 2] != [] and words[place + 1].lower() in _TRUTH
            place += 1 + takes_value
        return place if place < len(words) else None

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        """Take the values of a YAML file: one value for a list of one, and an option by any of its names."""
        config = {str(name).replace("-", "_"): value for name, value in config.items()}
        hints = {name: hint for each in self.dataclass_types for name, hint in get_type_hints(each).items()}
        for action in self._actions:
            for name in [option.lstrip("-") for option in action.option_strings if action.nargs != 0]:
                if name not in config:
                    continue
                value = config.pop(name)
                if action.dest in hints:
                    config[action.dest] = _fitting(name, value, action, hints[action.dest])
        for name in config.keys() - {action.dest for action in self._actions}:
            self._refuse(f"--{name}")
        return super().set_defaults_with_config(**config)


def _fitting(name: str, value: Any, action: argparse.Action, hint: Any) -> Any:
    """Return a value of a YAML file as its option takes it."""
    is_union = isinstance(hint, types.UnionType) or get_origin(hint) is Union
    kinds = {get_origin(kind) or kind for kind in (get_args(hint) if is_union else [hint])}
    if value is None and type(None) in kinds:
        return None
    if value is None:
        raise ValueError(f"`{name}` has no value in the file. Give it one, or leave the line out.")
    if action.nargs != "+":
        return _checked(name, value, kinds)
    convert: Any = action.type  # argparse converts a text, but none in a list
    values = [_checked(name, each, {convert}) for each in (value if isinstance(value, list) else [value])]
    if any(isinstance(each, bool) for each in values):
        raise ValueError(f"`{name}` is {value!r} in the file, but takes names. Put a name such as `no` in quotes.")
    try:
        return [convert(each) if isinstance(each, str) or convert is str else each for each in values]
    except ValueError as error:
        raise ValueError(f"`{name}` is {value!r} in the file, which does not fit: {error}.") from error


def _checked(name: str, value: Any, kinds: set) -> Any:
    fits = any(not isinstance(kind, type) or isinstance(value, kind) for kind in kinds) or isinstance(value, str)
    fits = fits or isinstance(value, int) and float in kinds
    if isinstance(value, bool) or not fits:
        # A text may be True or a number, such as `resume_from_checkpoint`, but not that of a choice: YAML's `no` is False
        is_choice = any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds)
        fits = bool in kinds or str in kinds and not is_choice and isinstance(value, (bool, int, float))
    if not fits:
        names = " or ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in kinds - {type(None)}))
        raise ValueError(f"`{name}` is {value!r} in the file, but takes {names}. Put a text such as `no` in quotes.")
    return value


def run_stage(words: list[str], stages: Mapping[str, tuple[type, Any]], program: str, text: str | None) -> int:
    """Run the stage that the first word names, with the options behind it."""
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<9} {arguments.__doc__}" for name, (arguments, _) in stages.items()]
        sys.stdout.write("\n".join([(text or "").strip(), "", "Stages:", *lines, ""]))
        return 0
    if words[0] not in stages:
        raise ValueError(f"There is no stage {words[0]!r}. It must be one of: {', '.join(stages)}.")
    arguments, run = stages[words[0]]
    run(*CommandParser(arguments, is_launched=True, prog=f"{program} {words[0]}").parse_args_and_config(words[1:]))
    return 0
