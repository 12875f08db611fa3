# SPDX-License-Identifier: Apache-2.0
"""Find the image sets of a system by prompt, check them, and read their panels."""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.grids import panel_size, split_grid
from ..data.image_sets import SEPARATE
from ..utils.files import file_name, to_png, write_atomically
from ..utils.images import to_rgb
from ..utils.text import some_of


if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image


logger = logging.getLogger(__name__)

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp")
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
    def is_grid(self) -> bool:
        """Whether one file has all panels."""
        return len(self.files) == 1

    @property
    def num_panels(self) -> int:
        """Number of panels, missing ones included."""
        return self.rows * self.cols

    @property
    def missing(self) -> list[int]:
        """Numbers of the missing panels, from 0."""
        files = self.files * (self.num_panels if self.is_grid else 1)
        return [number for number, file in enumerate(files) if file is None]

    def panels(self) -> list["Image | None"]:
        """Read the panels in RGB, row by row; `None` for a missing one."""
        if not self.is_grid:
            return [None if file is None else load_image_file(file) for file in self.files]
        if self.files[0] is None:
            return [None] * self.num_panels
        image = load_image_file(self.files[0])
        try:
            return [*split_grid(image, self.rows, self.cols)]
        except ValueError as error:
            raise ValueError(f"{self.files[0]}: {error}") from error

    def digest(self) -> str:
        """Compute the SHA-256 of the files, missing ones included."""
        parts = [b"missing" if file is None else hashlib.sha256(file.read_bytes()).digest() for file in self.files]
        return hashlib.sha256(b"".join(parts)).hexdigest()


@dataclass
class FoundImages:
    """All images of a system: `sets` by key, in the order of prompts and seeds, incomplete ones included."""

    sets: dict[str, ImageSet]
    unknown: list[str] = field(default_factory=list)  # file names that belong to no prompt
    mixed_sizes: list[str] = field(default_factory=list)  # keys of sets whose panels differ in size

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digest of each set, from the first access on."""
        return {key: one.digest() for key, one in self.sets.items()}

    @property
    def missing(self) -> dict[str, list[int]]:
        """Numbers of the missing panels of each incomplete set."""
        return {key: one.missing for key, one in self.sets.items() if one.missing}

    def check_complete(self) -> None:
        """Refuse missing images."""
        if self.missing:
            raise ValueError(
                f"{len(self.missing)} of {len(self.sets)} sets lack images: {some_of(list(self.missing))}. A mean over the "
                "others would favor a system that leaves out what is hard. Add them, or count them as 0 (`missing='zero'`)."
            )


def find_generated_sets(
    folder: str | Path, benchmark: "Dataset", seeds: list[int], height: int | None = None, width: int | None = None
) -> FoundImages:
    """Find the grids that [`~paco_trl.dataset_building.generate_grids`] generated, of the rows' size or of the given one."""
    sets = {}
    for row in _layouts(benchmark):
        for seed in seeds:
            path, key = Path(folder) / file_name(row["id"]) / f"{seed}.png", f"{row['id']}/{seed}"
            sets[key] = ImageSet(key, row["id"], seed, row["rows"], row["cols"], (path if path.is_file() else None,))
    return _checked(FoundImages(sets), benchmark, height, width)


def find_image_sets(folder: str | Path, benchmark: "Dataset") -> FoundImages:
    """
    Find images that were generated elsewhere: `<name>.png` is a grid, `<name>_<number>.png` a panel.

    The name is the prompt's `id`, plain or as [`~paco_trl.utils.files.file_name`] writes it, or its `case_id`, as in files for the benchmark's own script (`0001_0003_0000.png`):
    whichever more of the files have. It must match exactly: `0001_0003_0001.png` is not an image of the prompt `0001`. The
    numbers of the panels begin with 0 or 1, the same in the full directory.

    Args:
        folder (`str` or `Path`):
            Directory of `.png`, `.jpg`, `.jpeg` or `.webp` files.
        benchmark ([`~datasets.Dataset`]):
            Image-set prompts with `id` and, where known, `case_id`.

    Returns:
        [`FoundImages`].
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a directory of images.")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS and path.is_file())
    rows = _layouts(benchmark)
    columns = [name for name in ("id", "case_id") if name in benchmark.column_names]
    matched = {column: _match(files, [row[column] for row in rows]) for column in columns}
    column = max(columns, key=lambda name: len(matched[name]))
    found = matched[column]
    if not found:
        ids = " or ".join(repr(rows[0][name]) for name in columns if rows[0][name])
        raise ValueError(
            f"None of the {len(files)} images directly in {folder} ({', '.join(EXTENSIONS)}) belongs to a prompt of the "
            f"benchmark: `<id>.png` is a grid and `<id>_<number>.png` a panel, with ids such as {ids}."
        )
    if any(len(other) == len(found) and other != found for other in matched.values()):
        raise ValueError(
            f"The image names in {folder}, such as {files[0].name!r}, can be ids or case ids. Rename the files."
        )

    images: dict[str, dict[int | None, list[Path]]] = {}
    for path, (name, number) in found.items():
        images.setdefault(name, {}).setdefault(number, []).append(path)
    start = _first_number(images, {row[column]: row["rows"] * row["cols"] for row in rows}, folder)
    sets = {}
    for row in rows:
        key, of_prompt = f"{row['id']}/0", _files_of(row, row[column], images.get(row[column], {}), start)
        sets[key] = ImageSet(key, row["id"], 0, row["rows"], row["cols"], of_prompt)
    unknown = [path.name for path in files if path not in found]
    if unknown and _is_main_process():
        logger.warning(f"{len(unknown)} of {len(files)} images in {folder} belong to no prompt: {some_of(unknown)}.")
    return _checked(FoundImages(sets, unknown), benchmark)


def _layouts(benchmark: "Dataset") -> list[dict]:
    names = ("id", "case_id", "rows", "cols", "height", "width", "layout", "shots")
    plain = benchmark.with_format(None)
    return list(plain.select_columns([name for name in names if name in benchmark.column_names]))


def _match(files: list[Path], names: list[str | None]) -> dict[Path, tuple[str, int | None]]:
    """Match files to prompts by name: file -> (name, number of the panel or `None` for a grid)."""
    # A name that is the plain id of one prompt and the written id of another belongs to the latter
    known: dict[str, str] = {}
    found: dict[Path, tuple[str, int | None]] = {}
    for written in (lambda name: name, file_name):
        known |= {written(name): name for name in names if name}
    for path in files:
        readings: list[tuple[str, int | None]] = [(known[path.stem], None)] if path.stem in known else []
        head, _, tail = path.stem.rpartition("_")
        if head in known and re.fullmatch(r"[0-9]+", tail):
            readings.append((known[head], int(tail)))
        if len(readings) == 2:
            raise ValueError(
                f"{path} can be the grid of {readings[0][0]!r} or panel {readings[1][1]} of {readings[1][0]!r}. Rename the files."
            )
        if readings:
            found[path] = readings[0]
    return found


def _first_number(images: dict[str, dict[int | None, list[Path]]], counts: dict[str, int], folder: Path) -> int:
    """Return 0 or 1, from which the panels are numbered."""
    numbered = [(name, number) for name, numbers in images.items() for number in numbers if number is not None]
    if not numbered or any(number == 0 for _, number in numbered):
        return 0
    if any(number == counts[name] for name, number in numbered):
        return 1
    raise ValueError(
        f"The panels in {folder} are numbered neither from 0 nor up to their number: add a first or a last one."
    )


def _files_of(row: dict, name: str, images: dict[int | None, list[Path]], start: int) -> tuple[Path | None, ...]:
    """Return the grid of a prompt (number `None`), or its panels."""
    for paths in images.values():
        if len(paths) > 1:
            raise ValueError(f"{paths[0]} and {paths[1].name} are one image of {name!r} in two formats. Keep one.")
    found, count = {number: paths[0] for number, paths in images.items()}, row["rows"] * row["cols"]
    numbers = sorted(number for number in found if number is not None)
    if not numbers:
        return (found.get(None),)
    if None in found:
        folder, panel = found[None].parent, found[numbers[0]].name
        raise ValueError(f"{folder} has a grid of {name!r} and images of its panels, such as {panel}. Keep one kind.")
    beyond = [number for number in numbers if not start <= number < start + count]
    if beyond:
        raise ValueError(
            f"{found[beyond[0]]} has the number {beyond[0]}, but {name!r} has {count} panels, from {start}."
        )
    return tuple(found.get(number) for number in range(start, start + count))


def _checked(
    found: FoundImages, benchmark: "Dataset", height: int | None = None, width: int | None = None
) -> FoundImages:
    """Check the sizes in the headers: a wrong file is found before hours of scoring."""
    sizes_of = {row["id"]: (height or row.get("height"), width or row.get("width")) for row in _layouts(benchmark)}
    # Of separate images a row has the size of one, and the file shows them side by side
    for row in _layouts(benchmark):
        if row.get("layout") == SEPARATE and None not in sizes_of[row["id"]]:
            sizes_of[row["id"]] = (sizes_of[row["id"]][0], sizes_of[row["id"]][1] * row["cols"])
    for key, one in found.sets.items():
        sizes = {file: image_file_size(file) for file in one.files if file is not None}  # (height, width)
        if not one.is_grid:
            found.mixed_sizes += [key] * (len(set(sizes.values())) > 1)
            continue
        for file, size in sizes.items():
            try:
                panel_size(*size, one.rows, one.cols)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
            expected: Any = sizes_of[one.prompt_id]
            aspect = 1.0 if None in expected else (size[1] / size[0]) / (expected[1] / expected[0])
            if not 1 / (1 + _ASPECT_TOLERANCE) <= aspect <= 1 + _ASPECT_TOLERANCE:
                raise ValueError(
                    f"{file} has {size[0]}x{size[1]} pixels (height x width), but the {one.rows}x{one.cols} grid of "
                    f"{one.prompt_id!r} is {expected[0]}x{expected[1]}: the shape differs. Is it another prompt's?"
                )
    if found.mixed_sizes and _is_main_process():
        logger.warning(
            f"The panels of {len(found.mixed_sizes)} sets have different sizes, like images of different prompts: "
            f"{some_of(found.mixed_sizes)}. Each is scored at the size of the question."
        )
    return found


def _is_main_process() -> bool:
    from accelerate import PartialState

    return PartialState().is_main_process


def image_file_size(path: Path) -> tuple[int, int]:
    """Read the size of an image from its header."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises all three
        raise ValueError(f"{path} is not a readable image ({error}). Replace it.") from error


def load_image_file(path: Path, convert: Callable[["Image"], "Image"] | None = None) -> "Image":
    """Read an image to its end, in RGB or as `convert` makes it."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            return to_rgb(image, str(path)) if convert is None else convert(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Replace it. Finished scores are kept.") from error


def write_panel_files(found: FoundImages, benchmark: "Dataset", folder: str | Path) -> list[Path]:
    """
    Write each panel under the name that the benchmark's own script expects: `<case id or id>_<number>.png`, or, of stories,
    `<id>/shots/shot_<number>.png` below what ViStoryBench asks for: method, mode, language and time.
    """
    # What would leave the directory is written in another way, see `file_name`
    seeds = {one.seed for one in found.sets.values()}
    if len(seeds) > 1:
        raise ValueError(f"There are {len(seeds)} seeds, but names of panel files have no place for one. Use one.")
    rows = {row["id"]: row for row in _layouts(benchmark)}
    names = {name: row.get("case_id") or name for name, row in rows.items()}
    twice = [name for name, count in Counter(names[one.prompt_id] for one in found.sets.values()).items() if count > 1]
    if twice:
        raise ValueError(f"Several prompts have the `case_id` {twice[0]!r}: their panels would overwrite one another.")
    written = []
    for one in found.sets.values():
        for number, panel in enumerate(one.panels()):
            if panel is not None:
                name, shots = file_name(names[one.prompt_id]), rows[one.prompt_id].get("shots")
                # The time is that of no run: the same call writes the same files
                path = (
                    f"{name}_{number:04}.png"
                    if shots is None
                    else f"{_STORY_RUN}/{name}/shots/shot_{shots[number]:02}.png"
                )
                written.append(Path(folder) / path)
                write_atomically(written[-1], to_png(panel))
    return written
