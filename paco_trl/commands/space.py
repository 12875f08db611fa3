# SPDX-License-Identifier: Apache-2.0
"""`paco-trl space`: a Gradio app that compares a base model with its adapter, written for the Hub's Spaces."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import jinja2

from ..checkpointing.checkpoints import find_saved_model
from ..data import demo_prompts_path, load_image_set_prompts, parse_image_set_prompt
from ..data.image_sets import PANEL_TEMPLATE, SEPARATE, arrange_sets, prompt_texts
from ..hub.files import SETTINGS
from ..hub.licenses import License
from ..hub.settings import ImageModelCard, JudgeCard, load_settings, settings_text
from ..utils.errors import OptionError
from ..utils.files import new_folder, write_atomically
from ..utils.model_files import find_model_file
from ..utils.names import is_local, public_name, repository
from .env import version_of
from .main import say
from .model_arguments import SpaceArguments


NUM_PROMPTS = 6
_PANEL = 512  # pixels per side, of T2IS-Bench
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


def write_space(args: SpaceArguments) -> Path:
    """Write `app.py`, `requirements.txt` and `README.md`, with a copy of a local adapter; return the directory."""
    adapter, is_copied = args.adapter, Path(args.adapter).is_dir()
    folder = Path(args.output_dir or f"{Path(adapter).absolute().name}-space").absolute()
    with new_folder(folder) as staged:
        if (gradio_version := version_of("gradio")) is None:
            raise ImportError('The app needs `gradio`: pip install "paco_trl[apps]".')
        if is_copied:
            adapter = str(find_saved_model(Path(adapter)))
        config_file, weights = (find_model_file(adapter, name) for name in (_CONFIG, _WEIGHTS))
        if config_file is None or weights is None:
            missing = _CONFIG if config_file is None else _WEIGHTS
            raise OptionError(
                f"'{adapter}' has no {missing}: an adapter in PEFT's format is compared with its base model."
            )
        config = json.loads(Path(config_file).read_text(encoding="utf-8"))
        card = load_settings(adapter) or ImageModelCard(Path(adapter).name, adapter, base_model="")
        if isinstance(card, JudgeCard) or card.trained_on == "edits":
            does = "judges" if isinstance(card, JudgeCard) else "edits images"
            raise OptionError(f"'{adapter}' {does}, but the app compares images generated from text.")
        if not (model := args.model_name_or_path or config.get("base_model_name_or_path")):
            raise OptionError(
                f"The {_CONFIG} of '{adapter}' names no base model. Name it with `--model_name_or_path`."
            )
        settings = _settings(_usable(model), adapter, args.judge_model, card)
        if is_copied:
            settings["adapter"] = None  # next to app.py
            config["base_model_name_or_path"] = settings["model"]
            write_atomically(staged / "adapter" / _CONFIG, json.dumps(config, indent=2) + "\n")
            shutil.copy(weights, staged / "adapter" / _WEIGHTS)
            write_atomically(staged / "adapter" / SETTINGS, settings_text(card))
        models = [settings[name] for name in ("model", "adapter", "judge")]
        shown = {
            "settings": settings,
            "name": folder.name,
            "repository": repository(),
            "gradio": gradio_version,
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "license": card.license or License(""),
            "models": [name for name in models if name and not is_local(name)],
        }
        for name in ("app.py", "README.md", "requirements.txt"):
            write_atomically(staged / name, _TEMPLATES.get_template(f"space_{name}.jinja").render(shown))
    return folder


def _settings(model: str, adapter: str, judge: str | None, card: ImageModelCard) -> dict[str, Any]:
    """Return the arguments of `serve_comparison`: those given, and those of training."""
    if judge is None and card.trained_on == "sets":  # a judge compares the images of a set
        models = (reward.model for reward in card.rewards if reward.name == "consistency")
        judge = next((name for name in models if name and "/" in name), None)
        if judge is None:
            say(
                "space", "The adapter names no judge on the Hub, so the app does not score. `--judge_model` names one."
            )
    trained = card.settings
    settings = {
        "num_inference_steps": card.call.get(
            "num_inference_steps", trained.get("num_inference_steps")
        ),  # of an evaluation
        "guidance_scale": trained.get("guidance_scale"),
        "negative_prompt": trained.get("negative_prompt"),
        "dtype": trained.get("precision"),
        "quantization": card.loading.get("quantization"),
    }
    height, width = trained.get("inference_size") or (card.call.get("height"), card.call.get("width"))
    rows, cols = (1, 1) if card.trained_on == "single images" else card.layout
    prompts = list(card.gallery.values())
    if trained.get("set_layout") == SEPARATE:
        from ..image_benchmarks.comparison_app import MAX_PIXELS

        settings |= {name: trained.get(name) for name in ("panel_template", "panel_generation")}
        settings["panel_template"] = trained.get("panel_template") or PANEL_TEMPLATE
        sets, pixels = load_image_set_prompts(demo_prompts_path()), (height or _PANEL) * (width or _PANEL)
        sets = [row for row in arrange_sets(sets, SEPARATE) if row["cols"] * pixels <= MAX_PIXELS]
        if not sets:
            raise OptionError(
                f"Two images of {height} x {width} pixels exceed the app's limit, {MAX_PIXELS:,} pixels."
            )
        prompts, layout, rows, cols = prompt_texts(sets), (1, sets[0]["cols"]), 1, 1
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
        "judge": judge and _usable(judge),
        "title": card.title,
        **{name: value for name, value in settings.items() if value is not None},
        "prompts": prompts[:NUM_PROMPTS],
        "layout": layout,
        "panel_size": (height // rows if height else _PANEL, width // cols if width else _PANEL),
    }


def _usable(name: str) -> str:
    """Return a name that works from any directory, and a Hub id for what is in the Hub's cache."""
    shared = public_name(name)
    if "/" not in shared:
        say("space", f"'{name}' is on this machine only: the app runs here, but not on the Hub.")
    return os.path.abspath(name) if is_local(name) and "/" not in shared else shared
