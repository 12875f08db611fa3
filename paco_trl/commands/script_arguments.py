# SPDX-License-Identifier: Apache-2.0
"""Arguments that `examples/train_flux.py` and `paco-trl doctor` share, and what is made of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from peft import LoraConfig

from ..rewards import ClipTReward, panel_similarity_reward, redness_reward


@dataclass
class ScriptArguments:
    """
    Model, dataset, rewards and adapter of a training run.

    Args:
        model_name_or_path (`str`, *optional*, defaults to `"black-forest-labs/FLUX.1-dev"`):
            Hub id or folder of the FLUX pipeline.
        dataset_name (`str`, *optional*):
            Image-set prompts: Hub id, folder, or JSON-lines file; raw T2IS rows are converted.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split to train on.
        eval_split (`str`, *optional*):
            Split of the same dataset to evaluate on.
        rewards (`list[str]`, *optional*, defaults to `["clip_t"]`):
            Rewards: `clip_t`, `redness`, `panel_similarity`. The last two need no model and are for trying things out.
        eval_rewards (`list[str]`, *optional*):
            Rewards of the evaluation. If `None`, those of `rewards`.
        clip_model (`str`, *optional*, defaults to `"openai/clip-vit-large-patch14"`):
            CLIP of the reward `clip_t`.
        lora_r (`int`, *optional*, defaults to `64`):
            Rank of the adapter (paper).
        lora_alpha (`int`, *optional*, defaults to `128`):
            Scale of the adapter (paper).
        lora_target_modules (`list[str]`, *optional*):
            Layers that get an adapter. If `None`, the family's default.
        adapter_name_or_path (`str`, *optional*):
            Hub id or folder of an adapter to go on training, in place of a new one.
        use_peft (`bool`, *optional*, defaults to `True`):
            Whether an adapter is trained. Without it, all weights of the transformer are.
    """

    model_name_or_path: str = field(
        default="black-forest-labs/FLUX.1-dev", metadata={"help": "Hub id or folder of the FLUX pipeline."}
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Image-set prompts: Hub id, folder, or JSON-lines file; raw T2IS rows are converted."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(default=None, metadata={"help": "Split of the same dataset to evaluate on."})
    rewards: list[str] = field(
        default_factory=lambda: ["clip_t"], metadata={"help": "Rewards: clip_t, redness, panel_similarity."}
    )
    eval_rewards: list[str] | None = field(
        default=None, metadata={"help": "Rewards of the evaluation. If `None`, those of `rewards`."}
    )
    clip_model: str = field(default="openai/clip-vit-large-patch14", metadata={"help": "CLIP of the reward `clip_t`."})
    lora_r: int = field(default=64, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=128, metadata={"help": "Scale of the adapter."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Layers that get an adapter. If `None`, the family's default."}
    )
    adapter_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of an adapter to go on training, in place of a new one."}
    )
    use_peft: bool = field(
        default=True,
        metadata={"help": "Whether an adapter is trained. Without it, all weights of the transformer are."},
    )


def load_reward(name: str, script_args: ScriptArguments) -> Callable:
    """
    Loads a reward by the name it has on the command line.

    Args:
        name (`str`):
            `clip_t`, `redness` or `panel_similarity`.
        script_args ([`ScriptArguments`]):
            Arguments, for the models of rewards.

    Returns:
        `Callable`.

    Raises:
        ValueError: there is no such reward.
    """
    if name == "clip_t":
        return ClipTReward(script_args.clip_model)
    if name == "redness":
        return redness_reward
    if name == "panel_similarity":
        return panel_similarity_reward
    raise ValueError(f"Unknown reward {name!r}: `--rewards` takes clip_t, redness and panel_similarity.")


def get_peft_config(script_args: ScriptArguments) -> LoraConfig | str | None:
    """
    The adapter that the arguments describe, as the trainer's `peft_config`.

    Args:
        script_args ([`ScriptArguments`]):
            Arguments.

    Returns:
        [`~peft.LoraConfig`], `str` or `None`: a new adapter, one to go on with, or none.

    Raises:
        ValueError: an adapter is named and none is wanted.
    """
    if not script_args.use_peft:
        if script_args.adapter_name_or_path is not None:
            raise ValueError(
                f"`--adapter_name_or_path` is '{script_args.adapter_name_or_path}', but `--use_peft False` trains all "
                "weights. Leave one of the two out."
            )
        return None
    if script_args.adapter_name_or_path is not None:
        return script_args.adapter_name_or_path
    return LoraConfig(
        r=script_args.lora_r,
        lora_alpha=script_args.lora_alpha,
        target_modules=script_args.lora_target_modules,
        init_lora_weights="gaussian",
    )
