# SPDX-License-Identifier: Apache-2.0
"""Hybrid inference with diffusers alone: the adapter in the first steps, the base model in the rest."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from paco_trl.rollout import hybrid_inference


ROOT = Path(__file__).parent.parent
CONFIG = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_v", "to_out.0"])
STEPS = 5
SIGMAS = np.linspace(1.0, 1 / STEPS, STEPS).tolist()  # the default of both pipelines, before the scheduler shifts them
CALLS = {
    "flux": {"max_sequence_length": 32, "guidance_scale": 3.5},
    "qwen": {"negative_prompt": " ", "true_cfg_scale": 4.0},  # two calls of the transformer in a step
}


@pytest.fixture(scope="module")
def pipelines(folder_of):
    """The bare pipelines, and each with an adapter from diffusers and from PEFT, of the same weights."""
    found = {}
    for name, folder in (("flux", folder_of("flux")), ("qwen", folder_of("qwen_image"))):
        pipe = DiffusionPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        found[name, "bare"] = pipe
        for kind in ("diffusers", "peft"):
            torch.manual_seed(0)
            found[name, kind] = copy.deepcopy(pipe)
            transformer = found[name, kind].transformer
            if kind == "diffusers":
                transformer.add_adapter(CONFIG)
            else:
                found[name, kind].transformer = get_peft_model(transformer, CONFIG)
            found[name, kind].transformer.requires_grad_(False)  # as diffusers and PEFT load adapters
    return found


@pytest.fixture(
    params=[("flux", "diffusers"), ("flux", "peft"), ("qwen", "diffusers"), ("qwen", "peft")], ids="-".join
)
def case(request, pipelines):
    """A pipeline with an adapter, and the arguments of its call, of two prompts with two images each."""
    name, _ = request.param
    settings = {"height": 32, "width": 32, "num_inference_steps": STEPS, "output_type": "pt", **CALLS[name]}
    if name == "qwen":
        settings["negative_prompt"] = [" ", " "]
    return pipelines[request.param], pipelines[name, "bare"], settings


def draw(pipe, settings: dict, **changes) -> torch.Tensor:
    noise = [torch.Generator().manual_seed(seed) for seed in range(4)]
    prompts = ["a red fox", "a blue boat on the sea"]
    arguments = {"prompt": prompts, "num_images_per_prompt": 2, "generator": noise, **settings, **changes}
    return pipe(**arguments).images  # (4, 3, H, W)


def in_two_stages(pipe, bare, settings: dict, steps: int) -> torch.Tensor:
    """The first steps with the adapter; the rest in a pipeline that never had one, from the latents of the first."""
    latents = {}

    def keep(pipeline, step, timestep, callback_kwargs):
        latents[step] = callback_kwargs["latents"].clone()
        return callback_kwargs

    draw(pipe, settings, callback_on_step_end=keep)
    rest = {"sigmas": SIGMAS[steps:], "num_inference_steps": STEPS - steps, "latents": latents[steps - 1]}
    return draw(bare, settings, **rest)


def draw_hybrid(pipe, settings: dict, fraction: float) -> torch.Tensor:
    with hybrid_inference(pipe, fraction) as callback:
        return draw(pipe, settings, callback_on_step_end=callback)


class TestImages:
    def test_none_some_and_all_of_the_steps(self, case):
        pipe, bare, settings = case
        tuned, base = draw(pipe, settings), draw(bare, settings)
        assert not torch.equal(tuned, base)
        assert torch.equal(draw_hybrid(pipe, settings, 1.0), tuned)
        assert torch.equal(draw_hybrid(pipe, settings, 0.0), base)
        for fraction, steps in ((0.2, 1), (0.6, 3), (0.7, 4)):  # 3.5 rounds to 4
            image, expected = draw_hybrid(pipe, settings, fraction), in_two_stages(pipe, bare, settings, steps)
            assert torch.equal(image, expected), steps
            assert not torch.equal(image, tuned) and not torch.equal(image, base)
        assert not torch.equal(draw_hybrid(pipe, settings, 0.2), draw_hybrid(pipe, settings, 0.6))
        assert torch.equal(draw(pipe, settings), tuned)


class TestState:
    def test_several_calls_in_one_context_of_which_some_fail(self, case):
        pipe, _, settings = case
        expected = draw_hybrid(pipe, settings, 0.6)
        with hybrid_inference(pipe, 0.6) as callback:
            # Other numbers of steps, each of which has its own switch
            other = draw(pipe, settings, callback_on_step_end=callback, num_inference_steps=3)
            assert not torch.equal(other, expected)
            for last, is_on in ((1, True), (3, False)):

                def stop(pipeline, step, timestep, callback_kwargs, last=last):
                    callback(pipeline, step, timestep, callback_kwargs)
                    if step == last:
                        raise KeyboardInterrupt
                    return callback_kwargs

                with pytest.raises(KeyboardInterrupt):
                    draw(pipe, settings, callback_on_step_end=stop)
                if is_on:
                    assert torch.equal(draw(pipe, settings, callback_on_step_end=callback), expected)
            with pytest.raises(RuntimeError, match="began without the adapter.*a context for each"):
                draw(pipe, settings, callback_on_step_end=callback)
        assert torch.equal(draw_hybrid(pipe, settings, 0.6), expected)

    def test_a_pipeline_that_is_interrupted_skips_its_last_steps(self, case):
        pipe, _, settings = case
        expected = draw_hybrid(pipe, settings, 0.6)
        skipped = []
        with hybrid_inference(pipe, 0.6) as callback:

            def interrupt(pipeline, step, timestep, callback_kwargs):
                pipeline._interrupt = step == 3
                skipped.append(step)
                return callback(pipeline, step, timestep, callback_kwargs)

            draw(pipe, settings, callback_on_step_end=interrupt)
            assert skipped == [0, 1, 2, 3]  # of five
            assert torch.equal(draw(pipe, settings, callback_on_step_end=callback), expected)

    def test_flags_are_restored(self, case):
        pipe, _, settings = case
        parameters = dict(pipe.transformer.named_parameters())
        trained = next(name for name in parameters if "lora_A" in name)
        parameters[trained].requires_grad_(True)
        try:
            draw_hybrid(pipe, settings, 0.6)
            assert [name for name, parameter in parameters.items() if parameter.requires_grad] == [trained]
        finally:
            parameters[trained].requires_grad_(False)


class TestRefusals:
    def refused(self, pipe, fraction: float, message: str) -> None:
        with pytest.raises(ValueError, match=message), hybrid_inference(pipe, fraction):
            pytest.fail("the context was entered")

    def test_without_a_base_model(self, pipelines):
        bare = pipelines["flux", "bare"]
        self.refused(bare, 0.8, "transformer of this FluxPipeline has no adapter")
        with hybrid_inference(bare, 1.0) as callback:
            assert callback is None

    @pytest.mark.parametrize("kind", ["diffusers", "peft"])
    def test_an_adapter_that_is_fused_or_off(self, pipelines, kind):
        pipe = copy.deepcopy(pipelines["flux", kind])
        (
            pipe.transformer.disable_adapters
            if kind == "diffusers"
            else pipe.transformer.base_model.disable_adapter_layers
        )()
        self.refused(pipe, 0.8, "`enable_lora`")
        pipe = copy.deepcopy(pipelines["flux", kind])
        (pipe.transformer.fuse_lora if kind == "diffusers" else pipe.transformer.merge_adapter)()
        self.refused(pipe, 0.8, "`unfuse_lora`")

    @pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
    def test_a_fraction_that_is_none(self, pipelines, fraction):
        self.refused(pipelines["flux", "peft"], fraction, f"`adapter_fraction` is {fraction}; it must be from 0 to 1")


def test_the_example_of_the_documentation(pipelines):
    text = (ROOT / "docs" / "use_and_share.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n([^`]*hybrid_inference[^`]*)^```$", text, flags=re.M)
    pipe, states = copy.deepcopy(pipelines["flux", "diffusers"]), []
    layer = next(module for module in pipe.transformer.modules() if isinstance(module, LoraLayer))

    class Small(type(pipe)):
        """The pipeline of the page, with images that take no time."""

        def __call__(self, *args, callback_on_step_end, **kwargs):
            def watch(*inputs):
                states.append(layer.disable_adapters)  # in this step
                return callback_on_step_end(*inputs)

            size = {"height": 32, "width": 32, "num_inference_steps": 5, **CALLS["flux"]}
            return super().__call__(*args, callback_on_step_end=watch, **kwargs, **size)

    pipe.__class__ = Small
    exec(code, namespace := {"pipe": pipe})
    assert namespace["image"].size == (32, 32)
    assert states == [False] * 4 + [True]
    assert not layer.disable_adapters
