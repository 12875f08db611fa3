# SPDX-License-Identifier: Apache-2.0
"""Images of a system by prompt: lookup, checks, and reading of panels."""

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
from ..utils.text import join_first


logger = logging.getLogger(__name__)

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp")
# Suffix of the copies of sources next to edits in GEdit-Bench's example
_SOURCE_COPY = "_SRCIMG"
# Method, mode, language and time of a run, as ViStoryBench names its directories
_STORY_RUN = "paco_trl/base/en/20000101_000000"
# Relative tolerance of the aspect ratio of a grid: sides are rounded
_ASPECT_TOLERANCE = 0.02


@dataclass(frozen=True)
class ImageSet:
    """Images of one prompt and seed: a grid, or one file per panel, row by row (`None` if missing)."""

    key: str  # "<prompt id>/<seed>"
    prompt_id: str
    seed: int
    rows: int
    cols: int
    files: tuple[Path | None, ...]

    @property
    def paths(self) -> list[str | None]:
        """Return the files as texts, for results."""
        return [None if file is None else str(file) for file in self.files]

    @property
    def missing(self) -> list[int]:
        """Return the numbers of the missing panels, from 0."""
        files = self.files * (self.rows * self.cols if len(self.files) == 1 else 1)
        return [number for number, file in enumerate(files) if file is None]

    def panels(self) -> list[Image | None]:
        """Read the panels in RGB, row by row, `None` for missing ones."""
        if len(self.files) > 1:
            return [None if file is None else load_image_file(file) for file in self.files]
        if self.files[0] is None:
            return [None for _ in range(self.rows * self.cols)]
        return [*split_grid(load_image_file(self.files[0]), self.rows, self.cols)]

    def digest(self) -> str:
        """Compute the SHA-256 of the files, including which are missing."""
        digests = [b"missing" if file is None else hashlib.sha256(file.read_bytes()).digest() for file in self.files]
        return hashlib.sha256(b"".join(digests)).hexdigest()


@dataclass
class SystemImages:
    """All images of a system: `sets` by key, in the order of prompts and seeds, including incomplete ones."""

    sets: dict[str, ImageSet]

    @cached_property
    def digests(self) -> dict[str, str]:
        """Return the digest of each set, cached."""
        return {key: set_.digest() for key, set_ in self.sets.items()}

    @property
    def missing(self) -> dict[str, list[int]]:
        """Return the numbers of missing panels, by incomplete set."""
        return {key: set_.missing for key, set_ in self.sets.items() if set_.missing}

    def check_complete(self) -> None:
        """Reject missing images."""
        if self.missing:
            raise ValueError(
                f"{len(self.missing)} of {len(self.sets)} sets lack images: {join_first(list(self.missing))}. The mean "
                "of the rest would flatter. Add them, or count them as 0 (`missing='zero'`)."
            )


def find_generated_sets(
    folder: str | Path, benchmark: Dataset, seeds: list[int], height: int | None = None, width: int | None = None
) -> SystemImages:
    """Find the grids of [`~paco_trl.dataset_building.generate_grids`], and check their size, by default a row's."""
    sets = {}
    for row in _layouts(benchmark):
        for seed in seeds:
            path = Path(folder) / file_name(row["id"]) / f"{seed}.png"
            key = f"{row['id']}/{seed}"
            sets[key] = ImageSet(key, row["id"], seed, row["rows"], row["cols"], (path if path.is_file() else None,))
    return _check_sizes(sets, benchmark, height, width)


def find_image_sets(folder: str | Path, benchmark: Dataset) -> SystemImages:
    """
    Find images that were generated elsewhere: `<name>.png` is a grid, `<name>_<number>.png` a panel.

    The name is the prompt's `id`, plain or encoded by [`~paco_trl.utils.files.file_name`], or its `case_id`, as in
    the benchmark's script (`0001_0003_0000.png`): the column that matches more files. Panels are numbered from 0 or 1,
    consistently in the directory.

    Args:
        folder (`str` or `Path`):
            Directory of `.png`, `.jpg`, `.jpeg` or `.webp` files.
        benchmark ([`~datasets.Dataset`]):
            Image-set prompts with `id` and, optionally, `case_id`.

    Returns:
        [`SystemImages`].
    """
    files = _image_files(Path(folder))
    rows = _layouts(benchmark)
    columns = [name for name in ("id", "case_id") if name in benchmark.column_names]
    matches_by_column = {column: _match(files, [row[column] for row in rows]) for column in columns}
    column = max(columns, key=lambda name: len(matches_by_column[name]))
    matches = matches_by_column[column]
    counts = {row[column]: row["rows"] * row["cols"] for row in rows}
    if not matches:
        raise ValueError(
            f"None of the {len(files)} images directly in {folder} belongs to a prompt. Name a grid `<id>.png` and a "
            f"panel `<id>_<number>.png`, with ids such as {rows[0][column]!r}."
        )
    images: dict[str, dict[int | None, Path]] = {}
    for path, (name, panel_number) in matches.items():
        if (same_image := images.setdefault(name, {}).setdefault(panel_number, path)) != path:
            raise ValueError(f"{same_image} and {path.name} are the same image of {name!r} in two formats. Keep one.")
    panel_numbers = [
        (name, number) for name, panel_files in images.items() for number in panel_files if number is not None
    ]
    first_number = int(bool(panel_numbers) and all(number > 0 for _, number in panel_numbers))
    if first_number == 1 and not any(number == counts[name] for name, number in panel_numbers):
        raise ValueError(f"Panels in {folder} are numbered neither from 0 nor to the last. Add a first or last one.")
    sets = {}
    for row in rows:
        panel_files = images.get(row[column], {})
        count = row["rows"] * row["cols"]
        key = f"{row['id']}/0"
        numbers = range(first_number, first_number + count) if panel_files.keys() - {None} else [None]
        if extra_files := [path for number, path in panel_files.items() if number not in numbers]:
            raise ValueError(
                f"{extra_files[0]} is no image of {row[column]!r}, which is one grid or has {count} panels, from "
                f"{first_number} on."
            )
        sets[key] = ImageSet(key, row["id"], 0, row["rows"], row["cols"], tuple(map(panel_files.get, numbers)))
    _warn_about_unknown([path.name for path in files if path not in matches], Path(folder))
    return _check_sizes(sets, benchmark)


def find_edits(folder: str | Path, prompts: Dataset) -> SystemImages:
    """
    Find the edited image of each prompt, by its id.

    A file's name without extension must be the id, plain or as written by [`generate_edits`]. The searched directories
    are `<folder>/<language>/`, `<folder>/images/<language>/` ([`generate_edits`]) and
    `<folder>/fullset/<task_type>/<language>/` (GEdit-Bench's script), without `<language>` if there is no such column.
    Copies of sources (`<id>_SRCIMG`) are skipped.

    Args:
        folder (`str` or `Path`):
            Directory of `.png`, `.jpg`, `.jpeg` or `.webp` files.
        prompts ([`~datasets.Dataset`]):
            Editing prompts with `id` and, optionally, `language` and `task_type`.

    Returns:
        [`SystemImages`], each edit a set of one panel. Prompts without an image, and images without a prompt, are
        logged.
    """
    folder = Path(folder).expanduser().absolute()
    names = [name for name in ("id", "language", "task_type") if name in prompts.column_names]
    rows = dict(zip(edit_keys(prompts), prompts.with_format(None).select_columns(names), strict=True))
    # A name that is the plain id of one prompt and the encoded id of another belongs to the latter
    key_by_name = {
        (directory, name_of(row["id"])): key
        for name_of in (str, file_name)
        for key, row in rows.items()
        for directory in _directories(folder, row)
    }
    edits: dict[str, Path] = {}
    unknown_files = []
    for directory in dict.fromkeys(directory for directory, _ in key_by_name):
        for path in _image_files(directory) if directory.is_dir() else ():
            key = key_by_name.get((directory, path.stem))
            if key is None:
                is_source = (directory, path.stem.removesuffix(_SOURCE_COPY)) in key_by_name
                unknown_files += [] if is_source else [str(path.relative_to(folder))]
                continue
            if edits.setdefault(key, path) != path:
                raise ValueError(f"{edits[key]} and {path} are both edits of {key!r}. Keep one of them.")
            image_file_size(path)  # detects unreadable files before a judge is queried
    if missing := [key for key in rows if key not in edits]:
        where = _directories(folder, rows[missing[0]])
        name = file_name(rows[missing[0]]["id"])
        message = (
            f"{folder}: {len(missing)} of {len(rows)} prompts have no edit: {join_first(missing)}. The first was "
            f"searched as {name}.png directly in {', '.join(map(str, where))}."
        )
        if not edits:
            raise ValueError(message)
        _warn(message)
    _warn_about_unknown(sorted(unknown_files), folder)
    return SystemImages({key: ImageSet(key, row["id"], 0, 1, 1, (edits.get(key),)) for key, row in rows.items()})


def _directories(folder: Path, row: Mapping[str, Any]) -> list[Path]:
    bases = [folder, folder / "images"]
    bases += [folder / "fullset" / file_name(row["task_type"])] if row.get("task_type") else []
    return [base / file_name(row["language"]) if "language" in row else base for base in bases]


def _image_files(folder: Path) -> list[Path]:
    # Hidden files may be incomplete
    paths = (path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS and not path.name.startswith("."))
    return sorted(filter(Path.is_file, paths))


def _warn(message: str) -> None:
    from accelerate import PartialState

    if PartialState().is_main_process:
        logger.warning(message)


def _warn_about_unknown(names: list[str], folder: Path) -> None:
    if names:
        _warn(f"{folder}: {len(names)} images belong to no prompt: {join_first(names)}.")


def _layouts(benchmark: Dataset) -> list[dict]:
    names = ("id", "case_id", "rows", "cols", "height", "width", "layout", "shots")
    plain = benchmark.with_format(None)
    return list(plain.select_columns([name for name in names if name in benchmark.column_names]))


def _match(files: list[Path], names: list[str | None]) -> dict[Path, tuple[str, int | None]]:
    """Match files to prompts: file -> (name, panel number, or `None` for a grid)."""
    # A name that is the plain id of one prompt and the encoded id of another belongs to the latter
    key_by_name = {name: name for name in names if name} | {file_name(name): name for name in names if name}
    matches: dict[Path, tuple[str, int | None]] = {}
    for path in files:
        prefix, _, number = path.stem.rpartition("_")
        is_panel = prefix in key_by_name and re.fullmatch(r"[0-9]+", number) is not None
        if is_panel and path.stem in key_by_name:
            raise ValueError(
                f"{path} can be the grid of one prompt or a panel of {key_by_name[prefix]!r}. Rename the files."
            )
        if is_panel or path.stem in key_by_name:
            matches[path] = (key_by_name[prefix], int(number)) if is_panel else (key_by_name[path.stem], None)
    return matches


def _check_sizes(
    sets: dict[str, ImageSet], benchmark: Dataset, height: int | None = None, width: int | None = None
) -> SystemImages:
    """Check sizes in the headers, so that a wrong file is found before hours of scoring."""
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
            # A row of separate images has the size of one image, and the file shows all images side by side
            expected[1] *= row["cols"] if row.get("layout") == SEPARATE else 1
            aspect = (size[1] / size[0]) / (expected[1] / expected[0])
            if not 1 / (1 + _ASPECT_TOLERANCE) <= aspect <= 1 + _ASPECT_TOLERANCE:
                raise ValueError(
                    f"{file} has {size[0]}x{size[1]} pixels, another shape than the {expected[0]}x{expected[1]} "
                    f"(height x width) of {row['id']!r}. Is it another prompt's?"
                )
    return SystemImages(sets)


def image_file_size(path: Path) -> tuple[int, int]:
    """Read the size of an image from its header."""
    with reading(str(path), "Replace it"), open(path, "rb") as file:
        return decoded_size(file)[::-1]


def load_image_file(path: Path, convert: Callable[[Image], Image] | None = None) -> Image:
    """Read an image completely, in RGB or by `convert`."""
    with reading(str(path), "Replace it. Finished scores are kept"), PIL.Image.open(path) as image:
        image.load()
        return to_rgb(image, str(path)) if convert is None else convert(image)


def write_panel_files(images: SystemImages, benchmark: Dataset, folder: str | Path) -> list[Path]:
    """
    Write each panel under the name that the benchmark's script expects: `<case id or id>_<number>.png`, or for stories
    `<id>/shots/shot_<number>.png` in ViStoryBench's directories for method, mode, language and time.
    """
    rows = {row["id"]: row for row in _layouts(benchmark)}
    names = {key: rows[set_.prompt_id].get("case_id") or set_.prompt_id for key, set_ in images.sets.items()}
    if repeated_names := [name for name, count in Counter(names.values()).items() if count > 1]:
        raise ValueError(
            f"Several sets (of different seeds?) are {repeated_names[0]!r}, so their panels would overwrite one "
            "another."
        )
    paths = []
    for key, set_ in images.sets.items():
        for panel_index, panel in enumerate(set_.panels()):
            if panel is not None:
                # `file_name` encodes names that would leave the directory
                name = file_name(names[key])
                shots = rows[set_.prompt_id].get("shots")
                # With a constant time, so that the same call writes the same files
                story = f"{_STORY_RUN}/{name}/shots/shot_{shots[panel_index]:02}.png" if shots is not None else None
                paths.append(Path(folder) / (story or f"{name}_{panel_index:04}.png"))
                write_atomically(paths[-1], to_png(panel))
    return paths
