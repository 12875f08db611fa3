# SPDX-License-Identifier: Apache-2.0
"""Run the full method on a laptop, offline."""

import os
import shlex
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paco_trl.commands.options import option


if TYPE_CHECKING:
    from trl import TrlParser


MEMORY_NEEDED = 2.0  # GiB; the measured peak is 1.7, see docs/miniature.md


@dataclass
class DemoArguments:
    """Arguments of the demo, which requires two cores and 2 GiB of free memory, but no network and no GPU."""

    output_dir: str = option("demo-output", "Directory for all results. An interrupted demo resumes.")
    world: str = option(
        "sets",
        "World: `sets` of four panels, by a toy FLUX and a judge that is trained, or `edits` of single scenes, by a toy "
        "FLUX Kontext and a finished judge.",
        choices=["sets", "edits"],
    )
    seed: int = option(0, "Seed of everything. The same seed gives the same results on the same machine.")
    step: str | None = option(
        None,
        "Single step to run again, with the settings of the directory: `dataset`, `judge` (not of edits), "
        "`generator`, `evaluation` or `report`. The results of later steps are deleted.",
    )
    restart: bool = option(False, "Whether to delete the results of an earlier demo in the directory and start over.")
    short: bool = option(
        False,
        "Whether to run all steps on so little data that it takes a minute. This shows that everything works; the "
        "results mean nothing.",
    )


def _parser() -> "TrlParser":
    from trl import TrlParser

    return TrlParser((DemoArguments,))


def main(arguments: list[str]) -> int:
    """Run the command."""
    # Before huggingface_hub is imported, which reads it
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # An installed DeepSpeed would search for an accelerator, and log it
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
        command = f"{COMMAND} --output_dir {shlex.quote(args.output_dir)}"
        if args.step is None:
            command += f" --world {args.world}" * (args.world != "sets")
            command += f" --seed {args.seed}" * (args.seed != 0) + " --short" * args.short
        else:
            command += f" --step {args.step}"
        sys.stderr.write(f"\nInterrupted. `{command}` resumes from what is in {args.output_dir}.\n")
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"\ndemo.py: {error}\n")
        return 1
    return 0


def _run(args: DemoArguments) -> None:
    import datasets
    import torch

    from miniature.run import SETTINGS_FILE, Miniature, clear, read_settings
    from miniature.settings import EDITS, MiniatureSettings, shortened

    if args.step is not None and args.restart:
        raise ValueError(f"`--restart` deletes what `--step {args.step}` requires. Give one of the two.")
    folder = Path(args.output_dir).expanduser().absolute()
    is_demo = (folder / SETTINGS_FILE).is_file()
    # Never write into a directory with other files
    if not is_demo and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"'{folder}' is not from a demo and is left unchanged. Give another `--output_dir`.")
    if args.restart and is_demo:
        clear(folder)
    warnings.simplefilter("ignore", FutureWarning)
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # faster for such small models, and reproducible on any number of cores
    settings = replace(EDITS if args.world == "edits" else MiniatureSettings(), seed=args.seed)
    if args.short:
        settings = shortened(settings)
    if args.step is not None and is_demo and not args.seed and not args.short:
        settings = read_settings(folder)
    world: type[Miniature] = Miniature
    if settings.world == "edits":
        from miniature.edits import EditMiniature

        world = EditMiniature
    miniature = world(folder, settings, say=lambda line: _say(f"\n{line}"))
    results = miniature.run(alone=args.step)
    if "report" in results:
        if settings == shortened(settings):
            _say("\nThis was a short run: everything works, and the results mean nothing.")
        _say("\n" + "\n".join(miniature.summary()))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _check_memory() -> None:
    import psutil

    available = psutil.virtual_memory().available / 2**30
    if available < MEMORY_NEEDED:
        raise ValueError(
            f"The demo requires about {MEMORY_NEEDED:g} GiB of free memory, but only {available:.1f} GiB are free. Close "
            "other programs, or use a larger machine."
        )


if __name__ == "__main__":
    # This directory is a package: import it from its parent
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # during the imports, which take seconds
        sys.exit(130)
