# SPDX-License-Identifier: Apache-2.0
"""
Compare the memory plan of `paco-trl doctor` with allocations that were measured, and make the table of cards.

    PYTHONPATH=tests python benchmarks/memory/memory_plan.py --output runs/memory_plan.json

The plan runs forwards and backwards on tensors without data. Measured is what PyTorch's allocator reports
(`torch.profiler`) while the same phase runs with real weights on the CPU, through the trainer's own generation and
replay. The table of cards is arithmetic: it is the plan for the packaged configs of published models.
"""

import argparse
import gc
import json
import platform
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from paco_trl.planning.known_models import write_known_model
from paco_trl.planning.peaks import fake_weights, training_precision
from paco_trl.planning.plan import USABLE_FRACTION
from paco_trl.rewards import redness_reward
from paco_trl.trainer.paco_reward_trainer import complete_peft_config


GIB = 2**30

# Published models whose table is made, and how they are guided
MODELS = {
    "black-forest-labs/FLUX.1-dev": {},
    "black-forest-labs/FLUX.1-Kontext-dev": {},
    "stabilityai/stable-diffusion-3.5-medium": {"guidance_scale": 4.5},
    "black-forest-labs/FLUX.2-klein-base-4B": {"guidance_scale": 4.0},
    "Qwen/Qwen-Image": {"guidance_scale": 4.0, "negative_prompt": " "},
    "Qwen/Qwen-Image-Edit": {"guidance_scale": 4.0, "negative_prompt": " "},
}
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
    judge: Any = plan_memory(str(model), args, peft_config=peft_config).run
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
    model, is_editing = write_known_model(name, folder / name), "Edit" in name or "Kontext" in name
    cells = []
    for size in (512, 1024):
        args = settings(
            folder, 1024, bf16=True, resolution_scale=size / 1024, num_generations=16, num_prompts_per_generation=42,
            per_device_train_batch_size=1, num_inference_steps=10, vae_tiling=True, **MODELS[name],
        )  # fmt: skip
        plan = plan_memory(str(model), args, rows_of(1024, is_editing), LoraConfig(r=64, lora_alpha=128))
        run: Any = plan.run
        pipeline = run.planned
        calls = pipeline.transformer_calls(1, run.image)
        fake_weights(pipeline.model, pipeline.mode)
        with pipeline.mode, pipeline.training_precision(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            for call in calls:
                pipeline.model(**call)
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
                    limit = USABLE_FRACTION * memory * GIB
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
