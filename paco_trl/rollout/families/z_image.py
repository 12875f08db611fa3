# SPDX-License-Identifier: Apache-2.0
"""Z-Image: true CFG in one call of a doubled list; the model predicts the negative velocity."""

import torch

from .base import ATTENTION, Family, count_chat_tokens, true_guidance_prompt


# Default length to which the pipeline truncates prompts
MAX_TOKENS = 512


class ZImageFamily(Family):
    """[`~diffusers.ZImagePipeline`]. Z-Image-Turbo is trained with `guidance_scale=0.0`."""

    # As the paper's targets for FLUX.1
    lora_target_modules = [f"attention.{name}" for name in ATTENTION[:4]] + [f"feed_forward.w{n}" for n in (1, 2, 3)]
    text_encoders = ("text_encoder",)
    has_fixed_prompt_length = False

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        (prompt_embeds,), _ = pipeline.encode_prompt(
            prompt, device=device, do_classifier_free_guidance=False, max_sequence_length=MAX_TOKENS
        )
        return {"prompt_embeds": prompt_embeds.unsqueeze(0)}  # (1, L, D)

    def is_truncated(self, pipeline, prompt):
        return count_chat_tokens(pipeline.tokenizer, prompt, enable_thinking=True) > MAX_TOKENS

    def resolve_negative_prompt(self, pipeline, guidance_scale, negative_prompt):
        return true_guidance_prompt(pipeline, guidance_scale, negative_prompt, default="", off_at=0.0)

    def batch_arguments(self, arguments):
        return {name: list(tensor) for name, tensor in arguments.items()}  # a tensor for each image

    def branches(self, outputs, sample):
        (output,) = outputs  # a list of B or 2 B tensors (channels, 1, height, width)
        velocity = -torch.stack([tensor.float() for tensor in output]).squeeze(2)
        if len(velocity) == len(sample):
            return velocity, None
        return velocity[: len(sample)], velocity[len(sample) :]

    def guide(self, conditional, unconditional, guidance_scale):
        return conditional + guidance_scale * (conditional - unconditional)

    def call_at(self, call, sample, sigma):
        copies = len(call["x"]) // len(sample)
        sample = sample.to(call["x"][0].dtype).unsqueeze(2)  # (B, channels, 1, height, width)
        timestep = (1000 - sigma * 1000) / 1000
        return {**call, "x": list(sample) * copies, "t": timestep.to(call["t"].dtype).repeat(copies)}
