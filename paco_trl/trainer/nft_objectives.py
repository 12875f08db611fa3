# SPDX-License-Identifier: Apache-2.0
"""The objectives of [`PaCoNFTTrainer`]: what differs between DiffusionNFT and AWM."""

from dataclasses import dataclass
from typing import Any

import torch

from ..rollout import TransformerStep
from ..utils.papers import AWM_PAPER, NFT_PAPER
from .losses import clipped_surrogate, matching_log_prob, nft_loss, nft_reward_probability, velocity_error
from .paco_nft_config import PaCoNFTConfig


@dataclass(kw_only=True)
class NoisedStep(TransformerStep):
    """Generated images, each noised to one time: `sample` has their latents."""

    times: torch.Tensor  # (B,)
    target: torch.Tensor  # (B, ...), velocity of the forward process, float32
    rollout_velocity: torch.Tensor  # (B, ...), predicted by the weights that generated the images
    # (B, ...), predicted by the old policy, if the loss compares with it and other weights generated the images
    old_policy_velocity: torch.Tensor | None = None


class Objective:
    """A loss of noised images, with the role of the old policy and the entries of the model card."""

    method: str  # name on the card, like `tag` and `paper`
    tag: str
    paper: dict[str, str]
    options: tuple[str, ...]  # fields of the config that only this objective uses
    old_policy_generates = False  # whether the old policy generates the images, rather than the weights in training
    old_policy_is_in_loss = False  # whether the loss compares the velocity with the old policy's

    def __init__(self, args: PaCoNFTConfig):
        self.args = args
        self.advantage_clip: Any = args.advantage_clip  # never `None` in this config

    def loss(
        self, velocity: torch.Tensor, step: NoisedStep, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each image and the metrics to log, all (B,), from the trained velocity (B, ...)."""
        raise NotImplementedError


class DiffusionNFT(Objective):
    """The old policy generates; the trained velocity moves towards images with a high reward, away from the others."""

    method = "DiffusionNFT"
    tag = "diffusion-nft"
    paper = NFT_PAPER
    options = ("nft_beta",)
    old_policy_generates = True

    def loss(
        self, velocity: torch.Tensor, step: NoisedStep, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss by [`~paco_trl.trainer.losses.nft_loss`]; it has no metrics of its own."""
        probability = nft_reward_probability(advantages, self.advantage_clip)  # (B,)
        old_velocity, beta = step.rollout_velocity, self.args.nft_beta
        return nft_loss(velocity, old_velocity, step.target, probability, beta, step.times), {}


class AdvantageWeightedMatching(Objective):
    """The weights in training generate; the flow-matching loss gives a probability ratio, clipped as in PPO."""

    method = "AWM"
    tag = "awm"
    paper = AWM_PAPER
    options = ("awm_weighting", "old_policy_beta")

    def __init__(self, args: PaCoNFTConfig):
        super().__init__(args)
        self.old_policy_is_in_loss = args.keeps_old_policy

    def loss(
        self, velocity: torch.Tensor, step: NoisedStep, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the clipped objective, and the penalty for leaving the old policy."""
        args = self.args
        log_prob = matching_log_prob(velocity, step.target, step.times, args.awm_weighting)
        old_log_prob = matching_log_prob(step.rollout_velocity, step.target, step.times, args.awm_weighting)
        # Scaled to [-1, 1], as in the published code and for DiffusionNFT's probability
        advantages = advantages / self.advantage_clip
        surrogate = clipped_surrogate(log_prob, old_log_prob, advantages, *args.clip_range)
        low = surrogate.is_low_clipped
        high = surrogate.is_high_clipped
        loss = surrogate.loss.float()
        metrics = {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low | high,
            "approx_kl": (log_prob - old_log_prob) ** 2 / 2,
        }
        if self.old_policy_is_in_loss:
            old_velocity: Any = step.old_policy_velocity
            metrics["old_policy_deviation"] = velocity_error(velocity.float(), old_velocity.float())
            loss = loss + args.old_policy_beta * metrics["old_policy_deviation"]
        return loss, metrics


OBJECTIVES: dict[str, type[Objective]] = {"nft": DiffusionNFT, "awm": AdvantageWeightedMatching}
