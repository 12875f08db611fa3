# SPDX-License-Identifier: Apache-2.0
"""Configs of known models, from which memory is planned where the Hub cannot be reached or wants a login."""

import json
from contextlib import suppress
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerBase, T5Tokenizer

from ..tiny.flux import train_clip_tokenizer
from ..tiny.qwen2_5_vl import train_judge_tokenizer
from ..utils.files import read_template
from ..utils.model_files import find_model_file


def readable_model(model: str, folder: str) -> str:
    """Return a model, or where its configs cannot be read, a folder in `folder` with those that the package has of it."""
    known = yaml.safe_load(read_template("known_models.yaml")).get(model)
    with suppress(OSError):  # a gated model, for one
        if known is None or all(find_model_file(model, name) is not None for name in known):
            return model
    path = Path(folder) / model
    for name, content in known.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    for name, entry in known.get("model_index.json", {}).items():
        if name.startswith("tokenizer"):
            _build_tokenizer(entry[1]).save_pretrained(path / name)
    return str(path)


def _build_tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """Build a tokenizer of few words: prompts are padded to the real length."""
    if kind == "CLIPTokenizer":
        return train_clip_tokenizer([], 514, max_length=77)
    if kind == "T5Tokenizer":
        vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
        return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)
    tokenizer = train_judge_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    return tokenizer
