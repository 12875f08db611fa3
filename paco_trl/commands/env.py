# SPDX-License-Identifier: Apache-2.0
"""`paco-trl env`: prints versions and devices, without tokens, paths or host names."""

import importlib.metadata
import platform
import sys

from packaging.version import Version


VERSIONS = ("trl", "transformers", "diffusers", "peft", "accelerate", "datasets", "torch", "deepspeed")
_OPTIONAL_PACKAGES = ("bitsandbytes", "huggingface-hub", "openai", "torchao", "torchvision", "vllm")
# The trainers override private methods of these, see tests/test_contract.py
TESTED_WITH = {"trl": "1.16", "transformers": "5.24"}


def get_version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def newer_than_tested() -> list[str]:
    """Describe libraries that are newer than the tested versions."""
    installed_versions = {name: get_version(name) or tested_version for name, tested_version in TESTED_WITH.items()}
    return [
        f"paco_trl was tested with {name} {tested_version}, but {installed_versions[name]} is installed. Its trainers "
        "override private "
        f'methods of {name}. If a run fails in them, `pip install "{name}=={tested_version}.*"`.'
        for name, tested_version in TESTED_WITH.items()
        if Version(installed_versions[name]).release[:2] > Version(tested_version).release
    ]


def main(arguments: list[str]) -> int:
    """Run the command."""
    if arguments:
        sys.stdout.write("usage: paco-trl env\n\nIt takes no options, and prints what a bug report needs.\n")
        return 0 if arguments[0] in ("-h", "--help") else 2
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    rows = {
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: get_version(name) or "not installed" for name in ("paco_trl", *VERSIONS, *_OPTIONAL_PACKAGES)},
        "CUDA of torch": torch.version.cuda or "none",
        "GPUs": ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus) or "none",
    }
    sys.stdout.write("".join(f"- {name}: {value}\n" for name, value in rows.items()))
    sys.stdout.write("".join(f"{text}\n" for text in newer_than_tested()))
    return 0
