# SPDX-License-Identifier: Apache-2.0
"""Settings of [`PaCoNFTTrainer`]."""

from dataclasses import dataclass, field

from .paco_grpo_config import PaCoGRPOConfig
from .refusals import refuse_fields


_NO_SDE = "images are drawn by the pipeline's own ODE, without stochastic steps"
_NO_RATIO = "there is no probability ratio: the velocity itself is trained"

# Fields of PaCoGRPOConfig that mean nothing here, refused like those of TRL that mean nothing for images
NFT_REFUSED_FIELDS = {
    "sde_type": _NO_SDE,
    "sde_steps": f"{_NO_SDE}; the number of times at which an image is trained is `num_noise_levels`",
    "num_sde_steps": f"{_NO_SDE}; the number of times at which an image is trained is `num_noise_levels`",
    "noise_level": _NO_SDE,
    "epsilon": f"{_NO_RATIO}; see `nft_beta`",
    "epsilon_high": f"{_NO_RATIO}; see `nft_beta`",
    "ratio_tolerance": _NO_RATIO,
    "loss_type": "the loss is that of DiffusionNFT; for the others use PaCoGRPOTrainer",
}


@dataclass
class PaCoNFTConfig(PaCoGRPOConfig):
    # docstyle-ignore
    r"""
    Configuration class for the [`PaCoNFTTrainer`].

    Only the parameters that are new here are listed; for the others refer to [`PaCoGRPOConfig`]. Its fields that
    belong to stochastic steps and to the probability ratio are refused when set. The defaults are those of
    [DiffusionNFT](https://huggingface.co/papers/2509.16117); what is not named here keeps the default of PaCo-GRPO.

    Parameters:
        > Parameters that control the training

        nft_beta (`float`, *optional*, defaults to `1.0`):
            Strength of the implicit policies: the old velocity is moved by this share of the update, towards it and
            against it (published code: 1 for a single reward, 0.1 for several rewards and for text rendering). A
            smaller one lets the model move further for the same reward.
        num_noise_levels (`int`, *optional*):
            Times of the forward process at which each image is trained, drawn for it from those of the rollout's
            schedule except the last. If `None`, all of them, `num_inference_steps - 1` (published code).
        old_policy_decay_rate (`float`, *optional*, defaults to `1e-3`):
            Growth of the old policy's decay with each optimizer step (paper). With 0 the old policy is the model at
            the end of the last round.
        old_policy_max_decay (`float`, *optional*, defaults to `0.5`):
            Greatest share of its weights that the old policy keeps in an update, below 1 (paper).
    """

    # Parameters that control the training
    nft_beta: float = field(
        default=1.0,
        metadata={
            "help": "Strength of the implicit policies: the old velocity is moved by this share of the update, towards "
            "it and against it."
        },
    )
    num_noise_levels: int | None = field(
        default=None,
        metadata={
            "help": "Times of the forward process at which each image is trained, drawn from those of the rollout's "
            "schedule except the last. If `None`, all of them."
        },
    )
    old_policy_decay_rate: float = field(
        default=1e-3, metadata={"help": "Growth of the old policy's decay with each optimizer step."}
    )
    old_policy_max_decay: float = field(
        default=0.5,
        metadata={"help": "Greatest share of its weights that the old policy keeps in an update, below 1."},
    )

    def __post_init__(self):
        super().__post_init__()
        # Derived from `epsilon`, which is not used; a config that is made from this one must not set it either
        self.ratio_tolerance = None

    @property
    def num_trained_steps(self) -> int:
        """Times at which each image of a round is trained."""
        return self.num_noise_levels if self.num_noise_levels is not None else self.num_inference_steps - 1

    def _refuse_text_fields(self) -> None:
        super()._refuse_text_fields()
        refuse_fields(self, PaCoGRPOConfig, NFT_REFUSED_FIELDS, "but has no meaning here")

    def _check_values(self) -> None:
        if self.num_inference_steps < 2:
            raise ValueError(
                f"`num_inference_steps` is {self.num_inference_steps}: images are trained at the times of all steps "
                "but the last, so at least 2 are needed."
            )
        # The parent checks its stochastic steps against the schedule: the first is in every one
        sde_steps, self.sde_steps = self.sde_steps, [0]
        super()._check_values()
        self.sde_steps = sde_steps
        if self.num_noise_levels is not None and not 1 <= self.num_noise_levels < self.num_inference_steps:
            raise ValueError(
                f"`num_noise_levels` is {self.num_noise_levels}, but there are {self.num_inference_steps - 1} times to "
                f"choose from: those of the {self.num_inference_steps} steps (`num_inference_steps`), without the last."
            )
        # `not >` instead of `<=`: it refuses NaN as well
        if not self.nft_beta > 0:
            raise ValueError(
                f"`nft_beta` is {self.nft_beta}; without a move of the old velocity nothing would be learned, it must "
                "be above 0 (the published code uses 1 and 0.1)."
            )
        if not self.old_policy_decay_rate >= 0:
            raise ValueError(f"`old_policy_decay_rate` is {self.old_policy_decay_rate}; it cannot be negative.")
        if not 0 <= self.old_policy_max_decay < 1:
            raise ValueError(
                f"`old_policy_max_decay` is {self.old_policy_max_decay}; it must be from 0 to below 1 (the paper uses "
                "0.5): with 1 the old policy would stand still."
            )
        if self.advantage_clip is None:
            raise ValueError(
                "`advantage_clip` is None, but advantages are divided by it to become probabilities. Set a number "
                "(the paper uses 5)."
            )
