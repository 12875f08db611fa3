# SPDX-License-Identifier: Apache-2.0
"""
Train the miniature's generator by AWM with the tricks of V-GRPO (https://huggingface.co/papers/2604.23380), one at a time.

    PYTHONPATH=examples:benchmarks python benchmarks/awm_tricks.py --output runs/awm_tricks.json   # about an hour

They are not options of the package: none holds over six seeds.
"""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import paco_trl.trainer.paco_nft_trainer as nft
from claims.common import USUAL, prepared, read_truth
from claims.objectives import OBJECTIVES
from miniature.generator_step import train_generator
from paco_trl import PaCoNFTTrainer
from paco_trl.rollout import keyed_generator
from paco_trl.trainer.losses import add_flow_noise


ROUNDS = 8  # enough to tell kinds of stochastic steps apart
# Noise and times are those of a prompt's first image; times are dealt out within a group, or, where a group shares its
# time, within a round; the loss of an image is divided by that of the weights that generated it
VARIANTS = ("as it is", "shared noise and times", "stratified times", "adaptive weight", "all three")


class Tricks(PaCoNFTTrainer):
    """AWM with one of the tricks, or all."""

    variant = VARIANTS[0]

    def _noise(self, noise_keys, records):
        args, (last,) = self.args, records
        shares = self.variant in ("shared noise and times", "all three")
        times = torch.tensor(self.policy.scheduler.times[: args.num_inference_steps - 1])
        generators = [keyed_generator(*(key[:-1] if shares else key), 1) for key in noise_keys]
        if self.variant in ("stratified times", "all three"):
            chosen = []
            for *shared, row, image in noise_keys:
                group, place = (shared, row) if shares else ([*shared, row], image)
                order = torch.randperm(len(times), generator=keyed_generator(*group, 2))
                chosen.append(times[order[place % len(times)]])
        else:
            chosen = [times[torch.randperm(len(times), generator=generator)[0]] for generator in generators]
        sigma, latents = torch.stack(chosen), last.prev_sample
        noise = torch.stack([torch.randn(latents.shape[1:], generator=generator) for generator in generators])
        sample, target = add_flow_noise(latents, noise, sigma)
        calls = nft.calls_at(last, self.family, sample, sigma)
        with torch.no_grad():
            velocity = nft.predict(self.model, calls, self.family, args.guidance_scale, sample)
        record = {field.name: getattr(last, field.name) for field in fields(last)} | {"calls": calls}
        return [nft.NoisedStep(**record, times=sigma, target=target, old_velocity=velocity)]

    def _matching_loss(self, velocity, record, advantages):
        plain = nft.matching_log_prob
        if self.variant in ("adaptive weight", "all three"):
            first = nft.velocity_error(record.old_velocity.double(), record.target.double())
            nft.matching_log_prob = lambda v, target, *_: -nft.velocity_error(v.double(), target.double()) / first
        try:
            return super()._matching_loss(velocity, record, advantages)
        finally:
            nft.matching_log_prob = plain


def run(variant: str, seed: int, work_dir: Path) -> dict[str, Any]:
    """Train with a variant, and read the truth before and after."""
    miniature, folder = prepared(work_dir, seed), work_dir / f"{variant.replace(' ', '_')}-{seed}"
    file = folder / "result.json"
    if not file.exists():
        trainer = type("VariantTrainer", (Tricks,), {"variant": variant})
        options = USUAL | {"sde_steps": [1]} | OBJECTIVES["awm"]
        options |= {"trainer_class": trainer, "max_steps": 2 * ROUNDS, "save_strategy": "no"}
        judge, prompts = miniature.step_folder("judge"), miniature.prompts("train")
        train_generator(folder / "adapter", judge, prompts, miniature.settings, **options)
        before = read_truth(work_dir / f"before-{seed}", None, miniature)
        after = read_truth(folder / "after", folder / "adapter", miniature)
        means = {
            name: np.mean(list(truths.values()), axis=0)[:2] for name, truths in (("before", before), ("after", after))
        }
        file.write_text(json.dumps({name: np.round(each, 3).tolist() for name, each in means.items()}))
    return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work_dir", type=Path, default=Path("miniature-benchmark"))
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(6)))
    args = parser.parse_args()
    results = {variant: [run(variant, seed, args.work_dir) for seed in args.seeds] for variant in VARIANTS}
    args.output.write_text(json.dumps(report(results), indent=1) + "\n")


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compare each variant with AWM as it is, seed by seed."""
    after = {
        variant: np.array([result["after"][0] for result in of_variant]) for variant, of_variant in results.items()
    }
    figures: dict[str, Any] = {"consistency": {}, "difference": {}}
    intervals = {}
    for variant, values in after.items():
        figures["consistency"][variant] = round(float(values.mean()), 3)
        if variant != VARIANTS[0]:
            change = values - after[VARIANTS[0]]
            figures["difference"][variant] = round(float(change.mean()), 3)
            interval = stats.t.interval(0.95, len(change) - 1, change.mean(), stats.sem(change))
            intervals[variant] = np.round(interval, 3).tolist()
    setting = f"AWM as in (h) of benchmarks/README.md, {ROUNDS} rounds of 128 sets; consistency and prompt following"
    return {"setting": setting, "ratios": figures, "95 % t-intervals": intervals, "results": results}


if __name__ == "__main__":
    main()
