# SPDX-License-Identifier: Apache-2.0
"""
Run the published training loop of PaCo-GRPO from a clone of https://github.com/X-GenGroup/PaCo-RL, round by round.

Its `main` for FLUX runs unchanged, in a process of its own: sampling, decoding, rewards, advantages, loss, optimizer
and averages. The benchmark sets the model, the adapter's rank, prompts, rewards and batches, so that they are those of
the other recipes. It also adds a method that PEFT 0.21.2 lacks, and has 32 text tokens in place of 512. Left out is what
costs time and trains nothing: trackers, progress bars, checkpoints and evaluation.
"""

import importlib.util
import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from torch import nn
from torch.utils.data import DataLoader

from paco_trl.data import split_grid
from paco_trl.rewards import panel_similarity_reward, redness_reward


def count_forwards(transformer: nn.Module, counts: Counter, kind: Callable[[nn.Module, dict], str]) -> None:
    """Count the rows of all forwards by kind, of their backwards, and of what passes through the first block."""

    def count(module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        rows = len(kwargs["hidden_states"])
        counts[kind(module, kwargs)] += rows
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: counts.update({"backward": rows}))

    def count_block(module: nn.Module, args: tuple, kwargs: dict) -> None:
        counts["first block"] += len(args[0] if args else kwargs["hidden_states"])

    transformer.register_forward_hook(count, with_kwargs=True)
    transformer.transformer_blocks[0].register_forward_pre_hook(count_block, with_kwargs=True)


def forwards_by_kind(counts: dict[str, int], num_images: int) -> dict[str, float]:
    """Return the forwards of an image; what passes through the first block again is recomputed in the backward."""
    counts = {name: count for name, count in counts.items() if name != "encodes"}
    blocks, backward = counts.pop("first block"), counts.pop("backward", 0)
    counts |= {"recomputed": blocks - sum(counts.values()), "backward": backward}
    return {name: count / num_images for name, count in counts.items()} | {"all": sum(counts.values()) / num_images}


class PublishedLoop:
    """The published loop in a process that waits until it is told to run a round."""

    def __init__(self, clone: str, **settings):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, clone, settings), daemon=True)
        self._process.start()
        self.commit = subprocess.check_output(["git", "-C", clone, "rev-parse", "HEAD"], text=True).strip()
        self.trained_weights = self._connection.recv()

    def run(self, resolution: int, is_checkpointed: bool) -> tuple[float, dict[str, int]]:
        """Run a round; return its seconds by the benchmark's clock, and what was counted."""
        self._connection.send((resolution, is_checkpointed))
        return self._connection.recv()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def _serve(connection, clone: str, settings: dict) -> None:
    # Imported only to log, to parse options and to query a judge
    unused = {"absl": MagicMock(), "ml_collections": MagicMock(ConfigDict=SimpleNamespace), "openai": MagicMock()}
    sys.modules.update(unused)
    root = Path(clone) / "PaCo-GRPO"
    sys.path.insert(0, str(root))
    config, loop = _load(root / "config/grpo.py").t2is(), _load(root / "scripts/train_flux.py")
    pipeline = settings["build_pipeline"](settings["args"])
    _configure(config, pipeline, **settings)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.set_progress_bar_config = lambda **kwargs: None
    # The loop calls a method of this name; PEFT 0.21 has the function only
    PeftModel.get_adapter_state_dict = lambda model, name: get_peft_model_state_dict(model, adapter_name=name)
    tracker = SimpleNamespace(log=lambda *args, **kwargs: None, Image=lambda *args, **kwargs: None)
    rank = {"r": settings["lora_rank"], "lora_alpha": 2 * settings["lora_rank"]}
    vars(loop).update(
        # Its sampling relies on FLUX.1-dev's 512 text tokens; those of the small models' tokenizers are fewer
        flux_pipeline=partial(loop.flux_pipeline, max_sequence_length=config.max_sequence_length),
        FLAGS=SimpleNamespace(config=config),
        FluxPipeline=SimpleNamespace(from_pretrained=lambda *args, **kwargs: pipeline),
        LoraConfig=lambda **kwargs: LoraConfig(**kwargs | rank),
        DataLoader=lambda *args, **kwargs: DataLoader(*args, **kwargs | {"num_workers": 0}),
        multi_score=lambda *args, **kwargs: _score,
        set_online_log=lambda *args: (None, tracker),
        save_ckpt=_Turns(connection, config, settings["clock"]),  # at the beginning of each round
        tqdm=lambda iterable, **kwargs: iterable,
        print=lambda *args: None,
    )
    loop.main(None)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _configure(config, pipeline, args, batch_size, num_prompts, num_optimizer_steps, prompts, **kwargs) -> None:
    folder, num_images = Path(args.folder) / "published", num_prompts * args.num_generations
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text("\n".join(prompts), encoding="utf-8")
    vars(config).update(dataset=str(folder), logdir=str(folder), prompt_fn="general_ocr", save_freq=1, eval_freq=0)
    config.mixed_precision = "bf16" if args.torch_dtype == torch.bfloat16 else "no"
    config.max_sequence_length = min(512, pipeline.tokenizer_2.model_max_length)
    vars(config.sample).update(
        num_steps=args.num_inference_steps, batch_size=batch_size, reward_batch_size=min(4 * batch_size, 8),
        num_images_per_prompt=args.num_generations, unique_sample_num_per_epoch=num_prompts,
        num_batches_per_epoch=num_images // batch_size,
    )  # fmt: skip
    vars(config.train).update(
        batch_size=batch_size, gradient_accumulation_steps=num_images // batch_size // num_optimizer_steps,
        reward_fn={"redness": 1.0, "panel_similarity": 1.0}, reward_fn_kwargs={},
    )  # fmt: skip
    config.test.reward_fn, config.test.reward_fn_kwargs = config.train.reward_fn, {}


def _score(images: list, prompts: list, metadata: list) -> tuple[dict, dict]:
    panels = [split_grid(image, 2, 2) for image in images]
    similar = panel_similarity_reward(prompts, images, panel_images=panels)
    return {"redness": redness_reward(prompts, images), "panel_similarity": similar}, {}


class _Turns:
    """Stands in for the loop's `save_ckpt`: ends a round, and waits for the next."""

    def __init__(self, connection, config, clock: Callable[[], float]):
        self.connection, self.config, self.clock = connection, config, clock
        self.counts: Counter[str] = Counter()
        self.started: float | None = None

    def __call__(self, save_dir: str, transformer: nn.Module, *args) -> None:
        base = transformer.get_base_model()
        if self.started is None:
            vars(transformer)["module"] = transformer  # the loop expects a wrapper, which one process does not get
            count_forwards(base, self.counts, _kind)
            self.connection.send(sum(p.numel() for p in transformer.parameters() if p.requires_grad))
        else:
            self.connection.send((self.clock() - self.started, dict(self.counts)))
        request = self.connection.recv()
        if request is None:
            sys.exit()
        self.config.train.resolution, is_checkpointed = request
        (base.enable_gradient_checkpointing if is_checkpointed else base.disable_gradient_checkpointing)()
        self.counts.clear()
        self.started = self.clock()


def _kind(module: nn.Module, kwargs: dict) -> str:
    if not module.training:
        return "generated"
    return "trained" if torch.is_grad_enabled() else "old policy and reference"
