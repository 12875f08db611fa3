# SPDX-License-Identifier: Apache-2.0
"""The loss of PaCo-Reward: the decision, Yes or No, weighed against the reasons that follow it."""

import torch


LOSS_VARIANTS = ("paper", "released")


def token_weights(
    length: torch.Tensor, first_token_weight: float | None, variant: str = "paper"
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Weights of the log-probabilities of a response of n tokens, before the division by [`num_loss_items`].

    With a = `first_token_weight`:

    | variant | first token | each other token |
    |---|---|---|
    | `"paper"` (Sec. 3.2) | a (1 if n = 1) | (1 - a) / (n - 1) |
    | `"released"` | a | n (1 - a) / (n - 1) |
    | a is `None` | 1 | 1 |

    Args:
        length (`torch.Tensor`):
            n, of any shape.
        first_token_weight (`float`, *optional*):
            a, in [0, 1]. `None` is plain likelihood.
        variant (`str`, *optional*, defaults to `"paper"`):
            `"paper"` or `"released"`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: weight of the first token and of each other, of the shape of `length`,
        float32.

    Raises:
        ValueError: `first_token_weight` is outside of [0, 1], or there is no such variant.
    """
    if variant not in LOSS_VARIANTS:
        raise ValueError(f"The loss variant is {variant!r}; it must be one of {', '.join(map(repr, LOSS_VARIANTS))}.")
    length = length.float()
    if first_token_weight is None:
        return torch.ones_like(length), torch.ones_like(length)
    if not 0 <= first_token_weight <= 1:
        raise ValueError(
            f"`first_token_weight` is {first_token_weight}; it is the decision token's share of the loss and must lie "
            "in [0, 1] (the paper uses 0.1), or be `None` for plain likelihood."
        )
    first = torch.full_like(length, first_token_weight)
    others = (1 - first_token_weight) / (length - 1).clamp(min=1)
    if variant == "released":
        return first, others * length
    return torch.where(length == 1, 1.0, first), others  # nothing else carries the weight of a decision alone


def first_token_weights(mask: torch.Tensor, first_token_weight: float | None, variant: str = "paper") -> torch.Tensor:
    r"""
    Weight of each token's log-probability in the loss: [`token_weights`], laid out over the tokens.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`):
            Nonzero at the tokens of the response; padding may be left, right or both.
        first_token_weight (`float`, *optional*):
            a, in [0, 1]. `None` is plain likelihood.
        variant (`str`, *optional*, defaults to `"paper"`):
            `"paper"` or `"released"`.

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32; 0 outside of the mask.
    """
    mask = mask.bool()
    is_first = mask & (mask.cumsum(dim=1) == 1)
    first, others = token_weights(mask.sum(dim=1, keepdim=True), first_token_weight, variant)  # (B, 1)
    return torch.where(is_first, first, others) * mask


def num_loss_items(mask: torch.Tensor, first_token_weight: float | None, variant: str = "paper") -> torch.Tensor:
    """
    What the weighted sum is divided by: responses in the paper's loss, tokens otherwise.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`), first_token_weight (`float`, *optional*), variant (`str`):
            As in [`first_token_weights`].

    Returns:
        `torch.Tensor`: a count, int64. Responses without a token do not count.
    """
    mask = mask.bool()
    if first_token_weight is not None and variant == "paper":
        return mask.any(dim=1).sum()
    return mask.sum()


def first_token_weighted_loss(
    log_probs: torch.Tensor, mask: torch.Tensor, first_token_weight: float | None, variant: str = "paper"
) -> torch.Tensor:
    r"""
    Loss of PaCo-Reward on a batch of responses y_0 ... y_{n-1}, y_0 being Yes or No.

    `"paper"` (Sec. 3.2), averaged over the responses:

        L = -[ a log p(y_0) + (1 - a) / (n - 1) * sum_{i=1}^{n-1} log p(y_i) ]

    which is -log p(y_0) for n = 1, and plain likelihood for a = 1/n.

    `"released"`, what the published training code computes: y_0 weighs a and every other token n (1 - a) / (n - 1),
    and the sum over the batch is divided by its number of *tokens*. So the decision weighs a / n: with a = 0.1 and
    n = 100 it counts 0.11 times as much as a token of the reasons, and 11 times as much in the paper's loss.

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

    Raises:
        ValueError: `first_token_weight` is outside of [0, 1], or there is no such variant.
    """
    weights = first_token_weights(mask, first_token_weight, variant)
    log_probs = torch.where(mask.bool(), log_probs, 0.0)  # -inf * 0 would be NaN
    return -(weights * log_probs).sum() / num_loss_items(mask, first_token_weight, variant).clamp(min=1)
