# SPDX-License-Identifier: Apache-2.0
"""Find the files of models and adapters, in a directory or on the Hub."""

import os
import re
from pathlib import Path
from typing import Any

from .files import read_record
from .names import check_adapter_name, check_model_name, is_local


# File with the record of a model's training (`paco_trl.hub.card_data`), and the `kind` of image models in it
CARD_DATA_FILE = "paco_trl.json"
IMAGE_MODEL = "image model"
_PEFT_WEIGHTS = "adapter_model.safetensors"
# Names of diffusers and transformers for files with a model's own weights, or with parts of the weights
_ALL_WEIGHTS = re.compile(r"(?:diffusion_pytorch_)?model[.-]")


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say where on the Hub a file is."""
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}


def find_model_file(model: str, name: str, **hub_arguments: Any) -> str | None:
    """Find a file of a model, by Hub id or directory; return its path, or `None` if the model has no such file."""
    from transformers.utils import cached_file  # takes a second to import

    check_model_name(model)
    return cached_file(model, name, _raise_exceptions_for_missing_entries=False, **hub_arguments)


def models_near(adapter: str, names: list[str]) -> list[str]:
    """List directories with models that an adapter's path names, as it is or below a folder above the adapter."""
    # A relative path is one from where the run was started; it may read like a Hub id
    starts = Path(adapter).absolute().parents[:4] if os.path.exists(adapter) else ()
    paths = [*names, *(os.path.join(start, name) for start in starts for name in names)]
    configs = ("model_index.json", "config.json")
    return [path for path in paths if any(os.path.isfile(os.path.join(path, config)) for config in configs)]


def find_adapter_file(adapter: str, **hub_arguments: Any) -> str:
    """Return the weights of an adapter or LoRA: a file, the file of a directory or repository, or `user/repo/file`."""
    check_adapter_name(adapter)
    folder, file = split_adapter(adapter)
    names = (_PEFT_WEIGHTS, "pytorch_lora_weights.safetensors")
    read = [name for name in ([file] if file else names) if name.endswith(".safetensors")]
    paths = list(filter(None, (find_model_file(folder, name, **hub_arguments) for name in read)))[:1]
    if not paths and file is None:
        paths = [str(path) for path in Path(adapter).glob("*.safetensors") if not _ALL_WEIGHTS.match(path.name)]
    if len(paths) != 1:
        what = f"{len(paths)} safetensors files" if paths else f"no {' or '.join(names)}"
        where = "" if os.path.exists(adapter) else ", which is no directory here,"
        parent, component = os.path.split(os.path.normpath(adapter))
        if os.path.isfile(os.path.join(adapter, "config.json")) and (
            component == "transformer" or os.path.isfile(os.path.join(parent, "model_index.json"))
        ):
            raise ValueError(f"'{adapter}' is a component of the model '{parent or '.'}'. Pass that.")
        raise ValueError(
            f"The adapter '{adapter}'{where} has {what}. Name the file, such as 'style.safetensors', or on the Hub "
            "'user/name/style.safetensors'. Other formats are pickles, which can run code. A checkpoint with all "
            "weights is no adapter."
        )
    return paths[0]


def peft_folder(adapter: str) -> str | None:
    """Return directory or Hub id of an adapter in PEFT's format, also for the file in it; `None` for a LoRA file."""
    if os.path.basename(find_adapter_file(adapter)) != _PEFT_WEIGHTS:
        return None
    folder, file = split_adapter(adapter)
    if subfolder := os.path.dirname(file or ""):  # of a repository
        from huggingface_hub import snapshot_download  # takes half a second to import

        patterns = [f"{subfolder}/{name}" for name in (_PEFT_WEIGHTS, "*.json", "*.jinja")]
        return os.path.join(snapshot_download(folder, allow_patterns=patterns), subfolder)
    return folder


def check_generates(adapter: str, folder: str) -> None:
    """Refuse an adapter of a judge, whose `paco_trl.json` is in `folder`, a directory or Hub id."""
    if read_record(find_model_file(folder, CARD_DATA_FILE) or "").get("kind") == "judge":
        raise ValueError(f"'{adapter}' is a judge, which generates no images. `PaCoReward.from_pretrained` loads it.")


def split_adapter(adapter: str) -> tuple[str, str | None]:
    """Return the directory or Hub id of an adapter, and the file in it that is named."""
    if os.path.isfile(adapter):
        return os.path.split(os.path.abspath(adapter))
    if not is_local(adapter) and adapter.endswith(".safetensors") and adapter.count("/") > 1:
        owner, name, file = adapter.split("/", 2)
        return f"{owner}/{name}", file
    return adapter, None
