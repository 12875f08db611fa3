# SPDX-License-Identifier: Apache-2.0
"""`paco-trl space`: writes a Gradio app for the Hub's Spaces that compares a base model with its adapter."""

import contextlib
import json
import os
import re
import shutil
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import jinja2

from ..checkpointing.checkpoints import find_saved_model
from ..data import demo_prompts_path, load_image_set_prompts, parse_image_set_prompt
from ..data.image_sets import PANEL_TEMPLATE, SEPARATE, arrange_sets, prompt_texts
from ..hub.card_data import ImageModelCardData, JudgeCardData, card_data_text, load_card_data
from ..hub.licenses import License
from ..utils.errors import OptionError
from ..utils.files import new_folder, write_atomically
from ..utils.model_files import CARD_DATA_FILE, find_model_file
from ..utils.names import check_model_name, is_local, public_name, repository
from .env import get_version
from .messages import print_message
from .model_arguments import SpaceArguments


NUM_PROMPTS = 6
_PANEL_SIDE = 512  # pixels, as in T2IS-Bench
_SINGLE_PROMPTS = [
    "A red fox in the snow.",
    "A lighthouse on a cliff at dusk, in watercolor.",
    "Three pears on a table.",
]
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TEMPLATES = jinja2.Environment(loader=jinja2.PackageLoader("paco_trl"), trim_blocks=True, keep_trailing_newline=True)
_TEMPLATES.filters["literal"] = lambda value: (
    json.dumps(value, ensure_ascii=False) if type(value) is str else repr(value)
)


def _check_judge(model: str) -> None:
    """Refuse a name that is none, and a directory of something that generates images."""
    check_model_name(model)
    if Path(model).is_dir():
        from ..rewards.paco_reward import describe_image_model, resolve_base_model  # imports torch

        if (what := describe_image_model(model, resolve_base_model(model, {})[0])) is not None:
            message = f"{model!r} is {what}, no vision-language model, as a judge must be."
            raise OptionError(message, "judge_model")


def write_space(args: SpaceArguments) -> Path:
    """Write `app.py`, `requirements.txt`, `README.md` and a copy of a local adapter, and return the directory."""
    adapter = args.adapter
    is_local_adapter = Path(args.adapter).is_dir()
    if args.judge_model is not None:
        _check_judge(args.judge_model)
    folder = Path(args.output_dir or f"{Path(adapter).absolute().name}-space").absolute()
    with new_folder(folder) as staging_dir:
        if is_local_adapter:
            adapter = str(find_saved_model(Path(adapter)))
        config_file, weights = (find_model_file(adapter, name) for name in (_CONFIG, _WEIGHTS))
        if config_file is None or weights is None:
            missing = _CONFIG if config_file is None else _WEIGHTS
            raise OptionError(
                f"'{adapter}' has no {missing}. Pass an adapter in PEFT's format to compare with its base model."
            )
        config = json.loads(Path(config_file).read_text(encoding="utf-8"))
        card = load_card_data(adapter) or ImageModelCardData(Path(adapter).name, adapter, base_model="")
        if isinstance(card, JudgeCardData) or card.trained_on == "edits":
            purpose = "judges" if isinstance(card, JudgeCardData) else "edits images"
            raise OptionError(f"'{adapter}' {purpose}, but the app compares images generated from text.")
        if not (model := args.model_name_or_path or config.get("base_model_name_or_path")):
            raise OptionError(f"The {_CONFIG} of '{adapter}' names no base model. Pass it as `--model_name_or_path`.")
        settings = _settings(_portable_name(model), adapter, args.judge_model, card)
        if is_local_adapter:
            settings["adapter"] = None  # next to app.py
            config["base_model_name_or_path"] = settings["model"]
            write_atomically(staging_dir / "adapter" / _CONFIG, json.dumps(config, indent=2) + "\n")
            shutil.copy(weights, staging_dir / "adapter" / _WEIGHTS)
            write_atomically(staging_dir / "adapter" / CARD_DATA_FILE, card_data_text(card))
        models = [settings[name] for name in ("model", "adapter", "judge")]
        context = {
            "settings": settings,
            "name": folder.name,
            "repository": repository(),
            "gradio": get_version("gradio") or _least_gradio(),
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "license": card.license or License(""),
            "models": [name for name in models if name and not is_local(name)],
        }
        for name in ("app.py", "README.md", "requirements.txt"):
            write_atomically(staging_dir / name, _TEMPLATES.get_template(f"space_{name}.jinja").render(context))
    return folder


def _least_gradio() -> str:
    """Return the least version of Gradio that the app runs with."""
    return next(found[1] for text in requires("paco_trl") or () if (found := re.match(r"gradio>=([\d.]+)", text)))


def _settings(model: str, adapter: str, judge: str | None, card: ImageModelCardData) -> dict[str, Any]:
    """Return the arguments of `serve_comparison`, from the options and the training."""
    if judge is None and card.trained_on == "sets":  # a judge compares the images of a set
        models = (reward.model for reward in card.rewards if reward.name == "consistency")
        judge = next((name for name in models if name and "/" in name), None)
        if judge is None:
            print_message(
                "space",
                "The adapter names no judge on the Hub, so the app does not score. Pass one as `--judge_model`.",
            )
    training = card.settings
    settings = {
        # The evaluations' number of steps, if known
        "num_inference_steps": card.call.get("num_inference_steps", training.get("num_inference_steps")),
        "guidance_scale": training.get("guidance_scale"),
        "negative_prompt": training.get("negative_prompt"),
        "dtype": training.get("precision"),
        "quantization": card.loading.get("quantization"),
    }
    height, width = training.get("inference_size") or (card.call.get("height"), card.call.get("width"))
    rows, cols = (1, 1) if card.trained_on == "single images" else card.layout
    prompts = list(card.gallery.values())
    if training.get("set_layout") == SEPARATE:
        from ..image_benchmarks.comparison_app import MAX_PIXELS

        settings |= {name: training.get(name) for name in ("panel_template", "panel_generation")}
        settings["panel_template"] = training.get("panel_template") or PANEL_TEMPLATE
        sets = load_image_set_prompts(demo_prompts_path())
        pixels = (height or _PANEL_SIDE) * (width or _PANEL_SIDE)
        sets = [row for row in arrange_sets(sets, SEPARATE) if row["cols"] * pixels <= MAX_PIXELS]
        if not sets:
            raise OptionError(
                f"Two images of {height} x {width} pixels exceed the app's limit, {MAX_PIXELS:,} pixels."
            )
        prompts = prompt_texts(sets)
        layout = (1, sets[0]["cols"])
        rows = 1
        cols = 1
    else:
        if not prompts and card.trained_on == "single images":
            prompts = _SINGLE_PROMPTS
        elif not prompts:
            prompts = load_image_set_prompts(demo_prompts_path())["prompt"][:NUM_PROMPTS]
        if card.trained_on != "single images":
            with contextlib.suppress(ValueError):  # another format
                _, rows, cols, _ = parse_image_set_prompt(prompts[0])
        layout = (rows, cols)
    return {
        "model": model,
        "adapter": adapter,
        "judge": judge and _portable_name(judge),
        "title": card.title,
        **{name: value for name, value in settings.items() if value is not None},
        "prompts": prompts[:NUM_PROMPTS],
        "layout": layout,
        "panel_size": (height // rows if height else _PANEL_SIDE, width // cols if width else _PANEL_SIDE),
    }


def _portable_name(name: str) -> str:
    """Return a name that works in any directory, and the Hub id for models in the Hub's cache."""
    hub_name = public_name(name)
    if "/" not in hub_name:
        print_message("space", f"'{name}' is only on this machine, so the app runs here, but not on the Hub.")
    return os.path.abspath(name) if is_local(name) and "/" not in hub_name else hub_name
