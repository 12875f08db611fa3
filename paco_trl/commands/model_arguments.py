# SPDX-License-Identifier: Apache-2.0
"""Arguments of the commands for trained models. Their implementations are imported after parsing."""

import os
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id

from ..utils.errors import OptionError, collect_errors
from ..utils.files import check_new_folder
from ..utils.names import repository
from ..utils.option_checks import DTYPES
from .messages import print_message
from .options import option
from .parser import CommandParser
from .script_arguments import check_names
from .stages import import_function


# Two images of at most 2,097,152 pixels (`max_pixels` of PaCo-Reward) become at most 2,674 tokens of 28 x 28 pixels
# each, which leaves 2,844 of 8,192 tokens for the query and the answer.
_MAX_MODEL_LEN = 8192


def _new_folder_errors(folder: str | None) -> Iterator[OptionError]:
    if folder is not None:
        yield from collect_errors(check_new_folder, Path(folder).absolute(), options=("output_dir",))


@dataclass
class PushArguments:
    """Model to upload, and its repository. Uses the token of `hf auth login`, or the variable `HF_TOKEN`."""

    folder: str = option(MISSING, "Output directory of a run (its newest model), or one checkpoint or merged model.")
    hub_model_id: str | None = option(None, "Repository. Defaults to the run's.")
    private: bool | None = option(None, "Whether a new repository is private. Defaults to the account's setting.")
    hub_revision: str | None = option(None, "Branch. Defaults to the run's, or the main branch.")

    def errors(self) -> Iterator[OptionError]:
        """Find a path that is not a directory."""
        if self.folder is not None and not os.path.isdir(self.folder):
            message = f"'{self.folder}' is not a directory. Pass the output directory of a run, or a checkpoint."
            yield OptionError(message, "folder")
        if self.hub_model_id is not None:
            yield from collect_errors(validate_repo_id, self.hub_model_id, options=("hub_model_id",))


@dataclass
class MergeArguments:
    """Adapter to merge, and directory of the merged weights."""

    adapter: str = option(
        MISSING, "LoRA adapter: Hub id, directory, file, or output directory of a run, whose newest model is used."
    )
    output_dir: str = option(
        MISSING, "New directory for the merged weights: a judge's full model, or `transformer` of an image pipeline."
    )
    model_name_or_path: str | None = option(None, "Base model. Defaults to the one in `adapter_config.json`.")
    dtype: str | None = option(
        None,
        "`bfloat16`, `float16` or `float32`. Defaults to the dtype of the base model's files.",
        choices=DTYPES,
    )

    def errors(self) -> Iterator[OptionError]:
        """Find an output directory that has something."""
        yield from _new_folder_errors(self.output_dir)


@dataclass
class SpaceArguments:
    """Adapter to compare with its base model, with the settings in its `paco_trl.json`. `app.py` lists all of them."""

    adapter: str = option(
        MISSING, "LoRA adapter: Hub id, directory, or output directory of a run, whose newest model is used."
    )
    output_dir: str | None = option(None, "New directory for the Space. Defaults to the adapter's name with `-space`.")
    model_name_or_path: str | None = option(None, "Base model. Defaults to the one in `adapter_config.json`.")
    judge_model: str | None = option(
        None,
        "Judge that scores the sets: Hub id or directory. Defaults to the judge of the training, if it is on the Hub.",
    )
    launch: bool = option(False, "Whether to run the app on this machine, at 127.0.0.1.")

    def errors(self) -> Iterator[OptionError]:
        """Find an output directory that has something."""
        yield from _new_folder_errors(self.output_dir)


@dataclass
class ServeArguments:
    """Judge to serve with vLLM, and its options."""

    model_name_or_path: str = option(
        "X-GenGroup/PaCo-Reward-7B", "Hub id or directory of a judge: a full model, or a LoRA adapter."
    )
    served_model_name: str = option("paco-reward", "Name of the judge on the server. An adapter's base gets `-base`.")
    host: str = option("127.0.0.1", "Address to listen on. The default can only be reached from this machine.")
    port: int = option(8000, "Port to listen on.")
    dtype: str = option(
        "auto",
        "`auto` (float32 files become float16), `bfloat16`, `float16` or `float32`.",
        choices=("auto", *DTYPES),
    )
    max_model_len: int = option(_MAX_MODEL_LEN, "Tokens of a query with its two images, and its answer.")
    gpu_memory_utilization: float | None = option(None, "Fraction of the GPU's memory. If `None`, vLLM's default.")
    vllm: str = option(
        "vllm", "Command that starts vLLM, or its path (`~/vllm/bin/vllm`), usually in its own environment."
    )
    vllm_args: list[str] = option([], "Further arguments for `vllm serve`. On the command line they follow `--`.")

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of values that vLLM would refuse minutes later."""
        if not 0 < self.port < 2**16:
            yield OptionError(f"`--port` is {self.port}; it must be between 1 and {2**16 - 1}.", "port")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            message = f"`--gpu_memory_utilization` is {self.gpu_memory_utilization:g}; it must be a fraction up to 1."
            yield OptionError(message, "gpu_memory_utilization")


def _parse(cls: type, command: str, argv: list[str], **kwargs) -> Any:
    return CommandParser(cls, prog=f"paco-trl {command}", check=check_names, **kwargs).parse_args_and_config(argv)[0]


def main_push(arguments: list[str]) -> int:
    """Run `paco-trl push`."""
    args = _parse(PushArguments, "push", arguments, positional="folder")
    sys.stdout.write(f"{import_function('push:push')(args)}\n")
    return 0


def main_merge(arguments: list[str]) -> int:
    """Run `paco-trl merge`."""
    usage = "paco-trl merge ADAPTER --output_dir DIRECTORY [options]"
    text = "Merges a LoRA adapter into the weights of its base model, on the CPU."
    args = _parse(MergeArguments, "merge", arguments, positional="adapter", usage=usage, description=text)
    import_function("merge:merge")(args)
    sys.stdout.write(f"Merged weights, and a README.md that shows how to load them: {args.output_dir}\n")
    return 0


def main_space(arguments: list[str]) -> int:
    """Run `paco-trl space`."""
    args = _parse(SpaceArguments, "space", arguments, positional="adapter")
    folder = import_function("space:write_space")(args)
    sys.stdout.write(f"{folder}\n")
    if args.launch:
        runpy.run_path(str(folder / "app.py"), run_name="__main__")
    else:
        missing = "" if repository() else ", once the address of paco_trl is in requirements.txt"
        app = shlex.quote(str(folder / "app.py"))
        print_message("space", f"Run it with `python {app}`. Its README.md says how to publish it{missing}.")
    return 0


def main_serve(arguments: list[str]) -> None:
    """Run `paco-trl serve`: replace this process with vLLM."""
    separator = [*arguments, "--"].index("--")
    usage = "paco-trl serve [options] [-- options of vllm serve]"
    text = "Starts vLLM for a judge, in place of this process."
    args = _parse(ServeArguments, "serve", arguments[:separator], usage=usage, description=text)
    args.vllm_args += arguments[separator + 1 :]  # after the file's, since vLLM uses the last of repeated options
    import_function("serve:serve")(args)
