# SPDX-License-Identifier: Apache-2.0
"""
Train the toy CLIP on single panels of the planted world and their captions.

    PYTHONPATH=examples python -m miniature.pretraining.train_clip --output_dir toy-models

About three minutes on one CPU core.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from ..world import ALL_PANELS, Panel, PromptSpec, describe_spec, draw_all_panels


def caption(panel: Panel, style: int) -> str:
    """Write a caption as on the web: some name the scene, some the color, and none every detail."""
    scene = PromptSpec(panel.shape, None, None, panel.ground, panel.place)
    return (describe_spec(scene), f"A {panel.color} figure.", describe_spec(scene._replace(color=panel.color)))[style]


def build_clip(seed: int) -> tuple[CLIPModel, CLIPProcessor]:
    corpus = [caption(panel, style) for panel in ALL_PANELS for style in range(3)]
    tokenizer = CLIPTokenizer().train_new_from_iterator(corpus, vocab_size=700)
    tokenizer.model_max_length = 32
    config = CLIPConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 4,
        },
        projection_dim=32,
    )
    torch.manual_seed(seed)
    image_processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return CLIPModel(config), CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("toy-models"))
    parser.add_argument("--max_steps", type=int, default=1500)
    parser.add_argument("--batch_size", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    model, processor = build_clip(arguments.seed)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")

    # Panels at full, half and quarter resolution
    pixels = torch.cat([process(processor, draw_all_panels(size)) for size in (64, 32, 16)])  # (3 * 972, 3, 32, 32)
    captions = [caption(panel, style) for panel in ALL_PANELS for style in range(3)]
    tokens = processor.tokenizer(captions, padding=True, return_tensors="pt")
    texts = {name: index for index, name in enumerate(dict.fromkeys(captions))}
    same = torch.tensor([texts[text] for text in captions])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=arguments.max_steps, pct_start=0.1)
    progress = tqdm(range(arguments.max_steps), desc="CLIP", mininterval=5)
    for step in progress:
        size = random.choice(3, p=(0.45, 0.45, 0.1), size=arguments.batch_size)
        panel = random.integers(len(ALL_PANELS), size=arguments.batch_size)
        row = torch.from_numpy(panel * 3 + random.integers(3, size=arguments.batch_size))
        images = pixels[torch.from_numpy(size * len(ALL_PANELS) + panel)]
        images = images + 0.3 * torch.rand(len(images), 1, 1, 1) * torch.randn_like(images)
        outputs = model(
            input_ids=tokens.input_ids[row], attention_mask=tokens.attention_mask[row], pixel_values=images
        )
        # Panels with the same caption are all correct
        target = (same[row][:, None] == same[row]).float()
        target = target / target.sum(1, keepdim=True)
        loss = sum(
            torch.nn.functional.cross_entropy(logits, target)
            for logits in (outputs.logits_per_image, outputs.logits_per_text)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")

    model.eval().save_pretrained(arguments.output_dir / "clip")
    processor.save_pretrained(arguments.output_dir / "clip")
    print(f"Fraction of panels whose scene is found among the 18: {accuracy(model, processor, pixels):.3f}")


def process(processor: CLIPProcessor, panels: np.ndarray) -> torch.Tensor:
    return processor.image_processor([Image.fromarray(panel) for panel in panels], return_tensors="pt").pixel_values


@torch.no_grad()
def accuracy(model: CLIPModel, processor: CLIPProcessor, pixels: torch.Tensor) -> float:
    scenes = list(dict.fromkeys(caption(panel, 0) for panel in ALL_PANELS))
    tokens = processor.tokenizer(scenes, padding=True, return_tensors="pt")
    logits = model(**tokens, pixel_values=pixels).logits_per_image  # (N, 18)
    expected = torch.tensor([scenes.index(caption(panel, 0)) for panel in ALL_PANELS]).repeat(3)
    return (logits.argmax(1) == expected).float().mean().item()


if __name__ == "__main__":
    main()
