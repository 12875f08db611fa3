# SPDX-License-Identifier: Apache-2.0
"""
Directories as other trainers read them: images, each with its prompt in a text file beside it.

ai-toolkit, kohya's sd-scripts and musubi-tuner keep `001.png` and `001.txt` in a directory, or in its subdirectories.
For edits, `target/` has the edited images with their instructions, and `input1/`, `input2/` and so on the sources by
the same names.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, Features, Image, List, Value

from ..utils.data_names import JSON_DATA, PARQUET, TABLES, data_ending
from ..utils.text import join_first, read_text


_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_TARGET = "target"
_INPUT = re.compile(r"input\d*")


def read_caption_folder(folder: Path) -> Dataset | None:
    """
    Read a directory of images with texts; return `None` for a directory of another format.

    The texts are the column `prompt`, the images `target`, which rewards get, and the source images `images`.

    Raises:
        ValueError: If some images have no text, a text is empty, or an edited image has no source, or two sources.
    """
    entries = sorted(folder.iterdir())
    if any(data_ending(path) in (*JSON_DATA, *TABLES, PARQUET) for path in entries):
        return None
    folders = [path for path in entries if path.is_dir()]
    inputs = [path for path in folders if _INPUT.fullmatch(path.name)]
    inputs.sort(key=lambda path: (len(path.name), path.name))  # input10 comes after input2
    is_edits = bool(inputs) and folder / _TARGET in folders
    places = [folder / _TARGET] if is_edits else [folder, *folders]
    images = [image for place in places for image in _images_in(place)]
    captioned = [image for image in images if image.with_suffix(".txt").is_file()]
    if not captioned:
        return None
    if lacking := [str(image.relative_to(folder)) for image in sorted({*images} - {*captioned})]:
        has_target = folder / _TARGET in folders and not is_edits
        raise ValueError(
            f"{len(lacking)} of the {len(images)} images of '{folder}' have no text beside them: {join_first(lacking)}. "
            + ("Name directories of sources input1, input2." if has_target else "Write it, or move the image away.")
        )
    prompts = {image: read_text(image.with_suffix(".txt")).strip() for image in captioned}
    if empty := [
        str(image.with_suffix(".txt").relative_to(folder)) for image, prompt in prompts.items() if not prompt
    ]:
        raise ValueError(f"'{folder}' has texts without a prompt: {join_first(empty)}. Write one.")
    names = [str(image.relative_to(folder)) for image in captioned]
    columns: dict[str, list] = {"prompt": [*prompts.values()], "target": names}
    features = {"prompt": Value("string"), "target": Image()}
    if is_edits:
        sources = [_sources_in(place) for place in inputs]
        columns["images"] = [
            [str(of[image.stem].relative_to(folder)) for of in sources if image.stem in of] for image in captioned
        ]
        if alone := [name for name, found in zip(names, columns["images"], strict=True) if not found]:
            raise ValueError(
                f"Edited images of '{folder}' have no source of the same name in {join_first([i.name for i in inputs])}: "
                f"{join_first(alone)}. Add it, or move the edited image away."
            )
        features["images"] = List(Image())
    return Dataset.from_dict(columns, Features(features))


def _images_in(place: Path) -> Iterator[Path]:
    return (path for path in sorted(place.iterdir()) if path.suffix.lower() in _IMAGES and path.name[0] != ".")


def _sources_in(place: Path) -> dict[str, Path]:
    """Return the images of a directory by their names without ending."""
    images: dict[str, Path] = {}
    for image in _images_in(place):
        if (other := images.setdefault(image.stem, image)) != image:
            raise ValueError(f"'{place}' has two images of one name: {other.name}, {image.name}. Move one away.")
    return images
