# SPDX-License-Identifier: Apache-2.0
"""PaCo-RL (arXiv 2512.04784) as a Hugging Face extension: reinforcement learning of consistent image generation.

The names below are imported when they are first used, so that `import paco_trl` stays light: the trainers bring in
torch, diffusers and TRL, which take seconds.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from .utils.lazy import lazy_imports


try:
    __version__ = version("paco_trl")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "unknown"

__all__ = [
    "PaCoGRPOConfig", "PaCoGRPOTrainer", "PaCoNFTConfig", "PaCoNFTTrainer", "PaCoReward", "PaCoRewardConfig",
    "PaCoRewardTrainer", "__version__", "load_for_inference",
]  # fmt: skip

if TYPE_CHECKING:
    from .generation.inference import load_for_inference
    from .rewards.paco_reward import PaCoReward
    from .trainer.paco_grpo_config import PaCoGRPOConfig
    from .trainer.paco_grpo_trainer import PaCoGRPOTrainer
    from .trainer.paco_nft_config import PaCoNFTConfig
    from .trainer.paco_nft_trainer import PaCoNFTTrainer
    from .trainer.paco_reward_config import PaCoRewardConfig
    from .trainer.paco_reward_trainer import PaCoRewardTrainer

__getattr__, __dir__ = lazy_imports(__name__, __file__)
