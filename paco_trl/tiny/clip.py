# SPDX-License-Identifier: Apache-2.0
"""Build a tiny CLIP."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from .parts import CONFIGS, weights_of
from .qwen2_5_vl import token_ids


TEXT_LENGTH = 77  # as in every CLIP of OpenAI


def build_tiny_clip(folder: str | Path) -> Path:
    """
    Build a CLIP of about 60,000 weights, which are the same in every call, for images of 32 x 32.

    The weights are larger than CLIP's usual initial ones, with which all texts have nearly the same embedding.
    """
    tokenizer = train_clip_tokenizer(CONFIGS["clip_tokenizer"]["sentences"], vocab_size=600, max_length=TEXT_LENGTH)
    config = CLIPConfig(**CONFIGS["clip"])
    config.text_config.update(token_ids(tokenizer) | {"max_position_embeddings": TEXT_LENGTH})
    with weights_of(seed=0):
        CLIPModel(config).save_pretrained(folder)
    image_processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer).save_pretrained(folder)
    return Path(folder)


def train_clip_tokenizer(sentences: Iterable[str], vocab_size: int, max_length: int) -> CLIPTokenizer:
    """Train a tokenizer by byte-pair encoding: the same in every call, while `BpeTrainer` breaks ties at random."""
    counts = Counter(word for sentence in sentences for word in sentence.lower().split())
    # As in CLIP's vocabulary: every byte, every byte at a word's end, the merges, the two special tokens. CLIP would read
    # an unknown character as the end of the text.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*alphabet, *(byte + "</w>" for byte in alphabet)])
    special = ["<|startoftext|>", "<|endoftext|>"]
    splits = {word: [*word[:-1], f"{word[-1]}</w>"] for word in counts if word.isascii()}
    merges = []
    while len(tokens) < vocab_size - len(special):
        pairs: Counter = Counter()
        for word, parts in splits.items():
            for pair in zip(parts, parts[1:]):  # noqa: B905
                pairs[pair] += counts[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        tokens["".join(best)] = None
        for parts in splits.values():
            for place in range(len(parts) - 2, -1, -1):
                if (*parts[place : place + 2],) == best:
                    parts[place : place + 2] = ["".join(best)]
    vocab = {token: index for index, token in enumerate([*tokens, *special])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=max_length)
