# SPDX-License-Identifier: Apache-2.0
"""`paco-trl merge`: an adapter, merged into the weights of the model below it."""

import json
import os
import shutil
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import diffusers
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import cached_file
from trl import TrlParser

from ..cards import ImageModelCard, JudgeCard, LoRA, render_card
from ..checkpointing.checkpoints import checkpoints_of
from ..checkpointing.export import save_transformer
from ..hub.licenses import base_license
from ..rewards.paco_reward import has_processor, load_judge_adapter, safetensors_of
from ..rollout.loading import load_transformer_adapter
from ..utils.names import check_adapter_base
from .main import name_first
from .push import find_saved_model


_PROGRAM = "paco-trl merge"
_CONFIG = "adapter_config.json"
_DTYPES = ("float32", "bfloat16", "float16")
# Weights of a transformer in diffusers' format: in one file, or the list of its parts
_TRANSFORMER_WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclass
class MergeArguments:
    """
    An adapter, and where the merged weights go.

    Args:
        adapter_name_or_path (`str`):
            Hub id or folder of a LoRA adapter in PEFT's format, or the output folder of a training run, of which the
            newest model is taken.
        output_dir (`str`):
            New folder for the merged weights: a whole model for the adapter of a judge, the folder `transformer` for
            that of an image pipeline.
        model_name_or_path (`str`, *optional*):
            Hub id or folder of the model below the adapter. If `None`, the one that its `adapter_config.json` names.
        dtype (`str`, *optional*):
            Dtype of the merged weights: `"float32"`, `"bfloat16"` or `"float16"`. If `None`, that of the model's files.

    Raises:
        ValueError: An argument is missing, or there is no such dtype.
    """

    adapter_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder of a LoRA adapter in PEFT's format, or the output folder of a training run."
        },
    )
    output_dir: str | None = field(
        default=None,
        metadata={
            "help": "New folder for the merged weights: a whole model for the adapter of a judge, the folder "
            "`transformer` for that of an image pipeline."
        },
    )
    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder of the model below the adapter. If `None`, the one that its adapter_config.json "
            "names."
        },
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of the merged weights: `float32`, `bfloat16` or `float16`. If `None`, that of the model's "
            "files."
        },
    )

    def __post_init__(self):
        for name in ("adapter_name_or_path", "output_dir"):
            if not getattr(self, name):
                raise ValueError(f"`--{name}` is missing.")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(f"`dtype` is {self.dtype!r}, but must be one of: {', '.join(_DTYPES)}.")


class Merged(NamedTuple):
    """
    What came of a merge.

    Attributes:
        is_judge (`bool`):
            Whether it is a whole model, and not the transformer of a pipeline.
        adapter (`str`), base (`str`):
            What was merged into what.
        dtype (`torch.dtype`):
            Of the merged weights.
        change (`float`):
            Norm of what the adapter adds to the weights.
        rounding (`float`):
            Norm of what the dtype's rounding takes from that or adds to it, as a part of it.
    """

    is_judge: bool
    adapter: str
    base: str
    dtype: torch.dtype
    change: float
    rounding: float


def merge(args: MergeArguments) -> Merged:
    """
    Merges an adapter into its model, and writes the model. What can be found out without reading the model's weights
    is found out before. The folder appears when everything is in it.

    Args:
        args ([`MergeArguments`]):
            Arguments.

    Returns:
        [`Merged`].

    Raises:
        ValueError: there is no adapter, or none in safetensors, or its files are damaged; it was made for another
            model or does not fit it; the output folder is not empty; the merged weights are not finite.
        OSError: a model cannot be found or read, or the folder cannot be written. Nothing of it is left then.
    """
    output_dir = Path(args.output_dir)
    _check_is_free(output_dir)
    adapter = _find_adapter(args.adapter_name_or_path)
    config = _read_config(adapter)
    base, revision = args.model_name_or_path, None
    if base is None:
        base, revision = config.base_model_name_or_path, config.revision
        if not base:
            raise ValueError(
                f"The adapter '{adapter}' does not name the model below it: `base_model_name_or_path` in its {_CONFIG} "
                "is empty. Name it with `--model_name_or_path`."
            )
    check_adapter_base(adapter, config.base_model_name_or_path, base)
    pipeline_class = _read_pipeline_class(base, revision)

    with _staged(output_dir) as folder:
        try:
            if pipeline_class is None:
                merged = _merge_judge(adapter, base, revision, args.dtype, folder)
            else:
                merged = _merge_transformer(adapter, base, revision, args.dtype, folder)
        except SafetensorError as error:  # the adapter's file has been looked at
            raise ValueError(
                f"The weights of '{base}', the model below the adapter, cannot be read: {error}. One of its safetensors "
                "files is damaged, or not whole: copy or download it again."
            ) from error
        _write_card(merged, config, pipeline_class, output_dir.absolute().name, folder)
    return merged


def _check_is_free(output_dir: Path) -> None:
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ValueError(
            f"`--output_dir` '{output_dir}' exists and is not empty. Nothing is overwritten: name a new folder."
        )


def _find_adapter(name: str) -> str:
    """The folder or Hub id that holds the adapter itself."""
    folder = Path(name)
    if folder.is_dir() and checkpoints_of(folder):
        newest = find_saved_model(folder)
        if newest != folder:
            _say(f"The newest model of '{name}' is merged: '{newest}'.")
            name = str(newest)
    if cached_file(name, _CONFIG, _raise_exceptions_for_missing_entries=False) is None:
        raise ValueError(
            f"There is no adapter in '{name}': it has no {_CONFIG}. Pass the Hub id or folder of a LoRA adapter in "
            "PEFT's format, a checkpoint with one, or a run's output folder. A checkpoint with all weights is merged "
            "already."
        )
    weights = safetensors_of(name)
    try:
        with safe_open(weights, "pt"):  # compares the list of the weights with the length of the file
            pass
    except SafetensorError as error:
        raise ValueError(
            f"The weights of the adapter, '{weights}', cannot be read: {error}. The file is damaged, or not whole: copy "
            "or download it again."
        ) from error
    return name


def _read_config(adapter: str) -> LoraConfig:
    path = cached_file(adapter, _CONFIG)
    try:
        config = PeftConfig.from_pretrained(adapter)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # no JSON, or not what PEFT writes
        raise ValueError(
            f"The adapter's settings, '{path}', cannot be read: {type(error).__name__}: {error}. The file is damaged, or "
            "of another version of PEFT: copy or download it again, or save the adapter with `save_pretrained`."
        ) from error
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"The adapter '{adapter}' is of the type {config.peft_type}, but only LoRA adapters can be merged here. Load "
            "it with PEFT as it is."
        )
    if not config.target_modules:
        raise ValueError(
            f"The adapter's settings, '{path}', do not say which layers it changes: `target_modules` is missing or "
            "empty. Copy or download the file again, or write the names of the layers into it."
        )
    return config


def _read_pipeline_class(base: str, revision: str | None) -> str | None:
    """Class of a pipeline with a transformer; `None` for a model by itself."""

    def find(name: str) -> str | None:
        try:
            return cached_file(base, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            raise OSError(
                f"'{base}', the model below the adapter, cannot be found or read: {error}\nIf it is elsewhere on this "
                "machine, or has another name, give its Hub id or folder with `--model_name_or_path`."
            ) from error

    index = find("model_index.json")
    if index is None:
        if find("config.json") is None:
            raise ValueError(
                f"'{base}', the model below the adapter, is neither an image pipeline (it has no model_index.json) nor "
                "a vision-language model (no config.json). Name its Hub id or folder with `--model_name_or_path`."
            )
        return None
    components = json.loads(Path(index).read_text(encoding="utf-8"))
    if "transformer" not in components:
        raise ValueError(f"The pipeline '{base}' has no transformer, to which adapters of this package belong.")
    name = components["_class_name"]
    return name if isinstance(name, str) else name[-1]  # of code in the repository: the module and the class


@contextmanager
def _staged(output_dir: Path) -> Iterator[Path]:
    """A folder beside the one that is asked for, renamed to it in the end, or deleted."""
    folder = output_dir.absolute()
    staged = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    staged.mkdir(parents=True)
    try:
        yield staged
        os.replace(staged, folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    _say("Writing the merged weights.")
    try:
        yield
    # What a full disk is to Python and to safetensors
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"The merged weights could not be written beside '{folder.parent}': {error}. Nothing of them is left. Make "
            "room there, or name another `--output_dir`."
        ) from error


def _merge_judge(adapter: str, base: str, revision: str | None, dtype: str | None, folder: Path) -> Merged:
    network = AutoModelForImageTextToText.from_pretrained(
        base, revision=revision, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=False
    )
    model = load_judge_adapter(network, adapter)
    change, rounding = _merge_layers(model, adapter)
    network = _unload(model)
    has_own = has_processor(adapter)
    processor = AutoProcessor.from_pretrained(
        adapter if has_own else base, revision=None if has_own else revision, trust_remote_code=False
    )
    with _writing(folder):
        network.save_pretrained(folder)
        processor.save_pretrained(folder)
    return Merged(True, adapter, base, network.dtype, change, rounding)


def _merge_transformer(adapter: str, base: str, revision: str | None, dtype: str | None, folder: Path) -> Merged:
    wanted = _dtype_of_files(base, revision) if dtype is None else getattr(torch, dtype)
    # Text encoders and VAE are no part of it, and as large
    transformer = diffusers.AutoModel.from_pretrained(
        base, subfolder="transformer", revision=revision, dtype=wanted, use_safetensors=True, trust_remote_code=False
    )
    model = load_transformer_adapter(transformer, adapter, base)
    change, rounding = _merge_layers(model, adapter)
    transformer = _unload(model)
    with _writing(folder):
        save_transformer(transformer, transformer.state_dict(), folder)
    return Merged(False, adapter, base, wanted, change, rounding)


def _dtype_of_files(base: str, revision: str | None) -> torch.dtype:
    """Dtype of a pipeline's transformer in its files: diffusers would make float32 of all."""

    def find(name: str) -> str | None:
        return cached_file(
            base, name, subfolder="transformer", revision=revision, _raise_exceptions_for_missing_entries=False
        )

    index = find(f"{_TRANSFORMER_WEIGHTS}.index.json")
    name = _TRANSFORMER_WEIGHTS
    if index is not None:
        name = next(iter(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    path = find(name)
    if path is None:
        raise ValueError(
            f"The transformer of '{base}' has no {_TRANSFORMER_WEIGHTS}. Other formats are pickles, which can run code; "
            "convert it, or take a repository with safetensors files."
        )
    with safe_open(path, "pt") as file:
        return file.get_tensor(next(iter(file.keys()))).dtype


@torch.no_grad()
def _merge_layers(model: PeftModel, adapter: str) -> tuple[float, float]:
    """
    Merges each layer in float32, and casts the sum to the dtype of the model.

    In bf16 the product of the adapter's matrices and the adapter itself would be rounded too, before the sum is: up to
    1.8 times the error, on a tiny FLUX. The rounding of the sum remains, as long as the files are bf16; of a small
    update it takes a large part, so that it is measured. Layer by layer, since a whole model in float32 needs twice the
    memory.

    Returns the norm of what the adapter adds, and that of the rounding as a part of it.
    """
    added, lost = 0.0, 0.0
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    for name, layer in tqdm(layers, desc="Merging", unit="layer"):
        module = layer.get_base_layer()
        dtypes = {key: weight.dtype for key, weight in module.named_parameters(recurse=False)}
        before = {key: weight.to(torch.float32, copy=True) for key, weight in module.named_parameters(recurse=False)}
        module.float()
        layer.merge()
        for key, weight in module.named_parameters(recurse=False):
            whole = weight.data
            weight.data = whole.to(dtypes[key])
            if not torch.isfinite(weight).all():
                raise ValueError(
                    f"`{key}` of the layer '{name}' is not finite after merging: the adapter '{adapter}' is broken, or "
                    f"its weights overflow in {dtypes[key]}. With `--dtype float32` an overflow would not happen."
                )
            added += float((whole - before[key]).square().sum(dtype=torch.float64))
            lost += float((weight.float() - whole).square().sum(dtype=torch.float64))
    return added**0.5, (lost / added) ** 0.5 if added else 0.0


def _unload(model: PeftModel) -> nn.Module:
    with warnings.catch_warnings():
        # What is not a LoRA layer is merged here. Of each of the others PEFT says that it is merged already.
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        return model.merge_and_unload()


def _write_card(merged: Merged, config: LoraConfig, pipeline_class: str | None, title: str, folder: Path) -> None:
    common = {
        "title": title,
        "repo_id": title,
        "base_model": merged.base,
        "merged_adapter": merged.adapter,
        "lora": LoRA(config.r, config.lora_alpha),
        "license": base_license(merged.base, online=True),
    }
    if merged.is_judge:
        card = JudgeCard(weights="merged", **common)
    else:
        transformer = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
        card = ImageModelCard(
            weights="transformer",
            pipeline_class=pipeline_class,
            transformer_class=transformer["_class_name"],
            dtype=str(merged.dtype).removeprefix("torch."),
            is_editing="Kontext" in pipeline_class or "Edit" in pipeline_class,
            **common,
        )
    render_card(card).save(folder / "README.md")


def _describe(merged: Merged, output_dir: str, seconds: float) -> str:
    size = sum(path.stat().st_size for path in Path(output_dir).rglob("*") if path.is_file())
    dtype = str(merged.dtype).removeprefix("torch.")
    lines = [
        f"'{merged.adapter}' is merged into '{merged.base}': {size / 1e9:.3g} GB in {dtype}, after {seconds:.0f} s."
    ]
    if not merged.change:
        lines.append("The adapter changes nothing: it was not trained, or its weights are zero.")
    elif merged.dtype != torch.float32:
        lines.append(
            f"Rounding to {dtype} is {merged.rounding:.2g} of what the adapter adds. It is 0 with `--dtype float32`, in "
            "twice the space."
        )
    lines.append("")
    if merged.is_judge:
        lines += ["    from paco_trl import PaCoReward", f'    judge = PaCoReward.from_pretrained("{output_dir}")']
    else:
        lines += [
            "    from diffusers import AutoModel, DiffusionPipeline",
            f'    transformer = AutoModel.from_pretrained("{output_dir}", subfolder="transformer", '
            f"dtype=torch.{dtype})",
            f'    pipe = DiffusionPipeline.from_pretrained("{merged.base}", transformer=transformer, '
            f"dtype=torch.{dtype})",
        ]
    return "\n".join([*lines, ""])


def _say(message: str) -> None:
    sys.stderr.write(f"{_PROGRAM}: {message}\n")
    sys.stderr.flush()


def _parser() -> TrlParser:
    return TrlParser(
        MergeArguments,
        prog=_PROGRAM,
        usage=f"{_PROGRAM} --adapter_name_or_path ADAPTER --output_dir FOLDER [options]",
        description="Merges a LoRA adapter into the weights of the model below it, on the CPU.",
    )


def main(arguments: list[str]) -> int:
    """
    Runs the command.

    Args:
        arguments (`list[str]`):
            The adapter, and options.

    Returns:
        `int`: 0 when the merged weights are there, else 1.
    """
    if {"--help", "-h"} & set(arguments):
        _parser().print_help()
        return 0
    started = time.monotonic()
    try:
        (args,) = _parser().parse_args_and_config(name_first(arguments, "--adapter_name_or_path"))
        merged = merge(args)
    except (ValueError, OSError) as error:
        _say(str(error))
        return 1
    sys.stdout.write(_describe(merged, args.output_dir, time.monotonic() - started))
    return 0
