# SPDX-License-Identifier: Apache-2.0
"""Which files a published model consists of. What else a checkpoint has (optimizer, states) stays on this machine."""

from pathlib import Path


_CARD = ["README.md", "*.png"]
_PROCESSOR = ["*.jinja", "merges.txt", "*processor_config.json", "*token*.json", "vocab.json"]

# Patterns; `*` does not cross folders. An adapter of a pipeline's transformer, in PEFT's and in diffusers' format
PIPELINE_ADAPTER = ["adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors", *_CARD]
# A whole transformer of a pipeline
TRANSFORMER = ["transformer/*", *_CARD]
# An adapter of a judge, and a whole judge
JUDGE_ADAPTER = ["adapter_config.json", "adapter_model.safetensors", *_PROCESSOR, *_CARD]
JUDGE = ["config.json", "generation_config.json", "model*.safetensors", "model*.index.json", *_PROCESSOR, *_CARD]


def published_files_of(folder: str | Path) -> list[str] | None:
    """
    Which files of a saved model are for others.

    Args:
        folder (`str` or `Path`):
            Folder of a model that was trained or merged here, or of a checkpoint.

    Returns:
        `list[str]`: patterns; `None` if there is no such model.
    """
    folder = Path(folder)
    if (folder / "adapter_model.safetensors").is_file() and (folder / "adapter_config.json").is_file():
        return PIPELINE_ADAPTER if (folder / "pytorch_lora_weights.safetensors").is_file() else JUDGE_ADAPTER
    if (folder / "transformer" / "config.json").is_file():
        return TRANSFORMER
    if (folder / "config.json").is_file() and any(folder.glob("model*.safetensors")):
        return JUDGE
    return None
