# SPDX-License-Identifier: Apache-2.0
"""Memory that a training process needs on its device, by arithmetic: nothing is allocated to find out."""

from dataclasses import dataclass

from torch import nn


_FLOAT32, _HALF = 4, 2


def weights_bytes(module: nn.Module, trainable: bool | None = None) -> int:
    """
    Bytes of a module's weights and buffers; modules on the meta device count as if they were real.

    Args:
        module (`nn.Module`):
            Module.
        trainable (`bool`, *optional*):
            If `True`, only the parameters that are trained; if `False`, all but those.

    Returns:
        `int`.
    """
    parameters = [p for p in module.parameters() if trainable is None or p.requires_grad is trainable]
    buffers = [] if trainable else list(module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *buffers))


def latent_elements(height: int, width: int, vae_scale_factor: int, latent_channels: int) -> int:
    """
    Numbers in the latent of an image; packing it into patches does not change them.

    Args:
        height (`int`), width (`int`):
            Size of the image in pixels.
        vae_scale_factor (`int`):
            Pixels to a latent position, on each side.
        latent_channels (`int`):
            Channels of the VAE's latent.

    Returns:
        `int`.
    """
    return (height // vae_scale_factor) * (width // vae_scale_factor) * latent_channels


def rollout_buffer_bytes(
    num_images: int,
    num_trained_steps: int,
    latent_elements: int,
    num_prompts: int,
    prompt_elements: int,
    latents_per_step: int = 2,
) -> int:
    """
    What one process keeps of a round for its training steps, in float32.

    For each image and trained step the latents before and after it, and the embeddings of each prompt once.

    Args:
        num_images (`int`):
            Images that the process draws in a round.
        num_trained_steps (`int`):
            Trained denoising steps of an image.
        latent_elements (`int`):
            Numbers in a latent.
        num_prompts (`int`):
            Embeddings that are kept: one for each prompt, or for each image if micro-batches cross prompts.
        prompt_elements (`int`):
            Numbers in the embeddings of a prompt.
        latents_per_step (`int`, *optional*, defaults to `2`):
            Latents that are kept of a step: before and after it, and for some losses the mean.

    Returns:
        `int`.
    """
    latents = latents_per_step * num_images * num_trained_steps * latent_elements
    return _FLOAT32 * (latents + num_prompts * prompt_elements)


@dataclass(frozen=True)
class MemoryEstimate:
    """
    Bytes on the device of one process. Activations are not in it, nor are the models of rewards.

    Attributes:
        transformer (`int`):
            Frozen weights of the transformer, and its buffers.
        trained (`int`):
            Weights that are trained, those of the adapter or all, with float32 masters where DeepSpeed keeps them.
        gradients (`int`):
            Their gradients, float32.
        optimizer (`int`):
            AdamW's two averages, float32.
        ema (`int`):
            Moving average of what is trained, float32.
        buffer (`int`):
            What is kept of a round.
        text_encoders (`int`):
            There while prompts are encoded only.
        vae (`int`):
            There while images are drawn only.
        gathered (`int`):
            Weights that ZeRO-3 gathers for the time in which images are drawn.
        reference (`int`):
            Copy of the transformer that the KL divergence is measured from, where all weights are trained.
        autocast (`int`):
            Copies of float32 weights in half precision, which autocast keeps during a forward.
    """

    transformer: int
    trained: int
    gradients: int
    optimizer: int
    ema: int
    buffer: int
    text_encoders: int
    vae: int
    gathered: int = 0
    reference: int = 0
    autocast: int = 0

    @property
    def _always(self) -> int:
        return self.transformer + self.reference + self.trained + self.optimizer + self.ema + self.buffer

    @property
    def training(self) -> int:
        """While the loss is computed."""
        return self._always + self.gradients + self.autocast

    @property
    def encoding(self) -> int:
        """While prompts are encoded, those of an evaluation between two rounds included."""
        return self._always + self.text_encoders

    @property
    def drawing(self) -> int:
        """While images are drawn, when gradients have been dropped."""
        return self._always + self.gathered + self.autocast + self.vae

    @property
    def peak(self) -> int:
        """The largest of the three."""
        return max(self.training, self.encoding, self.drawing)


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
    """
    Memory of one process on its device.

    Without DeepSpeed, and with DDP, each process has all of the weights. DeepSpeed keeps float32 masters beside the
    trained weights; ZeRO divides the optimizer's states (and masters) from stage 1, gradients from stage 2, weights
    from stage 3.

    Args:
        transformer_bytes (`int`):
            Frozen weights of the transformer, and its buffers.
        num_trainable (`int`):
            Trained numbers: those of the adapter, or of the whole transformer.
        text_encoders_bytes (`int`), vae_bytes (`int`):
            Weights of the other components.
        buffer_bytes (`int`):
            From [`rollout_buffer_bytes`].
        num_processes (`int`, *optional*, defaults to `1`):
            Processes of the run.
        zero_stage (`int`, *optional*):
            Stage of DeepSpeed ZeRO. If `None`, there is no DeepSpeed.
        trained_element_size (`int`, *optional*, defaults to `4`):
            Bytes of one weight that is trained.
        gathers_for_rollout (`bool`, *optional*, defaults to `True`):
            Whether ZeRO-3 gathers the weights for the rollout (`ds3_gather_for_generation`).
        has_ema (`bool`, *optional*, defaults to `False`):
            Whether a moving average of what is trained is kept on the device.
        reference_bytes (`int`, *optional*, defaults to `0`):
            Weights of the reference model; 0 if there is none, or it is the model without its adapter.
        autocasts_weights (`bool`, *optional*, defaults to `False`):
            Whether autocast makes half-precision copies of the trained weights. An adapter's are too small to count.

    Returns:
        [`MemoryEstimate`].
    """
    stage = zero_stage or 0
    by_stage = [num_processes if stage >= divided_from else 1 for divided_from in (1, 2, 3)]
    optimizer_share, gradient_share, weight_share = by_stage
    masters = _FLOAT32 * num_trainable if zero_stage is not None else 0
    trained_bytes = trained_element_size * num_trainable
    is_gathered = weight_share > 1 and gathers_for_rollout
    return MemoryEstimate(
        transformer=transformer_bytes // weight_share,
        trained=trained_bytes // weight_share + masters // optimizer_share,
        gradients=_FLOAT32 * num_trainable // gradient_share,
        optimizer=2 * _FLOAT32 * num_trainable // optimizer_share,
        ema=_FLOAT32 * num_trainable // weight_share if has_ema else 0,
        buffer=buffer_bytes,
        text_encoders=text_encoders_bytes,
        vae=vae_bytes,
        gathered=transformer_bytes + trained_bytes if is_gathered else 0,
        reference=reference_bytes // weight_share,
        autocast=_HALF * num_trainable if autocasts_weights else 0,
    )
