# SPDX-License-Identifier: Apache-2.0
"""An adapter changes the weights by the same amount in every program that loads it, whatever scale it knows of."""

import copy
import re
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

import tiny_models
from paco_trl import generation
from paco_trl.checkpointing.weights import save_adapter
from paco_trl.rollout import get_family
from paco_trl.rollout.loading import load_pipeline
from paco_trl.rollout.policy_building import prepare_transformer
from testing_utils import give_effect


PAGE = Path(__file__).parent.parent / "docs" / "use_and_share.md"
FILE = "pytorch_lora_weights.safetensors"
# One whose layers diffusers loads by another name, and one without `load_lora_weights`, besides FLUX below
PIPELINES = (
    "build_tiny_qwen_image_edit",
    "build_tiny_stable_diffusion_3",
    "build_tiny_z_image",
    "build_tiny_krea2",
)
CONFIGS = {
    "alpha": {"lora_alpha": 6},
    "rsLoRA": {"lora_alpha": 8, "use_rslora": True},
    "patterns": {"lora_alpha": 8, "rank_pattern": {"to_q": 2, "ff.net.2": 6}, "alpha_pattern": {"to_k": 3, "to_q": 5}},
    "rsLoRA and patterns": {"use_rslora": True, "rank_pattern": {"to_q": 2}, "alpha_pattern": {"to_q": 5}},
}


@pytest.fixture(scope="module")
def flux(tiny_flux) -> DiffusionPipeline:
    """The tiny FLUX, as it is loaded."""
    return DiffusionPipeline.from_pretrained(tiny_flux)


def fresh(pipeline: DiffusionPipeline) -> DiffusionPipeline:
    """The pipeline with a transformer of its own, as if it were loaded again."""
    return type(pipeline)(**{**pipeline.components, "transformer": copy.deepcopy(pipeline.transformer)})


def train(base: DiffusionPipeline, config: LoraConfig) -> tuple[PeftModel, DiffusionPipeline]:
    """A pipeline with an adapter that has an effect."""
    pipeline = load_pipeline(fresh(base), torch.float32)
    model = prepare_transformer(pipeline, get_family(pipeline), config, autocast_adapter_dtype=True)
    give_effect(model, std=0.1)
    return model, pipeline


def save(model: PeftModel, pipeline: DiffusionPipeline, folder: Path) -> Path:
    save_adapter(model, pipeline, {name: p for name, p in model.named_parameters() if p.requires_grad}, folder)
    return folder


def changes(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the adapter adds to the weight of each layer."""
    return {
        name.removeprefix("base_model.model."): layer.get_delta_weight(layer.active_adapters[0]).detach()
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }


def changes_in_comfyui(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same by ComfyUI's rule: alpha / rank where there is a tensor `<key>.alpha`, else 1."""
    found = {}
    for key in {name.partition(".lora_")[0] for name in weights}:
        up, down = weights[f"{key}.lora_B.weight"], weights[f"{key}.lora_A.weight"]
        scale = weights[f"{key}.alpha"].item() / len(down) if f"{key}.alpha" in weights else 1
        found[key.removeprefix("transformer.").removeprefix("base_model.model.")] = up @ down * scale
    return found


def changes_in_diffusers(base: DiffusionPipeline, adapter: Path) -> dict[str, torch.Tensor]:
    pipeline = fresh(base)
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(adapter)
    else:
        pipeline.transformer.load_lora_adapter(adapter, weight_name=FILE)
    return changes(pipeline.transformer)


def deviation(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference, relative to the largest change of its layer."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items())


def without_metadata(folder: Path, copied: Path) -> Path:
    copied.mkdir()
    save_file(load_file(folder / FILE), copied / FILE)
    return copied


@pytest.mark.parametrize("builder", PIPELINES)
def test_full_strength_by_every_rule(builder, tmp_path):
    base = DiffusionPipeline.from_pretrained(getattr(tiny_models, builder)(tmp_path / "tiny"))
    model, pipeline = train(base, LoraConfig(r=4, lora_alpha=8))
    trained = changes(model)
    assert len(trained) >= 12 and min(float(change.norm()) for change in trained.values()) > 0
    adapter = save(model, pipeline, tmp_path / "adapter")

    # By that rule PEFT's file acts at half strength
    halves = changes_in_comfyui(load_file(adapter / "adapter_model.safetensors"))
    assert deviation({name: 2 * half for name, half in halves.items()}, trained) == 0
    assert deviation(changes_in_comfyui(load_file(adapter / FILE)), trained) == 0
    assert deviation(changes_in_diffusers(base, adapter), trained) == 0
    assert deviation(changes_in_diffusers(base, without_metadata(adapter, tmp_path / "copied")), trained) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_scales_of_every_kind(name, flux, tmp_path):
    model, pipeline = train(flux, LoraConfig(**{"r": 4, **CONFIGS[name]}))
    trained = changes(model)
    scales = {layer.scaling["default"] for layer in model.modules() if isinstance(layer, LoraLayer)}
    assert 1 not in scales and len(scales) == {"alpha": 1, "rsLoRA": 1, "patterns": 4, "rsLoRA and patterns": 2}[name]
    model.peft_config["default"].base_model_name_or_path = "/home/me/flux"
    adapter = save(model, pipeline, tmp_path / "adapter")
    assert b"/home/me" not in (adapter / FILE).read_bytes()
    assert deviation(changes_in_comfyui(load_file(adapter / FILE)), trained) < 1e-6
    assert deviation(changes_in_diffusers(flux, adapter), trained) < 1e-6
    assert deviation(changes_in_diffusers(flux, without_metadata(adapter, tmp_path / "copied")), trained) < 1e-6
    by_peft = PeftModel.from_pretrained(fresh(flux).transformer, adapter)
    assert deviation(changes(by_peft), trained) == 0


def test_files_of_before_are_read_as_well(tiny_flux, flux, tmp_path):
    """Their matrices are PEFT's, and alpha is in the metadata."""
    model, pipeline = train(flux, LoraConfig(r=4, lora_alpha=8))
    trained = changes(model)
    state = get_peft_model_state_dict(model)
    layers = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
    metadata = model.peft_config["default"].to_dict()
    options = {"transformer_lora_layers": layers, "transformer_lora_adapter_metadata": metadata}
    pipeline.save_lora_weights(tmp_path / "old", **options)
    save(model, pipeline, tmp_path / "new")
    (tmp_path / "new" / "adapter_model.safetensors").unlink()  # so that the file under test is taken
    old, new = (load_file(tmp_path / name / FILE) for name in ("old", "new"))
    assert any(not torch.equal(old[name], new[name]) for name in old)
    for name in ("old", "new"):
        system = generation.load_for_inference(tmp_path / name, str(tiny_flux), dtype=torch.float32, device="cpu")[0]
        assert deviation(changes(system.transformer), trained) == 0


def test_the_code_of_the_page(tiny_flux, flux, tmp_path):
    expected = {}
    for name, alpha in (("paco-flux", 8), ("style", 12)):
        model, pipeline = train(flux, LoraConfig(r=4, lora_alpha=alpha))
        expected[name] = changes(model)
        save(model, pipeline, tmp_path / name)
    page = PAGE.read_text(encoding="utf-8").split("\n### diffusers\n")[1].split("\n### ComfyUI\n")[0]
    page = page.replace("bfloat16", "float32").replace("user/", f"{tmp_path}/")
    page = page.replace("black-forest-labs/FLUX.1-dev", str(tiny_flux))
    page = page.replace("alimama-creative/FLUX.1-Turbo-Alpha", f"{tmp_path}/style")
    load, two, few_steps, fuse, peft = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    names = {}
    base = flux.transformer.state_dict()
    for block, weight in ((two, 0.6), (few_steps, 1)):
        exec(load, names)
        assert deviation(changes(names["pipe"].transformer), expected["paco-flux"]) == 0
        exec(block, names)
        exec(fuse, names)
        fused = names["pipe"].transformer.state_dict()
        assert fused.keys() == base.keys()
        wanted = {name: change + weight * expected["style"][name] for name, change in expected["paco-flux"].items()}
        found = {name: fused[f"{name}.weight"] - base[f"{name}.weight"] for name in wanted}
        assert deviation(found, wanted) < 1e-5
    exec(peft, names)
    assert deviation(changes(names["pipe"].transformer), expected["paco-flux"]) == 0
