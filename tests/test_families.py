# SPDX-License-Identifier: Apache-2.0
"""Every family class against diffusers' own pipeline, on tiny models with a LoRA that is not the identity."""

import copy
import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from diffusers import DiffusionPipeline, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image

from paco_trl.data.image_sets import complete_image_sets
from paco_trl.rollout import (
    FAMILIES,
    EncodedImage,
    Family,
    RecordingPipeline,
    SDESettings,
    cast_floating_inputs,
    compute_log_prob,
    get_family,
    keyed_generator,
    predict,
)
from paco_trl.rollout.adapters import SavedAdapter, load_transformer_adapter
from paco_trl.rollout.encoder import PromptEncoder
from paco_trl.rollout.families import flux2, longcat_image, qwen_image, z_image
from paco_trl.rollout.loading import load_pipeline
from paco_trl.rollout.policy import as_float32
from paco_trl.rollout.policy_building import prepare_transformer
from paco_trl.rollout.prompt_rows import PromptRows
from paco_trl.utils.images import to_rgb
from testing_utils import LORA, fetch


PROMPT, OTHER_PROMPT, NEGATIVE = "a cat in the morning", "a red house in the rain, many panels", "blue, at night"
NUM_STEPS, SDE = 4, SDESettings((1, 2), 0.7)
KEYS = [(42, 3, 0, 0, 0), (42, 3, 0, 0, 1)]


def stripes(width: int, height: int, color: tuple[int, int, int]) -> Image.Image:
    """An image that looks different when it is resized, cropped or turned in another way."""
    y, x = np.mgrid[:height, :width]
    wave = 127 + 100 * np.sin(x / 5 + y * y / (7 * height)) + 20 * np.cos(y / 3)
    return Image.fromarray((wave[..., None] * np.array(color) / 255).clip(0, 255).astype(np.uint8))


SQUARE = stripes(64, 64, (255, 120, 40))
RED, BLUE, GREEN = stripes(72, 64, (255, 60, 40)), stripes(64, 80, (40, 60, 255)), stripes(90, 70, (60, 220, 80))


@dataclass(frozen=True)
class Case:
    """A pipeline and how it is used."""

    builder: str
    pipeline: str
    guidance_scale: float
    negative_prompt: str | None = None
    images: tuple[Image.Image, ...] = ()
    plain: dict = field(default_factory=dict)  # what a user passes besides prompt, size, steps and generators
    size: int = 32
    scale: float = 1.0  # of source images; the plain pipeline is called with the same area
    guide: Callable | None = None  # the rule of true CFG, written again
    split: Callable | None = None  # both predictions from the outputs of a step, written again
    options: dict = field(default_factory=dict)  # of the builder

    @property
    def is_guided(self) -> bool:
        return self.guide is not None

    @property
    def calls(self) -> int:
        """Calls of the transformer in a step."""
        return 2 if self.split in (two_calls, two_calls_at_the_end) else 1


def usual(conditional, unconditional, scale):
    return unconditional + scale * (conditional - unconditional)


def rescaled(conditional, unconditional, scale):
    combined = usual(conditional, unconditional, scale)
    return combined * conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)


def shortened(conditional, unconditional, scale):
    combined = usual(conditional, unconditional, scale)
    return combined * (conditional.norm(dim=-1, keepdim=True) / (combined.norm(dim=-1, keepdim=True) + 1e-8)).clamp(
        max=1
    )


def from_conditional(conditional, unconditional, scale):
    return conditional + scale * (conditional - unconditional)


def two_calls(outputs, sample):
    return [output[:, : sample.shape[1]] for output in outputs]


def two_calls_at_the_end(outputs, sample):
    return [output[:, output.shape[1] - sample.shape[1] :] for output in outputs]


def doubled(outputs, sample):
    return outputs[0][len(sample) :], outputs[0][: len(sample)]


def doubled_list(outputs, sample):
    velocity = -torch.stack(list(outputs[0]))[:, :, 0]
    return velocity[: len(sample)], velocity[len(sample) :]


def case(
    builder: str, pipeline: str, guidance_scale: float, negative=None, images=(), guide=None, split=None,
    argument="guidance_scale", user=(), **settings,
) -> Case:  # fmt: skip
    """A case whose user passes the same guidance by `argument`, negative prompt and images, and `user`."""
    plain = {argument: guidance_scale, **({} if negative is None else {"negative_prompt": negative}), **dict(user)}
    if images:
        plain["image"] = images[0] if len(images) == 1 else list(images)
    settings |= {"guide": guide, "split": split}
    return Case(builder, pipeline, guidance_scale, negative, images, plain, **settings)


sd3 = functools.partial(case, "stable_diffusion_3", "StableDiffusion3Pipeline")
kontext = functools.partial(
    case, "flux_kontext", "FluxKontextPipeline", 2.5, size=64, user={"max_area": 64 * 64, "max_sequence_length": 32}
)
klein = functools.partial(case, "flux2_klein", "Flux2KleinPipeline")
qwen = functools.partial(case, argument="true_cfg_scale")
longcat = functools.partial(case, "longcat_image", "LongCatImagePipeline", user={"enable_prompt_rewrite": False})
qwen_21 = functools.partial(
    case, "qwen_image_21", "QwenImage21Pipeline", argument="true_cfg_scale", user={"use_kv_cache": False}, size=64
)
# fmt: off
CASES = {
    "flux": case("flux", "FluxPipeline", 3.5, user={"max_sequence_length": 32}),
    "kontext": kontext(images=(RED,)),
    "kontext, text only": kontext(),
    "sd3": sd3(4.0, NEGATIVE, guide=usual, split=doubled),
    "sd3, no negative prompt": sd3(4.0, guide=usual, split=doubled),
    "sd3, unguided": sd3(1.0),
    "flux2": case("flux2", "Flux2Pipeline", 2.5),
    "flux2, editing": case("flux2", "Flux2Pipeline", 2.5, images=(RED, BLUE)),
    "klein": klein(4.0, guide=usual, split=two_calls),
    "klein, editing": klein(4.0, images=(RED,), guide=usual, split=two_calls),
    "klein, distilled": klein(1.0, options={"is_distilled": True}),
    "krea-2": case("krea2", "Krea2Pipeline", 3.0, NEGATIVE, guide=from_conditional, split=two_calls),
    "krea-2, no negative prompt": case("krea2", "Krea2Pipeline", 0.5, guide=from_conditional, split=two_calls),
    "krea-2, turbo": case("krea2", "Krea2Pipeline", 0.0, options={"is_distilled": True}),
    "z-image": case("z_image", "ZImagePipeline", 3.0, NEGATIVE, guide=from_conditional, split=doubled_list),
    "z-image, turbo": case("z_image", "ZImagePipeline", 0.0),
    "qwen": qwen("qwen_image", "QwenImagePipeline", 4.0, NEGATIVE, guide=rescaled, split=two_calls),
    "qwen, unguided": qwen("qwen_image", "QwenImagePipeline", 1.0),
    "qwen-edit": qwen(
        "qwen_image_edit", "QwenImageEditPipeline", 4.0, " ", (RED,), scale=0.125, guide=rescaled, split=two_calls,
    ),
    "qwen-edit-plus": qwen(
        "qwen_image_edit_plus", "QwenImageEditPlusPipeline", 4.0, " ", (RED, BLUE), scale=0.125, guide=rescaled,
        split=two_calls,
    ),
    "longcat": longcat(4.0, NEGATIVE, guide=shortened, split=two_calls),
    "longcat, unguided": longcat(1.0),
    "longcat-edit": case(
        "longcat_image_edit", "LongCatImageEditPipeline", 4.0, images=(SQUARE,), size=64, scale=1 / 16, guide=usual,
        split=two_calls,
    ),
    "ovis": case("ovis_image", "OvisImagePipeline", 5.0, NEGATIVE, guide=usual, split=two_calls),
    "ovis, unguided": case("ovis_image", "OvisImagePipeline", 1.0),
    "qwen-2.1": qwen_21(1.0),
    "qwen-2.1, editing": qwen_21(4.0, " ", (RED, BLUE), scale=0.125, guide=usual, split=two_calls_at_the_end),
}
# fmt: on
GUIDED = [name for name, case in CASES.items() if case.is_guided]
ONE_FOR_EACH_TRANSFORMER = list({(case.builder, *case.options): name for name, case in CASES.items()}.values())
EDITING = [name for name, case in CASES.items() if case.images]
SEEN_BY_THE_TEXT_ENCODER = ["qwen_image_edit", "qwen_image_edit_plus", "qwen_image_21", "longcat_image_edit"]


# ---- Building ----


def build_policy(model, dtype=torch.float32, family=None) -> RecordingPipeline:
    """As the trainer builds it; then the LoRA's B matrices, which start as zeros, are filled."""
    pipeline = load_pipeline(model, dtype)
    family = family or get_family(pipeline)
    signature = inspect.signature(pipeline.transformer.forward)
    model = prepare_transformer(pipeline, family, LORA, autocast_adapter_dtype=True)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    if dtype != torch.float32:
        for name in ("post_quant_conv", "decoder"):
            if getattr(pipeline.vae, name, None) is not None:
                cast_floating_inputs(getattr(pipeline.vae, name), dtype)
    return RecordingPipeline(pipeline, family, model, signature)


def build_plain(folder, policy) -> DiffusionPipeline:
    """A pipeline that nobody has touched, with the same adapter."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    # On a CPU torch may take other kernels, which round otherwise, for weights that want a gradient
    for name in ("vae", *policy.family.text_encoders):
        getattr(pipeline, name).requires_grad_(False)
    with_adapter = get_peft_model(pipeline.transformer, copy.deepcopy(policy.model.peft_config["default"]))
    with_adapter.load_state_dict(policy.model.state_dict())
    pipeline.transformer = with_adapter
    return pipeline


@dataclass
class Setup:
    """A policy, an untouched pipeline of the same weights, and the case's prompt and images encoded for two images."""

    case: Case
    policy: RecordingPipeline
    plain: DiffusionPipeline
    arguments: dict[str, torch.Tensor]
    sources: list[EncodedImage]

    @property
    def family(self):
        return self.policy.family

    def generate(self, sde=None, batch_size=2, num_steps=NUM_STEPS, **changes):
        call = {"arguments": self.arguments, "sources": self.sources} | changes
        return self.policy.generate(
            {name: tensor[:batch_size] for name, tensor in call["arguments"].items()},
            self.case.size,
            self.case.size,
            num_steps,
            self.case.guidance_scale,
            KEYS[:batch_size],
            sde,
            sources=call["sources"],
        )

    def generate_plain(self, batch_size=1, num_steps=NUM_STEPS, scale=None, **changes):
        """The call of a user."""
        call = {"prompt": PROMPT, "height": self.case.size, "width": self.case.size, **self.case.plain, **changes}
        if self.case.pipeline == "LongCatImageEditPipeline":  # which has no arguments for the size
            del call["height"], call["width"]
        generators = [keyed_generator(*key, 0) for key in KEYS[:batch_size]]
        with area_of_sources(scale or self.case.scale):
            images = self.plain(
                **call, num_inference_steps=num_steps, num_images_per_prompt=batch_size, generator=generators
            ).images
        return pixels(images)

    def replay(self, record, **kwargs):
        guidance_scale = self.case.guidance_scale
        velocity = predict(self.policy.model, record.calls, self.family, guidance_scale, record.sample, **kwargs)
        return compute_log_prob(velocity, record, SDE)


@contextmanager
def area_of_sources(scale: float):
    """Qwen's editing pipelines enlarge sources to 1024 x 1024 pixels, which takes seconds to encode: less for tests."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus, pipeline_qwenimage21):

            def calculate(area, ratio, plain=module.calculate_dimensions):
                return plain(area * scale**2 if area == 1024 * 1024 else area, ratio)  # else: for the text encoder

            patch.setattr(module, "calculate_dimensions", calculate)

        def calculate_as_in_training(area, ratio, plain=pipeline_longcat_image_edit.calculate_dimensions):
            return tuple(max(1, round(side * scale / 16)) * 16 for side in plain(area, ratio))

        patch.setattr(pipeline_longcat_image_edit, "calculate_dimensions", calculate_as_in_training)
        yield


def rows_of(prompts: list[str], images: list[tuple[Image.Image, ...]]) -> PromptRows:
    columns, features = {"prompt": prompts}, {"prompt": Value("string")}
    if any(images):
        columns["images"] = [list(each) for each in images]
        features["images"] = List(ImageFeature())
    else:
        columns |= {"rows": [1] * len(prompts), "cols": [1] * len(prompts), "panels": [[text] for text in prompts]}
        features |= {"rows": Value("int64"), "cols": Value("int64"), "panels": List(Value("string"))}
    args = SimpleNamespace(height=64, width=64, resolution_scale=1.0, set_layout=None, panel_generation="independent")
    args.guidance_scale, args.negative_prompt = 1.0, None
    return PromptRows(Dataset.from_dict(columns, Features(features)), args, "the dataset")


def new_encoder(policy, case, rows: PromptRows) -> PromptEncoder:
    negative = policy.family.resolve_negative_prompt(policy.pipeline, case.guidance_scale, case.negative_prompt)
    rows.negative_prompts = [negative] * len(rows)
    return PromptEncoder(policy.pipeline, policy.family, Accelerator(cpu=True))


def encode(policy, case) -> tuple[dict[str, torch.Tensor], list[EncodedImage]]:
    """Prompt and images of a case as the trainer passes them for a batch of two."""
    encoder = new_encoder(policy, case, rows := rows_of([PROMPT], [case.images]))
    encoder.prefetch(rows, [0], case.scale)
    encoded = fetch(encoder, rows, [0], case.scale).embeddings[0]
    arguments = {
        name: as_float32(tensor).expand(2, *tensor.shape[1:]) for name, tensor in encoded.arguments_on("cpu").items()
    }
    prepared = [policy.family.prepare_image(policy.pipeline, image, case.scale) for image in case.images]
    return arguments, [EncodedImage(*each) for each in zip(prepared, encoded.image_latents, strict=True)]


@pytest.fixture(scope="module")
def setup_of(folder_of) -> Callable[[str], Setup]:
    """Setups by name of the case; cases of one builder share the models."""
    models, setups = {}, {}

    def of(name: str) -> Setup:
        if name not in setups:
            case = CASES[name]
            folder = folder_of(case.builder, **case.options)
            if folder not in models:
                policy = build_policy(folder)
                models[folder] = policy, build_plain(folder, policy)
            policy, plain = models[folder]
            setups[name] = Setup(case, policy, plain, *encode(policy, case))
        return setups[name]

    return of


@pytest.fixture(params=CASES)
def setup(request, setup_of) -> Setup:
    return setup_of(request.param)


@pytest.fixture
def guided(request, setup_of) -> Setup:
    return setup_of(request.param)


@pytest.fixture(scope="module")
def recorded(setup_of) -> Callable:
    """The two stochastic steps of a setup, generated once."""
    generated = {}

    def of(setup: Setup):
        key = next(name for name, case in CASES.items() if case is setup.case)
        if key not in generated:
            generated[key] = setup.generate(SDE)[1]
        return generated[key]

    return of


# ---- Helpers ----


def pixels(images) -> np.ndarray:
    return np.stack([np.asarray(to_rgb(image, "an image")) for image in images])


class Stop(Exception):
    pass


@contextmanager
def counted(**modules):
    """Counts the forwards of modules, by name."""
    counts = Counter()
    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_hook(lambda *_, name=name: counts.update([name]))
            stack.callback(handle.remove)
        yield counts


@contextmanager
def moved_adapter(policy, size=0.02):
    """Changes every LoRA weight."""
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    generator = torch.Generator().manual_seed(6)
    for parameter in trained:
        parameter.data += size * torch.randn(parameter.shape, generator=generator)
    yield
    for parameter, values in zip(trained, before, strict=True):
        parameter.data.copy_(values)


def pixels_for_vae(pipeline, call: Callable) -> torch.Tensor:
    """The pixels that a call of a pipeline gives to its VAE first."""
    seen = []

    def encode(pixels, *args, **kwargs):
        seen.append(pixels)
        raise Stop

    pipeline.vae.encode = encode
    try:
        with pytest.raises(Stop):
            call()
    finally:
        del pipeline.vae.encode
    return seen[0]


# ---- Tests ----


def test_every_family_has_a_case():
    assert {case.pipeline for case in CASES.values()} == set(FAMILIES)


def test_class_and_default_targets(setup):
    assert type(setup.policy.pipeline).__name__ == setup.case.pipeline
    assert type(setup.family) is FAMILIES[setup.case.pipeline]
    assert set(setup.family.text_encoders) <= set(setup.policy.pipeline.components)
    names = [name for name, _ in setup.policy.model.named_modules()]
    with_adapter = {name.removesuffix(".lora_A") for name in names if name.endswith(".lora_A")}
    for target in setup.family.lora_target_modules:
        assert any(name.endswith("." + target) for name in with_adapter), target
    for layer in ("to_q", "to_k", "to_v", "to_out.0"):  # the paper's targets, in every attention
        assert any(name.endswith("." + layer) for name in with_adapter), layer


class TestUnusedLayers:
    @pytest.fixture(scope="class")
    def load_qwen(self, folder_of) -> Callable:
        """Gives a pipeline with a transformer of its own; the rest is loaded once."""
        loaded = load_pipeline(str(folder_of("qwen_image")), torch.float32)
        transformer = loaded.transformer

        def load():
            return type(loaded)(**{**loaded.components, "transformer": copy.deepcopy(transformer)})

        return load

    @pytest.mark.parametrize("name", ONE_FOR_EACH_TRANSFORMER)
    def test_are_those_that_no_prediction_depends_on(self, setup_of, recorded, name):
        setup = setup_of(name)
        transformer = setup.policy.model.get_base_model()
        weights = {
            name.removesuffix(".base_layer"): module.weight
            for name, module in transformer.named_modules()
            if isinstance(module, torch.nn.Linear) and ".lora_" not in name
        }
        record = recorded(setup)[0]
        for weight in weights.values():
            weight.requires_grad_(True)
        try:
            log_prob, _, _ = setup.replay(record)
            gradients = torch.autograd.grad(log_prob.sum(), list(weights.values()), allow_unused=True)
        finally:
            for weight in weights.values():
                weight.requires_grad_(False)
        without = [name for name, grad in zip(weights, gradients, strict=True) if grad is None or not grad.any()]
        assert len(weights) > len(without) == len(setup.family.unused_layers(transformer))
        assert set(without) == set(setup.family.unused_layers(transformer))

    @pytest.mark.parametrize(
        ("settings", "excluded"),
        [
            ({}, 4),
            ({"target_modules": ["attn.to_q"]}, 0),
            ({"target_modules": "all-linear"}, 4),
            ({"exclude_modules": r".*\.attn\.to_(k|v)"}, 6),
        ],
        ids=str,
    )
    @pytest.mark.filterwarnings("error:You have passed exclude_modules")
    def test_get_no_adapter_whatever_the_targets_are(self, load_qwen, tmp_path, settings, excluded):
        pipeline = load_qwen()
        family = get_family(pipeline)
        unused = set(family.unused_layers(pipeline.transformer))
        config = LoraConfig(r=2, **settings)
        model = prepare_transformer(pipeline, family, config, autocast_adapter_dtype=True)
        adapted = layers_with_adapter(model)
        assert adapted and not adapted & unused
        assert config.exclude_modules == LoraConfig(**settings).exclude_modules  # the user's is unchanged

        # As it is without the family's
        pipeline = load_qwen()
        plain = LoraConfig(r=2, **{"target_modules": family.lora_target_modules, **settings})
        others = layers_with_adapter(get_peft_model(pipeline.transformer, plain))
        assert others - adapted == others & unused
        names = model.peft_config["default"].exclude_modules
        assert len(names or ()) == excluded if not isinstance(names, str) else names.count("|") == excluded - 1

        # PEFT reads it back without a word
        model.save_pretrained(tmp_path)
        pipeline = load_qwen()
        assert layers_with_adapter(PeftModel.from_pretrained(pipeline.transformer, tmp_path)) == adapted

    def test_an_adapter_on_them_is_continued_without_them(self, load_qwen, tmp_path):
        def generate(pipeline, model):
            pipeline.transformer = model
            return pipeline(
                "a cat", height=32, width=32, num_inference_steps=2, generator=torch.Generator().manual_seed(0)
            ).images[0]

        pipeline = load_qwen()
        family = get_family(pipeline)
        config = LoraConfig(r=2, target_modules=family.lora_target_modules, init_lora_weights=False)
        unused = set(family.unused_layers(pipeline.transformer))
        plain = generate(pipeline, pipeline.transformer)
        earlier = get_peft_model(pipeline.transformer, config)
        assert unused < layers_with_adapter(earlier)
        earlier.save_pretrained(tmp_path / "earlier")
        image = generate(pipeline, earlier)
        assert not np.array_equal(image, plain)

        pipeline = load_qwen()
        adapter = SavedAdapter.read(str(tmp_path / "earlier"), pipeline)
        model = prepare_transformer(pipeline, family, adapter, autocast_adapter_dtype=True)
        assert layers_with_adapter(model) == layers_with_adapter(earlier) - unused
        assert all(parameter.requires_grad for name, parameter in model.named_parameters() if ".lora_" in name)
        assert np.array_equal(generate(pipeline, model), image)
        model.save_pretrained(tmp_path / "saved")
        pipeline = load_qwen()
        adapter = SavedAdapter.read(str(tmp_path / "saved"), "tiny")
        model = load_transformer_adapter(pipeline.transformer, adapter)
        assert np.array_equal(generate(pipeline, model), image)


def layers_with_adapter(model) -> set[str]:
    return {
        name.removesuffix(".lora_A") for name, _ in model.get_base_model().named_modules() if name.endswith(".lora_A")
    }


class TestUnmodifiedPipeline:
    def test_generates_the_image_of_a_users_call(self, setup):
        case = setup.case
        expected = setup.generate_plain(num_steps=2)

        # What the image depends on; with a source of its own size, of which the call of a user makes a megapixel
        own = {"_auto_resize": False} if case.builder == "flux_kontext" and case.images else {}
        plain = setup.generate_plain(num_steps=2, **own) if own else expected

        def has_effect(**changes) -> bool:
            return not np.array_equal(setup.generate_plain(num_steps=2, **own, **changes), plain)

        assert has_effect(prompt=OTHER_PROMPT)
        with setup.plain.transformer.disable_adapter():
            assert has_effect()
        (name,) = {"guidance_scale", "true_cfg_scale"} & case.plain.keys()
        if case.is_guided or "flux" in case.builder and not case.options:
            assert has_effect(**{name: case.plain[name] - 1})
        if case.negative_prompt is not None:
            assert has_effect(negative_prompt=OTHER_PROMPT)
        if case.images:
            assert has_effect(image=GREEN if len(case.images) == 1 else [*case.images[:-1], GREEN])

        for sde in (None, replace(SDE, steps=(1,), noise_level=0.0)):
            images, records = setup.generate(sde, batch_size=1, num_steps=2)
            assert records == []
            assert np.array_equal(pixels(images), expected)

    def test_generates_the_images_of_a_users_call_in_a_batch(self, setup):
        expected = setup.generate_plain(batch_size=2, num_steps=2)
        assert not np.array_equal(expected[0], expected[1])
        images, _ = setup.generate(num_steps=2)
        assert np.array_equal(pixels(images), expected)


class TestReplay:
    def test_the_ratio_is_exactly_one(self, setup, recorded):
        records = recorded(setup)
        assert [record.index for record in records] == [1, 2]
        for record in records:
            assert len(record.calls) == setup.case.calls
            log_prob, _, _ = setup.replay(record)
            assert log_prob.requires_grad
            assert torch.equal(log_prob, record.log_prob)
            assert record.log_prob[0] != record.log_prob[1]
        with moved_adapter(setup.policy):
            for record in records:
                assert ((setup.replay(record)[0] - record.log_prob).abs() > 1e-5).all()
        assert torch.equal(setup.replay(records[0])[0], records[0].log_prob)

    @pytest.mark.parametrize("guided", GUIDED, indirect=True)
    def test_gradient_with_and_without_the_unconditional_branch(self, guided, recorded):
        case, record = guided.case, recorded(guided)[1]
        trained = [parameter for parameter in guided.policy.model.parameters() if parameter.requires_grad]
        weights = torch.tensor([1.0, -0.4])

        def by_hand(is_detached: bool) -> torch.Tensor:
            outputs = [guided.policy.model(**copy_containers(call))[0] for call in record.calls]
            conditional, unconditional = case.split(outputs, record.sample)
            v = case.guide(conditional, unconditional.detach() if is_detached else unconditional, case.guidance_scale)
            t, t_next, x = record.sigma, record.sigma_next, record.sample
            s = SDE.noise_level * math.sqrt(t / (1 - t))
            std = s * math.sqrt(t - t_next)
            mean = x + (v + s**2 / (2 * t) * (x + (1 - t) * v)) * (t_next - t)
            squares = ((record.prev_sample - mean) ** 2).flatten(1).mean(1)
            return -squares / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))

        def gradient(log_prob: torch.Tensor) -> torch.Tensor:
            gradients = torch.autograd.grad((weights * log_prob).sum(), trained, allow_unused=True)
            return torch.cat([g.flatten() for g in gradients if g is not None])

        with moved_adapter(guided.policy):
            full, detached = gradient(by_hand(False)), gradient(by_hand(True))
            largest = full.abs().max()
            assert (full - detached).abs().max() > 0.01 * largest
            for is_detached, expected in ((False, full), (True, detached)):
                log_prob, _, _ = guided.replay(record, detach_unconditional=is_detached)
                torch.testing.assert_close(log_prob, by_hand(is_detached), rtol=1e-4, atol=1e-5)
                assert (gradient(log_prob) - expected).abs().max() < 2e-4 * largest
            log_prob, _, _ = guided.replay(record)
            assert (gradient(log_prob) - full).abs().max() < 2e-4 * largest  # the default


def copy_containers(call: dict) -> dict:
    return recursively_apply(lambda tensor: tensor, call)


class TestAWrongRuleIsCaught:
    """One mistake in a family class each."""

    @staticmethod
    def assert_caught(setup, what="received"):
        with pytest.raises(RuntimeError, match=what):
            setup.generate(SDE, batch_size=1)

    @pytest.mark.parametrize("guided", GUIDED, indirect=True)
    @pytest.mark.parametrize(
        ("method", "wrong"),
        [
            ("branches", lambda own, *given: own(*given)[::-1]),
            ("branches", lambda own, *given: (own(*given)[0], None)),
            ("guide", lambda own, conditional, unconditional, scale: own(conditional, unconditional, 1.01 * scale)),
        ],
        ids=["swapped branches", "without guidance", "scale a little off"],
    )
    def test_guidance(self, guided, monkeypatch, method, wrong):
        monkeypatch.setattr(guided.family, method, functools.partial(wrong, getattr(guided.family, method)))
        self.assert_caught(guided)

    @pytest.mark.parametrize("name", EDITING)
    def test_without_leaving_out_the_tokens_of_sources(self, setup_of, name, monkeypatch):
        setup = setup_of(name)
        monkeypatch.setattr(setup.family, "branches", lambda outputs, sample: [*outputs, None][:2])
        # The sequences of the two predictions may differ
        self.assert_caught(setup, "received a velocity of the shape|size of tensor")

    def test_more_calls_than_the_class_knows(self, setup_of, monkeypatch):
        setup = setup_of("qwen")
        monkeypatch.setattr(setup.family, "max_calls", 1)
        with pytest.raises(ValueError, match="called its transformer 2 times in a step"):
            setup.generate(SDE, batch_size=1)


class TestOtherTimes:
    def test_the_calls_of_a_step_are_those_of_another_at_its_sample_and_time(self, setup, recorded):
        first, second = recorded(setup)
        for record, other in ((first, first), (first, second), (second, first)):
            for call, expected in zip(record.calls, other.calls, strict=True):
                before = copy_containers(call)
                made = setup.family.call_at(call, other.sample, torch.full((2,), other.sigma))
                assert made.keys() == expected.keys()
                for name in made:
                    assert is_same(made[name], expected[name]), name
                    assert is_same(call[name], before[name]), name  # the record is unchanged
        assert any(not is_same(first.calls[0][name], second.calls[0][name]) for name in first.calls[0])

    def test_each_image_of_a_batch_has_its_time(self, setup, recorded):
        first, second = recorded(setup)
        sigma = torch.tensor([first.sigma, second.sigma])
        own = first.calls[0]
        mixed = setup.family.call_at(own, first.sample, sigma)
        name = next(name for name in ("timestep", "t") if name in own)
        times = mixed[name].view(-1, 2)  # for two images, once or twice
        assert torch.equal(times[:, 0], own[name].view(-1, 2)[:, 0])
        assert torch.equal(times[:, 1], second.calls[0][name].view(-1, 2)[:, 1])
        assert (times[:, 0] != times[:, 1]).all()


def is_same(first, second) -> bool:
    if torch.is_tensor(first):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, list):
        return len(first) == len(second) and all(is_same(*pair) for pair in zip(first, second, strict=True))
    return first == second


class TestCounts:
    def test_what_is_the_same_is_encoded_once(self, setup):
        case, pipeline = setup.case, setup.policy.pipeline
        text_encoder, vae = getattr(pipeline, setup.family.text_encoders[-1]), pipeline.vae.encoder
        others = tuple(image.rotate(180) for image in case.images)  # other images of the same size
        rows = rows_of(
            [PROMPT, OTHER_PROMPT, PROMPT, PROMPT, PROMPT],
            [case.images, case.images, case.images, others, case.images],
        )
        encoder = new_encoder(setup.policy, case, rows)
        # Prompts, or pairs of prompt and source where the text encoder sees the sources; the negative one likewise
        expected, negative = (3, 2) if case.images and case.builder in SEEN_BY_THE_TEXT_ENCODER else (2, 1)
        with counted(text_encoder=text_encoder, vae=vae) as counts:
            for numbers in ([0, 1], [1, 2, 3, 4]):
                encoder.prefetch(rows, numbers, 0.125 if case.images else 1.0)
            assert counts["text_encoder"] == expected + (negative if case.is_guided else 0)
            assert counts["vae"] == 2 * len(case.images)
            encoded = fetch(encoder, rows, [0, 2], 0.125 if case.images else 1.0).embeddings
            assert counts["vae"] == 2 * len(case.images)
        assert all(encoded[0].prompt[name] is encoded[2].prompt[name] for name in encoded[0].prompt)


# Width and height of a source -> those at which it is read, at factors 1 and 0.375
SIZES = {
    "kontext": {
        (64, 64): ((1024, 1024), (384, 384)),
        (37, 53): ((1024, 1024), (384, 384)),  # the aspect ratio is that of multiples of 32 pixels
        (1600, 200): ((1568, 672), (576, 256)),
        (1300, 1100): ((1088, 928), (416, 352)),
    },
    "flux2, editing": {
        (64, 64): ((64, 64), (64, 64)),
        (67, 101): ((64, 100), (64, 96)),  # the shorter side is at least 64
        (533, 70): ((532, 68), (484, 64)),
        (90, 530): ((88, 528), (64, 376)),
        (1300, 1100): ((1112, 940), (416, 352)),
    },
    "qwen-edit": {
        (64, 64): ((1024, 1024), (384, 384)),
        (37, 53): ((864, 1216), (320, 448)),
        (1600, 200): ((2912, 352), (1088, 128)),
        (1300, 1100): ((1120, 928), (416, 352)),
    },
    "longcat-edit": {
        (64, 64): ((1024, 1024), (384, 384)),
        (37, 53): ((864, 1232), (320, 464)),
        (1600, 200): ((2912, 368), (1088, 144)),
        (1300, 1100): ((1120, 944), (416, 352)),
    },
}
SIZES["klein, editing"] = SIZES["flux2, editing"]
SIZES["qwen-edit-plus"] = SIZES["qwen-2.1, editing"] = SIZES["qwen-edit"]


@pytest.mark.slow
class TestSizesOfSources:
    @pytest.mark.parametrize("name", EDITING)
    def test_own_size_to_the_pixel(self, setup_of, name):
        setup = setup_of(name)
        for size, (own, smaller) in SIZES[name].items():
            image = stripes(*size, (255, 120, 60))
            expected = pixels_for_vae(setup.plain, lambda image=image: setup.generate_plain(image=image, scale=1.0))
            prepared = setup.family.prepare_image(setup.policy.pipeline, image, 1.0)
            assert prepared.size == own, size
            assert setup.family.prepare_image(setup.policy.pipeline, image, 0.375).size == smaller, size
            assert torch.equal(setup.family.image_pixels(setup.policy.pipeline, prepared), expected), size

    @pytest.mark.parametrize(
        ("size", "message"), [((63, 200), "Image too small"), ((900, 100), "Aspect ratio too extreme")]
    )
    def test_flux2_refuses_what_its_pipeline_does(self, setup_of, size, message):
        setup = setup_of("flux2, editing")
        image = Image.new("RGB", size)
        with pytest.raises(ValueError, match=message):
            setup.generate_plain(image=image)
        with pytest.raises(ValueError, match=rf"has {size[0]} x {size[1]} pixels, but FLUX.2"):
            setup.family.check_image_size(*size[::-1])
        separate = {"layout": "separate", "theme": "A fox.", "panels": ["It runs.", "It sleeps."]}
        options = {"height": 96, "width": 96, "resolution_scale": 0.5, "guidance_scale": 1.0, "negative_prompt": None}
        options |= {"set_layout": "separate", "panel_template": "{panel} {theme}"}
        sets = complete_image_sets(Dataset.from_list([separate]))
        for generation, refused in (("anchored", True), ("independent", False)):
            rows = PromptRows(sets, SimpleNamespace(**options, panel_generation=generation), "the sets")
            with (
                pytest.raises(ValueError, match="Row 0 .* 48 x 48 .* set's first panel: raise")
                if refused
                else nullcontext()
            ):
                rows.resolve_for_pipeline(setup.policy.pipeline, setup.family)
        for taken in ((64, 200), (800, 100)):
            setup.family.check_image_size(*taken[::-1])

    @pytest.mark.parametrize("name", EDITING)
    def test_a_class_that_does_not_pass_the_prepared_source_is_caught(self, setup_of, name, monkeypatch):
        setup = setup_of(name)
        own = setup.family.call_arguments
        other = stripes(128, 64, (200, 0, 0))

        def wrong(height, width, guidance_scale, images):
            arguments = own(height, width, guidance_scale, images)
            return arguments | {"image": [other, *images[1:]] if isinstance(arguments["image"], list) else other}

        monkeypatch.setattr(setup.family, "call_arguments", wrong)
        for module in (qwen_image, longcat_image):
            monkeypatch.setattr(module, "fixed_sizes", lambda *_: area_of_sources(0.125))
        with pytest.raises(RuntimeError, match="Correct `prepare_image` and `call_arguments` of the family class"):
            setup.generate(num_steps=2)


class TestSettingsThatWouldBeIgnored:
    @pytest.mark.parametrize(
        ("name", "guidance_scale", "negative_prompt", "message"),
        [
            ("kontext", 2.5, NEGATIVE, "distilled into the model"),
            ("klein, distilled", 4.0, None, "distilled to a few steps"),
            ("klein, distilled", 1.0, NEGATIVE, "distilled to a few steps"),
            *((name, 0.0, NEGATIVE, "`guidance_scale` = 0.0") for name in ("z-image", "krea-2")),
            *((name, 1.0, NEGATIVE, "`guidance_scale` = 1.0") for name in ("sd3", "klein", "longcat", "qwen-2.1")),
            *((name, 4.0, None, "without a negative") for name in ("qwen", "qwen-2.1")),
        ],
    )
    def test_they_are_errors(self, setup_of, name, guidance_scale, negative_prompt, message):
        setup = setup_of(name)
        with pytest.raises(ValueError, match=message):
            setup.family.resolve_negative_prompt(setup.policy.pipeline, guidance_scale, negative_prompt)

    @pytest.mark.parametrize(
        ("name", "guidance_scale", "negative_prompt", "expected"),
        [
            ("kontext", 2.5, None, None), ("sd3", 4.0, None, ""), ("sd3", 4.0, NEGATIVE, NEGATIVE),
            ("sd3", 1.0, None, None), ("klein", 4.0, None, ""), ("klein", 4.0, NEGATIVE, NEGATIVE),
            ("klein, distilled", 1.0, None, None), ("z-image", 0.0, None, None), ("longcat", 4.0, None, ""),
            *((name, 1.0, None, "") for name in ("z-image", "krea-2")),  # which doubles the difference already
            ("krea-2", 0.0, None, None),
            ("ovis", 5.0, None, ""), ("qwen", 4.0, " ", " "), ("qwen", 4.0, "", ""), ("qwen", 1.0, None, None),
        ],
    )  # fmt: skip
    def test_the_others_are_not(self, setup_of, name, guidance_scale, negative_prompt, expected):
        setup = setup_of(name)
        found = setup.family.resolve_negative_prompt(setup.policy.pipeline, guidance_scale, negative_prompt)
        assert found == expected

    def test_a_model_without_guidance(self, setup_of):
        setup = setup_of("flux")
        components = setup.plain.components
        config = components["transformer"].config | {"guidance_embeds": False}
        schnell = FluxPipeline(**components | {"transformer": FluxTransformer2DModel.from_config(config)})
        resolve = setup.family.resolve_negative_prompt
        assert resolve(setup.plain, 3.5, None) is None and resolve(schnell, 1.0, None) is None
        with pytest.raises(ValueError, match="takes none"):
            resolve(schnell, 3.5, None)


class TestLongCatImageEdit:
    @pytest.mark.parametrize(("width", "height"), [(64, 64), (37, 53), (201, 1501)])
    @pytest.mark.parametrize("scale", [1.0, 0.3])
    def test_sources_are_read_at_the_size_of_the_edited_image(self, setup_of, width, height, scale):
        setup = setup_of("longcat-edit")
        rows = rows_of([PROMPT], [(stripes(width, height, (255, 0, 0)),)])
        rows.args.height = rows.args.width = 1024
        rows.args.resolution_scale = scale
        rows = rows.resolve_for_pipeline(setup.policy.pipeline, setup.family)
        prepared = setup.family.prepare_image(setup.policy.pipeline, rows.images(0)[0], scale)
        assert prepared.size[::-1] == rows.training_sizes[0]
        own = pipeline_longcat_image_edit.calculate_dimensions(1024 * 1024, width / height)
        assert own[::-1] == rows.inference_sizes[0]


class TestEditedSizes:
    def test_an_extreme_source_keeps_a_side(self, setup_of):
        setup = setup_of("kontext")
        pipeline, step = setup.policy.pipeline, setup.family.size_multiple(setup.policy.pipeline)
        assert Family.edited_size(setup.family, pipeline, [(64, 64)], 64 * 64) == (64, 64)
        assert Family.edited_size(setup.family, pipeline, [(10_000, 10)], 64 * 64)[0] == step
        assert Family.edited_size(setup.family, pipeline, [(10, 10_000)], 64 * 64)[1] == step

    def test_of_kontext_too(self, setup_of):
        setup = setup_of("kontext")
        pipeline, step = setup.policy.pipeline, setup.family.size_multiple(setup.policy.pipeline)
        assert setup.family.edited_size(pipeline, [(64, 64)], 64 * 64) == (64, 64)
        assert min(setup.family.edited_size(pipeline, [(672, 1568)], step * step / 4)) == step

    def test_of_qwen_image_edit_are_at_least_32(self, setup_of):
        pipeline = setup_of("qwen-edit").plain
        assert qwen_image.dimensions(pipeline, 16 * 16, 1.0) == (32, 32)
        assert qwen_image.dimensions(pipeline, 64 * 64, 1.0) == (64, 64)

    def test_qwen_image_21_follows_the_last_source(self, setup_of):
        setup = setup_of("qwen-2.1, editing")
        sizes = [(96, 32), (32, 96)]
        heights = [setup.family.edited_size(setup.policy.pipeline, order, 64 * 64) for order in (sizes, sizes[::-1])]
        assert heights[0][0] > heights[0][1] and heights[1][0] < heights[1][1]


def test_a_source_keeps_the_size_that_it_has():
    pipeline = object.__new__(pipeline_qwenimage_edit.QwenImageEditPipeline)
    own = pipeline_qwenimage_edit.calculate_dimensions
    with qwen_image.fixed_sizes(pipeline, [Image.new("RGB", (96, 32))]):
        assert pipeline_qwenimage_edit.calculate_dimensions(1024**2, 3.0)[:2] == (96, 32)
    assert pipeline_qwenimage_edit.calculate_dimensions is own


def test_longcat_shortens_a_prediction_to_the_norm_of_the_conditional_one_and_never_lengthens_it():
    guide = longcat_image.LongCatImageFamily().guide
    conditional = torch.tensor([[[3.0, 4.0]]])  # norm 5
    longer, shorter = guide(conditional, torch.zeros(1, 1, 2), 2.0), guide(conditional, 2 * conditional, 1.5)
    assert torch.allclose(longer, conditional)  # of norm 10 without it
    assert torch.allclose(shorter, conditional / 2)  # its own norm


class TestQwenImage21:
    def test_images_are_in_rgb_on_white(self, setup_of):
        setup = setup_of("qwen-2.1")
        call = {"height": 64, "width": 64, "num_inference_steps": 2, "use_kv_cache": False}
        (own,) = setup.plain(PROMPT, generator=[keyed_generator(*KEYS[0], 0)], **call).images
        assert own.mode == "RGBA" and own.getextrema()[3][0] < 255
        (image,), _ = setup.generate(batch_size=1, num_steps=2)
        assert image.mode == "RGB" and not np.array_equal(np.asarray(image), np.asarray(own.convert("RGB")))
        assert np.array_equal(np.asarray(image), pixels([own])[0])

    def test_keys_and_values_of_the_text_are_not_kept(self, setup_of, recorded):
        for record in recorded(setup_of("qwen-2.1, editing")):
            assert [call["kv_cache"] for call in record.calls] == [None, None]

    def test_a_schedule_of_its_own_decides_the_number_of_steps(self, setup_of):
        setup = setup_of("qwen-2.1")
        setup.policy.pipeline.register_to_config(sample_sigmas=[1.0, 0.6, 0.3])
        try:
            with pytest.raises(RuntimeError, match=r"`num_inference_steps` is 4"):
                setup.generate(SDE, batch_size=1)
            setup.generate(batch_size=1, num_steps=3)
        finally:
            setup.policy.pipeline.register_to_config(sample_sigmas=None)

    def test_a_source_that_the_processor_resizes_is_an_error(self, setup_of, monkeypatch):
        setup = setup_of("qwen-2.1, editing")
        pipeline = setup.policy.pipeline
        encode = functools.partial(setup.family.encode_prompt, pipeline, PROMPT, "cpu", [RED])
        with torch.no_grad():
            assert (encode(scale=0.125)["prompt_embeds_mask"] == 2).sum() == 4 * 4
            monkeypatch.setattr(
                pipeline.processor.image_processor, "size", {"shortest_edge": 256**2, "longest_edge": 1024**2}
            )
            with pytest.raises(ValueError, match="`resolution_scale` 0.125 the processor resizes"):
                encode(scale=0.125)
            encode(scale=0.25)
            monkeypatch.setattr(
                pipeline.processor.image_processor, "size", {"shortest_edge": 32**2, "longest_edge": 64**2}
            )
            with pytest.raises(ValueError, match="`resolution_scale` 0.25 the processor resizes"):
                encode(scale=0.25)  # to fewer pixels


@pytest.mark.slow
class TestTruncation:
    @pytest.mark.parametrize(
        ("name", "module"), [("flux2", flux2), ("klein", flux2), ("z-image", z_image), ("qwen", qwen_image)]
    )
    def test_the_first_prompt_that_is_cut_is_found(self, setup_of, name, module, monkeypatch):
        setup = setup_of(name)
        pipeline, family, seen = setup.policy.pipeline, setup.family, []

        def read(prompt: str) -> int:
            """Return how many tokens of a prompt the family class lets the pipeline read."""
            encoded = family.encode_prompt(pipeline, prompt, "cpu")["prompt_embeds"]
            return encoded.shape[1] if name in ("z-image", "qwen") else int(seen.pop().sum())

        def keep_mask(module, args, kwargs):
            seen.append(kwargs["attention_mask"])

        handle = pipeline.text_encoder.register_forward_pre_hook(keep_mask, with_kwargs=True)
        with torch.no_grad(), monkeypatch.context() as patch:
            own = module.MAX_TOKENS
            overhead = read("a a") - 2
            # One token each, so that the boundary is met exactly
            prompts = [" ".join(["a"] * (own - overhead + extra)) for extra in range(-3, 4)]
            lengths = [read(prompt) for prompt in prompts]
            found = [family.is_truncated(pipeline, prompt) for prompt in prompts]
            patch.setattr(module, "MAX_TOKENS", own + 16)
            whole = [read(prompt) for prompt in prompts]
        handle.remove()
        assert own in whole and whole[-1] > own and np.diff(whole).max() == 1
        assert found == [length < all_of_it for length, all_of_it in zip(lengths, whole, strict=True)]
        assert not family.is_truncated(pipeline, PROMPT)

    def test_the_first_prompt_that_is_cut_by_krea_2(self, setup_of):
        setup = setup_of("krea-2")
        pipeline, family = setup.policy.pipeline, setup.family
        read = lambda prompt: family.encode_prompt(pipeline, prompt, "cpu")["prompt_embeds_mask"].sum().item()  # noqa: E731
        with torch.no_grad():
            room = 512 - (read("a a") - 2)  # words up to the limit of the transformer
            suffix = len(pipeline.tokenizer(pipeline.prompt_template_encode_suffix).input_ids)
            room += suffix - pipeline.prompt_template_encode_num_suffix_tokens  # of another length in a tiny tokenizer
            for number, is_read in ((room, True), (room + 1, False)):
                prompt = " ".join(["a"] * number)
                assert (read(prompt) > read(prompt.removesuffix(" a"))) is is_read
                assert family.is_truncated(pipeline, prompt) is not is_read

    def test_the_first_prompt_that_is_cut_by_ovis(self, setup_of):
        setup = setup_of("ovis")
        pipeline, family = setup.policy.pipeline, setup.family
        limit = longcat_image.OVIS_MAX_TOKENS + pipeline.user_prompt_begin_id
        (text,) = pipeline._get_messages("a a")
        room = limit - len(pipeline.tokenizer(text).input_ids) + 2
        with torch.no_grad():
            # The last word is still read, and changes the embeddings, or not
            for number, is_read in ((room, True), (room + 1, False)):
                prompt = " ".join(["a"] * number)
                assert family.is_truncated(pipeline, prompt) is not is_read
                encoded = [
                    family.encode_prompt(pipeline, each, "cpu")["prompt_embeds"] for each in (prompt, prompt + " a")
                ]
                assert encoded[0].shape[1] == 256
        assert not family.is_truncated(pipeline, PROMPT)

    @pytest.mark.parametrize("name", ["kontext", "sd3", "longcat"])
    def test_the_last_word_of_the_longest_prompt_is_read(self, setup_of, name):
        setup = setup_of(name)
        pipeline, family = setup.policy.pipeline, setup.family

        def is_read(number: int) -> bool:
            """Return whether the embeddings depend on the last of so many words."""
            texts = [" ".join(["a"] * (number - 1) + [last]) for last in ("a", "b")]
            with torch.no_grad():
                first, second = (family.encode_prompt(pipeline, text, "cpu")["prompt_embeds"] for text in texts)
            return not torch.equal(first, second)

        longest = next(
            number for number in range(1, 600) if family.is_truncated(pipeline, " ".join(["a"] * (number + 1)))
        )
        assert longest > 10 and is_read(longest) and not is_read(longest + 1)

    @pytest.mark.parametrize("name", ["kontext", "sd3", "longcat"])
    def test_what_the_pipeline_says_itself_is_counted(self, setup_of, name, caplog):
        setup = setup_of(name)
        images = setup.case.images
        rows = rows_of([PROMPT, " ".join(["cat"] * 600), " ".join(["dog"] * 600)], [images] * 3)
        encoder = new_encoder(setup.policy, setup.case, rows)
        with caplog.at_level(logging.WARNING):
            encoder.prefetch(rows, [0], setup.case.scale)
            assert "truncated" not in caplog.text
            count = 3 if name == "kontext" else 4  # with the negative prompt, which all rows share
            named = (
                f"2 of {count} prompts of {rows.where} are longer than {type(setup.policy.pipeline).__name__} reads"
            )
            assert caplog.text.count(named) == 1  # before they are encoded: another process may do that
            encoder.prefetch(rows, [1, 2], setup.case.scale)
        assert caplog.text.count("are longer than") == 1
        assert caplog.text.count("For 2 of 2 prompts: ") == (name != "longcat")  # CLIP's
        assert "row 1, row 2. Shorten" in caplog.text and "max_sequence_length" not in caplog.text
        assert "dog dog" not in caplog.text


@pytest.mark.slow
class TestBf16:
    @pytest.mark.parametrize("name", {CASES[name].builder: name for name in reversed(CASES)}.values())
    def test_generates_and_replays(self, folder_of, name):
        case = CASES[name]
        policy = build_policy(folder_of(case.builder, **case.options), torch.bfloat16)
        assert policy.pipeline.vae.dtype == torch.bfloat16
        low = Setup(case, policy, None, *encode(policy, case))
        with torch.autocast("cpu", torch.bfloat16):
            images, records = low.generate(SDE)
        assert pixels(images).std() > 5
        trained = [parameter for parameter in low.policy.model.parameters() if parameter.requires_grad]
        assert all(parameter.dtype == torch.float32 for parameter in trained)
        for record in records:
            assert record.sample.dtype == record.prev_sample.dtype == torch.float32
            assert not torch.equal(record.prev_sample, record.prev_sample.bfloat16().float())
            with torch.autocast("cpu", torch.bfloat16):
                log_prob, _, _ = low.replay(record)
                assert torch.equal(log_prob, record.log_prob)
                for call in record.calls:
                    again = low.family.call_at(call, record.sample, torch.full((2,), record.sigma))
                    assert all(is_same(again[name], call[name]) for name in call)
            assert torch.autograd.grad(log_prob.sum(), trained, allow_unused=True)[0].isfinite().all()
            with moved_adapter(low.policy), torch.autocast("cpu", torch.bfloat16):
                assert (low.replay(record)[0] != record.log_prob).all()
