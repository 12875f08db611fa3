# SPDX-License-Identifier: Apache-2.0
"""Find the images of a system by prompt, check them, and read their panels."""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import PIL.Image
from datasets import Dataset
from PIL.Image import Image

from ..data.grids import panel_size, split_grid
from ..data.image_sets import SEPARATE
from ..data.source_images import decoded_size
from ..generation.edits import edit_keys
from ..utils.files import file_name, write_atomically
from ..utils.images import reading, to_png, to_rgb
from ..utils.text import some_of


logger = logging.getLogger(__name__)

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp")
# The example of GEdit-Bench puts a copy of the source next to each edit, under this name
_SOURCE_COPY = "_SRCIMG"
# Method, mode, language and time of a run, in the directories of ViStoryBench
_STORY_RUN = "paco_trl/base/en/20000101_000000"
# Relative tolerance of the aspect ratio of a grid: sides are rounded
_ASPECT_TOLERANCE = 0.02


@dataclass(frozen=True)
class ImageSet:
    """The images of one prompt and seed: one grid, or a file for each panel, row by row (`None` if it is missing)."""

    key: str  # "<prompt id>/<seed>"
    prompt_id: str
    seed: int
    rows: int
    cols: int
    files: tuple[Path | None, ...]

    @property
    def missing(self) -> list[int]:
        """Numbers of the missing panels, from 0."""
        files = self.files * (self.rows * self.cols if len(self.files) == 1 else 1)
        return [number for number, file in enumerate(files) if file is None]

    def panels(self) -> list[Image | None]:
        """Read the panels in RGB, row by row; `None` for a missing one."""
        if len(self.files) > 1:
            return [None if file is None else load_image_file(file) for file in self.files]
        if self.files[0] is None:
            return [None for _ in range(self.rows * self.cols)]
        return [*split_grid(load_image_file(self.files[0]), self.rows, self.cols)]

    def digest(self) -> str:
        """Compute the SHA-256 of the files, missing ones included."""
        parts = [b"missing" if file is None else hashlib.sha256(file.read_bytes()).digest() for file in self.files]
        return hashlib.sha256(b"".join(parts)).hexdigest()


@dataclass
class FoundImages:
    """All images of a system: `sets` by key, in the order of prompts and seeds, incomplete ones included."""

    sets: dict[str, ImageSet]

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digest of each set, from the first access on."""
        return {key: set_.digest() for key, set_ in self.sets.items()}

    @property
    def missing(self) -> dict[str, list[int]]:
        """Numbers of the missing panels of each incomplete set."""
        return {key: set_.missing for key, set_ in self.sets.items() if set_.missing}

    def check_complete(self) -> None:
        """Refuse missing images."""
        if self.missing:
            raise ValueError(
                f"{len(self.missing)} of {len(self.sets)} sets lack images: {some_of(list(self.missing))}: a mean of "
                "the rest would flatter. Add them, or count 0 (`missing='zero'`)."
            )


def find_generated_sets(
    folder: str | Path, benchmark: Dataset, seeds: list[int], height: int | None = None, width: int | None = None
) -> FoundImages:
    """Find the grids that [`~paco_trl.dataset_building.generate_grids`] generated, of the rows' size or of the given one."""
    sets = {}
    for row in _layouts(benchmark):
        for seed in seeds:
            path, key = Path(folder) / file_name(row["id"]) / f"{seed}.png", f"{row['id']}/{seed}"
            sets[key] = ImageSet(key, row["id"], seed, row["rows"], row["cols"], (path if path.is_file() else None,))
    return _checked(sets, benchmark, height, width)


def find_image_sets(folder: str | Path, benchmark: Dataset) -> FoundImages:
    """
    Find images that were generated elsewhere: `<name>.png` is a grid, `<name>_<number>.png` a panel.

    The name is the prompt's `id`, plain or as [`~paco_trl.utils.files.file_name`] writes it, or its `case_id`, as in files
    for the benchmark's own script (`0001_0003_0000.png`): whichever more of the files have, exactly. The numbers of the
    panels begin with 0 or 1, the same in the full directory.

    Args:
        folder (`str` or `Path`):
            Directory of `.png`, `.jpg`, `.jpeg` or `.webp` files.
        benchmark ([`~datasets.Dataset`]):
            Image-set prompts with `id` and, where known, `case_id`.

    Returns:
        [`FoundImages`].
    """
    files, rows = _image_files(Path(folder)), _layouts(benchmark)
    columns = [name for name in ("id", "case_id") if name in benchmark.column_names]
    matched = {column: _match(files, [row[column] for row in rows]) for column in columns}
    column = max(columns, key=lambda name: len(matched[name]))
    matches, counts = matched[column], {row[column]: row["rows"] * row["cols"] for row in rows}
    if not matches:
        raise ValueError(
            f"None of the {len(files)} images directly in {folder} belongs to a prompt: `<id>.png` is a grid and "
            f"`<id>_<number>.png` a panel, with ids such as {rows[0][column]!r}."
        )
    images: dict[str, dict[int | None, Path]] = {}
    for path, (name, panel_number) in matches.items():
        if (same_image := images.setdefault(name, {}).setdefault(panel_number, path)) != path:
            raise ValueError(f"{same_image} and {path.name} are one image of {name!r} in two formats. Keep one.")
    numbered = [(name, number) for name, of_set in images.items() for number in of_set if number is not None]
    start = int(bool(numbered) and all(number > 0 for _, number in numbered))
    if start == 1 and not any(number == counts[name] for name, number in numbered):
        raise ValueError(f"Panels in {folder} are numbered neither from 0 nor to the last: add a first or last one.")
    sets = {}
    for row in rows:
        of_set, count, key = images.get(row[column], {}), row["rows"] * row["cols"], f"{row['id']}/0"
        numbers = range(start, start + count) if of_set.keys() - {None} else [None]
        if beyond := [path for number, path in of_set.items() if number not in numbers]:
            raise ValueError(f"{beyond[0]}, but {row[column]!r} is one grid or has {count} panels, from {start} on.")
        sets[key] = ImageSet(key, row["id"], 0, row["rows"], row["cols"], tuple(map(of_set.get, numbers)))
    _warn_of_unknown([path.name for path in files if path not in matches], Path(folder))
    return _checked(sets, benchmark)


def find_edits(folder: str | Path, prompts: Dataset) -> FoundImages:
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
        [`FoundImages`], each edit a set of one panel. Prompts without an image, and images without a prompt, are logged.
    """
    folder = Path(folder).expanduser().absolute()
    names = [name for name in ("id", "language", "task_type") if name in prompts.column_names]
    rows = dict(zip(edit_keys(prompts), prompts.with_format(None).select_columns(names), strict=True))
    # A name that is the plain id of one prompt and the written id of another belongs to the latter
    known = {(directory, name): key for name_of in (str, file_name) for key, row in rows.items()
             for directory, name in ((directory, name_of(row["id"])) for directory in _directories(folder, row))}  # fmt: skip
    edits: dict[str, Path] = {}
    unknown = []
    for directory in dict.fromkeys(directory for directory, _ in known):
        for path in _image_files(directory) if directory.is_dir() else ():
            key = known.get((directory, path.stem))
            if key is None:
                is_source = (directory, path.stem.removesuffix(_SOURCE_COPY)) in known
                unknown += [] if is_source else [str(path.relative_to(folder))]
                continue
            if edits.setdefault(key, path) != path:
                raise ValueError(f"{edits[key]} and {path} are both named as the edit of {key!r}. Keep one of them.")
            image_file_size(path)  # finds unreadable files before a judge is queried about the others
    if missing := [key for key in rows if key not in edits]:
        where, name = _directories(folder, rows[missing[0]]), file_name(rows[missing[0]]["id"])
        text = (
            f"{folder}: {len(missing)} of {len(rows)} prompts have no edit: {some_of(missing)}. The first was looked for as "
            f"{name}.png directly in {', '.join(map(str, where))}."
        )
        if not edits:
            raise ValueError(text)
        _warn(text)
    _warn_of_unknown(sorted(unknown), folder)
    return FoundImages({key: ImageSet(key, row["id"], 0, 1, 1, (edits.get(key),)) for key, row in rows.items()})


def _directories(folder: Path, row: Mapping[str, Any]) -> list[Path]:
    bases = [folder, folder / "images"]
    bases += [folder / "fullset" / file_name(row["task_type"])] if row.get("task_type") else []
    return [base / file_name(row["language"]) if "language" in row else base for base in bases]


def _image_files(folder: Path) -> list[Path]:
    # Not those that are being written
    paths = (path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS and not path.name.startswith("."))
    return sorted(filter(Path.is_file, paths))


def _warn(text: str) -> None:
    from accelerate import PartialState

    if PartialState().is_main_process:
        logger.warning(text)


def _warn_of_unknown(names: list[str], folder: Path) -> None:
    if names:
        _warn(f"{folder}: {len(names)} images belong to no prompt: {some_of(names)}.")


def _layouts(benchmark: Dataset) -> list[dict]:
    names = ("id", "case_id", "rows", "cols", "height", "width", "layout", "shots")
    plain = benchmark.with_format(None)
    return list(plain.select_columns([name for name in names if name in benchmark.column_names]))


def _match(files: list[Path], names: list[str | None]) -> dict[Path, tuple[str, int | None]]:
    """Match files to prompts by name: file -> (name, number of the panel or `None` for a grid)."""
    # A name that is the plain id of one prompt and the written id of another belongs to the latter
    known = {name: name for name in names if name} | {file_name(name): name for name in names if name}
    matches: dict[Path, tuple[str, int | None]] = {}
    for path in files:
        head, _, tail = path.stem.rpartition("_")
        is_panel = head in known and re.fullmatch(r"[0-9]+", tail) is not None
        if is_panel and path.stem in known:
            raise ValueError(f"{path} can be the grid of one prompt or a panel of {known[head]!r}. Rename the files.")
        if is_panel or path.stem in known:
            matches[path] = (known[head], int(tail)) if is_panel else (known[path.stem], None)
    return matches


def _checked(
    sets: dict[str, ImageSet], benchmark: Dataset, height: int | None = None, width: int | None = None
) -> FoundImages:
    """Check the sizes in the headers: a wrong file is found before hours of scoring."""
    rows: Mapping[str, dict[str, Any]] = {row["id"]: row for row in _layouts(benchmark)}
    for set_ in sets.values():
        for file in filter(None, set_.files):
            size, row = image_file_size(file), rows[set_.prompt_id]  # (height, width)
            expected: list[Any] = [height or row.get("height"), width or row.get("width")]
            if len(set_.files) > 1:
                continue
            try:
                panel_size(*size, set_.rows, set_.cols)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
            if None in expected:
                continue
            # Of separate images a row has the size of one, and the file shows them side by side
            expected[1] *= row["cols"] if row.get("layout") == SEPARATE else 1
            aspect = (size[1] / size[0]) / (expected[1] / expected[0])
            if not 1 / (1 + _ASPECT_TOLERANCE) <= aspect <= 1 + _ASPECT_TOLERANCE:
                raise ValueError(
                    f"{file} has {size[0]}x{size[1]} pixels: the shape differs from the {expected[0]}x{expected[1]} "
                    f"(height x width) of {row['id']!r}. Is it another prompt's?"
                )
    return FoundImages(sets)


def image_file_size(path: Path) -> tuple[int, int]:
    """Read the size of an image from its header."""
    with reading(str(path), "Replace it"), open(path, "rb") as file:
        return decoded_size(file)[::-1]


def load_image_file(path: Path, convert: Callable[[Image], Image] | None = None) -> Image:
    """Read an image to its end, in RGB or as `convert` makes it."""
    with reading(str(path), "Replace it. Finished scores are kept"), PIL.Image.open(path) as image:
        image.load()
        return to_rgb(image, str(path)) if convert is None else convert(image)


def write_panel_files(images: FoundImages, benchmark: Dataset, folder: str | Path) -> list[Path]:
    """
    Write each panel under the name that the benchmark's own script expects: `<case id or id>_<number>.png`, or, of stories,
    `<id>/shots/shot_<number>.png` below what ViStoryBench asks for: method, mode, language and time.
    """
    rows = {row["id"]: row for row in _layouts(benchmark)}
    names = {key: rows[set_.prompt_id].get("case_id") or set_.prompt_id for key, set_ in images.sets.items()}
    if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
        raise ValueError(f"Several sets, as of 2 seeds, are {twice[0]!r}: panels would overwrite one another.")
    written = []
    for key, set_ in images.sets.items():
        for panel_number, panel in enumerate(set_.panels()):
            if panel is not None:
                # What would leave the directory is written in another way, see `file_name`
                name, shots = file_name(names[key]), rows[set_.prompt_id].get("shots")
                # The time is that of no run: the same call writes the same files
                story = f"{_STORY_RUN}/{name}/shots/shot_{shots[panel_number]:02}.png" if shots is not None else None
                written.append(Path(folder) / (story or f"{name}_{panel_number:04}.png"))
                write_atomically(written[-1], to_png(panel))
    return written
