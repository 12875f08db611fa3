# SPDX-License-Identifier: Apache-2.0
"""What a model family provides. `flux.py` beside this file is an example of a whole page."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from PIL import Image


class Family(ABC):
    """
    The few things that differ between flow-matching pipelines.

    The pipeline itself runs unmodified; a page says how to call it, what its guidance makes of the transformer's
    outputs, how it prepares source images, and which layers are trained by default. A wrong rule cannot pass: at every
    rollout what [`combine`] gives is compared with what the scheduler really received.
    """

    lora_target_modules: list[str]
    """Names of the layers that get an adapter when `LoraConfig.target_modules` is left out."""

    text_encoders: tuple[str, ...]
    """Names of the pipeline's components that only [`encode_prompt`] needs. They leave the accelerator after it."""

    max_calls: int = 1
    """Calls of the transformer in a step: 2 where true guidance makes one for each prediction."""

    max_images: int = 0
    """Source images of one prompt that the pipeline takes; 0 draws from text alone."""

    needs_images: bool = False
    """Whether the pipeline cannot draw from text alone."""

    prompt_sees_images: bool = False
    """Whether the text encoder sees the source images: then a prompt is encoded anew for each of them."""

    has_fixed_length: bool = True
    """Whether all prompts are encoded to the same length. Only then can a micro-batch hold images of several prompts."""

    max_batch_size: int | None = None
    """Images that the pipeline can draw in one call; `None` for any number."""

    advice: str = "Correct the family's page."
    """What to do when the scheduler received something else than [`combine`] gives."""

    # ---- Prompts ----

    @abstractmethod
    def encode_prompt(
        self, pipeline, prompt: str, device: torch.device, images: list[Image.Image] = (), scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """
        Encodes one prompt, by the pipeline's own method.

        Args:
            pipeline ([`~diffusers.DiffusionPipeline`]):
                Pipeline with its text encoders on `device`.
            prompt (`str`):
                Prompt, or negative prompt: what is encoded for it is passed with `negative_` before the names.
            device (`torch.device`):
                Where the text encoders are.
            images (`list[PIL.Image.Image]`, *optional*):
                Source images as the user gave them, for text encoders that see them.
            scale (`float`, *optional*, defaults to `1.0`):
                Factor per side from the size at which the pipeline reads source images, as in [`prepare_image`].

        Returns:
            `dict[str, torch.Tensor]`: arguments of the pipeline's call that stand for the prompt, batch dimension 1.
        """

    def is_truncated(self, pipeline, prompt: str) -> bool:
        """Whether the pipeline cuts the prompt without saying so. A warning that it logs itself is counted anyway."""
        return False

    def resolve_negative_prompt(self, pipeline, guidance_scale: float, negative_prompt: str | None) -> str | None:
        """
        The negative prompt that true guidance is computed with. As it stands here: of a model whose guidance is
        distilled into it, which has none.

        Args:
            pipeline ([`~diffusers.DiffusionPipeline`]):
                Pipeline.
            guidance_scale (`float`):
                Guidance scale.
            negative_prompt (`str`, *optional*):
                Negative prompt of the settings.

        Returns:
            `str` or `None`: `None` where a step is one conditional prediction.

        Raises:
            ValueError: the pipeline would ignore one of the two, silently or with a line in the log.
        """
        name = type(pipeline).__name__
        if negative_prompt is not None:
            raise ValueError(
                f"`negative_prompt` is {negative_prompt!r}, but the guidance of {name} is distilled into the model and "
                "has no negative prompt: it would be ignored. Leave it out."
            )
        if guidance_scale > 1 and not pipeline.transformer.config.get("guidance_embeds", True):
            raise ValueError(
                f"`guidance_scale` is {guidance_scale}, but the transformer of this {name} takes none "
                "(`guidance_embeds=False`): it would be ignored. Set `guidance_scale=1.0`."
            )
        return None

    # ---- What is trained ----

    def unused_layers(self, transformer: torch.nn.Module) -> list[str]:
        """
        Linear layers that no prediction depends on, such as those of a text stream behind the last attention.

        They get no adapter, whatever `LoraConfig.target_modules` says: it would have no gradient, and DDP waits for one.

        Args:
            transformer (`nn.Module`):
                Transformer of the pipeline, without an adapter.

        Returns:
            `list[str]`: whole names, as in `transformer.named_modules()`.
        """
        return []

    # ---- Sizes and calls ----

    @abstractmethod
    def size_multiple(self, pipeline) -> int:
        """Heights and widths, in pixels, must be multiples of this; else the pipeline would resize silently."""

    @abstractmethod
    def call_arguments(self, height: int, width: int, guidance_scale: float, images: list[Image.Image]) -> dict:
        """
        Arguments of the pipeline's call beside the prompt, the number of steps and the generators.

        Args:
            height (`int`), width (`int`):
                Size in pixels.
            guidance_scale (`float`):
                Guidance scale.
            images (`list[PIL.Image.Image]`):
                Source images from [`prepare_image`], the same for all images of the batch.

        Returns:
            `dict`.
        """

    def batch_arguments(self, arguments: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Encoded prompts of a batch, batch dimension B, in the form that the pipeline's call takes them."""
        return arguments

    # ---- Source images ----

    def edited_size(self, pipeline, sizes: list[tuple[int, int]], area: int) -> tuple[int, int]:
        """
        Size of an edited image whose row names none: the aspect ratio of its first source.

        Args:
            pipeline ([`~diffusers.DiffusionPipeline`]):
                Pipeline.
            sizes (`list[tuple[int, int]]`):
                Width and height of each source image.
            area (`int`):
                Pixels that the edited image has, about.

        Returns:
            `tuple[int, int]`: height and width in pixels.
        """
        ratio, step = sizes[0][0] / sizes[0][1], self.size_multiple(pipeline)
        return (
            max(1, round((area / ratio) ** 0.5 / step)) * step,
            max(1, round((area * ratio) ** 0.5 / step)) * step,
        )

    def check_image_size(self, width: int, height: int) -> None:  # noqa: B027  (most pipelines take any)
        """
        Refuses source images that the pipeline would refuse, before anything is encoded.

        Args:
            width (`int`), height (`int`):
                Size of a source image in pixels.

        Raises:
            ValueError: with what the pipeline takes.
        """

    def prepare_image(self, pipeline, image: Image.Image, scale: float) -> Image.Image:
        """
        Resizes a source image to the size at which the pipeline gives it to its VAE, times a factor.

        Args:
            pipeline ([`~diffusers.DiffusionPipeline`]):
                Pipeline.
            image (`PIL.Image.Image`):
                Source image, RGB.
            scale (`float`):
                Factor per side: 1 is the pipeline's own size, to the pixel.

        Returns:
            `PIL.Image.Image`: passed to the pipeline, it is not resized again.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no source images.")

    def image_pixels(self, pipeline, image: Image.Image) -> torch.Tensor:
        """What the pipeline gives to its VAE for an image from [`prepare_image`]: `(1, 3, ...)`, in [-1, 1]."""
        return pipeline.image_processor.preprocess(image, image.height, image.width)  # (1, 3, H, W)

    def drawing(self, pipeline, images: list[Image.Image]) -> AbstractContextManager:
        """
        Entered around a call of the pipeline, for the rare one whose size of source images is no argument.

        Args:
            pipeline ([`~diffusers.DiffusionPipeline`]):
                Pipeline.
            images (`list[PIL.Image.Image]`):
                Source images from [`prepare_image`].
        """
        return nullcontext()

    # ---- Guidance ----

    def combine(
        self, outputs: list[Any], guidance_scale: float, sample: torch.Tensor, detach_unconditional: bool = False
    ) -> torch.Tensor:
        """
        What the scheduler gets from the transformer's outputs of one step.

        Args:
            outputs (`list`):
                Output of each call of the step, in order.
            guidance_scale (`float`):
                Guidance scale.
            sample (`torch.Tensor` of shape `(B, ...)`):
                Sample that the scheduler steps from, for its shape.
            detach_unconditional (`bool`, *optional*, defaults to `False`):
                Whether no gradient flows through the unconditional prediction.

        Returns:
            `torch.Tensor` of the shape of `sample`: velocity.

        Raises:
            ValueError: the number of calls is not one that the page knows.
        """
        if not 1 <= len(outputs) <= self.max_calls:
            raise ValueError(
                f"The pipeline called its transformer {len(outputs)} times in one step, where {type(self).__name__} "
                f"knows {'one' if self.max_calls == 1 else 'one or two'}. Another kind of guidance is not part of this "
                "family's page."
            )
        conditional, unconditional = self.branches(outputs, sample)
        if unconditional is None:
            return conditional
        return self.guide(
            conditional, unconditional.detach() if detach_unconditional else unconditional, guidance_scale
        )

    def branches(self, outputs: list[Any], sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        The conditional and, with true guidance, the unconditional prediction.

        As it stands here: a call for each, over a sequence of tokens that begins with the sample's; those of source
        images come after.

        Args:
            outputs (`list`), sample (`torch.Tensor`):
                As in [`combine`].

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`.
        """
        tokens = sample.shape[1]
        predictions = [output if output.shape[1] == tokens else output[:, :tokens] for output in outputs]
        return predictions[0], predictions[1] if len(predictions) > 1 else None  # (B, tokens, channels)

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, guidance_scale: float) -> torch.Tensor:
        """
        True classifier-free guidance of two predictions, with the operations of the pipeline in their order.

        Args:
            conditional (`torch.Tensor`), unconditional (`torch.Tensor`):
                Predictions.
            guidance_scale (`float`):
                Guidance scale.

        Returns:
            `torch.Tensor`.
        """
        return unconditional + guidance_scale * (conditional - unconditional)

    # ---- Other times ----

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


def packed_call_at(call: dict[str, Any], sample: torch.Tensor, sigma: torch.Tensor) -> dict[str, Any]:
    """
    [`Family.call_at`] of transformers that take a sequence of tokens, the sample's and then those of source images, and
    times from 0 to 1.

    Args:
        call (`dict`), sample (`torch.Tensor` of shape `(B, tokens, channels)`), sigma (`torch.Tensor` of shape `(B,)`):
            As there.

    Returns:
        `dict`.
    """
    # The scheduler multiplies times by 1000 and the pipeline divides by it, which rounds: so does this
    timestep = (sigma * 1000).to(call["timestep"].dtype) / 1000  # (B,)
    hidden_states = call["hidden_states"]
    tokens = torch.cat([sample.to(hidden_states.dtype), hidden_states[:, sample.shape[1] :]], dim=1)
    return {**call, "hidden_states": tokens, "timestep": timestep}


def true_guidance_prompt(
    pipeline, guidance_scale: float, negative_prompt: str | None, default: str | None, off_at: float = 1.0
) -> str | None:
    """
    The negative prompt of a pipeline with true classifier-free guidance: [`Family.resolve_negative_prompt`] of its page.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]), guidance_scale (`float`), negative_prompt (`str`, *optional*):
            As there.
        default (`str`, *optional*):
            Negative prompt that the pipeline takes itself when none is given. `None` where it then leaves guidance out.
        off_at (`float`, *optional*, defaults to `1.0`):
            Guidance scale up to which the pipeline makes no unconditional prediction.

    Returns:
        `str` or `None`: `None` where guidance is off.

    Raises:
        ValueError: a negative prompt that would be ignored, or guidance that would be for want of one.
    """
    name = type(pipeline).__name__
    if guidance_scale <= off_at:
        if negative_prompt is not None:
            raise ValueError(
                f"`negative_prompt` is {negative_prompt!r}, but {name} has no guidance at `guidance_scale` = "
                f"{guidance_scale}: it would be ignored. Leave it out, or set `guidance_scale` above {off_at:g}."
            )
        return None
    if negative_prompt is None and default is None:
        raise ValueError(
            f"`guidance_scale` is {guidance_scale}, but {name} leaves guidance out without a negative prompt, and only "
            'says so in the log. Set `negative_prompt=" "` (an empty one, as in the model\'s own examples), or '
            f"`guidance_scale={off_at:g}` to train without guidance."
        )
    return negative_prompt if negative_prompt is not None else default
