# SPDX-License-Identifier: Apache-2.0
"""
How often the host waits for the device: blocking copies in either direction, and values or sizes that Python reads.

    python benchmarks/speed/waits.py                       # on a simulated GPU, which it builds (see tests/simulated_cuda)
    python benchmarks/speed/waits.py --only grpo judge-training

Each scenario trains tiny models. Counted are the waits of a denoising step, a micro-step of training or a batch of
scoring, by the line of the package that waits, after the first round, whose checks are its own. A wait is one whatever
the size of the model, so the counts are those of a real GPU.
"""

import argparse
import ctypes
import functools
import json
import os
import runpy
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "paco_trl") + os.sep
GRPO: dict[str, dict[str, Any]] = {
    "grpo": {},
    "beta": {"beta": 0.01},
    "grpo_guard": {"loss_type": "grpo_guard"},
    "short tail": {"tail_steps": 2, "sde_steps": [2]},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "offload_embeddings": {"offload_embeddings": True},
}
NFT: dict[str, dict[str, Any]] = {"nft": {}, "awm": {"loss_type": "awm"}}
SCENARIOS = (*GRPO, *NFT, "judge-training", "judge-scoring", "clip-t")


class Waits:
    """Counts of waits by phase and by line; a phase is a call of a function, the innermost one where they nest."""

    def __init__(self):
        self.calls: Counter[str] = Counter()
        self.lines: Counter[tuple[str, str, str]] = Counter()  # phase, line of the package, line below it
        self.is_counting = True
        self._phase = ""
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, is_call: bool = True) -> Iterator[None]:
        before, self._phase = self._phase, name
        self.calls[name] += self.is_counting and is_call
        try:
            yield
        finally:
            self._phase = before

    def watch(
        self,
        owner: object,
        method: str,
        name: str | Callable[[], str],
        within: str | None = None,
        is_call: bool = True,
    ) -> None:
        """Make the calls of a method of an object a phase, all or those within another; some are counted elsewhere."""
        function = getattr(owner, method)

        @functools.wraps(function)
        def watched(*args, **kwargs):
            if within not in (None, self._phase):
                return function(*args, **kwargs)
            with self.phase(name if isinstance(name, str) else name(), is_call):
                return function(*args, **kwargs)

        setattr(owner, method, watched)

    def add(self, kind: bytes, operation: bytes) -> None:
        """Count a wait; the runtime calls it in the thread that waits."""
        if not self.is_counting or threading.current_thread().name.startswith("rewards"):
            return
        where, library, frame = "backward", "", sys._getframe().f_back  # none in a thread of autograd
        while frame is not None:
            name = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            if "triton/runtime/interpreter.py" in name:  # a kernel that a GPU runs
                return
            if name.startswith(PACKAGE):
                where = "paco_trl" + os.sep + name[len(PACKAGE) :]
                break
            where, library = "outside the package", library or name.split("site-packages" + os.sep)[-1]
            frame = frame.f_back
        with self._lock:
            self.lines[self._phase, where, f"{kind.decode()}, {operation.decode()}: {library}"] += 1

    def per_call(self, phase: str, is_own: bool = False) -> float:
        """Return the mean number of waits in a call of a phase: all, or those of lines of the package itself."""
        found = [
            count
            for (name, where, below), count in self.lines.items()
            if name == phase and (not is_own or (where.startswith("paco_trl") and below.endswith(": ")))
        ]
        return sum(found) / self.calls[phase]

    def table(self, phase: str) -> list[str]:
        """Return the lines that wait in a phase, the most frequent first."""
        found = [(count, *key[1:]) for key, count in self.lines.items() if key[0] == phase]
        return [
            f"{count / self.calls[phase]:8.2f}  {where}  ({library})" for count, where, library in sorted(found)[::-1]
        ]


@contextmanager
def waits_counted() -> Iterator[Waits]:
    """Count in a process with simulated devices."""
    runtime = ctypes.CDLL(None)
    waits = Waits()
    listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(waits.add)
    runtime.simulated_cuda_listen(listener)
    try:
        yield waits
    finally:
        runtime.simulated_cuda_listen(None)


def train_after_first_step(trainer, waits: Waits) -> None:
    """Train, and count from the second optimizer step on."""
    waits.watch(trainer, "training_step", "micro-step")
    training_step = trainer.training_step

    def counted(*args, **kwargs):
        waits.is_counting = trainer.state.global_step > 0
        return training_step(*args, **kwargs)

    trainer.training_step, waits.is_counting = counted, False
    trainer.train()
    waits.is_counting = False


def count_objective(name: str, folder: Path) -> Waits:
    """Train three rounds of a tiny FLUX with an objective of GRPO or NFT, and count in the last two."""
    from peft import LoraConfig

    from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoNFTConfig, PaCoNFTTrainer, tiny
    from paco_trl.data import demo_prompts_path, load_image_set_prompts
    from paco_trl.rewards import redness_reward

    prompts = load_image_set_prompts(demo_prompts_path())
    square = [index for index, (r, c) in enumerate(zip(prompts["rows"], prompts["cols"], strict=True)) if r == c == 2]
    prompts = prompts.select(square).remove_columns(["height", "width"])
    model = folder / "flux"
    if not model.exists():
        tiny.build_tiny_flux(model)
    config, trainer_class = (PaCoGRPOConfig, PaCoGRPOTrainer) if name in GRPO else (PaCoNFTConfig, PaCoNFTTrainer)
    settings = {"sde_steps": [1, 2], **GRPO[name]} if name in GRPO else NFT[name]
    args = config(
        str(folder / "out"), bf16=True, height=64, width=64, num_generations=4, num_prompts_per_generation=2,
        per_device_train_batch_size=4, num_inference_steps=6, optimizer_steps_per_generation=1, max_steps=3,
        learning_rate=1e-3, report_to="none", save_strategy="no", log_completions=False, plot_curves=False,
        disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = trainer_class(
        str(model), redness_reward, args, train_dataset=prompts,
        peft_config=LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian"),
    )  # fmt: skip
    with waits_counted() as waits:
        policy = trainer.policy.recording_pipeline

        def step() -> str:
            index, sde = policy.scheduler.next_step_index, policy.scheduler.sde
            if sde is not None and index in sde.stochastic_steps:
                return "stochastic step"
            return "last step" if index == len(policy.scheduler.timesteps) - 1 else "plain step"

        waits.watch(trainer, "_generate_and_score_completions", "round")
        waits.watch(policy, "generate", "batch")
        # With the hooks of the policy; a step ends with the scheduler
        waits.watch(policy.model, "_call_impl", step, within="batch", is_call=False)
        waits.watch(policy.scheduler, "step", step, within="batch")
        waits.watch(trainer.statistics, "finish", "optimizer step")
        train_after_first_step(trainer, waits)
    return waits


def count_judge_training(folder: Path) -> Waits:
    """Train a tiny judge, and count in all micro-steps of 2 pairs but those of the first step."""
    from datasets import Dataset
    from PIL import Image

    from paco_trl import PaCoRewardConfig, PaCoRewardTrainer
    from paco_trl.data import make_pair

    colors = ["red", "blue", "green", "white"]
    images = [Image.new("RGB", (56 + 28 * i, 56), color) for i, color in enumerate(colors)]
    rows = [make_pair(images[i % 4], images[i // 4], "Are they alike?", i % 5 == 0) for i in range(16)]
    args = PaCoRewardConfig(
        str(folder / "out"), bf16=True, first_token_weight=0.1, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-3, logging_steps=100, report_to="none",
        save_strategy="no", eval_strategy="no", disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    trainer = PaCoRewardTrainer(str(judge_in(folder)), args, Dataset.from_list(rows))
    with waits_counted() as waits:
        train_after_first_step(trainer, waits)
    return waits


def judge_in(folder: Path) -> Path:
    from paco_trl import tiny

    return folder / "judge" if (folder / "judge").exists() else tiny.build_tiny_qwen2_5_vl(folder / "judge")


def count_judge_scoring(folder: Path) -> Waits:
    """Score the 6 pairs of a 2x2 set in one call."""
    from itertools import combinations

    from PIL import Image

    from paco_trl import PaCoReward

    judge = PaCoReward.from_pretrained(judge_in(folder), dtype="bfloat16")
    panels = [Image.new("RGB", (56, 56), color) for color in ("red", "blue", "green", "white")]
    with waits_counted() as waits:
        waits.is_counting = False
        for waits.is_counting in (False, True):
            with waits.phase("call of 6 pairs"):
                judge.score(list(combinations(panels, 2)), "Are they alike?")
    return waits


def count_clip_t(folder: Path) -> Waits:
    """Score 16 panels in one call."""
    from PIL import Image

    from paco_trl.rewards import ClipTReward
    from tiny_models import build_tiny_clip

    reward = ClipTReward(build_tiny_clip(folder / "clip"), device="cuda")
    images = [Image.new("RGB", (64, 64), (8 * i, 0, 0)) for i in range(16)]
    texts = ["a red panda", "a fox", "a bear", "a wolf"]
    arguments = {"prompts": ["x"] * 4, "completions": images[:4], "panels": [texts] * 4}
    arguments["panel_images"] = [images[i : i + 4] for i in range(0, 16, 4)]
    with waits_counted() as waits:
        for waits.is_counting in (False, True):
            with waits.phase("batch of 16 panels"):
                reward(**arguments)
    return waits


def count(name: str, folder: Path) -> Waits:
    """Count the waits of a scenario; tiny models are built once in the directory."""
    if name in (*GRPO, *NFT):
        return count_objective(name, folder)
    return {"judge-training": count_judge_training, "judge-scoring": count_judge_scoring, "clip-t": count_clip_t}[
        name
    ](folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="scenarios to count")
    parser.add_argument("--output", help="JSON file for the counts, per call of a phase")
    args = parser.parse_args()
    if "SIMULATED_CUDA_OPERATORS" not in os.environ:
        sys.argv = [str(ROOT / "tests" / "simulated_cuda"), *sys.argv]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    import torch
    import transformers

    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            waits = count(name, Path(folder))
            phases = [phase for phase in sorted(waits.calls) if waits.calls[phase] > 0]
            # That of a round depends on how many tensors a model has: they are moved one by one
            means = {phase: round(waits.per_call(phase), 2) for phase in phases if phase != "round"}
            ratios[name] = {phase: mean if mean % 1 else int(mean) for phase, mean in means.items()}
            for phase in phases:
                print(f"{name}: {waits.per_call(phase):.3g} in each {phase} ({waits.calls[phase]} counted)")
                print("".join(f"{line}\n" for line in waits.table(phase)), end="")
    if args.output:
        results = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
        Path(args.output).write_text(json.dumps(results | {"ratios": ratios}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
