# SPDX-License-Identifier: Apache-2.0
"""Options of the commands."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *aliases: str, **kwargs) -> Any:
    """Declare a field of a dataclass of arguments, as [`~trl.TrlParser`] reads it; `kwargs` are for argparse."""
    metadata = {"help": help, "aliases": list(aliases), **kwargs}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


JUDGE_QUANTIZATION = "Quantization of a judge in the process: `nf4`, `int8` or `fp8`."


JUDGE_ATTENTION = "Attention of a judge in the process, such as `flash_attention_2`. If `None`, transformers' default."


def judge_options(args: Any, url: str | None) -> dict[str, Any]:
    """Return the options of a judge in the process, as arguments of its loading; refuse them for a judge at `url`."""
    options = {name: getattr(args, f"judge_{name}") for name in ("quantization", "attn_implementation")}
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if url is not None:
            raise ValueError(f"`--judge_{name}` is {value!r}, but a served judge is quantized and run by its server.")
    return options
