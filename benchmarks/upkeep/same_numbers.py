# SPDX-License-Identifier: Apache-2.0
"""
Show that a change of the code changes no number: train tiny models with two commits, and compare every bit.

    python benchmarks/upkeep/same_numbers.py --base <commit>

Each case is a seeded training on the CPU, or a command that generates images, in a process forked from one that has
imported the code. Compared are the images that rewards get, all results of the functions below, all that is logged but
times, and the adapter and its average. None of it depends on the order in which a round is generated and trained.
Both commits load the same models, built by this one. A case that a commit cannot run is reported with its error.
"""

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast


ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = (
    "sde_step", "group_advantages", "clipped_surrogate", "guarded_surrogate",
    "gaussian_kl", "nft_loss", "matching_log_prob",
)  # fmt: skip
SETTINGS = {
    "use_cpu": True, "bf16": False, "height": 64, "width": 64, "num_generations": 4, "num_prompts_per_generation": 4,
    "num_inference_steps": 4, "num_inference_steps_eval": 2, "max_steps": 4, "report_to": "none",
    "save_strategy": "no", "log_completions": False, "plot_curves": False, "disable_tqdm": True,
    "per_device_train_batch_size": 4, "learning_rate": 1e-2,
}  # fmt: skip
EVALUATION = {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "eval_on_start": True}
SETS = {"data": "sets", "reward": "of_panels", "num_prompts_per_generation": 5, "per_device_train_batch_size": 2}
ANCHORED = {
    **SETS, "model": "flux_kontext", "panel_generation": "anchored", "resolution_scale": 1.0, "num_generations": 2,
    "per_device_train_batch_size": 1,
}  # fmt: skip
EDITS = {
    "data": "edits", "resolution_scale": 1.0, "num_generations": 2, "num_prompts_per_generation": 2,
    "per_device_train_batch_size": 2, "num_inference_steps": 3, "max_steps": 2,
}  # fmt: skip
# Settings, and of the case: model, data, reward, processes, and what else is done in place of one training
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "kl": {"beta": 0.1, "ema_decay": 0.5},
    "tail": {"tail_steps": 1, "sde_steps": [1, 2], "num_sde_steps": 1},
    "guard": {"loss_type": "grpo_guard", "sde_type": "cps", "num_iterations": 2},
    "dance": {"sde_type": "dance_sde", "optimizer_steps_per_generation": 1},
    "two_rewards": {
        "reward": "two",
        "multi_objective_aggregation": "log_tamed",
        "reward_weights": [1.0, 0.5],
        "max_reward_failures": 1.0,
    },
    "merged": {"per_device_train_batch_size": 2, "per_device_rollout_batch_size": 4, "offload_embeddings": True},
    "sizes": {"data": "sizes", "per_device_train_batch_size": 2, "per_device_rollout_batch_size": 4},
    "sd3": {"model": "stable_diffusion_3", "guidance_scale": 4.5, "sde_steps": [1]},
    "qwen": {"model": "qwen_image", "guidance_scale": 4.0, "negative_prompt": " "},
    "full": {"is_full": True, "learning_rate": 1e-4},
    "nft": {"is_nft": True},
    "awm": {"is_nft": True, "loss_type": "awm", "beta": 0.1},
    "evaluation": EVALUATION,
    "full_evaluation": {**EVALUATION, "is_full": True, "learning_rate": 1e-4, "eval_baseline": True},
    "sets": {**SETS, "panel_generation": "independent"},
    "sets_shared_noise": {**SETS, "panel_generation": "shared_noise", "tail_steps": 1},
    "sets_merged": {**SETS, "num_prompts_per_generation": 6, "per_device_rollout_batch_size": 4},
    "sets_of_grids": {"set_layout": "separate", "reward": "of_panels", "num_prompts_per_generation": 8},
    "sets_evaluation": {**SETS, **EVALUATION, "panel_generation": "shared_noise", "per_device_eval_batch_size": 2},
    "sets_nft": {**SETS, "is_nft": True},
    "sets_awm": {**SETS, "is_nft": True, "loss_type": "awm", "beta": 0.1},
    "anchored": {**ANCHORED, "max_steps": 2},
    "anchored_merged": {**ANCHORED, "per_device_rollout_batch_size": 2, **EVALUATION, "max_steps": 2},
    "edits_kontext": {**EDITS, **EVALUATION, "model": "flux_kontext"},
    "edits_klein": {**EDITS, "model": "flux2_klein", "guidance_scale": 4.0},
    "edits_qwen": {**EDITS, "model": "qwen_image_edit", "guidance_scale": 4.0, "negative_prompt": " "},
    "resampled": {
        "reward": "dull", "min_reward_std": 0.0, "max_resample_times": 3, "per_device_train_batch_size": 2,
        "max_excluded_groups": 1.0, "max_excluded_images": 1.0,
    },
    "sets_resampled": {**SETS, "reward": "dull_of_panels", "min_reward_std": 0.0, "max_resample_times": 1},
    "resumed": {
        "sde_steps": [0, 1, 2], "num_sde_steps": 1, "max_steps": 6, "lr_scheduler_type": "cosine",
        "save_strategy": "steps", "save_steps": 1, "stop_at": 3,
    },
    "sets_resumed": {**SETS, "save_strategy": "steps", "save_steps": 1, "stop_at": 1},
    "nft_resumed": {"is_nft": True, "save_strategy": "steps", "save_steps": 1, "stop_at": 3},
    "two_processes": {**EVALUATION, "processes": 2, "per_device_train_batch_size": 2},
    "two_processes_sets": {**SETS, "processes": 2, "num_prompts_per_generation": 6},
    "two_processes_anchored": {
        **ANCHORED, "processes": 2, "num_prompts_per_generation": 6, "per_device_rollout_batch_size": 2, "max_steps": 2,
    },
    "two_processes_resumed": {"processes": 2, "save_strategy": "steps", "save_steps": 1, "stop_at": 3},
    "command_prompts": {"command": "prompts", "data": "sizes"},
    "command_prompts_sets": {"command": "prompts", "data": "sets", "panel_generation": "shared_noise"},
    "command_prompts_anchored": {
        "command": "prompts", "data": "sets", "panel_generation": "anchored", "model": "flux_kontext",
    },
    "command_images": {"command": "images", "data": "sizes"},
}  # fmt: skip
MEASURED = re.compile("^time/|step_time|_per_second|_seconds|runtime|total_flos|memory")
SEEN: list[tuple] = []


# ---- Rewards and data ----


def see(prompts: list[str], images: list, state: Any) -> None:
    """Keep the step, the prompt and the pixels of images that a reward gets."""
    for prompt, image in zip(prompts, images, strict=True):
        SEEN.append((state.global_step, prompt, image.size, hashlib.sha256(image.tobytes()).hexdigest()))


def redness(prompts, completions, trainer_state, **kwargs):
    """Return how red images are."""
    from paco_trl.rewards import redness_reward

    see(prompts, completions, trainer_state)
    return redness_reward(prompts, completions)


def of_half(completions, **kwargs):
    """Return the brightness of the left half, which may be missing."""
    import numpy as np

    values = [float(np.asarray(image)[:, : image.width // 2].mean()) / 64 for image in completions]
    return [None if round(value * 1e4) % 17 == 0 else value for value in values]


def of_panels(prompts, completions, panel_images, trainer_state, **kwargs):
    """Return how red the panels are, weighted so that their order counts."""
    pairs = zip(prompts, panel_images, strict=True)
    values = [redness([prompt] * len(panels), panels, trainer_state) for prompt, panels in pairs]
    return [sum(value * (place + 1) for place, value in enumerate(row)) / len(row) for row in values]


def dull(prompts, completions, trainer_state, **kwargs):
    """Return how red images are, and for half of the prompts a value that does not differ."""
    values = redness(prompts, completions, trainer_state)
    return [0.5 if len(prompt) % 2 else value for prompt, value in zip(prompts, values, strict=True)]


def dull_of_panels(prompts, completions, panel_images, trainer_state, **kwargs):
    """Return how red the panels are, and for some sets a value that does not differ."""
    values = of_panels(prompts, completions, panel_images, trainer_state)
    return [0.5 if "1." in prompt else value for prompt, value in zip(prompts, values, strict=True)]


REWARDS: dict[str, Any] = {
    "redness": redness, "two": [redness, of_half], "of_panels": of_panels, "dull": dull, "dull_of_panels": dull_of_panels,
}  # fmt: skip


def dataset_of(kind: str) -> Any:
    """Return a dataset: grids, grids and single images of several sizes, separate sets, or edits."""
    from datasets import Dataset, Image
    from PIL import Image as PILImage

    from paco_trl.data import demo_prompts_path, load_image_set_prompts

    if kind == "sets":
        rows = [
            {
                "layout": "separate",
                "theme": f"Theme {number}.",
                "panels": [f"{'abc'[panel]} {number}." for panel in range(2 + number % 2)],
                "id": f"set {number}",
            }
            for number in range(8)
        ]
        return Dataset.from_list(rows)
    if kind == "edits":
        colors = ["#fa1e96", "#1efa96", "#961efa", "#fa961e"]
        images = [PILImage.new("RGB", (64, (64, 96)[number % 2]), color) for number, color in enumerate(colors)]
        prompts = ["Paint the house red.", "Paint the house red.", "Add a tree.", "Remove the car."]
        return Dataset.from_dict({"prompt": prompts, "image": images}).cast_column("image", Image())
    prompts = load_image_set_prompts(demo_prompts_path())
    square = [index for index, (r, c) in enumerate(zip(prompts["rows"], prompts["cols"], strict=True)) if r == c == 2]
    prompts = prompts.select(square)
    if kind == "sizes":
        return prompts.map(lambda _, index: {"height": 64, "width": (64, 128)[index % 2]}, with_indices=True)
    return prompts.remove_columns(["height", "width"])


# ---- One case ----


def update(hash: Any, value: Any) -> None:
    """Add a value to a digest, without fields that are `None`."""
    if isinstance(value, float | int | bool | str):
        hash.update(repr(value).encode())
    elif isinstance(value, tuple | list):
        for item in value:
            update(hash, item)
    elif (torch := sys.modules.get("torch")) and isinstance(value, torch.Tensor):
        hash.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def digest(value: Any) -> str:
    """Return the digest of a value."""
    hash = hashlib.sha256()
    update(hash, value)
    return hash.hexdigest()[:16]


def digests_of_training(case: dict[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    """Train, and return digests: those in a list are of parts in any order."""
    from peft import LoraConfig, get_peft_model_state_dict
    from transformers import TrainerCallback

    from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoNFTConfig, PaCoNFTTrainer

    calls: dict[str, list[str]] = defaultdict(list)

    def profile(frame: Any, event: str, result: Any) -> None:
        name = frame.f_code.co_name
        if event == "return" and name in FUNCTIONS and "paco_trl" in frame.f_code.co_filename:
            calls[name].append(digest(result))

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step == stop_at

    settings = {**SETTINGS, "data": "grids", "reward": "redness", **case}
    stop_at = settings.pop("stop_at", None)
    is_nft, is_full = settings.pop("is_nft", False), settings.pop("is_full", False)
    dataset, reward = dataset_of(settings.pop("data")), REWARDS[settings.pop("reward")]
    for name in ("model", "processes"):
        settings.pop(name, None)
    config, trainer_class = (PaCoNFTConfig, PaCoNFTTrainer) if is_nft else (PaCoGRPOConfig, PaCoGRPOTrainer)
    args = config(str(folder / "out"), ddp_backend="gloo" if "RANK" in os.environ else None, **settings)

    def trained(resume: bool = False, **kwargs):
        trainer = trainer_class(
            str(model), reward, args, train_dataset=dataset,
            eval_dataset=dataset.select([0, 1]) if "eval_steps" in settings else None,
            peft_config=None if is_full else LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian"), **kwargs,
        )  # fmt: skip
        sys.setprofile(profile)
        try:
            trainer.train(resume_from_checkpoint=resume or None)
        finally:
            sys.setprofile(None)
        return trainer

    if stop_at is not None:
        assert trained(callbacks=[Stop()]).state.global_step == stop_at
    trainer = trained(resume=stop_at is not None)
    assert trainer.state.global_step == args.max_steps
    logged = defaultdict(list)
    for entry in trainer.state.log_history:
        for name in sorted(entry):
            if not MEASURED.search(name):
                logged[f"log/{name}"].append((entry["step"], entry[name]))
    weights = trainer.model.state_dict() if is_full else get_peft_model_state_dict(trainer.model)
    average = trainer.ema.average if trainer.ema else {}
    return {
        "images": [digest(seen) for seen in SEEN],
        **{f"{name}()": values for name, values in calls.items()},
        **{name: digest(values) for name, values in logged.items()},
        "weights": digest([weights[name] for name in sorted(weights)]),
        "average": digest([average[name] for name in sorted(average)]),
    }


def digests_of_command(case: dict[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    """Generate images by a stage of `paco-trl evaluate`, and return digests of them and of their scores."""
    from PIL import Image

    from paco_trl.commands import evaluate_arguments

    criteria = {"Style": {"paint": "All images are painted alike."}}
    dataset_of(case["data"]).select(range(3)).map(lambda row: {"criteria": criteria}).to_json(folder / "rows.jsonl")
    words = ["--dataset_name", folder / "rows.jsonl", "--model_name_or_path", model, "--output_dir", folder / "out"]
    words += ["--num_inference_steps", 2]
    if "panel_generation" in case:
        words += ["--panel_generation", case["panel_generation"]]
    if case["command"] == "prompts":
        words += ["--rewards", "redness", "--edits", False, "--bf16", False, "--num_generations", 2]
        words += [] if case["data"] == "sizes" else ["--height", 64, "--width", 64]  # the rows of `sizes` have theirs
        evaluate_arguments.main(["prompts", *map(str, words)])
    else:
        evaluate_arguments.main(["generate", *map(str, words), "--dtype", "float32", "--seeds", "0", "1"])
    paths = sorted(path for path in (folder / "out").rglob("*.png") if "images" in path.parts)
    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(digest([str(path.relative_to(folder)), hashlib.sha256(image.tobytes()).hexdigest()]))
    assert images
    results = [json.loads(path.read_text()) for path in sorted((folder / "out").rglob("results.json"))]
    scores = [list(scores.values()) for result in results for row in result["sets"] for scores in row["scores"]]
    return {"images": images, "scores": digest(scores)}


def run_case(case: dict[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    """Run a case on its processes, forked from this one, and return its digests, or its error."""
    size = case.get("processes", 1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            run_forked(case, model, folder, rank, size, port)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    results = [path for rank in range(size) if (path := folder / f"{rank}.json").exists()]
    if any(codes) or len(results) < size:
        errors = [(folder / f"{rank}.txt").read_text().strip().splitlines()[-1:] for rank in range(size)]
        return {
            "error": " / ".join(dict.fromkeys(line for lines in errors for line in lines)) or f"exit codes {codes}"
        }
    first, *others = [json.loads(path.read_text()) for path in results]
    for other in others:
        for name, value in other.items():
            if isinstance(value, list):
                first[name] = first.get(name, []) + value
    return {name: digest(sorted(value)) if isinstance(value, list) else value for name, value in first.items()}


def run_forked(case: dict[str, Any], model: Path, folder: Path, rank: int, size: int, port: int) -> None:
    """Run a case in this process, write its digests, and end it."""
    code = 1
    try:
        with open(folder / f"{rank}.txt", "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if size > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        function = digests_of_command if "command" in case else digests_of_training
        (folder / f"{rank}.json").write_text(json.dumps(function(case, model, folder)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---- Two commits ----


def print_digests(cases: list[str], models: Path) -> None:
    """Run cases with the code that is imported, and print their digests as JSON."""
    root = os.environ.get("PYTHONPATH", str(ROOT)).split(os.pathsep)[0]
    sys.path[:0] = [root, str(ROOT / "tests")]
    import diffusers.pipelines.flux.pipeline_flux  # noqa: F401 - here once for all cases
    import trl.trainer.grpo_trainer  # noqa: F401

    import paco_trl.commands.evaluate
    import paco_trl.trainer.paco_nft_trainer  # noqa: F401

    assert Path(paco_trl.__file__).is_relative_to(root), f"{paco_trl.__file__} is not in {root}"
    for name in cases:
        case = CASES[name]
        builder = f"build_tiny_{case.get('model', 'flux')}"
        model = models / builder
        if not model.exists():
            import tiny_models

            getattr(tiny_models, builder)(model)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({name: run_case(case, model, Path(folder))}), flush=True)


def printed(root: Path, cases: list[str], models: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Run cases with a checkout's code, by this script, and give their digests one by one."""
    environment = {
        **os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MKL_CBWR": "AUTO,STRICT",
        "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg",
    }  # fmt: skip
    command = [sys.executable, __file__, "--print", "--models", str(models), "--cases", *cases]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=errors, text=True) as run,
    ):
        start = time.monotonic()
        for line in cast(IO[str], run.stdout):
            if line.startswith("{"):
                result = json.loads(line)
                print(f"{root.name}: {', '.join(result)} ({time.monotonic() - start:.0f} s)", file=sys.stderr)
                yield result
        if run.wait() != 0:
            errors.seek(0)
            raise SystemExit(f"The code of '{root}' does not run:\n{errors.read()[-3000:]}")


def digests_of_base(commit: str, cases: list[str], models: Path, folder: Path, kept: Path | None) -> dict[str, Any]:
    """Return the digests of another commit, without running cases whose digests are kept in a file."""
    name = subprocess.run(["git", "-C", str(ROOT), "rev-parse", commit], check=True, capture_output=True, text=True)
    patterns = (
        "paco_trl/tiny/*.py",
        "paco_trl/templates/tiny*",
        "tests/tiny_models/*.*",
    )
    code = [
        Path(__file__).read_text(),
        *(path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern))),
    ]
    source = [name.stdout.strip(), digest(code)]
    known = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    results = known["digests"] if known.get("source") == source else {}
    if missing := [case for case in cases if case not in results]:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(folder), source[0]], check=True)
        try:
            for result in printed(folder, missing, models):
                results |= result
                if kept is not None:
                    kept.write_text(json.dumps({"source": source, "digests": results}))
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)
    return results


def compared(before: dict[str, str], after: dict[str, str]) -> str:
    """Return what differs between the digests of a case, in words."""
    runs = (("by the base", before), ("now", after))
    if errors := [f"NOT RUN {when}: {found['error']}" for when, found in runs if "error" in found]:
        return "; ".join(errors)
    both = before.keys() & after.keys()
    differ = sorted(name for name in both if before[name] != after[name])
    words = [f"DIFFERS in {', '.join(differ)}"] if differ else []
    for text, names in (("gone", before.keys() - both), ("new", after.keys() - both)):
        words += [f"{text}: {', '.join(sorted(names))}"] * bool(names)
    count = sum(name.startswith("log/") for name in both)
    others = sorted(name for name in both if not name.startswith("log/"))
    return "; ".join(words) or f"equal in {', '.join(others)}" + f" and {count} logged metrics" * bool(count)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base", help="commit to compare with")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--print", action="store_true", help="print the digests of this checkout as JSON, and compare nothing"
    )
    parser.add_argument(
        "--kept",
        type=Path,
        help="file that keeps the digests of the base, which is not run again for another comparison",
    )
    parser.add_argument("--models", type=Path, help="directory of the tiny models, which are built where missing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or Path(folder) / "models"
        if options.print:
            print_digests(options.cases, models)
            return 0
        after: dict[str, dict[str, str]] = {}
        for result in printed(ROOT, options.cases, models):
            after |= result
        before = digests_of_base(options.base, options.cases, models, Path(folder) / "base", options.kept)
    texts = {case: compared(before[case], after[case]) for case in options.cases}
    for case, text in texts.items():
        print(f"{case:24} {text}")
    return int(not all(text.startswith("equal") for text in texts.values()))


if __name__ == "__main__":
    sys.exit(main())
