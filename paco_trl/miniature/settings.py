# SPDX-License-Identifier: Apache-2.0
"""How much of everything the miniature does."""

from dataclasses import dataclass


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
        judge_epochs (`int`, *optional*, defaults to `1`):
            Times that it sees them.
        judge_batch_size (`int`, *optional*, defaults to `32`):
            Pairs of an optimizer step.
        judge_learning_rate (`float`, *optional*, defaults to `2e-3`):
            Highest learning rate of the judge. A small model wants a larger one than the paper's.
        num_rounds (`int`, *optional*, defaults to `40`):
            Rounds of drawing, judging and learning.
        num_prompts_per_round (`int`, *optional*, defaults to `8`):
            Prompts of a round.
        num_generations (`int`, *optional*, defaults to `8`):
            Sets drawn for each of them.
        learning_rate (`float`, *optional*, defaults to `1e-3`):
            Learning rate of the generator, with a rank of 16.
        epsilon (`float`, *optional*, defaults to `1e-3`):
            Clip range of the probability ratio.
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
    judge_epochs: int = 1
    judge_batch_size: int = 32
    judge_learning_rate: float = 2e-3
    num_rounds: int = 40
    num_prompts_per_round: int = 8
    num_generations: int = 8
    learning_rate: float = 1e-3
    epsilon: float = 1e-3
    resolution_scale: float = 0.5
    test_seeds: int = 3


# Everything happens, and nothing is learned
SHORT = MiniatureSettings(
    num_dataset_prompts=10,
    num_train_prompts=8,
    num_test_prompts=4,
    num_inference_steps=4,
    num_pairs=128,
    num_rounds=2,
    num_prompts_per_round=4,
    num_generations=4,
    test_seeds=2,
)
