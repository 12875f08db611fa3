# SPDX-License-Identifier: Apache-2.0
"""
Rehearse a judge at full size on a CPU: the config of Qwen2.5-VL-7B with random weights.

    make full-size RECIPE=paco-reward-7b-lora

The judge scores the six pairs of a 2 x 2 set, and one pair of larger panels. Then `paco-trl reward --config RECIPE` trains
it for two steps on small images, is killed after its first checkpoint, and resumes. The saved adapter scores the six pairs
again. With `--vllm`, `paco-trl serve` serves the base model, and a `ServedJudge` scores them too.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from PIL import Image
from safetensors import safe_open
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from build_model import copy_tokenizer, write_weights
from float32 import fast_products
from paco_trl import PaCoReward
from paco_trl.commands import main as commands
from paco_trl.data import make_pair, theme_question
from paco_trl.planning import plan_memory
from paco_trl.planning.judge_run import QUESTION_TOKENS, judge_tokens
from paco_trl.planning.known_models import write_known_model
from paco_trl.rewards import JudgeUnavailableError, ServedJudge
from paco_trl.tiny import build_tiny_qwen2_5_vl
from paco_trl.tiny.qwen2_5_vl import vision_token_ids
from paco_trl.trainer.paco_reward_trainer import PaCoRewardTrainer
from paco_trl.utils.files import write_atomically
from phases import GIB, Phases, in_gib, ratios, run_part


JUDGE = "Qwen/Qwen2.5-VL-7B-Instruct"
QUESTION = theme_question("A red fox in four seasons, from spring to winter.")
SIZES = (512, 1024)  # pixels of a side of a panel
# The recipe's data are on the Hub; small images, few pairs and few steps
OPTIONS = {
    "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1,
    "per_device_train_batch_size": 2, "dataloader_num_workers": 0, "report_to": "none", "use_cpu": True,
}  # fmt: skip
PANEL = 112  # pixels of a side of a panel that it is trained on, and scores behind a server
PORT = 8171


def build_judge(folder: Path, tokenizers: Path | None, changes: dict[str, Any] | None = None) -> Path:
    """Build a judge of the published config, of which some entries may be others, with the published limits of pixels."""
    if not (folder / "config.json").exists():
        scratch = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        processor = PaCoReward.load_processor(build_tiny_qwen2_5_vl(scratch))
        for file in scratch.glob("*.safetensors*"):
            file.unlink()
        if tokenizers is not None:
            template = processor.chat_template
            copy_tokenizer(tokenizers / "qwen2.5-vl", scratch)
            processor.tokenizer = AutoTokenizer.from_pretrained(scratch)
            processor.tokenizer.chat_template = template
        processor.image_processor = Qwen2VLImageProcessor(
            size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
        )
        processor.video_processor = Qwen2VLVideoProcessor()
        processor.save_pretrained(scratch)
        config = AutoConfig.from_pretrained(write_known_model(JUDGE, scratch))
        config.update(vision_token_ids(processor.tokenizer) | {"dtype": torch.bfloat16} | (changes or {}))
        config.save_pretrained(scratch)
        scratch.rename(folder)
    with init_empty_weights():
        network = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    total = sum(weight.nbytes for weight in network.state_dict().values())
    with tqdm(total=total, desc="Writing the judge", unit="B", unit_scale=True) as progress:
        write_weights(network, folder, progress)
    return folder


def panels(size: int) -> list[Image.Image]:
    """Draw the four panels of a set: gradients, of which one has another color."""
    ramp = np.linspace(0, 255, size, dtype=np.uint8)
    rows, columns = np.meshgrid(ramp, ramp, indexing="ij")
    return [Image.fromarray(np.stack([rows, columns, np.full_like(rows, blue)], -1)) for blue in (40, 60, 80, 250)]


# ---- Parts, each in a process of its own ----


def length_of(inputs: dict[str, Any]) -> int:
    """Return the tokens of a call of the language model."""
    tensor = inputs["inputs_embeds"] if inputs.get("inputs_embeds") is not None else inputs["input_ids"]
    return tensor.shape[1]


def score(model: Path, report: Path) -> None:
    """Score the pairs of a set, and one pair of each size; write scores, tokens, memory and seconds."""
    phases, tokens = Phases(), []
    phases.watch()
    with phases.phase("load"):
        judge = PaCoReward.from_pretrained(model, device="cpu")
    decoder = judge.model.get_decoder()
    decoder.register_forward_pre_hook(lambda module, args, kwargs: tokens.append(length_of(kwargs)), with_kwargs=True)
    sizes = {}
    for size in SIZES:
        with phases.phase(f"one pair, {size} pixels"):
            (single,) = judge.score([tuple(panels(size)[:2])], QUESTION)
        sizes[size] = {
            "tokens": max(tokens),
            "tokens of the plan": judge_tokens(2 * size**2, QUESTION_TOKENS),
            "score": single,
        }
        tokens.clear()
    with phases.phase("six pairs, 512 pixels"):
        scores = judge.score(list(combinations(panels(512), 2)), QUESTION)
    with phases.phase(f"six pairs, {PANEL} pixels"):
        small = judge.score(list(combinations(panels(PANEL), 2)), QUESTION)
    text = {"Yes": judge.yes_id, "No": judge.no_id}
    found = {"ids": text, "sizes": sizes, "scores": scores, f"scores, {PANEL} pixels": small}
    found["phases"] = in_gib(phases.found)
    report.write_text(json.dumps(found), encoding="utf-8")


def train(words: list[str], report: Path) -> None:
    """Run the command, and write the phases of this process at every checkpoint and at the end."""
    phases = Phases()
    save = PaCoRewardTrainer._save_checkpoint

    def save_and_write(*args, **kwargs) -> None:
        with phases.phase("save"):
            save(*args, **kwargs)
        write_atomically(report, json.dumps(phases.found), durable=False)  # after which the process may be killed

    PaCoRewardTrainer._save_checkpoint = save_and_write  # type: ignore[method-assign]
    PaCoRewardTrainer.__init__ = phases.of("load", PaCoRewardTrainer.__init__)  # type: ignore[method-assign]
    PaCoRewardTrainer.training_step = phases.of("train", PaCoRewardTrainer.training_step)  # type: ignore[method-assign]
    phases.watch()
    with fast_products():
        if code := commands.main(words):
            raise SystemExit(code)
    report.write_text(json.dumps(phases.found), encoding="utf-8")


def plan(words: list[str], report: Path) -> None:
    """Write the plan of the command in place of running it, for pairs of the longest and of the rehearsed images."""

    def write(trainer, model: str, args, *, peft_config, **kwargs) -> None:
        plans = {}
        for name, settings in {"longest pair": {}, "rehearsed": {"max_pixels": PANEL**2}}.items():
            for option, value in settings.items():
                setattr(args, option, value)
            planned = plan_memory(model, args, peft_config=peft_config)
            plans[name] = {
                phase.name: {"device": phase.device, "host": phase.host, "mapped": phase.mapped}
                for phase in planned.phases
            }
        report.write_text(json.dumps(plans), encoding="utf-8")
        raise SystemExit

    PaCoRewardTrainer.__init__ = write  # type: ignore[method-assign]
    raise SystemExit(commands.main(words))


def serve(model: Path, vllm: str, report: Path) -> None:
    """Serve the model by `paco-trl serve`, and score the pairs of a set of small panels."""
    words = [sys.executable, "-m", "paco_trl.commands.main", "serve", "--model_name_or_path", str(model)]
    words += [
        "--vllm",
        vllm,
        "--port",
        str(PORT),
        "--dtype",
        "bfloat16",
        "--max_model_len",
        "2048",
        "--",
        "--enforce-eager",
    ]
    started = time.monotonic()
    server = subprocess.Popen(words, start_new_session=True)
    try:
        judge = ServedJudge(
            f"http://127.0.0.1:{PORT}/v1", "paco-reward", timeout=600, time_budget=3600, max_concurrency=2
        )
        while True:
            time.sleep(5)
            if server.poll() is not None:
                raise SystemExit(f"The server ended with code {server.returncode}.")
            try:
                judge.check()
                break
            except JudgeUnavailableError as error:
                print(error, flush=True)
        ready = time.monotonic() - started
        scores = judge.score(list(combinations(panels(PANEL), 2)), QUESTION)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
    seconds = {"until it answers": round(ready), "six pairs": round(time.monotonic() - started - ready)}
    report.write_text(json.dumps({"scores": scores, "seconds": seconds}), encoding="utf-8")


# ---- The rehearsal ----


def split_words(recipe: str, model: Path, folder: Path, options: dict[str, Any]) -> list[str]:
    """Return the words of the recipe's command."""
    rows = []
    for number, panel in enumerate(panels(PANEL)):
        panel.save(folder / f"{number}.png")
    for first, second in combinations(range(4), 2):
        reasons = "The same colors." if second < 3 else "The last image is blue."
        rows.append(make_pair(f"{first}.png", f"{second}.png", QUESTION, second < 3, reasons))
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["reward", "--config", recipe, "--model_name_or_path", str(model), "--dataset_name", str(data)]
    for name, value in ({"output_dir": folder / "run"} | OPTIONS | options).items():
        words += [f"--{name}", str(value)]
    return words


def rehearse_judge(recipe: str, model: Path, folder: Path, options: dict[str, Any]) -> dict:
    """Rehearse a judge's recipe, and return the report."""
    folder.mkdir(parents=True, exist_ok=True)
    vllm = options.pop("vllm", None)
    words = split_words(recipe, model, folder, options)
    reports = {part: folder / f"{part}.json" for part in ("plan", "score", "train", "resume", "adapter", "serve")}
    read = lambda part: json.loads(reports[part].read_text(encoding="utf-8"))  # noqa: E731
    run_part(__file__, "plan", reports["plan"], *words)
    run_part(__file__, "score", model, reports["score"])
    seconds = {
        "until the first checkpoint": run_part(
            __file__, "train", reports["train"], *words, killed_at=reports["train"]
        ),
        "resumed, to the end": run_part(
            __file__, "train", reports["resume"], *words, "--resume_from_checkpoint", "auto"
        ),
    }
    run_part(__file__, "score", folder / "run", reports["adapter"])
    if vllm is not None:
        run_part(__file__, "serve", model, vllm, reports["serve"])
    with safe_open(folder / "run" / "adapter_model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    state = json.loads((folder / "run" / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8"))
    return {
        "recipe": recipe,
        "date": datetime.now(UTC).date().isoformat(),
        "options": {name: value for name, value in (OPTIONS | options).items() if name != "use_cpu"},
        "scored": read("score"),
        "scored with the adapter": read("adapter"),
        "served": read("serve") if vllm is not None else None,
        "seconds": {name: round(value) for name, value in seconds.items()},
        "plan, GiB": {
            name: {
                phase: {
                    place: {part: round(size / GIB, 2) for part, size in parts.items() if size > GIB / 100}
                    for place, parts in places.items()
                }
                for phase, places in phases.items()
            }
            for name, phases in read("plan").items()
        },
        "measured, until it was killed": in_gib(read("train")),
        "ratios": {
            **ratios(read("train"), read("plan")["rehearsed"]),
            **{
                f"tokens, {size} pixels": round(pair["tokens"] / pair["tokens of the plan"], 2)
                for size, pair in read("score")["sizes"].items()
            },
        },
        "measured, resumed": in_gib(read("resume")),
        "adapter": {
            "layers": len({name.partition(".lora_")[0] for name in shapes}),
            "weights": sum(torch.Size(shape).numel() for shape in shapes.values()),
        },
        "log": state["log_history"],
    }


if __name__ == "__main__":
    part, *rest = sys.argv[1:]
    if part == "train":
        train(rest[1:], Path(rest[0]))
    elif part == "plan":
        plan(rest[1:], Path(rest[0]))
    elif part == "score":
        with fast_products():
            score(Path(rest[0]), Path(rest[1]))
    else:
        serve(Path(rest[0]), rest[1], Path(rest[2]))
