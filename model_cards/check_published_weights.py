# SPDX-License-Identifier: Apache-2.0
"""
Checks whether the published models of PaCo-RL have the layout that this package loads.

For whoever has the network: only configs and the headers of safetensors files are read, no weights. The models they
belong to are built without memory, and every weight is looked up in them, by name and shape.

    python model_cards/check_published_weights.py

Other repositories; `--base` is the base model of an adapter that does not name it:

    python model_cards/check_published_weights.py --repo user/adapter --base black-forest-labs/FLUX.1-dev

The base models of FLUX.1 are gated: accept their license on the Hub and log in (`hf auth login`). The exit code is 0 if
everything has its place, and 1 if something has not or could not be read.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import diffusers
import torch
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.utils import SafetensorsFileMetadata
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from trl import TrlParser

from paco_trl.rewards.paco_reward import rename_old_layers
from paco_trl.utils.names import is_same_model


# Repository -> its base model; None for a whole model
PUBLISHED = {
    "X-GenGroup/PaCo-Reward-7B": None,
    "X-GenGroup/PaCo-Reward-7B-Lora": "Qwen/Qwen2.5-VL-7B-Instruct",
    "X-GenGroup/PaCo-FLUX.1-dev-Lora": "black-forest-labs/FLUX.1-dev",
    "X-GenGroup/PaCo-FLUX.1-Kontext-Lora": "black-forest-labs/FLUX.1-Kontext-dev",
    "X-GenGroup/PaCo-Qwen-Image-Edit-Lora": "Qwen/Qwen-Image-Edit",
}
_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
_ADAPTER_CONFIG, _ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_DIFFUSERS_ADAPTER = "pytorch_lora_weights.safetensors"
_PEFT_PREFIX, _DIFFUSERS_PREFIX = "base_model.model.", "transformer."
_METADATA = "lora_adapter_metadata"  # in which diffusers keeps the adapter's config

Shapes = dict[str, tuple[int, ...]]


@dataclass
class ScriptArguments:
    """Repositories to check."""

    repo: list[str] | None = field(
        default=None, metadata={"help": "Repositories to check. If `None`, the five published ones."}
    )
    base: str | None = field(
        default=None, metadata={"help": "Base model of the adapters of `repo`. If `None`, the one that they name."}
    )


@dataclass
class Finding:
    """
    What is found out about a repository.

    Attributes:
        repo (`str`):
            Repository.
        layout (`str`):
            What it is, with rank and alpha of an adapter.
        base (`str`):
            The model that its config names.
        num_weights (`int`):
            Weights in its safetensors files.
        pickles (`list[str]`, *optional*):
            Files that can run code. `None` where the files are not known.
        error (`str`, *optional*):
            Why it could not be checked to the end.
        faults (`list[str]`):
            Why it does not fit; none if it does.
        notes (`list[str]`):
            What else whoever loads it should know.
    """

    repo: str
    layout: str = ""
    base: str = ""
    num_weights: int = 0
    pickles: list[str] | None = None
    error: str | None = None
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(repo: str, base: str | None) -> Finding:
    finding = Finding(repo)
    try:
        files = HfApi().list_repo_files(repo)
        finding.pickles = sorted(name for name in files if name.endswith(_PICKLES))
        adapter = _at_the_top(files, _ADAPTER_CONFIG)
        if adapter is not None:
            _check_peft_adapter(finding, files, adapter.parent, base)
        elif (adapter := _at_the_top(files, _DIFFUSERS_ADAPTER)) is not None:
            _check_diffusers_adapter(finding, adapter, base)
        else:
            _check_whole_model(finding)
    # Whatever is wrong with a repository, and the way to it, is said of it, and the others are checked
    except Exception as error:
        finding.error = f"cannot be checked: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return finding


def _at_the_top(files: list[str], name: str) -> PurePosixPath | None:
    # Of several, the one in the fewest folders
    paths = sorted((PurePosixPath(path) for path in files), key=lambda path: (len(path.parts), str(path)))
    return next((path for path in paths if path.name == name), None)


def _check_peft_adapter(finding: Finding, files: list[str], folder: PurePosixPath, base: str | None) -> None:
    subfolder = {} if folder == PurePosixPath(".") else {"subfolder": str(folder)}
    config = PeftConfig.from_pretrained(finding.repo, **subfolder)
    _describe(finding, "PEFT adapter", config, base)
    if subfolder:
        finding.notes.append(f'The adapter is in a folder: load it with `subfolder="{folder}"`.')
    if str(folder / _ADAPTER) not in files:
        finding.faults.append(f"it has no {_ADAPTER}: its weights are in a pickle, or missing")
        return
    saved = _shapes(HfApi().parse_safetensors_file_metadata(finding.repo, str(folder / _ADAPTER)))
    finding.num_weights = len(saved)
    unprefixed = sorted(name for name in saved if not name.startswith(_PEFT_PREFIX))
    if unprefixed:
        finding.faults.append(f"{len(unprefixed)} names do not begin with {_PEFT_PREFIX} ({unprefixed[0]}, ...)")
        return
    saved = {name.removeprefix(_PEFT_PREFIX): shape for name, shape in saved.items()}
    model, is_judge = _build_base(base or config.base_model_name_or_path)
    if is_judge:
        saved = _with_current_names(saved, model.config.model_type)
        if not isinstance(config.target_modules, str):
            config.target_modules = set(rename_old_layers(config.target_modules, model.config.model_type))
    _compare_adapter(finding, saved, model, config)
    if not is_judge and _at_the_top(files, _DIFFUSERS_ADAPTER) is None:
        finding.notes.append(
            "There is no file for `pipe.load_lora_weights`, which does not read PEFT's: use "
            "`PeftModel.from_pretrained(pipe.transformer, ...)`."
        )


def _check_diffusers_adapter(finding: Finding, path: PurePosixPath, base: str | None) -> None:
    header = HfApi().parse_safetensors_file_metadata(finding.repo, str(path))
    saved = _shapes(header)
    finding.num_weights = len(saved)
    ranks = [shape[0] for name, shape in saved.items() if name.endswith("lora_A.weight")]
    settings = json.loads(header.metadata.get(_METADATA, "{}"))
    settings = {name.removeprefix(_DIFFUSERS_PREFIX): value for name, value in settings.items()}
    layers = {name.removesuffix(".lora_A.weight") for name in saved if name.endswith(".lora_A.weight")}
    config = LoraConfig(
        r=settings.get("r") or max(ranks, default=8),
        lora_alpha=settings.get("lora_alpha") or max(ranks, default=8),
        target_modules={name.removeprefix(_DIFFUSERS_PREFIX) for name in layers},
    )
    _describe(finding, "diffusers LoRA", config, base)
    if not settings:
        finding.notes.append(
            "Its file does not say `lora_alpha`, for which `pipe.load_lora_weights` takes the rank: with another alpha "
            "in training it draws something else."
        )
    finding.notes.append(
        "It has no PEFT adapter: it is loaded with `pipe.load_lora_weights`, and cannot be continued."
    )
    if not layers or any(not name.startswith(_DIFFUSERS_PREFIX) for name in saved):
        finding.faults.append(f"its names are not those of diffusers ({min(saved, default='none at all')}, ...)")
        return
    model, _ = _build_base(base)
    saved = {name.removeprefix(_DIFFUSERS_PREFIX): shape for name, shape in saved.items()}
    _compare_adapter(finding, saved, model, config)


def _check_whole_model(finding: Finding) -> None:
    config = AutoConfig.from_pretrained(finding.repo)
    finding.layout = f"whole model, {config.model_type}"
    headers = HfApi().get_safetensors_metadata(finding.repo).files_metadata.values()
    saved = {name: shape for header in headers for name, shape in _shapes(header).items()}
    finding.num_weights = len(saved)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    saved = _with_current_names(saved, config.model_type)
    if config.tie_word_embeddings:
        for shapes in (saved, expected):
            shapes.pop("lm_head.weight", None)
    _compare(finding, saved, expected)


def _describe(finding: Finding, kind: str, config: LoraConfig, base: str | None) -> None:
    alpha = f"alpha {config.lora_alpha}"
    finding.layout = f"{kind}, rank {config.r}, {alpha}"
    named = config.base_model_name_or_path
    finding.base = named or "none"
    if named and base and not is_same_model(named, base):
        finding.faults.append(f"its config names '{named}' as its base model, not '{base}'")


def _build_base(base: str | None) -> tuple[nn.Module, bool]:
    """Build the base model of an adapter without memory, and tell whether it is that of a judge."""
    if not base:
        raise ValueError("it does not name its base model; give it with `--base`")
    if HfApi().file_exists(base, "model_index.json"):
        with open(hf_hub_download(base, "transformer/config.json"), encoding="utf-8") as file:
            config = json.load(file)
        with torch.device("meta"):
            return getattr(diffusers, config["_class_name"]).from_config(config), False
    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config), True


def _compare_adapter(finding: Finding, saved: Shapes, model: nn.Module, config: LoraConfig) -> None:
    try:
        model = get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:  # none of its layers is there
        finding.faults.append(" ".join(str(error).split())[:400])
        return
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    _compare(finding, saved, {name.removeprefix(_PEFT_PREFIX): tuple(value.shape) for name, value in expected.items()})


def _shapes(header: SafetensorsFileMetadata) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in header.tensors.items()}


def _with_current_names(saved: Shapes, model_type: str) -> Shapes:
    return dict(zip(rename_old_layers(saved, model_type), saved.values(), strict=True))


def _compare(finding: Finding, saved: Shapes, expected: Shapes) -> None:
    differing = {name for name in saved.keys() & expected.keys() if saved[name] != expected[name]}
    for what, names in (
        ("weights have no place in the model", saved.keys() - expected.keys()),
        ("places of the model have no weight", expected.keys() - saved.keys()),
        ("weights have another shape", differing),
    ):
        if names:
            finding.faults.append(f"{len(names)} {what} ({min(names)}, ...)")


def report(findings: list[Finding]) -> Table:
    table = Table(title="Published weights", show_lines=True)
    table.add_column("repository", overflow="fold")
    table.add_column("layout", overflow="fold")
    table.add_column("base it names", overflow="fold")
    table.add_column("weights", justify="right")
    table.add_column("pickles", overflow="fold")
    table.add_column("fits", no_wrap=True)
    for finding in findings:
        cells = [finding.repo, finding.layout, finding.base, str(finding.num_weights or "")]
        cells.append("" if finding.pickles is None else ", ".join(finding.pickles) or "none")
        fits = "[red]no[/]" if finding.faults else "[green]yes[/]" if finding.error is None else "[red]unknown[/]"
        table.add_row(*map(escape, cells), fits)
    return table


def main(script_args: ScriptArguments) -> int:
    if script_args.base is not None and script_args.repo is None:
        raise ValueError("`--base` is for the repositories of `--repo`: those of the published ones are known.")
    asked = PUBLISHED if script_args.repo is None else dict.fromkeys(script_args.repo, script_args.base)
    findings = [check(repo, base or PUBLISHED.get(repo)) for repo, base in asked.items()]
    console = Console()
    console.print(report(findings))
    for finding in findings:
        for text in filter(None, (finding.error, *finding.faults, *finding.notes)):
            console.print(f"{escape(finding.repo)}: {escape(text)}", soft_wrap=True, highlight=False)
    return 1 if any(finding.faults or finding.error for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main(*TrlParser(ScriptArguments).parse_args_and_config()))
