# SPDX-License-Identifier: Apache-2.0
"""Make image files with a pipeline: existing ones stay, the rest is divided among the processes."""

import copy
import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ..data.grids import split_grid
from ..utils.files import digest, write_atomically
from ..utils.images import to_png
from ..utils.pipelines import truncations_counted
from ..utils.processes import wait_for_all
from ..utils.text import shorten, some_of


if TYPE_CHECKING:
    from datasets import Dataset
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


logger = logging.getLogger(__name__)

# Prompts that are encoded in one turn of the text encoders
_PROMPTS_AHEAD = 32


def name_prompts(prompts: "Dataset", columns: Sequence[str] = ("id",)) -> list[str]:
    """Name prompts by their `id` and their other `columns`, joined by slashes."""
    rows: dict[str, int] = {}
    columns = [name for name in columns if name == "id" or name in prompts.column_names]
    if "id" not in prompts.column_names:
        raise ValueError(
            "Prompts of a benchmark need a unique `id` each. For prompts of your own use `paco-trl evaluate prompts`."
        )
    for row, values in enumerate(prompts.with_format(None).select_columns(columns)):
        for name, value in values.items():
            if not isinstance(value, str) or not value:
                raise ValueError(f"`{name}` of row {row} of the prompts is {shorten(value)}. Give it a text.")
        key = "/".join(values[name] for name in columns)
        if key in rows:
            raise ValueError(f"Rows {rows[key]} and {row} of the prompts are both {key!r}: give each a unique `id`.")
        rows[key] = row
    return list(rows)


def digest_of_prompts(prompts: "Dataset") -> str:
    """Compute a digest of what the images of prompts depend on."""
    from ..utils.fingerprint import describe  # imports torch

    columns = ("id", "language", "prompt", "negative_prompt", "theme", "panels", "rows", "cols", "height", "width")
    columns += ("layout", "references")
    return digest(describe(prompts.select_columns([name for name in columns if name in prompts.column_names])))


def plain_prompt_arguments(pipeline: "DiffusionPipeline") -> dict[str, bool]:
    """Return arguments of the call that let a pipeline read the prompts that others read: LongCat-Image rewrites them."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    return {"enable_prompt_rewrite": False} if "enable_prompt_rewrite" in parameters else {}


def negative_prompts_of(
    pipeline: "DiffusionPipeline", prompts: "Dataset", call_arguments: Mapping[str, Any]
) -> list[str | None]:
    """Return the negative prompt of each row, that of the call if it has none; refuse one that would be ignored."""
    from ..rollout import FAMILIES

    if "negative_prompt" not in prompts.column_names:
        return [call_arguments.get("negative_prompt")] * len(prompts)
    parameters = inspect.signature(type(pipeline).__call__).parameters
    option = "true_cfg_scale" if "true_cfg_scale" in parameters else "guidance_scale"
    scale, name = call_arguments.get(option, parameters[option].default), type(pipeline).__name__
    family = FAMILIES[name]() if name in FAMILIES and option == "guidance_scale" else None  # which may be distilled
    row_prompts = prompts["negative_prompt"][:]
    for row, negative in enumerate(row_prompts):
        if negative is not None and ("negative_prompt" not in parameters or family is None and scale <= 1):
            raise ValueError(
                f"Row {row} of the prompts: `negative_prompt` is {negative!r}, which {name} ignores at `{option}` = {scale}. "
                "Raise the scale if the model has true guidance, or remove the column."
            )
        if negative is not None and family is not None:
            family.resolve_negative_prompt(pipeline, scale, negative)
    return [call_arguments.get("negative_prompt") if negative is None else negative for negative in row_prompts]


@contextmanager
def encoding_ahead(
    pipeline: "DiffusionPipeline", coming: list[str | list[str]], truncations: Counter[str]
) -> Iterator[None]:
    """
    Where text encoders and transformer take turns, let the pipeline encode many prompts that are `coming` in a turn.

    `truncations` counts a prompt as often as it is used, as without turns.
    """
    from accelerate.utils import send_to_device

    turns, encode = (getattr(pipeline, name, None) for name in ("turns", "encode_prompt"))
    if turns is None or encode is None:
        yield
        return
    ahead, negatives, start = dict[str, Any](), dict[str, Any](), 0
    signature, settings = inspect.signature(encode), set[str]()

    def encode_ahead(*args: Any, **kwargs: Any) -> Any:
        nonlocal start
        arguments = signature.bind(*args, **kwargs).arguments  # many pipelines pass the prompt by its position
        if "prompt" not in arguments or not all(map(_is_plain, arguments.values())):  # such as source images
            return encode(*args, **kwargs)

        def key(prompt: str | list[str]) -> str:
            return repr(arguments | {"prompt": prompt})

        prompt = arguments["prompt"]
        settings.add(key(""))
        if key(prompt) not in ahead | negatives:
            cache, new = ahead, [prompt]
            if prompt in coming[start:]:
                start = coming.index(prompt, start)
                # With a negative prompt for each row, what comes has other arguments
                new = coming[start : start + _PROMPTS_AHEAD] if len(settings) == 1 else new
            else:  # a negative one
                cache = negatives
            if cache is ahead or len(negatives) == _PROMPTS_AHEAD:
                cache.clear()
            for text in new:
                if key(text) not in cache:
                    given = copy.deepcopy(arguments | {"prompt": text})  # Z-Image writes its template into the lists
                    before = truncations.copy()
                    encoded = send_to_device(encode(**given), "cpu")
                    cache[key(text)] = encoded, truncations - before
                    truncations.subtract(truncations - before)
        encoded, truncated = (ahead | negatives)[key(prompt)]
        truncations.update(truncated)
        return send_to_device(encoded, turns.device)

    pipeline.encode_prompt = encode_ahead
    try:
        yield
    finally:
        del pipeline.encode_prompt


def _is_plain(value: Any) -> bool:
    import torch

    parts = value if isinstance(value, list | tuple) else [value]
    return all(part is None or isinstance(part, str | int | float | torch.device) for part in parts)


def generate_missing(
    pipeline: "DiffusionPipeline",
    calls: Sequence[Mapping[str, Path]],
    generate: Callable[[int], Mapping[str, "Image"]],
    what: str,
    sizes: Sequence[tuple[int, int, int]] | None = None,
    prompts: Sequence[Sequence[str | list[str]]] = (),
) -> list[str]:
    """Make the calls whose images are not all on the disk; return the names of flat images, and warn of them."""
    # A call has the files of its images, by name, in `sizes`, if these are known, their height, width, and number of
    # images that a file shows side by side, and in `prompts` those of the pipeline, which may be encoded ahead
    from accelerate import PartialState
    from accelerate.utils import gather_object

    state = PartialState()
    known = [None] * len(calls) if sizes is None else sizes
    counts = [1 if size is None else size[2] for size in known]
    # Each process reads a part of the existing files; then all of them divide the same list of calls
    flat, missing = [], []
    for call_number in range(state.process_index, len(calls), state.num_processes):
        for name, path in calls[call_number].items():
            image = _read_image(path, known[call_number])
            if image is None:
                missing.append((call_number, name))
            elif is_flat(image, counts[call_number]):
                flat.append(name)
    wait_for_all()
    names: dict[int, list[str]] = defaultdict(list)
    for call_number, name in sorted(gather_object(missing)):
        names[call_number].append(name)

    call_numbers = list(names)[state.process_index :: state.num_processes]
    bar = tqdm(call_numbers, desc=f"Generating {what}", unit="call", disable=not state.is_main_process)
    pipeline.set_progress_bar_config(disable=True)
    coming = [prompt for call_number in call_numbers for prompt in prompts[call_number]] if prompts else []
    with truncations_counted(pipeline) as truncations, encoding_ahead(pipeline, coming, truncations):
        for call_number in bar:
            images = generate(call_number)
            for name in names[call_number]:
                write_atomically(calls[call_number][name], to_png(images[name]))
                if is_flat(images[name], counts[call_number]):
                    flat.append(name)
    wait_for_all()
    for message, count in sum(gather_object([truncations]), Counter()).items():
        if state.is_main_process:
            logger.warning(
                f"For {count} of {sum(map(counts.__getitem__, names))} calls of {type(pipeline).__name__}: {message}."
            )
    order = [name for call in calls for name in call]
    flat = sorted(gather_object(flat), key=order.index)
    if flat and state.is_main_process:
        logger.warning(
            f"{len(flat)} of {len(order)} {what} have an image of one flat color: {some_of(flat)}. Try another seed "
            "or, if it is not a safety checker but non-finite numbers, another `dtype`."
        )
    return flat


def _read_image(path: Path, size: tuple[int, int, int] | None) -> "Image | None":
    """Read an image if it is complete. Any other file is removed, so that the image is generated again."""
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
    """Tell whether an image, or one of `count` side by side, has one flat color."""
    # `getcolors(1)` is None where there are more
    return any(panel.convert("RGB").getcolors(1) is not None for panel in split_grid(image, 1, count))
