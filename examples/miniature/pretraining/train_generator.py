# SPDX-License-Identifier: Apache-2.0
"""
Train the toy FLUX, with its two text encoders, by flow matching on sets with panels of 64, 32 and 16 pixels.

    PYTHONPATH=examples python -m miniature.pretraining.train_generator --output_dir toy-models

Requires the VAE of `train_vae.py` in the directory. About 45 minutes on one CPU core.

First the prompts leave color and accessory open, and the figure is the same in all panels of a set. A model of this size
hardly learns to attend to the other panels when all are equally noisy, so in half of the sets some panels have less noise,
and the loss is over the others. Then half of the prompts name color and accessory, and some panels of their sets are
wrong, like images of the web. Training ends while an identity is kept only sometimes, as in a real model before it is
trained for consistency.
"""

import argparse
import copy
import math
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from PIL import Image
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from paco_trl.data import split_grid

from ..truth import judge_set, read_panels
from ..world import ALL_PANELS, draw_all_panels, sample_careless_set, sample_specs, write_prompt


# More tokens take more noise to hide: twice the side is twice the odds of noise at the same step, as in Stable Diffusion 3
# (https://arxiv.org/abs/2403.03206, Sec. 5.3.2), so that a step decides the same at every size
SHIFT = {"base_image_seq_len": 16, "max_image_seq_len": 64, "base_shift": 0.5, "max_shift": 0.5 + math.log(2)}
SHARE_SEEN = 0.5  # fraction of the sets in which some panels have less noise
PARTS = ((6000, 0.0), (1500, 0.5))  # steps, and fraction of the prompts that name color and accessory
CARE = 0.85  # where they are named: probability that each is right, in each panel
WARMUP = 200  # steps

# Pixels of a panel, number of grids whose latents are kept, fraction of the batches
SIZES = ((64, 8192, 0.4), (32, 12288, 0.4), (16, 8192, 0.2))
PANEL_INDEX = {panel: index for index, panel in enumerate(ALL_PANELS)}


def train_tokenizers(corpus: list[str], vocab_size: int) -> tuple[CLIPTokenizer, T5Tokenizer]:
    clip = CLIPTokenizer().train_new_from_iterator(corpus, vocab_size=vocab_size)
    # Each word of the prompts is a token, and each character, so that other texts can be encoded too
    words = sorted({"▁" + word for prompt in corpus for word in prompt.split()})
    characters = ["▁", *(chr(code) for code in range(33, 127))]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    t5 = T5Tokenizer(
        vocab=[*special, *((word, -2.0) for word in words), *((character, -10.0) for character in characters)],
        extra_ids=0,
    )
    clip.model_max_length = 77
    t5.model_max_length = max(len(ids) for ids in t5(corpus).input_ids)
    return clip, t5


def build_text_encoders(
    clip_tokenizer: CLIPTokenizer, t5_tokenizer: T5Tokenizer, num_layers: int
) -> tuple[CLIPTextModel, T5EncoderModel]:
    clip_config = CLIPTextConfig(
        vocab_size=len(clip_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=32,
        bos_token_id=clip_tokenizer.bos_token_id,
        eos_token_id=clip_tokenizer.eos_token_id,
        pad_token_id=clip_tokenizer.pad_token_id,
    )
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": num_layers, "num_heads": 4}
    return (
        CLIPTextModel(clip_config),
        T5EncoderModel(T5Config(vocab_size=len(t5_tokenizer), dropout_rate=0.0, **sizes)),
    )


def build_pipeline(vae: AutoencoderKL, seed: int) -> FluxPipeline:
    random = np.random.default_rng(seed)
    corpus = [write_prompt(sample_specs(random, named)) for named in (False, True) for _ in range(2000)]
    clip_tokenizer, t5_tokenizer = train_tokenizers(corpus, vocab_size=700)
    torch.manual_seed(seed)
    text_encoder, text_encoder_2 = build_text_encoders(clip_tokenizer, t5_tokenizer, num_layers=2)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * vae.config.latent_channels,
        num_layers=3,
        num_single_layers=5,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=False,
        axes_dims_rope=(4, 10, 10),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
        ),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=clip_tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )


@torch.no_grad()
def encode_grids(
    pipeline: FluxPipeline, size: int, count: int, share_named: float, random: np.random.Generator
) -> dict:
    """Encode sets with panels of a size: their packed latents and the tokens of their prompts."""
    asked = [sample_specs(random, named=random.random() < share_named) for _ in range(count)]
    sets = [sample_careless_set(specs, random, CARE if specs[0].color else 1.0) for specs in asked]
    indices = np.array([[PANEL_INDEX[panel] for panel in panels] for panels in sets])
    panels = draw_all_panels(size)
    vae, latents = pipeline.vae, []
    for start in tqdm(range(0, count, 64), desc=f"Encoding grids of {2 * size} pixels", mininterval=5):
        chosen = panels[indices[start : start + 64].reshape(-1, 2, 2)]
        grids = chosen.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 2 * size, 2 * size, 3)
        pictures = torch.from_numpy(grids.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
        latent = (vae.encode(pictures).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
        latents.append(pipeline._pack_latents(latent, *latent.shape[:2], *latent.shape[2:]).half())
    side = 2 * size // 16
    return {
        "latents": torch.cat(latents),  # (count, tokens, 32)
        "img_ids": pipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32),
        **tokenize(pipeline, [write_prompt(specs) for specs in asked]),
    }


def tokenize(pipeline: FluxPipeline, prompts: list[str]) -> dict[str, torch.Tensor]:
    lengths = {"clip": (pipeline.tokenizer, 77), "t5": (pipeline.tokenizer_2, pipeline.tokenizer_2.model_max_length)}
    return {
        name: tokenizer(
            prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        for name, (tokenizer, length) in lengths.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("toy-models"))
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1.2e-3)
    parser.add_argument("--eval_steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    vae = AutoencoderKL.from_pretrained(arguments.output_dir / "vae").eval()
    pipeline = build_pipeline(vae, arguments.seed)
    trained = torch.nn.ModuleList([pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]).train()
    print(f"{sum(parameter.numel() for parameter in trained.parameters()):,} parameters")
    averaged = copy.deepcopy(trained).eval()
    parts = dict(zip(("transformer", "text_encoder", "text_encoder_2"), averaged, strict=True))
    result = FluxPipeline(**{**pipeline.components, **parts})

    optimizer = torch.optim.AdamW(
        trained.parameters(), lr=arguments.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    torch.manual_seed(arguments.seed)
    losses: list[float] = []
    step, total = 0, sum(steps for steps, _ in PARTS)
    for steps, share_named in PARTS:
        grids = [encode_grids(pipeline, size, count, share_named, random) for size, count, _ in SIZES]
        progress = tqdm(range(steps), initial=step, total=total, desc="FLUX", mininterval=10)
        for _ in progress:
            step += 1
            kind = random.choice(len(SIZES), p=[share for *_, share in SIZES])
            loss = loss_of_batch(trained, grids[kind], arguments.batch_size, random)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            # The average replaces a decaying learning rate: training can end after any number of steps
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(averaged.parameters()), list(trained.parameters()), 1 - min(0.998, step / (step + 9))
                )
            losses.append(loss.item())
            if step % 50 == 0:
                progress.set_postfix(loss=f"{np.mean(losses[-200:]):.4f}")
            if step % arguments.eval_steps == 0 or step == total:
                result.save_pretrained(arguments.output_dir / f"flux-{step}")
                shown = evaluate(result, arguments.output_dir)
                print(f"\nstep {step}, loss {np.mean(losses[-200:]):.4f}", shown, flush=True)
    result.save_pretrained(arguments.output_dir / "flux")


def loss_of_batch(
    models: torch.nn.ModuleList, grids: dict, batch_size: int, random: np.random.Generator
) -> torch.Tensor:
    rows = torch.from_numpy(random.integers(len(grids["latents"]), size=batch_size))
    latents = grids["latents"][rows].float()  # (B, tokens, 32)
    noise = torch.randn_like(latents)
    sigma = torch.sigmoid(torch.randn(batch_size) + calculate_shift(latents.shape[1], *SHIFT.values()))
    is_shown = torch.from_numpy(random.random((batch_size, 1)) < SHARE_SEEN)
    is_seen = is_shown & some_panels(latents.shape[1], batch_size, random)  # (B, tokens)
    level = torch.where(is_seen, 0.7 * torch.rand(batch_size, 1) * sigma[:, None], sigma[:, None])
    sample = torch.lerp(latents, noise, level[:, :, None])
    prediction = predict(models, grids, rows, sample, sigma)
    errors = (prediction - (noise - latents)).square().mean(-1)  # (B, tokens)
    return errors[~is_seen].mean()


def some_panels(tokens: int, count: int, random: np.random.Generator) -> torch.Tensor:
    """Mask the tokens of one, two or three random panels of each set."""
    side = math.isqrt(tokens)
    place = torch.arange(tokens)
    panel = 2 * (place // side >= side // 2).long() + (place % side >= side // 2).long()  # (tokens,)
    order = torch.from_numpy(random.permuted(np.tile(np.arange(4), (count, 1)), axis=1))  # (B, 4)
    chosen = order < torch.from_numpy(random.integers(1, 4, size=(count, 1)))
    return chosen[:, panel]


def predict(
    models: torch.nn.ModuleList, grids: dict, rows: torch.Tensor, sample: torch.Tensor, sigma: torch.Tensor
) -> torch.Tensor:
    transformer, text_encoder, text_encoder_2 = models
    texts = text_encoder_2(grids["t5"][rows]).last_hidden_state  # (B, T, 64)
    return transformer(
        hidden_states=sample,
        timestep=sigma,
        pooled_projections=text_encoder(grids["clip"][rows]).pooler_output,
        encoder_hidden_states=texts,
        txt_ids=torch.zeros(texts.shape[1], 3),
        img_ids=grids["img_ids"],
        return_dict=False,
    )[0]


@torch.no_grad()
def evaluate(pipeline: FluxPipeline, folder: Path, count: int = 32) -> dict:
    """Generate sets at each size, and read what they show."""
    pipeline.set_progress_bar_config(disable=True)
    results = {}
    for size, *_ in SIZES:
        for named in (False, True):
            random = np.random.default_rng(12345)
            asked = [sample_specs(random, named) for _ in range(count)]
            images = pipeline(
                [write_prompt(specs) for specs in asked],
                height=2 * size,
                width=2 * size,
                num_inference_steps=10,
                generator=torch.Generator().manual_seed(0),
                max_sequence_length=pipeline.tokenizer_2.model_max_length,
            ).images
            truths = [
                judge_set(read_panels(split_grid(image, 2, 2)), specs)
                for image, specs in zip(images, asked, strict=True)
            ]
            means = np.mean(truths, axis=0)
            kind = f"{2 * size}, figure {'named' if named else 'open'}"
            results[kind] = dict(zip(truths[0]._fields, means.round(3).tolist(), strict=True))
            pictures = np.stack([np.asarray(image) for image in images[:16]]).reshape(2, 8, 2 * size, 2 * size, 3)
            sheet = pictures.transpose(0, 2, 1, 3, 4).reshape(4 * size, 16 * size, 3)
            Image.fromarray(sheet).save(folder / f"flux_{2 * size}_{'named' if named else 'open'}.png")
    return results


if __name__ == "__main__":
    main()
