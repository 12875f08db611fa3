# SPDX-License-Identifier: Apache-2.0
"""How much of everything the miniature does."""

from dataclasses import dataclass


COMMAND = "python examples/miniature/demo.py"  # from the root of the repository
ADAPTER = "toy-flux-lora"  # name of the generator's folder, which its card takes for its own


@dataclass(frozen=True)
class MiniatureSettings:
    """
    Sizes of the miniature.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of everything: prompts, noise, weights of new adapters, order of the data.
        num_dataset_prompts (`int`, *optional*, defaults to `160`):
            Prompts whose sets become the pairs; a fifth of them is held out to measure judges.
        num_train_prompts (`int`, *optional*, defaults to `240`):
            Other prompts, on which the generator is trained.
        num_test_prompts (`int`, *optional*, defaults to `48`):
            Other prompts, on which it is measured before and after.
        num_inference_steps (`int`, *optional*, defaults to `8`):
            Denoising steps of every set that is drawn.
        num_pairs (`int`, *optional*, defaults to `6400`):
            Pairs that the judge is trained on, at most.
        judge_batch_size (`int`, *optional*, defaults to `32`):
            Pairs of an optimizer step.
        judge_learning_rate (`float`, *optional*, defaults to `1.5e-3`):
            Highest learning rate of the judge, with a rank of 16. The paper's is that of a model 10,000 times as large;
            with this one the toy ranked best, and worse with 4e-3, on pairs of an earlier toy FLUX.
        num_rounds (`int`, *optional*, defaults to `20`):
            Rounds of drawing, judging and learning.
        num_prompts_per_round (`int`, *optional*, defaults to `8`):
            Prompts of a round.
        num_generations (`int`, *optional*, defaults to `16`):
            Sets drawn for each of them (paper).
        sde_steps (`tuple[int, ...]`, *optional*, defaults to `(1, 2, 3)`):
            Denoising steps that are stochastic, and trained.
        learning_rate (`float`, *optional*, defaults to `3e-3`):
            Learning rate of the generator, with a rank of 16: an earlier toy FLUX learned nothing with 1e-3 in 12
            rounds of 64 sets, and 1e-2 destroyed it.
        epsilon (`float`, *optional*, defaults to `5e-3`):
            Clip range of the probability ratio, which moves more in a small model.
        resolution_scale (`float`, *optional*, defaults to `0.5`):
            Factor per side from the full size to the size of training (paper).
        test_seeds (`int`, *optional*, defaults to `3`):
            Number of noises that each test prompt is drawn with.
    """

    seed: int = 0
    num_dataset_prompts: int = 160
    num_train_prompts: int = 240
    num_test_prompts: int = 48
    num_inference_steps: int = 8
    num_pairs: int = 6400
    judge_batch_size: int = 32
    judge_learning_rate: float = 1.5e-3
    num_rounds: int = 20
    num_prompts_per_round: int = 8
    num_generations: int = 16
    sde_steps: tuple[int, ...] = (1, 2, 3)
    learning_rate: float = 3e-3
    epsilon: float = 5e-3
    resolution_scale: float = 0.5
    test_seeds: int = 3


# Everything happens, and nothing is learned
SHORT = MiniatureSettings(
    num_dataset_prompts=10,
    num_train_prompts=8,
    num_test_prompts=4,
    num_inference_steps=5,
    num_pairs=128,
    num_rounds=2,
    num_prompts_per_round=4,
    num_generations=4,
    test_seeds=2,
)
