# SPDX-License-Identifier: Apache-2.0
"""Stage 2: a diffusers pipeline generates a grid of panels for each prompt with each seed."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.columns import column_types
from ..data.image_sets import check_image_set_columns
from ..utils.files import file_name
from ..utils.generation import check_call, generate_missing, name_prompts, read_image, warn_of_flat
from ..utils.stage_folder import StageFolder
from .sample_sheet import grids_sheet


if TYPE_CHECKING:
    from datasets import Dataset
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


_CALL = ("prompt", "height", "width", "num_images_per_prompt", "generator")
_LARGEST_SEED = 2**63 - 1  # of a column of int64


class GridBatch(NamedTuple):
    """One call of the pipeline: each of its prompts with each of its seeds."""

    rows: list[int]
    seeds: list[int]
    height: int
    width: int


def plan_batches(sizes: Sequence[tuple[int, int]], seeds: Sequence[int], batch_size: int) -> list[GridBatch]:
    """Plan the calls that generate all prompts with all seeds."""
    # By the arguments alone: the last bits of an image depend on its batch, and a resumed run must make the same calls
    chunks = [list(seeds[start : start + batch_size]) for start in range(0, len(seeds), batch_size)]
    step = max(batch_size // len(seeds), 1)
    rows_of: dict[tuple[int, int], list[int]] = {}
    for row, size in enumerate(sizes):
        rows_of.setdefault(size, []).append(row)
    return [
        GridBatch(rows[start : start + step], chunk, *size)
        for size, rows in rows_of.items()
        for start in range(0, len(rows), step)
        for chunk in chunks
    ]


def draw_grids(
    pipeline: "DiffusionPipeline",
    prompts: "Dataset",
    folder: StageFolder,
    seeds: Sequence[int] = (0, 1, 2, 3),
    batch_size: int = 1,
    height: int | None = None,
    width: int | None = None,
    **call_arguments: Any,
) -> "Dataset":
    """
    Generate a grid for each prompt with each seed, on one process or several (`accelerate launch`).

    An image starts from the noise of its seed, sampled on the CPU, so that a seed gives the same noise on any device.
    Interrupted runs resume automatically: a call is repeated if one of its images is missing or cannot be read.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Any pipeline that generates images of a given size from text.
        prompts ([`~datasets.Dataset`]):
            Image-set prompts with `id`.
        folder ([`StageFolder`]):
            Folder of the stage. Its settings should have all that the images depend on.
        seeds (`Sequence[int]`, *optional*, defaults to `(0, 1, 2, 3)`):
            Seeds of each prompt.
        batch_size (`int`, *optional*, defaults to `1`):
            Images of a call at most. With a multiple of the number of seeds, each prompt is encoded once.
        height (`int`, *optional*), width (`int`, *optional*):
            Size of the images in pixels; that of the prompt's row if `None`.
        **call_arguments:
            Further arguments of the pipeline's call, such as `num_inference_steps`, `guidance_scale` or
            `negative_prompt`.

    Returns:
        [`~datasets.Dataset`]: the grids in the order of the prompts, then of the seeds: `id` (`"<prompt id>/<seed>"`),
        `prompt_id`, `seed`, `rows`, `cols` and `image`, a path. Also saved in the folder, with a report and
        `sample.png`.

    Raises:
        ValueError: If prompts, ids, seeds, sizes or the pipeline cannot be used (before anything is generated), or an
        image has another size than requested.
    """
    from accelerate import PartialState

    check_image_set_columns(prompts)
    ids = name_prompts(prompts, "grids")
    seeds = _check_seeds(seeds)
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size!r}. It must be an int of at least 1.")
    purpose = "generate grids of a given size with given seeds. Choose a text-to-image pipeline."
    check_call(pipeline, _CALL, purpose)
    sizes = _sizes(prompts, ids, height, width, _size_multiple(pipeline))

    state = PartialState()
    batches = plan_batches(sizes, seeds, batch_size)
    paths = [{(row, seed): _path(folder, ids[row], seed) for row in b.rows for seed in b.seeds} for b in batches]
    texts = prompts.with_format(None).select_columns("prompt")[:]["prompt"]

    def read(number: int, place: tuple[int, int]) -> "Image | None":
        return read_image(paths[number][place], (batches[number].width, batches[number].height))

    def generate(number: int) -> dict[tuple[int, int], "Image"]:
        return _generate(pipeline, texts, ids, batches[number], call_arguments)

    flat = generate_missing(paths, read, generate, "Generating grids")

    dataset = _make_dataset(prompts, ids, seeds, folder)
    if state.is_main_process:
        flat_ids = [f"{ids[row]}/{seed}" for row, seed in sorted(flat, key=lambda f: (f[0], seeds.index(f[1])))]
        warn_of_flat(flat_ids, len(dataset), "grids")
        grids_sheet(dataset, prompts, folder.path / "sample.png")
        folder.finish(dataset, _report(dataset, len(prompts), seeds, sizes, flat_ids))
    state.wait_for_everyone()
    return dataset


def _check_seeds(seeds: Sequence[int]) -> list[int]:
    seeds = list(seeds)
    if not seeds:
        raise ValueError("`seeds` is empty. Give at least one seed; pairing needs two.")
    for place, seed in enumerate(seeds):
        if type(seed) is not int or not 0 <= seed <= _LARGEST_SEED:
            raise ValueError(f"`seeds[{place}]` is {seed!r}. A seed must be an int from 0 to {_LARGEST_SEED}.")
        if seed in seeds[:place]:
            raise ValueError(
                f"`seeds` has {seed} twice, which would generate the same images again. Remove one of them."
            )
    return seeds


def _size_multiple(pipeline: "DiffusionPipeline") -> int:
    """Give what sizes have to be multiples of, as far as the pipeline tells; one that resizes is noticed later."""
    from ..rollout.families import FAMILIES

    family = FAMILIES.get(type(pipeline).__name__)
    if family is not None:
        return family().size_multiple(pipeline)
    # With the patches of a transformer in it, in most; `vae_scale_factor` of the pipeline is without them
    processor = getattr(pipeline, "image_processor", None)
    return processor.config.vae_scale_factor if processor is not None else getattr(pipeline, "vae_scale_factor", 1)


def _sizes(
    prompts: "Dataset", ids: list[str], height: int | None, width: int | None, multiple: int
) -> list[tuple[int, int]]:
    from ..rollout.resolution import check_inference_size

    columns = prompts.with_format(None).select_columns(
        [name for name in ("rows", "cols", "height", "width") if name in prompts.column_names]
    )[:]
    own = {
        "height": [height] * len(ids) if height is not None else columns.get("height", [None] * len(ids)),
        "width": [width] * len(ids) if width is not None else columns.get("width", [None] * len(ids)),
    }
    sizes = list(zip(own["height"], own["width"], strict=True))
    for row, (size, rows, cols) in enumerate(zip(sizes, columns["rows"], columns["cols"], strict=True)):
        where = f"row {row} of the prompts (id {ids[row]!r})"
        for name, value in zip(("height", "width"), size, strict=True):
            if type(value) is not int:
                raise ValueError(
                    f"The {name} of {where} is {value!r}. Give the column `{name}` in pixels, or `{name}` for all rows."
                )
        check_inference_size(*size, rows, cols, multiple, where)
    return sizes


def _path(folder: StageFolder, prompt_id: str, seed: int) -> Path:
    return folder.images / file_name(prompt_id) / f"{seed}.png"


def _generate(
    pipeline: "DiffusionPipeline", texts: list[str], ids: list[str], batch: GridBatch, call_arguments: dict[str, Any]
) -> dict[tuple[int, int], "Image"]:
    """Call the pipeline once; give the images by row and seed."""
    import torch
    from PIL import Image

    arguments = dict(call_arguments)
    if isinstance(arguments.get("negative_prompt"), str):  # some pipelines do not repeat it themselves
        arguments["negative_prompt"] = [arguments["negative_prompt"]] * len(batch.rows)
    places = [(row, seed) for row in batch.rows for seed in batch.seeds]
    images = pipeline(
        prompt=[texts[row] for row in batch.rows],
        height=batch.height,
        width=batch.width,
        num_images_per_prompt=len(batch.seeds),
        generator=[torch.Generator().manual_seed(seed) for _, seed in places],
        **arguments,
    ).images
    if len(images) != len(places) or not all(isinstance(image, Image.Image) for image in images):
        raise ValueError(
            f"{type(pipeline).__name__} returned {len(images)} of {type(images[0]).__name__} for {len(batch.rows)} "
            f"prompt(s) with {len(batch.seeds)} seed(s) each, but {len(places)} PIL images are needed. Choose another "
            "pipeline, or leave out the call argument that changes its output."
        )
    for (row, seed), image in zip(places, images, strict=True):
        if image.size != (batch.width, batch.height):
            raise ValueError(
                f"{type(pipeline).__name__} generated the grid '{ids[row]}/{seed}' with {image.height}x{image.width} pixels "
                f"(height x width) instead of {batch.height}x{batch.width}, so its panels would be cut in wrong "
                "places. Choose a size that the pipeline does not change."
            )
    return dict(zip(places, images, strict=True))


def _make_dataset(prompts: "Dataset", ids: list[str], seeds: list[int], folder: StageFolder) -> "Dataset":
    from datasets import Dataset

    layouts = prompts.with_format(None).select_columns(["rows", "cols"])[:]
    rows = [
        {
            "id": f"{name}/{seed}",
            "prompt_id": name,
            "seed": seed,
            "rows": layouts["rows"][row],
            "cols": layouts["cols"][row],
            "image": str(_path(folder, name, seed)),
        }
        for row, name in enumerate(ids)
        for seed in seeds
    ]
    kinds = {"seed": "int64", "rows": "int64", "cols": "int64", "image": "image"}
    return Dataset.from_list(rows, features=column_types(id="string", prompt_id="string", **kinds))


def _report(
    dataset: "Dataset", num_prompts: int, seeds: list[int], sizes: list[tuple[int, int]], flat: list[str]
) -> dict[str, Any]:
    counts = Counter(f"{height}x{width}" for height, width in sizes)
    return {
        "prompts": num_prompts,
        "seeds": seeds,
        "grids": len(dataset),
        "grids by size (height x width)": {size: count * len(seeds) for size, count in counts.items()},
        "flat grids": flat,
    }
