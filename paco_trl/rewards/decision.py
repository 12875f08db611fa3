# SPDX-License-Identifier: Apache-2.0
"""The decision of a judge: the probability of Yes against No."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import expit


if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# vLLM's logarithm of 0
_LOG_ZERO = -9999.0
# Configs of models that scale their logits after the head
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def yes_probability(
    logprobs: Mapping[str, float], yes: Sequence[str] = ("Yes",), no: Sequence[str] = ("No",)
) -> float | None:
    """
    Compute the score of a judge from the log-probabilities of the first position: P(Yes) / (P(Yes) + P(No)).

    Args:
        logprobs (`Mapping[str, float]`):
            Token -> log-probability.
        yes (`Sequence[str]`, *optional*, defaults to `("Yes",)`), no (`Sequence[str]`, *optional*, defaults to `("No",)`):
            Tokens of each answer; their probabilities are added. The published weights were trained on these two:
            `yes` and ` Yes` are other tokens.

    Returns:
        `float` or `None`: the score. An answer without any of its tokens has probability 0, which gives 1 or 0. `None`
        if both have probability 0 (absent, -inf, or vLLM's -9999).

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
            raise ValueError(f"The log-probability of {token!r} is {logprobs[token]}, but must be at most 0.")
    log_yes, log_no = (
        float(np.logaddexp.reduce([logprobs.get(token, -math.inf) for token in tokens])) for tokens in (yes, no)
    )
    if max(log_yes, log_no) <= _LOG_ZERO:
        return None
    return float(expit(log_yes - log_no))


def decision_token_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, int]:
    """Look up the token ids of Yes and No, each of which must be one token."""
    ids = []
    for answer in ("Yes", "No"):
        encoded = tokenizer.encode(answer, add_special_tokens=False)
        if len(encoded) != 1:
            raise ValueError(
                f"The tokenizer {type(tokenizer).__name__} encodes {answer!r} as {len(encoded)} tokens "
                f"({tokenizer.convert_ids_to_tokens(encoded)}). The score is the probability of Yes against No at one "
                "position, so each must be one token: use a model whose tokenizer has both, such as Qwen2.5-VL."
            )
        ids += encoded
    return ids[0], ids[1]


def decision_direction(
    head: "nn.Module", decision_ids: tuple[int, int]
) -> tuple["torch.Tensor", "torch.Tensor | float"]:
    """Return direction `(D,)` and offset that give logit(Yes) - logit(No) from a hidden state, in float32."""
    # One by one: a list of indices is copied to the device, which the host waits for
    yes, no = (head.weight.detach()[token].float() for token in decision_ids)
    if head.bias is None:
        return yes - no, 0.0
    bias_yes, bias_no = (head.bias.detach()[token].float() for token in decision_ids)
    return yes - no, bias_yes - bias_no


def scales_logits(config: "PreTrainedConfig") -> str | None:
    """Return the name of a scaling of the logits after the head, with which [`decision_direction`] is not enough."""
    text_config = config.get_text_config()
    return next((name for name in _SCALES if getattr(text_config, name, None) not in (None, 1, 1.0)), None)
