# SPDX-License-Identifier: Apache-2.0
"""Arguments of `paco-trl doctor`, and of the command that it checks."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..utils.errors import OptionError
from . import reward
from .grpo import ImageCommandParser
from .options import option
from .parser import CommandParser
from .script_arguments import ScriptArguments
from .stages import import_function


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)  # a lower-case b would be bits


@dataclass
class PlanArguments:
    """Options of the memory plan."""

    device_memory: str | None = option(
        None,
        "Memory of the GPU to plan for, such as 24GiB, without loading weights. Defaults to this machine's GPU.",
    )

    def errors(self) -> Iterator[OptionError]:
        """Find values that are not sizes."""
        if self.device_memory is not None and not _SIZE.fullmatch(self.device_memory.strip()):
            message = f"`--device_memory` is {self.device_memory!r}, but must be a size, such as 24GiB."
            yield OptionError(message, "device_memory")

    def device_bytes(self, args: Any) -> int | None:
        """Return the memory of the device in bytes, `None` without one."""
        if self.device_memory is not None and (size := _SIZE.fullmatch(self.device_memory.strip())):
            is_binary = size[3] or not self.device_memory.upper().endswith("B")
            power = "KMGT".index(size[2].upper() or "G") + 1
            return int(float(size[1]) * (1024 if is_binary else 1000) ** power)
        import torch

        has_gpu = torch.cuda.is_available() and not args.use_cpu
        return torch.cuda.get_device_properties(args.device).total_memory if has_gpu else None


def parser_for(command: str) -> CommandParser:
    """Build a parser for the options of a training command and of the doctor."""
    text = f"Checks a model, a dataset and settings without training. Takes the options of `paco-trl {command}`."
    program = f"paco-trl doctor {command}"
    if command == "reward":
        return reward.build_parser(PlanArguments, prog=program, description=text)
    config = "PaCoNFTConfig" if command == "nft" else "PaCoGRPOConfig"
    return ImageCommandParser(ScriptArguments, config, PlanArguments, prog=program, description=text)


def main(arguments: list[str]) -> int:
    """Run the command; return 0 if no check failed, else 1."""
    command, *argv = arguments or ["--help"]
    if command in ("-h", "--help"):
        sys.stdout.write(
            "usage: paco-trl doctor {grpo,nft,reward} [the options of that command] [--device_memory 24GiB]\n\n"
            "Check a run before it starts: data, rewards, model, memory, and the first steps. With `--device_memory` "
            "nothing is\nloaded, and the memory is planned for a device of that size:\n\n"
            "    paco-trl doctor grpo --config flux.2-klein-4b-24gb --dataset_name demo --device_memory 24GiB\n\n"
            "`paco-trl doctor grpo --help` lists the options.\n"
        )
        return 0
    if command not in ("grpo", "nft", "reward"):
        raise OptionError(
            f"it got {command!r}, but the first argument must be the command to check: grpo, nft or reward."
        )
    parser_for(command).read(argv)  # fails early, before a model is read
    return import_function("doctor:diagnose")(command, argv)
