# SPDX-License-Identifier: Apache-2.0
"""`paco-trl serve`: replaces itself with vLLM, with the options for a judge."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

from safetensors import safe_open

from ..utils.addresses import is_loopback
from ..utils.errors import OptionError
from ..utils.model_files import find_adapter_file
from .messages import print_message
from .model_arguments import ServeArguments


# Read by vLLM. Only in the environment, since every user of the machine can read command lines.
API_KEY_VARIABLE = "VLLM_API_KEY"

# GiB of host memory, in both the server's and the engine's process. A processed image takes 24 bytes per pixel in
# float32, so this holds about 680 images of 512 x 512 pixels, and panels occur in several queries.
_IMAGE_CACHE_SIZE = 4
# Values that vLLM accepts for `--max-lora-rank`
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Names in transformers of layers before the language model
_VISION_LAYERS = re.compile(r"\.(visual|vision_tower|vision_model|multi_modal_projector|connector)\.")


def serve_command(args: ServeArguments, executable: str) -> list[str]:
    """Build the command that starts vLLM for a whole model, or for an adapter and its base model."""
    # A slow import
    from ..rewards.paco_reward import describe_image_model, resolve_base_model

    model = args.model_name_or_path
    name = args.served_model_name
    base, base_kwargs, is_adapter = resolve_base_model(model, {})
    if (what := describe_image_model(model, base)) is not None:
        message = f"{model!r} is {what}, no vision-language model, as a judge must be."
        raise OptionError(message, "model_name_or_path")
    # With an adapter the two names must differ, or vLLM answers with the base model
    command = [executable, "serve", base, "--served-model-name", f"{name}-base" if is_adapter else name]
    command += ["--host", args.host, "--port", str(args.port)]
    command += ["--dtype", args.dtype, "--max-model-len", str(args.max_model_len)]
    # A query has two images, and vLLM reserves memory for the largest possible query
    command += ["--limit-mm-per-prompt", json.dumps({"image": 2, "video": 0})]
    # Panels occur in several queries: process each once, and compute shared prefixes once
    command += ["--mm-processor-cache-gb", str(_IMAGE_CACHE_SIZE), "--enable-prefix-caching"]
    # The config of a published judge samples and penalizes repetitions
    command += ["--generation-config", "vllm"]
    # Other formats are pickles
    command += ["--load-format", "safetensors"]
    # A line per request would bury everything else
    command += ["--disable-uvicorn-access-log"]
    if args.gpu_memory_utilization is not None:
        command += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
    if is_adapter:
        command += _adapter_options(model, name)
        if "revision" in base_kwargs:
            command += ["--revision", base_kwargs["revision"]]
    return [*command, *map(str, args.vllm_args)]  # numbers from a YAML file are not strings


def _adapter_options(adapter: str, name: str) -> list[str]:
    from transformers import AutoImageProcessor

    from ..rewards.paco_reward import has_processor

    weights = find_adapter_file(adapter)
    with safe_open(weights, "pt") as file:
        shapes = {layer: file.get_slice(layer).get_shape() for layer in file.keys()}
    # From the weights, since layers may have different ranks
    rank = max((shape[0] for layer, shape in shapes.items() if "lora_A" in layer), default=0)
    if not 0 < rank <= _LORA_RANKS[-1]:
        raise OptionError(
            f"The adapter {adapter!r} has rank {rank}, and vLLM serves rank 1 to {_LORA_RANKS[-1]}. Merge it into its "
            "model (`paco-trl merge`) and serve that."
        )
    # As JSON, since the short form `name=path` fails for paths with a comma
    modules = json.dumps({"name": name, "path": str(Path(weights).parent.absolute())})
    options = ["--enable-lora", "--lora-modules", modules]
    options += ["--max-lora-rank", str(next(limit for limit in _LORA_RANKS if limit >= rank))]
    if any(map(_VISION_LAYERS.search, shapes)):
        # Otherwise vLLM silently leaves these layers out
        options += ["--enable-tower-connector-lora"]
    size = AutoImageProcessor.from_pretrained(adapter).size if has_processor(adapter) else {}
    limits = {edge: size[edge] for edge in ("shortest_edge", "longest_edge") if edge in size}
    if len(limits) == 2:
        # vLLM uses the base model's processor, but the judge was trained on images of this size
        options += ["--mm-processor-kwargs", json.dumps({"size": limits})]
    return options


def serve(args: ServeArguments) -> None:
    """Replace this process with vLLM."""
    executable = shutil.which(os.path.expanduser(args.vllm))
    if executable is None:
        raise OptionError(
            f"There is no command {args.vllm!r} (`--vllm`). vLLM needs its own environment: install it there, and "
            "pass its path:\n    python -m venv ~/vllm && ~/vllm/bin/pip install vllm\n"
            "    paco-trl serve --vllm ~/vllm/bin/vllm"
        )
    if not is_loopback(args.host):
        guard = f"Without a key, everyone there can use the server. Set one in {API_KEY_VARIABLE}."
        if os.environ.get(API_KEY_VARIABLE):
            guard = "The key protects the addresses below /v1, but not all others of vLLM."
        print_message("serve", f"Warning: `--host` is {args.host}, which other machines may reach. {guard}")
    from ..rewards.judge import read_question  # a slow import

    command = serve_command(args, os.path.abspath(executable))
    url = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}/v1"
    reward = f'ConsistencyReward(base_url="{url}", model="{args.served_model_name}"'
    question = read_question(args.model_name_or_path)
    print_message("serve", f"once vLLM has started, use {reward}{f', question={question!r}' if question else ''}).")
    # vLLM calls tools (ninja) of its environment, which may not be the active one
    os.environ["PATH"] = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)])
    sys.stdout.flush()
    os.execv(command[0], command)
