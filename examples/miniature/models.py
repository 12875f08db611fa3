# SPDX-License-Identifier: Apache-2.0
"""The toy models of the planted world, which come with the repository."""

from pathlib import Path


WEIGHTS = Path(__file__).parent / "weights"


def toy_flux_path() -> Path:
    """
    Folder of the toy FLUX pipeline, for `FluxPipeline.from_pretrained`.

    It draws 2x2 sets of the planted world at 128, 64 and 32 pixels. It knows texts of one length: where it is called
    by hand, pass `max_sequence_length=pipeline.tokenizer_2.model_max_length`. Of the pairs of panels of a set whose
    prompt names the figure, nearly two in three show the same one at 128 and at 64 pixels, two in ten at 32; scenes
    are nearly always those that were asked for. Made by `pretraining/train_vae.py` and
    `pretraining/train_generator.py`.
    """
    return WEIGHTS / "flux"


def toy_clip_path() -> Path:
    """
    Folder of the toy CLIP, for `CLIPModel.from_pretrained`: trained on single panels and captions of their scene and
    colour.

    Made by `pretraining/train_clip.py`.
    """
    return WEIGHTS / "clip"


def toy_judge_path() -> Path:
    """
    Folder of the toy Qwen2.5-VL: it can describe panels and compare named properties of two of them, and has never
    been asked whether two images are consistent. Made by `pretraining/train_judge_base.py`.
    """
    return WEIGHTS / "qwen2.5-vl"
