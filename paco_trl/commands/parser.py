# SPDX-License-Identifier: Apache-2.0
"""Parser of the commands, and commands in stages."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from transformers import TrainingArguments
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


_TRUTH_WORDS = ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0")


class CommandParser(TrlParser):
    """
    Parser that hides the `hidden` options, names the nearest of an unknown one, and reads a file as the command line.

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
        self.positional, self.is_launched = positional, is_launched
        if is_launched:  # by `main`, before the options are parsed
            own: Any = {"default": argparse.SUPPRESS}
            self.add_argument("--num_processes", type=int, help="Start that many processes, one for each GPU.", **own)
            self.add_argument(
                "--accelerate_config",
                help="A file of `accelerate`, or the name of a packaged one, such as `zero3`.",
                **own,
            )
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
        words = list(sys.argv[1:] if args is None else args)
        if self.positional is not None:
            # A switch would take the word behind it as its value
            switches = {name for action in self._actions if action.nargs == "?" for name in action.option_strings}
            for place in range(len(words) - 1):
                is_value = words[place + 1].lower() in _TRUTH_WORDS or words[place + 1].startswith("-")
                if words[place] in switches and not is_value:
                    words.insert(place + 1, f"--{self.positional}")
                    break
        namespace, unknown = super().parse_known_args(words, namespace)
        if self.positional is not None and unknown and not unknown[0].startswith("-"):
            setattr(namespace, self.positional, unknown.pop(0))
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
        """Parse the options of the YAML file that `--config` names, then those of the command line."""
        config, words = read_config(sys.argv[1:] if args is None else args)
        os.environ |= {
            name: str(value) for name, value in (config.pop("env", None) or {}).items()
        }  # as `TrlParser` does
        return super().parse_args_and_config([*self._words(config), *words], *more, **kwargs)

    def _words(self, config: dict[str, Any]) -> list[str]:
        """Write the options of a file as those of a command line."""
        hints = {name: hint for each in self.dataclass_types for name, hint in get_type_hints(each).items()}
        words = []
        for name, value in config.items():
            option = f"--{str(name).replace('-', '_')}"
            action = self._option_string_actions.get(option)
            if self.is_launched and option in ("--num_processes", "--accelerate_config"):
                continue  # `main` has started them
            if value is None and action is not None:
                if type(None) not in get_args(hints[action.dest]):
                    raise ValueError(f"`{name}` has no value in the file. Give it one, or leave the line out.")
                self.set_defaults(**{action.dest: None})
            elif isinstance(value, list) and action is not None and action.nargs == "+":
                try:  # not as words, which may begin with dashes
                    self.set_defaults(**{action.dest: [self._get_value(action, str(each)) for each in value]})
                except argparse.ArgumentError as error:
                    self.error(str(error))
            elif (
                isinstance(value, list) and action and any(get_origin(h) is list for h in get_args(hints[action.dest]))
            ):
                self.set_defaults(**{action.dest: value})  # `report_to` takes a text or a list
            else:
                words.append(f"{option}={json.dumps(value) if isinstance(value, dict) else value}")
        return words


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
