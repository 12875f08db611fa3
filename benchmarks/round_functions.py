# SPDX-License-Identifier: Apache-2.0
"""
How many of the package's functions and files a round passes through: what someone who follows it with a debugger reads.

    python benchmarks/round_functions.py

It trains a tiny FLUX on the CPU and counts the functions of the package (without lambdas and comprehensions, by file and
name) that are entered in the second round: four batches of generation, their rewards, four micro-steps and two optimizer
steps, without a checkpoint, a contact sheet or a log file.
"""

import argparse
import os
import sys
import tempfile
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


PACKAGE = str(Path(__file__).resolve().parents[1] / "paco_trl") + os.sep


def count(folder: Path) -> dict[str, list[str]]:
    """Return the functions that the second round enters, by file."""
    import numpy as np
    from peft import LoraConfig

    from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, tiny
    from paco_trl.data import demo_prompts_path, load_image_set_prompts

    def brightness_reward(completions, **kwargs):
        return [float(np.asarray(image).mean()) for image in completions]

    prompts = load_image_set_prompts(demo_prompts_path())
    square = [index for index, (r, c) in enumerate(zip(prompts["rows"], prompts["cols"], strict=True)) if r == c == 2]
    args = PaCoGRPOConfig(
        str(folder / "out"), use_cpu=True, bf16=False, height=64, width=64, num_generations=4,
        num_prompts_per_generation=4, per_device_train_batch_size=4, num_inference_steps=4, max_steps=6,
        learning_rate=1e-3, report_to="none", save_strategy="no", log_completions=False, plot_curves=False,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = PaCoGRPOTrainer(
        str(tiny.build_tiny_flux(folder / "flux")), brightness_reward, args,
        train_dataset=prompts.select(square).remove_columns(["height", "width"]),
        peft_config=LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian"),
    )  # fmt: skip
    entered: set[tuple[str, str]] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            entered.add((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    training_step, starts = trainer.training_step, iter(range(args.max_steps * 2))

    def counted(*inputs, **kwargs):
        start = next(starts)
        if start == 4:  # the second round begins
            trainer.rewards._executor = ThreadPoolExecutor(max_workers=1)  # a thread is profiled from its start
            threading.setprofile(profile)
            sys.setprofile(profile)
        elif start == 8:
            sys.setprofile(None)
            threading.setprofile(None)
        return training_step(*inputs, **kwargs)

    trainer.training_step = counted
    trainer.train()
    files = defaultdict(list)
    for file, name in sorted(entered):
        files[file].append(name)
    return files


def main() -> None:
    """Run the command."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = count(Path(folder))
    for file, names in files.items():
        print(f"{file}\n    {', '.join(names)}")
    print(f"{sum(map(len, files.values()))} functions in {len(files)} files")


if __name__ == "__main__":
    main()
