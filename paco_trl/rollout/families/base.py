# SPDX-License-Identifier: Apache-2.0
"""What a model family provides. `flux.py` in this directory is a complete example."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from PIL import Image


# Attention projections of transformers with a stream for the image and one for the text
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
DUAL_STREAM_ATTENTION = [f"attn.{name}" for name in ATTENTION]


def feed_forward(*names: str) -> list[str]:
    """Return the linear layers of feed-forward modules."""
    return [f"{name}.{layer}" for name in names for layer in ("net.0.proj", "net.2")]


class Family(ABC):
    """
    The few things that differ between flow-matching pipelines.

    The pipeline itself runs unmodified. A family class says how to call it, how its guidance combines the outputs of
    the transformer, how it prepares source images, and which layers are trained by default. A wrong rule cannot pass:
    every rollout compares the result of [`combine`] with what the scheduler received.
    """

    lora_target_modules: list[str]
    """Names of the layers that get an adapter when `LoraConfig.target_modules` is left out."""

    text_encoders: tuple[str, ...]
    """Names of the pipeline's components that only [`encode_prompt`] uses. They leave the accelerator after it."""

    max_calls: int = 1
    """Calls of the transformer in a step: 2 where true CFG makes one for each prediction."""

    max_source_images: int = 0
    """Maximum number of source images of a prompt; 0 for text-to-image pipelines."""

    requires_source_image: bool = False
    """Whether the pipeline requires a source image."""

    batches_sources: bool = False
    """Whether the images of a batch may have different source images."""

    prompt_sees_images: bool = False
    """Whether the text encoder sees the source images. A prompt is then encoded once with each of them."""

    has_fixed_prompt_length: bool = True
    """Whether all prompts are encoded to the same length. Only then can a micro-batch have several prompts."""

    max_batch_size: int | None = None
    """Maximum number of images in one call of the pipeline; `None` for any number."""

    max_stable_epsilon: float | None = None
    """Clip range above which training was seen to collapse, or `None`. `paco-trl doctor` warns of larger ones."""

    unbatched_arguments: tuple[str, ...] = ()
    """Arguments of the transformer without a batch dimension, such as position ids that all images share."""

    training_defaults: ClassVar[dict[str, Any]] = {}
    """Defaults of `paco-trl grpo` and `nft` for models of this family that differ from the config's defaults."""

    advice: str = "Correct the family class."
    """What to do when the scheduler received something else than the result of [`combine`]."""

    # ---- Prompts ----

    @abstractmethod
    def encode_prompt(
        self, pipeline, prompt: str, device: torch.device, images: Sequence[Image.Image] = (), scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """
        Encode one prompt with the pipeline's own method. It must not need other components than `text_encoders`.

        Negative prompts are encoded by the same method and passed to the pipeline with `negative_` before the names.
        `images` are the source images as the user gave them, for text encoders that see them, `scale` is the scale for
        [`prepare_image`], and `device` is the device of the text encoders.

        Returns:
            `dict[str, torch.Tensor]`: arguments of the pipeline's call that carry the prompt, batch dimension 1.
        """

    def max_sequence_length(self, pipeline) -> int | None:
        """Return the length of encoded prompts, if it can differ from the default of the pipeline's call."""
        return None

    def is_truncated(self, pipeline, prompt: str) -> bool:
        """Return whether the pipeline does not read the prompt to its end."""
        return False

    def resolve_negative_prompt(self, pipeline, guidance_scale: float, negative_prompt: str | None) -> str | None:
        """
        Return the negative prompt for true CFG, or `None` if a step is one conditional prediction.

        The default implementation is for a model with distilled guidance: it has no negative prompt. A setting that
        the pipeline would ignore raises a `ValueError`.
        """
        name = type(pipeline).__name__
        if negative_prompt is not None:
            raise ValueError(
                f"`negative_prompt` is {negative_prompt!r}, but the guidance of {name} is distilled into the model: "
                "it would be ignored. Leave it out."
            )
        if guidance_scale > 1 and not pipeline.transformer.config.get("guidance_embeds", True):
            raise ValueError(
                f"`guidance_scale` is {guidance_scale}, but the transformer of this {name} takes none: it would be "
                "ignored. Set 1.0."
            )
        return None

    # ---- What is trained ----

    def unused_layers(self, transformer: torch.nn.Module) -> list[str]:
        """
        Return full names of linear layers that no prediction depends on, such as text layers of the last block.

        They get no adapter, whatever `LoraConfig.target_modules` says: it would have no gradient, and DDP would wait
        for one.
        """
        return []

    # ---- Sizes and calls ----

    def size_multiple(self, pipeline) -> int:
        """Return the number of pixels that must divide height and width; else the pipeline resizes silently."""
        return pipeline.vae_scale_factor * 2  # latents are packed in 2 x 2 patches

    def call_arguments(self, height: int, width: int, guidance_scale: float, images: list[Image.Image]) -> dict:
        """
        Return arguments of the pipeline's call, except the prompt, the number of steps and the generators.

        `images` are source images from [`prepare_image`], the same for all images of the batch.
        """
        return {"height": height, "width": width, "guidance_scale": guidance_scale}

    def batch_arguments(self, arguments: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the encoded prompts of a batch, batch dimension B, in the form that the pipeline's call takes."""
        return arguments

    # ---- Source images ----

    def edited_size(self, pipeline, sizes: list[tuple[int, int]], area: int) -> tuple[int, int]:
        """
        Return height and width of an edited image if its row has no size. It has the aspect ratio of its first source.

        `sizes` are width and height of each source image, `area` the approximate number of pixels of the edited image.
        """
        ratio = sizes[0][0] / sizes[0][1]
        step = self.size_multiple(pipeline)
        height = (area / ratio) ** 0.5
        width = (area * ratio) ** 0.5
        return max(1, round(height / step)) * step, max(1, round(width / step)) * step

    def check_image_size(self, height: int, width: int) -> None:  # noqa: B027  (most pipelines take any)
        """Raise a `ValueError` for a source image that the pipeline would refuse, before anything is encoded."""

    def prepare_image(self, pipeline, image: Image.Image, scale: float) -> Image.Image:
        """
        Resize a source image as the pipeline does for its VAE, times `scale` per side: 1 is exactly the pipeline's
        size.

        The pipeline must not resize the result again.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no source images.")

    def prepare_panel(self, pipeline, image: Image.Image) -> Image.Image:
        """Return a generated image as the source of others: as [`prepare_image`] does, at its own size if possible."""
        return self.prepare_image(pipeline, image, 1.0)

    def image_pixels(self, pipeline, image: Image.Image) -> torch.Tensor:
        """Return the VAE's input for an image from [`prepare_image`]: `(1, 3, ...)`, in [-1, 1]."""
        return pipeline.image_processor.preprocess(image, image.height, image.width)  # (1, 3, H, W)

    def generation_context(self, pipeline, images: list[Image.Image]) -> AbstractContextManager:
        """Return a context for the pipeline's call, for pipelines that take no size of source images."""
        return nullcontext()

    # ---- Guidance ----

    def combine(
        self, outputs: list[Any], guidance_scale: float, sample: torch.Tensor, detach_unconditional: bool = False
    ) -> torch.Tensor:
        """
        Compute what the scheduler receives, in the shape of `sample`, from the transformer's outputs of one step.

        With `detach_unconditional` no gradient flows through the unconditional prediction.

        Raises:
            ValueError: the family class does not know this number of calls.
        """
        if not 1 <= len(outputs) <= self.max_calls:
            raise ValueError(
                f"The pipeline called its transformer {len(outputs)} times in a step, but {type(self).__name__} knows "
                f"{self.max_calls} (`max_calls`)."
            )
        conditional, unconditional = self.branches(outputs, sample)
        if unconditional is None:
            return conditional
        unconditional = unconditional.detach() if detach_unconditional else unconditional
        return self.guide(conditional, unconditional, guidance_scale)

    def branches(self, outputs: list[Any], sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Return the conditional and, with true CFG, the unconditional prediction of a step.

        The default takes one call for each, over a sequence of the sample's tokens, followed by source images' tokens.
        """
        tokens = sample.shape[1]
        predictions = [output if output.shape[1] == tokens else output[:, :tokens] for output in outputs]
        return predictions[0], predictions[1] if len(predictions) > 1 else None  # (B, tokens, channels)

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, guidance_scale: float) -> torch.Tensor:
        """Apply true classifier-free guidance, with the pipeline's operations in the pipeline's order."""
        return unconditional + guidance_scale * (conditional - unconditional)

    # ---- Other times ----

    def call_at(self, call: dict[str, Any], sample: torch.Tensor, sigma: torch.Tensor) -> dict[str, Any]:
        """
        Return a recorded call, unchanged itself, for another sample `(B, ...)` and time of each image, float32 `(B,)`.

        Only [`PaCoNFTTrainer`] needs it. For the recorded sample and time it must return the recorded call
        bit-exactly. Every rollout checks this.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `call_at`, which PaCoNFTTrainer requires. Add it.")


def packed_call_at(call: dict[str, Any], sample: torch.Tensor, sigma: torch.Tensor) -> dict[str, Any]:
    """Apply [`Family.call_at`] for a sequence of the sample's and the source images' tokens, and times from 0 to 1."""
    # The scheduler multiplies times by 1000, and the pipeline divides by it. Do the same, because it rounds.
    timestep = (sigma * 1000).to(call["timestep"].dtype) / 1000  # (B,)
    hidden_states = call["hidden_states"]
    tokens = sample.to(hidden_states.dtype)
    sources = hidden_states[:, sample.shape[1] :]
    if sources.shape[1] > 0:
        tokens = torch.cat([tokens, sources], dim=1)
    return {**call, "hidden_states": tokens, "timestep": timestep}


def true_guidance_prompt(
    pipeline, guidance_scale: float, negative_prompt: str | None, default: str | None, off_at: float = 1.0
) -> str | None:
    """Return the negative prompt, by default the pipeline's `default`; guidance is on above the scale `off_at`."""
    name = type(pipeline).__name__
    if guidance_scale <= off_at:
        if negative_prompt is not None:
            raise ValueError(
                f"`negative_prompt` is {negative_prompt!r}, but {name} has no guidance at `guidance_scale` = "
                f"{guidance_scale}: it would be ignored. Leave it out, or raise the scale."
            )
        return None
    if negative_prompt is None and default is None:
        raise ValueError(
            f"`guidance_scale` is {guidance_scale}: {name} has none without a negative prompt. "
            f'Set `negative_prompt=" "` (as in the model\'s own examples), or `guidance_scale={off_at:g}`.'
        )
    return negative_prompt if negative_prompt is not None else default


def count_chat_tokens(tokenizer, prompt: str, enable_thinking: bool) -> int:
    """Count the tokens of a prompt in the chat template of a Qwen3."""
    options = {"add_generation_prompt": True, "enable_thinking": enable_thinking, "return_dict": True}
    return len(tokenizer.apply_chat_template([{"role": "user", "content": prompt}], **options)["input_ids"])


@contextmanager
def encoding_by(pipeline, encode: Callable) -> Iterator[None]:
    """Replace the pipeline's `encode_prompt` within the context."""
    pipeline.encode_prompt = encode
    try:
        yield
    finally:
        del pipeline.encode_prompt
