# SPDX-License-Identifier: Apache-2.0
"""
The whole method on a laptop, offline.

    python examples/miniature/demo.py
"""

import os
import shlex
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from trl import TrlParser


MEMORY_NEEDED = 2.0  # GiB free; 1.7 at most were measured, see docs/miniature.md


@dataclass
class DemoArguments:
    """
    What the demo does. It needs no network, no GPU, two cores, and 2 GiB of free memory.

    Args:
        output_dir (`str`, *optional*, defaults to `"demo-output"`):
            Folder for everything that it makes. A demo that was stopped goes on where it was.
        seed (`int`, *optional*, defaults to `0`):
            Seed of everything. The same seed gives the same figures on the same machine.
        step (`str`, *optional*):
            Runs one step alone, anew, with the settings of the folder: `dataset`, `judge`, `generator`, `evaluation` or
            `report`. What the steps after it made is taken away.
        restart (`bool`, *optional*, defaults to `False`):
            Whether to take away what an earlier demo left in the folder, and start clean.
        short (`bool`, *optional*, defaults to `False`):
            Whether to go through all steps with so little data that it takes a minute or two. What comes out shows that
            everything works here; its figures mean nothing.
    """

    output_dir: str = field(
        default="demo-output",
        metadata={"help": "Folder for everything that it makes. A demo that was stopped goes on where it was."},
    )
    seed: int = field(
        default=0,
        metadata={"help": "Seed of everything. The same seed gives the same figures on the same machine."},
    )
    step: str | None = field(
        default=None,
        metadata={
            "help": "Runs one step alone, anew, with the settings of the folder: `dataset`, `judge`, `generator`, "
            "`evaluation` or `report`. What the steps after it made is taken away."
        },
    )
    restart: bool = field(
        default=False,
        metadata={"help": "Whether to take away what an earlier demo left in the folder, and start clean."},
    )
    short: bool = field(
        default=False,
        metadata={
            "help": "Whether to go through all steps with so little data that it takes a minute or two. What comes out "
            "shows that everything works here; its figures mean nothing."
        },
    )


def _parser() -> "TrlParser":
    from trl import TrlParser

    return TrlParser((DemoArguments,))


def main(arguments: list[str]) -> int:
    """Runs the command."""
    # Before anything of the Hub is imported: nothing is looked for there
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # DeepSpeed, where it is installed, would look for another one, and say so
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if {"--help", "-h"} & set(arguments):
        _parser().print_help()
        return 0
    from miniature.settings import COMMAND

    try:
        (args,) = _parser().parse_args_and_config(arguments)
    except ValueError as error:
        sys.stderr.write(f"demo.py: {error}\n")
        return 1
    try:
        _check_memory()
        _run(args)
    except KeyboardInterrupt:
        goes_on = f"{COMMAND} --output_dir {shlex.quote(args.output_dir)}"
        if args.step is None:
            goes_on += f" --seed {args.seed}" * (args.seed != 0) + " --short" * args.short
        else:
            goes_on += f" --step {args.step}"
        sys.stderr.write(f"\nStopped. What is done is in {args.output_dir}; `{goes_on}` goes on from there.\n")
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"\ndemo.py: {error}\n")
        return 1
    return 0


def _run(args: DemoArguments) -> None:
    import datasets
    import torch

    from miniature.run import SETTINGS_FILE, STEPS, Miniature, clear, read_settings
    from miniature.settings import SHORT, MiniatureSettings

    if args.step is not None and args.step not in STEPS:
        raise ValueError(f"There is no step {args.step!r}. The steps are {', '.join(STEPS)}.")
    if args.step is not None and args.restart:
        raise ValueError(f"`--restart` takes away what `--step {args.step}` needs. Give one of the two.")
    folder = Path(args.output_dir).expanduser().absolute()
    is_demo = (folder / SETTINGS_FILE).is_file()
    # Only a folder of its own is written to, so that nobody's files are lost
    if not is_demo and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"'{folder}' is not from a demo: it is left as it is. Give another `--output_dir`.")
    if args.restart and is_demo:
        clear(folder)
    # What says nothing to somebody who looks at a demo
    warnings.simplefilter("ignore", FutureWarning)
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # such small models are faster so, and the sums are the same with any number of cores
    settings = replace(SHORT if args.short else MiniatureSettings(), seed=args.seed)
    if args.step is not None and is_demo and not args.seed and not args.short:
        settings = read_settings(folder)
    try:
        miniature = Miniature(folder, settings, say=lambda line: _say(f"\n{line}"))
    except OSError as error:
        raise ValueError(
            f"Nothing can be written to '{folder}': {error.strerror}. Give another `--output_dir`."
        ) from None
    results = miniature.run(alone=args.step)
    if "report" in results:
        if settings == replace(SHORT, seed=settings.seed):
            _say("\nThis was a short run: everything works, and its figures mean nothing.")
        _say("\n" + "\n".join(miniature.summary()))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _check_memory() -> None:
    import psutil

    available = psutil.virtual_memory().available / 2**30
    if available < MEMORY_NEEDED:
        raise ValueError(
            f"The demo needs about {MEMORY_NEEDED:g} GiB of free memory, and {available:.1f} GiB are free. Close "
            "something, or take a larger machine."
        )


if __name__ == "__main__":
    # This folder is a package, which is found from the folder above
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # during the imports, which take seconds
        sys.exit(130)
