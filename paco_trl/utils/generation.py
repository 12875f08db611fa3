# SPDX-License-Identifier: Apache-2.0
"""Image files of an unmodified pipeline: existing ones stay, the rest is divided among the processes."""

import inspect
import io
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from .files import write_atomically
from .names import check_base_model_name
from .processes import wait_for_all


if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


logger = logging.getLogger(__name__)


def load_pipeline(model: str, dtype: "torch.dtype", device: "torch.device | str | None" = None) -> "DiffusionPipeline":
    """
    Load a diffusers pipeline to generate images, with its progress bar disabled. Weights are read from safetensors, and
    no code of the model is run. `device` defaults to that of this process (see [`~accelerate.PartialState`]).
    """
    from accelerate import PartialState
    from diffusers import DiffusionPipeline

    check_base_model_name(model)
    # Not the loader of the trainer, which refuses what cannot be trained
    pipeline = DiffusionPipeline.from_pretrained(model, dtype=dtype, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(PartialState().device if device is None else device)


def check_call(pipeline: "DiffusionPipeline", names: Sequence[str], purpose: str) -> None:
    """Refuse a pipeline whose call lacks one of the arguments; `purpose` ends the error."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    missing = [f"`{name}`" for name in names if name not in parameters]
    if missing:
        raise ValueError(f"The call of {type(pipeline).__name__} has no {', '.join(missing)}, so it cannot {purpose}")


def name_prompts(prompts: "Dataset", what: str, columns: Sequence[str] = ("id",)) -> list[str]:
    """Name prompts by their `id` and their other `columns`, joined by slashes; `what` is their name in errors."""
    if "id" not in prompts.column_names:
        raise ValueError(
            f"The prompts have no column `id`, which names the {what}, only {prompts.column_names}. Add it."
        )
    rows: dict[str, int] = {}
    columns = [name for name in columns if name in prompts.column_names]
    for row, values in enumerate(prompts.with_format(None).select_columns(columns)):
        for name, value in values.items():
            if not isinstance(value, str) or not value:
                raise ValueError(
                    f"The `{name}` of row {row} of the prompts is {value!r}, but must be a non-empty text."
                )
        key = "/".join(values[name] for name in columns)
        if key in rows:
            language = " in the same `language`" if len(columns) == 2 else ""
            raise ValueError(
                f"Rows {rows[key]} and {row} of the prompts have the same `id` {values['id']!r}{language}, so that their {what} "
                "would overwrite each other. Give each a unique id."
            )
        rows[key] = row
    return list(rows)


@contextmanager
def truncations_counted(pipeline: "DiffusionPipeline", counted: str) -> Iterator[Counter[str]]:
    """Log how many of those `counted` were truncated, in a line for each kind. Every process enters it."""
    # Prompts of image sets are always longer than CLIP reads, and the pipeline logs each prompt with its full text
    from accelerate import PartialState
    from accelerate.utils import gather_object

    truncations: Counter[str] = Counter()

    def count(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if is_truncated := "was truncated" in message:
            truncations[message.split(":")[0]] += 1
        return not is_truncated and "sequence length is longer than" not in message

    # The tokenizer does not know yet that its result will be truncated
    names = (type(pipeline).__module__, "transformers.tokenization_utils_base")
    loggers = [logging.getLogger(name) for name in names]
    for logger_ in loggers:
        logger_.addFilter(count)
    try:
        yield truncations
    finally:
        for logger_ in loggers:
            logger_.removeFilter(count)
    wait_for_all()
    everywhere = gather_object([truncations])
    if PartialState().is_main_process:
        for message, number in sum(everywhere, Counter()).items():
            logger.warning(f"For {number} of {counted}: {message}.")


def generate_missing(
    pipeline: "DiffusionPipeline",
    calls: Sequence[Mapping[Any, Path]],
    read: Callable[[int, Any], "Image | None"],
    generate: Callable[[int], Mapping[Any, "Image"]],
    description: str,
) -> list[Any]:
    """Make the calls of a pipeline whose images are not all on the disk; return the places of flat images."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    # Each process reads a part of the existing files; then all of them divide the same list of calls
    state = PartialState()
    flat, missing = [], []
    for number in range(state.process_index, len(calls), state.num_processes):
        for place in calls[number]:
            image = read(number, place)
            if image is None:
                missing.append((number, place))
            elif is_flat(image):
                flat.append(place)
    wait_for_all()
    missing = sorted(gather_object(missing))
    places: dict[int, list[Any]] = {}
    for number, place in missing:
        places.setdefault(number, []).append(place)

    waiting = [calls[number][place] for number, place in missing]
    total = sum(map(len, calls))
    is_quiet = not state.is_main_process
    counted = f"{len(places)} calls of {type(pipeline).__name__}"
    with (
        truncations_counted(pipeline, counted),
        tqdm(total=total, initial=total - len(waiting), desc=description, unit="image", disable=is_quiet) as bar,
    ):
        for number in list(places)[state.process_index :: state.num_processes]:
            images = generate(number)
            for place in places[number]:
                write_atomically(calls[number][place], to_png(images[place]))
                if is_flat(images[place]):
                    flat.append(place)
            if not is_quiet:  # images of other processes count too
                still = [path for path in waiting if not path.exists()]
                bar.update(len(waiting) - len(still))
                waiting = still
        wait_for_all()
        flat = gather_object(flat)
        bar.update(len(waiting))
    return flat


def warn_of_flat(names: list[str], total: int, what: str) -> None:
    """Warn of images of one flat color, if there are any."""
    if names:
        logger.warning(
            f"{len(names)} of {total} {what} are one flat color, the result of a safety checker or of non-finite numbers "
            f"(try another `dtype`): {', '.join(names[:20])}{', ...' * (len(names) > 20)}. Leave their "
            "prompts out, or generate them with another seed."
        )


def read_image(path: Path, size: tuple[int, int] | None = None) -> "Image | None":
    """Read an image if it is complete. Any other file is removed, so that the image is generated again."""
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
        logger.warning(f"{path} cannot be used ({error}): it is generated again.")
        path.unlink()
        return None


def to_png(image: "Image") -> bytes:
    """Encode an image."""
    buffer = io.BytesIO()
    # Three times as fast as the default for such images, and as small
    image.save(buffer, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


def is_flat(image: "Image") -> bool:
    """Tell whether an image has one flat color."""
    extrema = image.getextrema()
    bands = extrema if isinstance(extrema[0], tuple) else [extrema]
    return all(low == high for low, high in bands)
