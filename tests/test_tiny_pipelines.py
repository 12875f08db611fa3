# SPDX-License-Identifier: Apache-2.0
"""The tiny pipelines' weights and tokenizers. What reaches their pixels is in `test_families.py`."""

import pytest
import torch
from diffusers import DiffusionPipeline

import tiny_models


# The fast tests of the families use the same pipelines
pytestmark = pytest.mark.slow

PIPELINES = [
    "flux", "flux2", "flux2_klein", "flux_kontext", "krea2", "longcat_image", "longcat_image_edit", "ovis_image",
    "qwen_image", "qwen_image_21", "qwen_image_edit", "qwen_image_edit_plus", "stable_diffusion_3", "z_image",
]  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_the_seed_fixes_all_files_and_leaves_the_random_state(tmp_path, name):
    """Also of the tokenizers, whose trainers break ties at random."""
    build, state = getattr(tiny_models, f"build_tiny_{name}"), torch.get_rng_state()
    first, again, other = build(tmp_path / "a"), build(tmp_path / "b"), build(tmp_path / "c", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    files = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    assert any(path.name == "tokenizer.json" for path in files)
    assert all((first / path).read_bytes() == (again / path).read_bytes() for path in files)
    weights = [path for path in files if path.suffix == ".safetensors" and path.parts[0] in ("transformer", "vae")]
    assert len(weights) == 2
    assert all((first / path).read_bytes() != (other / path).read_bytes() for path in weights)


@pytest.mark.parametrize("name", ["stable_diffusion_3", "flux2", "flux2_klein", "krea2", "z_image"])
def test_defaults_of_the_pipeline_work(tmp_path, name):
    pipeline = DiffusionPipeline.from_pretrained(getattr(tiny_models, f"build_tiny_{name}")(tmp_path))
    image = pipeline(prompt="a cat", height=64, width=64, num_inference_steps=1, output_type="pt").images
    assert image.shape == (1, 3, 64, 64)


def test_stable_diffusion_has_the_blocks_of_3_5(tmp_path):
    pipeline = DiffusionPipeline.from_pretrained(tiny_models.build_tiny_stable_diffusion_3(tmp_path))
    first, last = pipeline.transformer.transformer_blocks
    assert first.attn2 is not None and first.attn.norm_q is not None
    assert last.attn2 is None and last.context_pre_only
