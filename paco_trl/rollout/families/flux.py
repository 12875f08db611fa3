# SPDX-License-Identifier: Apache-2.0
"""FLUX.1: guidance is distilled into the model, so a step is one call, and the scheduler receives its output."""

from .base import DUAL_STREAM_ATTENTION, Family, feed_forward, packed_call_at


class FluxFamily(Family):
    """[`~diffusers.FluxPipeline`]."""

    # The paper's targets: attention projections of both streams, feed-forward layers of the double-stream blocks
    lora_target_modules = [*DUAL_STREAM_ATTENTION, *feed_forward("ff", "ff_context")]
    text_encoders: tuple[str, ...] = ("text_encoder", "text_encoder_2")
    unbatched_arguments = ("txt_ids", "img_ids")
    call_at = staticmethod(packed_call_at)

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        length = self.max_sequence_length(pipeline)
        embeds, pooled, _ = pipeline.encode_prompt(prompt, prompt_2=None, device=device, max_sequence_length=length)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}  # (1, 512, 4096), (1, 768)

    def max_sequence_length(self, pipeline):
        return min(512, pipeline.tokenizer_2.model_max_length)  # 512 is FLUX.1-dev's

    def is_truncated(self, pipeline, prompt):  # CLIP always truncates image sets; only its pooled output is used
        return len(pipeline.tokenizer_2(prompt).input_ids) > self.max_sequence_length(pipeline)


class FluxKontextFamily(FluxFamily):
    """[`~diffusers.FluxKontextPipeline`]: the tokens of a source image follow the tokens of the image."""

    max_source_images = 1
    batches_sources = True
    # The paper's settings, Part 3. As in the published code, the only reward is not tamed.
    training_defaults = {
        "edits": True, "max_source_images": 1, "rewards": ["edit"],
        "multi_objective_aggregation": "sum_then_normalize",
        "num_inference_steps": 8, "noise_level": 0.9, "guidance_scale": 2.5, "resolution_scale": 0.375,
    }  # fmt: skip

    def call_arguments(self, height, width, guidance_scale, images):
        arguments = super().call_arguments(height, width, guidance_scale, images)
        # The pipeline computes its own size from an area, by default 1024 x 1024, whatever height and width say
        arguments["max_area"] = height * width
        if images:
            arguments |= {"image": images[0], "_auto_resize": False}
        return arguments

    def edited_size(self, pipeline, sizes, area):
        step = self.size_multiple(pipeline)
        width, height = _preferred_resolution(sizes[0][0], sizes[0][1], step)  # size of about 1024 x 1024 pixels
        factor = (area / 1024**2) ** 0.5
        return max(1, round(height * factor / step)) * step, max(1, round(width * factor / step)) * step

    def prepare_image(self, pipeline, image, scale):
        step = self.size_multiple(pipeline)
        width, height = _preferred_resolution(image.width, image.height, step)
        return pipeline.image_processor.resize(
            image, max(1, round(height // step * scale)) * step, max(1, round(width // step * scale)) * step
        )

    def prepare_panel(self, pipeline, image):
        return image


def _preferred_resolution(width: int, height: int, step: int) -> tuple[int, int]:
    """Return the training size of Kontext with the closest aspect ratio, width and height, as its pipeline does."""
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    # The pipeline rounds the source down first, and this can change the closest size
    ratio = max(1, width // step) / max(1, height // step)
    _, width, height = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
    return width, height
