# SPDX-License-Identifier: Apache-2.0
"""`paco-trl env`: prints versions and devices, without tokens, paths or the name of the machine."""

import importlib.metadata
import platform
import sys

import torch


VERSIONS = ("trl", "transformers", "diffusers", "peft", "accelerate", "datasets", "torch", "deepspeed")
_MORE = ("bitsandbytes", "huggingface-hub", "openai", "torchao", "torchvision", "vllm")


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: list[str]) -> int:
    """Run the command."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    rows = {
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version_of(name) or "not installed" for name in ("paco_trl", *VERSIONS, *_MORE)},
        "CUDA of torch": torch.version.cuda or "none",
        "GPUs": ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus) or "none",
    }
    sys.stdout.write("".join(f"- {name}: {value}\n" for name, value in rows.items()))
    return 0
