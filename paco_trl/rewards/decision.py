# SPDX-License-Identifier: Apache-2.0
"""The decision of a judge: the probability of Yes against No."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# What vLLM writes for the logarithm of 0
_LOG_ZERO = -9999.0
# What models do to their logits behind the head
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def yes_probability(
    logprobs: Mapping[str, float], yes: Sequence[str] = ("Yes",), no: Sequence[str] = ("No",)
) -> float | None:
    """
    Score of a judge from log-probabilities of the first position: P(Yes) / (P(Yes) + P(No)).

    It is computed in log space, so that nothing underflows.

    Args:
        logprobs (`Mapping[str, float]`):
            Token -> log-probability.
        yes (`Sequence[str]`, *optional*, defaults to `("Yes",)`), no (`Sequence[str]`, *optional*, defaults to `("No",)`):
            Tokens of each answer; their probabilities are added. The published weights were trained on these two:
            `yes` and ` Yes` are other tokens.

    Returns:
        `float` or `None`: the score. An answer none of whose tokens is there has the probability 0, which gives 1 or 0:
        the caller knows how large it can be at most. `None` when neither is there, or both have the probability 0
        (-inf, or -9999 as vLLM has it).

    Raises:
        ValueError: If a log-probability is not a number, or above 0.

    Example:

    ```python
    >>> from paco_trl.rewards import yes_probability

    >>> round(yes_probability({"Yes": -0.1, "No": -2.4, "Maybe": -5.0}), 4)
    0.9089
    ```
    """
    for token in (*yes, *no):
        # A server may round 0 to a little more
        if not logprobs.get(token, -math.inf) <= 1e-3:
            raise ValueError(
                f"The log-probability of {token!r} is {logprobs[token]}, but a log-probability is a number of at most 0."
            )
    log_yes, log_no = (_log_sum(logprobs.get(token, -math.inf) for token in tokens) for tokens in (yes, no))
    if max(log_yes, log_no) <= _LOG_ZERO:
        return None
    difference = log_yes - log_no
    # Each branch has the exponential that cannot overflow
    if difference >= 0:
        return 1 / (1 + math.exp(-difference))
    return math.exp(difference) / (1 + math.exp(difference))


def _log_sum(logprobs: Iterable[float]) -> float:
    """Logarithm of the sum of probabilities, exact for a single one."""
    logprobs = list(logprobs)
    largest = max(logprobs)
    if largest == -math.inf:
        return largest
    return largest + math.log(sum(math.exp(logprob - largest) for logprob in logprobs))


def decision_token_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, int]:
    """
    Token ids of the two answers, looked up from the tokenizer.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer.

    Returns:
        `tuple[int, int]`: the ids of Yes and of No.

    Raises:
        ValueError: One of them is not a single token, so that its probability is not that of one position.
    """
    ids = []
    for answer in ("Yes", "No"):
        encoded = tokenizer.encode(answer, add_special_tokens=False)
        if len(encoded) != 1:
            raise ValueError(
                f"The tokenizer {type(tokenizer).__name__} encodes {answer!r} as {len(encoded)} tokens "
                f"({tokenizer.convert_ids_to_tokens(encoded)}). The score is the probability of Yes against No at one "
                "position, so each must be one token: take a model whose tokenizer has both, as Qwen2.5-VL's does."
            )
        ids += encoded
    return ids[0], ids[1]


def decision_direction(
    head: "nn.Module", decision_ids: tuple[int, int]
) -> tuple["torch.Tensor", "torch.Tensor | float"]:
    """
    What gives logit(Yes) - logit(No) from a hidden state: their difference is its product with a direction.

    Args:
        head (`torch.nn.Module`):
            Language-model head, whole.
        decision_ids (`tuple[int, int]`):
            Token ids of Yes and No.

    Returns:
        `tuple[torch.Tensor, torch.Tensor | float]`: direction of shape `(D,)`, float32, and the difference of the biases.
    """
    yes, no = head.weight.detach()[list(decision_ids)].float()
    if head.bias is None:
        return yes - no, 0.0
    bias_yes, bias_no = head.bias.detach()[list(decision_ids)].float()
    return yes - no, bias_yes - bias_no


def scales_logits(config: "PreTrainedConfig") -> str | None:
    """
    Name of what a model does to its logits behind the head, for which [`decision_direction`] is not enough.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Config of the model.

    Returns:
        `str` or `None`.
    """
    text_config = config.get_text_config()
    return next((name for name in _SCALES if getattr(text_config, name, None) not in (None, 1, 1.0)), None)
