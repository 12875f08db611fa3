# SPDX-License-Identifier: Apache-2.0
"""
`paco-trl reward`: trains PaCo-Reward, a judge of whether two images are consistent, as a LoRA on a vision-language
model. Options are those of `PaCoRewardConfig` and the arguments below, on the command line or in a YAML file
(`--config file.yaml`). The defaults are the paper's.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hub.files import JUDGE_ADAPTER
from ..utils.errors import OptionError
from .options import find_unused, option
from .parser import CommandParser
from .script_arguments import check_names, check_rows, find_unused_hub_options, parse_target_modules
from .training import check_start, train_and_save


if TYPE_CHECKING:
    from datasets import Dataset

    from .. import PaCoRewardConfig


@dataclass
class JudgeScriptArguments:
    """Model, data and adapter of a judge."""

    model_name_or_path: str = option(
        "Qwen/Qwen2.5-VL-7B-Instruct", "Hub id or directory of the vision-language model (paper)."
    )
    dataset_name: str = option(
        "X-GenGroup/PaCo-Dataset",
        "Hub id or directory of the data: in the layout of PaCo-Dataset, or with `dataset_split` pairs or rankings. "
        "Or a file of those, such as JSON lines with the paths of images.",
    )
    dataset_config: str | None = option(None, "Configuration of the dataset if it has several.")
    dataset_files: list[str] | None = option(
        None,
        "Files of PaCo-Dataset to train on. If `None`, `consistency_reward_cot_train` and `sharegpt_editing_cot` "
        "(paper).",
    )
    eval_files: list[str] | None = option(
        None, "Files of PaCo-Dataset to evaluate on, for example `consistency_reward_cot_test`."
    )
    dataset_split: str | None = option(
        None,
        "Split to train on, for data that are not in the layout of PaCo-Dataset. If `None`, all rows of a file.",
        "--dataset_train_split",
    )
    eval_split: str | None = option(None, "Split of the same data to evaluate on.", "--dataset_test_split")
    swap: bool = option(
        False, "Whether to also add every pair in the other order, where its texts do not depend on the order."
    )
    skip_broken: bool = option(False, "Whether to leave out broken pairs, with a list, instead of stopping.")
    load_in_4bit: bool = option(
        False, "Whether to quantize the frozen model to NF4 (QLoRA); it requires `paco_trl[quantization]`."
    )
    load_in_8bit: bool = option(False, "Whether to quantize the frozen model to 8 bits by bitsandbytes.")
    lora_r: int = option(32, "Rank of the adapter (paper).")
    lora_alpha: int | None = option(None, "Scale of the adapter. If `None`, twice its rank (paper).")
    lora_target_modules: list[str] | None = option(
        None, "Layers that get an adapter. If `None`, all linear layers of the language model (paper)."
    )


def load_pairs(
    script_args: JudgeScriptArguments, training_args: "PaCoRewardConfig", split: str | None, files: list[str] | None
) -> "Dataset":
    """Load the pairs of a split, or of files of PaCo-Dataset, and check them."""
    from ..data import load_paco_dataset, rankings_to_pairs, validate_pairs
    from ..data.dataset_files import load_split
    from ..data.pairs import as_pairs
    from ..utils.stage_folder import is_saved

    name = script_args.dataset_name
    if split is None and not Path(name).expanduser().is_file():
        remedy = "For your own pairs or rankings, pass `--dataset_split`, such as `--dataset_split train`."
        if is_saved(name):
            raise ValueError(f"'{name}' was saved with `save_to_disk`, not in the layout of PaCo-Dataset. {remedy}")
        try:
            dataset = load_paco_dataset(name, files, script_args.skip_broken)
        except FileNotFoundError as error:
            reason = f"it has no {Path(error.filename).name}" if error.filename else str(error).rstrip(".")
            raise FileNotFoundError(f"'{name}' has no layout of PaCo-Dataset: {reason}. {remedy}") from error
    else:
        columns = ("images", "reference", "candidates")
        dataset = load_split(name, split or "train", columns, config=script_args.dataset_config)
        is_ranked = "ranking" in dataset.column_names
        dataset = rankings_to_pairs(dataset) if is_ranked else as_pairs(dataset, name, script_args.skip_broken)
    return validate_pairs(dataset, training_args.dataset_num_proc, script_args.skip_broken)


def load_datasets(
    script_args: JudgeScriptArguments, training_args: "PaCoRewardConfig"
) -> tuple["Dataset", "Dataset | None"]:
    """Load the pairs for training and, if there are any, for evaluation."""
    train_dataset = load_pairs(script_args, training_args, script_args.dataset_split, script_args.dataset_files)
    if script_args.eval_split is None and script_args.eval_files is None:
        return train_dataset, None
    return train_dataset, load_pairs(script_args, training_args, script_args.eval_split, script_args.eval_files)


def check_options(script_args: JudgeScriptArguments, *configs: Any) -> Iterator[OptionError]:
    """Yield errors of contradictory options, and of options for other data."""
    yield from check_names(script_args)
    yield from find_unused_hub_options(script_args, configs[0])
    if (Path(script_args.model_name_or_path) / "model_index.json").is_file():
        model = script_args.model_name_or_path
        message = f"'{model}' is an image pipeline, no vision-language model, from which a judge is trained. Give "
        message += "one, such as Qwen/Qwen2.5-VL-7B-Instruct."
        yield OptionError(message, "model_name_or_path")
    elif (Path(script_args.model_name_or_path) / "adapter_config.json").is_file():
        model = script_args.model_name_or_path
        message = f"'{model}' is an adapter. To go on from it, merge it into its base: `paco-trl merge {model} "
        message += "--output_dir DIRECTORY`, and give the directory."
        yield OptionError(message, "model_name_or_path")
    if script_args.load_in_4bit and script_args.load_in_8bit:
        message = "`--load_in_4bit` and `--load_in_8bit` exclude each other. Leave one out."
        yield OptionError(message, "load_in_4bit", "load_in_8bit")
    if script_args.eval_split is not None and script_args.dataset_split is None:
        message = "`--eval_split` is for data with splits. Pass `--dataset_split`, too, or use `--eval_files`."
        yield OptionError(message, "eval_split", "dataset_split")
    is_published = script_args.dataset_split is None and not Path(script_args.dataset_name).expanduser().is_file()
    names, where = (("dataset_config",), "with") if is_published else (("dataset_files", "eval_files"), "without")
    where = f"{where} the layout of PaCo-Dataset"
    yield from find_unused(script_args, names, where, "dataset_split", "dataset_name", chosen_only=False)


def _check_early(script_args: JudgeScriptArguments, training_args: Any) -> None:
    check_start(training_args, JUDGE_ADAPTER, is_early=True)
    check_rows(script_args.dataset_name)


def train(script_args: JudgeScriptArguments, training_args: "PaCoRewardConfig") -> None:
    """Train a judge, and save it."""
    import datasets
    from filelock import FileLock
    from peft import LoraConfig
    from trl import ModelConfig, get_quantization_config

    from .. import PaCoRewardTrainer
    from ..data import swap_pairs
    from ..utils.files import digest
    from ..utils.locks import LockedError, take_lock

    check_start(training_args, JUDGE_ADAPTER)
    # The first process downloads, unpacks and decodes, and the others find its caches. They wait for a lock, because a
    # collective (`main_process_first`) would end after `ddp_timeout`.
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    lock = FileLock(cache / f"paco_trl_{digest(script_args.dataset_name)[:16]}.lock")
    with suppress(LockedError):  # without a cache to write to, each process reads the data for itself
        take_lock(lock, "pairs", cache, timeout=-1)
    try:
        train_dataset, eval_dataset = load_datasets(script_args, training_args)
        train_dataset = swap_pairs(train_dataset) if script_args.swap else train_dataset
    finally:
        lock.release()

    trainer = PaCoRewardTrainer(
        model=script_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(
            ModelConfig(
                dtype="bfloat16" if training_args.bf16 else "float32",
                load_in_4bit=script_args.load_in_4bit,
                load_in_8bit=script_args.load_in_8bit,
            )
        ),
        peft_config=LoraConfig(
            r=script_args.lora_r,
            lora_alpha=2 * script_args.lora_r if script_args.lora_alpha is None else script_args.lora_alpha,
            target_modules=parse_target_modules(script_args.lora_target_modules),
        ),
    )
    images = None if eval_dataset is None else f"{training_args.output_dir}/evaluation"
    train_and_save(trainer, script_args.dataset_name, images)


def build_parser(*kinds: type, **kwargs) -> CommandParser:
    """Build the parser of a command with the options of `paco-trl reward`."""
    kwargs = {"is_launched": True, "check": check_options, **kwargs}
    return CommandParser((JudgeScriptArguments, "PaCoRewardConfig", *kinds), **kwargs)


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = build_parser(
        prog="paco-trl reward",
        description=__doc__,
        check_start=_check_early,
    )
    train(*parser.parse_args_and_config(arguments))
    return 0
