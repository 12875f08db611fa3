# SPDX-License-Identifier: Apache-2.0
"""Packaged configs of common models, to plan memory when the Hub is unreachable or requires a login."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from transformers import (
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    T5Tokenizer,
)

from ..tiny.flux import train_clip_tokenizer
from ..tiny.qwen2_5_vl import train_judge_tokenizer
from ..utils.files import read_template
from ..utils.model_files import find_model_file


def known_configs() -> dict[str, dict[str, dict[str, Any]]]:
    """Read the packaged configs: model -> file -> content."""
    return yaml.safe_load(read_template("known_models.yaml"))


def resolve_model_configs(model: str, folder: str) -> str:
    """Return `model`, or if its configs cannot be read, a directory in `folder` with the packaged copies."""
    configs = known_configs().get(model)
    with suppress(OSError):  # a gated model, for example
        if configs is None or all(find_model_file(model, name) is not None for name in configs):
            return model
    return str(write_known_model(model, Path(folder) / model))


def write_known_model(model: str, folder: Path) -> Path:
    """Write the packaged configs of a model, and tokenizers of a tiny vocabulary, into a directory, and return it."""
    configs = known_configs()[model]
    for name, content in configs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    for name, entry in configs.get("model_index.json", {}).items():
        if name.startswith(("tokenizer", "processor")):
            _build_tokenizer(entry[1]).save_pretrained(folder / name)
    return folder


def _build_tokenizer(class_name: str) -> PreTrainedTokenizerBase | ProcessorMixin:
    """Build a tokenizer of few words that pads prompts as the real one, or a processor with the real limits."""
    if class_name == "CLIPTokenizer":
        return train_clip_tokenizer([], 514, max_length=77)
    if class_name == "T5Tokenizer":
        vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
        return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)
    tokenizer = train_judge_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    if class_name == "Qwen2VLProcessor":
        size = {"shortest_edge": 56**2, "longest_edge": 16384 * 28**2}
        images = Qwen2VLImageProcessor(size=size)
        videos = Qwen2VLVideoProcessor(size=size)
        return Qwen2VLProcessor(images, tokenizer, videos, tokenizer.chat_template)
    return tokenizer
