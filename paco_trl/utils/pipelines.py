# SPDX-License-Identifier: Apache-2.0
"""Count the prompts that the tokenizers of a pipeline cut."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@contextmanager
def truncations_counted(pipeline: "DiffusionPipeline") -> Iterator[Counter[str]]:
    """Count in place of the pipeline's warnings how many prompts of each kind were truncated; the innermost counts."""
    # Prompts of image sets are always longer than CLIP reads, and the pipeline logs each prompt with its full text
    truncations: Counter[str] = Counter()

    def count(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if is_truncated := "was truncated" in message:
            truncations[message.split(":")[0]] += 1
        return not is_truncated and "sequence length is longer than" not in message

    # The tokenizer does not know yet that its result will be truncated
    names = (type(pipeline).__module__, "transformers.tokenization_utils_base")
    loggers = [logging.getLogger(name) for name in names]
    for logger_ in loggers:
        logger_.filters.insert(0, count)  # before those of an outer context, which it keeps from counting
    try:
        yield truncations
    finally:
        for logger_ in loggers:
            logger_.removeFilter(count)
