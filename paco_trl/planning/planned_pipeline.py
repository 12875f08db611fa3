# SPDX-License-Identifier: Apache-2.0
"""A pipeline without data: the bytes of its weights, and the peaks of its forward and backward passes."""

import copy
import functools
import inspect
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import LoraConfig
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from ..rollout import EncodedImage, RecordingPipeline, cast_floating_inputs, get_family
from ..rollout.families.unlisted import TransformerReachedError
from ..rollout.kernels import keep_dtype_of_norms
from ..rollout.loading import load_without_weights
from ..rollout.policy_building import prepare_transformer
from ..rollout.prompt_rows import ResolvedRows
from ..trainer.paco_grpo_config import PaCoGRPOConfig
from ..utils.model_files import hub_arguments
from ..utils.pipelines import truncations_counted
from .peaks import (
    PlanMode,
    cached_method,
    dequantize_in_forward,
    fake_weights,
    measure_peak,
    skip_equal_blocks,
    training_precision,
)


def stub_text_encoder(encoder: Any) -> None:
    """Let a text encoder return zeros in the shapes of its real outputs."""

    def forward(input_ids: torch.Tensor, *args, **kwargs) -> Any:
        config = encoder.config.get_text_config()
        states = torch.zeros(*input_ids.shape, config.hidden_size, dtype=encoder.dtype)  # (B, L, D)
        outputs = {"last_hidden_state": states, "hidden_states": (states,) * (config.num_hidden_layers + 1)}
        if hasattr(encoder, "text_projection"):
            return CLIPTextModelOutput(text_embeds=states.new_zeros(len(states), config.projection_dim), **outputs)
        return BaseModelOutputWithPooling(pooler_output=states[:, 0], **outputs)

    encoder.forward = forward


@dataclass(frozen=True)
class PlannedImage:
    """The image of a dataset that takes the most memory; its source images are scaled by `scale`."""

    rows: ResolvedRows
    row_index: int
    prompt: str
    size: tuple[int, int]
    scale: float

    @classmethod
    def largest(cls, rows: ResolvedRows, sizes: list[tuple[int, int]], scale: float) -> "PlannedImage":
        """Find the row with the largest size and the longest prompt."""
        row_index, prompt = max(
            rows.image_prompts, key=lambda prompt: (math.prod(sizes[prompt.row_index]), len(prompt.prompt))
        )
        return cls(rows, row_index, prompt, sizes[row_index], scale)

    @property
    def negative_prompt(self) -> str | None:
        return self.rows.negative_prompts[self.row_index]


class PlannedPipeline:
    """
    A pipeline with an adapter, and the peaks of its forward and backward passes on tensors without data.

    Prompts go through the real tokenizers and through text encoders that return zeros, and the pipeline itself computes
    the transformer's arguments.
    """

    def __init__(self, model: str, args: PaCoGRPOConfig, peft_config: LoraConfig | None):
        self.args = args
        self.mode = PlanMode()
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        is_deepspeed = args.deepspeed_plugin is not None
        self.training_precision = functools.partial(training_precision, dtype, not is_deepspeed)
        dtypes = {"default": dtype} | ({"transformer": torch.float32} if not (peft_config or is_deepspeed) else {})
        self.pipeline = pipeline = load_without_weights(model, dtypes, **hub_arguments(args.model_init_kwargs or {}))
        self.family = get_family(pipeline)
        self.transformer = transformer = pipeline.transformer
        self.signature = inspect.signature(transformer.forward)
        with init_empty_weights():
            keep_dtype_of_norms(transformer)
            self.model = prepare_transformer(pipeline, self.family, peft_config, not is_deepspeed)
        self.vae = copy.deepcopy(pipeline.vae)  # without the policy's check of pixel values
        for component in (self.model, self.vae, *pipeline.components.values()):
            if isinstance(component, nn.Module):
                with skip_equal_blocks(component):  # skipped blocks are counted, but not called
                    fake_weights(component, self.mode)
        self.recording_pipeline = RecordingPipeline(pipeline, self.family, self.model.train(), self.signature)
        if is_deepspeed:
            cast_floating_inputs(self.model, dtype)
        encoders = (pipeline.components[name] for name in self.family.text_encoders)
        self.text_encoders = [encoder for encoder in encoders if encoder is not None]
        for encoder in self.text_encoders:
            stub_text_encoder(encoder)

        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.num_trained = sum(weight.numel() for weight in trained)
        self.element_size = trained[0].element_size()

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained weights."""
        return self.element_size * self.num_trained

    def latent_size(self, image: PlannedImage) -> tuple[int, int, int]:
        """Return channels, height and width of an image's latents."""
        channels = self.vae.config.get("latent_channels") or self.vae.config.z_dim
        height, width = (side // self.pipeline.vae_scale_factor for side in image.size)
        return channels, height, width

    @cached_method
    def embeddings(self, image: PlannedImage) -> dict[str, torch.Tensor]:
        """Encode the prompt and the negative prompt, as zeros in the real shapes with batch dimension 1."""
        images = image.rows.images(image.row_index) if self.family.prompt_sees_images else []
        encoding_arguments = (torch.device("cpu"), images, image.scale)
        with truncations_counted(self.pipeline):  # tokenizers warn of each long text
            embeddings = dict(self.family.encode_prompt(self.pipeline, image.prompt, *encoding_arguments))
            if image.negative_prompt is not None:
                negative = self.family.encode_prompt(self.pipeline, image.negative_prompt, *encoding_arguments)
                embeddings |= {f"negative_{name}": tensor for name, tensor in negative.items()}
        return embeddings

    def panel(self, image: PlannedImage) -> Image.Image:
        """Return an image of a set's size, as the pipeline takes its first panel."""
        return self.family.prepare_panel(self.pipeline, Image.new("RGB", image.size[::-1]))

    def encode_image(self, image: Image.Image) -> torch.Tensor:
        """Encode a prepared source image, never in tiles."""
        pixels = self.family.image_pixels(self.pipeline, image).to(self.vae.dtype)
        self.vae.disable_tiling()
        with self.mode:
            return self.vae.encode(self.mode.from_tensor(pixels)).latent_dist.mode()

    @cached_method
    def transformer_calls(self, batch_size: int, image: PlannedImage) -> list[dict]:
        """Record the arguments of the transformer's calls in a step, without their data."""
        calls: list[dict] = []
        num_calls = self.family.max_calls if image.negative_prompt is not None else 1

        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            calls.append(dict(self.signature.bind(*args, **kwargs).arguments))
            if len(calls) == num_calls:
                raise TransformerReachedError

        sources = [
            self.family.prepare_image(self.pipeline, source, image.scale)
            for source in image.rows.images(image.row_index)
        ]
        if image.rows.is_anchored:
            sources.append(self.panel(image))
        encoded = [EncodedImage(source, torch.zeros(self.encode_image(source).shape)) for source in sources]
        arguments = {n: t.expand(batch_size, *t.shape[1:]) for n, t in self.embeddings(image).items()}
        arguments = {n: t.float() if t.is_floating_point() else t for n, t in arguments.items()}
        keys: list[tuple[int, ...]] = [(0, number) for number in range(batch_size)]
        handle = self.model.register_forward_pre_hook(record, with_kwargs=True, prepend=True)
        steps, scale = self.args.num_inference_steps, self.args.guidance_scale
        with handle, self.training_precision(), skip_equal_blocks(self.model), suppress(TransformerReachedError):
            self.recording_pipeline.generate(arguments, *image.size, steps, scale, keys, sources=encoded)

        def to_fake(tensor: torch.Tensor) -> torch.Tensor:
            # Keep masks, whose values Qwen-Image-2.1's transformer reads
            return tensor if tensor.dtype == torch.bool else self.mode.from_tensor(tensor)

        return tree_map_only(torch.Tensor, to_fake, calls)

    @cached_method
    def training_peak(
        self, batch_size: int, image: PlannedImage, checkpoints: bool, quantization: str | None = None
    ) -> int:
        """Measure the peak of a micro-batch's forward and backward pass."""
        getattr(self.transformer, f"{'enable' if checkpoints else 'disable'}_gradient_checkpointing")()
        return self._transformer_peak(self.transformer_calls(batch_size, image), quantization, is_training=True)

    @cached_method
    def step_peak(self, batch_size: int, image: PlannedImage, quantization: str | None) -> int:
        """Measure the peak of a sampling step."""
        return self._transformer_peak(self.transformer_calls(batch_size, image), quantization)

    def _transformer_peak(self, calls: list[dict], quantization: str | None, is_training: bool = False) -> int:
        with self.mode, self.training_precision(), dequantize_in_forward(self.model, quantization):
            return measure_peak(lambda: [self.model(**call)[0] for call in calls], self.model, is_training)

    @cached_method
    def decoding_peak(self, batch_size: int, image: PlannedImage, tiled: bool) -> int:
        """Measure the peak of the VAE's decoder."""
        channels, *sides = self.latent_size(image)
        frames = [1] if "z_dim" in self.vae.config else []  # the VAE of a video model
        (self.vae.enable_tiling if tiled else self.vae.disable_tiling)()
        with self.mode, self.training_precision():
            latents = torch.empty(batch_size, channels, *frames, *sides, dtype=self.vae.dtype)
            return measure_peak(lambda: self.vae.decode(latents, return_dict=False), self.vae)

    @cached_method
    def first_panel_peak(self, image: PlannedImage) -> int:
        """Measure the peak of the VAE's encoder for a first panel."""
        return measure_peak(lambda: self.encode_image(self.panel(image)), self.vae)
