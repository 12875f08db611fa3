# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 and 3.5: true CFG in one call of a doubled batch."""

import torch

from .base import ATTENTION, Family, feed_forward, true_guidance_prompt


# Default length to which the pipeline truncates the prompt of T5
MAX_TOKENS = 256


class StableDiffusion3Family(Family):
    """[`~diffusers.StableDiffusion3Pipeline`]."""

    # As the paper's targets for FLUX.1. The second attention of some layers of 3.5-medium (`attn2`) matches too.
    lora_target_modules = [*ATTENTION, *feed_forward("ff", "ff_context")]
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        options = {"do_classifier_free_guidance": False, "max_sequence_length": MAX_TOKENS}
        embeds, _, pooled, _ = pipeline.encode_prompt(prompt, prompt_2=None, prompt_3=None, device=device, **options)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}  # (1, 77 + 256, 4096), (1, 2048)

    def is_truncated(self, pipeline, prompt):  # without T5, the warning by CLIP's tokenizer remains
        return pipeline.tokenizer_3 is not None and len(pipeline.tokenizer_3(prompt).input_ids) > MAX_TOKENS

    def resolve_negative_prompt(self, pipeline, guidance_scale, negative_prompt):
        return true_guidance_prompt(pipeline, guidance_scale, negative_prompt, default="")

    def unused_layers(self, transformer):
        # The last block has no text layers after its attention, but still computes text queries
        return [f"transformer_blocks.{transformer.config.num_layers - 1}.attn.add_q_proj"]

    def size_multiple(self, pipeline):
        return pipeline.vae_scale_factor * pipeline.patch_size

    def branches(self, outputs, sample):
        (output,) = outputs  # (B or 2 B, channels, height, width)
        if len(output) == len(sample):
            return output, None
        unconditional, conditional = output.chunk(2)
        return conditional, unconditional

    def call_at(self, call, sample, sigma):
        copies = len(call["hidden_states"]) // len(sample)
        return {
            **call,
            "hidden_states": torch.cat([sample.to(call["hidden_states"].dtype)] * copies),
            "timestep": torch.cat([(sigma * 1000).to(call["timestep"].dtype)] * copies),
        }
