# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Qwen2.5-VL."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from ..data import demo_prompts_path, edit_following_question, theme_question
from ..utils.files import read_template


SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
MAX_PIXELS = 112 * 112

# Renders the same text as the template of the real model
CHAT_TEMPLATE = read_template("tiny_qwen2_5_vl_chat.jinja").strip()


def build_tiny_qwen2_5_vl(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a Qwen2.5-VL with its processor.

    The tokenizer has the real special tokens, and one token each for Yes and No. An image becomes
    one token for each 28 x 28 pixels, 16 at most.
    """
    tokenizer = _train_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            **token_ids(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "initializer_range": 0.1,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.save_pretrained(folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": MAX_PIXELS}
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return Path(folder)


def read_corpus() -> list[str]:
    """Return the shipped prompts, on which tokenizers are trained."""
    return [json.loads(line)["prompt"] for line in demo_prompts_path().read_text(encoding="utf-8").splitlines()]


def train_tokenizer(
    kind: type[PreTrainedTokenizerBase],
    texts: list[str],
    special_tokens: Sequence[str],
    max_length: int,
    vocab_size: int = 800,
) -> Any:
    """Train a tokenizer of a class on the shipped prompts and on some texts."""
    tokenizer = kind().train_new_from_iterator(
        [*read_corpus(), *texts], vocab_size, new_special_tokens=list(special_tokens), show_progress=False
    )
    tokenizer.model_max_length = max_length
    return tokenizer


def token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the entries of a text model's config that depend on its tokenizer."""
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    bos = pad if tokenizer.bos_token_id is None else tokenizer.bos_token_id  # those of Qwen have none
    return {"vocab_size": len(tokenizer), "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}


def _train_tokenizer() -> Qwen2Tokenizer:
    # On the questions too, so that a question is not hundreds of bytes. Yes and No are frequent and become one token.
    # The paper's question: " Yes" and " No" without quotation marks in `criterion_question` would become tokens as well
    criterion = (
        'Do images meet the following criteria? same colour Please answer "Yes" or "No" first, then provide detailed '
        "reasons."
    )
    questions = [theme_question("a cat"), criterion, edit_following_question("add a hat")]
    answers = ["Yes", "No", "Yes. The two images show the same.", "No. The two images differ."]
    tokenizer = train_tokenizer(Qwen2Tokenizer, [*questions * 20, *answers * 20], SPECIAL_TOKENS[1:], 2048)
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer
