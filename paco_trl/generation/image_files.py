# SPDX-License-Identifier: Apache-2.0
"""Image files from a pipeline: existing files are kept, and the processes share the calls for missing files."""

import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


if TYPE_CHECKING:
    from datasets import Dataset
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

    from ..rollout import Family


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageCall:
    """A call of a pipeline, or one call for each panel of separate image sets, and the files of its images."""

    files: dict[str, Path]  # name of an image -> its file
    prompts: Sequence[str | list[str]] = ()  # what the pipeline is given as `prompt`, to encode ahead
    size: tuple[int, int] | None = None  # height and width of a panel, if known
    num_panels: int = 1  # side by side in a file


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


def plain_prompt_arguments(pipeline: "DiffusionPipeline") -> dict[str, bool]:
    """Return call arguments that keep a pipeline from rewriting prompts, as LongCat-Image does."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    return {"enable_prompt_rewrite": False} if "enable_prompt_rewrite" in parameters else {}


def negative_prompts_of(
    pipeline: "DiffusionPipeline", family: "Family | None", prompts: "Dataset", call_arguments: Mapping[str, Any]
) -> list[str | None]:
    """
    Return the negative prompt of each row; a row without one has the call's. A negative prompt that the pipeline would
    ignore is an error.
    """
    if "negative_prompt" not in prompts.column_names:
        return [call_arguments.get("negative_prompt")] * len(prompts)
    parameters = inspect.signature(type(pipeline).__call__).parameters
    option = "true_cfg_scale" if "true_cfg_scale" in parameters else "guidance_scale"
    scale = call_arguments.get(option, parameters[option].default)
    name = type(pipeline).__name__
    family = family if option == "guidance_scale" else None  # a guidance scale may be a distilled model's
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


def _warn_of_truncated(pipeline: "DiffusionPipeline", calls: Sequence[ImageCall]) -> None:
    """Warn of prompts that the pipeline does not read to the end, since many pipelines say nothing."""
    from ..rollout.encoder import describe_truncated
    from ..rollout.families import find_family

    family = find_family(pipeline)
    if family is None:
        return
    name_by_text: dict[str, str] = {}
    for call in calls:
        for text in chain.from_iterable([text] if isinstance(text, str) else text for text in call.prompts):
            name_by_text.setdefault(text, repr(next(iter(call.files))))
    named = [(name, text) for text, name in name_by_text.items()]
    with truncations_counted(pipeline):  # tokenizers warn of each long text
        truncated = describe_truncated(pipeline, family, named, "the images")
    if truncated is not None:
        logger.warning(truncated)


def generate_missing(
    pipeline: "DiffusionPipeline",
    calls: Sequence[ImageCall],
    generate: Callable[[int], Mapping[str, "Image"]],
    image_type: str,
) -> list[str]:
    """
    Make the calls with missing images, and save these. Warn about images of one flat color, and return their names.

    `generate` maps the names of a call's images to the images, given the index of the call.
    """
    missing, flat_images = _find_missing(calls)
    flat_images += _generate(pipeline, calls, missing, generate, image_type)
    return _report_flat(flat_images, calls, image_type)


def _find_missing(calls: Sequence[ImageCall]) -> tuple[dict[int, list[str]], list[str]]:
    """Return the names of missing images by the index of their call, and those of flat images read by this process."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    state = PartialState()
    # Each process checks a share of the files; then all processes have the same list of calls to share
    flat_images, missing = [], []
    for call_index in range(state.process_index, len(calls), state.num_processes):
        call = calls[call_index]
        for name, path in call.files.items():
            image = _read_image(path, call)
            if image is None:
                missing.append((call_index, name))
            elif is_flat(image, call.num_panels):
                flat_images.append(name)
    wait_for_all()
    names: dict[int, list[str]] = defaultdict(list)
    for call_index, name in sorted(gather_object(missing)):
        names[call_index].append(name)
    return names, flat_images


def _generate(
    pipeline: "DiffusionPipeline",
    calls: Sequence[ImageCall],
    missing: Mapping[int, list[str]],
    generate: Callable[[int], Mapping[str, "Image"]],
    image_type: str,
) -> list[str]:
    """Make this process's share of the calls, save the missing images, and return the names of flat ones."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    from .prompt_encoding import encoding_ahead  # imports torch

    state = PartialState()
    call_indices = list(missing)[state.process_index :: state.num_processes]
    bar = tqdm(call_indices, desc=f"Generating {image_type}", unit="call", disable=not state.is_main_process)
    pipeline.set_progress_bar_config(disable=True)
    if state.is_main_process:
        _warn_of_truncated(pipeline, calls)
    upcoming = [prompt for call_index in call_indices for prompt in calls[call_index].prompts]
    flat_images = []
    with truncations_counted(pipeline) as truncations, encoding_ahead(pipeline, upcoming, truncations):
        for call_index in bar:
            call, images = calls[call_index], generate(call_index)
            for name in missing[call_index]:
                write_atomically(call.files[name], to_png(images[name]))
                if is_flat(images[name], call.num_panels):
                    flat_images.append(name)
    wait_for_all()
    for message, count in sum(gather_object([truncations]), Counter()).items():
        if state.is_main_process:
            num_calls = sum(calls[call_index].num_panels for call_index in missing)
            logger.warning(f"For {count} of {num_calls} calls of {type(pipeline).__name__}: {message}.")
    return flat_images


def _report_flat(flat_images: list[str], calls: Sequence[ImageCall], image_type: str) -> list[str]:
    """Gather the names of flat images in the order of the calls, and warn about them."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    all_names = [name for call in calls for name in call.files]
    flat_images = sorted(gather_object(flat_images), key=all_names.index)
    if flat_images and PartialState().is_main_process:
        logger.warning(
            f"{len(flat_images)} of {len(all_names)} {image_type} have an image of one flat color: "
            f"{join_first(flat_images)}. Try another seed or, unless a safety checker blanked them, another `dtype`, "
            "since they may have had non-finite numbers."
        )
    return flat_images


def _read_image(path: Path, call: ImageCall) -> "Image | None":
    """Read an image, or delete its file if it is incomplete or has another size, to be generated again."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            if call.size is not None:
                height, width = call.size[0], call.size[1] * call.num_panels
                if (image.height, image.width) != (height, width):
                    raise ValueError(f"{image.height}x{image.width} pixels, not {height}x{width}")
            return image
    except FileNotFoundError:
        return None
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises `OSError` and `SyntaxError`
        logger.warning(f"{path} cannot be used ({error}): it is generated again.")
        return None


def is_flat(image: "Image", count: int = 1) -> bool:
    """Return whether an image, or one of `count` side-by-side images, has a single color."""
    # `getcolors(1)` is `None` for more than one color
    return any(panel.convert("RGB").getcolors(1) is not None for panel in split_grid(image, 1, count))
