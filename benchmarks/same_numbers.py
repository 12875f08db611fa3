# SPDX-License-Identifier: Apache-2.0
"""
Show that a change of the code changes no number: train tiny models with two commits, and compare every bit.

    python benchmarks/same_numbers.py --base <commit>

Each case is a seeded training on the CPU. Compared are all results of the functions below (samples, log-probabilities,
means, advantages, losses), the rewards, losses and gradient norms in the log, and the adapter and its average.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (
    "sde_step", "group_advantages", "clipped_surrogate", "guarded_surrogate",
    "gaussian_kl", "nft_loss", "matching_log_prob",
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "kl": {"beta": 0.1, "ema_decay": 0.5},
    "tail": {"tail_steps": 1, "sde_steps": [1, 2], "num_sde_steps": 1},
    "guard": {"loss_type": "grpo_guard", "sde_type": "cps", "num_iterations": 2},
    "dance": {"sde_type": "dance_sde", "optimizer_steps_per_generation": 1},
    "two_rewards": {
        "multi_objective_aggregation": "log_tamed",
        "reward_weights": [1.0, 0.5],
        "max_reward_failures": 1.0,
    },
    "merged": {"per_device_train_batch_size": 2, "per_device_rollout_batch_size": 4, "offload_embeddings": True},
    "sd3": {"build": "build_tiny_stable_diffusion_3", "guidance_scale": 4.5, "sde_steps": [1]},
    "qwen": {"build": "build_tiny_qwen_image", "guidance_scale": 4.0, "negative_prompt": " "},
    "full": {"is_full": True, "learning_rate": 1e-4},
    "nft": {"is_nft": True},
    "awm": {"is_nft": True, "loss_type": "awm", "beta": 0.1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "eval_on_start": True},
}


def reward_of_half(completions, **kwargs):
    """Return the brightness of the left half, which may be missing."""
    import numpy as np

    values = [float(np.asarray(image)[:, : image.width // 2].mean()) / 64 for image in completions]
    return [None if round(value * 1e4) % 17 == 0 else value for value in values]


def digests(case: str, folder: Path) -> dict[str, str]:
    """Train a case, and return the digests of its numbers."""
    import torch
    from peft import LoraConfig, get_peft_model_state_dict

    sys.path.append(str(ROOT / "tests"))
    import tiny_models
    from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoNFTConfig, PaCoNFTTrainer
    from paco_trl.data import demo_prompts_path, load_image_set_prompts
    from paco_trl.rewards import redness_reward

    hashes: dict[str, Any] = defaultdict(hashlib.sha256)

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            hashes[name].update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, float | int | bool | str | None):
            hashes[name].update(repr(value).encode())
        elif isinstance(value, tuple | list):
            for item in value:
                add(name, item)

    def profile(frame: Any, event: str, result: Any) -> None:
        name = frame.f_code.co_name
        if event == "return" and name in FUNCTIONS and "paco_trl" in frame.f_code.co_filename:
            add(name, result)

    settings = dict(CASES[case])
    build = settings.pop("build", "build_tiny_flux")
    is_nft, is_full = settings.pop("is_nft", False), settings.pop("is_full", False)
    prompts = load_image_set_prompts(demo_prompts_path())
    square = [index for index, (r, c) in enumerate(zip(prompts["rows"], prompts["cols"], strict=True)) if r == c == 2]
    prompts = prompts.select(square).remove_columns(["height", "width"])
    config, trainer_class = (PaCoNFTConfig, PaCoNFTTrainer) if is_nft else (PaCoGRPOConfig, PaCoGRPOTrainer)
    args = config(
        str(folder / "out"), use_cpu=True, bf16=False, height=64, width=64, num_generations=4,
        num_prompts_per_generation=4, num_inference_steps=4, max_steps=4, report_to="none", save_strategy="no",
        log_completions=False, plot_curves=False, disable_tqdm=True,
        **{"per_device_train_batch_size": 4, "learning_rate": 1e-2, **settings},
    )  # fmt: skip
    is_pair = "reward_weights" in settings
    trainer = trainer_class(
        str(getattr(tiny_models, build)(folder / "model")),
        [redness_reward, reward_of_half] if is_pair else redness_reward,
        args, train_dataset=prompts, eval_dataset=prompts.select([0, 1]) if "eval_steps" in settings else None,
        peft_config=None if is_full else LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian"),
    )  # fmt: skip
    sys.setprofile(profile)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    for entry in trainer.state.log_history:
        for name in sorted(entry):
            if any(word in name for word in ("reward", "loss", "grad_norm", "ratio", "kl", "artifact")):
                if not name.startswith(("time/", "images/")):
                    add("log", [name, entry[name]])
    weights = trainer.model.state_dict() if is_full else get_peft_model_state_dict(trainer.model)
    add("weights", [weights[name] for name in sorted(weights)])
    add("average", [trainer.ema.average[name] for name in sorted(trainer.ema.average)] if trainer.ema else "none")
    return {name: value.hexdigest()[:16] for name, value in sorted(hashes.items())}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base", help="commit to compare with")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--print", action="store_true", help="print the digests of this checkout as JSON, and compare nothing"
    )
    options = parser.parse_args()
    if options.print:
        results = {}
        for case in options.cases:
            with tempfile.TemporaryDirectory() as folder:
                results[case] = digests(case, Path(folder))
        print("\n" + json.dumps(results))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(base), options.base], check=True
        )
        try:
            results = [printed(root, options.cases) for root in (base, ROOT)]
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(base)], check=True)
    differ = 0
    for case in options.cases:
        before, after = (result[case] for result in results)
        wrong = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        differ += bool(wrong)
        print(
            f"{case:12} {'equal in ' + ', '.join(before) if not wrong else 'DIFFERS in ' + ', '.join(sorted(wrong))}"
        )
    return int(differ > 0)


def printed(root: Path, cases: list[str]) -> dict[str, dict[str, str]]:
    """Return the digests of a checkout, by this script."""
    environment = {
        **os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MKL_CBWR": "AUTO,STRICT",
    }  # fmt: skip
    command = [sys.executable, __file__, "--print", "--cases", *cases]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"The trainings of '{root}' failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
