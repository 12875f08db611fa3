# SPDX-License-Identifier: Apache-2.0
"""
File names and patterns of published models, and which files paco_trl wrote.

The rest of a checkpoint (optimizer, random states) is not published.
"""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from ..utils.files import read_record
from ..utils.model_files import CARD_DATA_FILE
from ..utils.text import join_first


# In a checkpoint, the record of its run and files; in an output directory, the mark of a started run
RUN_FILE = "run.json"
# Patterns of what a run writes besides models
_ROUND = "round_" + "[0-9]" * 5
_STEP = "_step_" + "[0-9]" * 6
RUN_OUTPUTS = [
    "curves.csv", "curves.png", f"contact_sheets/{_ROUND}.*", f"contact_sheets/*{_STEP}.*",
    f"contact_sheets/card/{_ROUND}.png", f"contact_sheets/card/[0-9]_{_ROUND}.png",
    f"contact_sheets/card/*{_STEP}.png",
    "evaluation/*_baseline.pt", *(f"evaluation/*-{kind}-{'[0-9]' * 6}.png" for kind in ("calibration", "wrong_pairs")),
]  # fmt: skip
# Patterns of the card's images
PICTURES = [
    "contact_sheet.png", "curves.png", "evaluation.png",
    "images/[0-3].png",
]  # fmt: skip
JUDGE_PICTURES = ["*_calibration.png", "*_wrong_pairs.png"]  # for any `metric_key_prefix`
_PROCESSOR = [
    "added_tokens.json", "chat_template.jinja", "merges.txt", "preprocessor_config.json", "processor_config.json",
    "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "video_preprocessor_config.json", "vocab.json",
]  # fmt: skip
_ENDINGS = [".safetensors", "-*-of-*.safetensors", ".safetensors.index.json"]
_JUDGE_CARD = [CARD_DATA_FILE, "README.md", *JUDGE_PICTURES]

# Patterns, in which `*` does not cross directories
_ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]
# An adapter of a pipeline's transformer, in PEFT's and in diffusers' format
PIPELINE_ADAPTER = [*_ADAPTER, "pytorch_lora_weights.safetensors", CARD_DATA_FILE, "README.md", *PICTURES]
# A full transformer of a pipeline
TRANSFORMER = [
    "transformer/config.json", *(f"transformer/diffusion_pytorch_model{ending}" for ending in _ENDINGS),
    CARD_DATA_FILE, "README.md", *PICTURES,
]  # fmt: skip
# An adapter of a judge, and a full judge
JUDGE_ADAPTER = [*_ADAPTER, *_PROCESSOR, *_JUDGE_CARD]
_JUDGE_WEIGHTS = [f"model{ending}" for ending in _ENDINGS]
JUDGE = ["config.json", "generation_config.json", *_JUDGE_WEIGHTS, *_PROCESSOR, *_JUDGE_CARD]


def select_files(folder: str | Path, patterns: Iterable[str]) -> dict[str, Path]:
    """Map relative paths to the files of a directory that match any of the patterns."""
    folder = Path(folder)
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def is_one_of(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a path in a repository matches any of the patterns."""
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in patterns)


def saved_pictures(folder: str | Path) -> set[str] | None:
    """Return the card's images that the directory's `paco_trl.json` lists, `None` without that file."""
    values = read_record(Path(folder) / CARD_DATA_FILE)
    pictures = values.get("pictures", [])
    return {*map(str, pictures)} if values.get("kind") and isinstance(pictures, list) else None


def check_no_foreign_files(folder: str | Path, patterns: Iterable[str]) -> None:
    """Raise a `ValueError` if a directory has files of these patterns that paco_trl did not write."""
    # `paco_trl.json` vouches for the model beside it and the images that it lists; a run's record, for its outputs
    foreign = {*select_files(folder, patterns)}
    pictures = saved_pictures(folder)
    if pictures is not None:
        foreign = {name for name in foreign if name.endswith(".png") and name not in pictures}
    has_run = "run" in read_record(Path(folder) / RUN_FILE)
    if pictures is not None or has_run or any(Path(folder).glob(f"checkpoint-*/{RUN_FILE}")):
        foreign -= {RUN_FILE, *select_files(folder, RUN_OUTPUTS)}
    if foreign:
        raise ValueError(
            f"'{folder}' has {join_first(sorted(foreign))}, which paco_trl did not write there and would overwrite. "
            "Move this away, or choose another directory."
        )


def find_published_patterns(folder: str | Path) -> list[str] | None:
    """Return the patterns of files to publish from a model or checkpoint directory, `None` if it has no model."""
    folder = Path(folder)
    if (folder / "adapter_model.safetensors").is_file() and (folder / "adapter_config.json").is_file():
        return PIPELINE_ADAPTER if (folder / "pytorch_lora_weights.safetensors").is_file() else JUDGE_ADAPTER
    if (folder / "transformer" / "config.json").is_file():
        return TRANSFORMER
    if (folder / "config.json").is_file() and any(folder.glob("model*.safetensors")):
        return JUDGE
    return None
