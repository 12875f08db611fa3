# SPDX-License-Identifier: Apache-2.0
"""Edited images: generate them with a pipeline, or find those that were made elsewhere."""

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.columns import column_types
from ..data.edit_prompts import check_edit_columns
from ..data.source_images import SourceImages
from ..utils.files import file_name
from ..utils.generation import check_call, generate_missing, name_prompts, read_image, warn_of_flat
from ..utils.processes import wait_for_all
from ..utils.stage_folder import StageFolder
from ..utils.text import some_of
from .image_sets import EXTENSIONS, FoundImages, ImageSet, image_file_size


if TYPE_CHECKING:
    from datasets import Dataset
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


logger = logging.getLogger(__name__)

_CALL = ("image", "prompt", "generator")
_LARGEST_SEED = 2**63 - 1  # of a column of int64
# Pixels of an edited image whose row names no size, where the pipeline leaves that to its caller
_AREA = 1024 * 1024
# The benchmark's own example puts a copy of the source next to each edit, under this name
_SOURCE_COPY = "_SRCIMG"


def edit_keys(prompts: "Dataset") -> list[str]:
    """Name each editing prompt: `"<language>/<id>"`, or the id alone without the column `language`."""
    check_edit_columns(prompts, "prompts")
    return name_prompts(prompts, "edits", ("language", "id"))


def generate_edits(
    pipeline: "DiffusionPipeline", prompts: "Dataset", folder: StageFolder, seed: int = 0, **call_arguments: Any
) -> "Dataset":
    """
    Edit the source of each prompt once, on one process or several (`accelerate launch`).

    Each image starts from the noise of the seed, generated on the CPU, so that two models edit from the same noise on any
    device. Complete files are kept. Files are `images/<language>/<id>.png`, or `images/<id>.png` without the column
    `language`, with the id as [`~paco_trl.utils.files.file_name`] writes it.

    The size is that of the row (`height` and `width`) or of `call_arguments`, and otherwise the pipeline's choice for the
    source. FLUX.1-Kontext would generate squares of about a megapixel: it gets the aspect ratio of the source, with the
    area of its argument `max_area`.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Any pipeline that edits an image (`image`) as a text (`prompt`) describes.
        prompts ([`~datasets.Dataset`]):
            Editing prompts with `id` and, where known, `language`.
        folder ([`~paco_trl.dataset_building.StageFolder`]):
            Directory of the edits. Its settings should have everything that the images depend on.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the noise.
        **call_arguments:
            Further arguments of the pipeline's call, such as `num_inference_steps`, `guidance_scale` or
            `true_cfg_scale`.

    Returns:
        [`~datasets.Dataset`]: the edits in the order of the prompts: `id`, `language` if the prompts have it, `seed` and
        `image`, a path. It is saved in the directory too, with a report.
    """
    import torch
    from accelerate import PartialState
    from datasets import Dataset

    if not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(f"`seed` is {seed}. It must be from 0 to {_LARGEST_SEED}.")
    advice = "Choose an editing pipeline, such as FLUX.1-Kontext or Qwen-Image-Edit."
    check_call(pipeline, _CALL, f"edit a given image as a text describes, from given noise. {advice}")
    height, width = call_arguments.get("height"), call_arguments.get("width")
    if (height is None) != (width is None):
        raise ValueError(f"`height` is {height} and `width` {width}. Give both, or neither for the row's or source's.")
    keys = edit_keys(prompts)
    sources = SourceImages(prompts, "the prompts")
    _check_sources(pipeline, sources, keys)
    names = [name for name in ("id", "language", "prompt", "height", "width") if name in prompts.column_names]
    rows = list(prompts.with_format(None).select_columns(names))
    has_language = "language" in names
    places = [folder.images / file_name(row["language"]) if has_language else folder.images for row in rows]
    paths = [{n: place / f"{file_name(rows[n]['id'])}.png"} for n, place in enumerate(places)]

    def read(number: int, place: int) -> "Image | None":
        return read_image(paths[number][place])

    def generate(number: int) -> dict[int, "Image"]:
        arguments = call_arguments | _size_arguments(pipeline, rows[number], sources.sizes(number), call_arguments)
        images, noise = sources.load(number), torch.Generator().manual_seed(seed)
        source = images[0] if len(images) == 1 else images
        return {number: pipeline(image=source, prompt=rows[number]["prompt"], generator=noise, **arguments).images[0]}

    flat = [keys[row] for row in sorted(generate_missing(pipeline, paths, read, generate, "Generating edits"))]
    columns = {"id": [row["id"] for row in rows], "seed": [seed] * len(rows)}
    columns["image"] = [str(path) for of_row in paths for path in of_row.values()]
    columns |= {"language": [row["language"] for row in rows]} if has_language else {}
    kinds = {"id": "string", "seed": "int64", "image": "image", "language": "string"}
    dataset = Dataset.from_dict(columns, features=column_types(**{name: kinds[name] for name in columns}))
    state = PartialState()
    if state.is_main_process:
        warn_of_flat(flat, len(keys), "edits")
        folder.finish(dataset, {"edits": len(dataset), "seed": seed, "flat edits": flat})
    wait_for_all()
    return dataset


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


def _check_sources(pipeline: "DiffusionPipeline", sources: SourceImages, keys: list[str]) -> None:
    from ..rollout.families import FAMILIES

    name = type(pipeline).__name__
    family = FAMILIES[name]() if name in FAMILIES else None
    most = family.max_images if family is not None else None
    if most is not None and sources.max_count > most:
        raise ValueError(
            f"The prompt {keys[sources.row_with_most]!r} has {sources.max_count} source images, but {name} takes at most "
            f"{most}: `load_edit_prompts(..., max_images={most})`."
        )
    for row, key in enumerate(keys):
        sizes = sources.sizes(row)  # finds unreadable sources of any pipeline
        try:
            for width, height in sizes:
                if family is not None:
                    family.check_image_size(width, height)
        except ValueError as error:
            raise ValueError(f"The prompt {key!r}: {error}") from error


def _size_arguments(
    pipeline: "DiffusionPipeline", row: dict[str, Any], sizes: list[tuple[int, int]], call_arguments: dict[str, Any]
) -> dict[str, int]:
    """Return the size arguments of a row, other than those that were given for all rows."""
    from ..rollout.families import FAMILIES

    height, width = (call_arguments.get(name) or row.get(name) for name in ("height", "width"))
    if "max_area" not in inspect.signature(type(pipeline).__call__).parameters:
        return {} if height is None or width is None else {"height": height, "width": width}
    # The pipeline derives the size from an area, by default of a megapixel, whatever height and width are
    if height is None or width is None:
        family = FAMILIES["FluxKontextPipeline"]()
        height, width = family.edited_size(pipeline, sizes, call_arguments.get("max_area") or _AREA)
    elif "max_area" in call_arguments:
        return {"height": height, "width": width}
    return {"height": height, "width": width, "max_area": height * width}


def _places(folder: Path, row: dict[str, Any]) -> Iterator[Path]:
    """List the directories where the edit of a row may be."""
    bases = [folder, folder / "images"]
    if row.get("task_type"):
        bases.append(folder / "fullset" / file_name(row["task_type"]))
    for base in bases:
        yield base / file_name(row["language"]) if "language" in row else base
