# SPDX-License-Identifier: Apache-2.0
"""PaCo-RL (arXiv 2512.04784) as a Hugging Face extension: train consistent image generation with reinforcement learning.

The names below are imported when they are first used, so that `import paco_trl` stays light: the trainers bring in
torch, diffusers and TRL, which take seconds.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING


try:
    __version__ = version("paco_trl")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "unknown"

_MODULE_OF = {
    "PaCoGRPOConfig": "paco_trl.trainer.paco_grpo_config",
    "PaCoGRPOTrainer": "paco_trl.trainer.paco_grpo_trainer",
    "PaCoNFTConfig": "paco_trl.trainer.paco_nft_config",
    "PaCoNFTTrainer": "paco_trl.trainer.paco_nft_trainer",
    "PaCoReward": "paco_trl.rewards.paco_reward",
    "PaCoRewardConfig": "paco_trl.trainer.paco_reward_config",
    "PaCoRewardTrainer": "paco_trl.trainer.paco_reward_trainer",
}

__all__ = [
    "PaCoGRPOConfig",
    "PaCoGRPOTrainer",
    "PaCoNFTConfig",
    "PaCoNFTTrainer",
    "PaCoReward",
    "PaCoRewardConfig",
    "PaCoRewardTrainer",
    "__version__",
]

if TYPE_CHECKING:
    from .rewards.paco_reward import PaCoReward
    from .trainer.paco_grpo_config import PaCoGRPOConfig
    from .trainer.paco_grpo_trainer import PaCoGRPOTrainer
    from .trainer.paco_nft_config import PaCoNFTConfig
    from .trainer.paco_nft_trainer import PaCoNFTTrainer
    from .trainer.paco_reward_config import PaCoRewardConfig
    from .trainer.paco_reward_trainer import PaCoRewardTrainer


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paco_trl' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
