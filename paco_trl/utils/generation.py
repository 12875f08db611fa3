# SPDX-License-Identifier: Apache-2.0
"""Image files that a pipeline as it is makes: what is there stays, the rest is dealt out to the processes."""

import inspect
import io
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from .files import write_atomically


if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


logger = logging.getLogger(__name__)


def load_pipeline(model: str, dtype: "torch.dtype", device: "torch.device | str | None" = None) -> "DiffusionPipeline":
    """
    Load any diffusers pipeline, to draw with it. Weights are read from safetensors, and no code of the model is run.

    Args:
        model (`str`):
            Hub id or folder.
        dtype (`torch.dtype`):
            Compute dtype.
        device (`torch.device` or `str`, *optional*):
            Device. The one of this process when left out (see [`~accelerate.PartialState`]).

    Returns:
        [`~diffusers.DiffusionPipeline`]: with its progress bar switched off.
    """
    from accelerate import PartialState
    from diffusers import DiffusionPipeline

    # Not the loader of the trainer, which refuses what cannot be trained
    pipeline = DiffusionPipeline.from_pretrained(model, dtype=dtype, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(PartialState().device if device is None else device)


def check_call(pipeline: "DiffusionPipeline", names: Sequence[str], purpose: str) -> None:
    """Refuse a pipeline whose call lacks one of the arguments; `purpose` ends the error."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    missing = [f"`{name}`" for name in names if name not in parameters]
    if missing:
        raise ValueError(
            f"The call of {type(pipeline).__name__} takes no {', '.join(missing)}, so it cannot {purpose}"
        )


def name_prompts(prompts: "Dataset", what: str, columns: Sequence[str] = ("id",)) -> list[str]:
    """Name prompts by their `id` and what else of `columns` they have, with slashes. `what` is named so, in errors."""
    if "id" not in prompts.column_names:
        raise ValueError(
            f"The prompts have no column `id`, only {prompts.column_names}. {what.capitalize()} are named by the ids of "
            "their prompts: add one that is different for each."
        )
    rows: dict[str, int] = {}
    columns = [name for name in columns if name in prompts.column_names]
    for row, values in enumerate(prompts.with_format(None).select_columns(columns)):
        for name, value in values.items():
            if not isinstance(value, str) or not value:
                raise ValueError(
                    f"The `{name}` of row {row} of the prompts is {value!r}. It must be a text that is not empty."
                )
        key = "/".join(values[name] for name in columns)
        if key in rows:
            raise ValueError(
                f"Rows {rows[key]} and {row} of the prompts have the same `id` {values['id']!r}"
                f"{' in the same `language`' if len(columns) == 2 else ''}, so that the {what} of one would overwrite "
                "those of the other. Give each prompt an id of its own."
            )
        rows[key] = row
    return list(rows)


def generate_missing(
    calls: Sequence[Mapping[Any, Path]],
    read: Callable[[int, Any], "Image | None"],
    draw: Callable[[int], Mapping[Any, "Image"]],
    description: str,
) -> list[Any]:
    """Make the calls of a pipeline whose pictures are not all on the disk, dealt out to the processes in turn."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    # Each process reads its share of what is there. All of them then deal out the same list of calls
    state = PartialState()
    flat, missing = [], []
    for number in range(state.process_index, len(calls), state.num_processes):
        for place in calls[number]:
            image = read(number, place)
            if image is None:
                missing.append((number, place))
            elif is_flat(image):
                flat.append(place)
    missing = sorted(gather_object(missing))
    places_of: dict[int, list[Any]] = {}
    for number, place in missing:
        places_of.setdefault(number, []).append(place)

    waiting = [calls[number][place] for number, place in missing]
    total = sum(map(len, calls))
    is_quiet = not state.is_main_process
    with tqdm(total=total, initial=total - len(waiting), desc=description, unit="image", disable=is_quiet) as bar:
        for number in list(places_of)[state.process_index :: state.num_processes]:
            images = draw(number)
            for place in places_of[number]:
                write_atomically(calls[number][place], to_png(images[place]))
                if is_flat(images[place]):
                    flat.append(place)
            if not is_quiet:  # what other processes drew counts too
                still = [path for path in waiting if not path.exists()]
                bar.update(len(waiting) - len(still))
                waiting = still
        flat = gather_object(flat)  # all processes are done
        bar.update(len(waiting))
    return flat


def warn_of_flat(names: list[str], total: int, what: str) -> None:
    """Warn of pictures that are one flat colour, if there are any."""
    if names:
        logger.warning(
            f"{len(names)} of {total} {what} are one flat colour, as a safety checker or numbers that are not finite "
            f"(try another `dtype`) leave them: {', '.join(names[:20])}{', ...' * (len(names) > 20)}. Leave their "
            "prompts out, or draw them with another seed."
        )


def read_image(path: Path, size: tuple[int, int] | None = None) -> "Image | None":
    """Read a picture if it is there and whole. A file that is something else is removed, so that it is drawn again."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            if size is not None and image.size != size:
                width, height = size
                raise ValueError(f"it has {image.height}x{image.width} pixels instead of {height}x{width}")
            return image
    except FileNotFoundError:
        return None
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises the first two
        logger.warning(f"{path} cannot be used ({error}): it is drawn again.")
        path.unlink()
        return None


def to_png(image: "Image") -> bytes:
    """Encode a picture."""
    buffer = io.BytesIO()
    # For pictures of this kind three times as fast as the default, and as small
    image.save(buffer, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


def is_flat(image: "Image") -> bool:
    """Tell whether a picture is one flat colour."""
    extrema = image.getextrema()
    bands = extrema if isinstance(extrema[0], tuple) else [extrema]
    return all(low == high for low, high in bands)
