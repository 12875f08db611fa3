# SPDX-License-Identifier: Apache-2.0
"""
Build a model with the real configs and random weights: what `full_size.py` rehearses a recipe on.

    python benchmarks/full_size/build_model.py black-forest-labs/FLUX.1-dev models/flux

The folder has the published layout: configs, tokenizers, and safetensors in shards, which are written one tensor after the
other, so that 34 GB of weights take 3 GB of memory. A build that was interrupted continues with the shard it was at.

Weights are normal, divided by the square root of their fan-in; norms are one, and biases zero.
"""

import argparse
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from safetensors.torch import save_file
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from paco_trl.planning.known_models import write_known_model
from paco_trl.rollout.loading import load_without_weights
from paco_trl.tiny.qwen2_5_vl import vision_token_ids


SHARD = 2**31  # bytes
# Published tokenizers by class: with `--tokenizers`, a folder that has them under these names
TOKENIZERS = {
    "CLIPTokenizer": "clip-vit-large-patch14",
    "T5Tokenizer": "t5-v1_1-xxl",
    "Qwen2Tokenizer": "qwen2.5-vl",  # Qwen3 has its vocabulary
    "Qwen2VLProcessor": "qwen2.5-vl",
}


def random_weight(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Draw a weight by its name, so that it is the same whenever it is written."""
    if name.endswith("num_batches_tracked"):
        return torch.zeros(shape, dtype=torch.long)
    if len(shape) < 2:  # of a norm, or a bias
        is_one = name.endswith(("weight", "scale", "running_var", "gamma"))
        return torch.full(shape, float(is_one), dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    fan_in = shape.numel() // shape[0]
    return torch.empty(shape, dtype=dtype).normal_(0, fan_in**-0.5, generator=generator)


def shards_of(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Divide the weights of a module on the meta device into shards; one that two layers share is there once."""
    shard: dict[str, torch.Tensor] = {}
    seen, size = set(), 0
    for name, weight in module.state_dict(keep_vars=True).items():
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        if shard and size + weight.nbytes > SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = weight
        size += weight.nbytes
    yield shard


def write_weights(module: nn.Module, folder: Path, progress: tqdm) -> int:
    """Write random weights of a module on the meta device, and return their bytes."""
    stem = "diffusion_pytorch_model" if isinstance(module, ModelMixin) else "model"
    shards, files, total = list(shards_of(module)), {}, 0
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else f"{stem}.safetensors"
        files |= dict.fromkeys(shard, name)
        size = sum(weight.nbytes for weight in shard.values())
        if not (folder / name).exists():
            weights = {key: random_weight(key, weight.shape, weight.dtype) for key, weight in shard.items()}
            save_file(weights, folder / "shard.tmp", metadata={"format": "pt"})
            (folder / "shard.tmp").replace(folder / name)
        progress.update(size)
        total += size
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return total


def copy_tokenizer(source: Path, target: Path) -> None:
    """Put a published tokenizer in the place of a tiny one, and leave what else is there: a chat template, a processor."""
    for file in target.glob("tokenizer*"):
        file.unlink()
    for file in filter(Path.is_file, source.iterdir()):
        shutil.copyfile(file, target / file.name)  # not its permissions: the source may be read-only


def write_parts(model: str, folder: Path, tokenizers: Path | None, configs: dict[str, dict[str, Any]]) -> None:
    """Write what a model has without weights: configs, of which some entries may be others, and tokenizers."""
    write_known_model(model, folder)
    parts = read_parts(folder)
    for part, (_, class_name) in parts.items():
        if tokenizers is not None and class_name in TOKENIZERS:
            copy_tokenizer(tokenizers / TOKENIZERS[class_name], folder / part)
    for part in parts:  # some configs have ids of the tokenizer
        path = folder / part / "config.json"
        if path.exists():
            config = json.loads(path.read_text(encoding="utf-8"))
            if "vision_config" in config:
                config |= vision_token_ids(AutoTokenizer.from_pretrained(folder / "tokenizer"))
            path.write_text(json.dumps(config | configs.get(part, {})), encoding="utf-8")


def read_parts(folder: Path) -> dict[str, list[str]]:
    """Read the parts of a pipeline: name -> library and class."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    return {name: entry for name, entry in index.items() if isinstance(entry, list)}


def build_model(
    model: str, folder: Path, tokenizers: Path | None = None, configs: dict[str, dict[str, Any]] | None = None
) -> Path:
    """
    Build a model whose configs are packaged, with other entries of its configs if they are given, and return its folder.

    What is missing of an earlier build of the folder is built.
    """
    if not (folder / "model_index.json").exists():
        scratch = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        write_parts(model, scratch, tokenizers, configs or {})
        scratch.rename(folder)
    pipeline = load_without_weights(str(folder), {"default": torch.bfloat16})
    modules = {part: module for part, module in pipeline.components.items() if isinstance(module, nn.Module)}
    total = sum(
        weight.nbytes for module in modules.values() for shard in shards_of(module) for weight in shard.values()
    )
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if free < total:
        raise OSError(f"{model} takes {total / 1e9:.1f} GB of disk, and {folder} has {free / 1e9:.1f} GB left.")
    with tqdm(total=total, desc=f"Writing {model}", unit="B", unit_scale=True) as progress:
        sizes = {part: write_weights(module, folder / part, progress) for part, module in modules.items()}
    described = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in sizes.items())
    print(f"{model} in {folder}: {sum(sizes.values()) / 1e9:.1f} GB ({described}).")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id of a model of paco_trl/templates/known_models.yaml.")
    parser.add_argument("folder", type=Path, help="Directory of the model.")
    parser.add_argument("--tokenizers", type=Path, help="Directory of published tokenizers.")
    args = parser.parse_args()
    build_model(args.model, args.folder, args.tokenizers)
