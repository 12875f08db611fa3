# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Krea 2 pipeline."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from transformers import Qwen3VLConfig, Qwen3VLModel

from paco_trl.tiny.parts import enlarge, save, weights_of
from paco_trl.tiny.qwen2_5_vl import token_ids, train_judge_tokenizer, vision_token_ids

from .parts import CONFIGS
from .qwen_image import sample_weights


def build_tiny_krea2(folder: str | Path, seed: int = 0, is_distilled: bool = False) -> Path:
    """
    Build a Krea 2 pipeline.

    The text encoder is a Qwen3-VL, of which two layers are used. Images are multiples of 4 pixels.
    """
    tokenizer = train_judge_tokenizer()
    config = Qwen3VLConfig(**CONFIGS["qwen3_vl"], **vision_token_ids(tokenizer))
    config.text_config.update(token_ids(tokenizer))
    with weights_of(seed):
        text_encoder = Qwen3VLModel(config)
        transformer = Krea2Transformer2DModel(**CONFIGS["krea2_transformer"])
        vae = AutoencoderKLQwenImage(**CONFIGS["qwen_image_vae"], dim_mult=[1, 2], temperal_downsample=[False])
        sample_weights(transformer)
        sample_weights(vae, gain=3**0.5)  # only one of a kernel's three time steps sees an image
        for name, parameter in transformer.named_parameters():
            if name.endswith("scale_shift_table"):  # zero before training
                torch.nn.init.normal_(parameter, std=0.5)
    enlarge(transformer, "attn.to_v.weight")
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=6400
    )
    pipeline = Krea2Pipeline(
        scheduler, vae, text_encoder, tokenizer, transformer, text_encoder_select_layers=(1, 2), is_distilled=is_distilled
    )  # fmt: skip
    return save(pipeline, folder)
