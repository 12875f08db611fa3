# SPDX-License-Identifier: Apache-2.0
"""Loading of ViStoryBench's stories as sets of separate images."""

from pathlib import Path, PurePath
from typing import Any

from datasets import Dataset

from ..utils.text import read_json
from .dataset_files import find_dataset_folder
from .image_paths import image_file, with_image_types
from .image_sets import SEPARATE
from .text_tables import dataset_of_rows


# Fields of a shot, in the order of the benchmark's prompts, before characters and scene
_SHOT_FIELDS = ("Shot Perspective Design", "Plot Correspondence", "Static Shot Description")
_SCENE_FIELD, _CHARACTERS_FIELD = "Setting Description", "Characters Appearing"
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


def load_stories(name_or_path: str | Path = "ViStoryBench/ViStoryBench", language: str = "en") -> Dataset:
    """
    Load the stories of [ViStoryBench](https://huggingface.co/papers/2505.24862) as sets of separate images.

    Args:
        name_or_path (`str` or `Path`, *optional*, defaults to `"ViStoryBench/ViStoryBench"`):
            Directory of the stories (`01/story.json`, `01/image/<character>/`, ...) or its parent, or their Hub id.
        language (`str`, *optional*, defaults to `"en"`):
            `"en"` or `"ch"`.

    Returns:
        [`~datasets.Dataset`]: one row per story with `id`, `layout` (`"separate"`), `theme` (the type of story and its
        characters), `panels` (one per shot: camera, plot, description, characters, scene), `shots` (their numbers)
        and, if all stories have images of characters, `references` (the first of each character).

    Raises:
        FileNotFoundError: If there is no `story.json`. ValueError: If a story or shot lacks a text in this language,
        or a character's images are outside the directory.
    """
    root = find_dataset_folder(name_or_path, ["*/story.json", "*/image/**"])
    files = sorted(root.glob("*/story.json")) or sorted(root.glob("*/*/story.json"))
    if not files:
        raise FileNotFoundError(f"There is no directory with a story.json in {root}. Check the path.")
    rows = []
    for file in files:
        try:
            rows.append(_read_story(file, language, root))
        except KeyError as error:
            raise ValueError(f"{file} has no {error} in the language {language!r}. Check the file.") from error
    if not all(row["references"] for row in rows):
        for row in rows:
            del row["references"]
    return with_image_types(dataset_of_rows(rows), ["references"])


def _read_story(file: Path, language: str, root: Path) -> dict[str, Any]:
    story = read_json(file)
    names = {key: person[f"name_{language}"] for key, person in story["Characters"].items()}
    texts = {key: f"{names[key]} is {person[f'prompt_{language}']}" for key, person in story["Characters"].items()}
    panels = []
    for shot in story["Shots"]:
        # Characters are keyed by their English names
        characters = [texts[key.strip()] for key in shot[_CHARACTERS_FIELD]["en"]]
        panels.append(
            "; ".join([*(shot[name][language] for name in _SHOT_FIELDS), *characters, shot[_SCENE_FIELD][language]])
        )
    references = []
    for key in names:
        try:
            folder = image_file(str(PurePath(file.parent.relative_to(root), "image", key)), [root])
            images = (path for path in sorted(folder.glob("*")) if path.suffix.lower() in _IMAGE_SUFFIXES)
            references += [str(image_file(str(path.relative_to(root)), [root])) for path in images][:1]
        except ValueError as error:
            raise ValueError(f"{file}, character {key!r}: {error}") from error
    return {
        "id": file.parent.name,
        "layout": SEPARATE,
        "theme": "; ".join([story["Story_type"][language], *texts.values()]),
        "panels": panels,
        "shots": [int(shot["index"]) for shot in story["Shots"]],
        "references": references,
    }
