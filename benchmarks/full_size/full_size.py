# SPDX-License-Identifier: Apache-2.0
"""
Rehearse a recipe at full size on a CPU: the real configs with random weights, by the recipe's own command.

    make full-size RECIPE=flux.2-klein-4b-24gb

The model is built once (`build_model.py`). Then `paco-trl grpo --config RECIPE` trains it on small images, with few
prompts and steps, in a process whose own memory is measured by phase. The process is killed after its first checkpoint. A
second one resumes it, ends the training and evaluates it, and a third one loads the saved adapter by diffusers and by
PEFT, and compares what they generate. What is measured is written as JSON beside the
plan of the same run.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import DiffusionPipeline
from peft import PeftModel
from PIL import Image
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

from build_model import build_model
from float32 import fast_products, has_bfloat16_instructions
from full_size_judge import JUDGE, build_judge, rehearse_judge
from paco_trl.commands import main as commands
from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.planning import plan_memory
from paco_trl.planning.peaks import fake_weights
from paco_trl.rollout import get_family
from paco_trl.trainer.round_trainer import RoundTrainer
from paco_trl.utils.files import write_atomically
from phases import GIB, Phases, in_gib, ratios, run_part


RECIPES = Path(commands.__file__).parents[1] / "recipes"
# Small images, few of them, and few steps; on a CPU no judge is loaded beside the model
OPTIONS = {
    "height": 128, "width": 128,
    "resolution_scale": 0.5, "num_generations": 2, "num_prompts_per_generation": 1, "per_device_train_batch_size": 1,
    "num_inference_steps": 3, "tail_steps": None, "num_inference_steps_eval": 2, "num_generations_eval": 1, "max_steps": 2,
    "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "report_to": "none", "use_cpu": True, "logging_steps": 1,
}  # fmt: skip
# Weights of a block that a token passes, in squares of the width
SQUARES = {"FluxTransformer2DModel": 12, "QwenImageTransformer2DModel": 12, "Flux2Transformer2DModel": 13}
REWARD = """
from PIL import ImageStat

def brightness_reward(completions, **kwargs):
    return [ImageStat.Stat(image.convert("L")).mean[0] / 255 for image in completions]
"""


def split_words(recipe: str, model: Path, folder: Path, options: dict[str, Any]) -> list[str]:
    """Return the words of the recipe's command."""
    reward = folder / "brightness.py"
    reward.write_text(REWARD, encoding="utf-8")
    is_edit = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")).get("edits", False)
    Image.linear_gradient("L").convert("RGB").resize((128, 128)).save(folder / "source.png")
    prompts = {name: folder / f"{name}.jsonl" for name in ("trained", "evaluated")}
    texts = ["Make it red.", "Make it blue."] if is_edit else load_image_set_prompts(demo_prompts_path())["prompt"][:2]
    for path, text in zip(prompts.values(), texts, strict=True):
        row = {"prompt": text, "image": "source.png"} if is_edit else {"prompt": text}  # without a size
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    words = ["grpo", "--config", recipe, "--model_name_or_path", str(model), "--rewards", str(reward)]
    files = {
        "output_dir": folder / "run",
        "dataset_name": prompts["trained"],
        "eval_dataset_name": prompts["evaluated"],
    }
    for name, value in (files | OPTIONS | options).items():
        words += [f"--{name}", str(value)]
    return words


# ---- Parts, each in a process of its own ----


def train(words: list[str], report: Path) -> None:
    """Run the command, and write the phases of this process at every checkpoint and at the end."""
    phases = Phases()
    phases.install()
    save = RoundTrainer._save_checkpoint

    def save_and_write(*args, **kwargs) -> None:
        save(*args, **kwargs)
        write_atomically(report, json.dumps(phases.found), durable=False)  # after which the process may be killed

    RoundTrainer._save_checkpoint = save_and_write  # type: ignore[method-assign]
    with fast_products():
        if code := commands.main(words):
            raise SystemExit(code)
    report.write_text(json.dumps(phases.found), encoding="utf-8")


def plan(words: list[str], report: Path) -> None:
    """Write the plan of the command in place of running it."""

    def write(trainer, model: str, reward_funcs, args, train_dataset, *, peft_config=None, **kwargs) -> None:
        planned = plan_memory(model, args, train_dataset, peft_config, eval_dataset=kwargs["eval_dataset"])
        phases = {
            phase.name: {"device": phase.device, "host": phase.host, "mapped": phase.mapped}
            for phase in planned.phases
        }
        report.write_text(json.dumps({"phases": phases, "forward": count_operations(planned.run)}), encoding="utf-8")
        raise SystemExit

    RoundTrainer.__init__ = write  # type: ignore[method-assign]
    raise SystemExit(commands.main(words))


def count_operations(run: Any) -> dict[str, Any]:
    """Count the TFLOP of a forward without the adapter, on tensors without data, and compute them from its tokens."""
    pipeline = run.planned
    calls, model = pipeline.transformer_calls(1, run.image), pipeline.model
    fake_weights(model, pipeline.mode)
    with pipeline.mode, pipeline.training_precision(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        with model.disable_adapter():
            model(**calls[0])
    config, call = model.get_base_model().config, calls[0]
    tokens = [call[name].shape[1] for name in ("hidden_states", "encoder_hidden_states")]
    width = config.num_attention_heads * config.attention_head_dim
    blocks = config.num_layers + config.get("num_single_layers", 0)
    layers = 2 * SQUARES[config["_class_name"]] * width**2 * sum(tokens)
    attention = 4 * sum(tokens) ** 2 * width
    return {
        "image tokens, text tokens": tokens,
        "forwards of a step": sum(len(arguments["hidden_states"]) for arguments in calls),
        "TFLOP, counted": round(counter.get_total_flops() / len(call["hidden_states"]) / 1e12, 3),
        "TFLOP, by arithmetic": round(blocks * (layers + attention) / 1e12, 3),
    }


def load(model: Path, adapter: Path, report: Path) -> None:
    """Load an adapter by diffusers and by PEFT; write what it holds, and how far the latents of an image differ."""
    with safe_open(adapter / "pytorch_lora_weights.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    latents = []
    for is_diffusers in (True, False, None):
        pipeline = DiffusionPipeline.from_pretrained(model, torch_dtype=torch.bfloat16)
        if is_diffusers:
            pipeline.load_lora_weights(adapter)
        elif is_diffusers is False:
            # PEFT computes an adapter in float32, diffusers in the dtype of the model
            adapted = PeftModel.from_pretrained(pipeline.transformer, adapter, autocast_adapter_dtype=False)
            pipeline.transformer = adapted.to(torch.bfloat16)
        family = get_family(pipeline)
        sources = [Image.new("RGB", (128, 128))] if family.max_source_images else []
        with fast_products():
            image = pipeline(
                prompt="A red fox.", num_inference_steps=1, output_type="latent",
                generator=torch.Generator().manual_seed(0), **family.call_arguments(64, 64, 4.0, sources),
            ).images  # fmt: skip
        latents.append(image.float())
        del pipeline
    by_diffusers, by_peft, base = latents
    found = {
        "layers": len({name.partition(".lora_")[0] for name in shapes}),
        "weights": sum(torch.Size(shape).numel() for shape in shapes.values()),
        "difference of diffusers and PEFT": (by_diffusers - by_peft).abs().max().item(),
        "difference of adapter and base": (by_diffusers - base).abs().max().item(),
    }
    report.write_text(json.dumps(found), encoding="utf-8")


# ---- The rehearsal ----


def rehearse(recipe: str, model: Path, folder: Path, options: dict[str, Any]) -> dict:
    """Rehearse a recipe with a model, and return the report."""
    folder.mkdir(parents=True, exist_ok=True)
    words = split_words(recipe, model, folder, options)
    reports = {part: folder / f"{part}.json" for part in ("plan", "train", "resume", "load")}
    read = lambda part: json.loads(reports[part].read_text(encoding="utf-8"))  # noqa: E731
    run_part(__file__, "plan", reports["plan"], *words)
    planned = read("plan")
    # Its report is written behind its first checkpoint
    seconds = {
        "until the first checkpoint": run_part(__file__, "train", reports["train"], *words, killed_at=reports["train"])
    }
    seconds["resumed, to the end"] = run_part(
        __file__, "train", reports["resume"], *words, "--resume_from_checkpoint", "auto"
    )
    log = json.loads((folder / "run" / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8"))[
        "log_history"
    ]
    seconds["loaded by diffusers and PEFT"] = run_part(__file__, "load", reports["load"], model, folder / "run")
    return {
        "recipe": recipe,
        "date": datetime.now(UTC).date().isoformat(),
        "options": {
            name: value for name, value in (OPTIONS | options).items() if name not in ("report_to", "use_cpu")
        },
        "seconds": {name: round(value) for name, value in seconds.items()},
        "forward": planned["forward"],
        "plan, GiB": {
            name: {
                place: {part: round(size / GIB, 2) for part, size in parts.items() if size > GIB / 100}
                for place, parts in phase.items()
            }
            for name, phase in planned["phases"].items()
        },
        "measured, until it was killed": in_gib(read("train")),
        # Of the first process, since the second has a checkpoint to load
        "ratios": {
            **ratios(read("train"), planned["phases"], "quantization" not in options),
            "operations of a forward": round(
                planned["forward"]["TFLOP, counted"] / planned["forward"]["TFLOP, by arithmetic"], 2
            ),
        },
        "measured, resumed": in_gib(read("resume")),
        "adapter": read("load"),
        "log": [
            {name: value for name, value in entry.items() if not isinstance(value, float) or value == value}
            for entry in log
        ],
    }


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        return train(sys.argv[3:], Path(sys.argv[2]))
    if sys.argv[1:2] == ["plan"]:
        return plan(sys.argv[3:], Path(sys.argv[2]))
    if sys.argv[1:2] == ["load"]:
        return load(Path(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=sorted(path.stem for path in RECIPES.glob("*.yaml")), help="Recipe.")
    parser.add_argument("--folder", type=Path, default=Path("full-size"), help="Directory of the models and runs.")
    parser.add_argument("--tokenizers", type=Path, help="Directory of published tokenizers.")
    parser.add_argument(
        "--blocks",
        type=int,
        help="Blocks of the transformer, where all of them take too long; of FLUX.1 double ones, with twice as many single ones.",
    )
    parser.add_argument("--output", type=Path, help="JSON of the report.")
    args, rest = parser.parse_known_args()
    options = {name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)}
    settings = yaml.safe_load((RECIPES / f"{args.recipe}.yaml").read_text(encoding="utf-8"))
    model = settings["model_name_or_path"]
    path = args.folder / model.split("/")[1]
    args.folder.mkdir(parents=True, exist_ok=True)
    runs = args.folder / f"{args.recipe}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if model == JUDGE:
        report = rehearse_judge(args.recipe, build_judge(path, args.tokenizers), runs, options)
    else:
        configs = {}
        if args.blocks is not None:
            path = path.with_name(f"{path.name}-{args.blocks}-blocks")
            configs = {"transformer": {"num_layers": args.blocks}}
            if "FLUX.1" in model:
                configs["transformer"]["num_single_layers"] = 2 * args.blocks  # as published
        report = rehearse(args.recipe, build_model(model, path, args.tokenizers, configs), runs, options)
        report["blocks"] = args.blocks
    report["products of bfloat16"] = "bfloat16" if has_bfloat16_instructions() else "float32"
    output = args.output or Path(__file__).with_name(f"{args.recipe}.json")
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{output} has the report.")


if __name__ == "__main__":
    main()
