# SPDX-License-Identifier: Apache-2.0
"""Metrics of a judge's decisions in training and evaluation."""

from typing import NamedTuple

import torch
from accelerate.logging import get_logger

from ..evaluation import auroc, expected_calibration_error
from .first_token_loss import token_weights


logger = get_logger(__name__)

# Summed over the training steps between two logs
_SUMMED = (
    "pairs", "decision_loss", "reasoning_loss", "num_reasoning", "correct", "consistent", "p_yes_consistent",
    "p_yes_inconsistent", "entropy", "top1", "attended", "positions",
)  # fmt: skip


class Decisions(NamedTuple):
    """Decisions on a batch of pairs: detached float32 tensors of shape (B,)."""

    p_yes: torch.Tensor  # P(Yes) / (P(Yes) + P(No))
    is_yes: torch.Tensor  # 1 where the completion starts with Yes
    decision_loss: torch.Tensor  # -log p of the decision token in the full vocabulary
    reasoning_loss: torch.Tensor  # sum of -log p over the other tokens of the completion
    num_reasoning: torch.Tensor  # number of these


def decision_sums(decisions: Decisions, outputs, attention_mask: torch.Tensor) -> torch.Tensor:
    """Sum what `_SUMMED` names over a batch, as a tensor that stays on the accelerator until the next log."""
    p_yes, is_yes, decision_loss, reasoning_loss, num_reasoning = decisions
    return torch.stack(
        [
            torch.ones_like(p_yes).sum(),
            decision_loss.sum(),
            reasoning_loss.sum(),
            num_reasoning.sum(),
            ((p_yes > 0.5) == (is_yes == 1)).float().sum(),
            is_yes.sum(),
            (p_yes * is_yes).sum(),
            (p_yes * (1 - is_yes)).sum(),
            outputs.entropy.detach().float().sum(),
            outputs.is_top1.float().sum(),
            attention_mask.float().sum().to(p_yes.device),
            p_yes.new_full((), attention_mask.numel()),
        ]
    )


def training_metrics(totals: torch.Tensor) -> tuple[dict[str, float], int]:
    """Compute the metrics between two logs from the sums of their steps; also return the number of tokens."""
    sums = dict(zip(_SUMMED, totals.tolist(), strict=True))
    tokens = sums["pairs"] + sums["num_reasoning"]
    metrics = {
        "decision_loss": (sums["decision_loss"], sums["pairs"]),
        "reasoning_loss": (sums["reasoning_loss"], sums["num_reasoning"]),
        "decision_accuracy": (sums["correct"], sums["pairs"]),
        "p_yes/consistent": (sums["p_yes_consistent"], sums["consistent"]),
        "p_yes/inconsistent": (sums["p_yes_inconsistent"], sums["pairs"] - sums["consistent"]),
        "entropy": (sums["entropy"], tokens),
        "mean_token_accuracy": (sums["top1"], tokens),
    }
    metrics = {name: total / count for name, (total, count) in metrics.items() if count > 0}
    padding = 1 - sums["attended"] / sums["positions"]
    return {**metrics, "padding": padding}, int(sums["attended"])


def evaluation_metrics(decisions: Decisions, first_token_weight: float | None, loss_variant: str) -> dict[str, float]:
    """Compute the metrics of an evaluation; AUROC is left out when all pairs have the same answer."""
    p_yes, is_yes, decision_loss, reasoning_loss, num_reasoning = decisions
    length = num_reasoning + 1
    first, others = token_weights(length, first_token_weight, loss_variant)
    by_completion = first_token_weight is not None and loss_variant == "paper"
    num_items = len(length) if by_completion else length.sum().item()
    metrics = {
        "loss": (first * decision_loss + others * reasoning_loss).sum().item() / num_items,
        "decision_loss": decision_loss.mean().item(),
        "decision_accuracy": ((p_yes > 0.5) == (is_yes == 1)).double().mean().item(),
        "ece": expected_calibration_error(p_yes.numpy(), is_yes.numpy()),
    }
    if num_reasoning.sum() > 0:
        metrics["reasoning_loss"] = (reasoning_loss.sum() / num_reasoning.sum()).item()
    for name, of_kind in (("consistent", is_yes == 1), ("inconsistent", is_yes == 0)):
        if of_kind.any():
            metrics[f"p_yes/{name}"] = p_yes[of_kind].mean().item()
    if 0 < is_yes.sum() < len(is_yes):
        metrics["auroc"] = auroc(p_yes.numpy(), is_yes.numpy())
    else:
        logger.warning(
            f"All {len(is_yes)} evaluation pairs have the same answer, so AUROC is undefined and left out. "
            "Evaluate on consistent and inconsistent pairs."
        )
    return metrics
