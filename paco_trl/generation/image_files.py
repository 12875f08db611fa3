# SPDX-License-Identifier: Apache-2.0
"""Image files from a pipeline: existing ones are kept, and the missing ones divided among the processes."""

import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ..data.grids import split_grid
from ..utils.files import digest, write_atomically
from ..utils.images import to_png
from ..utils.pipelines import truncations_counted
from ..utils.processes import wait_for_all
from ..utils.text import join_first, shorten
from .prompt_encoding import encoding_ahead


if TYPE_CHECKING:
    from datasets import Dataset
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

    from ..rollout import Family


logger = logging.getLogger(__name__)


def name_prompts(prompts: "Dataset", columns: Sequence[str] = ("id",)) -> list[str]:
    """Return the keys of prompts: their `columns`, usually `id`, joined by slashes."""
    rows: dict[str, int] = {}
    columns = [name for name in columns if name == "id" or name in prompts.column_names]
    if "id" not in prompts.column_names:
        raise ValueError(
            "Prompts of a benchmark need a unique `id` each. For your own prompts use `paco-trl evaluate prompts`."
        )
    for row, values in enumerate(prompts.with_format(None).select_columns(columns)):
        for name, value in values.items():
            if not isinstance(value, str) or not value:
                raise ValueError(f"`{name}` of row {row} of the prompts is {shorten(value)}, but must be a text.")
        key = "/".join(values[name] for name in columns)
        if key in rows:
            raise ValueError(f"Rows {rows[key]} and {row} of the prompts are both {key!r}. Give each a unique `id`.")
        rows[key] = row
    return list(rows)


def digest_of_prompts(prompts: "Dataset") -> str:
    """Compute a digest of the columns that generated images depend on."""
    from ..utils.fingerprint import describe  # imports torch

    columns = ("id", "language", "prompt", "negative_prompt", "theme", "panels", "rows", "cols", "height", "width")
    columns += ("layout", "references")
    return digest(describe(prompts.select_columns([name for name in columns if name in prompts.column_names])))


def check_call(pipeline: "DiffusionPipeline", names: Sequence[str], purpose: str) -> None:
    """Refuse a pipeline whose call lacks one of the arguments; `purpose` ends the error."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    missing = [f"`{name}`" for name in names if name not in parameters]
    if missing:
        raise ValueError(f"The call of {type(pipeline).__name__} has no {', '.join(missing)}, so it cannot {purpose}")


def find_family(pipeline: "DiffusionPipeline") -> "Family | None":
    """Return the family of a pipeline, or `None` for a class that is in none."""
    from ..rollout import FAMILIES

    family = FAMILIES.get(type(pipeline).__name__)
    return None if family is None else family()


def plain_prompt_arguments(pipeline: "DiffusionPipeline") -> dict[str, bool]:
    """Return call arguments that keep a pipeline from rewriting prompts, as LongCat-Image does."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    return {"enable_prompt_rewrite": False} if "enable_prompt_rewrite" in parameters else {}


def negative_prompts_of(
    pipeline: "DiffusionPipeline", prompts: "Dataset", call_arguments: Mapping[str, Any]
) -> list[str | None]:
    """
    Return the negative prompt of each row, or else that of the call. A negative prompt that the pipeline would ignore
    is an error.
    """
    if "negative_prompt" not in prompts.column_names:
        return [call_arguments.get("negative_prompt")] * len(prompts)
    parameters = inspect.signature(type(pipeline).__call__).parameters
    option = "true_cfg_scale" if "true_cfg_scale" in parameters else "guidance_scale"
    scale = call_arguments.get(option, parameters[option].default)
    name = type(pipeline).__name__
    family = find_family(pipeline) if option == "guidance_scale" else None  # which may be distilled
    row_prompts = prompts["negative_prompt"][:]
    for row, negative in enumerate(row_prompts):
        if negative is not None and ("negative_prompt" not in parameters or family is None and scale <= 1):
            raise ValueError(
                f"Row {row} of the prompts: `negative_prompt` is {negative!r}, which {name} ignores at `{option}` = "
                f"{scale}. Raise the scale if the model has true CFG, or remove the column."
            )
        if negative is not None and family is not None:
            family.resolve_negative_prompt(pipeline, scale, negative)
    return [call_arguments.get("negative_prompt") if negative is None else negative for negative in row_prompts]


def _warn_of_truncated(
    pipeline: "DiffusionPipeline", calls: Sequence[Mapping[str, Path]], prompts: Sequence[Sequence[str | list[str]]]
) -> None:
    """Warn of prompts that the pipeline does not read to the end: those of many pipelines say nothing."""
    from ..rollout.encoder import describe_truncated

    family = find_family(pipeline)
    if family is None:
        return
    name_by_text: dict[str, str] = {}
    for call, call_prompts in zip(calls, prompts, strict=bool(prompts)):
        for text in chain.from_iterable([text] if isinstance(text, str) else text for text in call_prompts):
            name_by_text.setdefault(text, repr(next(iter(call))))
    named = [(name, text) for text, name in name_by_text.items()]
    with truncations_counted(pipeline):  # tokenizers warn of each long text
        truncated = describe_truncated(pipeline, family, named, "the images")
    if truncated is not None:
        logger.warning(truncated)


def generate_missing(
    pipeline: "DiffusionPipeline",
    calls: Sequence[Mapping[str, Path]],
    generate: Callable[[int], Mapping[str, "Image"]],
    image_type: str,
    sizes: Sequence[tuple[int, int, int]] | None = None,
    prompts: Sequence[Sequence[str | list[str]]] = (),
) -> list[str]:
    """
    Make the calls with missing images. Warn about images of one flat color, and return their names.

    A call maps the names of its images to their files. `sizes`, if known, has the height, the width, and the number of
    side-by-side images in a file of each call; `prompts` has the pipeline's prompts of each call, to encode ahead.
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object

    state = PartialState()
    file_sizes = [None] * len(calls) if sizes is None else sizes
    counts = [1 if size is None else size[2] for size in file_sizes]
    # Each process checks a share of the files; then they all divide the same list of calls
    flat_images, missing = [], []
    for call_index in range(state.process_index, len(calls), state.num_processes):
        for name, path in calls[call_index].items():
            image = _read_image(path, file_sizes[call_index])
            if image is None:
                missing.append((call_index, name))
            elif is_flat(image, counts[call_index]):
                flat_images.append(name)
    wait_for_all()
    names: dict[int, list[str]] = defaultdict(list)
    for call_index, name in sorted(gather_object(missing)):
        names[call_index].append(name)

    call_indices = list(names)[state.process_index :: state.num_processes]
    bar = tqdm(call_indices, desc=f"Generating {image_type}", unit="call", disable=not state.is_main_process)
    pipeline.set_progress_bar_config(disable=True)
    if state.is_main_process:
        _warn_of_truncated(pipeline, calls, prompts)
    upcoming = [prompt for call_index in call_indices for prompt in prompts[call_index]] if prompts else []
    with truncations_counted(pipeline) as truncations, encoding_ahead(pipeline, upcoming, truncations):
        for call_index in bar:
            images = generate(call_index)
            for name in names[call_index]:
                write_atomically(calls[call_index][name], to_png(images[name]))
                if is_flat(images[name], counts[call_index]):
                    flat_images.append(name)
    wait_for_all()
    for message, count in sum(gather_object([truncations]), Counter()).items():
        if state.is_main_process:
            logger.warning(
                f"For {count} of {sum(map(counts.__getitem__, names))} calls of {type(pipeline).__name__}: {message}."
            )
    all_names = [name for call in calls for name in call]
    flat_images = sorted(gather_object(flat_images), key=all_names.index)
    if flat_images and state.is_main_process:
        logger.warning(
            f"{len(flat_images)} of {len(all_names)} {image_type} have an image of one flat color: "
            f"{join_first(flat_images)}. Try another seed or, unless a safety checker blanked them, another `dtype`, "
            "since they may have had non-finite numbers."
        )
    return flat_images


def _read_image(path: Path, size: tuple[int, int, int] | None) -> "Image | None":
    """Read an image, or delete its file if it is incomplete or has another size, to be generated again."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            if size is not None and (image.height, image.width) != (size[0], size[1] * size[2]):
                raise ValueError(f"{image.height}x{image.width} pixels, not {size[0]}x{size[1] * size[2]}")
            return image
    except FileNotFoundError:
        return None
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises the first two
        logger.warning(f"{path} cannot be used ({error}): it is generated again.")
        path.unlink()
        return None


def is_flat(image: "Image", count: int = 1) -> bool:
    """Return whether an image, or one of `count` side-by-side images, has a single color."""
    # `getcolors(1)` is `None` for more than one color
    return any(panel.convert("RGB").getcolors(1) is not None for panel in split_grid(image, 1, count))
