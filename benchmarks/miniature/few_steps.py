# SPDX-License-Identifier: Apache-2.0
"""
Distill the toy FLUX to 4 steps, train it there by PaCo-GRPO, and compare with the base trained at 8 steps.

    python benchmarks/miniature/few_steps.py  # about an hour and a half on one core

The distillation is a LoRA, each of whose steps goes where four steps of the base go. "few-step model" is the base with
this LoRA fused, like a Turbo or Lightning model. Finished runs are kept in `--work_dir`, in directories that
`paper_claims.py` shares. Truth is read from pixels. Intervals are bootstrapped over the test prompts of all seeds.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from diffusers import FluxPipeline
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from tqdm import tqdm

from claims.common import USUAL, before_and_after, prepared
from miniature.evaluation_step import Truths, generate_and_read, generate_with
from miniature.generator_step import train_generator
from miniature.models import toy_flux_path
from miniature.run import Miniature
from miniature.world import sample_specs, write_prompt
from paco_trl.rollout.families.flux import FluxFamily


FEW, MANY, TEACHER = 4, 8, 16  # steps of the few-step model, of the base in the miniature, of its teacher
TRAJECTORIES = {64: 1536, 128: 1024}  # of the teacher, by pixels of a set: training at half size, and evaluation
DISTILLATION_STEPS, BATCH_SIZE, LEARNING_RATE, RANK = 800, 32, 2e-3, 32
SHARE_NAMED = 0.5  # of the prompts of the distillation: the figure is named

BASE = "base at 8 steps"
# Model and number of steps of each training, and what is not as in (e)
ARMS: dict[str, tuple[bool, int, dict[str, Any]]] = {
    BASE: (False, MANY, {}),
    "few-step model, flow_sde": (True, FEW, {}),
    "few-step model, cps": (True, FEW, {"sde_type": "cps"}),
    "few-step model, noise 0.3": (True, FEW, {"noise_level": 0.3}),
    "few-step model, noise 1": (True, FEW, {"noise_level": 1.0}),
}
BESIDE = "base at 8 steps, with the few-step LoRA at 4"  # trained as the first, used as the others


def load_toy(path: Path | None = None) -> FluxPipeline:
    pipeline = FluxPipeline.from_pretrained(str(path or toy_flux_path()))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# ---- The distillation ----


@torch.no_grad()
def teach(pipeline: FluxPipeline, size: int, count: int, random: np.random.Generator) -> dict[str, torch.Tensor]:
    """Generate sets with the base in 16 steps, and keep where each step of the few-step model begins and ends."""
    kept: dict[str, list[torch.Tensor]] = {"latents": [], "prompt_embeds": [], "pooled": []}
    length = pipeline.tokenizer_2.model_max_length
    for start in tqdm(range(0, count, 64), desc=f"Teacher at {size} pixels", mininterval=5):
        prompts = [write_prompt(sample_specs(random, random.random() < SHARE_NAMED)) for _ in range(64)]
        embeds, pooled, text_ids = pipeline.encode_prompt(prompts, None, max_sequence_length=length)
        generator = torch.Generator().manual_seed(start + size)
        side = size // 16
        noise = torch.randn(64, side * side, pipeline.transformer.config.in_channels, generator=generator)
        reached = [noise]

        def keep(_: Any, step: int, time: Any, values: dict[str, Any], reached=reached) -> dict[str, Any]:
            reached.append(values["latents"])
            return {}

        pipeline(
            prompt_embeds=embeds,
            pooled_prompt_embeds=pooled,
            height=size,
            width=size,
            num_inference_steps=TEACHER,
            guidance_scale=1.0,
            latents=noise,
            output_type="latent",
            callback_on_step_end=keep,
        )
        kept["latents"].append(torch.stack(reached[:: TEACHER // FEW], dim=1))  # (64, 5, tokens, channels)
        kept["prompt_embeds"].append(embeds)
        kept["pooled"].append(pooled)
    tensors = {name: torch.cat(values) for name, values in kept.items()}
    return tensors | {
        "sigmas": pipeline.scheduler.sigmas[:: TEACHER // FEW],
        "txt_ids": text_ids,
        "img_ids": pipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32),
    }


def distill(folder: Path) -> tuple[Path, Path]:
    """Train the few-step LoRA, and save it and the base with it fused."""
    lora, fused = folder / "few-step-lora", folder / "few-step-model"
    if (fused / "model_index.json").exists():
        return lora, fused
    pipeline, random = load_toy(), np.random.default_rng(0)
    taught = [teach(pipeline, size, count, random) for size, count in TRAJECTORIES.items()]
    transformer = pipeline.transformer
    targets = FluxFamily.lora_target_modules
    torch.manual_seed(0)
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, init_lora_weights="gaussian"))
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DISTILLATION_STEPS)
    losses = []
    for number in (progress := tqdm(range(DISTILLATION_STEPS), desc="Distillation", mininterval=5)):
        of_size = taught[number % len(taught)]
        rows = torch.from_numpy(random.integers(len(of_size["latents"]), size=BATCH_SIZE))
        step = torch.from_numpy(random.integers(FEW, size=BATCH_SIZE))
        begin, end = of_size["latents"][rows, step], of_size["latents"][rows, step + 1]
        sigma, next_sigma = of_size["sigmas"][step], of_size["sigmas"][step + 1]
        velocity = (end - begin) / (next_sigma - sigma)[:, None, None]
        predicted = transformer(
            hidden_states=begin,
            timestep=sigma,
            pooled_projections=of_size["pooled"][rows],
            encoder_hidden_states=of_size["prompt_embeds"][rows],
            txt_ids=of_size["txt_ids"],
            img_ids=of_size["img_ids"],
            return_dict=False,
        )[0]
        loss = (predicted - velocity).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{np.mean(losses[-100:]):.4f}")
    print("loss, first and last hundred:", np.mean(losses[:100]).round(4), np.mean(losses[-100:]).round(4), flush=True)
    config = transformer.peft_config["default"]
    weights = get_peft_model_state_dict(transformer)
    FluxPipeline.save_lora_weights(lora, weights, transformer_lora_adapter_metadata=config.to_dict())
    pipeline = load_toy()  # as a user would: the LoRA's file on the base
    pipeline.load_lora_weights(lora)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    pipeline.save_pretrained(fused)
    return lora, fused


@torch.no_grad()
def distances(fused: Path, miniature: Miniature) -> dict[str, float]:
    """Compute how far images are from those of the base in 64 steps, from the same noise, as fractions of white."""
    prompts = miniature.prompts("test")["prompt"][:]

    def generate(pipeline: FluxPipeline, steps: int) -> np.ndarray:
        images: list[Image.Image] = pipeline(
            prompts,
            height=128,
            width=128,
            num_inference_steps=steps,
            guidance_scale=1.0,
            generator=torch.Generator().manual_seed(0),
            max_sequence_length=pipeline.tokenizer_2.model_max_length,
        ).images
        return np.stack([np.asarray(image, dtype=np.float32) / 255 for image in images])

    base, few = load_toy(), load_toy(fused)
    truth = generate(base, 64)
    of = {"base, 8 steps": (base, MANY), "base, 4 steps": (base, FEW), "few-step model, 4 steps": (few, FEW)}
    return {name: round(float(np.sqrt(np.mean((generate(*one) - truth) ** 2))), 4) for name, one in of.items()}


# ---- The trainings ----


def load_with(lora: Path, adapter: Path) -> FluxPipeline:
    """Load the base with the few-step LoRA and a trained adapter beside it, as docs/use_and_share.md does."""
    pipeline = load_toy()
    pipeline.load_lora_weights(lora, adapter_name="few_steps")
    pipeline.load_lora_weights(adapter, adapter_name="consistency")
    pipeline.set_adapters(["few_steps", "consistency"])
    return pipeline


def rewards_of(adapter: Path) -> list[list[float]]:
    """Return the mean rewards of the first and the last round."""
    curves = pd.read_csv(adapter / "curves.csv")[["rewards/consistency/mean", "rewards/clip_t/mean"]].dropna()
    return curves.iloc[[0, -1]].to_numpy().tolist()


def as_lists(truths: Truths) -> dict[str, list[float]]:
    return {f"{prompt}/{noise}": list(truth) for (prompt, noise), truth in truths.items()}


def run_arm(arm: str, seed: int, work: Path, lora: Path, fused: Path) -> list[dict[str, Any]]:
    """Train a setting, and read the truth before and after at the steps of its use; of the base, also at few steps."""
    is_few, steps, change = ARMS[arm]
    folder = work / "few-steps" / f"{arm.replace(', ', '_').replace(' ', '-')}_seed-{seed}"
    file, adapter = folder / "result.json", folder / "adapter"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    print(f"{arm}, seed {seed}", flush=True)
    miniature = prepared(work, seed)
    prompts, model = miniature.prompts("test"), fused if is_few else None
    settings, few = (replace(miniature.settings, num_inference_steps=count) for count in (steps, FEW))
    if not (adapter / "adapter_model.safetensors").exists():
        train_generator(
            adapter,
            miniature.step_folder("judge"),
            miniature.prompts("train"),
            settings,
            model=model,
            save_strategy="no",
            **(USUAL | {"sde_steps": [1]} | change | {"log_completions": False}),
        )
    before = work / "few-steps" / f"before-{steps}-{seed}"
    runs: list[dict[str, Any]] = [{
        "arm": arm,
        "seed": seed,
        "rewards": rewards_of(adapter),
        "before": as_lists(generate_and_read(before, None, prompts, settings, model=model)),
        "after": as_lists(generate_and_read(folder / "after", adapter, prompts, settings, model=model)),
    }]  # fmt: skip
    if arm == BASE:
        before = work / "few-steps" / f"before-{FEW}-{seed}"
        truths = generate_with(load_with(lora, adapter), folder / "after-beside", prompts, few)
        runs.append(runs[0] | {
            "arm": BESIDE,
            "before": as_lists(generate_and_read(before, None, prompts, few, model=fused)),
            "after": as_lists(truths),
        })  # fmt: skip
    file.write_text(json.dumps(runs), encoding="utf-8")
    return runs


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], []).append(run)
    return {
        arm: before_and_after(of_arm)
        | {"rewards of each seed, first and last": [np.round(run["rewards"], 3).tolist() for run in of_arm]}
        for arm, of_arm in by_arm.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--work_dir", type=Path, default=Path("miniature-benchmark"))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    lora, fused = distill(arguments.work_dir)
    runs = [
        run
        for arm in arguments.arms
        for seed in arguments.seeds
        for run in run_arm(arm, seed, arguments.work_dir, lora, fused)
    ]
    results = summarize(runs)
    record = {
        "setting": {
            "device": "cpu",
            "threads": 1,
            "seeds": arguments.seeds,
            "rounds": USUAL["max_steps"] // 2,
            "steps of the distillation": DISTILLATION_STEPS,
            "teacher's steps": TEACHER,
        },
        "torch": torch.__version__,
        "distance from 64 steps of the base": distances(fused, prepared(arguments.work_dir, arguments.seeds[0])),
        "ratios": {arm: result["consistency"]["difference"]["mean"] for arm, result in results.items()},
        "results": results,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: record[name] for name in ("distance from 64 steps of the base", "ratios")}, indent=1))


if __name__ == "__main__":
    main()
