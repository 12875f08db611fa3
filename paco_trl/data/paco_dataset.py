# SPDX-License-Identifier: Apache-2.0
"""Loading of the published PaCo-Dataset: ShareGPT-style JSON files, with images as files or in archives."""

from pathlib import Path

from datasets import Dataset, Features

from ..utils.text import read_json, shorten
from .archives import ARCHIVE_PATTERNS, ImageFinder
from .columns import column_types
from .dataset_files import find_dataset_folder, report_broken_rows
from .image_paths import image_file
from .pairs import as_turns, pair_features
from .text_tables import read_rows


# The paper's training data; its evaluation set is `consistency_reward_cot_test`
_TRAINING_FILES = ["consistency_reward_cot_train", "sharegpt_editing_cot"]
_PATTERNS = ["*.json", "*.sh", "*.png", "*.jpg", "*.jpeg", "*.webp", *ARCHIVE_PATTERNS]


def load_paco_dataset(name_or_path: str | Path, files: list[str] | None = None, skip_broken: bool = False) -> Dataset:
    """
    Load the published PaCo-Dataset as pairs.

    `X-GenGroup/PaCo-Dataset` has ShareGPT-style JSON files whose records have `conversations` (`from`, `value`) or
    `messages` (`role`, `content`), and `images`, two paths. Both images come before the question, as in the training
    of the weights: the placeholders `<image>` in front of it are removed. LLaMA-Factory's `dataset_info.json`, if
    present, maps names to files.

    Images are searched in the directory first, then in its zip and tar archives, which are extracted once into the
    cache of `datasets`. Split archives are not joined; the error shows the command. Images are stored as paths and not
    decoded; see [`validate_pairs`].

    Args:
        name_or_path (`str` or `Path`):
            Directory, or Hub id of a dataset.
        files (`list[str]`, *optional*):
            Names of datasets in `dataset_info.json`, or of JSON files. Defaults to the paper's training data,
            `consistency_reward_cot_train` and `sharegpt_editing_cot`.
        skip_broken (`bool`, *optional*, defaults to `False`):
            Whether to leave out broken records, with a warning that lists them. A missing or damaged file is always an
            error.

    Returns:
        [`~datasets.Dataset`]: the columns `images`, `prompt`, `completion` and `source` (the name in `files`).

    Raises:
        ValueError: If a file is not a list of records, or a record is broken.
        shutil.ReadError: If an archive is damaged, and an image is not in the directory itself.
    """
    folder = find_dataset_folder(name_or_path, _PATTERNS)
    finder = ImageFinder(folder)
    info_path = folder / "dataset_info.json"  # LLaMA-Factory's: name -> file
    info = read_json(info_path) if info_path.is_file() else {}
    names = [name.removesuffix(".json") for name in files or _TRAINING_FILES]
    paths = [image_file(info.get(name, {}).get("file_name", f"{name}.json"), [folder]) for name in names]
    rows, broken = [], []
    for name, json_path in zip(names, paths, strict=True):
        for record_number, record in enumerate(read_rows(json_path)):
            try:
                texts = as_turns(record)
                images = record.get("images")
                if not isinstance(images, list) or len(images) != 2:
                    raise ValueError(f"its `images` are {shorten(images)}, but a pair has a list of exactly 2 paths.")
                rows.append({"images": [finder.find(image) for image in images], **texts, "source": name})
            except (ValueError, AttributeError, TypeError) as error:  # raised for turns or texts of another type, too
                broken.append(f"{json_path.name}, record {record_number}: {error}")
    report_broken_rows(broken, len(rows) + len(broken), "records", skip_broken)
    return Dataset.from_list(rows, features=Features({**pair_features(), **column_types(source="string")}))
