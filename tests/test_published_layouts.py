# SPDX-License-Identifier: Apache-2.0
"""
The layouts in which the published weights, and others of their time, are saved: tiny weights in them are loaded, and the
result is that of the model they were made from.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import tiny_models
from paco_trl import PaCoReward
from paco_trl.rollout import get_family
from paco_trl.rollout.adapters import SavedAdapter
from paco_trl.rollout.loading import load_pipeline
from paco_trl.rollout.policy_building import prepare_transformer
from paco_trl.utils.names import is_same_model
from testing_utils import noise


NOWHERE = "/nowhere/at/all"
QUESTION = "Are both of one style?"
JUDGE_BASE = "Qwen/Qwen2.5-VL-7B-Instruct"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# adapter_config.json as the published code's LLaMA-Factory writes it with a PEFT of its time
LLAMA_FACTORY_CONFIG = {
    "base_model_name_or_path": JUDGE_BASE, "init_lora_weights": True, "lora_alpha": 16, "megatron_core": "megatron.core",
    "peft_type": "LORA", "r": 4, "task_type": "CAUSAL_LM", "a_setting_of_another_version": 1,
}  # fmt: skip


def old_name(name: str) -> str:
    """Name of a weight or layer before transformers 4.52."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def change(folder: Path, edit, name: str = "adapter_model.safetensors") -> None:
    """Saves the weights of a folder again, edited."""
    weights = edit(load_file(folder / name))
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / name, metadata={"format": "pt"})


def with_unknown(weights: dict) -> dict:
    """With a weight for which there is no place: that of a layer which the model does not have."""
    name = next(name for name in weights if re.search(r"(layers|blocks)\.1\.|(layers|blocks)\.0\.", name))
    return weights | {re.sub(r"(layers|blocks)\.\d+\.", r"\1.7.", name, count=1): weights[name].clone()}


PAIR = (noise(0), noise(1))


@pytest.fixture(scope="module")
def hub(tiny_qwen, tmp_path_factory) -> Path:
    """The base model in a cache of the Hub, under its real name."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / f"models--{JUDGE_BASE.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    shutil.copytree(tiny_qwen, repository / "snapshots" / ("a" * 40))
    return cache


def adapted(tiny_qwen, targets) -> PeftModel:
    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(model, config).eval()


@pytest.fixture(scope="module")
def language(tiny_qwen):
    """An adapter on the linear layers of the language model, as the paper's."""
    return adapted(tiny_qwen, rf"model\.language_model\..*\.({'|'.join(PROJECTIONS)})")


@pytest.fixture(scope="module")
def both(tiny_qwen):
    """One on those of the vision tower too."""
    return adapted(tiny_qwen, rf".*\.({'|'.join([*PROJECTIONS, 'qkv'])})")


@pytest.fixture(scope="module")
def scores(tiny_qwen, language, both) -> dict[str, float]:
    """Scores of the pair, without adapter and with each."""
    base = AutoModelForImageTextToText.from_pretrained(tiny_qwen)
    processor = AutoProcessor.from_pretrained(tiny_qwen)
    models = {"base": base, "language": language, "both": both}
    return {name: PaCoReward(model, processor).score([PAIR], QUESTION)[0] for name, model in models.items()}


class TestJudge:
    def save(self, model: PeftModel, folder: Path, targets, is_old: bool) -> Path:
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink()
        config = LLAMA_FACTORY_CONFIG | {"target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        if is_old:
            change(folder, lambda weights: {old_name(name): value for name, value in weights.items()})
        names = list(load_file(folder / "adapter_model.safetensors"))
        beginning = "base_model.model.model." + ("layers" if is_old else "language_model.layers")
        assert sum(name.startswith(beginning) for name in names) == 2 * 7 * 2
        return folder

    @pytest.mark.parametrize(("targets", "is_old"), [("pattern", True), ("names", True), ("endings", False)])
    def test_adapter(self, hub, language, scores, tmp_path, targets, is_old):
        names = [name for name, _ in language.named_parameters() if name.endswith("lora_A.default.weight")]
        layers = [name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight") for name in names]
        written = {
            "pattern": rf"^(?!.*visual).*(?:{'|'.join(PROJECTIONS)}).*",
            "names": sorted(old_name(name) if is_old else name for name in layers),
            # What PEFT makes of many names: the shortest endings that no other layer has
            "endings": sorted(layer.split("language_model.")[1] for layer in layers),
        }[targets]
        folder = self.save(language, tmp_path / "adapter", written, is_old)
        judge = PaCoReward.from_pretrained(folder, device="cpu", cache_dir=hub)
        assert abs(scores["language"] - scores["base"]) > 1e-2  # the adapter does something
        assert judge.score([PAIR], QUESTION)[0] == pytest.approx(scores["language"], abs=1e-6)

        change(folder, with_unknown)
        with pytest.raises(ValueError, match="layers.7"):
            PaCoReward.from_pretrained(folder, device="cpu", cache_dir=hub)

    def test_adapter_on_the_vision_tower_too(self, hub, both, scores, tmp_path):
        folder = self.save(both, tmp_path / "adapter", [*PROJECTIONS, "qkv"], True)
        judge = PaCoReward.from_pretrained(folder, device="cpu", cache_dir=hub)
        assert abs(scores["both"] - scores["language"]) > 1e-4
        assert judge.score([PAIR], QUESTION)[0] == pytest.approx(scores["both"], abs=1e-6)

    @pytest.mark.parametrize(("is_old", "has_flat_config"), [(True, True), (False, False)])
    def test_merged_model(self, tiny_qwen, language, scores, tmp_path, is_old, has_flat_config):
        folder = shutil.copytree(tiny_qwen, tmp_path / "merged")
        with torch.random.fork_rng():
            merged = adapted(tiny_qwen, language.peft_config["default"].target_modules).merge_and_unload()
        weights = {old_name(name) if is_old else name: value for name, value in merged.state_dict().items()}
        beginnings = {".".join(name.split(".")[:2]) for name in weights}
        assert "lm_head.weight" in beginnings
        assert ({"model.layers", "visual.blocks"} if is_old else {"model.language_model", "model.visual"}) < beginnings
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if has_flat_config:
            # Before transformers 4.52 the language model's settings had no entry of their own
            config = json.loads((folder / "config.json").read_text())
            config = config.pop("text_config") | config
            rope = config.pop("rope_parameters")
            config |= {"rope_theta": rope["rope_theta"], "torch_dtype": config.pop("dtype")}
            config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
            (folder / "config.json").write_text(json.dumps(config))
        judge = PaCoReward.from_pretrained(folder, device="cpu")
        assert judge.score([PAIR], QUESTION)[0] == pytest.approx(scores["language"], abs=1e-5)

        change(folder, with_unknown, "model.safetensors")
        with pytest.raises(ValueError, match="model.language_model.layers.7"):
            PaCoReward.from_pretrained(folder, device="cpu")

    def test_merged_model_with_a_weight_missing(self, tiny_qwen, tmp_path):
        """transformers would fill it with random numbers."""
        folder = shutil.copytree(tiny_qwen, tmp_path / "merged")
        missing = "layers.1.mlp.up_proj"
        change(folder, lambda each: {k: v for k, v in each.items() if missing not in k}, "model.safetensors")
        AutoModelForImageTextToText.from_pretrained(folder)  # without the judge it would load
        with pytest.raises(ValueError, match=missing):
            PaCoReward.from_pretrained(folder, device="cpu")


@torch.no_grad()
def predict(transformer) -> np.ndarray:
    """A prediction for four tokens, in 1/1000."""
    generator, config = torch.Generator().manual_seed(5), transformer.config
    output = transformer(
        hidden_states=torch.randn(1, 4, config["in_channels"], generator=generator),
        encoder_hidden_states=torch.randn(1, 3, config["joint_attention_dim"], generator=generator),
        encoder_hidden_states_mask=torch.ones(1, 3, dtype=torch.long),
        timestep=torch.tensor([0.5]),
        img_shapes=[[(1, 2, 2)]],
    ).sample
    return (1000 * output).round().numpy()


def test_an_adapter_of_a_pipeline_is_continued(tmp_path):
    """As PEFT saves one of a diffusers transformer, with layers that no prediction depends on."""
    base = str(tiny_models.build_tiny_qwen_image_edit(tmp_path / "pipeline"))
    pipeline = DiffusionPipeline.from_pretrained(base)
    before = predict(pipeline.transformer)
    targets = get_family(pipeline).lora_target_modules
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian", target_modules=targets)
    model = get_peft_model(pipeline.transformer, config)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    tuned = predict(model)
    assert np.abs(tuned - before).mean() > 2  # the adapter does something

    pipeline = load_pipeline(base, torch.float32)
    continued = prepare_transformer(
        pipeline, get_family(pipeline), SavedAdapter.read(str(tmp_path / "adapter"), pipeline), True
    )
    assert np.array_equal(predict(continued), tuned)
    assert any(parameter.requires_grad for parameter in continued.parameters())
    change(tmp_path / "adapter", with_unknown)
    pipeline = load_pipeline(base, torch.float32)
    with pytest.raises(ValueError, match="blocks.7"):
        prepare_transformer(
            pipeline, get_family(pipeline), SavedAdapter.read(str(tmp_path / "adapter"), pipeline), True
        )


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("black-forest-labs/FLUX.1-dev", "Black-Forest-Labs/flux.1-DEV", True),
        ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-Kontext-dev", False),
        ("black-forest-labs/FLUX.1-dev", "someone/FLUX.1-dev", False),
        # Paths, of this machine or another
        ("black-forest-labs/FLUX.1-dev", r"D:\models\FLUX.1-dev", True),
        ("black-forest-labs/FLUX.1-dev", "/data/models/FLUX.1-Kontext-dev", False),
        # A folder of the Hub's cache is the repository
        ("black-forest-labs/FLUX.1-dev", "/cache/models--black-forest-labs--FLUX.1-dev/snapshots/0123", True),
        ("someone/FLUX.1-dev", "/cache/models--black-forest-labs--FLUX.1-dev/snapshots/0123", False),
        ("/data/FLUX.1-dev", "/cache/models--black-forest-labs--FLUX.1-dev/snapshots/0123", True),
    ],
)
def test_names_of_one_model(first, second, is_same):
    assert is_same_model(first, second) is is_same
    assert is_same_model(second, first) is is_same


def test_an_adapter_of_another_base_is_refused(make_trainer, tiny_flux, tmp_path):
    """By name, before the pipeline is loaded."""
    transformer = FluxTransformer2DModel.from_pretrained(str(tiny_flux), subfolder="transformer")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["attn.to_q"])
    get_peft_model(transformer, config).save_pretrained(tmp_path, save_embedding_layers=False)
    base, path = "black-forest-labs/FLUX.1-Kontext-dev", tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": base}))
    # There is no such folder: had the pipeline been looked for first, the error would be another
    for model in (NOWHERE, DiffusionPipeline.from_pretrained(tiny_flux)):
        with pytest.raises(ValueError, match=base) as error:
            make_trainer(model=model, peft_config=str(tmp_path))
        assert (NOWHERE if model == NOWHERE else str(tiny_flux)) in str(error.value)
