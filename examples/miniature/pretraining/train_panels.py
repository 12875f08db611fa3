# SPDX-License-Identifier: Apache-2.0
"""
Continue the toy FLUX on single panels of 64 and 32 pixels, as the toy for sets of separate images.

    PYTHONPATH=examples python -m miniature.pretraining.train_panels --output_dir toy-models

About 10 minutes on one CPU core. The same weights are saved as `FluxPipeline` and as `FluxKontextPipeline`.

A prompt has the text of a set and of one panel; half of them name color and accessory, and some panels are wrong. Half of
the batches have a source, in the way of FLUX.1-Kontext: the same figure in another scene. Its color and accessory are kept
only mostly, and where the prompt names others, either may be shown. So training leaves room for more consistency.
"""

import argparse
import copy
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from diffusers import FluxKontextPipeline, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from tqdm import tqdm

from paco_trl import PaCoGRPOConfig
from paco_trl.data.image_sets import arrange_sets, complete_image_sets, prompts_of_row

from ..models import toy_flux_path
from ..truth import judge_set, read_panels
from ..world import (
    ACCESSORIES,
    COLORS,
    GROUNDS,
    PLACES,
    SHAPES,
    Panel,
    PromptSpec,
    draw_all_panels,
    sample_specs,
    write_prompt,
)
from .train_generator import CARE, PANEL_INDEX, SHIFT, WARMUP, predict, tokenize


SIZES = (64, 32)  # pixels of a panel
FOLLOWED = 0.75  # where the prompt is open: probability that each property is the source's, else by chance
_NAMED = ((None, None), *itertools.product(COLORS, ACCESSORIES))
SPECS = [
    PromptSpec(a, *named, *scene) for a in SHAPES for named in _NAMED for scene in itertools.product(GROUNDS, PLACES)
]
SPEC_INDEX = {spec: index for index, spec in enumerate(SPECS)}


def write_panel_prompts(sets: Sequence[Sequence[PromptSpec]]) -> list[list[str]]:
    """Write the prompts of the separate panels of sets, as the trainer does."""
    grids = Dataset.from_dict({"prompt": [write_prompt(specs) for specs in sets]})
    rows = arrange_sets(complete_image_sets(grids), "separate")
    return [prompts_of_row(row, PaCoGRPOConfig.panel_template) for row in rows]


@torch.no_grad()
def encode_panels(pipeline: FluxPipeline, size: int) -> dict[str, torch.Tensor]:
    """Encode all panels of the world."""
    pictures = torch.from_numpy(draw_all_panels(size).copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    vae, side = pipeline.vae, size // 16
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in pictures.split(64)])
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    ids = pipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32)
    return {
        "latents": pipeline._pack_latents(latents, *latents.shape),  # (972, tokens, 32)
        "img_ids": ids,
        "source_ids": ids + torch.tensor([1.0, 0.0, 0.0]),
    }


def sample_example(random: np.random.Generator, has_source: bool) -> tuple[int, int, int]:
    """Sample the index of a prompt, and those of the panel that is shown for it and of a source."""
    first, second = sample_specs(random, named=random.random() < 0.5)[:2]
    source, shown = [], []
    for named, values in ((first.color, tuple(COLORS)), (first.accessory, ACCESSORIES)):
        by_chance = [values[random.integers(len(values))] for _ in range(2)]
        source.append(by_chance[0] if named is None or random.random() >= CARE else named)
        right = source[-1] if has_source and (named is None or random.random() < 0.5) else named
        care = CARE if named is not None else FOLLOWED
        shown.append(by_chance[1] if right is None or random.random() >= care else right)
    panels = (Panel(spec.shape, *looks, spec.ground, spec.place) for looks, spec in ((shown, first), (source, second)))
    return SPEC_INDEX[first], *(PANEL_INDEX[panel] for panel in panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("toy-models"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1.2e-3)
    parser.add_argument("--eval_steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    torch.manual_seed(arguments.seed)
    pipeline = FluxPipeline.from_pretrained(toy_flux_path())
    trained = torch.nn.ModuleList([pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]).train()
    averaged = copy.deepcopy(trained).eval()
    parts = dict(zip(("transformer", "text_encoder", "text_encoder_2"), averaged, strict=True))
    results = [kind(**{**pipeline.components, **parts}) for kind in (FluxPipeline, FluxKontextPipeline)]

    prompts = [prompts[0] for prompts in write_panel_prompts([[spec] * 4 for spec in SPECS])]
    # The prompt of a panel is a third of a set's
    pipeline.tokenizer_2.model_max_length = max(map(len, pipeline.tokenizer_2(prompts).input_ids))
    texts = tokenize(pipeline, prompts)
    panels = [texts | encode_panels(pipeline, size) for size in SIZES]
    optimizer = torch.optim.AdamW(
        trained.parameters(), lr=arguments.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    losses: list[float] = []
    progress = tqdm(range(1, arguments.steps + 1), desc="FLUX", mininterval=10)
    for step in progress:
        optimizer.param_groups[0]["lr"] = arguments.learning_rate * min(1.0, step / WARMUP)
        loss = loss_of_batch(trained, panels[random.integers(len(SIZES))], arguments.batch_size, random)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(
                list(averaged.parameters()), list(trained.parameters()), 1 - min(0.998, step / (step + 9))
            )
        losses.append(loss.item())
        if step % 50 == 0:
            progress.set_postfix(loss=f"{np.mean(losses[-200:]):.4f}")
        if step % arguments.eval_steps == 0 or step == arguments.steps:
            for name, result in zip(("flux-panels", "kontext-panels"), results, strict=True):
                result.save_pretrained(arguments.output_dir / name)
            print(f"\nstep {step}, loss {np.mean(losses[-200:]):.4f}", evaluate(results[1]), flush=True)


def loss_of_batch(models: torch.nn.ModuleList, panels: dict, size: int, random: np.random.Generator) -> torch.Tensor:
    has_source = random.random() < 0.5
    prompts, shown, sources = torch.tensor([sample_example(random, has_source) for _ in range(size)]).T
    latents = panels["latents"][shown]  # (B, tokens, 32)
    noise = torch.randn_like(latents)
    sigma = torch.sigmoid(torch.randn(size) + calculate_shift(latents.shape[1], *SHIFT.values()))
    sample, inputs = torch.lerp(latents, noise, sigma[:, None, None]), panels
    if has_source:
        sample = torch.cat([sample, panels["latents"][sources]], dim=1)
        inputs = {**panels, "img_ids": torch.cat([panels["img_ids"], panels["source_ids"]])}
    prediction = predict(models, inputs, prompts, sample, sigma)[:, : latents.shape[1]]
    return (prediction - (noise - latents)).square().mean()


@torch.no_grad()
def evaluate(pipeline: FluxKontextPipeline, count: int = 32) -> dict[str, dict[str, float]]:
    """Generate sets of separate panels, independently or from the first, and read what they show."""
    pipeline.set_progress_bar_config(disable=True)
    results = {}
    for size, is_named, is_anchored in itertools.product(SIZES, (False, True), (False, True)):
        random = np.random.default_rng(12345)
        asked = [sample_specs(random, is_named) for _ in range(count)]
        noise, panels = torch.Generator().manual_seed(0), []
        for prompts in zip(*write_panel_prompts(asked), strict=True):
            panels.append(
                pipeline(
                    prompt=list(prompts),
                    image=panels[0] if is_anchored and panels else None,
                    height=size,
                    width=size,
                    max_area=size**2,
                    num_inference_steps=8,
                    generator=noise,
                    max_sequence_length=pipeline.tokenizer_2.model_max_length,
                    _auto_resize=False,
                ).images
            )
        sets = [read_panels(images) for images in zip(*panels, strict=True)]
        means = np.mean([judge_set(shown, specs) for shown, specs in zip(sets, asked, strict=True)], axis=0)
        kind = f"{size}, figure {'named' if is_named else 'open'}, {'anchored' if is_anchored else 'independent'}"
        results[kind] = {"consistency": round(float(means[0]), 3), "prompt_following": round(float(means[1]), 3)}
        results[kind]["unreadable"] = round(float(means[3]), 3)
    return results


if __name__ == "__main__":
    main()
