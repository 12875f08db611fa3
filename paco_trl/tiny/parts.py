# SPDX-License-Identifier: Apache-2.0
"""Parts of tiny models: their configs, weights of a seed, and how they are saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import DiffusionPipeline

from ..utils.files import read_template


CONFIGS: dict[str, dict[str, Any]] = yaml.safe_load(read_template("tiny_models.yaml"))

# Layers through which the prompt and the source images change pixels: see `enlarge`
ATTENTION = ("attn.to_v.weight", "attn.add_v_proj.weight", "attn.to_out.0.weight", "proj_out.weight")


@contextmanager
def weights_of(seed: int) -> Iterator[None]:
    """Sample the weights of models that are built in this context from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def enlarge(module: torch.nn.Module, *endings: str) -> None:
    """Multiply weights by 4 where the usual initial ones are so small that an input changes no pixel."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(endings):
                parameter.mul_(4)


def save(pipeline: DiffusionPipeline, folder: str | Path) -> Path:
    """Save a pipeline to a directory, and return its path."""
    pipeline.save_pretrained(folder)
    return Path(folder)
