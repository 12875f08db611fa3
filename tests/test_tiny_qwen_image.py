# SPDX-License-Identifier: Apache-2.0
"""The tiny Qwen-Image pipelines: prompt, source images and guidance show in the pixels, and a folder gives them back."""

import inspect

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from paco_trl.tiny import build_tiny_qwen_image, build_tiny_qwen_image_edit, build_tiny_qwen_image_edit_plus
from paco_trl.tiny.qwen_image import _build_parts


# The fast tests of the families use the same pipelines
pytestmark = pytest.mark.slow


PROMPT, OTHER_PROMPT = "a cat in the rain", "four panels of a red house at night"
RED, BLUE = (Image.new("RGB", (64, 64), color) for color in ((220, 30, 30), (30, 30, 220)))
VISIBLE = 1.0  # mean difference of two images, of 255
CASES = {
    "image": (build_tiny_qwen_image, QwenImagePipeline, 4),
    "edit": (build_tiny_qwen_image_edit, QwenImageEditPipeline, 16),
    "edit-plus": (build_tiny_qwen_image_edit_plus, QwenImageEditPlusPipeline, 16),
}


def load(folder):
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline, prompt=PROMPT, source=RED, true_cfg_scale=1.0, **kwargs):
    """One image of 32 x 32 pixels in 2 steps, from the same noise each time."""
    if not isinstance(pipeline, QwenImagePipeline):
        kwargs["image"] = source
    output = pipeline(
        prompt=prompt,
        negative_prompt=" " if true_cfg_scale > 1 else None,
        true_cfg_scale=true_cfg_scale,
        height=32,
        width=32,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **kwargs,
    )
    return 255 * output.images[0]


def distance(first, second):
    return np.abs(first - second).mean()


@pytest.fixture(scope="module", autouse=True)
def small_sources():
    """Source images enlarged to 128 x 128 pixels instead of 1024 x 1024, which takes seconds to encode."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
            plain = module.calculate_dimensions
            patch.setattr(module, "calculate_dimensions", lambda area, ratio, plain=plain: plain(area // 64, ratio))
        yield


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def pipeline(case, tmp_path_factory):
    return load(case[0](tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def image(pipeline):
    """What the other images are compared with."""
    return generate(pipeline)


def test_the_real_classes_at_tiny_size(case, pipeline):
    _, pipeline_class, multiple = case
    assert type(pipeline) is pipeline_class
    assert 2 * pipeline.vae_scale_factor == multiple
    assert len(pipeline.transformer.transformer_blocks) == 2
    assert sum(weight.numel() for weight in pipeline.transformer.parameters()) < 200_000
    config = pipeline.scheduler.config
    assert config.use_dynamic_shifting
    assert (config.time_shift_type, config.shift_terminal) == ("exponential", 0.02)
    assert (config.base_shift, config.max_shift) == (0.5, 0.9)
    assert (config.base_image_seq_len, config.max_image_seq_len) == (256, 8192)


def test_the_image_has_the_asked_size_and_is_not_flat(image):
    assert image.shape == (32, 32, 3)
    assert image.std() > 10
    assert np.mean((image == 0) | (image == 255)) < 0.5  # most of it is not cut off


def test_the_template_is_longer_than_what_is_dropped_of_it(pipeline):
    # Otherwise the first words of the prompt would be dropped with it
    before = pipeline.prompt_template_encode.split("{}")[0]
    assert len(pipeline.tokenizer(before).input_ids) >= pipeline.prompt_template_encode_start_idx


def test_the_prompt_shows(pipeline, image):
    assert distance(generate(pipeline, prompt=OTHER_PROMPT), image) > VISIBLE


def test_guidance_shows(pipeline, image):
    assert distance(generate(pipeline, true_cfg_scale=4.0), image) > VISIBLE


@pytest.mark.parametrize("case", ["edit", "edit-plus"], indirect=True)
def test_the_source_image_shows(pipeline, image):
    assert distance(generate(pipeline, source=BLUE), image) > VISIBLE


@pytest.mark.parametrize("case", ["edit-plus"], indirect=True)
def test_a_second_source_image_shows(pipeline, image):
    assert distance(generate(pipeline, source=[RED, BLUE]), image) > VISIBLE


@pytest.mark.parametrize("case", ["edit", "edit-plus"], indirect=True)
@pytest.mark.parametrize(("area", "tokens"), [(128**2, 64), (1024**2, 4096)])
def test_a_source_is_one_token_for_16_x_16_pixels(pipeline, monkeypatch, area, tokens):
    module = inspect.getmodule(type(pipeline))
    plain = module.calculate_dimensions  # of `small_sources`
    monkeypatch.setattr(module, "calculate_dimensions", lambda _, ratio: plain(64 * area, ratio))
    lengths = []
    hook = pipeline.transformer.register_forward_hook(lambda _, inputs, output: lengths.append(output[0].shape[1]))
    generate(pipeline)
    hook.remove()
    assert lengths == [4 + tokens] * 2  # two steps; the image itself is four tokens


def test_saved_and_loaded_it_generates_the_same_image(pipeline, image, tmp_path):
    pipeline.save_pretrained(tmp_path)
    assert distance(generate(load(tmp_path)), image) == 0


@pytest.mark.parametrize("num_halvings", [1, 3])
def test_the_seed_fixes_the_weights(num_halvings):
    torch.manual_seed(123)
    random_state = torch.get_rng_state()
    first, _ = _build_parts(num_halvings, seed=0)
    again, _ = _build_parts(num_halvings, seed=0)
    other, _ = _build_parts(num_halvings, seed=1)
    assert torch.equal(torch.get_rng_state(), random_state)
    for part in ("transformer", "vae"):
        weights = [torch.cat([w.flatten() for w in parts[part].parameters()]) for parts in (first, again, other)]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])
