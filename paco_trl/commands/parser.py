# SPDX-License-Identifier: Apache-2.0
"""Options and parser of the commands, and commands in stages."""

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ..utils.option_checks import GRPO_LOSSES, NFT_LOSSES, errors_of, image_errors, judge_errors, refuse
from ..utils.text import read_json, shorten
from .main import launch, read_config, say


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
    if "/" not in (attention := options.get("attn_implementation", "/")):
        from transformers import AttentionInterface  # takes seconds

        if attention not in (known := ("eager", *AttentionInterface().valid_keys())):
            raise ValueError(
                f"`--judge_attn_implementation` is {attention!r}; it must be {', '.join(known)} or a kernel on the Hub."
            )
    return options


def find_unused(args: Any, names: Iterable[str], where: str) -> Iterator[str]:
    """Find options that were typed and would do nothing; `where` says in which case."""
    if unused := [f"`--{name}`" for name in names if name in getattr(args, "typed", ())]:
        yield f"{', '.join(unused)} would do nothing {where}. Leave it out."


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {option: value for option, value in options.items() if option != name}


@cache
def config_options() -> dict[str, Any]:
    """Read the options of the configs as `make options` has described them: importing the classes takes seconds."""
    return read_json(Path(__file__).with_name("config_options.json"))


def describe(kind: type) -> dict[str, dict[str, Any]]:
    """Describe the fields of a dataclass as options, in plain values."""
    options, hints, limited = {}, get_type_hints(kind), getattr(kind, "choices", {})
    for known in [known for known in fields(kind) if known.init]:
        hint = hints[known.name]
        types = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
        option: dict[str, Any] = {"nullable": True} if NoneType in types else {}
        types = tuple(member for member in types if member is not NoneType)
        names = [member for member in types if isinstance(member, type) and issubclass(member, Enum)]
        names = names or [member for member in types if get_origin(member) is Literal and str not in types]
        if names:
            option["choices"] = [getattr(value, "value", value) for value in get_args(names[0]) or names[0]]
        elif str not in types and get_origin(types[0]) is list:
            option |= {"nargs": "+", "type": get_args(types[0])[0].__name__}
        elif str not in types and types[0] in (bool, int, float):
            option["type"] = types[0].__name__
        default = known.default if known.default_factory is MISSING else known.default_factory()
        if default is MISSING:
            option["required"] = True
        elif default is not None:
            option["default"] = getattr(default, "value", default)
        if known.name in limited:
            option["choices"] = [value for value in limited[known.name] if not isinstance(value, bool)]
        options[known.name] = option | known.metadata
    return options


def _to_bool(word: str) -> bool:
    values = {**dict.fromkeys(("true", "yes", "y", "1"), True), **dict.fromkeys(("false", "no", "n", "0"), False)}
    if word.lower() not in values:
        raise argparse.ArgumentTypeError(f"{word!r} is neither True nor False")
    return values[word.lower()]


_TYPES: dict[str, Callable] = {"bool": _to_bool, "int": int, "float": float}


class CommandParser(argparse.ArgumentParser):
    """
    Parser of the options of dataclasses, in the command line and in YAML; a config is named, and imported at the very end.

    `positional` is an option that may be given first without its name: `paco-trl push paco-flux`. `presets` returns
    defaults that depend on the options that are given, of which `known_presets` are all that there are; `foreign` names
    the options of a file that are not for this run, with the reason; and `check` yields what contradicts one another, for
    the dataclasses and then also for the config, as `errors()` of a dataclass does; `check_start` raises what no other option
    of a file mends. The fields `hidden` are not in the help.
    """

    def __init__(
        self,
        kinds: type | tuple[type | str, ...],
        hidden: Collection[str] = (),
        positional: str | None = None,
        is_launched: bool = False,
        presets: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        known_presets: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda options: [{}],
        foreign: Callable[[dict[str, Any]], dict[str, str]] = lambda options: {},
        check: Callable[..., Iterable[str]] = lambda *parsed: (),
        check_start: Callable[..., None] = lambda *parsed: None,
        **kwargs,
    ):
        named = "" if positional is None else f"{positional.removesuffix('_name_or_path').upper()} "
        kwargs = {"usage": f"%(prog)s {named}[--config FILE] [options]", **kwargs}
        super().__init__(allow_abbrev=False, add_help=False, **kwargs)
        self.positional, self.is_launched, self.foreign, self.check = positional, is_launched, foreign, check
        self.presets, self.known_presets, self.shows_all = presets, known_presets, False
        self.check_start = check_start
        self.errors: list[str] = []
        self.launching: dict[str, Any] = {}
        self.kinds: dict[type | str, dict[str, dict[str, Any]]] = {}
        libraries: set[str] = set()
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            if isinstance(kind, str):
                described = config_options()
                of_class = {base: described["options"][base] for base in described["bases"][kind]}
                self.kinds[kind] = {name: option for options in of_class.values() for name, option in options.items()}
                hidden = {*hidden, *described["unsupported"][kind]}
                libraries |= {*self.kinds[kind]}.difference(*(of_class[base] for base in of_class if "PaCo" in base))
            else:
                self.kinds[kind] = describe(kind)
        options = {name: option for kind in self.kinds.values() for name, option in kind.items()}
        self.nullable = {name for name, option in options.items() if option.get("nullable")}
        # What must be set, what usually is, the package's other options, and those of TRL and transformers
        titles = ("required", "usual options", "options", "options of TRL and transformers")
        self.sections: dict[str, list[argparse.Action]] = {title: [] for title in titles}
        self.required, usual, package, library = self.sections.values()
        package.append(self.add_argument("-h", "--help", action="help", help="Show these options."))
        if is_launched:  # by `main`, before the options are parsed
            options["num_processes"] = {"type": "int", "help": "Start that many processes, one for each GPU."}
            text = "A file of `accelerate`, or the name of a packaged one, such as `zero3`."
            options["accelerate_config"] = {"help": text}
        for name, option in options.items():
            action = self._add_option(name, option)
            section = library if name in libraries else package
            section = usual if libraries and name in _USUAL else section
            (self.required if option.get("required") else section).append(action)
            if name in hidden or name == "fsdp_config":  # training refuses FSDP
                action.help = argparse.SUPPRESS
        usual.sort(key=lambda action: _USUAL.index(action.dest))

    def _add_option(self, name: str, option: Mapping[str, Any]) -> argparse.Action:
        is_bool, default = option.get("type") == "bool", option.get("default")
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

    def format_help(self) -> str:
        """List the options in sections: those of a run that are usually set, or all."""
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
            known = [name for name in recipes if self._option_string_actions.keys() >= self._flags_of(name)]
            formatter.add_text(f"`--config` takes a YAML file of options, or a recipe: {', '.join(known)}.")
            formatter.add_text(f"`{self.prog} --help all` lists every option.")
        return formatter.format_help()

    def _flags_of(self, recipe: str) -> set[str]:
        return {f"--{name}" for name in read_config(["--config", recipe])[0]}

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of ending the process: of several processes one says it."""
        if "--resume_from_checkpoint: expected" in message:
            message += ". Did you mean `--resume_from_checkpoint auto`?"
        refuse([*self.errors, message])
        raise ValueError(message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self.errors.append(f"`--{action.dest}`: {error.message}.")
            return _UNSET

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
        typed, defaults, in_file, left_out, chosen, recipe = self.read(sys.argv[1:] if args is None else args)
        presets = {} if self.presets is None else self.presets(defaults | typed)
        defaults, in_file = presets | defaults, presets | in_file

        def find(options: dict[str, Any]) -> list[str]:
            return [*errors_of(self._build, options, chosen)]

        try:
            parsed = self._build(defaults | typed, chosen)
        except ValueError:
            left_out |= (conflicts := self._settle(find, typed, defaults))
            parsed = self._build({name: defaults[name] for name in defaults if name not in conflicts} | typed, chosen)
        built = {name: value for part in parsed for name, value in vars(part).items()}
        left_out = {name: by for name, by in left_out.items() if in_file[name] != built.get(name, _UNSET)}
        for by in dict.fromkeys(left_out.values() if os.environ.get("RANK", "0") == "0" else ()):
            listed = ", ".join(f"{name}={shorten(in_file[name])}" for name in left_out if left_out[name] == by)
            say(self.prog.removeprefix("paco-trl "), f"without {listed} of {recipe or 'the file'}, because of {by}.")
        return parsed

    def read(self, args: Sequence[str]) -> tuple:
        """
        Read the options, refuse what is wrong without torch and the model, which take seconds, and start the processes that
        are asked for, in place of this one. Return the options that were typed, those of the file that are taken, all of
        the file, those that are left out with the reason, which the user has chosen, and the recipe's name.
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
        typed, in_file = self._parse(words), self._read(config, recipe)
        self.launching = {name: typed.get(name, config.get(name)) for name in ("num_processes", "accelerate_config")}
        if not str(count := self.launching["num_processes"] or 1).isdigit():
            self.errors.append(f"`num_processes` is {count!r}; it must be a whole number.")
            self.launching["num_processes"] = None
        replaced = _REPLACED | (_REPLACED_IN_RECIPES if recipe else {})
        left_out = {name: f"`--{by}`" for by in typed for name in replaced.get(by, ()) if in_file.get(name) != "steps"}
        left_out |= self.foreign(in_file)
        left_out = {name: by for name, by in left_out.items() if name in in_file and name not in typed}
        defaults = {name: value for name, value in in_file.items() if name not in left_out}
        chosen = {*typed} if recipe else {*typed, *in_file}
        if self.errors:  # a misspelled option may be the one that is missing
            early = self._find_early(defaults | typed, chosen)
            refuse([*self.errors, *(error for error in early if not error.endswith("is required."))])
        left_out |= (conflicts := self._settle(lambda options: self._find_early(options, chosen), typed, defaults))
        defaults = {name: value for name, value in defaults.items() if name not in conflicts}
        refuse(errors_of(lambda: self.check_start(*self._fill(defaults | typed, chosen))))
        if self.is_launched:
            launch(self.prog.split()[1:], [*args])
        return typed, defaults, in_file, left_out, chosen, recipe

    def _find_early(self, options: dict[str, Any], chosen: Collection[str]) -> list[str]:
        """Find what is wrong whichever presets the model has, before a config is imported."""
        missing = [f"`--{action.dest}` is required." for action in self.required if options.get(action.dest) is None]
        options, by_preset = dict.fromkeys(action.dest for action in self.required) | options, []
        for preset in self.known_presets(options):
            try:
                by_preset.append([*self._find_errors(*self._fill(preset | options, chosen))])
            except ValueError as error:  # of a dataclass that checks itself
                by_preset.append([str(error)])
        texts = [{_VALUES.sub("", error) for error in errors} for errors in by_preset]
        return [*missing, *(error for error in by_preset[0] if _VALUES.sub("", error) in set.intersection(*texts))]

    def _fill(self, options: dict[str, Any], chosen: Collection[str], is_built: bool = False) -> list[Any]:
        """Fill the dataclasses, and the configs or, before they are imported, what stands for them."""
        parsed: list[Any] = []
        for kind, known in self.kinds.items():
            values = {name: options[name] for name in known if name in options}
            if isinstance(kind, str) and not is_built:
                plain = {name: option.get("default") for name, option in known.items()}
                parsed.append(SimpleNamespace(**plain | values | self.launching))
                continue
            made: Any = getattr(import_module("paco_trl"), kind) if isinstance(kind, str) else kind
            if unknown := values.keys() - {known.name for known in fields(made)}:
                raise ValueError(
                    f"The installed TRL and transformers have no option `--{min(unknown)}`. Leave it out."
                )
            parsed.append(made(**values))
            if not isinstance(kind, str):
                parsed[-1].typed = {name for name in chosen if options.get(name) is not None}
        return parsed

    def _find_errors(self, *parsed: Any) -> Iterator[str]:
        """Find what is wrong with filled dataclasses, and with what stands for a config, which checks itself."""
        for (kind, known), args in zip(self.kinds.items(), parsed, strict=True):
            for name, value in vars(args).items():
                if name.endswith("_dir") and isinstance(value, str) and os.path.isfile(value):
                    yield f"`--{name}` is {value!r}, which is a file. Name a directory."
                values, least = value if isinstance(value, list) else [value], 0 if "seed" in name else 1
                if not isinstance(kind, str) and any(type(number) is int and number < least for number in values):
                    yield f"`--{name}` is {value}, but must be at least {least}."
            yield from args.errors() if hasattr(args, "errors") else ()
            if isinstance(args, SimpleNamespace):
                defaults = {name: option.get("default") for name, option in known.items()}
                unsupported = config_options()["unsupported"][kind]
                if kind == "PaCoRewardConfig":
                    yield from judge_errors(args, defaults, unsupported)
                else:
                    losses = NFT_LOSSES if kind == "PaCoNFTConfig" else GRPO_LOSSES
                    yield from image_errors(args, defaults, unsupported, losses)
        yield from self.check(*parsed)

    def _build(self, options: dict[str, Any], chosen: Collection[str]) -> tuple:
        """Build the dataclasses and the config, and check them together."""
        parsed = self._fill(options, chosen, is_built=True)
        refuse(self._find_errors(*parsed))
        return tuple(parsed)

    def _settle(
        self, find: Callable[[dict[str, Any]], list[str]], typed: dict[str, Any], defaults: dict[str, Any]
    ) -> dict[str, str]:
        """
        Find what contradicts the command line in `defaults`, and which option it contradicts, by leaving each out; refuse
        what is wrong otherwise.
        """

        def masked(typed: dict[str, Any], defaults: dict[str, Any]) -> dict[str, list[str]]:
            errors: dict[str, list[str]] = {}
            for error in find(defaults | typed):
                errors.setdefault(_VALUES.sub("", error), []).append(error)
            return errors

        def is_cause(name: str) -> bool:
            """Tell whether an error goes without a typed option, and not because another one hides it."""
            trial = masked(_without(typed, name), left)
            return text not in trial and trial.keys() <= errors.keys() | refused.keys()

        conflicts, left, refused = {}, defaults, dict[str, list[str]]()
        # Without `--use_cpu` the machine refuses other things
        needed = {"use_cpu", *(action.dest for action in self.required)}
        logging.disable(logging.WARNING)  # of each trial
        try:
            while errors := {text: error for text, error in masked(typed, left).items() if text not in refused}:
                text = next(iter(errors))
                words = [name for name in typed if name not in needed]
                by = next(filter(is_cause, words), None)
                from_file = [name for name in left if name not in typed]
                name = next((name for name in from_file if text not in masked(typed, _without(left, name))), None)
                if by is None or name is None:
                    refused[text] = errors[text]
                else:
                    conflicts[name], left = f"`--{by}`", _without(left, name)
            refuse(error for same in refused.values() for error in same)
            for name in list(conflicts):  # what only seemed to be in the way
                if not masked(typed, left | {name: defaults[name]}):
                    del conflicts[name]
                    left[name] = defaults[name]
        finally:
            logging.disable(logging.NOTSET)
        return conflicts

    def _parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the options that are among these words; those that are none, and wrong values, are in `errors`."""
        unset = argparse.Namespace(**{action.dest: _UNSET for action in self._actions})
        parsed, unknown = self.parse_known_args(words, unset)
        options = {name: value for name, value in vars(parsed).items() if value is not _UNSET}
        is_value = False  # of an unknown option: it may be a token
        for word in unknown:
            if word.startswith("-") or not is_value:
                self.errors.append(self._describe_unknown(word, options))
            is_value = word.startswith("-") and "=" not in word or is_value and not word.startswith("-")
        return self._split_weights({name: None if value == [None] else value for name, value in options.items()})

    def _describe_unknown(self, word: str, given: Collection[str]) -> str:
        """Name the nearest option."""
        actions = [action for section in self.sections.values() for action in section]
        known = [name for action in actions if action.help != argparse.SUPPRESS for name in action.option_strings]
        if not word.startswith("-"):
            missing = [action.option_strings[0] for action in self.required if action.dest not in given]
            needed = [f" Did you mean `{name} {word}`?" for name in missing]
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
                command = "grpo" if "PaCoRewardConfig" in self.kinds else "reward"
                raise ValueError(
                    f"{recipe} is no recipe for `{self.prog}`, which has no option `{name}`. Use it with `paco-trl "
                    f"{command}`."
                )
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


def work_of(module: str, function: str) -> Callable:
    """Import what a command does, once its options are parsed: that takes seconds."""
    return getattr(import_module(f"..{module}", __name__), function)


def run_stage(
    words: list[str],
    stages: Mapping[str, type],
    command: str,
    text: str | None,
    check: Callable[..., Iterable[str]],
    positional: Mapping[str, str] | None = None,
) -> int:
    """Run the stage that the first word names, with the options behind it, by `run_stage` of the command's module."""
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<9} {arguments.__doc__}" for name, arguments in stages.items()]
        sys.stdout.write("\n".join([(text or "").strip(), "", "Stages:", *lines, ""]))
        return 0
    stage, *words = words
    if stage not in stages:
        near = "".join(f" Did you mean `{name}`?" for name in get_close_matches(stage, stages, 1))
        raise ValueError(f"There is no stage {stage!r}.{near} It must be one of: {', '.join(stages)}.")
    named = (positional or {}).get(stage)
    program = f"paco-trl {command} {stage}"
    parser = CommandParser(stages[stage], positional=named, is_launched=True, check=check, prog=program)
    (args,) = parser.parse_args_and_config(words)
    work_of(command, "run_stage")(stage, args)
    return 0
