# SPDX-License-Identifier: Apache-2.0
"""Select the files of a published model. The rest of a checkpoint (optimizer, states) stays on this machine."""

from pathlib import Path


# What was trained and how, see `settings.py`
SETTINGS = "paco_trl.json"
# Images of the card, as patterns. Others in the directory are the user's own
PICTURES = [
    "contact_sheet.png", "curves.png", "evaluation.png",
    "images/[0-9].png",
]  # fmt: skip
_JUDGE_PICTURES = ["*_calibration.png", "*_wrong_pairs.png"]  # of any `metric_key_prefix`
_PROCESSOR = [
    "added_tokens.json", "chat_template.jinja", "merges.txt", "preprocessor_config.json", "processor_config.json",
    "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "video_preprocessor_config.json", "vocab.json",
]  # fmt: skip
_JUDGE_CARD = [SETTINGS, "README.md", *_JUDGE_PICTURES]

# Patterns; `*` does not cross directories
_ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]
# An adapter of a pipeline's transformer, in PEFT's and in diffusers' format
PIPELINE_ADAPTER = [*_ADAPTER, "pytorch_lora_weights.safetensors", SETTINGS, "README.md", *PICTURES]
# A full transformer of a pipeline
TRANSFORMER = ["transformer/config.json", "transformer/diffusion_pytorch_model*", SETTINGS, "README.md", *PICTURES]
# An adapter of a judge, and a full judge
JUDGE_ADAPTER = [*_ADAPTER, *_PROCESSOR, *_JUDGE_CARD]
_JUDGE_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
JUDGE = ["config.json", "generation_config.json", *_JUDGE_WEIGHTS, *_PROCESSOR, *_JUDGE_CARD]


def published_files_of(folder: str | Path) -> list[str] | None:
    """Return the patterns of the files to publish of a saved model or checkpoint, `None` if the directory has no model."""
    folder = Path(folder)
    if (folder / "adapter_model.safetensors").is_file() and (folder / "adapter_config.json").is_file():
        return PIPELINE_ADAPTER if (folder / "pytorch_lora_weights.safetensors").is_file() else JUDGE_ADAPTER
    if (folder / "transformer" / "config.json").is_file():
        return TRANSFORMER
    if (folder / "config.json").is_file() and any(folder.glob("model*.safetensors")):
        return JUDGE
    return None
