# SPDX-License-Identifier: Apache-2.0
"""
What recording a rollout and replaying a step cost, side by side with the plain pipeline, in one run.

    python benchmarks/speed/rollout_overhead.py                  # a small FLUX with random weights
    python benchmarks/speed/rollout_overhead.py --device cuda --dtype bfloat16 --layers 19 --single_layers 38 --width 24

Prints and saves ratios; the times behind them depend on the machine.
"""

import argparse
import inspect
import json
import statistics
import time
from pathlib import Path

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig

from paco_trl.rollout import RecordingPipeline, SDESettings, compute_log_prob, get_family, predict
from paco_trl.rollout.loading import load_pipeline
from paco_trl.rollout.policy_building import prepare_transformer
from paco_trl.tiny import build_tiny_flux


def median_time(function, repeats: int, device: str) -> float:
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--single_layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4, help="attention heads of 128 channels")
    parser.add_argument("--size", type=int, default=64, help="pixels per side; the tiny VAE has 4 pixels a token")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default="runs/benchmark")
    parser.add_argument("--output", default="benchmarks/speed/rollout_overhead.json")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)

    folder = build_tiny_flux(Path(args.folder) / "flux")
    torch.manual_seed(0)
    with torch.device(args.device):
        transformer = FluxTransformer2DModel(
            in_channels=16,
            num_layers=args.layers,
            num_single_layers=args.single_layers,
            attention_head_dim=128,
            num_attention_heads=args.width,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            guidance_embeds=True,
        )
    transformer.to(dtype)
    plain = FluxPipeline.from_pretrained(folder, transformer=transformer, dtype=dtype).to(args.device)
    plain.set_progress_bar_config(disable=True)
    family = get_family(plain)
    prompt = family.encode_prompt(plain, "a story in four panels", torch.device(args.device))
    arguments = {"height": args.size, "width": args.size, "num_inference_steps": args.steps, "guidance_scale": 3.5}
    autocast = torch.autocast(args.device, dtype, enabled=dtype != torch.float32)

    def generate_plain():
        with autocast:
            plain(**prompt, **arguments, generator=torch.Generator().manual_seed(0))

    plain_time = median_time(generate_plain, args.repeats, args.device)

    # The same transformer, now with an adapter and the recording scheduler
    pipeline = load_pipeline(plain, dtype)
    signature = inspect.signature(pipeline.transformer.forward)
    lora = LoraConfig(r=16, lora_alpha=32, init_lora_weights="gaussian")
    model = prepare_transformer(pipeline, family, lora, autocast_adapter_dtype=True)
    pipeline.transformer = model

    def generate_with_adapter():
        with autocast:
            pipeline(**prompt, **arguments, generator=torch.Generator().manual_seed(0))

    adapter_time = median_time(generate_with_adapter, args.repeats, args.device)

    policy = RecordingPipeline(pipeline, family, model, signature)
    sde = SDESettings((1,), 0.7)
    records = []

    def generate_with_policy():
        nonlocal records
        with autocast:
            _, records = policy.generate(
                prompt, args.size, args.size, args.steps, 3.5, noise_keys=[(0, 0, 0, 0, 0)], sde=sde
            )

    policy_time = median_time(generate_with_policy, args.repeats, args.device)

    def forward():
        with autocast, torch.no_grad():
            model(**records[0].calls[0])

    def replay_step():
        with autocast, torch.no_grad():
            velocity = predict(model, records[0].calls, family, 3.5, records[0].sample)
            compute_log_prob(velocity, records[0], sde)

    forward_time = median_time(forward, args.repeats, args.device)
    replay_time = median_time(replay_step, args.repeats, args.device)

    report = {
        "setting": {name: value for name, value in vars(args).items() if name not in ("folder", "output")},
        "transformer_parameters": sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name),
        "torch": torch.__version__,
        "ratios": {
            "rollout that records / pipeline with the same adapter": round(policy_time / adapter_time, 3),
            "pipeline with adapter / pipeline without": round(adapter_time / plain_time, 3),
            "replay of a step / one forward of the transformer": round(replay_time / forward_time, 3),
        },
    }
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
