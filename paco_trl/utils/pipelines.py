# SPDX-License-Identifier: Apache-2.0
"""Unmodified diffusers pipelines: the arguments of their call, and what their tokenizers cut."""

import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def check_call(pipeline: "DiffusionPipeline", names: Sequence[str], purpose: str) -> None:
    """Refuse a pipeline whose call lacks one of the arguments; `purpose` ends the error."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    missing = [f"`{name}`" for name in names if name not in parameters]
    if missing:
        raise ValueError(f"The call of {type(pipeline).__name__} has no {', '.join(missing)}, so it cannot {purpose}")


@contextmanager
def truncations_counted(pipeline: "DiffusionPipeline") -> Iterator[Counter[str]]:
    """Count in place of the pipeline's warnings how many prompts of each kind were truncated."""
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
        logger_.addFilter(count)
    try:
        yield truncations
    finally:
        for logger_ in loggers:
            logger_.removeFilter(count)
