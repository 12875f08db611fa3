# SPDX-License-Identifier: Apache-2.0
"""Grids of panels for each prompt and seed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.columns import typed_dataset
from ..data.grids import join_grid
from ..data.image_sets import PANEL_TEMPLATE, SEPARATE, check_image_set_columns, prompts_of_row
from ..data.source_images import SourceImages
from ..plots.sample_sheet import grids_sheet
from ..utils.files import file_name
from ..utils.option_checks import check_panel_options
from ..utils.processes import wait_for_all
from ..utils.stage_folder import StageFolder
from .edits import check_sources
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


class ImageSize(NamedTuple):
    """Size of a prompt's images, and their number."""

    height: int
    width: int
    num_images: int = 1  # images of a set


class GridBatch(NamedTuple):
    """A call of the pipeline, or one per separate image, for all combinations of its prompts and seeds."""

    rows: list[int]
    seeds: list[int]
    size: ImageSize


def plan_batches(sizes: Sequence[ImageSize], seeds: Sequence[int], batch_size: int) -> list[GridBatch]:
    """Plan the calls for all prompts, given the sizes of their images, and all seeds."""
    # The plan depends on the arguments only: a resumed run must repeat the same calls, since the last bits of an image
    # depend on its batch
    chunks = [list(seeds[start : start + batch_size]) for start in range(0, len(seeds), batch_size)]
    step = max(batch_size // len(seeds), 1)
    rows_by_size: dict[ImageSize, list[int]] = {}
    for row, size in enumerate(sizes):
        rows_by_size.setdefault(size, []).append(row)
    return [
        GridBatch(rows[start : start + step], chunk, size)
        for size, rows in rows_by_size.items()
        for start in range(0, len(rows), step)
        for chunk in chunks
    ]


def generate_grids(
    pipeline: "DiffusionPipeline",
    prompts: "Dataset",
    folder: StageFolder,
    seeds: Sequence[int] = (0, 1, 2, 3),
    batch_size: int = 1,
    height: int | None = None,
    width: int | None = None,
    panel_template: str = PANEL_TEMPLATE,
    panel_generation: str = "independent",
    **call_arguments: Any,
) -> "Dataset":
    """
    Generate a grid for each prompt and seed, on one or several processes (`accelerate launch`). The grid of a set of
    separate images shows them side by side.

    An image starts from the noise of its seed, sampled on the CPU, so that a seed gives the same noise on any device.
    Interrupted runs resume automatically: a call is repeated if any of its images is missing or unreadable.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Any pipeline that generates images of a given size from text.
        prompts ([`~datasets.Dataset`]):
            Image-set prompts with `id`. As in training, their `references` are sources for pipelines that take
            several.
        folder ([`StageFolder`]):
            Directory of the stage. Its settings should include everything that the images depend on.
        seeds (`Sequence[int]`, *optional*, defaults to `(0, 1, 2, 3)`):
            Seeds of each prompt.
        batch_size (`int`, *optional*, defaults to `1`):
            Most images per call. If it is a multiple of the number of seeds, each prompt is encoded once. Always 1 for
            anchored sets.
        height (`int`, *optional*), width (`int`, *optional*):
            Size of the images in pixels. If `None`, the size in the prompt's row.
        panel_template (`str`, *optional*, defaults to `"{theme} {panel}"`), panel_generation (`str`, *optional*,
        defaults to `"independent"`):
            Options for separate images, see [`~paco_trl.PaCoGRPOConfig`].
        **call_arguments:
            Further arguments of the pipeline call, for example `num_inference_steps` or `guidance_scale`.

    Returns:
        [`~datasets.Dataset`]: the grids in the order of prompts and seeds: `id` (`"<prompt id>/<seed>"`), `prompt_id`,
        `seed`, `rows`, `cols` and `image` (a path). It is also saved in `folder`.
    """
    from accelerate import PartialState

    from ..rollout.families import Family, find_family
    from ..rollout.prompt_rows import check_panel_generation

    check_image_set_columns(prompts)
    seeds = list(seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"`seeds` is {seeds}, but must be distinct ints, at least one.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size}, but must be at least 1.")
    arguments = ("prompt", "height", "width", "num_images_per_prompt", "generator")
    check_call(pipeline, arguments, "generate grids with given sizes and seeds. Choose a text-to-image pipeline.")
    check_panel_options(panel_template, panel_generation)
    name = type(pipeline).__name__
    is_anchored = panel_generation == "anchored"
    family = find_family(pipeline)
    check_panel_generation(panel_generation, name, family or Family)
    sizes = image_sizes(prompts, height, width, _size_multiple(pipeline, family))

    ids = list(sizes)
    references = None
    if "references" in prompts.column_names and (family or Family).max_source_images > 1:  # as in training
        references = SourceImages(prompts, "the prompts", "references")
        check_sources(pipeline, family, references, ids, is_anchored)
    negatives = negative_prompts_of(pipeline, family, prompts, call_arguments)
    if references is not None or len(set(negatives)) > 1:
        batch_size = min(batch_size, len(seeds))  # the prompts of a call share source images and a negative prompt
    if is_anchored:
        batch_size = 1  # each image has its own first panel as source
    batches = plan_batches(list(sizes.values()), seeds, batch_size)
    files = {f"{name}/{seed}": folder.images / file_name(name) / f"{seed}.png" for name in ids for seed in seeds}
    columns = prompts.with_format(None).select_columns(["prompt", "rows", "cols"])[:]
    text_columns = [name for name in ("prompt", "layout", "theme", "panels") if name in prompts.column_names]
    texts = [prompts_of_row(row, panel_template) for row in prompts.with_format(None).select_columns(text_columns)]
    call_arguments |= plain_prompt_arguments(pipeline)
    calls = []
    for batch in batches:
        names = [f"{ids[row]}/{seed}" for row in batch.rows for seed in batch.seeds]
        panel_prompts = [*map(list, zip(*(texts[row] for row in batch.rows), strict=True))]
        height, width, num_images = batch.size
        calls.append(ImageCall({name: files[name] for name in names}, panel_prompts, (height, width), num_images))

    def generate(index: int) -> dict[str, "Image"]:
        batch, call = batches[index], calls[index]
        panels: list[list[Image]] = []
        negative = {} if negatives[batch.rows[0]] is None else {"negative_prompt": negatives[batch.rows[0]]}
        for panel, panel_texts in enumerate(call.prompts):
            sources = [] if references is None else references.load(batch.rows[0])
            anchors = panels[0] if is_anchored and panel else []
            family_arguments = _family_arguments(pipeline, family, batch.size, sources, anchors)
            noise = 0 if panel_generation == "shared_noise" else panel
            panels.append(_generate(pipeline, panel_texts, batch, noise, family_arguments | call_arguments | negative))
        return {
            name: images[0] if len(images) == 1 else join_grid(images, 1, len(images))
            for name, *images in zip(call.files, *panels, strict=True)
        }

    flat_grids = generate_missing(pipeline, calls, generate, "grids")
    rows = [
        (f"{name}/{seed}", name, seed, *layout, str(files[f"{name}/{seed}"]))
        for name, *layout in zip(ids, columns["rows"], columns["cols"], strict=True)
        for seed in seeds
    ]
    numbers = dict.fromkeys(("seed", "rows", "cols"), "int64")
    dataset = typed_dataset(rows, id="string", prompt_id="string", **numbers, image="image")
    if PartialState().is_main_process:
        grids_sheet(dataset, prompts, folder.path / "sample.png")
        report = {"prompts": len(prompts), "seeds": seeds, "grids": len(dataset), "flat grids": flat_grids}
        folder.finish(dataset, report)
    wait_for_all()
    return dataset


def _size_multiple(pipeline: "DiffusionPipeline", family: "Family | None") -> int:
    """Return the multiple that sizes must have, as far as the pipeline tells. Resized images are noticed later."""
    if family is not None:
        return family.size_multiple(pipeline)
    # In most pipelines this factor includes the transformer's patch size, unlike the pipeline's `vae_scale_factor`
    processor = getattr(pipeline, "image_processor", None)
    return processor.config.vae_scale_factor if processor is not None else getattr(pipeline, "vae_scale_factor", 1)


def image_sizes(
    prompts: "Dataset", height: int | None, width: int | None, multiple: int | None = None
) -> dict[str, ImageSize]:
    """Check and return the size and the number of each prompt's images. Sizes must be multiples of `multiple`."""
    from ..rollout.resolution import check_inference_size

    names = [name for name in ("rows", "cols", "height", "width", "layout") if name in prompts.column_names]
    sizes = {}
    for name, row in zip(name_prompts(prompts), prompts.with_format(None).select_columns(names), strict=True):
        size = (row.get("height") if height is None else height, row.get("width") if width is None else width)
        where = f"the prompt {name!r}"
        if not all(type(value) is int for value in size):
            raise ValueError(f"The height and width of {where} are {size}. Pass them as columns or arguments.")
        is_separate = row.get("layout") == SEPARATE
        rows, cols = (1, 1) if is_separate else (row["rows"], row["cols"])
        check_inference_size(*size, rows, cols, multiple, where)
        sizes[name] = ImageSize(*size, row["cols"] if is_separate else 1)
    return sizes


def _family_arguments(
    pipeline: "DiffusionPipeline",
    family: "Family | None",
    size: ImageSize,
    references: list["Image"],
    anchors: list["Image"],
) -> dict[str, Any]:
    """Return the arguments that a pipeline's family adds for the size and source images of a batch."""
    if family is None:
        return {}
    images = references + [family.prepare_panel(pipeline, image) for image in anchors]
    arguments = family.call_arguments(size.height, size.width, 0.0, images)
    return {name: arguments[name] for name in ("max_area", "image", "_auto_resize") if name in arguments}


def _generate(
    pipeline: "DiffusionPipeline", texts: Sequence[str], batch: GridBatch, panel: int, call_arguments: dict[str, Any]
) -> list["Image"]:
    """Call the pipeline once and return its images, prompt by prompt. Noise depends on the seed and the panel."""
    import torch

    from ..rollout import keyed_generator

    height, width, _ = batch.size
    arguments = dict(call_arguments)
    if isinstance(arguments.get("negative_prompt"), str):  # some pipelines do not repeat a single one
        arguments["negative_prompt"] = [arguments["negative_prompt"]] * len(batch.rows)
    images = pipeline(
        prompt=list(texts),
        height=height,
        width=width,
        num_images_per_prompt=len(batch.seeds),
        generator=[
            keyed_generator(seed, panel) if panel else torch.Generator().manual_seed(seed)
            for _ in batch.rows
            for seed in batch.seeds
        ],
        **arguments,
    ).images
    for image in images:
        if image.size != (width, height):
            raise ValueError(
                f"A grid has {image.height}x{image.width} pixels (height x width) instead of {height}x{width}. Choose a "
                f"size that {type(pipeline).__name__} does not change."
            )
    return images
