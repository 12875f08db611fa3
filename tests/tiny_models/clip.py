# SPDX-License-Identifier: Apache-2.0
"""Build a tiny CLIP."""

from pathlib import Path

from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from paco_trl.tiny.flux import train_clip_tokenizer
from paco_trl.tiny.parts import weights_of
from paco_trl.tiny.qwen2_5_vl import token_ids

from .parts import CONFIGS


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
