# SPDX-License-Identifier: Apache-2.0
"""
Arguments that the training commands share with `paco-trl doctor`, and what they load. Functions import what takes
seconds.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from .. import rewards
from ..rewards.errors import wrap_reward_error
from ..rewards.named_rewards import NAMED_REWARDS, make_named_reward
from ..trainer.config_checks import check_quantization
from ..utils.data_names import DEMO, TEXT_DATA, check_dataset_name, data_ending
from ..utils.errors import OptionError, collect_errors
from ..utils.model_files import CARD_DATA_FILE
from ..utils.names import check_adapter_name, check_model_name
from ..utils.option_checks import (
    WORDS_PROMPTS,
    check_required,
    check_reward_weights,
    uses_fsdp,
)
from ..utils.text import join_first, read_text
from .options import find_unused, option
from .user_rewards import find_user_reward


if TYPE_CHECKING:
    from datasets import Dataset
    from peft import LoraConfig

    from .. import PaCoGRPOConfig
    from ..rewards.words import WordsPrompt
    from ..rollout.adapters import SavedAdapter

logger = logging.getLogger(__name__)

# Help of options of several commands
JUDGE_QUANTIZATION = "Quantization of a judge in the process: `nf4`, `int8` or `fp8`."
JUDGE_ATTENTION = "Attention of a judge in the process, such as `flash_attention_2`. If `None`, transformers' default."

JUDGE_ANSWERS = "Answers to each question of `words:`; more than one are sampled, and their scores averaged."


@dataclass
class PromptDataArguments:
    """Pipeline, and the prompts that it gets."""

    # Set by the parser: the options that you chose, on the command line or in your own file, and the typed ones of them
    chosen: ClassVar[Set[str]] = frozenset()
    typed: ClassVar[Set[str]] = frozenset()

    model_name_or_path: str = option("black-forest-labs/FLUX.1-dev", "Hub id or directory of the pipeline.")
    dataset_name: str | None = option(
        None,
        "Prompts: Hub id, directory, or JSON-lines, CSV, TSV, Parquet or text file, also raw T2IS, GEdit-Bench or "
        "ShareGPT-4o-Image rows. `demo` is 24 prompts of sets that come with the package.",
        required=True,
    )
    dataset_config: str | None = option(None, "Configuration of the dataset, where it has several.")
    dataset_split: str = option("train", "Split of the prompts.", "--dataset_train_split")
    edits: bool = option(False, "Whether the prompts are instructions with source images, not image-set prompts.")
    image_folder: str | None = option(None, "Directory of source images. If `None`, that of the file naming them.")
    max_source_images: int | None = option(None, "Rows with more source images are left out. If `None`, all are kept.")


@dataclass
class RewardOptions:
    """Rewards, and the models that they load."""

    rewards: list[str] = option(
        ["consistency", "clip_t"],
        "Rewards: `consistency`, `clip_t` (the paper's for sets), `edit` (its for edits), `reference`, `clip_i`, "
        "`pick_score`, `no_duplicates`, `layout`, `ocr`; ratings by any vision-language model: `rubric:instruction`, "
        "`rubric:unchanged` (edits), `rubric:consistency` (sets), `rubric:my_rubric.txt`; by a served one that "
        "answers in words: `words:editscore`, `words:editscore_qwen3` (edits), `words:viescore`, "
        "`words:my_prompt.yaml`; `redness` and `panel_similarity` are for trying things out. Your own: "
        "`my_rewards.py`, `my_rewards.py:my_reward` or `my_package.my_reward`; a class is called without arguments. "
        "For training each may have a weight: `consistency=0.2 clip_t=1`, in a file `{consistency: 0.2, clip_t: 1}`.",
        "--reward_funcs",
    )
    judge_model: str = option(
        "X-GenGroup/PaCo-Reward-7B", "Judge of the rewards that have one: Hub id, directory, name at `judge_url`."
    )
    judge_url: str | None = option(None, "Address of a served judge. If `None`, it is loaded into each process.")
    judge_quantization: str | None = option(None, JUDGE_QUANTIZATION)
    judge_attn_implementation: str | None = option(None, JUDGE_ATTENTION)
    judge_question: str | None = option(
        None,
        "Question for the judge: `theme`, `criteria` (each of the dataset's), or your own words. If `None`, the one "
        "that it was trained on if that is in its `paco_trl.json`, else `theme`.",
    )
    judge_max_pairs: int | None = option(None, "Maximum number of pairs per set for the judge. If `None`, all.")
    judge_answers: int = option(1, JUDGE_ANSWERS)
    clip_model: str = option("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "CLIP of the rewards `clip_t` and `clip_i`.")


@dataclass
class ScriptArguments(RewardOptions, PromptDataArguments):
    """Model, dataset, rewards and adapter of a training run."""

    eval_dataset_name: str | None = option(None, "Prompts to evaluate on. If `None`, those of `dataset_name`.")
    eval_split: str | None = option(
        None,
        "Split to evaluate on. If `None`, `train` of `eval_dataset_name`, or none.",
        "--dataset_test_split",
    )
    exclude_dataset_name: str | None = option(
        None, "Editing prompts not to train on, such as a benchmark's: rows with their source images are left out."
    )
    eval_rewards: list[str] | None = option(None, "Rewards of the evaluation. If `None`, those of `rewards`.")
    eval_judge_model: str | None = option(None, "Judge of the evaluation's rewards. If `None`, `judge_model`.")
    eval_judge_url: str | None = option(None, "Its address. If `None`, `judge_url` unless `eval_judge_model` is set.")
    lora_r: int | None = option(None, "Rank of a new adapter. If `None`, 64 (paper).")
    lora_alpha: int | None = option(None, "Scale of a new adapter. If `None`, twice its rank (paper).")
    lora_target_modules: list[str] | None = option(None, "Layers with an adapter. If `None`, the family's default.")
    adapter: str | None = option(None, "Adapter (Hub id, directory or LoRA file) to continue, instead of a new one.")
    use_peft: bool = option(True, "Whether to train an adapter. If `False`, the full transformer is trained.")


def judge_options(args: Any, url: str | None) -> dict[str, Any]:
    """Return the options for loading a judge into the process; raise an error if they are set for a judge at `url`."""
    options = {name: getattr(args, f"judge_{name}") for name in ("quantization", "attn_implementation")}
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if url is not None:
            message = (
                f"`--judge_{name}` is {value!r}, but a served judge is quantized and run by its server. Leave it out."
            )
            raise OptionError(message, f"judge_{name}", "judge_url")
    if "/" not in (attention := options.get("attn_implementation", "/")):
        from transformers import AttentionInterface  # takes seconds

        if attention not in (implementations := ("eager", *AttentionInterface().valid_keys())):
            names = f"{', '.join(implementations)} or a kernel on the Hub"
            message = f"`--judge_attn_implementation` is {attention!r}; it must be {names}."
            raise OptionError(message, "judge_attn_implementation")
    return options


_RUBRIC, WORDS = "rubric:", "words:"
_SMALL = 1 << 20  # bytes; a larger file is read once, when it is loaded
_WITH_JUDGE = [name for name, reward in NAMED_REWARDS.items() if reward.model == "judge"]


def _with_judge(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in _WITH_JUDGE or name.startswith((_RUBRIC, WORDS))]


def check_options(script_args: ScriptArguments, training_args: Any, *configs: Any) -> Iterator[OptionError]:
    """Find options that contradict one another, or that were typed and would do nothing."""
    lora = ("lora_r", "lora_alpha", "lora_target_modules")
    is_full = not script_args.use_peft
    if is_full and script_args.adapter is not None:
        message = "`--adapter` and `--use_peft False`, which trains all weights, exclude each other. Leave one out."
        yield OptionError(message, "adapter", "use_peft")
    elif is_full:
        yield from find_unused(script_args, lora, "with `--use_peft False`", "use_peft", chosen_only=False)
    is_deepspeed = training_args.deepspeed is not None or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    is_sharded = is_deepspeed or uses_fsdp()
    settings = (training_args.quantization, is_full, is_sharded, training_args.compile_repeated_blocks)
    yield from collect_errors(check_quantization, *settings)
    yield from collect_errors(judge_options, script_args, script_args.judge_url)
    yield from check_names(script_args)
    name = str(script_args.dataset_name)
    split = script_args.dataset_split
    if os.path.isfile(os.path.expanduser(name)) and not split.startswith("train"):
        yield OptionError(f"There is no split {split!r} in '{name}', only train.", "dataset_name", "dataset_split")
    yield from find_unused_hub_options(script_args, training_args)
    yield from find_unused_edit_options(script_args)
    if "edit" in script_args.rewards and not script_args.edits:
        yield OptionError("The reward `edit` is for `--edits`: instructions with source images.", "rewards", "edits")
    yield from collect_errors(_check_weights, script_args, training_args)
    if not [*collect_errors(check_reward_names, script_args)]:
        yield from find_unused_reward_options(script_args)
        for name in filter(_is_user_reward, [*script_args.rewards, *(script_args.eval_rewards or ())]):
            yield from collect_errors(find_user_reward, name, options=("rewards",))
    of_data = ("eval_dataset_name", "eval_split")
    data = [name for name in of_data if getattr(script_args, name) is not None]
    if data and training_args.eval_strategy == "no" and not training_args.eval_on_start:
        message = f"`--{data[0]}` is set, but nothing would be evaluated: set `--eval_strategy` or `--eval_on_start`."
        yield OptionError(message, *data, "eval_strategy", "eval_on_start")
    if not data:
        unused = ("eval_rewards", "eval_judge_model", "eval_judge_url")
        yield from find_unused(script_args, unused, "without `--eval_dataset_name` or `--eval_split`", *of_data)


def _check_model(name: str) -> None:
    check_model_name(name)
    files = ("model_index.json", "config.json", "adapter_config.json", CARD_DATA_FILE)
    if os.path.isdir(name) and not any(os.path.exists(os.path.join(name, file)) for file in files):
        raise FileNotFoundError(f"The directory '{name}' has no model: none of {', '.join(files)}. Check the path.")


def _check_data(name: str) -> None:
    check_dataset_name(name)
    file = Path(name).expanduser()
    if file.is_dir() and not any(file.iterdir()):
        raise FileNotFoundError(f"The directory '{name}' is empty: it has no data. Check the path.")
    if file.is_file() and data_ending(file) in TEXT_DATA and file.stat().st_size < _SMALL:
        if not read_text(file).strip():
            raise ValueError(f"'{name}' is empty: it has no rows. Check the path.")


def check_rows(*names: str | None) -> None:
    """Read small local files of rows before torch is imported, so that a broken line is said at once."""
    from ..data.text_tables import read_rows  # imports datasets

    for name in filter(None, names):
        file = Path(name).expanduser()
        if file.is_file() and data_ending(file) in TEXT_DATA and file.stat().st_size < _SMALL:
            read_rows(file)


_NAMES: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("dataset_name", "eval_dataset_name", "exclude_dataset_name", "train_dataset_name"), _check_data),
    "model_name_or_path": _check_model,
    "adapter": check_adapter_name,
}


def check_names(args: Any, *configs: Any) -> Iterator[OptionError]:
    """Find data, models, adapters and rewards that do not exist."""
    for field, check in _NAMES.items():
        names = getattr(args, field, None) or ()
        for name in [names] if isinstance(names, str) else names:
            yield from collect_errors(check, name, options=(field,))
    if isinstance(args, RewardOptions):
        yield from collect_errors(check_reward_names, args, options=("rewards",))


def find_unused_edit_options(args: PromptDataArguments) -> Iterator[OptionError]:
    """Find options of edits that were typed for other prompts."""
    if not args.edits:
        unused = ("image_folder", "max_source_images", "exclude_dataset_name")
        yield from find_unused(args, unused, "without `--edits`", "edits")


def find_unused_hub_options(args: Any, config: Any) -> Iterator[OptionError]:
    """Find options of a repository that were typed for a run that pushes nothing."""
    if not config.push_to_hub:
        yield from find_unused(args, ("hub_model_id", "hub_private_repo"), "without `--push_to_hub`", "push_to_hub")


def find_unused_reward_options(args: RewardOptions) -> Iterator[OptionError]:
    """Find options of a judge or of CLIP that were typed for rewards without one."""
    names = [*args.rewards, *(getattr(args, "eval_rewards", None) or ())]
    unused = ["clip_model"] * (not {"clip_t", "clip_i"} & {*names})
    unused += ["judge_question", "judge_max_pairs"] * ("consistency" not in names)
    unused += ["judge_answers"] * (not any(name.startswith(WORDS) for name in names))
    if not _with_judge(names):
        unused += ["judge_model", "judge_url", "judge_quantization", "judge_attn_implementation"]
    yield from find_unused(args, unused, f"with the rewards {', '.join(names)}", "rewards")


def load_train_prompts(script_args: ScriptArguments) -> "Dataset":
    """Load the prompts to train on."""
    return _load_prompts(script_args, cast(str, script_args.dataset_name), script_args.dataset_split)


def load_eval_prompts(script_args: ScriptArguments) -> "Dataset | None":
    """Load the prompts to evaluate on."""
    name, split = script_args.eval_dataset_name, script_args.eval_split
    if split is None and name is None:
        return None
    name = name if name is not None else script_args.dataset_name
    return _load_prompts(script_args, cast(str, name), split or "train", is_training=False)


def fit_panel_options(script_args: ScriptArguments, args: "PaCoGRPOConfig", *datasets: "Dataset | None") -> None:
    """Drop a recipe's options for separate images if no dataset has any, and check typed sizes."""
    from .. import PaCoGRPOConfig
    from ..data.image_sets import PANEL_OPTIONS, SEPARATE, arrange_sets

    prompts = [dataset for dataset in datasets if dataset]
    sets = [arrange_sets(dataset, args.set_layout) for dataset in prompts if "rows" in dataset.column_names]
    check_sizes(script_args, args, *sets, *(dataset for dataset in prompts if "rows" not in dataset.column_names))
    if any(SEPARATE in dataset["layout"] for dataset in sets if "layout" in dataset.column_names):
        return
    for name in PANEL_OPTIONS:
        if name not in script_args.chosen and (value := getattr(args, name)) != (
            default := getattr(PaCoGRPOConfig, name)
        ):
            logger.warning(
                f"`{name}` is {value!r} in the recipe, but no dataset has a set of separate images: left out."
            )
            setattr(args, name, default)


def check_sizes(args: Any, value_of: Any, *datasets: "Dataset") -> None:
    """Refuse a typed height or width that would do nothing, since each row has its own; warn of one in a file."""
    for name in ("height", "width"):
        if not datasets or not all(name in dataset.column_names for dataset in datasets):
            continue
        sizes = {size for dataset in datasets for size in dataset[name]}
        value = getattr(value_of, name)
        if name not in args.chosen or None in sizes or sizes == {value}:
            continue
        remedy = "Leave the option out, or the columns of sizes in the data."
        if hasattr(value_of, "resolution_scale"):
            remedy += " `--resolution_scale` trains on smaller images."
        elif getattr(args, "dataset_name", None) == DEMO:
            remedy = "Leave the option out, or evaluate prompts of your own, such as the lines of a text file."
        message = (
            f"`--{name}` is {value}, but each row of the data has a {name} of its own "
            f"({join_first(sorted(map(str, sizes)))}). {remedy}"
        )
        if name in args.typed:
            raise OptionError(message, name)
        logger.warning(message)  # a copied recipe has a size, and fits data without


def fit_reward_options(script_args: ScriptArguments, args: "PaCoGRPOConfig", functions: list[Callable]) -> None:
    """Drop a recipe's `offload_rewards` if no reward has a model in this process."""
    from ..rewards.scoring import move_models_to_cpu

    if args.offload_rewards and "offload_rewards" not in script_args.chosen:
        args.offload_rewards = bool(move_models_to_cpu(functions, args.device))


def _load_prompts(script_args: ScriptArguments, name: str, split: str, is_training: bool = True) -> "Dataset":
    from ..data import load_edit_prompts, load_image_set_prompts

    config = script_args.dataset_config if name == script_args.dataset_name else None
    if not script_args.edits:
        return load_image_set_prompts(name, split, config)
    benchmark = script_args.exclude_dataset_name if is_training else None
    return load_edit_prompts(
        name,
        split,
        script_args.image_folder if name == script_args.dataset_name else None,
        exclude=None if benchmark is None else load_edit_prompts(benchmark),
        max_images=script_args.max_source_images,
        config=config,
    )


def check_reward_names(script_args: RewardOptions) -> None:
    """Raise an error for a reward that is neither the package's nor the user's, or that is named twice."""
    given = {"rewards": script_args.rewards, "eval_rewards": getattr(script_args, "eval_rewards", None) or []}
    for field, names in given.items():
        if repeated := next((name for name in names if names.count(name) > 1), None):
            message = f"`--{field}` has {repeated!r} twice. Name it once; a reward counts more by a larger weight."
            raise OptionError(message, field)
        if commas := [name for name in names if "," in name and not os.path.exists(name.partition(":")[0])]:
            words = " ".join(commas[0].replace(",", " ").split())
            raise OptionError(f"`--{field}` has {commas[0]!r}. Separate rewards by spaces: `{words}`.", field)
    for name in chain(*given.values()):
        if name.startswith(_RUBRIC):
            from ..rewards.judge_rewards import read_rubric

            read_rubric(name.removeprefix(_RUBRIC))
        elif name.startswith(WORDS):
            read_words_prompt(name, script_args.judge_url or getattr(script_args, "eval_judge_url", None))
        elif name not in NAMED_REWARDS and "." not in name:
            file = [f"{name}.py"] if Path(f"{name}.py").is_file() else []
            templates = Path(__file__).parents[1] / "templates"
            rubrics = [path.stem.replace("_", ":", 1) for path in sorted(templates.glob("rubric_*.txt"))]
            rubrics += [f"{WORDS}{prompt}" for prompt in WORDS_PROMPTS]
            near = "".join(
                f" Did you mean `{best}`?" for best in [*file, *get_close_matches(name, NAMED_REWARDS, 1)][:1]
            )
            raise OptionError(
                f"Unknown reward {name!r}.{near} `--rewards` takes {', '.join(NAMED_REWARDS)}, "
                f"{', '.join(rubrics)}, or your own: `my_rewards.py`, "
                "`my_rewards.py:my_reward` or `my_package.my_reward`."
            )


def read_words_prompt(name: str, judge_url: str | None) -> "WordsPrompt":
    """Read the prompt of `words:`, for which the judge must be on a server."""
    from ..rewards import words

    prompt = words.read_words_prompt(name.removeprefix(WORDS))
    if judge_url is None:
        message = f"`{name}` is for a judge on a server, which answers in words. Set `--judge_url`."
        raise OptionError(message, "judge_url")
    return prompt


def _check_weights(script_args: ScriptArguments, training_args: Any) -> None:
    names, method = script_args.rewards, training_args.multi_objective_aggregation
    weights = check_reward_weights(training_args.reward_weights, names, method)
    check_required(training_args.reward_required, names, weights)


def check_rewards(script_args: ScriptArguments) -> None:
    """Raise an error if a function of the user's cannot be called as a reward, before anything is loaded."""
    from ..rewards.checks import check_reward_functions

    for function in user_functions([*script_args.rewards, *(script_args.eval_rewards or ())]):
        check_reward_functions([function])


def _is_user_reward(name: str) -> bool:
    return name not in NAMED_REWARDS and not name.startswith((_RUBRIC, WORDS))


def user_functions(names: Iterable[str]) -> Iterator[Callable]:
    """Return the rewards of the user's that are functions; a class is called when the rewards are loaded."""
    return (find_user_reward(name) for name in names if _is_user_reward(name) and not has_model(name))


def has_model(name: str) -> bool:
    """Return whether loading a reward may load a model; a user's class may."""
    if name in NAMED_REWARDS:
        return NAMED_REWARDS[name].model is not None
    return not _is_user_reward(name) or isinstance(find_user_reward(name), type)


class _Judge(NamedTuple):
    """Judge of rewards: a name and how to load it, or the judge that another reward has loaded."""

    judge: Any
    url: str | None = None
    options: dict[str, Any] = {}


def _load_judged_reward(name: str, script_args: ScriptArguments, loading: _Judge) -> Callable:
    """Load a reward that asks a judge."""
    judge, url, options = loading
    if name.startswith(_RUBRIC):
        return rewards.RubricReward(judge, name.removeprefix(_RUBRIC), url, **options)
    if name.startswith(WORDS):
        return rewards.WordsReward(judge, name.removeprefix(WORDS), url, script_args.judge_answers)
    if name == "consistency":
        options = options | {"question": script_args.judge_question, "max_pairs": script_args.judge_max_pairs}
    return make_named_reward(name, judge, url, **options)


def load_reward(name: str, script_args: ScriptArguments, judge: Any = None) -> Callable:
    """Load a reward by its name on the command line, with a judge that is loaded already, if it has one."""
    if name in _with_judge([name]):
        url = script_args.judge_url
        loading = _Judge(judge) if judge else _Judge(script_args.judge_model, url, judge_options(script_args, url))
        return _load_judged_reward(name, script_args, loading)
    if name in NAMED_REWARDS:
        models = (script_args.clip_model,) if NAMED_REWARDS[name].model == "clip" else ()
        return make_named_reward(name, *models)
    reward = find_user_reward(name)
    try:
        return reward() if isinstance(reward, type) else reward
    except (Exception, SystemExit) as error:
        raise wrap_reward_error(name, error, __file__) from error


def _of_evaluation(script_args: ScriptArguments) -> ScriptArguments:
    """Return the arguments with rewards and judge of the evaluation in place of those of training."""
    rewards = script_args.rewards if script_args.eval_rewards is None else script_args.eval_rewards
    model, url = script_args.eval_judge_model, script_args.eval_judge_url
    if (model, url) == (None, None):
        return replace(script_args, rewards=rewards)
    if not _with_judge(rewards):
        message = f"`--eval_judge_model`, `--eval_judge_url` are for {', '.join(_WITH_JUDGE)}, rubrics and words."
        raise OptionError(message, "eval_judge_model", "eval_judge_url", "eval_rewards", "rewards")
    evaluation = replace(script_args, rewards=rewards, judge_model=model or script_args.judge_model, judge_url=url)
    if url is not None:
        evaluation.judge_quantization = evaluation.judge_attn_implementation = None
    return evaluation


def find_judges(script_args: ScriptArguments) -> dict[tuple[str, str | None], list[str]]:
    """Return name and address of the judges of training and of the evaluation, with the rewards that ask them."""
    judges: dict[tuple[str, str | None], list[str]] = {}
    for args in (script_args, _of_evaluation(script_args)):
        for name in _with_judge(args.rewards):
            judges.setdefault((args.judge_model, args.judge_url), []).append(name)
    return judges


def check_models(script_args: ScriptArguments, training_args: "PaCoGRPOConfig") -> None:
    """Refuse a pipeline or a judge that is missing or gated, and a server that is down, before weights are loaded."""
    import torch

    from ..rewards.paco_reward import read_judge_config
    from ..rollout.loading import check_config
    from ..utils.quantization import quantization_config

    check_config(script_args.model_name_or_path, training_args.model_init_kwargs or {})
    if training_args.quantization not in (None, "fp8_storage"):
        quantization_config(training_args.quantization, torch.bfloat16, "diffusers")  # asks what the machine has
    for (model, url), names in find_judges(script_args).items():
        if url is not None:
            judge = rewards.ServedJudge(url, model)
            written = [name for name in names if name.startswith(WORDS)]
            for name in written:
                read_words_prompt(name, url).check(judge)
            if others := {*names} - {*written}:
                judge.check(scale=5 if all(name.startswith(_RUBRIC) for name in others) else None)
        else:
            with _default_named(script_args):
                read_judge_config(model)


@contextmanager
def _default_named(script_args: ScriptArguments) -> Iterator[None]:
    """Say in an error about the default rewards that they are the default."""
    try:
        yield
    except (OSError, ValueError) as error:
        if "rewards" in script_args.chosen or script_args.rewards != RewardOptions().rewards:
            raise
        message = (
            f"{error} The rewards are the default: consistency, which asks a judge about pairs of panels, and clip_t. "
            "Pass others, such as `--rewards clip_t` or `--rewards my_rewards.py`."
        )
        raise (OSError if isinstance(error, OSError) else ValueError)(message) from error


def check_reward_columns(script_args: ScriptArguments, dataset: "Dataset") -> None:
    """Check that the prompts have the columns that judges and the user's functions need, before models are loaded."""
    from ..rewards.checks import check_columns
    from ..rewards.judge_rewards import RUBRICS

    for name in _WITH_JUDGE:
        if name in script_args.rewards:
            with _default_named(script_args):
                check_columns(getattr(rewards, NAMED_REWARDS[name].attribute), dataset, "the dataset")
    for rubric, needs in RUBRICS.items():
        if (name := _RUBRIC + rubric) in script_args.rewards:
            check_columns(type(name, (), needs), dataset, "the dataset")
    for name in (name for name in script_args.rewards if name.startswith(WORDS)):
        needs = {"needed_columns": read_words_prompt(name, script_args.judge_url).needed_columns}
        check_columns(type(name, (), needs), dataset, "the dataset")
    check_columns([*user_functions(script_args.rewards)], dataset, "the dataset")


def load_rewards(script_args: ScriptArguments) -> list[Callable]:
    """Load the rewards of training, whose names [`check_names`] has checked."""
    with _default_named(script_args):
        return list(_load_all({}, script_args.rewards, script_args).values())


def _load_all(loaded: dict[str, Any], names: list[str], script_args: ScriptArguments) -> dict[str, Any]:
    """Load the rewards that are not in `loaded`, and return all; rewards with a judge share it."""
    loaded = {**loaded}
    for name in [name for name in names if name not in loaded]:
        judge = next((loaded[judged].judge for judged in _with_judge(loaded)), None)
        loaded[name] = load_reward(name, script_args, judge)
    return loaded


def load_eval_rewards(script_args: ScriptArguments, reward_funcs: list[Callable]) -> list[Callable] | None:
    """Load the rewards of the evaluation; those that training also uses are shared."""
    evaluation = _of_evaluation(script_args)
    is_shared = (evaluation.judge_model, evaluation.judge_url) == (script_args.judge_model, script_args.judge_url)
    if is_shared and evaluation.rewards == script_args.rewards:
        return None
    known = zip(script_args.rewards, reward_funcs, strict=True)
    shared = {name: function for name, function in known if is_shared or not _with_judge([name])}
    loaded = _load_all(shared, evaluation.rewards, evaluation)
    return [loaded[name] for name in evaluation.rewards]


def parse_target_modules(names: list[str] | None) -> list[str] | str | None:
    """Return the words of `--lora_target_modules` as PEFT takes them: "all-linear" is a string there."""
    return "all-linear" if names == ["all-linear"] else names


def get_peft_config(
    script_args: ScriptArguments, model_init_kwargs: dict | None = None
) -> "LoraConfig | SavedAdapter | None":
    """Return the adapter that the arguments describe, as the trainer's `peft_config`."""
    from peft import LoraConfig

    from ..rollout.adapters import read_peft_config

    if not script_args.use_peft:
        return None
    if script_args.adapter is not None:
        adapter: Any = read_peft_config(script_args.adapter, script_args.model_name_or_path, model_init_kwargs)
        for name in ("r", "lora_alpha", "target_modules"):
            option = f"lora_{name.removeprefix('lora_')}"
            value = getattr(script_args, option)
            saved = getattr(adapter.config, name)
            if value is not None and (set(value) if isinstance(value, list) else value) != saved:
                raise OptionError(
                    f"`--{option}` is {value}, but the adapter has {saved}. Leave it out.", option, "adapter"
                )
        return adapter
    rank = 64 if script_args.lora_r is None else script_args.lora_r
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if script_args.lora_alpha is None else script_args.lora_alpha,
        target_modules=parse_target_modules(script_args.lora_target_modules),
        init_lora_weights="gaussian",
    )
