# SPDX-License-Identifier: Apache-2.0
"""FLUX.1-dev: guidance is distilled into the model, so a step is one call and the scheduler gets its output."""

from typing import Any

import torch

from .base import Family


class FluxFamily(Family):
    """[`~diffusers.FluxPipeline`]."""

    # The paper's targets: attention projections of both streams, feed-forward layers of the double-stream blocks
    lora_target_modules = [
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ]
    text_encoders = ("text_encoder", "text_encoder_2")

    def encode_prompt(self, pipeline, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
        prompt_embeds, pooled_prompt_embeds, _ = pipeline.encode_prompt(
            prompt,
            prompt_2=None,
            device=device,
            max_sequence_length=min(512, pipeline.tokenizer_2.model_max_length),  # 512 is FLUX.1-dev's
        )
        return {
            "prompt_embeds": prompt_embeds,  # (1, 512, 4096)
            "pooled_prompt_embeds": pooled_prompt_embeds,  # (1, 768)
        }

    def size_multiple(self, pipeline) -> int:
        return pipeline.vae_scale_factor * 2  # latents are packed in 2 x 2 patches

    def call_arguments(self, guidance_scale: float) -> dict:
        return {"guidance_scale": guidance_scale}

    def combine(self, outputs: list[torch.Tensor], guidance_scale: float) -> torch.Tensor:
        if len(outputs) != 1:
            raise ValueError(
                f"FluxPipeline called its transformer {len(outputs)} times in one step, where guidance-distilled FLUX "
                "calls it once. True classifier-free guidance (`true_cfg_scale`) is not part of this family's page."
            )
        return outputs[0]

    def call_at(self, call: dict[str, Any], sample: torch.Tensor, sigma: torch.Tensor) -> dict[str, Any]:
        # The scheduler multiplies times by 1000 and the pipeline divides by it, which rounds: so does this
        timestep = (sigma * 1000).to(call["timestep"].dtype) / 1000  # (B,)
        return {**call, "hidden_states": sample.to(call["hidden_states"].dtype), "timestep": timestep}
