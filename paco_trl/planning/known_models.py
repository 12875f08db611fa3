# SPDX-License-Identifier: Apache-2.0
"""Packaged configs of common models, to plan memory when the Hub is unreachable or requires a login."""

import json
from contextlib import suppress
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerBase, T5Tokenizer

from ..tiny.flux import train_clip_tokenizer
from ..tiny.qwen2_5_vl import train_judge_tokenizer
from ..utils.files import read_template
from ..utils.model_files import find_model_file


def resolve_model_configs(model: str, folder: str) -> str:
    """Return `model`, or if its configs cannot be read, a directory in `folder` with the packaged copies."""
    configs = yaml.safe_load(read_template("known_models.yaml")).get(model)
    with suppress(OSError):  # a gated model, for example
        if configs is None or all(find_model_file(model, name) is not None for name in configs):
            return model
    path = Path(folder) / model
    for name, content in configs.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    for name, entry in configs.get("model_index.json", {}).items():
        if name.startswith("tokenizer"):
            _build_tokenizer(entry[1]).save_pretrained(path / name)
    return str(path)


def _build_tokenizer(class_name: str) -> PreTrainedTokenizerBase:
    """Build a tokenizer with a tiny vocabulary, which pads prompts to the real length."""
    if class_name == "CLIPTokenizer":
        return train_clip_tokenizer([], 514, max_length=77)
    if class_name == "T5Tokenizer":
        vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
        return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)
    tokenizer = train_judge_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    return tokenizer
