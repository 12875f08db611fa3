# SPDX-License-Identifier: Apache-2.0
"""Estimate of the memory that a training process needs on its device; nothing is allocated."""

from dataclasses import dataclass

from torch import nn

from ..utils.quantization import stored_bytes


_FLOAT32, _HALF = 4, 2


def weights_bytes(module: nn.Module, trainable: bool | None = None) -> int:
    """Count the bytes of a module's weights and buffers; `trainable` restricts them to trained or to frozen ones."""
    parameters = [p for p in module.parameters() if trainable is None or p.requires_grad is trainable]
    buffers = [] if trainable else list(module.buffers())
    return sum(map(stored_bytes, (*parameters, *buffers)))


def latent_elements(height: int, width: int, vae_scale_factor: int, latent_channels: int) -> int:
    """Count the numbers in the latent of an image; packing it into patches does not change them."""
    return (height // vae_scale_factor) * (width // vae_scale_factor) * latent_channels


def rollout_buffer_bytes(
    num_images: int,
    num_trained_steps: int,
    latent_elements: int,
    num_prompts: int,
    prompt_elements: int,
    latents_per_step: int = 2,
) -> int:
    """Count what one process keeps of a round, in float32: latents of each trained step, and prompt embeddings."""
    latents = latents_per_step * num_images * num_trained_steps * latent_elements
    return _FLOAT32 * (latents + num_prompts * prompt_elements)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device of one process, without activations and the models of rewards."""

    transformer: int  # frozen weights and buffers
    trained: int  # with the float32 masters of DeepSpeed
    gradients: int
    optimizer: int  # AdamW's two averages
    ema: int
    buffer: int  # what is kept of a round
    text_encoders: int
    vae: int
    gathered: int = 0  # weights that ZeRO-3 gathers for the rollout
    reference: int = 0  # copy of the transformer, where all weights are trained with a KL penalty
    autocast: int = 0  # half-precision copies of float32 weights during a forward

    @property
    def _always(self) -> int:
        return self.transformer + self.reference + self.trained + self.optimizer + self.ema + self.buffer

    @property
    def training(self) -> int:
        """Return the bytes while the loss is computed."""
        return self._always + self.gradients + self.autocast

    @property
    def encoding(self) -> int:
        """Return the bytes while prompts are encoded, also those of an evaluation between two rounds."""
        return self._always + self.text_encoders

    @property
    def generation(self) -> int:
        """Return the bytes while images are generated, without gradients."""
        return self._always + self.gathered + self.autocast + self.vae

    @property
    def peak(self) -> int:
        """Return the largest of the three."""
        return max(self.training, self.encoding, self.generation)


def estimate_memory(
    transformer_bytes: int,
    num_trainable: int,
    text_encoders_bytes: int,
    vae_bytes: int,
    buffer_bytes: int,
    num_processes: int = 1,
    zero_stage: int | None = None,
    trained_element_size: int = _FLOAT32,
    gathers_for_rollout: bool = True,
    has_ema: bool = False,
    reference_bytes: int = 0,
    autocasts_weights: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of one process on its device; without a `zero_stage` there is no DeepSpeed."""
    # Without DeepSpeed, each process has all weights. DeepSpeed keeps float32 masters of the trained weights; ZeRO divides
    # the optimizer's states and masters from stage 1, gradients from stage 2, weights from stage 3.
    stage = zero_stage or 0
    by_stage = [num_processes if stage >= divided_from else 1 for divided_from in (1, 2, 3)]
    optimizer_divisor, gradient_divisor, weight_divisor = by_stage
    masters = _FLOAT32 * num_trainable if zero_stage is not None else 0
    trained_bytes = trained_element_size * num_trainable
    is_gathered = weight_divisor > 1 and gathers_for_rollout
    return MemoryEstimate(
        transformer=transformer_bytes // weight_divisor,
        trained=trained_bytes // weight_divisor + masters // optimizer_divisor,
        gradients=_FLOAT32 * num_trainable // gradient_divisor,
        optimizer=2 * _FLOAT32 * num_trainable // optimizer_divisor,
        ema=_FLOAT32 * num_trainable // weight_divisor if has_ema else 0,
        buffer=buffer_bytes,
        text_encoders=text_encoders_bytes,
        vae=vae_bytes,
        gathered=transformer_bytes + trained_bytes if is_gathered else 0,
        reference=reference_bytes // weight_divisor,
        autocast=_HALF * num_trainable if autocasts_weights else 0,
    )
