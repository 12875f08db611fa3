# SPDX-License-Identifier: Apache-2.0
"""`paco-trl space`: a Gradio app that compares a base model with its adapter, written for the Hub's Spaces."""

import contextlib
import html
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import ModelCard

from ..data import demo_prompts_path, load_image_set_prompts, parse_image_set_prompt
from ..hub.files import read_settings
from ..utils.files import find_model_file, new_folder, write_atomically
from ..utils.names import is_local, public_name, repository
from .env import version_of
from .main import say
from .options import option
from .parser import CommandParser
from .push import find_saved_model


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
# Of the snippet in a card
_CALL = re.compile(r"\b(height|width|num_inference_steps)=(\d+)")
# Rows of its tables: what `ImageSettings.rows` writes, and the judge of a consistency reward
_SIZE = re.compile(r"^\| resolution \|.* (\d+) x (\d+) pixels in inference \|$", re.M)
_SAMPLER = re.compile(
    r'^\| sampler \| (\d+) steps, guidance ([\d.]+)(?: against the negative prompt (".*"))? \|$', re.M
)
_PRECISION = re.compile(r"^\| precision \| (\w+) \|$", re.M)
_JUDGE = re.compile(r"^\| consistency \|(?: [^|]* \|)*? ([\w.-]+/[\w.-]+) \|", re.M)


@dataclass
class SpaceArguments:
    """Adapter to compare with its base model. Its card has the settings of training, which `app.py` lists for changes."""

    adapter_name_or_path: str = option(
        None, "LoRA adapter: Hub id, directory, or output directory of a run, whose newest model is used."
    )
    output_dir: str | None = option(None, "New directory for the Space. If `None`, the adapter's name with `-space`.")
    model_name_or_path: str | None = option(None, "Base model. If `None`, the one that `adapter_config.json` names.")
    judge_model: str | None = option(
        None, "Judge that scores the sets: Hub id or directory. If `None`, the Hub id in the card, or no judge."
    )
    dataset_name: str | None = option(
        None, "Image-set prompts to choose from: Hub id, directory or file. If `None`, the card's, or packaged ones."
    )
    launch: bool = option(False, "Whether to run the app on this machine, at 127.0.0.1.")

    def __post_init__(self):
        if not self.adapter_name_or_path:
            raise ValueError("`--adapter_name_or_path` is missing.")


def write_space(args: SpaceArguments) -> Path:
    """Write `app.py`, `requirements.txt` and `README.md`, with a copy of a local adapter; return the directory."""
    adapter, is_copied = args.adapter_name_or_path, Path(args.adapter_name_or_path).is_dir()
    folder = Path(args.output_dir or f"{Path(adapter).absolute().name}-space").absolute()
    with new_folder(folder) as staged:
        if (gradio_version := version_of("gradio")) is None:
            raise ImportError('The app needs `gradio`: pip install "paco_trl[apps]".')
        if is_copied:
            adapter = str(find_saved_model(Path(adapter)))
        config_file, weights = (find_model_file(adapter, name) for name in (_CONFIG, _WEIGHTS))
        if config_file is None or weights is None:
            missing = _CONFIG if config_file is None else _WEIGHTS
            problem = f"'{adapter}' has no {missing}: there is no adapter in PEFT's format"
            raise ValueError(f"{problem}, and without one there is no base model to compare with.")
        config = json.loads(Path(config_file).read_text(encoding="utf-8"))
        card, trained_on = _read_card(adapter), read_settings(adapter).get("trained_on", "sets")
        if card.data.get("pipeline_tag") not in (None, "text-to-image") or trained_on == "edits":
            raise ValueError(
                f"'{adapter}' edits images, by its own files, but the app compares images generated from text."
            )
        settings = _settings(args, adapter, config, card, is_single=trained_on == "single images")
        if is_copied:
            settings["adapter"] = None  # next to app.py
            config["base_model_name_or_path"] = settings["model"]
            write_atomically(staged / "adapter" / _CONFIG, json.dumps(config, indent=2) + "\n")
            shutil.copy(weights, staged / "adapter" / _WEIGHTS)
        head = _front_matter(settings, card, gradio_version)
        shown = {"settings": settings, "name": folder.name, "head": head, "repository": repository()}
        for name in ("app.py", "README.md", "requirements.txt"):
            write_atomically(staged / name, _TEMPLATES.get_template(f"space_{name}.jinja").render(shown))
    return folder


def _read_card(adapter: str) -> ModelCard:
    path = find_model_file(adapter, "README.md")
    return ModelCard("---\n{}\n---\n") if path is None else ModelCard.load(path, ignore_metadata_errors=True)


def _settings(args: SpaceArguments, adapter: str, config: dict, card: ModelCard, is_single: bool) -> dict[str, Any]:
    """Return the arguments of `serve_comparison`: those given, and those of training in the card."""
    model, judge = args.model_name_or_path or config.get("base_model_name_or_path"), args.judge_model
    if not model:
        raise ValueError(f"The {_CONFIG} of '{adapter}' names no base model. Name it with `--model_name_or_path`.")
    if judge is None and not is_single and (found := _JUDGE.search(card.text)):
        judge = found[1]
    if judge is None and not is_single:  # a judge compares the images of a set
        say(
            "space",
            "The card names no judge on the Hub: the app does not score. To change that, give `--judge_model`.",
        )
    for name in filter(None, (model, judge)):
        if "/" not in public_name(name):
            say("space", f"'{name}' is on this machine only: the app runs here, but not on the Hub.")
    title = re.search(r"^# (.+)$", card.text, re.M)
    settings = {
        "model": _usable(model),
        "adapter": adapter,
        "judge": judge and _usable(judge),
        "title": title[1] if title else Path(adapter).name,
    }
    return settings | _trained_settings(card.text) | _prompts(args.dataset_name, card, is_single)


def _usable(name: str) -> str:
    """Return a name that works from any directory, and a Hub id for what is in the Hub's cache."""
    shared = public_name(name)
    return os.path.abspath(name) if is_local(name) and "/" not in shared else shared


def _trained_settings(card: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if sampler := _SAMPLER.search(card):
        settings = {"num_inference_steps": int(sampler[1]), "guidance_scale": float(sampler[2])}
        if sampler[3]:  # JSON, escaped as in `markdown_text`
            settings["negative_prompt"] = json.loads(re.sub(r"\\([\\|(])", r"\1", html.unescape(sampler[3])))
    if steps := dict(_CALL.findall(card)).get("num_inference_steps"):  # of an evaluation
        settings["num_inference_steps"] = int(steps)
    if precision := _PRECISION.search(card):
        settings["dtype"] = precision[1]
    return settings


def _prompts(dataset_name: str | None, card: ModelCard, is_single: bool) -> dict[str, Any]:
    """Return prompts to choose from with the layout of the first one, and the size of its panels."""
    in_card = [example["text"] for example in card.data.get("widget") or [] if "text" in example]
    if is_single and dataset_name is None:
        prompts, first = in_card or _SINGLE_PROMPTS, {"rows": 1, "cols": 1}
    elif dataset_name is None and in_card:
        prompts, first = in_card, {"rows": 2, "cols": 2}
        with contextlib.suppress(ValueError):  # another format
            first = parse_image_set_prompt(prompts[0])._asdict()
    else:
        dataset = load_image_set_prompts(dataset_name or demo_prompts_path())
        prompts, first = dataset["prompt"][:NUM_PROMPTS], dataset[0]
    shown, trained = dict(_CALL.findall(card.text)), _SIZE.search(card.text)
    if dataset_name is not None:
        size = (first.get("height"), first.get("width"))
    elif trained:
        size = (int(trained[2]), int(trained[1]))
    else:  # of the first prompt, where training had several sizes
        size = tuple(int(shown[name]) if name in shown else None for name in ("height", "width"))
    layout = (first["rows"], first["cols"])
    panel_size = tuple(side // count if side else _PANEL for side, count in zip(size, layout, strict=True))
    return {"prompts": prompts[:NUM_PROMPTS], "layout": layout, "panel_size": panel_size}


def _front_matter(settings: dict[str, Any], card: ModelCard, gradio_version: str) -> str:
    """Return the metadata of the Space (https://huggingface.co/docs/hub/spaces-config-reference)."""
    models = [settings[name] for name in ("model", "adapter", "judge")]
    shown = "Images" if settings["layout"] == (1, 1) else "Image sets"
    licenses = {name: card.data.get(name) for name in ("license", "license_name", "license_link")}
    data = {
        "title": settings["title"],
        "emoji": "🎞️",
        "colorFrom": "gray",
        "colorTo": "green",
        "sdk": "gradio",
        "sdk_version": gradio_version,
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "app_file": "app.py",
        **{name: value for name, value in licenses.items() if value},
        "models": [name for name in models if name and not is_local(name)],
        "short_description": f"{shown} without and with an adapter, from the same noise",
    }
    return yaml.safe_dump({name: value for name, value in data.items() if value}, sort_keys=False, allow_unicode=True)


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = CommandParser(SpaceArguments, positional="adapter_name_or_path", prog="paco-trl space")
    (args,) = parser.parse_args_and_config(arguments)
    folder = write_space(args)
    sys.stdout.write(f"{folder}\n")
    if args.launch:
        runpy.run_path(str(folder / "app.py"), run_name="__main__")
    else:
        missing = "" if repository() else ", once the address of paco_trl is in requirements.txt"
        app = shlex.quote(str(folder / "app.py"))
        say("space", f"Run it with `python {app}`. Its README.md says how to publish it{missing}.")
    return 0
