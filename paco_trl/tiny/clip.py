# SPDX-License-Identifier: Apache-2.0
"""Build a tiny CLIP."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from .parts import CONFIGS, weights_of
from .qwen2_5_vl import token_ids


TEXT_LENGTH = 77  # as in every CLIP of OpenAI
SENTENCES = (
    "a photo of a cat that wakes up in the morning",
    "a drawing of a dog that runs in the park",
    "a red house near the sea at night",
    "a blue car on the road in the rain",
    "the same girl with a green hat reads a book",
    "the panels show one character in different places",
)


def build_tiny_clip(folder: str | Path) -> Path:
    """
    Build a CLIP of about 60,000 weights, which are the same in every call, for images of 32 x 32.

    The weights are larger than CLIP's usual initial ones, with which all texts have nearly the same embedding.
    """
    tokenizer = _train_tokenizer()
    config = CLIPConfig(**CONFIGS["clip"])
    config.text_config.update(token_ids(tokenizer) | {"max_position_embeddings": TEXT_LENGTH})
    with weights_of(seed=0):
        CLIPModel(config).save_pretrained(folder)
    image_processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer).save_pretrained(folder)
    return Path(folder)


def _train_tokenizer() -> CLIPTokenizer:
    backend = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(vocab_size=200, end_of_word_suffix="</w>", show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    merges = [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]

    # As in CLIP's vocabulary: every byte, every byte at a word's end, the merges, the two special tokens. CLIP would read
    # an unknown character as the end of the text.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(byte + "</w>" for byte in alphabet), *(first + second for first, second in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=merges, model_max_length=TEXT_LENGTH
    )
