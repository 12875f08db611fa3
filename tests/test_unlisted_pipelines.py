# SPDX-License-Identifier: Apache-2.0
"""Pipelines of diffusers without a family class: images generated and trained with defaults, or refused."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    ChromaPipeline,
    ChromaTransformer2DModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
)
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

import test_families
from paco_trl.rollout import SDESettings, get_family, keyed_generator
from paco_trl.rollout.families import FluxFamily, UnlistedFamily
from paco_trl.tiny.flux import build_vae, enlarge, train_clip_and_t5_tokenizers
from testing_utils import count_images


NUM_STEPS, SIZE = 4, 32
KEY = (42, 3, 0, 0, 0)
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}

pytestmark = pytest.mark.filterwarnings("ignore:There is no family class")


@pytest.fixture(scope="module")
def tokenizer():
    return train_clip_and_t5_tokenizers()[1]


def with_common_parts(tokenizer, **components):
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": build_vae(scaling_factor=0.3611, shift_factor=0.1159),
        "tokenizer": tokenizer,
        **components,
    }


def build_chroma(tokenizer):
    """One call a step; with guidance two. Its `encode_prompt` returns position ids without batch dimension, and None."""
    transformer = ChromaTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 4, 8), approximator_num_channels=16, approximator_hidden_dim=16,
        approximator_layers=1,
    )  # fmt: skip
    enlarge(transformer, "attn.to_v.weight", "attn.to_out.0.weight", "proj_out.weight", "context_embedder.weight")
    text_encoder = T5EncoderModel(T5Config(vocab_size=len(tokenizer), **T5))
    return ChromaPipeline(**with_common_parts(tokenizer, text_encoder=text_encoder, transformer=transformer))


def build_aura_flow(tokenizer):
    """One call a step; with guidance one of a doubled batch."""
    transformer = AuraFlowTransformer2DModel(
        sample_size=16, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=32, out_channels=4,
        pos_embed_max_size=256,
    )  # fmt: skip
    layers = ("to_v.weight", "add_v_proj.weight", "to_out.0.weight", "norm1.linear.weight", "context_embedder.weight")
    enlarge(transformer, *layers)
    enlarge(transformer, *layers)
    text_encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **T5))
    return AuraFlowPipeline(**with_common_parts(tokenizer, text_encoder=text_encoder, transformer=transformer))


BUILDERS = {"chroma": build_chroma, "aura_flow": build_aura_flow}


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """The pipelines, saved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        folders = {name: str(tmp_path_factory.mktemp("unlisted") / name) for name in BUILDERS}
        for name, build in BUILDERS.items():
            build(tokenizer).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def built(folders):
    return {name: DiffusionPipeline.from_pretrained(folder) for name, folder in folders.items()}


def build_policy(pipeline, guidance_scale=1.0):
    policy = test_families.build_policy(pipeline.name_or_path)
    assert policy.family.resolve_negative_prompt(policy.pipeline, guidance_scale, None) is None
    return policy


def encode(policy, prompt):
    with torch.no_grad():
        return policy.family.encode_prompt(policy.pipeline, prompt, "cpu")


def generate(policy, arguments, noise_level, guidance_scale=1.0):
    return policy.generate(arguments, SIZE, SIZE, NUM_STEPS, guidance_scale, [KEY], SDESettings((1, 2), noise_level))


def generate_plainly(pipeline, prompt, **arguments):
    generator = [keyed_generator(*KEY, 0)]
    arguments = {"guidance_scale": 1.0, **arguments}
    image = pipeline(
        prompt, height=SIZE, width=SIZE, num_inference_steps=NUM_STEPS, generator=generator, **arguments
    ).images[0]
    return np.asarray(image, dtype=np.int16)


@pytest.mark.parametrize("name", ["chroma", "aura_flow"])
class TestGeneration:
    def test_without_noise_it_is_the_pipelines_own_image(self, built, prompts, name):
        policy, texts = build_policy(built[name]), ["a red fox", prompts["prompt"][0]]
        encoded = [encode(policy, text) for text in texts]
        own = copy.deepcopy(built[name])
        own.transformer = get_peft_model(own.transformer, copy.deepcopy(policy.model.peft_config["default"]))
        own.transformer.load_state_dict(policy.model.state_dict())
        generated = [np.asarray(generate(policy, each, noise_level=0.0)[0][0], dtype=np.int16) for each in encoded]
        plain = [generate_plainly(own, text) for text in texts]
        assert np.abs(plain[0] - plain[1]).mean() > 0.1  # the prompt matters
        assert np.array_equal(generated[0], plain[0]) and np.array_equal(generated[1], plain[1])

    def test_the_text_encoder_runs_once_for_a_prompt(self, built, name):
        policy = build_policy(built[name])
        encoder_calls = count_images(policy.pipeline.text_encoder)
        transformer_calls = count_images(policy.model)
        state = torch.get_rng_state()
        encoded = encode(policy, "a red fox")
        assert len(encoder_calls) == 1 and len(transformer_calls) == 0
        assert torch.equal(torch.get_rng_state(), state)
        for _ in range(2):
            generate(policy, encoded, noise_level=0.7)
        assert len(encoder_calls) == 1 and len(transformer_calls) == 2 * NUM_STEPS
        # What was put in the place of its method is gone
        generate_plainly(policy.pipeline, "a red fox")
        assert len(encoder_calls) == 2
        assert "encode_prompt" not in vars(policy.pipeline)

    def test_defaults(self, built, name):
        with pytest.warns(UserWarning, match=r"no family class for \w+: its transformer's output is taken"):
            family = get_family(built[name])
        assert isinstance(family, UnlistedFamily) and family.max_batch_size == 1 and family.max_source_images == 0
        assert family.text_encoders == ("text_encoder",) and family.size_multiple(built[name]) == 4


class TestEncoding:
    def test_a_pipeline_that_does_not_use_its_method(self, built):
        class OtherwisePipeline(ChromaPipeline):
            def __call__(self, prompt, height, width, num_inference_steps, generator):
                return self.transformer()

        family = get_family(OtherwisePipeline(**built["chroma"].components))
        family.resolve_negative_prompt(built["chroma"], 1.0, None)
        with pytest.raises(ValueError, match="does not use its `encode_prompt`"):
            family.encode_prompt(OtherwisePipeline(**built["chroma"].components), "a red fox", "cpu")

    def test_guidance_that_the_call_does_not_take(self, built):
        class PlainPipeline(ChromaPipeline):
            def __call__(self, prompt, height, width, num_inference_steps, generator):
                pass

        pipeline = PlainPipeline(**built["chroma"].components)
        family = get_family(pipeline)
        assert family.call_arguments(32, 48, 1.0, []) == {"height": 32, "width": 48}
        assert family.resolve_negative_prompt(pipeline, 1.0, None) is None
        for guidance_scale, negative_prompt in ((3.5, None), (1.0, "ugly")):
            with pytest.raises(ValueError, match="no family class for PlainPipeline"):
                family.resolve_negative_prompt(pipeline, guidance_scale, negative_prompt)


class TestRefusedAtTheFirstRollout:
    @pytest.mark.parametrize(
        ("name", "seen"), [("chroma", r"\[\(1, 64, 16\), \(1, 64, 16\)\]"), ("aura_flow", r"\[\(2, 4, 16, 16\)\]")]
    )
    def test_what_was_seen_and_what_a_class_would_say(self, built, name, seen):
        policy = build_policy(built[name], 3.5)
        encoded = encode(policy, "a red fox")
        with pytest.raises((ValueError, RuntimeError), match=f"{seen}.*`guidance_scale` = 3.5"):
            generate(policy, encoded, 0.7, 3.5)


class TestRefusedByTheClass:
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("ChromaInpaintPipeline", "its call takes `mask_image`, its call takes `strength`"),
            ("WanImageToVideoPipeline", "its call takes `image`.*`num_frames`"),
            ("VisualClozePipeline", "it has no `encode_prompt`, it has no `prompt`"),
        ],
    )
    def test_by_its_name(self, name, reason):
        with pytest.raises(ValueError, match=rf"no family class for {name}.*{reason}"):
            get_family(name)

    def test_a_name_is_only_checked(self, recwarn):
        assert isinstance(get_family("ChromaPipeline"), UnlistedFamily)
        assert isinstance(get_family("PipelineOfARepositorysOwn"), UnlistedFamily)
        assert type(get_family("FluxPipeline")) is FluxFamily
        assert not [each for each in recwarn if "family class" in str(each.message)]


class TestTraining:
    # With activation checkpointing diffusers loses the mask of Chroma's single-stream blocks, and the ratio is not 1
    @pytest.mark.parametrize(("name", "gradient_checkpointing"), [("chroma", False), ("aura_flow", True)])
    def test_it_trains_and_exports(self, make_trainer, folders, prompts, tmp_path, name, gradient_checkpointing):
        model = folders[name]
        if name == "aura_flow":
            model = DiffusionPipeline.from_pretrained(Path(model))
            assert isinstance(model.name_or_path, Path)  # which JSON cannot hold
        settings = {
            "per_device_train_batch_size": 1, "guidance_scale": 1.0, "num_generations": 2, "height": 32, "width": 32,
            "num_prompts_per_generation": 2, "max_steps": 4, "learning_rate": 0.2, "epsilon": 0.1,
        }  # fmt: skip
        adapter = LoraConfig(r=4, lora_alpha=32, init_lora_weights="gaussian")
        trainer = make_trainer(
            model=model, train_dataset=prompts.select(range(2)), peft_config=adapter,
            gradient_checkpointing=gradient_checkpointing, **settings,
        )  # fmt: skip
        encoder_calls = count_images(trainer.pipeline.text_encoder)
        transformer_calls = count_images(trainer.model)
        trainer.train()
        assert len(encoder_calls) == 2  # two rounds of the same two prompts
        assert len(transformer_calls) > 2 * 4 * NUM_STEPS  # both rounds were generated
        history = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert [entry.get("ratio_deviation_on_policy/step_1") for entry in history] == [0, None, 0, None]
        assert history[0]["grad_norm"] > 0

        trainer.save_model(str(tmp_path / "adapter"))
        saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert saved["base_model_name_or_path"] == str(folders[name])
        base, by_diffusers, by_peft = (DiffusionPipeline.from_pretrained(folders[name]) for _ in range(3))
        by_diffusers.load_lora_weights(tmp_path / "adapter")
        by_peft.transformer = PeftModel.from_pretrained(by_peft.transformer, tmp_path / "adapter")
        images = [generate_plainly(pipeline, "a red fox") for pipeline in (base, by_diffusers, by_peft)]
        assert np.abs(images[1] - images[0]).mean() > 0.5  # the adapter does something
        assert np.array_equal(images[1], images[2])
