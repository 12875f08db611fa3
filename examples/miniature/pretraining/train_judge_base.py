# SPDX-License-Identifier: Apache-2.0
"""
Train the toy Qwen2.5-VL to describe panels of the planted world, and to compare properties of two of them.

    PYTHONPATH=examples python -m miniature.pretraining.train_judge_base --output_dir toy-models

About 50 minutes on one CPU core. It stands for the published Qwen2.5-VL: it knows shapes, colors and scenes, and was
never trained on consistency. The questions get harder from part to part, which is faster than all at once: comparing is
learned late, and colors last.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from paco_trl.data import criterion_question, theme_question
from paco_trl.tiny.qwen2_5_vl import CHAT_TEMPLATE, SPECIAL_TOKENS

from ..world import ALL_PANELS, SHAPES, Panel, PromptSpec, describe_spec, draw_all_panels


FIELDS = dict(zip(("shape", "colour", "accessory", "ground", "place"), Panel._fields, strict=True))
PROPERTIES = tuple(FIELDS)  # as the shipped weights learned to spell them
PANEL_INDEX = {panel: index for index, panel in enumerate(ALL_PANELS)}


class Part(NamedTuple):
    steps: int
    learning_rate: float
    kinds: tuple[float, ...]  # fractions of: describe, compare named properties, compare all
    names: tuple[float, ...]  # fractions of the properties in questions
    counts: tuple[float, ...]  # fractions of questions about one, two and three properties
    share_equal: float  # probability that a property is made equal


PARTS = (
    Part(9000, 1e-3, (0.2, 0.4, 0.4), (0.2, 0.2, 0.2, 0.2, 0.2), (1.0, 0.0, 0.0), 0.4),
    Part(4000, 1e-3, (0.1, 0.65, 0.25), (0.06, 0.55, 0.27, 0.06, 0.06), (1.0, 0.0, 0.0), 0.4),
    Part(2500, 6e-4, (0.1, 0.65, 0.25), (0.1, 0.35, 0.25, 0.15, 0.15), (0.3, 0.4, 0.3), 0.55),
)
PIXELS = 56 * 56  # every image is four tokens
THEMES = [
    f"FOUR-PANEL Images with a 2x2 grid layout of one {shape} figure. Every image shows the same figure."
    for shape in SHAPES
]


def describe(panel: Panel) -> str:
    scene = PromptSpec(panel.shape, None, None, panel.ground, panel.place)
    return f"A {panel.color} {panel.shape} figure with a {panel.accessory}. {describe_spec(scene)}"


def comparison_question(name: str) -> str:
    return f"Do the two images have the same {name}?"


def build_judge(seed: int) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    tokenizer = train_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 96,
            "window_size": 112,
            "fullatt_block_indexes": [0, 1, 2],
            "initializer_range": 0.05,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    size = {"shortest_edge": PIXELS, "longest_edge": PIXELS}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size),
        chat_template=CHAT_TEMPLATE,
    )
    return model, processor


def train_tokenizer() -> Qwen2Tokenizer:
    # Also on the judge's own questions, which would otherwise be hundreds of bytes
    corpus = [describe(panel) for panel in ALL_PANELS]
    corpus += [theme_question(theme) for theme in THEMES] * 200
    corpus += [criterion_question(f"The {name} of the figure is the same.") for name in PROPERTIES] * 50
    corpus += [comparison_question(name) for name in PROPERTIES] * 50
    corpus += [
        "Describe the image.",
        "Compare the two images.",
        "You are a helpful assistant.",
        "system\n",
        "user\n",
    ] * 50
    corpus += [" ".join(f"{name}: Yes. {name}: No." for name in PROPERTIES)] * 100
    corpus += ["assistant\n", "Yes", "No", "Yes. Both show the same figure.", "No. The figures differ."] * 100
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        corpus, vocab_size=700, new_special_tokens=list(SPECIAL_TOKENS[1:]), show_progress=False
    )
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.model_max_length = 2048
    return tokenizer


class Examples:
    """Sample batches of questions and answers of one kind, so that the prompts need no padding."""

    def __init__(self, processor: Qwen2_5_VLProcessor, random: np.random.Generator):
        self.processor, self.random = processor, random
        images = [Image.fromarray(panel) for size in (64, 32) for panel in draw_all_panels(size)]
        pixels = processor.image_processor(images, return_tensors="pt")
        self.grid = pixels.image_grid_thw[:1]
        self.pixels = pixels.pixel_values.view(len(images), -1, pixels.pixel_values.shape[-1])  # (1944, 16, 1176)

    def sample(self, count: int, part: Part) -> dict[str, torch.Tensor]:
        kind = self.random.choice(("describe", "compare", "compare all"), p=part.kinds)
        num_images = 1 if kind == "describe" else 2
        rows = self.random.integers(len(ALL_PANELS), size=(count, num_images))
        if kind == "describe":
            return self.encode("Describe the image.", [describe(ALL_PANELS[index]) for (index,) in rows], rows)
        self.share_properties(rows, part.share_equal)
        if kind == "compare all":
            answers = [" ".join(f"{name}: {self.compare(row, name)}." for name in PROPERTIES) for row in rows]
            return self.encode("Compare the two images.", answers, rows)
        number = self.random.choice((1, 2, 3), p=part.counts)
        names = self.random.choice(PROPERTIES, p=part.names, size=number, replace=False)
        return self.encode(comparison_question(" and ".join(names)), [self.compare(row, *names) for row in rows], rows)

    def share_properties(self, rows: np.ndarray, share_equal: float) -> None:
        """Make each property of two images equal with a probability, independently of the others."""
        for row in rows:
            first, second = ALL_PANELS[row[0]], ALL_PANELS[row[1]]
            kept = [name for name in PROPERTIES if self.random.random() < share_equal]
            row[1] = PANEL_INDEX[second._replace(**{FIELDS[name]: getattr(first, FIELDS[name]) for name in kept})]

    @staticmethod
    def compare(row: np.ndarray, *names: str) -> str:
        first, second = (ALL_PANELS[index] for index in row)
        return "Yes" if all(getattr(first, FIELDS[name]) == getattr(second, FIELDS[name]) for name in names) else "No"

    def encode(self, question: str, answers: list[str], rows: np.ndarray) -> dict[str, torch.Tensor]:
        count, num_images = rows.shape
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": question}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        text = text.replace("<|image_pad|>", "<|image_pad|>" * 4)
        tokenizer = self.processor.tokenizer
        prompt = tokenizer(text).input_ids
        ends = [tokenizer(answer + "<|im_end|>").input_ids for answer in answers]
        longest = max(map(len, ends))
        ids = torch.tensor([prompt + end + [tokenizer.pad_token_id] * (longest - len(end)) for end in ends])
        labels = torch.tensor([[-100] * len(prompt) + end + [-100] * (longest - len(end)) for end in ends])
        size = self.random.integers(2, size=rows.shape) * len(ALL_PANELS)
        pixels = self.pixels[torch.from_numpy((rows + size).ravel())]  # (N * images, 16, 1176)
        pixels = pixels + 0.3 * torch.rand(len(pixels), 1, 1) * torch.randn_like(pixels)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": labels,
            "pixel_values": pixels.flatten(0, 1),
            "image_grid_thw": self.grid.repeat(count * num_images, 1),
            "mm_token_type_ids": (ids == self.processor.image_token_id).int(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("toy-models"))
    parser.add_argument("--batch_size", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, processor = build_judge(arguments.seed)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    for number, part in enumerate(PARTS, start=1):
        torch.manual_seed(arguments.seed)
        examples = Examples(processor, np.random.default_rng(arguments.seed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=part.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, part.learning_rate, total_steps=part.steps, pct_start=0.1
        )
        progress = tqdm(range(part.steps), desc=f"Qwen2.5-VL, part {number}", mininterval=10)
        for step in progress:
            loss = model(**examples.sample(arguments.batch_size, part)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 500 == 499:
                print(f"\npart {number}, step {step + 1}", evaluate(model, processor), flush=True)
    model.eval().save_pretrained(arguments.output_dir / "qwen2.5-vl")
    processor.save_pretrained(arguments.output_dir / "qwen2.5-vl")


@torch.no_grad()
def evaluate(model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor) -> dict[str, float]:
    """Compute the accuracy of comparisons, and of the tokens of descriptions."""
    examples = Examples(processor, np.random.default_rng(1))
    results = {}
    for name in (*PROPERTIES, "describe"):
        rows = examples.random.integers(len(ALL_PANELS), size=(128, 1 if name == "describe" else 2))
        if name == "describe":
            question, answers = "Describe the image.", [describe(ALL_PANELS[index]) for (index,) in rows]
        else:
            examples.share_properties(rows, 0.4)
            question, answers = comparison_question(name), [examples.compare(row, name) for row in rows]
        batch = examples.encode(question, answers, rows)
        labels = batch["labels"][:, 1:]
        found = model(**batch).logits[:, :-1].argmax(-1)
        if name == "describe":
            results[name] = (found == labels)[labels != -100].float().mean().item()
        else:
            first = (labels != -100).float().argmax(1)[:, None]
            results[name] = (found.gather(1, first) == labels.gather(1, first)).float().mean().item()
    return {name: round(value, 3) for name, value in results.items()}


if __name__ == "__main__":
    main()
