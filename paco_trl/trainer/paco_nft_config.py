# SPDX-License-Identifier: Apache-2.0
"""Settings of [`PaCoNFTTrainer`]."""

from dataclasses import dataclass

from .config_checks import NFT_LOSSES
from .config_utils import help_from_docstring
from .paco_grpo_config import CHOICES, PaCoGRPOConfig


@help_from_docstring
@dataclass
class PaCoNFTConfig(PaCoGRPOConfig):
    # docstyle-ignore
    r"""
    Configuration class for the [`PaCoNFTTrainer`].

    This class includes only the parameters that are new here or have other defaults; for the others refer to
    [`PaCoGRPOConfig`]. Fields for stochastic steps, and fields of the other loss, are refused when set. The
    defaults are from [DiffusionNFT](https://huggingface.co/papers/2509.16117) and, with `loss_type="awm"`, from the
    published code of [AWM](https://huggingface.co/papers/2509.25050).

    Parameters:
        > Parameters that control the training

        loss_type (`str`, *optional*, defaults to `"nft"`):
            Objective: `"nft"` (DiffusionNFT) or `"awm"` (Advantage Weighted Matching, AWM). [`PaCoGRPOTrainer`] has
            the objectives of stochastic steps.
        nft_beta (`float`, *optional*, defaults to `1.0`):
            Guidance strength of the implicit policies, (1 - beta) v_old + beta v for images with a high reward and
            (1 + beta) v_old - beta v for those with a low one (published code: 1 for a single reward, 0.1 for several
            rewards and for text rendering). Smaller values move the model further for the same reward.
        num_noise_levels (`int`, *optional*):
            Times at which each image is trained, sampled from the rollout's schedule except the last. If `None`, all
            of them, `num_inference_steps - 1` (published code). It has nothing to do with GRPO's `noise_level`.
        old_policy_decay_rate (`float`, *optional*, defaults to `1e-3`):
            Growth of the old policy's decay with each optimizer step (paper). With 0 the old policy is the model at
            the end of the last round.
        old_policy_max_decay (`float`, *optional*, defaults to `0.5`):
            Upper limit of this decay, below 1 (paper; the published code of AWM: 0.3).
        epsilon (`float`, *optional*, defaults to `1.0`):
            Clip range of the probability ratio of AWM (published code, which makes one update per round and never
            reaches it): watch `clip_ratio/region_mean`.
        awm_weighting (`str`, *optional*, defaults to `"ghuber"`):
            AWM's log-probability of a flow-matching loss l at time t: `"ghuber"`, -4 t l^(1/4) (published code), or
            `"t"`, -t l.
        old_policy_beta (`float`, *optional*, defaults to `1.0`):
            Weight in AWM of the mean squared difference to the old policy's velocity (published code). With 0 no old
            policy is kept.
    """

    loss_types = NFT_LOSSES
    choices = CHOICES | {"awm_weighting": ("ghuber", "t")}

    loss_type: str = "nft"
    nft_beta: float = 1.0
    num_noise_levels: int | None = None
    old_policy_decay_rate: float = 1e-3
    old_policy_max_decay: float = 0.5
    epsilon: float = 1.0
    awm_weighting: str = "ghuber"
    old_policy_beta: float = 1.0

    @property
    def keeps_old_policy(self) -> bool:
        """Whether there is an old policy: a second average of the weights."""
        return self.loss_type == "nft" or self.old_policy_beta > 0
