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
from .parts import CONFIGS, weights_of


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

    The tokenizer has the real special tokens, and one token each for Yes and No, with one of which answers begin. An
    image becomes one token for each 28 x 28 pixels, 16 at most.
    """
    model, processor = build_model_and_processor(seed, Qwen2_5_VLProcessor)
    _answer_yes_or_no(model, processor.tokenizer)
    for part in (model, processor):
        part.save_pretrained(folder)
    return Path(folder)


def _answer_yes_or_no(model: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer) -> None:
    """Raise the logits of Yes and No alike, wherever an answer begins: which of them it is depends on the question."""
    answers = tokenizer.convert_tokens_to_ids(["Yes", "No"])
    (last,) = tokenizer.encode("\n")
    start = torch.tensor([tokenizer.encode("<|im_start|>assistant\n")])  # (1, T)
    with torch.no_grad():
        model.get_input_embeddings().weight[last] *= 2  # most of what the head sees there, with any text before it
        seen = model.model(start).last_hidden_state[0, -1]  # (D,)
        model.lm_head.weight[answers] += 2 * seen / seen.norm()


def build_model_and_processor(seed: int, processor_class: type) -> tuple[Qwen2_5_VLForConditionalGeneration, Any]:
    """Build a Qwen2.5-VL and its processor; that of Qwen2-VL processes images in the same way."""
    tokenizer = train_judge_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    config = Qwen2_5_VLConfig(**CONFIGS["qwen2_5_vl"], **vision_token_ids(tokenizer))
    config.text_config.update(token_ids(tokenizer))
    with weights_of(seed):
        model = Qwen2_5_VLForConditionalGeneration(config)
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config.eos_token_id = ids
    model.generation_config.pad_token_id = ids[1]
    size = {"shortest_edge": 28 * 28, "longest_edge": MAX_PIXELS}
    image_processor = Qwen2VLImageProcessor(size=size)
    video_processor = Qwen2VLVideoProcessor(size=size)
    return model, processor_class(image_processor, tokenizer, video_processor, CHAT_TEMPLATE)


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


def vision_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the entries of a vision-language model's config that depend on its tokenizer."""
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()}


def train_judge_tokenizer() -> Qwen2Tokenizer:
    """Train a tokenizer with the special tokens of a vision-language model on the shipped prompts and questions."""
    # On the questions too, so that a question is not hundreds of bytes. Yes and No are frequent and become one token.
    # The paper's question: " Yes" and " No" without quotation marks in `criterion_question` would become tokens too
    criterion = (
        'Do images meet the following criteria? same colour Please answer "Yes" or "No" first, then provide detailed '
        "reasons."
    )
    questions = [theme_question("a cat"), criterion, edit_following_question("add a hat")]
    answers = ["Yes", "No", "Yes. The two images show the same.", "No. The two images differ."]
    tokenizer = train_tokenizer(Qwen2Tokenizer, [*questions * 20, *answers * 20], SPECIAL_TOKENS[1:], 2048)
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer
