# SPDX-License-Identifier: Apache-2.0
"""Fixtures: tiny real models, built once for a test session."""

import functools
import gc
import os
import signal
import sys
import threading


# Before torch is imported. One thread: the models are tiny, and the threads of several test processes on few cores
# wait for one another. No network: nothing here may depend on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The last bit of MKL's products of few rows depends on where in memory a weight begins, unless it is told to be strict;
# MKL 2024.2, https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-windows/2024-1/reproducibility-conditions.html
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from tqdm import tqdm  # noqa: E402


# By default tqdm shares its lock with forks, and a test that kills one within it would wait for ever
tqdm.set_lock(threading.RLock())

# What a shell starts in the background ignores Ctrl-C, and so would the processes that tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory) -> Path:
    """Folder of a tiny FLUX pipeline."""
    from paco_trl.tiny import build_tiny_flux

    return build_tiny_flux(tmp_path_factory.mktemp("models") / "tiny-flux")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory) -> Path:
    """Folder of a tiny Qwen2.5-VL with its processor."""
    from paco_trl.tiny import build_tiny_qwen2_5_vl

    return build_tiny_qwen2_5_vl(tmp_path_factory.mktemp("models") / "tiny-qwen2.5-vl")


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory) -> Path:
    """Folder of a tiny CLIP."""
    from tiny_models import build_tiny_clip

    return build_tiny_clip(tmp_path_factory.mktemp("models") / "tiny-clip")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable:
    """Folder of a tiny pipeline by the name of its builder, which is called once."""
    import tiny_models

    @functools.cache
    def of(name: str, **options) -> str:
        return str(getattr(tiny_models, f"build_tiny_{name}")(tmp_path_factory.mktemp("models") / name, **options))

    return of


@pytest.fixture(scope="session")
def context():
    """Of processes that are forked from one that has imported everything."""
    from launching import fork_context

    return fork_context()


@pytest.fixture(scope="session")
def prompts():
    """Twelve 2x2 image-set prompts without sizes of their own."""
    from testing_utils import square_prompts

    return square_prompts()


@pytest.fixture
def make_trainer(tiny_flux, prompts, tmp_path) -> Callable:
    """
    Makes a trainer of the tiny pipeline, float32, on 32 x 32 pixels: 4 prompts x 4 images a round, in micro-batches
    of 4. Keyword arguments are `trainer_class`, those of `PaCoGRPOConfig`, and `reward_funcs`, `train_dataset`, `eval_dataset`,
    `model`, `peft_config`, `callbacks`, `family`, `optimizer_cls_and_kwargs`, `quantization_config` of the
    trainer.
    """
    from paco_trl import PaCoGRPOTrainer
    from paco_trl.rewards import redness_reward
    from testing_utils import LORA, SMALL_RUN

    def make(trainer_class: type = PaCoGRPOTrainer, **kwargs) -> PaCoGRPOTrainer:
        trainer_arguments = {
            "model": str(tiny_flux),
            "reward_funcs": redness_reward,
            "train_dataset": prompts,
            "peft_config": LORA,
        }
        others = ("eval_dataset", "eval_reward_funcs", "callbacks", "family", "optimizer_cls_and_kwargs")
        for name in (*trainer_arguments, *others, "quantization_config"):
            if name in kwargs:
                trainer_arguments[name] = kwargs.pop(name)
        settings = {"output_dir": str(tmp_path / "out"), **SMALL_RUN, **kwargs}
        return trainer_class(args=trainer_class._config_class(**settings), **trainer_arguments)

    return make


@pytest.fixture
def make_small(make_trainer) -> Callable:
    """As `make_trainer`, with 2 prompts x 4 images a round."""
    return functools.partial(make_trainer, num_prompts_per_generation=2, gradient_checkpointing=False)


@pytest.fixture
def make_nft(make_small) -> Callable:
    """As `make_small` for DiffusionNFT and AWM; each image at 2 of its 3 times."""
    from paco_trl import PaCoNFTTrainer

    return functools.partial(make_small, PaCoNFTTrainer, num_noise_levels=2)


@pytest.fixture
def make_config(tmp_path) -> Callable:
    """Makes a config for the CPU."""
    from paco_trl import PaCoGRPOConfig

    def make(config_class: type = PaCoGRPOConfig, **kwargs) -> PaCoGRPOConfig:
        return config_class(**{"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, **kwargs})

    return make


_num_frozen = 0


def pytest_runtest_setup() -> None:
    """
    Keep what was imported, in the tests before too, out of every later garbage collection: millions of objects, which
    each `gc.collect` scans, also that of every `Trainer.train`.
    """
    global _num_frozen
    if len(sys.modules) != _num_frozen:
        _num_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter free what was kept; nanobind reports it as leaked otherwise."""
    gc.unfreeze()
