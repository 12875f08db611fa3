# SPDX-License-Identifier: Apache-2.0
"""Find the edited image of each prompt."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..generation.edits import edit_keys
from ..utils.files import file_name
from ..utils.text import some_of
from .image_sets import EXTENSIONS, FoundImages, ImageSet, image_file_size


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)

# The benchmark's own example puts a copy of the source next to each edit, under this name
_SOURCE_COPY = "_SRCIMG"


def find_edits(folder: str | Path, prompts: "Dataset") -> FoundImages:
    """
    Find the edited image of each prompt, by its id.

    The name of a file without its extension must be the id, plain or as [`generate_edits`] writes it. Searched are
    `<folder>/<language>/`, `<folder>/images/<language>/` ([`generate_edits`]) and `<folder>/fullset/<task_type>/<language>/`
    (GEdit-Bench's own script), without `<language>` if there is no such column. `<id>_SRCIMG`, its copies of sources,
    are skipped.

    Args:
        folder (`str` or `Path`):
            Directory of `.png`, `.jpg`, `.jpeg` or `.webp` files.
        prompts ([`~datasets.Dataset`]):
            Editing prompts with `id` and, where known, `language` and `task_type`.

    Returns:
        [`FoundImages`], each edit a set of one panel. Prompts without an image, and images without a prompt, are logged
        too.
    """
    from accelerate import PartialState

    is_main_process = PartialState().is_main_process
    folder = Path(folder).expanduser().absolute()
    keys = edit_keys(prompts)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a directory.")
    names = [name for name in ("id", "language", "task_type") if name in prompts.column_names]
    rows = list(prompts.with_format(None).select_columns(names))

    # By directory and name without extension, but not those that are being written, whose names begin with a dot
    images: dict[tuple[Path, str], list[Path]] = {}
    for place in dict.fromkeys(place for values in rows for place in _places(folder, values)):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.suffix.lower() in EXTENSIONS and path.is_file() and not path.name.startswith("."):
                images.setdefault((place, path.stem), []).append(path)
    found: dict[str, list[Path]] = {key: [] for key in keys}
    taken: set[Path] = set()
    # A name that is the plain id of one prompt and the written id of another belongs to the latter
    for written in (True, False):
        for key, values in zip(keys, rows, strict=True):
            stem = file_name(values["id"]) if written else values["id"]
            for place in _places(folder, values):
                new = [path for path in images.get((place, stem), []) if path not in taken]
                found[key] += new
                taken.update(new, images.get((place, stem + _SOURCE_COPY), []))
    for key, paths in found.items():
        if len(paths) > 1:
            raise ValueError(f"{paths[0]} and {paths[1]} are both named as the edit of {key!r}. Keep one of them.")
    sets = {
        key: ImageSet(key, row["id"], 0, 1, 1, (found[key][0] if found[key] else None,))
        for key, row in zip(keys, rows, strict=True)
    }
    unknown = sorted(str(path.relative_to(folder)) for paths in images.values() for path in set(paths) - taken)

    missing = [key for key in keys if not found[key]]
    if missing:
        row = rows[keys.index(missing[0])]
        places = ", ".join(map(str, _places(folder, row)))
        text = (
            f"{folder}: {len(missing)} of {len(keys)} prompts have no edit: {some_of(missing)}. That of {row['id']!r} "
        )
        text += f"was looked for as {file_name(row['id'])} ({', '.join(EXTENSIONS)}) directly in {places}."
        if len(missing) == len(keys):
            raise ValueError(text)
        if is_main_process:
            logger.warning(text)
    if unknown and is_main_process:
        logger.warning(f"{folder}: {len(unknown)} images belong to no prompt: {some_of(unknown)}.")
    for paths in found.values():
        for path in paths:
            image_file_size(path)  # finds unreadable files before a judge is queried about the others
    return FoundImages(sets, unknown)


def _places(folder: Path, row: dict[str, Any]) -> Iterator[Path]:
    """List the directories where the edit of a row may be."""
    bases = [folder, folder / "images"]
    if row.get("task_type"):
        bases.append(folder / "fullset" / file_name(row["task_type"]))
    for base in bases:
        yield base / file_name(row["language"]) if "language" in row else base
