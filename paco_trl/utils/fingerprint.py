# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of weights and descriptions of rewards, to tell apart those of the same name."""

import hashlib
import inspect
from contextlib import suppress
from typing import Any

from torch import nn

from .files import digest
from .names import public_name


# Number of values per weight. Training changes nearly all of them
_SAMPLE = 1024

# Arguments of rewards and judges that decide where and how fast they score, not what
_HARMLESS = ("device", "batch_size", "name", "model", "base_url", "max_concurrency", "timeout", "time_budget")


def weights_fingerprint(*modules: nn.Module) -> str:
    """Compute a digest of a sample of each weight, with its name, shape and dtype: the same on every device."""
    digest = hashlib.sha256()
    for module in modules:
        for name, weight in sorted(module.named_parameters()):
            is_torchao = hasattr(weight, "__tensor_flatten__")  # which cannot be flattened
            flat = (weight.dequantize() if is_torchao else weight).detach().flatten()
            sample = flat[:: max(1, flat.numel() // _SAMPLE)].float().cpu().numpy()
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode() + sample.tobytes())
    return digest.hexdigest()[:16]


def describe_scorer(scorer: Any) -> dict[str, Any]:
    """
    Describe what the scores of a reward or a judge depend on: code, arguments, model, weights, processor and judge, and
    its `fingerprint`, if it has one. Not what it reads elsewhere: a server's weights, a file, a global variable.
    """
    scorer = scorer.__self__ if inspect.ismethod(scorer) else scorer
    code: Any = scorer if inspect.isroutine(scorer) else type(scorer)
    description: dict[str, Any] = {"code": f"{code.__module__}.{code.__qualname__}"}
    package_class = next((base for base in type(scorer).__mro__ if base.__module__.startswith("paco_trl.")), None)
    if not str(code.__module__).startswith("paco_trl."):  # `None` after `exec`
        with suppress(OSError, TypeError):  # typed into an interpreter, or not written in Python
            description["source"] = digest(inspect.getsource(code))[:16]
    if name := getattr(scorer, "model_name", None) or getattr(scorer, "name", None):
        description["model_name"] = public_name(str(name))
    if fingerprint := getattr(scorer, "fingerprint", None):
        description["fingerprint"] = str(fingerprint)
    for name in inspect.signature(package_class).parameters if package_class is not None else ():
        value = getattr(scorer, name, None)
        if name not in _HARMLESS and isinstance(value, str | int | float):  # `None` is as good as left out
            description[name] = value
    attributes = getattr(scorer, "__dict__", {})
    if package_class is None:  # of a user's own class, as a digest: one may be a secret
        values = {name: value for name, value in attributes.items() if isinstance(value, str | int | float)}
        values = {name: value for name, value in values.items() if not name.startswith("_")}
        description |= {"attributes": digest(values)[:16]} if values else {}
    for name, value in attributes.items():
        if isinstance(value, nn.Module) and not fingerprint:
            description[name] = weights_fingerprint(value)
        elif name == "processor" and hasattr(value, "to_json_string"):
            description[name] = digest([value.to_json_string(), getattr(value, "chat_template", None)])[:16]
        elif name == "judge":
            description[name] = describe_scorer(value)
    return description
