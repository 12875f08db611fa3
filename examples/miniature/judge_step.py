# SPDX-License-Identifier: Apache-2.0
"""Step 2: train PaCo-Reward on the pairs, and compare it with untrained judges."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import LoraConfig

from paco_trl import PaCoReward, PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.evaluation import ClipIScorer, evaluate_rankings

from .models import toy_clip_path, toy_judge_path
from .progress import show_figures
from .settings import MiniatureSettings


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


def train_judge(folder: Path, pairs: "DatasetDict", settings: MiniatureSettings, **options: Any) -> dict[str, float]:
    """Train a LoRA of the toy Qwen2.5-VL to answer whether two images are consistent."""
    train = pairs["train"].shuffle(seed=settings.seed)
    usual = {
        "first_token_weight": 1.0,  # labels without reasons
        "num_train_epochs": 1,
        "per_device_train_batch_size": settings.judge_batch_size,
        "per_device_eval_batch_size": 128,
        "learning_rate": settings.judge_learning_rate,
        "logging_steps": 10,
        "save_strategy": "no",  # it takes a minute or two
        "overwrite_output_dir": True,  # of a run that was killed before its result was written
        "seed": settings.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    trainer = PaCoRewardTrainer(
        model=str(toy_judge_path()),
        args=PaCoRewardConfig(str(folder), **(usual | options)),
        train_dataset=train.select(range(min(settings.num_pairs, len(train)))),
        eval_dataset=pairs["test"],
        peft_config=LoraConfig(r=16, lora_alpha=32),
    )
    show_figures(trainer, {"loss": "loss", "decision_accuracy": "accuracy"})
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    return metrics


def compare_judges(folder: Path, rankings: "Dataset") -> dict[str, Any]:
    """Rank panels of held-out prompts with the trained judge, the untrained one and CLIP-I."""
    scorers = {
        "trained": PaCoReward.from_pretrained(folder, batch_size=128),
        "untrained": PaCoReward.from_pretrained(toy_judge_path(), batch_size=128),
        "clip_i": ClipIScorer(toy_clip_path()),
    }
    return {name: evaluate_rankings(scorer, rankings, batch_size=128) for name, scorer in scorers.items()}
