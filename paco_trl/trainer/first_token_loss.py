# SPDX-License-Identifier: Apache-2.0
"""Loss of PaCo-Reward: the decision, Yes or No, weighted against the reasoning after it."""

import torch


LOSS_VARIANTS = ("paper", "released")


def token_weights(
    length: torch.Tensor, first_token_weight: float | None, variant: str = "paper"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the weights of the first and of every other token of responses of `length` tokens."""
    if variant not in LOSS_VARIANTS:
        raise ValueError(f"The loss variant is {variant!r}; it must be one of {', '.join(map(repr, LOSS_VARIANTS))}.")
    length = length.float()
    if first_token_weight is None:
        return torch.ones_like(length), torch.ones_like(length)
    first = torch.full_like(length, first_token_weight)
    rest = (1 - first_token_weight) / (length - 1).clamp(min=1)
    if variant == "released":
        return first, rest * length
    return torch.where(length == 1, 1.0, first), rest  # n = 1: the decision has the full weight


def first_token_weights(mask: torch.Tensor, first_token_weight: float | None, variant: str = "paper") -> torch.Tensor:
    """Compute the weight of each token in the loss, of shape (B, T) and 0 outside of the mask."""
    is_first = mask & (mask.cumsum(dim=1) == 1)
    first, rest = token_weights(mask.sum(dim=1, keepdim=True), first_token_weight, variant)  # (B, 1)
    return torch.where(is_first, first, rest) * mask


def num_loss_items(length: torch.Tensor, first_token_weight: float | None, variant: str = "paper") -> torch.Tensor:
    """Count what the weighted sum is divided by: responses that have a token in the paper's loss, else tokens."""
    by_response = first_token_weight is not None and variant == "paper"
    return (length > 0).sum() if by_response else length.sum()


def first_token_weighted_loss(
    log_probs: torch.Tensor, mask: torch.Tensor, first_token_weight: float | None, variant: str = "paper"
) -> torch.Tensor:
    r"""
    Compute the loss of PaCo-Reward on a batch of responses y_0 ... y_{n-1}, where y_0 is Yes or No.

    `"paper"` (Sec. 3.2), averaged over the responses:

        L = -[ a log p(y_0) + (1 - a) / (n - 1) * sum_{i=1}^{n-1} log p(y_i) ]

    which is -log p(y_0) for n = 1, and plain likelihood for a = 1/n.

    `"released"`, as in the published training code: y_0 has the weight a and every other token n (1 - a) / (n - 1),
    and the sum over the batch is divided by its number of *tokens*. The decision then has the weight a / n.

    Args:
        log_probs (`torch.Tensor` of shape `(B, T)`):
            Log-probability of each token; anything outside of the mask.
        mask (`torch.Tensor` of shape `(B, T)`):
            Nonzero at the tokens of the response; padding may be left, right or both.
        first_token_weight (`float`, *optional*):
            a, in [0, 1] (paper: 0.1). `None` is plain likelihood: the mean over all tokens of the batch.
        variant (`str`, *optional*, defaults to `"paper"`):
            `"paper"` or `"released"`.

    Returns:
        `torch.Tensor`: the loss, a scalar; 0 for a batch without a token.
    """
    mask = mask.bool()
    weights = first_token_weights(mask, first_token_weight, variant)
    log_probs = torch.where(mask, log_probs, 0.0)  # -inf * 0 would be NaN
    return -(weights * log_probs).sum() / num_loss_items(mask.sum(dim=1), first_token_weight, variant).clamp(min=1)
