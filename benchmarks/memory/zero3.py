# SPDX-License-Identifier: Apache-2.0
"""
What DeepSpeed ZeRO-3 gathers, when, and in how many calls, with the settings of `zero3.yaml` and with others.

    OMP_NUM_THREADS=1 python benchmarks/memory/zero3.py

Each setting trains two rounds of [`PaCoGRPOTrainer`] on two CPU processes, with collectives that are counted; the second
round is reported. The model is a FLUX with 8 double-stream and 16 single-stream blocks of 256 channels in place of 19 and
38 of 3,072. Settings that count weights are scaled, so that they hold as many blocks, and keep the same kinds of weights,
as at the real size. Counts do not depend on the machine; times on CPU processes would say nothing about GPUs.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch


WIDTH, REAL_WIDTH = 256, 3072
SCALE = (WIDTH / REAL_WIDTH) ** 2  # of the weights of a block
BLOCKS = {"num_layers": 8, "num_single_layers": 16}
# LoRA matrices are larger than every bias and smaller than every other matrix, as with rank 64 at the real width
RANK = 8
ONLY_VECTORS, WITH_ADAPTER = 6 * WIDTH, 4 * WIDTH * RANK
DEFAULTS = {
    "stage3_param_persistence_threshold": ONLY_VECTORS,
    "stage3_prefetch_bucket_size": int(5e7 * SCALE),
    "stage3_max_live_parameters": int(1e9 * SCALE),
    "stage3_max_reuse_distance": int(1e9 * SCALE),
}

# name -> changes of DeepSpeed's settings, and of the trainer's
SETTINGS: dict[str, tuple[dict, dict]] = {
    "zero3.yaml": ({}, {}),
    "ds3_gather_for_generation=False": ({}, {"ds3_gather_for_generation": False}),
    "gradient_checkpointing=False": ({}, {"gradient_checkpointing": False}),
    "stage3_prefetch_bucket_size=0": ({"stage3_prefetch_bucket_size": 0}, {}),
    "stage3_prefetch_bucket_size=5e8": ({"stage3_prefetch_bucket_size": int(5e8 * SCALE)}, {}),
    "stage3_param_persistence_threshold=1e6": ({"stage3_param_persistence_threshold": WITH_ADAPTER}, {}),
    "stage3_max_live_parameters=1e8": ({"stage3_max_live_parameters": int(1e8 * SCALE)}, {}),
    "stage3_max_live_parameters=4e9, stage3_max_reuse_distance=4e9": (
        {name: int(4e9 * SCALE) for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance")},
        {},
    ),
    "stage3_max_reuse_distance=0": ({"stage3_max_reuse_distance": 0}, {}),
}


def build_pipeline(folder: Path) -> None:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    from paco_trl.tiny import build_tiny_flux

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        **BLOCKS, in_channels=16, attention_head_dim=128, num_attention_heads=WIDTH // 128, joint_attention_dim=16,
        pooled_projection_dim=16, guidance_embeds=True,
    )  # fmt: skip
    tiny = build_tiny_flux(folder.with_name("tiny"))
    FluxPipeline.from_pretrained(tiny, transformer=transformer).save_pretrained(folder)


class Collectives:
    """Counts of collectives and their elements, by phase."""

    def __init__(self):
        self.phase, self.model = "start", None
        self.clear()
        for name, output in (("all_gather_into_tensor", 0), ("reduce_scatter_tensor", 1), ("all_reduce", 0)):
            self._count(name, output)

    def clear(self) -> None:
        self.calls, self.elements, self.live = Counter(), Counter(), Counter()

    def _count(self, name: str, place: int) -> None:
        own = getattr(torch.distributed, name)
        argument = ("output_tensor", "input", "tensor")[0 if "gather" in name else 1 if "scatter" in name else 2]

        def counted(*args, **kwargs):
            tensor = kwargs[argument] if argument in kwargs else args[place]
            if tensor.is_floating_point():  # not the booleans and counts of bookkeeping
                self.calls[self.phase, name] += 1
                self.elements[self.phase, name] += tensor.numel()
                if name == "all_gather_into_tensor" and self.model is not None:
                    full = sum(p.ds_numel for p in self.model.parameters() if p.ds_status.name != "NOT_AVAILABLE")
                    self.live[self.phase] = max(self.live[self.phase], full)
            return own(*args, **kwargs)

        setattr(torch.distributed, name, counted)


def work(setting: str, model: str, output: str) -> None:
    """Train on one of the two processes, and save what it counted in the second round."""
    collectives = Collectives()  # before DeepSpeed looks the functions up

    from datasets import Dataset
    from peft import LoraConfig

    from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
    from paco_trl.rewards import redness_reward

    class Watched(PaCoGRPOTrainer):
        @contextmanager
        def _generating(self, round):
            collectives.phase = "generation"
            if round.index == 1:
                collectives.clear()
                collectives.model = self.model
            try:
                with super()._generating(round) as recording:
                    yield recording
            finally:
                collectives.phase = "other"

        def compute_loss(self, *args, **kwargs):
            collectives.phase = "forward"
            loss = super().compute_loss(*args, **kwargs)
            collectives.phase = "backward"
            return loss

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            collectives.phase = "other"
            return loss

    engine, own = SETTINGS[setting]
    zero = {"stage": 3, **DEFAULTS, **engine}
    sizes = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    own = {**own, "deepspeed": {"zero_optimization": zero, **dict.fromkeys(sizes, "auto")}}
    panels = ["a red house", "a blue house"]
    row = {"prompt": "Two houses, side by side", "rows": 1, "cols": 2, "panels": panels}
    dataset = Dataset.from_list([{**row, "prompt": f"{row['prompt']}, {number}"} for number in range(2)])
    args = PaCoGRPOConfig(
        str(Path(output).with_suffix("")), use_cpu=True, bf16=False, ddp_backend="gloo", height=32, width=32,
        resolution_scale=1.0, num_generations=2, num_prompts_per_generation=2, optimizer_steps_per_generation=1,
        per_device_train_batch_size=1, num_inference_steps=3, max_steps=2, report_to="none", save_strategy="no",
        ema_decay=None, log_completions=False, plot_curves=False, disable_tqdm=True, **own,
    )  # fmt: skip
    trainer = Watched(
        model=model, reward_funcs=redness_reward, args=args, train_dataset=dataset,
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights="gaussian"),
    )  # fmt: skip
    parameters = list(trainer.model.parameters())
    weights = sum(p.numel() for p in parameters)
    adapter = sum(p.numel() for p in parameters if p.requires_grad)
    persistent = sum(p.numel() for p in parameters if p.numel() <= zero["stage3_param_persistence_threshold"])
    trainer.train()
    if not trainer.accelerator.is_main_process:
        return
    micro_batches, gather = args.round_plan.micro_batches_per_process, "all_gather_into_tensor"
    ratio = lambda elements: round(elements / weights, 4)  # noqa: E731
    calls, elements, live = collectives.calls, collectives.elements, collectives.live
    result = {
        "weights": weights,
        "adapter": ratio(adapter),
        "ratios": {
            "kept": ratio(persistent),
            "gathered, generation of a round": ratio(elements["generation", gather]),
            "calls, generation of a round": calls["generation", gather],
            "gathered, forward of a micro-batch": ratio(elements["forward", gather] / micro_batches),
            "gathered, backward of a micro-batch": ratio(elements["backward", gather] / micro_batches),
            "calls, micro-batch": (calls["forward", gather] + calls["backward", gather]) / micro_batches,
            "most at a time, training": ratio(max(live["forward"], live["backward"])),
        },
    }
    Path(output).write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--folder", default="runs/benchmark")
    parser.add_argument("--output", default="benchmarks/memory/zero3.json")
    parser.add_argument("--work", nargs=3, metavar=("SETTING", "MODEL", "OUTPUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work)
        return
    import deepspeed

    folder = Path(args.folder) / "zero3"
    build_pipeline(folder / "model")
    results = {}
    for number, setting in enumerate(args.settings):
        output = folder / f"{number}.json"
        output.unlink(missing_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        command += ["--work", setting, str(folder / "model"), str(output)]
        subprocess.run(command, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
        results[setting] = json.loads(output.read_text())
        print(setting, json.dumps(results[setting], indent=2), flush=True)
    report = {
        "setting": {
            "blocks": BLOCKS, "width": WIDTH, "rank": RANK, "processes": 2,
            "scaled": DEFAULTS,
        },
        **{name: next(iter(results.values()))[name] for name in ("weights", "adapter")},
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
        "ratios": {name: result["ratios"] for name, result in results.items()},
    }  # fmt: skip
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
