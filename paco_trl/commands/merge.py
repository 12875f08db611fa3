# SPDX-License-Identifier: Apache-2.0
"""`paco-trl merge`: an adapter, merged into the weights of its base model."""

import json
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from ..checkpointing.checkpoints import checkpoints_of
from ..checkpointing.export import save_transformer
from ..hub.cards import save_card
from ..hub.licenses import base_license
from ..hub.settings import ImageModelCard, JudgeCard, LoRA, load_settings
from ..rewards.paco_reward import has_processor, load_judge_adapter
from ..rollout.loading import load_transformer_adapter, read_peft_config
from ..utils.files import find_model_file, new_folder, peft_folder
from ..utils.names import check_adapter_base
from .main import say
from .options import option
from .parser import CommandParser
from .push import find_saved_model


_PROGRAM = "paco-trl merge"
_DTYPES = ("float32", "bfloat16", "float16")
_TRANSFORMER_WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclass
class MergeArguments:
    """Adapter to merge, and where the merged weights go."""

    adapter: str = option(
        None, "LoRA adapter: Hub id, directory, file, or output directory of a run, whose newest model is used."
    )
    output_dir: str = option(
        None, "New directory for the merged weights: a judge's whole model, or `transformer` of an image pipeline."
    )
    model_name_or_path: str | None = option(None, "Base model. If `None`, the one that `adapter_config.json` names.")
    dtype: str | None = option(None, "`float32`, `bfloat16` or `float16`. If `None`, that of the base model's files.")

    def __post_init__(self):
        for name in ("adapter", "output_dir"):
            if not getattr(self, name):
                raise ValueError(f"`--{name}` is missing.")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(f"`dtype` is {self.dtype!r}, but must be one of: {', '.join(_DTYPES)}.")


class Merged(NamedTuple):
    """Result of a merge."""

    is_judge: bool  # a whole model, not the transformer of a pipeline
    adapter: str
    base: str
    dtype: torch.dtype
    change: float  # norm of what the adapter adds to the weights
    rounding: float  # norm of the rounding of the merged weights, as a fraction of that


def merge(args: MergeArguments) -> Merged:
    """Merge an adapter into its base model and write the result, whole or not at all."""
    with new_folder(args.output_dir) as folder:
        adapter = _find_adapter(args.adapter)
        peft = peft_folder(adapter)  # refuses pickles before the base is read
        adapter = peft or adapter
        base, revision = args.model_name_or_path, None
        if base is None and peft is None:
            raise ValueError(f"The LoRA file '{adapter}' names no base model. Name it with `--model_name_or_path`.")
        config = read_peft_config(adapter, str(base))
        if not isinstance(config, LoraConfig):
            raise ValueError(
                f"The adapter '{adapter}' is a {config.peft_type}; only LoRA can be merged. Load it with PEFT."
            )
        if base is None:
            base, revision = config.base_model_name_or_path, config.revision
            if not base:
                raise ValueError(f"The adapter '{adapter}' names no base model. Name it with `--model_name_or_path`.")
        check_adapter_base(adapter, config.base_model_name_or_path, base)
        trained = load_settings(peft) if peft else None
        pipeline_class = _read_pipeline_class(base, revision)
        _check_is_unquantized(base, revision, is_judge=pipeline_class is None)
        merge_weights = _merge_judge if pipeline_class is None else _merge_transformer
        try:
            merged = merge_weights(adapter, base, revision, args.dtype, folder)
        except SafetensorError as error:  # which names no file
            raise ValueError(
                f"The weights of '{adapter}' or of '{base}' cannot be read, or the merged ones not be written to "
                f"'{args.output_dir}': {error}. Copy or download a damaged file again, or free space."
            ) from error
        _write_card(merged, config, trained, pipeline_class, Path(args.output_dir).absolute().name, folder)
    return merged


def _find_adapter(name: str) -> str:
    """Return the directory or Hub id that holds the adapter itself."""
    folder = Path(name)
    if folder.is_dir() and checkpoints_of(folder):
        newest = find_saved_model(folder)
        if newest != folder:
            say("merge", f"Merging the newest model of '{name}': '{newest}'.")
            name = str(newest)
    return name


def _read_pipeline_class(base: str, revision: str | None) -> str | None:
    """Return the class of a pipeline, or `None` for a single model."""
    try:
        index = find_model_file(base, "model_index.json", revision=revision)
    except OSError as error:
        raise OSError(
            f"The base model '{base}' cannot be read: {error}\nName it with `--model_name_or_path`."
        ) from error
    if index is None:
        return None
    name = json.loads(Path(index).read_text(encoding="utf-8"))["_class_name"]
    return name if isinstance(name, str) else name[-1]  # of code in the repository: the module and the class


def _check_is_unquantized(base: str, revision: str | None, is_judge: bool) -> None:
    folder = "" if is_judge else "transformer"
    path = find_model_file(base, "config.json", revision=revision, subfolder=folder)
    if path is not None and "quantization_config" in json.loads(Path(path).read_text(encoding="utf-8")):
        raise ValueError(
            f"The weights of the base model '{base}' are stored quantized: rounding merged weights again would lose what the "
            "adapter adds. Name the unquantized model, also in the adapter's `base_model_name_or_path`."
        )


def _merge_judge(adapter: str, base: str, revision: str | None, dtype: str | None, folder: Path) -> Merged:
    network = AutoModelForImageTextToText.from_pretrained(
        base, revision=revision, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=False
    )
    model = load_judge_adapter(network, adapter)
    network, change, rounding = _merge_layers(model, adapter)
    has_own = has_processor(adapter)
    processor = AutoProcessor.from_pretrained(
        adapter if has_own else base, revision=None if has_own else revision, trust_remote_code=False
    )
    say("merge", "Writing the merged weights.")
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Merged(True, adapter, base, network.dtype, change, rounding)


def _merge_transformer(adapter: str, base: str, revision: str | None, dtype: str | None, folder: Path) -> Merged:
    wanted = _dtype_of_files(base, revision) if dtype is None else getattr(torch, dtype)
    # Without the text encoders and the VAE, which are as large
    transformer = diffusers.AutoModel.from_pretrained(
        base, subfolder="transformer", revision=revision, dtype=wanted, use_safetensors=True, trust_remote_code=False
    )
    model = load_transformer_adapter(transformer, adapter, base)
    transformer, change, rounding = _merge_layers(model, adapter)
    say("merge", "Writing the merged weights.")
    save_transformer(transformer, transformer.state_dict(), folder)
    return Merged(False, adapter, base, wanted, change, rounding)


def _dtype_of_files(base: str, revision: str | None) -> torch.dtype:
    """Return the dtype of a pipeline's transformer in its files; diffusers would load all as float32."""
    where = {"revision": revision, "subfolder": "transformer"}
    index, name = find_model_file(base, f"{_TRANSFORMER_WEIGHTS}.index.json", **where), _TRANSFORMER_WEIGHTS
    if index is not None:
        name = next(iter(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    path = find_model_file(base, name, **where)
    if path is None:
        raise ValueError(f"The transformer of '{base}' has no {_TRANSFORMER_WEIGHTS}; other formats are pickles.")
    with safe_open(path, "pt") as file:
        return file.get_tensor(next(iter(file.keys()))).dtype


@torch.no_grad()
def _merge_layers(model: PeftModel, adapter: str) -> tuple[nn.Module, float, float]:
    """Merge each layer in float32; return the model, the norm of the change, and the rounding as a fraction of it."""
    # In bf16 the adapter and its product would be rounded too: up to 1.8 times the error, on a tiny FLUX. Layer by layer,
    # since a whole model in float32 needs twice the memory
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
                    f"`{key}` of the layer '{name}' is not finite after merging: the adapter is broken, or its weights overflow in "
                    f"{dtypes[key]}. Try `--dtype float32`."
                )
            added += float((whole - before[key]).square().sum(dtype=torch.float64))
            lost += float((weight.float() - whole).square().sum(dtype=torch.float64))
    with warnings.catch_warnings():
        # Other layers are merged here; PEFT warns of each LoRA layer that it is merged already
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        merged = model.merge_and_unload()
    return merged, added**0.5, (lost / added) ** 0.5 if added else 0.0


def _write_card(
    merged: Merged, config: LoraConfig, trained: ImageModelCard | JudgeCard | None, pipeline_class: str | None, title: str,
    folder: Path,
) -> None:  # fmt: skip
    common: dict[str, Any] = {
        "title": title,
        "repo_id": title,
        "base_model": merged.base,
        "merged_adapter": merged.adapter,
        "lora": LoRA(config.r, config.lora_alpha),
        "license": base_license(merged.base, online=True),
    }
    if pipeline_class is None:
        save_card(JudgeCard(weights="merged", **common), folder)
        return
    transformer = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
    is_editing = "Kontext" in pipeline_class or "Edit" in pipeline_class
    if isinstance(trained, ImageModelCard):  # the code generates what the adapter was trained for
        common |= {name: getattr(trained, name) for name in ("trained_on", "family", "prompt", "layout", "call")}
    else:
        common["trained_on"] = "edits" if is_editing else "sets"
    card = ImageModelCard(
        weights="transformer",
        pipeline_class=pipeline_class,
        transformer_class=transformer["_class_name"],
        dtype=str(merged.dtype).removeprefix("torch."),
        **common,
    )
    save_card(card, folder)


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
            f"Rounding to {dtype} is {merged.rounding:.2g} of what the adapter adds; 0 with `--dtype float32`."
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


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = CommandParser(
        MergeArguments,
        positional="adapter",
        prog=_PROGRAM,
        usage=f"{_PROGRAM} ADAPTER --output_dir DIRECTORY [options]",
        description="Merges a LoRA adapter into the weights of its base model, on the CPU.",
    )
    started = time.monotonic()
    (args,) = parser.parse_args_and_config(arguments)
    sys.stdout.write(_describe(merge(args), args.output_dir, time.monotonic() - started))
    return 0
