# SPDX-License-Identifier: Apache-2.0
"""
Compare the memory plan of `paco-trl doctor` with allocations that were measured, and make the table of cards.

    PYTHONPATH=tests python benchmarks/memory/memory_plan.py --output runs/memory_plan.json

The plan runs forwards and backwards on tensors without data. Measured is what PyTorch's allocator reports
(`torch.profiler`) while the same phase runs with real weights on the CPU, through the trainer's own generation and
replay. The table of cards is arithmetic: it is the plan for the configs of published models, which are written below.
"""

import argparse
import gc
import json
import platform
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

import tiny_models
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoRewardConfig
from paco_trl.commands.sample_generator import SampleGenerator
from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.planning import plan_memory
from paco_trl.planning.peaks import fake_weights, training_precision
from paco_trl.planning.plan import USABLE
from paco_trl.rewards import redness_reward
from paco_trl.trainer.paco_reward_trainer import complete_peft_config


GIB = 2**30

# ---- Published configs ----

T5_XXL = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu",
    "is_gated_act": True, "dense_act_fn": "gelu_new",
    "vocab_size": 32128,
}  # fmt: skip
CLIP_L = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 77, "projection_dim": 768, "vocab_size": 49408,
}  # fmt: skip
CLIP_G = {**CLIP_L, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
          "projection_dim": 1280}  # fmt: skip
VAE = {
    "sample_size": 1024, "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16, "norm_num_groups": 32,
}  # fmt: skip
FLUX = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
SD3_MEDIUM = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048, "out_channels": 16, "pos_embed_max_size": 384,
    "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm",
}  # fmt: skip
QWEN_IMAGE = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
FLUX2_KLEIN_4B = {
    "patch_size": 1, "in_channels": 128, "num_layers": 5, "num_single_layers": 20, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 7680, "mlp_ratio": 3.0, "axes_dims_rope": [32] * 4,
    "rope_theta": 2000,
}  # fmt: skip
QWEN3_4B = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_window_layers": 36,
    "layer_types": ["full_attention"] * 36, "tie_word_embeddings": True,
}  # fmt: skip
FLUX2_VAE = {**VAE, "latent_channels": 32}
QWEN_VL_7B = {
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip
CLIP_H = {  # of CLIP-T
    "text_config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    },
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16, "num_hidden_layers": 32,
        "patch_size": 14,
    },
    "projection_dim": 1024,
}  # fmt: skip
QWEN_VAE = {
    "base_dim": 96, "z_dim": 16, "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16, "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "temperal_downsample": [False, True, True],
}  # fmt: skip

# Model -> builder of the tiny pipeline whose tokenizers it uses, configs of its parts, guidance, resolutions
MODELS = {
    "FLUX.1-dev": (
        "build_tiny_flux", {"transformer": FLUX, "text_encoder": CLIP_L, "text_encoder_2": T5_XXL, "vae": VAE}, {},
    ),
    "FLUX.1-Kontext-dev": (
        "build_tiny_flux_kontext",
        {"transformer": FLUX, "text_encoder": CLIP_L, "text_encoder_2": T5_XXL, "vae": VAE}, {},
    ),
    "Stable Diffusion 3.5 medium": (
        "build_tiny_stable_diffusion_3",
        {"transformer": SD3_MEDIUM, "text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "text_encoder_3": T5_XXL,
         "vae": VAE},
        {"guidance_scale": 4.5},
    ),
    "FLUX.2-klein-base-4B": (
        "build_tiny_flux2_klein",
        {"transformer": FLUX2_KLEIN_4B, "text_encoder": QWEN3_4B, "vae": FLUX2_VAE}, {"guidance_scale": 4.0},
    ),
    "Qwen-Image": (
        "build_tiny_qwen_image", {"transformer": QWEN_IMAGE, "text_encoder": QWEN_VL_7B, "vae": QWEN_VAE},
        {"guidance_scale": 4.0, "negative_prompt": " "},
    ),
    "Qwen-Image-Edit": (
        "build_tiny_qwen_image_edit", {"transformer": QWEN_IMAGE, "text_encoder": QWEN_VL_7B, "vae": QWEN_VAE},
        {"guidance_scale": 4.0, "negative_prompt": " "},
    ),
}  # fmt: skip
TINY = {
    "build_tiny_flux": {},
    "build_tiny_stable_diffusion_3": {"guidance_scale": 4.5},
    "build_tiny_qwen_image": {"guidance_scale": 4.0, "negative_prompt": " "},
    "build_tiny_flux2": {},
    "build_tiny_z_image": {"guidance_scale": 4.0},
}
MEDIUM = {  # of 36 million weights
    "in_channels": 16, "num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4, "attention_head_dim": 128,
    "joint_attention_dim": 16, "pooled_projection_dim": 16, "guidance_embeds": True,
}  # fmt: skip


def write_configs(folder: Path, configs: dict[str, dict]) -> None:
    """Replace configs of a saved pipeline; its weights no longer fit, and are not read."""
    for name, new in configs.items():
        path = folder / name / "config.json"
        old = json.loads(path.read_text(encoding="utf-8"))
        merged = {**old, **{k: {**old.get(k, {}), **v} if isinstance(v, dict) else v for k, v in new.items()}}
        if "text_config" in new:  # what a larger width needs
            merged["text_config"].pop("layer_types", None)
            merged["text_config"]["rope_parameters"] = {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24],
            }  # fmt: skip
        path.write_text(json.dumps(merged), encoding="utf-8")
    path = folder / "processor" / "processor_config.json"
    if path.exists():  # a source image has as many tokens as with Qwen2.5-VL's own
        config = json.loads(path.read_text(encoding="utf-8"))
        config["image_processor"]["size"] = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
        path.write_text(json.dumps(config), encoding="utf-8")
    lengths = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2", "tokenizer_3": "text_encoder_3"}
    for name, encoder in lengths.items():
        path = folder / name / "tokenizer_config.json"
        if path.exists() and encoder in configs and "text_config" not in configs[encoder]:
            config = json.loads(path.read_text(encoding="utf-8"))
            config["model_max_length"] = configs[encoder].get("max_position_embeddings", 512)
            path.write_text(json.dumps(config), encoding="utf-8")


def rows_of(size: int, is_editing: bool) -> Dataset:
    if is_editing:
        source = Image.new("RGB", (size, size))
        return Dataset.from_list([{"prompt": "make the hat red", "image": source, "height": size, "width": size}] * 4)
    rows = load_image_set_prompts(demo_prompts_path()).filter(lambda row: (row["rows"], row["cols"]) == (2, 2))
    longest = max(range(len(rows)), key=lambda number: len(rows[number]["prompt"]))
    return rows.select([longest] * 4).map(lambda row: {"height": size, "width": size})


def settings(folder: Path, size: int, **changes) -> PaCoGRPOConfig:
    values = {
        "output_dir": str(folder / "out"), "use_cpu": True, "report_to": "none", "height": size, "width": size,
        "resolution_scale": 1.0, "num_generations": 4, "num_prompts_per_generation": 4, "num_inference_steps": 4,
        "sde_steps": [1], "per_device_train_batch_size": 2, "disable_tqdm": True,
    }  # fmt: skip
    return PaCoGRPOConfig(**{**values, **changes})


# ---- Measured ----


def measured_peak(function: Callable[[], object]) -> int:
    """Return the peak of the bytes that the allocator holds more than before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    now = highest = 0
    for _, size in events:
        now += size
        highest = max(highest, now)
    return highest


def compare_image_model(model: Path, folder: Path, size: int, bf16: bool, **changes) -> dict:
    """Compare the phases of a run that really takes place."""
    return {
        name: cell
        for checkpointing in (False, True)
        for name, cell in compare_run(model, folder, size, bf16, checkpointing, changes).items()
    }


def compare_run(model: Path, folder: Path, size: int, bf16: bool, checkpointing: bool, changes: dict) -> dict:
    dataset, peft_config = rows_of(size, is_editing=False), LoraConfig(r=4, lora_alpha=8)
    args = settings(folder, size, bf16=bf16, gradient_checkpointing=checkpointing, **changes)
    plan = plan_memory(str(model), args, dataset, peft_config)
    trainer = PaCoGRPOTrainer(
        model=str(model), reward_funcs=redness_reward, args=args, train_dataset=dataset, peft_config=peft_config
    )
    generator = SampleGenerator(trainer.policy, trainer.train_rows, args, is_new_adapter=True)
    generator.prepare()
    batch, sde = args.per_device_train_batch_size, generator.sde_settings(args.noise_level)
    record = generator.generate(batch, sde).records[0]

    def step():
        with training_precision(torch.bfloat16 if bf16 else torch.float32):
            generator.replay(record).mean().backward()

    step()  # the gradients exist from here on
    phases = {phase.name: phase.device for phase in plan.phases}
    name = f"train, {'with' if checkpointing else 'without'} checkpointing"
    found = {name: pair(phases["train"]["activations"], measured_peak(step))}
    if not checkpointing:
        planned = max(phases[name]["activations"] for name in ("generate", "decode"))
        with training_precision(torch.bfloat16 if bf16 else torch.float32):
            found["generate and decode"] = pair(planned, measured_peak(lambda: generator.generate(batch)))
        optimizer = trainer.create_optimizer()
        found["optimizer"] = pair(phases["train"]["optimizer"], measured_peak(optimizer.step))
    return found


def compare_judge(folder: Path, num_tokens: int = 64) -> dict:
    """Compare the language model of a judge in training and scoring."""
    model = tiny_models.build_tiny_qwen2_5_vl(folder / "judge")
    peft_config = complete_peft_config(LoraConfig(r=4), str(model), None, False)
    args, found = PaCoRewardConfig(str(folder), bf16=True, use_cpu=True), {}
    judge = plan_memory(str(model), args, peft_config=peft_config).run
    network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.bfloat16).requires_grad_(False)
    trained = get_peft_model(network, peft_config).train()
    for checkpointing in (False, True):
        if checkpointing:
            network.activation_checkpointing_enable()
        embeds = torch.zeros(2, num_tokens, 64, dtype=torch.bfloat16, requires_grad=True)

        def step(embeds=embeds):
            with training_precision(torch.bfloat16):
                states = network.get_decoder()(inputs_embeds=embeds, use_cache=False).last_hidden_state
                states.float().square().mean().backward()

        step()
        name = f"train, {'with' if checkpointing else 'without'} checkpointing"
        found[name] = pair(judge.peak(2, num_tokens, True, checkpointing), measured_peak(step))
    assert trained is not None
    return found


def pair(planned: int, measured: int) -> dict:
    return {"planned": planned, "measured": measured, "error": round(planned / measured - 1, 4)}


# ---- The table of cards ----


def plan_cards(folder: Path, name: str) -> list[dict]:
    """Plan a published model for each card, resolution and quantization."""
    builder, configs, guidance = MODELS[name]
    model, is_editing = getattr(tiny_models, builder)(folder / builder), "edit" in builder or "kontext" in builder
    write_configs(Path(model), configs)
    cells = []
    for size in (512, 1024):
        args = settings(
            folder, 1024, bf16=True, resolution_scale=size / 1024, num_generations=16, num_prompts_per_generation=42,
            per_device_train_batch_size=1, num_inference_steps=10, vae_tiling=True, **guidance,
        )  # fmt: skip
        plan = plan_memory(str(model), args, rows_of(1024, is_editing), LoraConfig(r=64, lora_alpha=128))
        calls = plan.run.transformer_calls(1)
        fake_weights(plan.run.model, plan.run.mode)
        with plan.run.mode, plan.run.training_precision(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            for call in calls:
                plan.run.model(**call)
        for quantization in (None, "int8", "nf4"):
            for checkpointing in (True, False):
                base = replace(plan, quantization=quantization, gradient_checkpointing=checkpointing)
                cell = {
                    "model": name,
                    "resolution": size,
                    "quantization": quantization,
                    "checkpointing": checkpointing,
                }
                cell["forward_tflop"] = round(counter.get_total_flops() / 1e12, 2)
                cell["phases_gib"] = {p.name: round(p.total / GIB, 2) for p in base.phases}
                for memory in (24, 48, 80, 141):
                    limit = USABLE * memory * GIB
                    cell[f"1 x {memory}"] = base.largest_batch(limit)
                    eight = replace(base, num_processes=8, zero_stage=3 if quantization is None else None)
                    cell[f"8 x {memory}"] = eight.largest_batch(limit)
                cells.append(cell)
    return cells


def markdown(cells: list[dict]) -> str:
    """The table of docs/my_card.md: the largest micro-batch with and without gradient checkpointing."""
    cards = [f"{count} x {memory}" for count in (1, 8) for memory in (24, 48, 80, 141)]
    lines = ["| model | size | weights | " + " | ".join(cards) + " |", "|---" * (3 + len(cards)) + "|"]
    key = lambda cell: (cell["model"], cell["resolution"], cell["quantization"])  # noqa: E731
    for name in dict.fromkeys(map(key, cells)):
        both = sorted((cell for cell in cells if key(cell) == name), key=lambda cell: not cell["checkpointing"])
        fits = [" / ".join(str(cell[card]) if cell[card] else "no" for cell in both) for card in cards]
        lines.append(f"| {name[0]} | {name[1]} | {name[2] or 'bf16'} | " + " | ".join(fits) + " |")
    return "\n".join(lines)


# bf16 TFLOP/s of GPUs with that memory, dense: RTX 4090, L40S, H100, H200
RATES = {24: 165, 48: 362, 80: 989, 141: 989}


def seconds(cells: list[dict]) -> str:
    """A table of benchmarks/speed/README.md: a round of 672 images at 31 % of these rates."""
    lines = [
        f"| model | size | TFLOP of a step | {' | '.join(f'1 x {memory}' for memory in RATES)} | 8 x 80 |",
        "|---" * 8 + "|",
    ]
    for cell in cells:
        if cell["quantization"] is None and cell["checkpointing"]:
            work = 672 * (10 + 3) * cell["forward_tflop"]  # of 10 steps, one of them trained with checkpointing
            times = [work / (0.31 * rate) for rate in RATES.values()]
            fits = [f"{time:.0f} s" for time in (*times, times[2] / 7)]  # 7 of 8 train
            lines.append(f"| {cell['model']} | {cell['resolution']} | {cell['forward_tflop']} | {' | '.join(fits)} |")
    return "\n".join(lines)


def ratios(measured: dict[str, dict]) -> dict:
    """The lowest and the highest ratio of what is planned to what is measured, by phase."""
    found: dict[str, list[float]] = {}
    for cells in measured.values():
        for name, cell in cells.items():
            found.setdefault(name.split(",")[0], []).append(round(cell["planned"] / cell["measured"], 3))
    return {name: {"lowest": min(values), "highest": max(values)} for name, values in found.items()}


def save(results: dict, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/memory_plan.json")
    parser.add_argument("--only", choices=("measured", "cards"))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    output = Path(options.output)
    results = json.loads(output.read_text()) if output.exists() else {}
    results["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only != "cards":
            results["measured"] = {}
            for builder, changes in TINY.items():
                model = Path(getattr(tiny_models, builder)(folder / builder))
                for bf16 in (False, True):
                    title = f"{builder.removeprefix('build_')}, {'bfloat16' if bf16 else 'float32'}"
                    results["measured"][title] = compare_image_model(model, folder, 64, bf16, **changes)
            medium = Path(tiny_models.build_tiny_flux(folder / "medium"))
            FluxTransformer2DModel(**MEDIUM, axes_dims_rope=(16, 56, 56)).save_pretrained(medium / "transformer")
            for bf16 in (False, True):
                title = f"medium_flux, {'bfloat16' if bf16 else 'float32'}"
                results["measured"][title] = compare_image_model(medium, folder, 64, bf16)
            results["measured"]["tiny_judge, bfloat16"] = compare_judge(folder)
            results["ratios"] = ratios(results["measured"])
            save(results, output)
        if options.only != "measured":
            cards = [cell for cell in results.get("cards", []) if cell["model"] not in options.models]
            for name in options.models:
                cards += plan_cards(folder, name)
                results["cards"] = cards
                save(results, output)
            print(markdown(cards), seconds(cards), sep="\n\n")


if __name__ == "__main__":
    main()
