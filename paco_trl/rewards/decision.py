# SPDX-License-Identifier: Apache-2.0
"""The decision of a judge: the probability of Yes against No."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
