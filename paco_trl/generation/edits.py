# SPDX-License-Identifier: Apache-2.0
"""Edits of the source image of each prompt."""

import inspect
from typing import TYPE_CHECKING, Any

from ..data.columns import typed_dataset
from ..data.edit_prompts import check_edit_columns
from ..data.source_images import SourceImages
from ..utils.files import file_name
from ..utils.processes import wait_for_all
from ..utils.stage_folder import StageFolder
from .image_files import (
    ImageCall,
    check_call,
    generate_missing,
    name_prompts,
    negative_prompts_of,
    plain_prompt_arguments,
)


if TYPE_CHECKING:
    from datasets import Dataset
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

    from ..rollout import Family


_CALL = ("image", "prompt", "generator")
# Pixels of an edited image if neither its row nor the pipeline determines the size
_DEFAULT_AREA = 1024 * 1024


def edit_keys(prompts: "Dataset") -> list[str]:
    """Return the key of each editing prompt: `"<language>/<id>"`, or the id if there is no column `language`."""
    check_edit_columns(prompts, "prompts")
    return name_prompts(prompts, ("language", "id"))


def generate_edits(
    pipeline: "DiffusionPipeline", prompts: "Dataset", folder: StageFolder, seed: int = 0, **call_arguments: Any
) -> "Dataset":
    """
    Edit the source of each prompt once, on one or several processes (`accelerate launch`).

    Each image starts from the noise of the seed, generated on the CPU, so that all models and devices edit from the
    same noise. Complete files are kept. Files are `images/<language>/<id>.png`, or `images/<id>.png` if there is no
    column `language`, with the id encoded by [`~paco_trl.utils.files.file_name`].

    The size comes from `call_arguments` or the row (`height` and `width`), otherwise the pipeline chooses it by the
    source. FLUX.1-Kontext would generate squares of about a megapixel; instead it gets the aspect ratio of the source,
    with the area of its argument `max_area`.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Any pipeline that edits an image (`image`) by a text (`prompt`).
        prompts ([`~datasets.Dataset`]):
            Editing prompts with `id` and, optionally, `language`.
        folder ([`~paco_trl.dataset_building.StageFolder`]):
            Directory of the edits. Its settings should include everything that the images depend on.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the noise.
        **call_arguments:
            Further arguments of the pipeline call, for example `num_inference_steps`, `guidance_scale` or
            `true_cfg_scale`.

    Returns:
        [`~datasets.Dataset`]: the edits in the order of the prompts: `id`, `language` if the prompts have it, `seed`
        and `image` (a path). It is also saved in the directory, with a report.
    """
    import torch
    from accelerate import PartialState

    from ..rollout.families import find_family

    advice = "Choose an editing pipeline, such as FLUX.1-Kontext or Qwen-Image-Edit."
    check_call(pipeline, _CALL, f"edit a given image as a text describes, from given noise. {advice}")
    height = call_arguments.get("height")
    width = call_arguments.get("width")
    if (height is None) != (width is None):
        raise ValueError(
            f"`height` is {height} and `width` {width}. Pass both, or neither for the size of the row or source."
        )
    keys = edit_keys(prompts)
    sources = SourceImages(prompts, "the prompts")
    family = find_family(pipeline)
    check_sources(pipeline, family, sources, keys)
    names = [name for name in ("id", "language", "prompt", "height", "width") if name in prompts.column_names]
    rows = list(prompts.with_format(None).select_columns(names))
    has_language = "language" in names
    directories = [folder.images / file_name(row["language"]) if has_language else folder.images for row in rows]
    files = [directory / f"{file_name(row['id'])}.png" for directory, row in zip(directories, rows, strict=True)]
    negatives = negative_prompts_of(pipeline, family, prompts, call_arguments)
    call_arguments |= plain_prompt_arguments(pipeline)

    def generate(index: int) -> dict[str, "Image"]:
        arguments = call_arguments | _size_arguments(pipeline, rows[index], sources.sizes(index), call_arguments)
        arguments |= {} if negatives[index] is None else {"negative_prompt": negatives[index]}
        images = sources.load(index)
        noise = torch.Generator().manual_seed(seed)
        source = images[0] if len(images) == 1 else images
        return {
            keys[index]: pipeline(image=source, prompt=rows[index]["prompt"], generator=noise, **arguments).images[0]
        }

    calls = [ImageCall({key: file}, [row["prompt"]]) for key, file, row in zip(keys, files, rows, strict=True)]
    flat_edits = generate_missing(pipeline, calls, generate, "edits")
    columns = ("id", "language") if has_language else ("id",)
    values = [(*map(row.get, columns), seed, str(file)) for row, file in zip(rows, files, strict=True)]
    dataset = typed_dataset(values, **dict.fromkeys(columns, "string"), seed="int64", image="image")
    if PartialState().is_main_process:
        folder.finish(dataset, {"edits": len(dataset), "seed": seed, "flat edits": flat_edits})
    wait_for_all()
    return dataset


def check_sources(
    pipeline: "DiffusionPipeline",
    family: "Family | None",
    sources: SourceImages,
    keys: list[str],
    is_anchored: bool = False,
) -> None:
    """Check the number and sizes of source images. Anchored sets add their first panel to them."""
    name = type(pipeline).__name__
    max_images = family.max_source_images if family is not None else None
    if max_images is not None and sources.max_count + is_anchored > max_images:
        raise ValueError(
            f"The prompt {keys[sources.row_with_most]!r} has {sources.max_count} source "
            f"images{' besides its first panel' * is_anchored}, but {name} takes at most {max_images}. Leave images "
            f"out: `load_edit_prompts(..., max_images={max_images})`."
        )
    for row, key in enumerate(keys):
        sizes = sources.sizes(row)  # detects unreadable sources, whatever the pipeline
        try:
            for width, height in sizes:
                if family is not None:
                    family.check_image_size(height, width)
        except ValueError as error:
            raise ValueError(f"The prompt {key!r}: {error} Replace it, or leave the row out.") from error


def _size_arguments(
    pipeline: "DiffusionPipeline", row: dict[str, Any], sizes: list[tuple[int, int]], call_arguments: dict[str, Any]
) -> dict[str, int]:
    """Return the size arguments of a row, which complete or override the `call_arguments` of all rows."""
    from ..rollout.families import FluxKontextFamily

    height, width = (call_arguments.get(name) or row.get(name) for name in ("height", "width"))
    if "max_area" not in inspect.signature(type(pipeline).__call__).parameters:
        return {} if height is None or width is None else {"height": height, "width": width}
    # This pipeline scales any height and width to an area, which is a megapixel by default
    if height is None or width is None:
        area = call_arguments.get("max_area") or _DEFAULT_AREA
        height, width = FluxKontextFamily().edited_size(pipeline, sizes, area)
    elif "max_area" in call_arguments:
        return {"height": height, "width": width}
    return {"height": height, "width": width, "max_area": height * width}
