# SPDX-License-Identifier: Apache-2.0
"""Build tiny FLUX pipelines."""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from .parts import CONFIGS, enlarge, save, weights_of
from .qwen2_5_vl import read_corpus, token_ids


MAX_TOKENS = 32


def build_tiny_flux(folder: str | Path, seed: int = 0) -> Path:
    """Build a FLUX pipeline: images are multiples of 4 pixels, and a prompt has at most 32 tokens."""
    return save(FluxPipeline(**_components(seed)), folder)


def build_tiny_flux_kontext(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a FLUX Kontext pipeline from the parts of [`build_tiny_flux`].

    The pipeline enlarges every source image to about a megapixel, so the VAE shrinks images sixteenfold: images are
    multiples of 32 pixels, and a source is about 1024 tokens. Some weights are larger, so that the source image
    changes pixels visibly. Pass `max_area=height * width` to the pipeline, which otherwise generates about a megapixel
    too.
    """
    components = _components(seed, num_halvings=4)
    enlarge(components["vae"], "encoder.conv_out.weight")
    enlarge(components["transformer"], "attn.to_v.weight", "attn.to_out.0.weight", "proj_out.weight")
    return save(FluxKontextPipeline(**components), folder)


def _components(seed: int, num_halvings: int = 1) -> dict:
    """Build the parts of both pipelines, by name."""
    with weights_of(seed):
        clip_tokenizer, t5_tokenizer = train_clip_and_t5_tokenizers()
        return {
            "tokenizer": clip_tokenizer,
            "tokenizer_2": t5_tokenizer,
            "text_encoder": CLIPTextModel(clip_text_config(clip_tokenizer, num_hidden_layers=1)),
            "text_encoder_2": T5EncoderModel(T5Config(vocab_size=len(t5_tokenizer), d_model=16, **CONFIGS["t5"])),
            "transformer": FluxTransformer2DModel(**CONFIGS["flux_transformer"]),
            "vae": build_vae(num_halvings=num_halvings),
            "scheduler": build_scheduler(),
        }


def clip_text_config(tokenizer: CLIPTokenizer, num_hidden_layers: int) -> CLIPTextConfig:
    """Build the config of a CLIP text encoder."""
    lengths = {"num_hidden_layers": num_hidden_layers, "max_position_embeddings": MAX_TOKENS}
    return CLIPTextConfig(**CONFIGS["clip_text"], **token_ids(tokenizer), **lengths)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Build a scheduler with dynamic shifting."""
    return FlowMatchEulerDiscreteScheduler(**CONFIGS["scheduler"])


def build_vae(
    scaling_factor: float = 0.3611, shift_factor: float = 0.1159, num_halvings: int = 1, latent_channels: int = 4
) -> AutoencoderKL:
    """Build the VAE of most pipelines; it halves the sides of images `num_halvings` times."""
    return AutoencoderKL(
        **CONFIGS["vae"],
        down_block_types=("DownEncoderBlock2D",) * (num_halvings + 1),
        up_block_types=("UpDecoderBlock2D",) * (num_halvings + 1),
        block_out_channels=(8,) * (num_halvings + 1),
        latent_channels=latent_channels,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
    )


def train_clip_and_t5_tokenizers() -> tuple[CLIPTokenizer, T5Tokenizer]:
    """Make a CLIP and a T5 tokenizer of the shipped prompts, for at most 32 tokens: the same in every call."""
    corpus = list(read_corpus())
    clip_tokenizer = train_clip_tokenizer(corpus, vocab_size=600, max_length=MAX_TOKENS)
    # The words that occur most often, and all characters; `tokenizers` sums its scores in an order that changes
    words = Counter("▁" + word for text in corpus for word in text.split())
    characters = Counter(character for word in words.elements() for character in word)
    tokens = dict.fromkeys(sorted(characters), 0.1)
    tokens |= dict(sorted(words.items(), key=lambda item: (-item[1], item[0]))[: 597 - len(tokens)])
    scores = [(token, math.log(count / words.total())) for token, count in tokens.items()]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scores]
    return clip_tokenizer, T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=MAX_TOKENS)


def train_clip_tokenizer(sentences: Iterable[str], vocab_size: int, max_length: int) -> CLIPTokenizer:
    """Train a tokenizer by byte-pair encoding: the same in every call, while `BpeTrainer` breaks ties at random."""
    counts = Counter(word for sentence in sentences for word in sentence.lower().split())
    # As in CLIP's vocabulary: every byte, every byte at a word's end, the merges, the two special tokens. CLIP would
    # read an unknown character as the end of the text.
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
            for index in range(len(parts) - 2, -1, -1):
                if (*parts[index : index + 2],) == best:
                    parts[index : index + 2] = ["".join(best)]
    vocab = {token: index for index, token in enumerate([*tokens, *special])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=max_length)
