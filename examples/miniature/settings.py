# SPDX-License-Identifier: Apache-2.0
"""Settings of the miniature."""

from dataclasses import dataclass, replace


COMMAND = "python examples/miniature/demo.py"  # from the root of the repository
ADAPTER = "toy-flux-lora"  # directory of the generator, and title of its card
EDIT_ADAPTER = "toy-kontext-lora"


@dataclass(frozen=True)
class MiniatureSettings:
    """Sizes of the miniature."""

    world: str = "sets"  # or "edits"
    seed: int = 0  # of prompts, noise, new adapters and the order of the data
    num_dataset_prompts: int = 160  # a fifth is held out to evaluate judges
    num_train_prompts: int = 240
    num_test_prompts: int = 48
    num_inference_steps: int = 8
    num_pairs: int = 6400  # at most
    judge_batch_size: int = 32
    # The paper's is that of a model 10,000 times as large. On pairs of an earlier toy FLUX this one ranked best at rank
    # 16, and 4e-3 ranked worse.
    judge_learning_rate: float = 1.5e-3
    num_rounds: int = 20
    num_prompts_per_round: int = 8
    num_generations: int = 16  # paper
    sde_steps: tuple[int, ...] = (1, 2, 3)
    noise_level: float = 0.7
    # At rank 16, an earlier toy FLUX learned nothing with 1e-3 in 12 rounds of 64 sets, and 1e-2 destroyed it
    learning_rate: float = 3e-3
    epsilon: float = 5e-3  # the ratio moves more in a small model
    resolution_scale: float = 0.5  # paper
    test_seeds: int = 3  # noises for each test prompt


# With 8 prompts a round, noise 0.7 and 5e-3, an earlier toy Kontext got worse, on the truth as reward
EDITS = MiniatureSettings(
    world="edits",
    num_prompts_per_round=20,
    noise_level=0.9,  # paper, for FLUX.1-Kontext
    learning_rate=2e-3,
)


def shortened(settings: MiniatureSettings) -> MiniatureSettings:
    """Return settings with which every step runs, and nothing is learned."""
    return replace(
        settings,
        num_dataset_prompts=6,
        num_train_prompts=4,
        num_test_prompts=4,
        num_inference_steps=5,
        num_pairs=64,
        num_rounds=2,
        num_prompts_per_round=2,
        num_generations=4,
        test_seeds=1,
    )


SHORT = shortened(MiniatureSettings())
