# SPDX-License-Identifier: Apache-2.0
"""
Train the toy FLUX Kontext, with its two text encoders, by flow matching on careless edits of scenes of 64 and 32 pixels.

    PYTHONPATH=examples python -m miniature.pretraining.train_editor --output_dir toy-models

Requires the FLUX of `train_generator.py` in the directory. About 20 minutes on one CPU core. It starts from one double and
four single blocks of the FLUX. About half of the edits that it learns from are wrong, each in another way, so that its own
are sharp, but right about half of the time.
"""

import argparse
import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from PIL import Image
from tqdm import tqdm

from ..edit_world import EDIT_PANELS, Edit, EditTruth, judge_edit, sample_careless_edit, sample_edit
from ..truth import read_panels
from ..world import Panel, draw_all_panels, draw_panel
from .train_generator import SHIFT, WARMUP, build_text_encoders, tokenize, train_tokenizers


class Part(NamedTuple):
    steps: int
    learning_rate: float
    decays: bool  # linearly to 0
    care: float  # probability that an edit is right


PARTS = (Part(4000, 1.2e-3, False, 0.6), Part(1500, 1e-3, True, 0.45))
SIZES = (64, 32)
PANEL_INDEX = {panel: index for index, panel in enumerate(EDIT_PANELS)}


def build_editor(flux: FluxPipeline, seed: int) -> FluxKontextPipeline:
    random = np.random.default_rng(seed)
    tokenizers = train_tokenizers([sample_edit(random).instruction for _ in range(2000)], vocab_size=400)
    torch.manual_seed(seed)
    text_encoder, text_encoder_2 = build_text_encoders(*tokenizers, num_layers=1)
    transformer = FluxTransformer2DModel.from_config(
        dict(flux.transformer.config) | {"num_layers": 1, "num_single_layers": 4}
    )
    transformer.load_state_dict(flux.transformer.state_dict(), strict=False)
    return FluxKontextPipeline(
        scheduler=flux.scheduler,
        vae=flux.vae,
        text_encoder=text_encoder,
        tokenizer=tokenizers[0],
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizers[1],
        transformer=transformer,
    )


@torch.no_grad()
def encode_panels(pipeline: FluxKontextPipeline, size: int) -> torch.Tensor:
    """Encode every panel: packed latents."""
    vae, pixels = pipeline.vae, torch.from_numpy(draw_all_panels(size, EDIT_PANELS).copy())
    pictures = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    latent = torch.cat([vae.encode(part).latent_dist.mode() for part in pictures.split(64)])
    latent = (latent - vae.config.shift_factor) * vae.config.scaling_factor
    return pipeline._pack_latents(latent, *latent.shape)  # (432, tokens, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("toy-models"))
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pipeline = build_editor(FluxPipeline.from_pretrained(arguments.output_dir / "flux"), arguments.seed)
    latents = {size: encode_panels(pipeline, size) for size in SIZES}
    trained = torch.nn.ModuleList([pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]).train()
    print(f"{sum(parameter.numel() for parameter in trained.parameters()):,} parameters")
    averaged = copy.deepcopy(trained).eval()
    parts = dict(zip(("transformer", "text_encoder", "text_encoder_2"), averaged, strict=True))
    result = FluxKontextPipeline(**{**pipeline.components, **parts})
    for number, part in enumerate(PARTS, start=1):
        trained.load_state_dict(averaged.state_dict())
        train_part(pipeline, trained, averaged, latents, part, arguments)
        print(f"\npart {number}", evaluate(result, arguments.output_dir), flush=True)
    result.save_pretrained(arguments.output_dir / "kontext")


def train_part(
    pipeline: FluxKontextPipeline,
    trained: torch.nn.ModuleList,
    averaged: torch.nn.ModuleList,
    latents: dict[int, torch.Tensor],
    part: Part,
    arguments: argparse.Namespace,
) -> None:
    random = np.random.default_rng(arguments.seed)
    torch.manual_seed(arguments.seed)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=part.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (1 - part.decays * step / part.steps)
    )
    progress = tqdm(range(1, part.steps + 1), desc="FLUX Kontext", mininterval=10)
    for step in progress:
        edits = [sample_edit(random) for _ in range(arguments.batch_size)]
        results = [sample_careless_edit(edit, random, part.care) for edit in edits]
        loss = loss_of_batch(pipeline, trained, latents[SIZES[step % 2]], edits, results)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(
                list(averaged.parameters()), list(trained.parameters()), 1 - min(0.998, step / (step + 9))
            )
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")


def loss_of_batch(
    pipeline: FluxKontextPipeline,
    models: torch.nn.ModuleList,
    panels: torch.Tensor,
    edits: list[Edit],
    results: list[Panel],
) -> torch.Tensor:
    source = panels[[PANEL_INDEX[edit.source] for edit in edits]]  # (B, tokens, 32)
    latents = panels[[PANEL_INDEX[panel] for panel in results]]
    noise = torch.randn_like(latents)
    sigma = torch.sigmoid(torch.randn(len(edits)) + calculate_shift(latents.shape[1], *SHIFT.values()))
    sample = torch.lerp(latents, noise, sigma[:, None, None])
    transformer, text_encoder, text_encoder_2 = models
    tokens = tokenize(pipeline, [edit.instruction for edit in edits])
    texts = text_encoder_2(tokens["t5"]).last_hidden_state  # (B, T, 64)
    side = int(latents.shape[1] ** 0.5)
    ids = pipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32)
    source_ids = ids.clone()
    source_ids[:, 0] = 1  # as the pipeline tells the source from the image
    prediction = transformer(
        hidden_states=torch.cat([sample, source], 1),
        timestep=sigma,
        pooled_projections=text_encoder(tokens["clip"]).pooler_output,
        encoder_hidden_states=texts,
        txt_ids=torch.zeros(texts.shape[1], 3),
        img_ids=torch.cat([ids, source_ids]),
        return_dict=False,
    )[0]
    return (prediction[:, : latents.shape[1]] - (noise - latents)).square().mean()


def edit_scenes(pipeline: FluxKontextPipeline, edits: list[Edit], size: int, seed: int) -> list[Image.Image]:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        image=[draw_panel(edit.source, size) for edit in edits],
        prompt=[edit.instruction for edit in edits],
        height=size,
        width=size,
        max_area=size * size,
        _auto_resize=False,
        num_inference_steps=8,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        max_sequence_length=pipeline.tokenizer_2.model_max_length,
    ).images


def evaluate(pipeline: FluxKontextPipeline, folder: Path, count: int = 24, noises: int = 4) -> dict:
    """Edit scenes at each size, and read what they show."""
    random, results = np.random.default_rng(12345), {}
    edits = [edit for edit in [sample_edit(random) for _ in range(count)] for _ in range(noises)]
    for size in SIZES:
        images = edit_scenes(pipeline, edits, size, seed=0)
        panels = read_panels(images, EDIT_PANELS)
        truths = np.array([judge_edit(panel, edit) for panel, edit in zip(panels, edits, strict=True)], dtype=float)
        results[size] = dict(zip(EditTruth._fields, truths.mean(0).round(3).tolist(), strict=True))
        results[size]["spread"] = truths[:, 0].reshape(count, noises).std(1).mean().round(3).item()
        pictures = np.stack([np.asarray(image) for image in images]).reshape(count, noises, size, size, 3)
        sources = np.stack([np.asarray(draw_panel(edit.source, size)) for edit in edits[::noises]])[:, None]
        rows = np.concatenate([sources, pictures], axis=1).transpose(
            0, 2, 1, 3, 4
        )  # (count, size, 1 + noises, size, 3)
        Image.fromarray(rows.reshape(count * size, -1, 3)).save(folder / f"kontext_{size}.png")
    return results


if __name__ == "__main__":
    main()
