# SPDX-License-Identifier: Apache-2.0
"""Options of the commands and examples."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *aliases: str, **kwargs) -> Any:
    """Declare a field of a dataclass of arguments, as [`~trl.TrlParser`] reads it; `kwargs` are for argparse."""
    metadata = {"help": help, "aliases": list(aliases), **kwargs}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


REMOTE_IMAGES = "Whether to download images that rows name by URLs. Only for data that you trust."
JUDGE_QUANTIZATION = "Quantization of a judge in the process: `nf4`, `int8` or `fp8`."


def judge_options(quantization: str | None, url: str | None) -> dict[str, Any]:
    """Return the quantization as an argument of a judge in the process; refuse it for a judge at `url`."""
    if quantization is not None and url is not None:
        raise ValueError(f"`--judge_quantization` is {quantization!r}, but a served judge is quantized by its server.")
    return {} if quantization is None else {"quantization": quantization}
