# SPDX-License-Identifier: Apache-2.0
"""
Parse options from the command line and YAML, in place of `TrlParser`: errors appear in a second, before torch is
imported, and options that you type override those of a recipe that contradict them.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from ..trainer.config_checks import GRPO_LOSSES, NFT_LOSSES, grpo_config_errors, reward_config_errors, size_errors
from ..utils.errors import OptionError, raise_errors
from ..utils.files import file_on_path
from .config_files import read_config
from .launching import launch
from .messages import print_message
from .options import OptionSources, config_options, declared_options


# What README, recipes and pages set, in the order of the help; `--help all` has the others too
_USUAL = """
    model_name_or_path output_dir max_steps resume_from_checkpoint rewards judge_model judge_url edits dataset_split
    eval_dataset_name eval_split eval_strategy num_prompts_per_generation num_generations height width
    per_device_train_batch_size first_token_weight learning_rate nft_beta lora_r adapter quantization load_in_4bit
    gradient_checkpointing use_cpu report_to push_to_hub hub_model_id num_processes accelerate_config device_memory
""".split()

# Where the help of TRL or transformers speaks of language models, or does not say what an option does here
_HELP = {
    "model_init_kwargs": "Arguments of the model's `from_pretrained`, as JSON, such as a revision.",
    "max_steps": "Number of optimizer steps, instead of `num_train_epochs`.",
    "resume_from_checkpoint": "`auto`: the latest checkpoint in `output_dir`, or from scratch without one; `True`: "
    "the latest; or the directory of one.",
}


def _to_bool(word: str) -> bool:
    values = {**dict.fromkeys(("true", "yes", "y", "1"), True), **dict.fromkeys(("false", "no", "n", "0"), False)}
    if word.lower() not in values:
        raise argparse.ArgumentTypeError(f"{word!r} is neither True nor False")
    return values[word.lower()]


_UNSET: Any = object()
_TYPES: dict[str, Callable] = {"bool": _to_bool, "int": int, "float": float}


# Options of diffusers' scripts and of PEFT's examples, which resemble others here more
_OTHER_NAMES = {
    **dict.fromkeys(("--rank", "--lora_rank"), "--lora_r"), "--batch_size": "--per_device_train_batch_size",
    "--train_batch_size": "--per_device_train_batch_size", "--max_train_steps": "--max_steps",
    "--lr": "--learning_rate", "--warmup_ratio": "--warmup_steps", "--output_dir": "--build_dir",
    "--judge_question": "--template",
    **dict.fromkeys(("--load_in_4bit", "--load_in_8bit"), "--quantization"),
}  # fmt: skip


class CommandParser(argparse.ArgumentParser):
    """
    Parse the fields of dataclasses as options, from the command line and from YAML. A trainer's config is given by its
    name, and imported last.

    `positional` is an option that may come first without its name: `paco-trl push paco-flux`. `check` yields the
    errors of options that contradict each other, as the `errors()` of a dataclass do; `check_start` raises errors that
    no change of a file's options resolves. `hidden` fields are not in the help.
    """

    def __init__(
        self,
        classes: type | tuple[type | str, ...],
        hidden: Collection[str] = (),
        positional: str | None = None,
        is_launched: bool = False,
        check: Callable[..., Iterable[OptionError]] = lambda *parsed: (),
        check_start: Callable[..., None] = lambda *parsed: None,
        **kwargs,
    ):
        positional_usage = "" if positional is None else f"{positional.removesuffix('_name_or_path').upper()} "
        kwargs = {"usage": f"%(prog)s {positional_usage}[--config FILE] [options]", **kwargs}
        super().__init__(allow_abbrev=False, add_help=False, **kwargs)
        self.positional = positional
        self.is_launched = is_launched
        self.shows_all = False
        self.check, self.check_start = check, check_start
        self.errors: list[OptionError] = []
        self.launching: dict[str, Any] = {}
        self.options_of: dict[type | str, dict[str, dict[str, Any]]] = {}
        libraries: set[str] = set()
        for config in classes if isinstance(classes, tuple) else (classes,):
            if isinstance(config, str):
                described = config_options()
                options_by_base = {base: described["options"][base] for base in described["bases"][config]}
                self.options_of[config] = {
                    name: option for options in options_by_base.values() for name, option in options.items()
                }
                hidden = {*hidden, *described["unsupported"][config]}
                libraries |= {*self.options_of[config]}.difference(
                    *(options for base, options in options_by_base.items() if "PaCo" in base)
                )
            else:
                self.options_of[config] = declared_options(config)
        self.defaults = {
            config: {name: option.get("default") for name, option in options.items()}
            for config, options in self.options_of.items()
        }
        options = {name: option for options in self.options_of.values() for name, option in options.items()}
        # argparse takes -1e-4 for an option: https://github.com/python/cpython/issues/105712 (Python 3.11 to 3.13)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)
        self.nullable = {name for name, option in options.items() if option.get("nullable")}
        # What must be set, what usually is, the package's other options, and those of TRL and transformers
        titles = ("required", "usual options", "options", "options of TRL and transformers")
        self.sections: dict[str, list[argparse.Action]] = {title: [] for title in titles}
        self.required, usual, package, library = self.sections.values()
        package.append(self.add_argument("-h", "--help", action="help", help="Show these options."))
        if is_launched:  # by `main`, before the options are parsed
            text = "Start that many processes, one for each GPU."
            options["num_processes"] = {"type": "int", "help": text}
            self.nullable |= {"num_processes"}
            text = "A file of `accelerate`, or the name of a packaged one, such as `zero3`."
            options["accelerate_config"] = {"help": text}
        for name, option in options.items():
            action = self._add_option(name, option)
            section = library if name in libraries else package
            section = usual if libraries and name in _USUAL else section
            (self.required if option.get("required") else section).append(action)
            if name in hidden or name == "fsdp_config":  # training refuses `fsdp`
                action.help = argparse.SUPPRESS
        usual.sort(key=lambda action: _USUAL.index(action.dest))

    # ---- What depends on the model and on the launcher, for a command to override ----

    def presets(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the options that are set."""
        return {}

    def possible_presets(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Return all that [`presets`] can return, without reading the model."""
        return [{}]

    def find_inapplicable(self, options: dict[str, Any]) -> dict[str, str]:
        """Find options of a file that do not apply to this run, with the reason."""
        return {}

    def _add_option(self, name: str, option: Mapping[str, Any]) -> argparse.Action:
        is_bool = option.get("type") == "bool"
        default = option.get("default")
        text = _HELP.get(name, option.get("help", ""))
        action = self.add_argument(
            *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", *option.get("aliases", ()))), dest=name,
            default=default, help=text if default is None else f"{text} (default: %(default)s)",
            type=_TYPES.get(option.get("type", ""), str), choices=option.get("choices"),
            **({"nargs": "?", "const": True} if is_bool else {name: option.get(name) for name in ("nargs", "const")}),
        )  # fmt: skip
        if is_bool and default is True:
            self.add_argument(f"--no_{name}", f"--no-{name.replace('_', '-')}", dest=name, action="store_false")
        # `--learning-rate` is taken too, but shown once
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
        return action

    # ---- Help ----

    def format_help(self) -> str:
        """List the options in sections: the usual ones, or all."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        is_short = bool(self.sections["usual options"]) and not self.shows_all
        for title, actions in [*self.sections.items()][: 2 if is_short else None]:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        if is_short:
            recipes = sorted(file.stem for file in (Path(__file__).parents[1] / "recipes").glob("*.yaml"))
            recipes = [name for name in recipes if self._option_string_actions.keys() >= self._flags_of(name)]
            formatter.add_text(f"`--config` takes a YAML file of options, or a recipe: {', '.join(recipes)}.")
            formatter.add_text(f"`{self.prog} --help all` lists every option.")
        return formatter.format_help()

    def _flags_of(self, recipe: str) -> set[str]:
        return {f"--{name}" for name in read_config(["--config", recipe])[0]}

    # ---- Parsing: from a command line or a file to values ----

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of ending the process: where several processes run, only the first prints it."""
        if "--resume_from_checkpoint: expected" in message:
            message += ". Did you mean `--resume_from_checkpoint auto`?"
        raise_errors([*self.errors, error := OptionError(message)])
        raise error

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self.errors.append(OptionError(f"`--{action.dest}`: {error.message}."))
            return _UNSET

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        is_none = arg_string.lower() in ("none", "null") and arg_string != action.default  # a value of `report_to`
        if is_none and action.dest in self.nullable:
            return None
        if is_none and action.type is not str:
            default = "" if action.default is None else f" for the default, {action.default}"
            raise argparse.ArgumentError(action, f"it cannot be {arg_string}; leave it out{default}")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value is not None:
            super()._check_value(action, value)

    def _parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Parse these words into options; unknown options and wrong values are added to `errors`."""
        unset = argparse.Namespace(**{action.dest: _UNSET for action in self._actions})
        parsed, rest = self.parse_known_args(words, unset)
        options = {name: value for name, value in vars(parsed).items() if value is not _UNSET}
        is_value = False  # of an unknown option: it may be a token
        for word in rest:
            if word.startswith("-") or not is_value:
                self.errors.append(OptionError(self._describe_unknown(word, options)))
            is_value = word.startswith("-") and "=" not in word or is_value and not word.startswith("-")
        return self._split_weights({name: None if value == [None] else value for name, value in options.items()})

    def _describe_unknown(self, word: str, options: Collection[str]) -> str:
        """Name the nearest option."""
        actions = [action for section in self.sections.values() for action in section]
        flags = [flag for action in actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        if not word.startswith("-"):
            missing = [action.option_strings[0] for action in self.required if action.dest not in options]
            hint = f"Did you mean `{missing[0]} {word}`?" if missing else "See `--help`."
            return f"`{word}` belongs to no option. {hint}"
        word = word.partition("=")[0]  # its value may be a token
        full = f"--{word.lstrip('-').replace('-', '_')}"
        starts = {flag[: len(full)]: flag for flag in reversed(flags)}
        near = [flag for flag in flags if flag == _OTHER_NAMES.get(full)]
        near = near or get_close_matches(full, flags, 1, cutoff=0.75)
        near = near or [starts[start] for start in get_close_matches(full, starts, 1, cutoff=0.8)]
        return f"there is no option `{word}`. " + (f"Did you mean `{near[0]}`?" if near else "See `--help`.")

    def _split_weights(self, options: dict[str, Any]) -> dict[str, Any]:
        """Move the weights of `rewards` (`consistency=0.2 clip_t`) to `reward_weights`; those without one have 1."""
        names, weights = [], []
        for word in options.get("rewards") or ():
            name, _, number = word.rpartition("=")
            try:
                weight = float(number) if name else None
            except ValueError:
                weight = None
                if name and "/" not in number and ".py" not in number:  # else it is a path with a `=`
                    message = f"The weight of the reward `{name}` is {number!r}, which is not a number."
                    raise OptionError(message, "rewards") from None
            names.append(word if weight is None else name)
            weights.append(weight)
        if not any(weight is not None for weight in weights):
            return options
        if "reward_weights" not in self.nullable:
            raise OptionError(f"`rewards` has weights, but `{self.prog}` takes none. Leave them out.", "rewards")
        if options.get("reward_weights") is not None:
            message = "`rewards` has weights, and `reward_weights` is set too. Give them once."
            raise OptionError(message, "rewards", "reward_weights")
        return options | {
            "rewards": names,
            "reward_weights": [1.0 if weight is None else weight for weight in weights],
        }

    def _read(self, config: dict[str, Any], recipe: str | None) -> dict[str, Any]:
        """Return the options of a file: most are read as words of a command line."""
        words: list[str] = []
        options: dict[str, Any] = {}
        for name, value in config.items():
            flag = f"--{str(name).replace('-', '_')}"
            action = self._option_string_actions.get(flag)
            if self.is_launched and flag in ("--num_processes", "--accelerate_config"):
                continue  # `main` has started them
            if action is None and recipe is not None:
                command = "grpo" if "PaCoRewardConfig" in self.options_of else "reward"
                raise OptionError(
                    f"{recipe} is no recipe for `{self.prog}`, which has no option `{name}`. Use it with `paco-trl "
                    f"{command}`."
                )
            if value is None and action is not None:
                if action.dest not in self.nullable:
                    raise OptionError(f"`{name}` has no value in the file. Give it one, or leave the line out.")
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
                try:
                    options[action.dest] = [self._get_value(action, str(word)) for word in value]
                except argparse.ArgumentError as error:
                    self.errors.append(OptionError(f"`{name}`: {error.message}."))
            else:
                words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
        return self._split_weights(self._parse(words) | options)

    # ---- Checking: from values to filled dataclasses ----

    def parse_args_and_config(self, args: Sequence[str] | None = None, use_presets: bool = True) -> tuple:
        """
        Parse the options of the command line, and of the YAML file or recipe that `--config` names. `presets`, which
        reads the model, is called unless `use_presets` is `False`.

        Options of the file that contradict the command line are dropped, and one line says so. The command's own
        dataclasses get an attribute `chosen`: the options that the user gave, on the command line or in a file other
        than a recipe of the package.
        """
        sources = self.read(sys.argv[1:] if args is None else args)
        if use_presets and (presets := self.presets(sources.values())):
            sources.presets = presets.keys() - sources.in_file.keys()
            sources.in_file = presets | sources.in_file
            sources.resolve_conflicts(lambda options: [*self._find_errors(*self._fill(options, sources.chosen))])
        parsed = self._fill(sources.values(), sources.chosen, is_built=True)
        for part in parsed:
            if hasattr(part, "typed"):
                part.typed = frozenset(sources.typed)
        if os.environ.get("RANK", "0") == "0":
            final = {name: value for part in parsed for name, value in vars(part).items()}
            for message in sources.describe_left_out(final):
                print_message(self.prog.removeprefix("paco-trl "), message)
        return tuple(parsed)

    def read(self, args: Sequence[str]) -> OptionSources:
        """
        Read the options and raise their errors, without importing torch or reading the model, which takes seconds. If
        several processes are requested, start them in place of this one.
        """
        words = [*args]
        for word in {"-h", "--help"} & {*words}:
            self.shows_all = "all" in words[words.index(word) + 1 :]
            self.print_help()
            self.exit()
        config, words, recipe = read_config(words)
        # As `TrlParser` does
        os.environ |= {name: str(value) for name, value in (config.pop("env", None) or {}).items()}
        if self.positional is not None and words and not words[0].startswith("-"):
            words = [f"--{self.positional}", *words]
        self.errors = []
        typed = self._parse(words)
        num_errors = len(self.errors)
        in_file = self._read(config, recipe)
        self.errors[num_errors:] = [
            OptionError(f"In the file of `--config`: {error}", *error.options) for error in self.errors[num_errors:]
        ]
        self.launching = {name: typed.get(name, config.get(name)) for name in ("num_processes", "accelerate_config")}
        count = self.launching["num_processes"]
        if count is not None and (type(count) is not int or count < 1):
            message = f"`num_processes` is {count!r}; it must be a whole number from 1 on."
            self.errors.append(OptionError(message, "num_processes"))
            self.launching["num_processes"] = None
        for name, value in (in_file | typed).items():
            is_empty = value == "" and "prompt" not in name and "template" not in name
            if is_empty or name == "output_dir" and str(value).lower() in ("none", "null"):
                message = f"`--{name}` is empty. Give a value, or leave the option out; an unset variable is empty."
                self.errors.append(OptionError(message, name))
        sources = OptionSources(typed, in_file, recipe)
        sources.leave_out(self.find_inapplicable(in_file))
        if self.errors:  # a misspelled option may be the one that is missing
            raise_errors([*self.errors, *self._find_errors_of_all_presets(sources.values(), sources.chosen)])
        sources.resolve_conflicts(
            lambda options: [*self._find_missing(options), *self._find_errors_of_all_presets(options, sources.chosen)]
        )
        self.check_start(*self._fill(sources.values(), sources.chosen))
        if self.is_launched:
            launch(self.prog.split()[1:], [*args])
        return sources

    def _find_missing(self, options: Mapping[str, Any]) -> Iterator[OptionError]:
        for action in self.required:
            if options.get(action.dest) is None:
                yield OptionError(f"`--{action.dest}` is required. {action.help}", action.dest)

    def _find_errors_of_all_presets(self, options: dict[str, Any], chosen: Collection[str]) -> list[OptionError]:
        """Find the errors that occur with every preset, before a config is imported."""
        options = dict.fromkeys(action.dest for action in self.required) | options
        errors, *others = (
            [*self._find_errors(*self._fill(preset | options, chosen))] for preset in self.possible_presets(options)
        )
        return [error for error in errors if all(error.options in [e.options for e in other] for other in others)]

    def _fill(self, options: dict[str, Any], chosen: Collection[str], is_built: bool = False) -> list[Any]:
        """Fill the dataclasses and the configs; before configs are imported, fill namespaces in their place."""
        parsed: list[Any] = []
        for kind, described in self.options_of.items():
            values = {name: options[name] for name in described if name in options}
            if isinstance(kind, str) and not is_built:
                parsed.append(SimpleNamespace(**self.defaults[kind] | values | self.launching))
                continue
            config: Any = getattr(import_module("paco_trl"), kind) if isinstance(kind, str) else kind
            if unknown := values.keys() - {declared.name for declared in fields(config)}:
                message = f"The installed TRL and transformers have no option `--{min(unknown)}`. Leave it out."
                raise OptionError(message, min(unknown))
            try:
                parsed.append(config(**values))
            except OptionError:
                raise
            except ValueError as error:  # of transformers
                raise OptionError(str(error)) from error
            if not isinstance(kind, str):
                parsed[-1].chosen = {name for name in chosen if options.get(name) is not None}
        return parsed

    def _find_errors(self, *parsed: Any) -> Iterator[OptionError]:
        """Find the errors of filled dataclasses, and of the namespaces in place of configs."""
        for kind, args in zip(self.options_of, parsed, strict=True):
            for name, value in vars(args).items():
                if name.endswith("_dir") and isinstance(value, str) and (file := file_on_path(value)) is not None:
                    yield OptionError(f"`--{name}` is {value!r}, but {str(file)!r} is a file. Name a directory.", name)
                values = value if isinstance(value, list) else [value]
                least = 0 if "seed" in name else 1
                if not isinstance(kind, str) and any(type(number) is int and number < least for number in values):
                    yield OptionError(f"`--{name}` is {value}, but must be at least {least}.", name)
            yield from args.errors() if hasattr(args, "errors") else ()
            if isinstance(args, SimpleNamespace):
                rules = (args, self.defaults[kind], config_options()["unsupported"][kind])
                if kind == "PaCoRewardConfig":
                    yield from reward_config_errors(*rules)
                else:
                    losses = NFT_LOSSES if kind == "PaCoNFTConfig" else GRPO_LOSSES
                    yield from [*grpo_config_errors(*rules, losses)] or size_errors(args)
        yield from self.check(*parsed)
