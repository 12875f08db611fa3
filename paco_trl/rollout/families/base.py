# SPDX-License-Identifier: Apache-2.0
"""What a model family provides. `flux.py` beside this file is an example of a whole page."""

from abc import ABC, abstractmethod
from typing import Any

import torch


class Family(ABC):
    """
    The few things that differ between flow-matching pipelines.

    The pipeline itself runs unmodified; a page says how to call it, what its guidance makes of the transformer's
    outputs, and which layers are trained by default. A wrong `combine` cannot pass: at every rollout it is compared
    with what the scheduler really received.
    """

    lora_target_modules: list[str]
    """Names of the layers that get an adapter when `LoraConfig.target_modules` is left out."""

    text_encoders: tuple[str, ...]
    """Names of the pipeline's components that only [`encode_prompt`] needs. They leave the accelerator after it."""

    @abstractmethod
    def encode_prompt(self, pipeline, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
        """
        Encodes one prompt, by the pipeline's own method.

        Args:
            pipeline ([`~diffusers.DiffusionPipeline`]):
                Pipeline with its text encoders on `device`.
            prompt (`str`):
                Prompt.
            device (`torch.device`):
                Where the text encoders are.

        Returns:
            `dict[str, torch.Tensor]`: arguments of the pipeline's call that stand for the prompt, batch dimension 1.
        """

    @abstractmethod
    def size_multiple(self, pipeline) -> int:
        """Heights and widths, in pixels, must be multiples of this; else the pipeline would resize silently."""

    @abstractmethod
    def call_arguments(self, guidance_scale: float) -> dict:
        """Arguments of the pipeline's call that set its guidance."""

    @abstractmethod
    def combine(self, outputs: list[torch.Tensor], guidance_scale: float) -> torch.Tensor:
        """
        The guidance rule: what the scheduler gets from the transformer's outputs of one step.

        Args:
            outputs (`list[torch.Tensor]`):
                Output of each call of the step, in order.
            guidance_scale (`float`):
                Guidance scale.

        Returns:
            `torch.Tensor`: velocity.

        Raises:
            ValueError: the number of calls is not the family's.
        """

    def call_at(self, call: dict[str, Any], sample: torch.Tensor, sigma: torch.Tensor) -> dict[str, Any]:
        """
        A recorded call of the transformer for another sample and time, as the pipeline would make it.

        Only [`PaCoNFTTrainer`] needs it. For the recorded sample and time it must give the recorded call to the bit,
        which is compared at every rollout.

        Args:
            call (`dict`):
                Arguments, by name. They are not changed.
            sample (`torch.Tensor` of shape `(B, ...)`):
                Sample.
            sigma (`torch.Tensor` of shape `(B,)`):
                Time of each image, float32.

        Returns:
            `dict`: arguments, by name.

        Raises:
            NotImplementedError: the page does not say.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say how its transformer is called at another time, which training with "
            "PaCoNFTTrainer needs. Add `call_at` to the family's page."
        )
