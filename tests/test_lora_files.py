# SPDX-License-Identifier: Apache-2.0
"""LoRA files of other programs, written here by the names that those use: training starts from their image, or not at all."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file, save, save_file

import tiny_models
from hub_server import HubServer
from paco_trl import generation
from paco_trl.commands.script_arguments import ScriptArguments, get_peft_config
from paco_trl.rollout import get_family
from paco_trl.rollout.adapters import SavedAdapter
from paco_trl.rollout.loading import load_pipeline
from paco_trl.rollout.lora_files import convert_lora
from paco_trl.rollout.policy_building import prepare_transformer
from test_adapter_files import changes, deviation, fresh
from testing_utils import draw, logs_with, weights_of


def attention(block: str, names: str, where: str = "attn") -> list[str]:
    return [f"{block}.{where}.{name}" for name in names.split()]


def same(*names: str) -> dict[str, list[str]]:
    return {name: [name] for name in names}


BLOCK, SINGLE = "transformer_blocks.0", "single_transformer_blocks.0"
QKV, ADDED = "to_q to_k to_v", "add_q_proj add_k_proj add_v_proj"
# Name in the model's original code -> layers of diffusers, each of which has a part of its rows
FLUX = {
    "double_blocks.0.img_attn.qkv": attention(BLOCK, QKV),
    "double_blocks.0.txt_attn.qkv": attention(BLOCK, ADDED),
    "double_blocks.0.img_attn.proj": [f"{BLOCK}.attn.to_out.0"],
    "double_blocks.0.img_mlp.0": [f"{BLOCK}.ff.net.0.proj"],
    "double_blocks.0.img_mod.lin": [f"{BLOCK}.norm1.linear"],
    # Not `linear1`, whose sizes diffusers has as numbers of the real model
    "single_blocks.0.linear2": [f"{SINGLE}.proj_out"],
}
XLABS_FLUX = {
    "double_blocks.0.processor.qkv_lora1": attention(BLOCK, QKV),
    "double_blocks.0.processor.proj_lora2": [f"{BLOCK}.attn.to_add_out"],
    "single_blocks.0.processor.proj_lora": [f"{SINGLE}.proj_out"],
}
FLUX2 = {
    "double_blocks.0.img_attn.qkv": attention(BLOCK, QKV),
    "double_blocks.0.txt_attn.proj": [f"{BLOCK}.attn.to_add_out"],
    "double_blocks.0.img_mlp.0": [f"{BLOCK}.ff.linear_in"],
    "single_blocks.0.linear1": [f"{SINGLE}.attn.to_qkv_mlp_proj"],
}
QWEN = same(f"{BLOCK}.attn.to_q", f"{BLOCK}.attn.add_k_proj", f"{BLOCK}.img_mlp.net.0.proj", f"{BLOCK}.attn.to_out.0")
Z_IMAGE = same("layers.0.attention.to_q", "layers.1.attention.to_out.0", "noise_refiner.0.feed_forward.w2")
Z_IMAGE_FUSED = {"layers.1.attention.qkv": attention("layers.1", QKV, "attention")}
KREA2 = {
    "blocks.0.attn.wq": ["transformer_blocks.0.attn.to_q"],
    "blocks.1.attn.gate": ["transformer_blocks.1.attn.to_gate"],
    "blocks.1.mlp.down": ["transformer_blocks.1.ff.down"],
    "txtfusion.refiner_blocks.0.attn.wo": ["text_fusion.refiner_blocks.0.attn.to_out.0"],
    "tproj.1": ["time_mod_proj"],
}
# `proj_out` is the end of another layer's name
BOTH_FLUX = same(f"{BLOCK}.attn.to_q", f"{SINGLE}.proj_out", "proj_out", f"{SINGLE}.attn.to_k")
OWN_FLUX = same(f"{BLOCK}.attn.to_q", f"{BLOCK}.ff.net.2", f"{SINGLE}.attn.to_k", "proj_out")


@dataclass
class Format:
    """How a program names the weights of a layer."""

    prefix: str
    down: str = "lora_A.weight"
    up: str = "lora_B.weight"
    has_alpha: bool = False
    flat: bool = False  # underscores instead of dots

    def key(self, module: str) -> str:
        return self.prefix + (module.replace(".", "_") if self.flat else module)


KOHYA = Format("lora_unet_", "lora_down.weight", "lora_up.weight", has_alpha=True, flat=True)
COMFYUI = Format("diffusion_model.", "lora_down.weight", "lora_up.weight", has_alpha=True)
XLABS = Format("", "down.weight", "up.weight")
AI_TOOLKIT = Format("diffusion_model.")
AI_TOOLKIT_WITH_ALPHA = Format("diffusion_model.", has_alpha=True)
DIFFSYNTH = Format("", "lora_A.default.weight", "lora_B.default.weight")
DIFFUSERS = Format("transformer.")
DIFFUSERS_WITH_ALPHA = Format("transformer.", has_alpha=True)
FORMATS = {
    "FLUX of kohya": ("flux", KOHYA, FLUX),
    "FLUX of ComfyUI": ("flux", COMFYUI, FLUX),
    "FLUX of ai-toolkit and diffusers": ("flux", DIFFUSERS, OWN_FLUX),
    "FLUX of diffusers with alpha": ("flux", DIFFUSERS_WITH_ALPHA, BOTH_FLUX),
    "FLUX of XLabs": ("flux", XLABS, XLABS_FLUX),
    "Qwen-Image of kohya": ("qwen_image", KOHYA, QWEN),
    "Qwen-Image of ai-toolkit": ("qwen_image", AI_TOOLKIT_WITH_ALPHA, QWEN),
    "Qwen-Image of DiffSynth": ("qwen_image", DIFFSYNTH, QWEN),
    "FLUX.2 of kohya": ("flux2_klein", KOHYA, FLUX2),
    "FLUX.2 of ai-toolkit": ("flux2_klein", AI_TOOLKIT, FLUX2),
    "Krea 2 of ai-toolkit": ("krea2", AI_TOOLKIT, KREA2),
    "Krea 2 of diffusers": ("krea2", DIFFUSERS, same("img_in", f"{BLOCK}.attn.to_gate", "text_fusion.projector")),
    "Z-Image of kohya": ("z_image", KOHYA, Z_IMAGE | Z_IMAGE_FUSED),
    "Z-Image of ai-toolkit": ("z_image", AI_TOOLKIT, Z_IMAGE),
    "Z-Image of DiffSynth": ("z_image", DIFFSYNTH, Z_IMAGE),
}


def write(file: Path, transformer, modules: dict, style: Format, dtype=torch.float32, metadata=None, more=None):
    """Write a LoRA of several ranks and alphas; return what it adds to the weight of each layer."""
    layers, generator = dict(transformer.named_modules()), torch.Generator().manual_seed(0)
    tensors, added = {}, {}
    for number, (module, parts) in enumerate(modules.items()):
        rank, alpha = ((4, 2.0), (4, 3.0), (2, 5.0))[number % 3]
        rows = sum(layers[part].out_features for part in parts)
        down = (torch.randn(rank, layers[parts[0]].in_features, generator=generator) * 0.3).to(dtype)
        up = (torch.randn(rows, rank, generator=generator) * 0.3).to(dtype)
        key = style.key(module)
        tensors |= {f"{key}.{style.down}": down, f"{key}.{style.up}": up}
        if style.has_alpha:
            tensors[f"{key}.alpha"] = torch.tensor(alpha, dtype=dtype)
        scale = alpha / rank if style.has_alpha or metadata else 1.0
        added |= dict(zip(parts, (scale * up.double() @ down.double()).float().chunk(len(parts)), strict=True))
    file.parent.mkdir(exist_ok=True)
    save_file(tensors | (more or {}), file, metadata=metadata)
    return added


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """The tiny pipeline of a family, built once."""
    built = {}

    def of(name: str) -> DiffusionPipeline:
        if name not in built:
            folder = getattr(tiny_models, f"build_tiny_{name}")(tmp_path_factory.mktemp(name) / "tiny")
            built[name] = DiffusionPipeline.from_pretrained(folder)
            built[name].set_progress_bar_config(disable=True)
        return built[name]

    return of


def start(base: DiffusionPipeline, adapter: Path | str) -> PeftModel:
    """The model that training with this adapter starts from."""
    pipeline = load_pipeline(fresh(base), torch.float32)
    return prepare_transformer(pipeline, get_family(pipeline), SavedAdapter.read(str(adapter), pipeline), True)


def in_diffusers(base: DiffusionPipeline, adapter: Path) -> DiffusionPipeline:
    pipeline = fresh(base)
    pipeline.load_lora_weights(adapter, **({} if adapter.is_dir() else {"weight_name": adapter.name}))
    return pipeline


@pytest.mark.parametrize("name", FORMATS)
def test_every_layer_changes_as_in_the_program_that_saved_it(name, base_of, tmp_path):
    family, style, modules = FORMATS[name]
    base = base_of(family)
    file = tmp_path / "styles" / "style.safetensors"
    wanted = write(file, base.transformer, modules, style)
    assert min(float(change.norm()) for change in wanted.values()) > 0
    model = start(base, file)
    assert deviation(changes(model), wanted) < 1e-6
    loaded = in_diffusers(base, file)
    assert deviation(changes(model), changes(loaded.transformer)) == 0
    assert all(parameter.requires_grad == ("lora_" in key) for key, parameter in model.named_parameters())
    assert deviation(changes(start(base, file.parent)), wanted) < 1e-6  # the only file of its directory


@pytest.mark.parametrize("is_split", [False, True])
def test_the_fused_layer_of_flux_at_its_real_size(is_split, base_of, tmp_path):
    """With `split_qkv=True` kohya trains its four parts apart, and saves them as one of four times the rank."""
    parts, rank, generator = (3072, 3072, 3072, 12288), 2, torch.Generator().manual_seed(0)
    ups = [torch.randn(size, rank, generator=generator) for size in parts]
    down = torch.randn(4 * rank if is_split else rank, 8, generator=generator)
    up, key = torch.block_diag(*ups) if is_split else torch.cat(ups), "lora_unet_single_blocks_0_linear1"
    tensors = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(3.0)}
    save_file({f"{key}.{name}": value for name, value in tensors.items()}, tmp_path / "style.safetensors")
    config, weights = convert_lora(str(tmp_path / "style.safetensors"), base_of("flux"))
    names = [f"{SINGLE}.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
    found = [[weights[f"base_model.model.{name}.lora_{each}.weight"] for each in "BA"] for name in names]
    assert deviation({"": torch.cat([b @ a for b, a in found])}, {"": up @ down * 3 / len(down)}) < 1e-6
    assert config.r == config.lora_alpha == rank and all(re.fullmatch(config.target_modules, name) for name in names)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_metadata_of_diffusers(base_of, tmp_path, use_rslora):
    base = base_of("flux")
    layers = list(OWN_FLUX)
    config = {"r": 4, "lora_alpha": 2, "rank_pattern": {layers[2]: 2}, "alpha_pattern": {layers[1]: 3, layers[2]: 5}}
    config |= {"target_modules": ["to_q", "to_k"], "lora_dropout": 0.5, "use_rslora": use_rslora}
    metadata = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in config.items()})}
    file = tmp_path / "style.safetensors"
    wanted = write(file, base.transformer, OWN_FLUX, DIFFUSERS, metadata=metadata)
    found = changes(start(base, file))
    if not use_rslora:
        assert deviation(found, wanted) < 1e-6
    assert deviation(found, changes(in_diffusers(base, file).transformer)) == 0


def test_alpha_is_not_rounded_in_half_precision(base_of, tmp_path):
    base = base_of("flux")
    file = tmp_path / "style.safetensors"
    wanted = write(file, base.transformer, FLUX, KOHYA, dtype=torch.bfloat16)
    assert deviation(changes(in_diffusers(base, file).transformer), wanted) > 1e-3
    assert deviation(changes(start(base, file)), wanted) < 1e-6


def test_training_goes_on_from_it(make_trainer, base_of, tiny_flux, tmp_path):
    file = tmp_path / "style.safetensors"
    write(file, base_of("flux").transformer, FLUX, KOHYA)
    trainer = make_trainer(num_prompts_per_generation=2, max_steps=3, beta=0.01, peft_config=str(file))
    before = weights_of(trainer)
    image = draw(in_diffusers(base_of("flux"), file))
    assert np.array_equal(draw(trainer.pipeline), image) and np.abs(image - draw(fresh(base_of("flux")))).mean() > 2
    loaded = generation.load_for_inference(str(file), str(tiny_flux), dtype=torch.float32, device="cpu")[0]
    assert np.array_equal(draw(loaded), image)
    trainer.train()
    assert logs_with(trainer, "kl")[0] == 0 < min(logs_with(trainer, "kl")[1:])  # from the LoRA as it came
    assert not any(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())

    saved = tmp_path / "saved"
    trainer.save_model(str(saved))
    by_peft = fresh(base_of("flux"))
    by_peft.transformer = PeftModel.from_pretrained(by_peft.transformer, saved)
    after = draw(by_peft)
    assert np.array_equal(after, draw(in_diffusers(base_of("flux"), saved))) and not np.array_equal(after, image)
    assert json.loads((saved / "paco_trl.json").read_text())["lora"]["continued_from"] == "style.safetensors"
    assert str(tmp_path) not in (saved / "README.md").read_text()


ONE = {"double_blocks.0.img_attn.proj": FLUX["double_blocks.0.img_attn.proj"]}
KEY = "lora_unet_double_blocks_0_img_attn_proj"
STRANGERS = {
    "a text encoder": ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": (4, 8)}, "text encoder"),
    "DoRA": ({f"{KEY}.dora_scale": (32, 1)}, "dora_scale"),
    "a bias": ({"transformer.proj_out.lora_B.bias": (16,)}, "lora_B.bias"),
    "an up matrix alone": ({"transformer.proj_out.lora_B.weight": (16, 4)}, "is broken: 1 layers"),
    "a down matrix alone": ({"lora_unet_img_in.lora_down.weight": (2, 16)}, "is broken: 1 layers"),
    "two ranks": (
        {"transformer.proj_out.lora_A.weight": (2, 32), "transformer.proj_out.lora_B.weight": (16, 4)}, "is broken: 1 layers"
    ),
    "a number": ({"transformer.proj_out.lora_B.weight": ()}, "is broken: 1 layers"),
    "diffusers#11790": ({"transformer.proj_out.lora_A.default_0.weight": (4, 32)}, "PEFT adapter in theirs"),
    "DiffSynth-Studio#886": ({"proj_out.lora_B.default_0.default.weight": (16, 4)}, "PEFT adapter in theirs"),
    "ComfyUI#4347": ({"transformer.base_model.model.proj_out.lora_A.weight": (4, 32)}, "`adapter_config.json`"),
    "PEFT's weights alone": ({"base_model.model.proj_out.lora_A.weight": (4, 32)}, "`adapter_config.json`"),
    "SimpleTuner's LyCORIS": ({"lycoris_transformer_blocks_0_attn_to_q.lora_down.weight": (4, 32)}, "LyCORIS"),
    # diffusers 0.42 converts it to a name that it then does not load
    "a layer that is dropped": (
        {"lora_unet_img_in.lora_down.weight": (2, 16), "lora_unet_img_in.lora_up.weight": (32, 2)}, "x_embedder"
    ),
    "a layer that diffusers does not know": (
        {"lora_unet_head.lora_down.weight": (2, 16), "lora_unet_head.lora_up.weight": (32, 2)}, "lora_unet_head"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGERS)
def test_what_would_be_left_out_is_an_error(name, base_of, tmp_path):
    shapes, token = STRANGERS[name]
    more = {key: torch.ones(shape) for key, shape in shapes.items()}
    file, base = tmp_path / "style.safetensors", base_of("flux")
    wanted = write(file, base.transformer, ONE, KOHYA)
    assert changes(start(base, file)).keys() == wanted.keys()
    write(file, base.transformer, ONE, KOHYA, more=more)
    with pytest.raises(ValueError, match=token):
        start(base, file)


def test_a_layer_that_the_converter_of_flux2_drops(base_of, tmp_path):
    file, base = tmp_path / "style.safetensors", base_of("flux2_klein")
    stranger = {f"lora_unet_head.lora_{name}.weight": torch.ones(s) for name, s in (("down", (2, 32)), ("up", (8, 2)))}
    wanted = write(file, base.transformer, FLUX2, KOHYA, more=stranger)
    assert changes(in_diffusers(base, file).transformer).keys() == wanted.keys()
    with pytest.raises(ValueError, match="8 of .* rows"):
        start(base, file)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What a stranger may have made of a file of an adapter, whose JSON or tensors are given
BROKEN = {
    "no config": (CONFIG, lambda config: None),
    "half a config": (CONFIG, lambda config: json.dumps(config)[:-9]),
    "a list": (CONFIG, lambda config: "[]"),
    "a new type": (CONFIG, lambda config: json.dumps({**config, "peft_type": "NEW"})),
    "a rank in words": (CONFIG, lambda config: json.dumps({**config, "r": "four"})),
    "another rank": (CONFIG, lambda config: json.dumps({**config, "r": 3})),
    "a layer that does not exist": (CONFIG, lambda config: json.dumps({**config, "target_modules": ["to_nowhere"]})),
    "half the weights": (WEIGHTS, lambda weights: save(weights)[:-9].decode("latin-1")),
    "DoRA": (CONFIG, lambda config: json.dumps({**config, "use_dora": True})),
    "a list for a dictionary": (CONFIG, lambda config: json.dumps({**config, "rank_pattern": [3]})),
    "a base that is a number": (CONFIG, lambda config: json.dumps({**config, "base_model_name_or_path": 3})),
    "no matrix": (WEIGHTS, lambda weights: save(dict(list(weights.items())[1:])).decode("latin-1")),
    "a row": (WEIGHTS, lambda weights: save({name: each[0] for name, each in weights.items()}).decode("latin-1")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_adapter_of_peft(name, base_of, make_trainer, tiny_flux, tmp_path):
    base = base_of("flux")
    write(tmp_path / "style.safetensors", base.transformer, OWN_FLUX, DIFFUSERS)
    start(base, tmp_path / "style.safetensors").save_pretrained(saved := tmp_path / "saved")
    make_trainer(peft_config=str(saved))
    model = shutil.copytree(tiny_flux, tmp_path / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))
    file, change = BROKEN[name]
    content = change(json.loads((saved / CONFIG).read_text()) if file == CONFIG else load_file(saved / WEIGHTS))
    (saved / file).unlink()
    if content is not None:
        (saved / file).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"adapter '{saved}'"):  # before the weights are read: there are none
        make_trainer(model=str(model), peft_config=str(saved))


def test_another_family(make_trainer, base_of, tmp_path):
    write(tmp_path / "style.safetensors", base_of("qwen_image").transformer, QWEN, KOHYA)
    with pytest.raises(ValueError, match="FluxPipeline"):
        make_trainer(peft_config=str(tmp_path / "style.safetensors"))


def test_files_that_are_not_read(make_trainer, base_of, tmp_path):
    for name in ("style.bin", "style.pt"):
        torch.save({"transformer.proj_out.lora_A.weight": torch.ones(4, 32)}, tmp_path / name)
        for given in (tmp_path / name, tmp_path):
            with pytest.raises(ValueError, match="pickles"):
                make_trainer(peft_config=str(given))
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", base_of("flux").transformer, OWN_FLUX, DIFFUSERS)
    with pytest.raises(ValueError, match="2 safetensors files"):
        make_trainer(peft_config=str(tmp_path))
    (tmp_path / "two.safetensors").rename(tmp_path / "pytorch_lora_weights.safetensors")
    assert make_trainer(peft_config=str(tmp_path)).trained_from == tmp_path.name


def test_a_file_on_the_hub(base_of, tmp_path):
    file, base = tmp_path / "style.safetensors", base_of("flux")
    wanted = write(file, base.transformer, OWN_FLUX, DIFFUSERS)
    start(base, file).save_pretrained(tmp_path / "peft")
    peft = {path.name: path.read_bytes() for path in (tmp_path / "peft").iterdir()} | {"optimizer.pt": b""}
    with HubServer({}) as hub, hub.connected(tmp_path / "cache"):
        hub.add_repo("user/one", {"pytorch_lora_weights.safetensors": file.read_bytes()})
        hub.add_repo("user/many", {"flux/style.safetensors": file.read_bytes(), "style.safetensors": b""})
        hub.add_repo("user/peft", peft | {f"last/{name}": content for name, content in peft.items()})
        names = ("user/peft/adapter_model.safetensors", "user/peft/last/adapter_model.safetensors")
        for name in ("user/one", "user/many/flux/style.safetensors", *names):
            assert deviation(changes(start(base, name)), wanted) < 1e-6
        assert not any("optimizer" in path for _, path in hub.requests)
        for name in ("user/many", "user/many/nope.safetensors"):
            with pytest.raises(ValueError, match="Name the file"):
                start(base, name)
        index = Path(base.name_or_path, "model_index.json").read_bytes()
        branches = hub.add_repo("user/base", {"model_index.json": index}).branches
        branches["next"] = branches.pop("main")
        arguments = ScriptArguments(model_name_or_path="user/base", adapter=str(file))
        assert get_peft_config(arguments, {"revision": "next"}).name == str(file)
        with pytest.raises(OSError, match="user/base"):
            get_peft_config(arguments)
