# SPDX-License-Identifier: Apache-2.0
"""
`paco-trl grpo`: trains a LoRA on a text-to-image pipeline with PaCo-GRPO, to generate images that belong together.

Every option of `PaCoGRPOConfig` and of `ScriptArguments` (model, dataset, rewards, adapter) can be given on the
command line or in a YAML file (`--config file.yaml`). The paper's settings are the defaults, those for edits with
FLUX.1-Kontext and Qwen-Image-Edit. `paco-trl doctor` takes the same options and checks them without training.
"""

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..hub.files import PIPELINE_ADAPTER, TRANSFORMER
from ..trainer.config_checks import GRPO_LOSSES, UNUSED_FIELDS
from ..utils.model_files import check_generates, split_adapter
from ..utils.option_checks import uses_fsdp
from .messages import print_message
from .options import config_options
from .parser import CommandParser
from .script_arguments import (
    ScriptArguments,
    check_models,
    check_options,
    check_reward_columns,
    check_rewards,
    check_rows,
    fit_panel_options,
    fit_reward_options,
    get_peft_config,
    load_eval_prompts,
    load_eval_rewards,
    load_rewards,
    load_train_prompts,
)
from .training import check_start, train_and_save


logger = logging.getLogger(__name__)


class ImageCommandParser(CommandParser):
    """Parser of a command with the options of `PaCoGRPOConfig` or `PaCoNFTConfig`."""

    def __init__(self, *classes: type | str, **kwargs):
        self.is_nft = "PaCoNFTConfig" in classes
        self.unused_fields = UNUSED_FIELDS if self.is_nft else ()
        super().__init__(classes, self.unused_fields, is_launched=True, check=check_options, **kwargs)

    def parse_args_and_config(self, args: Sequence[str] | None = None, use_presets: bool = True) -> tuple:
        """Parse the options as the parent does, and warn of a learning rate that is for adapters."""
        script_args, training_args, *others = super().parse_args_and_config(args, use_presets)
        if not script_args.use_peft and "learning_rate" not in script_args.chosen:
            logger.warning(
                f"`learning_rate` is {training_args.learning_rate}, which is for adapters. All weights take much "
                "less, such as 1e-5."
            )
        return script_args, training_args, *others

    def presets(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the defaults of the model's family for options that are not set, and print them."""
        from ..generation.inference import read_adapter
        from ..rollout.loading import read_index

        kwargs = options.get("model_init_kwargs") or {}
        kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
        model = options.get("model_name_or_path", ScriptArguments.model_name_or_path)
        if "model_name_or_path" not in options and (adapter := options.get("adapter")):
            check_generates(adapter, split_adapter(adapter)[0])
            with suppress(ValueError):  # the adapter does not name its base model
                model = read_adapter(adapter).model
        name = str(read_index(model, kwargs)["_class_name"])
        defaults = self._select_defaults(config_options()["family_defaults"].get(name, {}), options)
        if defaults and os.environ.get("RANK", "0") == "0":
            defaults_text = ", ".join(f"{option}={value!r}" for option, value in defaults.items())
            print_message(
                self.prog.removeprefix("paco-trl "), f"the defaults for {name} are the paper's: {defaults_text}"
            )
        return {"model_name_or_path": model, **defaults}

    def possible_presets(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the defaults of all families."""
        families = [{}, *config_options()["family_defaults"].values()]
        return [self._select_defaults(defaults, options) for defaults in families]

    def _select_defaults(self, defaults: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """Return the defaults of a family for options that are not set."""
        if options.get("edits") is False:  # the defaults are for edits
            return {}
        # The default stochastic steps are indices for the default number of steps
        excluded = (*options, *self.unused_fields, *(["sde_steps"] if "num_inference_steps" in options else []))
        return {option: value for option, value in defaults.items() if option not in excluded}

    def find_inapplicable(self, options: dict[str, Any]) -> dict[str, str]:
        """Find options of the other objective, and of a quantization that DeepSpeed or FSDP cannot train."""
        is_grpo_loss = self.is_nft and options.get("loss_type") in GRPO_LOSSES
        objective = (*UNUSED_FIELDS, "loss_type", "epsilon", "epsilon_high") if is_grpo_loss else ()
        foreign = dict.fromkeys(objective, "`paco-trl nft`")
        if uses_fsdp() or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            foreign["quantization"] = "FSDP" if uses_fsdp() else "DeepSpeed"
        return foreign


def _published_files(script_args: ScriptArguments) -> list[str]:
    return PIPELINE_ADAPTER if script_args.use_peft else TRANSFORMER


def _check_early(script_args: ScriptArguments, training_args: Any) -> None:
    check_start(training_args, _published_files(script_args), is_early=True)
    check_rows(script_args.dataset_name, script_args.eval_dataset_name)


def train(script_args: ScriptArguments, training_args: Any) -> None:
    """Train an image model, and save it."""
    from .. import PaCoGRPOTrainer, PaCoNFTConfig, PaCoNFTTrainer
    from .memory_plans import fit_checkpointing

    check_start(training_args, _published_files(script_args))
    check_rewards(script_args)
    train_dataset = load_train_prompts(script_args)
    eval_dataset = load_eval_prompts(script_args)
    fit_panel_options(script_args, training_args, train_dataset, eval_dataset)

    check_reward_columns(script_args, train_dataset)
    check_models(script_args, training_args)
    fit_checkpointing(script_args, training_args, train_dataset, eval_dataset)
    peft_config = get_peft_config(script_args, training_args.model_init_kwargs)
    reward_funcs = load_rewards(script_args)
    eval_reward_funcs = load_eval_rewards(script_args, reward_funcs)
    fit_reward_options(script_args, training_args, [*reward_funcs, *(eval_reward_funcs or ())])

    trainer_class = PaCoNFTTrainer if isinstance(training_args, PaCoNFTConfig) else PaCoGRPOTrainer
    trainer = trainer_class(
        model=script_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        eval_reward_funcs=eval_reward_funcs,
        peft_config=peft_config,
    )
    images = f"{training_args.output_dir}/contact_sheets" if training_args.log_completions else None
    train_and_save(trainer, script_args.dataset_name, images)


def main(arguments: list[str], config: str = "PaCoGRPOConfig", prog: str = "paco-trl grpo") -> int:
    """Run the command with the options of the config."""
    text = None if config == "PaCoNFTConfig" else __doc__
    parser = ImageCommandParser(
        ScriptArguments,
        config,
        prog=prog,
        description=text,
        check_start=_check_early,
    )
    train(*parser.parse_args_and_config(arguments))
    return 0


def main_nft(arguments: list[str]) -> int:
    """Run `paco-trl nft`."""
    return main(arguments, config="PaCoNFTConfig", prog="paco-trl nft")
