# SPDX-License-Identifier: Apache-2.0
"""Krea 2: true CFG of two calls on top of the conditional prediction, and text features from twelve layers."""

from .base import ATTENTION, Family, packed_call_at, true_guidance_prompt


# Default length to which the pipeline truncates prompts
MAX_TOKENS = 512


class Krea2Family(Family):
    """[`~diffusers.Krea2Pipeline`]. Train Krea-2-Raw, and use the adapter with it or with Krea-2-Turbo."""

    # The authors' choice for long trainings (examples/dreambooth/README_krea2.md of diffusers)
    lora_target_modules = [f"attn.{name}" for name in (*ATTENTION[:4], "to_gate")]
    text_encoders = ("text_encoder",)
    max_calls = 2
    unbatched_arguments = ("position_ids",)
    call_at = staticmethod(packed_call_at)

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        prompt_embeds, mask = pipeline.encode_prompt(prompt, device=device, max_sequence_length=MAX_TOKENS)
        return {"prompt_embeds": prompt_embeds, "prompt_embeds_mask": mask}  # (1, 512, 12, 2560), (1, 512)

    def is_truncated(self, pipeline, prompt):
        tokens = len(pipeline.tokenizer(pipeline.prompt_template_encode_prefix + prompt).input_ids)
        template = pipeline.prompt_template_encode_start_idx - pipeline.prompt_template_encode_num_suffix_tokens
        return tokens > MAX_TOKENS + template

    def resolve_negative_prompt(self, pipeline, guidance_scale, negative_prompt):
        return true_guidance_prompt(pipeline, guidance_scale, negative_prompt, default="", off_at=0.0)

    def guide(self, conditional, unconditional, guidance_scale):
        return conditional + guidance_scale * (conditional - unconditional)
