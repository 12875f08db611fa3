# SPDX-License-Identifier: Apache-2.0
"""
Train the VAE of the toy pipeline on images of the planted world.

    PYTHONPATH=examples python -m miniature.pretraining.train_vae --output_dir toy-models

About 15 minutes on one CPU core. It has eight latent channels at an eighth of the size, the narrowest that
keeps the eyes sharp.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from tqdm import tqdm

from ..world import draw_all_panels


# Pixels of a panel, panels per side, images of a batch
BATCHES = ((64, 1, 16), (32, 2, 16), (64, 2, 4), (16, 2, 64))
SHARES = (0.25, 0.35, 0.3, 0.1)


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(12, 24, 48, 48),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=4,
        sample_size=128,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def sample_batch(random: np.random.Generator) -> torch.Tensor:
    """Sample grids of unrelated panels, so that the VAE learns pixels and nothing else."""
    size, side, count = BATCHES[random.choice(len(BATCHES), p=SHARES)]
    panels = draw_all_panels(size)
    chosen = panels[random.integers(len(panels), size=(count, side, side))]  # (N, side, side, size, size, 3)
    pictures = chosen.transpose(0, 1, 3, 2, 4, 5).reshape(count, side * size, side * size, 3)
    return torch.from_numpy(pictures.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1  # (N, 3, H, W)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("toy-models"))
    parser.add_argument("--max_steps", type=int, default=3500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    random = np.random.default_rng(arguments.seed)

    vae = build_vae()
    print(f"{sum(parameter.numel() for parameter in vae.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=arguments.max_steps, pct_start=0.05)
    progress = tqdm(range(arguments.max_steps), desc="VAE", mininterval=5)
    for step in progress:
        pictures = sample_batch(random)
        posterior = vae.encode(pictures).latent_dist
        restored = vae.decode(posterior.sample()).sample
        difference = restored - pictures
        # The absolute difference keeps edges sharp; a little noise in the latents keeps them smooth for the flow
        loss = (
            difference.abs().mean()
            + difference.square().mean()
            + 2e-5 * posterior.kl().mean() / pictures[0].numel() * 3072
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}", l1=f"{difference.abs().mean().item():.4f}")
        if step % 1000 == 999:
            look(vae, arguments.output_dir)

    with torch.no_grad():
        latents = torch.cat([vae.encode(sample_batch(random)).latent_dist.sample().flatten() for _ in range(50)])
    vae.register_to_config(
        scaling_factor=round(1 / latents.std().item(), 4), shift_factor=round(latents.mean().item(), 4)
    )
    vae.save_pretrained(arguments.output_dir / "vae")
    look(vae, arguments.output_dir)


@torch.no_grad()
def look(vae: AutoencoderKL, folder: Path) -> None:
    """Save images above their reconstructions."""
    rows = []
    for size, side, count in ((64, 2, 6), (32, 2, 12)):
        panels = draw_all_panels(size)
        chosen = panels[np.random.default_rng(1).integers(len(panels), size=(count, side, side))]
        pictures = chosen.transpose(0, 1, 3, 2, 4, 5).reshape(count, side * size, side * size, 3)
        inputs = torch.from_numpy(pictures.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
        restored = vae.decode(vae.encode(inputs).latent_dist.mode()).sample
        restored = ((restored.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        rows += [np.concatenate(list(pictures), axis=1), np.concatenate(list(restored), axis=1)]
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(rows)).save(folder / "vae.png")


if __name__ == "__main__":
    main()
