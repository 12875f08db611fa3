# SPDX-License-Identifier: Apache-2.0
"""Vocabulary that several tests share."""

import functools
import inspect
import io
import json
import shutil
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from PIL import Image as PILImage
from safetensors.torch import load_file
from transformers import TrainerCallback

from paco_trl.checkpointing.weights import use_weights
from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.rewards import redness_reward
from paco_trl.rollout import predict
from paco_trl.rollout.rounds import Round
from paco_trl.trainer.callbacks import ContactSheetsCallback


# ---- Judges and rewards ----


def noise(seed: int, size: tuple[int, int] = (56, 56), mode: str = "RGB") -> PILImage.Image:
    """An image that differs from seed to seed; with transparency where the mode has it."""
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = PILImage.fromarray(values, "RGBA")
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def write_image(path: Path, seed: int = 0) -> str:
    """The path of a file of `noise`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(seed).save(path)
    return str(path)


def plain(value: int, size: tuple[int, int] = (28, 28)) -> PILImage.Image:
    """An image of one color, which tells the value."""
    return PILImage.new("RGB", size, (value, 0, 255 - value))


def png(image: PILImage.Image) -> bytes:
    """The file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def pair_dataset(rows: list[dict]) -> Dataset:
    """Rows in the format of pairs as a dataset, with images as files have them."""
    turns = List({"role": Value("string"), "content": Value("string")})
    return Dataset.from_list(rows, features=Features({"images": List(Image()), "prompt": turns, "completion": turns}))


def anti_redness_reward(prompts, completions, **kwargs):
    return [-reward for reward in redness_reward(prompts, completions)]


def closed_form(responses: list, a: float | None, variant: str):
    """The loss of PaCo-Reward from the log-probabilities y_0 ... y_{n-1} of each response: a list or a tensor."""
    tokens = sum(map(len, responses))
    if a is None:
        return -sum(sum(y) for y in responses) / tokens
    total = 0.0
    for y in responses:
        n = len(y)
        share = (1 - a) / max(n - 1, 1) * (n if variant == "released" else 1)  # of every token but the first
        first = 1.0 if n == 1 and variant == "paper" else a
        total = total - first * y[0] - share * sum(y[1:])
    return total / (len(responses) if variant == "paper" else tokens)


def close(expected, tolerance: float = 1e-5):
    """Compare with an absolute tolerance."""
    return pytest.approx(expected, abs=tolerance, rel=0)


def wait_until(condition: Callable, seconds: float = 60.0):
    """What the condition is in the end."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


# ---- Trainings and browsers ----


# Of a run on 32 x 32 pixels: 4 prompts x 4 images a round, in micro-batches of 4
SMALL_RUN = {
    "use_cpu": True, "bf16": False, "height": 64, "width": 64, "num_generations": 4, "num_prompts_per_generation": 4,
    "per_device_train_batch_size": 4, "num_inference_steps": 4, "max_steps": 2, "learning_rate": 1e-2,
    "report_to": "none", "save_strategy": "no", "log_completions": False, "disable_tqdm": True,
    "plot_curves": False,  # half of the time of a tiny run
}  # fmt: skip
LORA = LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@functools.cache
def square_prompts() -> Dataset:
    """Twelve 2x2 image-set prompts without sizes of their own."""
    dataset = load_image_set_prompts(demo_prompts_path()).remove_columns(["height", "width"])
    square = [n for n, shape in enumerate(zip(dataset["rows"], dataset["cols"], strict=True)) if shape == (2, 2)]
    assert len(square) == 12
    return dataset.select(square)


def prompts_of_two_sizes() -> list[dict]:
    """Fifteen prompts of the demo with small images, 2x2 or 1x2."""
    rows = map(json.loads, demo_prompts_path().read_text(encoding="utf-8").splitlines())
    sized = [row | {"height": 32 * row["rows"], "width": 32 * row["cols"]} for row in rows]
    return [row for row in sized if (row["rows"], row["cols"]) in ((2, 2), (1, 2))]


def weights_of(trainer) -> dict[str, torch.Tensor]:
    """Copies of the trained weights."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def entries_of(round) -> list[dict]:
    """The micro-steps of this process in a round, in the order in which they are trained."""
    entries = []
    for position in range(round.plan.steps_per_generation):
        batch, step = round.micro_step(position)
        columns = {"advantages": batch.column("advantage"), "weights": batch.column("weight")}
        trained_completions = round.trained_completions[position // round.plan.gradient_accumulation_steps]
        entries.append({"step": step, "trained_completions": trained_completions, **columns})
    return entries


def sheets_of(trainer) -> list[tuple]:
    """A list that gets the rows and the scored images of each round's contact sheet."""
    callback = ContactSheetsCallback(trainer.accelerator, trainer.rewards.names, trainer.eval_rewards.names, [])
    sheets: list[tuple] = []
    callback.save = lambda args, state, name, title, rows, numbers, shown: sheets.append((list(numbers), shown))
    trainer.add_callback(callback)
    return sheets


def fetch(encoder, rows, numbers: list[int], scale: float = 1.0):
    """Encoded rows, as a round gets them."""
    return encoder.encode(Round(rows, numbers, 1, (0, 0, 0), [(64, 64)] * len(rows)), numbers, scale)


def count_images(module: torch.nn.Module) -> list[int]:
    """A list that grows with each forward of the module, by the number of images."""
    calls: list[int] = []
    module.register_forward_hook(lambda module, args, output: calls.append(len(output[0])))
    return calls


class Record(TrainerCallback):
    """Weights and averages as training begins and after each optimizer step, and the entries of each round."""

    def __init__(self):
        self.weights, self.averages, self.rounds = [], {"ema": [], "old_policy": []}, {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(weights_of(self.trainer))
        for file, kept in self.trainer.averages.items():
            copies = {name: value.clone() for name, value in kept.average.items()}
            self.averages[file.removesuffix(".safetensors")].append(copies)
        if self.trainer.round is not None:
            self.rounds[self.trainer.round.index] = entries_of(self.trainer.round)


def recorded(make: Callable, resume_from_checkpoint: str | None = None, **settings) -> tuple:
    """A trainer that has trained, and its record."""
    record = Record()
    trainer = record.trainer = make(**settings)
    trainer.add_callback(record)  # behind the trainer's own, which step the averages
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    return trainer, record


def check_planted_reward(make: Callable, **settings) -> None:
    """Redness rises when it is the reward, and falls when its opposite is."""
    first, spread = [], 0.0
    for reward in (redness_reward, anti_redness_reward):
        trainer = make(reward_funcs=reward, **settings)
        trainer.train()
        means = logs_with(trainer, f"rewards/{reward.__name__}/mean")
        spread = spread or logs_with(trainer, "rewards/redness_reward/std")[0]
        assert means[-1] - means[0] > 3 * spread > 0
        first.append(means[0])
    assert first[0] == pytest.approx(-first[1])  # the same first images


def draw(pipeline, **options) -> np.ndarray:
    """An image of a FLUX pipeline, as numbers that can be subtracted."""
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 32, **options}
    options = {name: value for name, value in options.items() if value is not None}
    image = pipeline("a red fox", generator=torch.Generator().manual_seed(5), **options).images[0]
    return np.asarray(image, dtype=np.int16 if isinstance(image, PILImage.Image) else None)


def give_effect(model: torch.nn.Module, std: float) -> None:
    """Let the LoRA of a model change what it computes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std, generator=generator)


def files_in(folder: Path) -> dict[str, bytes]:
    """The files below a folder, by their paths in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def update_of(trainer, **kwargs) -> torch.Tensor:
    """What training adds to the weights, as a vector."""
    before = weights_of(trainer)
    trainer.train(**kwargs)
    return torch.cat([(value - before[name]).flatten() for name, value in weights_of(trainer).items()])


def velocity_with(trainer, step, weights=None) -> torch.Tensor:
    """Return the velocity of a recorded step that other weights predict."""
    with torch.no_grad(), use_weights(trainer.model, weights, 0):
        return predict(trainer.model, step.calls, trainer.family, trainer.args.guidance_scale, step.sample)


def gradients(trainer, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of a loss by each trained weight."""
    weights = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are the same to the bit."""
    assert first.keys() == second.keys()
    return all(torch.equal(value, second[name]) for name, value in first.items())


def logs_with(trainer, key: str) -> list:
    """The logged values of a metric."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def docstring(thing) -> str:
    """The docstring with its indentation, which Python 3.13 and later compile away."""
    return textwrap.indent(f"\n{inspect.cleandoc(thing.__doc__)}\n", "    ") + "    "


def jsonl(path: Path) -> list[dict]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scores_of_round(output: Path, number: int) -> list[float]:
    """The rewards and advantages of a round of a run that was rewarded by redness."""
    entries = jsonl(output / "contact_sheets" / f"round_{number:05d}.jsonl")
    return [entry[key] for entry in entries for key in ("redness_reward", "advantage")]


def check_frozen_weights_are_not_saved(checkpoint: Path) -> None:
    """In what DeepSpeed saves; they alone would be more than this."""
    adapter = (checkpoint / "adapter_model.safetensors").stat().st_size
    sizes = [path.stat().st_size for path in checkpoint.rglob("*model_states.pt")]
    assert 0 < sum(sizes) < 6 * adapter + 200_000


def check_same_adapter(output: Path, reference: Path, tolerance: float) -> list[float]:
    """The same adapter within rounding; return how far from 0 each of its matrices B is."""
    adapter, expected = (load_file(folder / "adapter_model.safetensors") for folder in (output, reference))
    assert adapter.keys() == expected.keys()
    for name, value in expected.items():
        assert adapter[name].dtype == value.dtype == torch.float32
        assert (adapter[name] - value).abs().max() < tolerance, name
    return [value.abs().max().item() for name, value in expected.items() if "lora_B" in name]


def check_same_training(output: Path, reference: Path, rounds: int, images: int, tolerance: float) -> None:
    """The same images, rewards and advantages, and the same adapter within rounding."""
    for number in range(rounds):
        expected = scores_of_round(reference, number)
        assert len(expected) == 2 * images and len(set(expected)) > images  # images differ
        assert scores_of_round(output, number) == pytest.approx(expected, abs=2e-2 if number else 2e-5)
    # B begins at 0, and stays there in a last block whose text stream leads nowhere
    moved = [each > 1e-3 for each in check_same_adapter(output, reference, tolerance)]
    assert sum(moved) > 0.7 * len(moved) > 0
