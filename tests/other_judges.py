# SPDX-License-Identifier: Apache-2.0
"""Tiny vision-language models of other families than the published judge's, and how its usage example asks a model."""

import torch
from PIL import Image
from qwen_vl_utils import process_vision_info
from transformers import (
    AutoTokenizer,
    BatchFeature,
    CLIPImageProcessor,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    ProcessorMixin,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)


# Families that are trained and scored
OTHER_JUDGES = ("qwen2", "qwen3", "llava")
# The family of the benchmark's independent judge, which only scores
INDEPENDENT_JUDGE = "gemma3"
GEMMA_IMAGE_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
# Begins with a token of its own, as Gemma's does
GEMMA_TEMPLATE = """\
{{- '<|endoftext|>' -}}
{%- for message in messages -%}
{{- '<|im_start|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- for part in message.content -%}
{{- part.text if part.type == 'text' else '<start_of_image>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>model\\n' -}}
{%- endif -%}"""


def usage_inputs(processor: ProcessorMixin, images: tuple[Image.Image, ...], question: str) -> BatchFeature:
    """Inputs of the published usage example for a question about one or two images."""
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    patch_size = getattr(processor.image_processor, "patch_size", 14)
    images, _ = process_vision_info(messages, image_patch_size=patch_size)
    return processor(text=[text], images=images, return_tensors="pt")


def first_logits(model: PreTrainedModel, processor: ProcessorMixin, images, question: str) -> torch.Tensor:
    """Logits of the first position of the answer."""
    with torch.no_grad():
        return model(**usage_inputs(processor, images, question)).logits[0, -1]


def build_other_judge(name: str, processor: ProcessorMixin) -> tuple[PreTrainedModel, ProcessorMixin]:
    """One of `OTHER_JUDGES` or `INDEPENDENT_JUDGE` and its processor, with the tokenizer and template of a Qwen2.5-VL's."""
    tokenizer = processor.tokenizer
    text = {
        **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
        **{"initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 2},
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    qwen = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name.replace('image', 'image_pad')}|>")
        for name in ("image", "vision_start", "vision_end")
    }
    qwen["video_token_id"] = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    parts = {name: getattr(processor, name) for name in ("tokenizer", "video_processor", "chat_template")}
    size = processor.image_processor.size

    def qwen2():
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
        config = Qwen2VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision, **qwen)
        return Qwen2VLForConditionalGeneration(config), Qwen2VLProcessor(Qwen2VLImageProcessor(size=size), **parts)

    def qwen3():
        vision = {
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
            **{"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
            "initializer_range": 0.1,
        }
        config = Qwen3VLConfig(
            text_config={**text, "head_dim": 16, "rope_parameters": rope}, vision_config=vision, **qwen
        )
        image_processor = Qwen2VLImageProcessor(size=size, patch_size=16)
        return Qwen3VLForConditionalGeneration(config), Qwen3VLProcessor(image_processor, **parts)

    def llava():
        vision = CLIPVisionConfig(
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 56, "patch_size": 14, "initializer_factor": 5.0},
        )
        config = LlavaConfig(
            vision_config=vision,
            text_config=Qwen2Config(**text),
            image_token_index=qwen["image_token_id"],
            vision_feature_layer=-1,
        )
        own_processor = LlavaProcessor(
            CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
            tokenizer=tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            image_token="<|image_pad|>",
            num_additional_image_tokens=1,
            chat_template=processor.chat_template,
        )
        return LlavaForConditionalGeneration(config), own_processor

    def gemma3():
        own_tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path, extra_special_tokens=GEMMA_IMAGE_TOKENS)
        ids = {key: own_tokenizer.convert_tokens_to_ids(token) for key, token in GEMMA_IMAGE_TOKENS.items()}
        config = Gemma3Config(
            # Both kinds of attention; the window is shorter than a question with its images
            text_config={
                **text,
                **{"vocab_size": len(own_tokenizer), "head_dim": 16, "query_pre_attn_scalar": 16},
                **{"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
            },
            vision_config={
                **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
                **{"image_size": 56, "patch_size": 14},
            },
            mm_tokens_per_image=4,
            **{f"{key}_index": value for key, value in ids.items()},
        )
        own_processor = Gemma3Processor(
            Gemma3ImageProcessor(size={"height": 56, "width": 56}),
            own_tokenizer,
            chat_template=GEMMA_TEMPLATE,
            image_seq_length=4,
        )
        model = Gemma3ForConditionalGeneration(config)
        # It begins with zeros, for which an image makes no difference
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
        return model, own_processor

    builders = {"qwen2": qwen2, "qwen3": qwen3, "llava": llava, "gemma3": gemma3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, own_processor = builders[name]()
    return model.eval(), own_processor
