# SPDX-License-Identifier: Apache-2.0
"""Plans of a run's memory, from configs alone."""

import logging
import tempfile
from collections.abc import Sequence

from datasets import Dataset
from peft import LoraConfig

from ..data.columns import check_is_dataset
from ..rewards.paco_reward import read_judge_config
from ..rollout.adapters import SavedAdapter
from ..trainer.paco_grpo_config import PaCoGRPOConfig
from ..trainer.paco_reward_config import PaCoRewardConfig
from ..trainer.paco_reward_trainer import complete_peft_config
from ..utils.option_checks import uses_fsdp
from .image_run import ImageRun
from .judge_run import JudgeRun
from .known_models import resolve_model_configs
from .plan import MemoryPlan


logger = logging.getLogger(__name__)


def plan_memory(
    model: str,
    args: PaCoGRPOConfig | PaCoRewardConfig,
    train_dataset: Dataset | None = None,
    peft_config: LoraConfig | SavedAdapter | str | None = None,
    reward_models: Sequence[str] = (),
    judge_quantization: str | None = None,
    eval_dataset: Dataset | None = None,
) -> MemoryPlan:
    """
    Plan the memory of a training run from configs alone: no weights are loaded, and no GPU is needed.

    The first four arguments are the trainer's. Forward and backward passes run on tensors without data, at the run's
    batch size, image size and prompt length. The plan leaves out other rewards, activations of text encoders, CUDA
    itself, and fragmentation.

    Args:
        model (`str`):
            Hub id or directory of the pipeline, or of the judge to train. Only its configs and tokenizers are read.
        args ([`PaCoGRPOConfig`], [`PaCoNFTConfig`] or [`PaCoRewardConfig`]):
            Arguments of the trainer. Without a GPU, set `use_cpu=True`.
        train_dataset ([`~datasets.Dataset`], *optional*):
            Prompts, required for an image model. A judge's plan takes the longest pairs from `args`.
        peft_config ([`~peft.LoraConfig`] or `str`, *optional*):
            Adapter, or for image models the directory of an adapter to continue. If `None`, all weights of an image
            model are trained, and a judge gets the paper's adapter.
        reward_models (`Sequence[str]`, *optional*, defaults to `()`):
            Hub ids or directories of the judges and CLIP models that rewards load into the process, once per load.
        judge_quantization (`str`, *optional*):
            Quantization of the judges in `reward_models`, or of the judge to train: `nf4`, `int8` or `fp8`.
        eval_dataset ([`~datasets.Dataset`], *optional*):
            Prompts of an image model's evaluation. Commands that generate with the trained model are planned for
            these too, or else for the training prompts at their inference size.

    Returns:
        [`MemoryPlan`]: `phases` with their bytes by use, and the `peak`.

    Raises:
        `ValueError`: If the dataset or the adapter does not fit the model.
        `OSError`: If a config is missing.

    Example:

    ```python
    plan = plan_memory("black-forest-labs/FLUX.1-dev", args, prompts, LoraConfig(r=64, lora_alpha=128))
    print(plan)
    ```
    """
    if not isinstance(model, str) or not isinstance(args, PaCoGRPOConfig | PaCoRewardConfig):
        raise TypeError(
            f"`model` is a {type(model).__name__} and `args` a {type(args).__name__}; pass the Hub id or directory of a "
            "model, and the config of a trainer of this package."
        )
    if train_dataset is not None:
        check_is_dataset(train_dataset, "train_dataset")
    run: ImageRun | JudgeRun
    stage = None if args.deepspeed_plugin is None else args.deepspeed_plugin.zero_stage
    with tempfile.TemporaryDirectory() as folder:
        models = (model, *reward_models)
        model, *reward_models = resolved_models = [resolve_model_configs(name, folder) for name in models]
        if packaged_models := ", ".join(sorted({*models} - {*resolved_models})):
            logger.warning(
                f"The configs of {packaged_models} cannot be read from the Hub. The plan uses the packaged copies."
            )
        if isinstance(args, PaCoRewardConfig):
            read_judge_config(model)
            peft_config = complete_peft_config(peft_config, model, None, args.trust_remote_code)
            run = JudgeRun(model, args, peft_config, judge_quantization)
        else:
            if train_dataset is None:
                raise ValueError("The plan of an image model requires its prompts. Pass them as `train_dataset`.")
            run = ImageRun(model, args, peft_config, train_dataset, eval_dataset, reward_models, judge_quantization)
    return run.plan(stage, uses_fsdp())
