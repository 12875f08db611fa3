# SPDX-License-Identifier: Apache-2.0
"""The tiny pipelines: whatever is passed to one reaches the pixels, and a seed fixes its weights."""

from collections.abc import Callable

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from paco_trl import tiny


# The fast tests of the families use the same pipelines
pytestmark = pytest.mark.slow


VISIBLE = 2 / 255  # mean change of a channel, of images in [0, 1]
RED, BLUE = Image.new("RGB", (64, 64), (255, 0, 0)), Image.new("RGB", (64, 64), (0, 0, 255))
OTHER_PROMPT = "a red house in the rain, many panels"

# Builder -> class, arguments of its plain call
PIPELINES = {
    "build_tiny_flux": ("FluxPipeline", {"max_sequence_length": 32}),
    "build_tiny_flux_kontext": (
        "FluxKontextPipeline",
        {
            "max_sequence_length": 32,
            "image": RED,
            "height": 64,
            "width": 64,
            "max_area": 64 * 64,
            "_auto_resize": False,
        },
    ),
    "build_tiny_stable_diffusion_3": ("StableDiffusion3Pipeline", {"max_sequence_length": 32, "guidance_scale": 4.0}),
    "build_tiny_flux2": ("Flux2Pipeline", {"max_sequence_length": 128, "image": RED}),
    "build_tiny_flux2_klein": ("Flux2KleinPipeline", {"max_sequence_length": 64, "image": RED, "guidance_scale": 4.0}),
    "build_tiny_z_image": ("ZImagePipeline", {"max_sequence_length": 64, "guidance_scale": 4.0}),
    "build_tiny_longcat_image": (
        "LongCatImagePipeline",
        {"guidance_scale": 4.0, "negative_prompt": "blue", "enable_prompt_rewrite": False},
    ),
    "build_tiny_ovis_image": ("OvisImagePipeline", {"guidance_scale": 8.0}),
    "build_tiny_qwen_image_21": (
        "QwenImage21Pipeline",
        {"image": RED, "output_resolution": 128, "true_cfg_scale": 4.0, "negative_prompt": " "},
    ),
}
NEW = [name for name in PIPELINES if name != "build_tiny_flux"]


def generate(pipeline: DiffusionPipeline, arguments: dict, **changes) -> torch.Tensor:
    """Image of a pipeline, from fixed noise."""
    call = {"prompt": "a cat", "height": 32, "width": 32, **arguments, **changes}
    generator = torch.Generator().manual_seed(1)
    return pipeline(**call, num_inference_steps=4, generator=generator, output_type="pt").images


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Callable[[str], DiffusionPipeline]:
    """Loads the pipeline of a builder, which is called once."""
    pipelines = {}

    def of(name: str) -> DiffusionPipeline:
        if name not in pipelines:
            folder = getattr(tiny, name)(tmp_path_factory.mktemp("models") / name)
            pipelines[name] = DiffusionPipeline.from_pretrained(folder)
            pipelines[name].set_progress_bar_config(disable=True)
        return pipelines[name]

    return of


@pytest.fixture(scope="module")
def changed_by(load) -> Callable[..., float]:
    """Mean change of the image of a builder's pipeline by other arguments."""

    def of(name: str, **changes) -> float:
        pipeline, arguments = load(name), PIPELINES[name][1]
        return (generate(pipeline, arguments, **changes) - generate(pipeline, arguments)).abs().mean().item()

    return of


@pytest.mark.parametrize("name", PIPELINES)
def test_class_size_and_contrast(load, name):
    pipeline = load(name)
    image = generate(pipeline, PIPELINES[name][1])
    factor, side = {"build_tiny_flux_kontext": (16, 64), "build_tiny_qwen_image_21": (16, 32)}.get(name, (2, 32))
    assert type(pipeline).__name__ == PIPELINES[name][0]
    assert pipeline.vae_scale_factor == factor
    assert image.shape == (1, 4 if name == "build_tiny_qwen_image_21" else 3, side, side)
    assert image.std() > 0.05


@pytest.mark.parametrize("name", NEW)
def test_same_arguments_give_the_same_image(changed_by, name):
    assert changed_by(name) == 0


@pytest.mark.parametrize("name", NEW)
def test_prompt_is_visible(changed_by, name):
    assert changed_by(name, prompt=OTHER_PROMPT) > VISIBLE


@pytest.mark.parametrize("name", NEW)
def test_guidance_scale_is_visible(changed_by, name):
    scale = "true_cfg_scale" if name == "build_tiny_qwen_image_21" else "guidance_scale"
    assert changed_by(name, **{scale: 1.0}) > VISIBLE


@pytest.mark.parametrize("name", ["build_tiny_stable_diffusion_3", "build_tiny_z_image"])
def test_negative_prompt_is_visible(changed_by, name):
    assert changed_by(name, negative_prompt=OTHER_PROMPT) > VISIBLE
    assert changed_by(name, negative_prompt="") == 0  # what both take where there is none


def test_true_guidance_of_kontext_is_visible(changed_by):
    assert changed_by("build_tiny_flux_kontext", true_cfg_scale=4.0, negative_prompt=OTHER_PROMPT) > VISIBLE
    assert changed_by("build_tiny_flux_kontext", negative_prompt=OTHER_PROMPT) == 0  # the scale is 1 by default


@pytest.mark.parametrize(
    "name", ["build_tiny_flux_kontext", "build_tiny_flux2", "build_tiny_flux2_klein", "build_tiny_qwen_image_21"]
)
def test_source_image_is_visible(changed_by, name):
    assert changed_by(name, image=BLUE) > VISIBLE
    assert changed_by(name, image=None) > VISIBLE
    assert changed_by(name, image=RED.copy()) == 0


def test_source_image_of_kontext_is_1024_tokens(load):
    lengths = []
    hook = load("build_tiny_flux_kontext").transformer.register_forward_hook(
        lambda _, inputs, output: lengths.append(output[0].shape[1])
    )
    image = generate(load("build_tiny_flux_kontext"), PIPELINES["build_tiny_flux_kontext"][1] | {"_auto_resize": True})
    hook.remove()
    assert lengths == [4 + 1024] * 4  # one token for each 32 x 32 pixels
    assert image.shape == (1, 3, 64, 64)


@pytest.mark.parametrize(
    "name", ["build_tiny_stable_diffusion_3", "build_tiny_flux2", "build_tiny_flux2_klein", "build_tiny_z_image"]
)
def test_defaults_of_the_pipeline_work(load, name):
    image = load(name)(prompt="a cat", height=64, width=64, num_inference_steps=1, output_type="pt").images
    assert image.shape == (1, 3, 64, 64)


def test_distilled_klein_ignores_the_guidance_scale(tmp_path):
    pipeline = DiffusionPipeline.from_pretrained(tiny.build_tiny_flux2_klein(tmp_path, is_distilled=True))
    pipeline.set_progress_bar_config(disable=True)
    arguments = PIPELINES["build_tiny_flux2_klein"][1]
    image = generate(pipeline, arguments)
    assert torch.equal(generate(pipeline, arguments, guidance_scale=1.0), image)
    assert not torch.equal(generate(pipeline, arguments, prompt=OTHER_PROMPT), image)


def test_prompt_of_flux2_follows_its_system_message(load):
    pipeline = load("build_tiny_flux2")
    seen = []
    handle = pipeline.text_encoder.register_forward_pre_hook(
        lambda _, __, arguments: seen.append(arguments["input_ids"]), with_kwargs=True
    )
    pipeline.encode_prompt("a cat", device="cpu", max_sequence_length=128)
    handle.remove()
    text = pipeline.tokenizer.tokenizer.decode(seen[0][0]).replace("<pad>", "")
    assert text == f"<s>[SYSTEM_PROMPT]{pipeline.system_message}[/SYSTEM_PROMPT][INST]a cat[/INST]"


def test_stable_diffusion_has_the_blocks_of_3_5(load):
    first, last = load("build_tiny_stable_diffusion_3").transformer.transformer_blocks
    assert first.attn2 is not None
    assert last.attn2 is None
    assert first.attn.norm_q is not None
    assert last.context_pre_only


@pytest.mark.parametrize("name", NEW)
def test_saved_pipeline_gives_the_same_image(load, tmp_path, name):
    pipeline, arguments = load(name), PIPELINES[name][1]
    pipeline.save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(generate(loaded, arguments), generate(pipeline, arguments))


@pytest.mark.parametrize("name", PIPELINES)
def test_seed_fixes_the_weights_and_leaves_the_random_state(load, tmp_path, name):
    state = torch.get_rng_state()
    again = DiffusionPipeline.from_pretrained(getattr(tiny, name)(tmp_path / "again"))
    assert torch.equal(torch.get_rng_state(), state)
    other = DiffusionPipeline.from_pretrained(getattr(tiny, name)(tmp_path / "other", seed=1))
    for part in ("transformer", "vae"):
        weights = getattr(load(name), part).state_dict()
        same, different = getattr(again, part).state_dict(), getattr(other, part).state_dict()
        assert all(torch.equal(weights[key], same[key]) for key in weights)
        assert any(not torch.equal(weights[key], different[key]) for key in weights)


@pytest.mark.parametrize("name", ["build_tiny_flux", "build_tiny_stable_diffusion_3"])
def test_the_same_files_in_every_call(tmp_path, name):
    """Also of the tokenizers, whose trainers break ties at random."""
    first, second = (getattr(tiny, name)(tmp_path / folder) for folder in ("first", "second"))
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len([file for file in files if file.name == "tokenizer.json"]) >= 2
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
