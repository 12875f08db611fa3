# SPDX-License-Identifier: Apache-2.0
"""Describe everything that determines results, as data to save and compare: settings, rows, weights, and code."""

import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from PIL import Image as PILImage
from torch import nn

from .files import digest
from .names import is_local, public_name


version = functools.cache(metadata.version)  # uncached, it parses a file each time

# Number of values per weight. Training changes nearly all of them
_MAX_SAMPLED_VALUES = 1024
# Bytes of a part of a file. Two parts tell compressed images apart; files of weights take many parts, since only some
# weights may have changed
_PART_BYTES = 16 * 1024
_PARTS_PER_FILE = 64


def weights_fingerprint(*modules: nn.Module, frozen_only: bool = False) -> str:
    """
    Compute a digest of a sample of each weight and saved buffer, with its name, shape and dtype: the same on every
    device, and in each process of a model that ZeRO-3 has partitioned (collective there).
    """
    hasher = hashlib.sha256()
    for module in modules:
        saved = module.state_dict().keys()  # not buffers that a model computes for itself
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
        for name, weight in sorted((dict(module.named_parameters()) | buffers).items()):
            if frozen_only and weight.requires_grad:
                continue
            if hasattr(weight, "ds_id"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([weight]):
                    hasher.update(_sample(name, weight))
            else:
                hasher.update(_sample(name, weight))
    return hasher.hexdigest()[:16]


def component_fingerprint(component: Any) -> str:
    """Digest a component of a pipeline: its weights, if any, and its configuration, such as a scheduler's."""
    config = getattr(component, "config", None)
    items = config.items() if isinstance(config, dict) else ()
    # Names that begin with "_" say where the component comes from. Its quantization is a setting of the run
    kept = {name: describe(value) for name, value in items if name[0] != "_" and name != "quantization_config"}
    weights = weights_fingerprint(component) if isinstance(component, nn.Module) else None
    return digest([weights, kept])[:16]


def _sample(name: str, weight: Any) -> bytes:
    is_torchao = hasattr(weight, "__tensor_flatten__")  # its values have no flat view
    flat = (weight.dequantize() if is_torchao else weight).detach().flatten()
    values = flat[:: max(1, flat.numel() // _MAX_SAMPLED_VALUES)].float().cpu().numpy()
    content = f"{name} {tuple(weight.shape)} {weight.dtype} ".encode() + values.tobytes()
    # The values of a weight that bitsandbytes has quantized are codes, and their scale is elsewhere
    state = getattr(weight, "quant_state", None)
    scales = {"SCB": getattr(weight, "SCB", None)} if state is None else state.as_dict()
    return content + b"".join(_sample(key, scale) for key, scale in scales.items() if isinstance(scale, torch.Tensor))


def describe(value: Any) -> Any:
    """
    Describe, as JSON values, everything that can change a result: settings as they are, the columns of a dataset and
    modules by digests, functions and other objects by [`describe_code`]. No path and no address in memory is part of
    it.
    """
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str | Path):
        return public_name(str(value)) if isinstance(value, Path) or is_local(value) else value
    if isinstance(value, dict):
        return {str(name): describe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, np.ndarray | np.generic | PILImage.Image):
        array = np.asarray(value)
        return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()[:16]
    if isinstance(value, Dataset):
        return _describe_dataset(value)
    if isinstance(value, nn.Module):
        return weights_fingerprint(value)
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(_sample("", value)).hexdigest()[:16]
    if hasattr(value, "to_json_string"):  # a processor
        return digest([value.to_json_string(), getattr(value, "chat_template", None)])[:16]
    if _is_settings(value):
        return describe(vars(value))
    if callable(value) or type(value).__repr__ is object.__repr__:
        return describe_code(value)
    return re.sub(r" at 0x\w+", "", str(value))  # without an address in memory


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute."""
    names = ("paco_trl", "torch", "diffusers", "transformers", "peft")
    return {name: version(name).partition("+")[0] for name in names}  # not for which accelerator they are built


# ---- Code ----


def describe_code(target: Any, harmless: Collection[str] = ()) -> dict[str, Any]:
    """
    Describe everything that the results of a function or an object depend on: source, arguments, model, weights,
    processor and judge, and its `fingerprint`, if it has one. The description has no `harmless` arguments and
    attributes, and nothing that the code reads elsewhere: a server's weights, a file, a global variable.
    """
    target = target.__self__ if inspect.ismethod(target) else target
    if isinstance(target, functools.partial):
        arguments = digest(describe([*target.args, target.keywords]))[:16]  # one may be a secret
        return {**describe_code(target.func, harmless), "arguments": arguments}
    code: Any = target if inspect.isroutine(target) or inspect.isclass(target) else type(target)
    description: dict[str, Any] = {"code": f"{code.__module__}.{code.__qualname__}"}
    if source := _source(code):  # `None` for code that was typed into an interpreter, or is not written in Python
        description["source"] = source
    if inspect.isfunction(code):
        with_values = {name: argument.default for name, argument in inspect.signature(code).parameters.items()}
        with suppress(ValueError):  # a variable may be set later
            with_values |= inspect.getclosurevars(inspect.unwrap(code)).nonlocals
        if values := {name: value for name, value in with_values.items() if _is_plain(value)}:
            description["variables"] = digest(describe(values))[:16]
    if name := getattr(target, "model_name", None) or getattr(target, "name", None):
        description["model_name"] = public_name(str(name))
    if fingerprint := getattr(target, "fingerprint", None):
        description["fingerprint"] = str(fingerprint)
    package_class = next((base for base in type(target).__mro__ if base.__module__.startswith("paco_trl.")), None)
    for name in inspect.signature(package_class).parameters if package_class is not None else ():
        value = getattr(target, name, None)
        if name not in harmless and value is not None and _is_plain(value):  # `None` is as good as left out
            description[name] = describe(value)
    attributes = {} if inspect.isclass(target) else getattr(target, "__dict__", {})
    if not code.__module__ or not code.__module__.startswith("paco_trl."):  # as a digest: one may be a secret
        left_out = () if package_class is None else harmless
        # A private attribute is a setting if an argument has its name; other attributes may count calls or hold models
        names = [name for name in attributes if not name.startswith("_") and name not in left_out]
        with suppress(ValueError):  # a class written in C may have no signature
            parameters = inspect.signature(type(target)).parameters
            names += [name for name in attributes if name.startswith("_") and name.lstrip("_") in parameters]
        values = {name: attributes[name] for name in names if _is_plain(attributes[name])}
        description |= {"attributes": digest(describe(values))[:16]} if values else {}
    for name, value in attributes.items():
        if isinstance(value, nn.Module) and not fingerprint:
            description[name] = weights_fingerprint(value)
        elif name == "processor" and hasattr(value, "to_json_string"):
            description[name] = describe(value)
        elif name == "judge":
            description[name] = describe_code(value, harmless)
    return description


def _is_settings(value: Any) -> bool:
    return is_dataclass(value) and hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, text or tensor, or consists of these; code may yet fill an empty list."""
    if isinstance(value, dict):
        return bool(value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return bool(value) and all(map(_is_plain, value))
    if _is_settings(value):
        return all(map(_is_plain, vars(value).values()))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype != object
    return isinstance(value, str | int | float | Path | Enum | torch.Tensor | PILImage.Image) or value is None


def _source(code: Any) -> str | None:
    """Digest the source of a function, or of the methods and plain values of a class and of its bases."""
    # A notebook has no source of a class as a whole, and another class may have the same name
    classes = code.__mro__[:-1] if inspect.isclass(code) else ()
    members = [item for part in classes for item in vars(part).items()] or [("", code)]
    parts: list[Any] = []
    for name, member in members:
        for attribute in ("__func__", "fget", "func"):
            member = getattr(member, attribute, member)
        if _is_plain(member) and not name.startswith("_"):
            parts.append([name, describe(member)])
        with suppress(OSError, TypeError):
            parts.append(inspect.getsource(member) if inspect.isroutine(member) else "")
    return digest(parts)[:16] if any(parts) else None


# ---- Data ----


def _describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Digest each column of a dataset; files by their content at both ends, and not by their paths."""
    # Not the fingerprint of `datasets`: it depends on how the dataset was made
    hashers = {name: hashlib.sha256() for name in dataset.column_names}
    for batch in dataset.with_format("arrow").iter(batch_size=100):  # selected rows, with their images, are copied
        for name, column in zip(batch.column_names, batch.columns, strict=True):
            has_bytes = "binary" in str(column.type)
            for value in map(_file_contents, column) if has_bytes else column.to_pylist():
                hashers[name].update(json.dumps(value, sort_keys=True, default=str).encode("utf-8", "replace"))
    return {"number of rows": len(dataset), **{name: column.hexdigest()[:16] for name, column in hashers.items()}}


def describe_rows(dataset: Dataset) -> Iterator[str]:
    """Describe each row, with digests in place of files and bytes: rows of the same contents are equal."""
    for batch in dataset.with_format("arrow").iter(batch_size=100):
        for row in zip(*batch.columns, strict=True):
            yield json.dumps([_file_contents(value) for value in row], sort_keys=True, default=str)


def _file_contents(value: Any) -> Any:
    """Return an Arrow value with digests in place of files and bytes. No content is copied."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        return [_file_contents(item) for item in value]
    if isinstance(value, pa.StructScalar):
        if {*value} == {"bytes", "path"}:
            is_file = not value["bytes"].is_valid and value["path"].is_valid
            path = value["path"].as_py() if is_file else None
            if path is None or not os.path.isfile(path):
                return _file_contents(value["bytes"]) if path is None else public_name(path)
            return file_digest(path, 2)
        return {name: _file_contents(item) for name, item in value.items()}
    if isinstance(value, pa.BinaryScalar | pa.LargeBinaryScalar):
        return file_digest(value.as_buffer(), 2)
    return value.as_py()


def file_digest(source: str | Path | pa.Buffer, parts: int = _PARTS_PER_FILE) -> str:
    """Digest the length of a file and evenly spaced parts of it, or all of a short one: fast for many gigabytes."""
    with pa.input_stream(source, compression=None) as file:
        size = file.size()
        hasher = hashlib.sha256(f"{size} ".encode())
        for part_number in range(parts):
            file.seek(max(0, size - _PART_BYTES) * part_number // (parts - 1))
            hasher.update(file.read(_PART_BYTES))
    return hasher.hexdigest()[:16]


def digest_model_files(model: str) -> str | None:
    """Digest the files of a model in a directory before it is loaded; `None` for a model of the Hub."""
    folder = Path(model)
    paths = sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    kept = [path for path in paths if path.suffix in (".safetensors", ".json", ".txt", ".jinja", ".model")]
    names = [path.relative_to(folder).as_posix() for path in kept]
    return digest([names, *map(file_digest, kept)])[:16] if folder.is_dir() else None
