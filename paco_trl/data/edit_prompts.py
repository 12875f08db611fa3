# SPDX-License-Identifier: Apache-2.0
"""
Editing prompts: an instruction, and the image or images to edit.

Columns: `prompt` (the instruction), `image` (the source) or `images` (a list of sources) and, where known, `id`,
`height` and `width` (inference size), and `rows`, `cols` and `panels` where the edited image is itself a grid, and
`references` and `reference_roles`, which [`~paco_trl.rewards.ReferenceReward`] reads.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ..utils.text import shorten
from .columns import check_image_column, check_is_dataset, check_references, list_lengths, typed_dataset
from .dataset_files import dataset_of_rows, find_image, find_prompts, has_rows_as_text, load_split, with_image_files
from .grids import pixels_sha256
from .image_sets import SEPARATE, check_row, read_prompt_rows
from .source_images import MANY_ROWS, SourceImages
from .texts import is_text, normalized


if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from PIL import Image


logger = logging.getLogger(__name__)

_GRID_COLUMNS = ["rows", "cols", "panels"]

# Two images look the same if the pixels of their thumbnails of this side differ by less on average (of 255). Encoding
# and resizing change less than 3; different images differ by tens
_THUMBNAIL = 16
_LOOKS_THE_SAME = 8


def check_edit_columns(dataset: "Dataset", name: str = "dataset") -> None:
    """
    Check that a dataset has the format of editing prompts, without opening its images ([`SourceImages`] does that).

    Args:
        dataset ([`~datasets.Dataset`]), name (`str`, *optional*, defaults to `"dataset"`):
            The dataset, and its name in errors.

    Raises:
        ValueError: If it has no rows, a column is missing or of the wrong type, there are both `image` and `images`,
        or a row has an empty instruction, half a size, or a grid that does not fit its panels.
    """
    check_is_dataset(dataset, name)
    names = dataset.column_names
    sources = [column for column in ("image", "images") if column in names]
    if "prompt" not in names or len(sources) != 1:
        hint = "Rename or add them."
        if _is_gedit(names):
            hint = "Convert GEdit-Bench with `paco_trl.data.convert_gedit_bench(dataset)`."
        elif _is_sharegpt(names):
            hint = "Convert ShareGPT-4o-Image with `paco_trl.data.convert_sharegpt_4o_image(dataset, image_folder)`."
        elif "references" in names:
            hint = "Prompts with `references` alone are no edits: leave `--edits` out, or set it to `False`."
        raise ValueError(f"Editing prompts need `prompt` and either `image` or `images`; `{name}` has {names}. {hint}")
    check_image_column(dataset, sources[0], name, decoded=False, is_list=sources == ["images"])
    check_references(dataset, name)

    plain = dataset.with_format(None)
    prompts = list(plain["prompt"])
    for row, prompt in enumerate(prompts):
        if not is_text(prompt):
            raise ValueError(f"`prompt` of row {row} of `{name}` is {shorten(prompt)}. It must be an instruction.")
    sizes = [plain[column] if column in names else [None] * len(dataset) for column in ("height", "width")]
    for row, (height, width) in enumerate(zip(*sizes, strict=True)):
        if (height, width) != (None, None) and not all(type(side) is int and side > 0 for side in (height, width)):
            where = f"`height` and `width` of row {row} of `{name}`"
            raise ValueError(f"{where} are {height!r} and {width!r}. Give both, as positive ints, or neither.")
    if "layout" in names and SEPARATE in plain["layout"]:
        problem = f"Row {plain['layout'].index(SEPARATE)} of `{name}` is a set of separate images, but edits one image"
        raise ValueError(f"{problem}. Leave `layout` out, or name the images `references`.")
    missing = [column for column in _GRID_COLUMNS if column not in names]
    if len(missing) == len(_GRID_COLUMNS):
        return
    if missing:
        raise ValueError(f"`{name}` has columns of a grid without {missing}. A grid needs {_GRID_COLUMNS}.")
    for row, values in enumerate(zip(*(plain[column] for column in _GRID_COLUMNS), strict=True)):
        if values != (None, None, None):
            check_row(row, prompts[row], *values)


def _is_gedit(names: Iterable[str]) -> bool:
    return "instruction" in names and ("input_image_raw" in names or "input_image" in names)


def _is_sharegpt(names: Iterable[str]) -> bool:
    return "input_prompt" in names and "input_image" in names


def convert_gedit_bench(
    dataset: "Dataset", language: str | None = None, source_column: str | None = None
) -> "Dataset":
    """
    Convert raw rows of GEdit-Bench (https://huggingface.co/papers/2504.17761) to editing prompts. No image is decoded.

    The columns are those that public code reads from `stepfun-ai/GEdit-Bench`: `key`, `task_type`, `instruction`,
    `instruction_language`, `input_image`, `input_image_raw` and `Intersection_exist`. Not compared with the Hub.

    Args:
        dataset ([`~datasets.Dataset`]):
            The raw rows.
        language (`str`, *optional*):
            Language of the instructions to keep, `"en"` or `"cn"`; all if `None`.
        source_column (`str`, *optional*):
            Column that becomes `image`. If `None`, `input_image_raw`, in its own size, or else `input_image`, which
            the benchmark's own script shows its judge.

    Returns:
        [`~datasets.Dataset`]: the columns `id` (the key), `prompt`, `image`, `task_type`, `language` and, if the rows
        have `Intersection_exist`, `intersection` (bool): whether all models of the authors answered the row.

    Raises:
        ValueError: If a column is missing, an instruction is empty, no row is in this language, or a value of
        `Intersection_exist` is neither true nor false.
    """
    check_is_dataset(dataset, "dataset")
    names = dataset.column_names
    source = source_column or ("input_image_raw" if "input_image_raw" in names else "input_image")
    renamed = {"key": "id", "instruction": "prompt", source: "image"}
    renamed |= {"task_type": "task_type", "instruction_language": "language"}
    missing = [column for column in renamed if column not in names]
    if missing:
        raise ValueError(f"Raw GEdit-Bench rows need the columns {list(renamed)}; {missing} are missing.")
    dataset = dataset.with_format(None)
    if language is not None:
        languages = list(dataset["instruction_language"])
        if language not in languages:
            raise ValueError(f"No instruction is in the language {language!r}, only in {sorted(set(languages))}.")
        dataset = dataset.select([row for row, value in enumerate(languages) if value == language])
    intersection = list(dataset["Intersection_exist"]) if "Intersection_exist" in names else []
    for row, value in enumerate(intersection):
        if value not in (True, False):  # also 1 and 0
            raise ValueError(f"`Intersection_exist` of row {row} is {shorten(value)}, but must be true or false.")
    changed = {old: new for old, new in renamed.items() if old != new}
    dataset = dataset.select_columns(list(renamed)).rename_columns(changed)
    if intersection:
        dataset = dataset.add_column("intersection", [bool(value) for value in intersection])
    check_edit_columns(dataset)
    return dataset


def convert_sharegpt_4o_image(
    rows: "Iterable[Mapping[str, Any]] | Dataset",
    image_folder: str | Path,
    max_images: int | None = None,
    allow_remote_images: bool = False,
) -> "Dataset":
    """
    Convert raw editing rows of ShareGPT-4o-Image (https://huggingface.co/papers/2506.18095) to editing prompts.

    The layout is the one that public code reads from `text_and_image_to_image.json` of
    `FreedomIntelligence/ShareGPT-4o-Image`: `input_prompt`, `input_image` (a list of paths) and `output_image` (not
    read; its path becomes `id`), with the images in tar archives, to be extracted first. Not compared with the Hub.

    Args:
        rows (`Iterable[Mapping]` or [`~datasets.Dataset`]):
            The raw rows.
        image_folder (`str` or `Path`):
            Directory that the paths are relative to.
        max_images (`int`, *optional*):
            Largest number of sources of a row; rows with more are left out, and counted. No limit if `None`.
        allow_remote_images (`bool`, *optional*, defaults to `False`):
            Download images that rows name by `http(s)` addresses, each once. Only for datasets that you trust.

    Returns:
        [`~datasets.Dataset`]: the columns `id`, `prompt` and `image`, or `images` if any row has several sources.

    Raises:
        ValueError: If a text, a path or a file is missing (with the number of the row), or no row is left.
    """
    folder = Path(image_folder).expanduser().absolute()
    converted, left_out = [], 0
    for number, row in enumerate(rows):
        prompt, paths = row.get("input_prompt"), row.get("input_image")
        paths = [paths] if isinstance(paths, str) else paths
        where = f"Row {number} of ShareGPT-4o-Image"
        if not is_text(prompt) or not isinstance(paths, list) or not paths:
            raise ValueError(f"{where} has no instruction or no images: {shorten(dict(row))}. Leave out text alone.")
        if max_images is not None and len(paths) > max_images:
            left_out += 1
            continue
        images = [find_image(path, folder, where, allow_remote_images) for path in paths]
        converted.append((row.get("output_image"), prompt, images))
    _report_left_out(left_out, max_images)
    if not converted:
        raise ValueError("ShareGPT-4o-Image has no rows. Check the file and `max_images`.")
    if all(len(images) == 1 for *_, images in converted):
        single = [(name, prompt, image) for name, prompt, (image,) in converted]
        return typed_dataset(single, id="string", prompt="string", image="image")
    return typed_dataset(converted, id="string", prompt="string", images=["image"])


def _report_left_out(count: int, max_images: int | None) -> None:
    if count:
        logger.warning(f"{count} row(s) with more than {max_images} source image(s) (`max_images`) are left out.")


def _read_edits(
    path: Path, image_folder: str | Path | None, max_images: int | None, allow_remote_images: bool
) -> "Dataset":
    rows = read_prompt_rows(path)
    folder = path.absolute().parent if image_folder is None else Path(image_folder).expanduser().absolute()
    names = {name for row in rows for name in row}
    if _is_sharegpt(names) and "prompt" not in names:
        return convert_sharegpt_4o_image(rows, folder, max_images, allow_remote_images)
    images = ("image", "images", "references")
    return dataset_of_rows(with_image_files(rows, path, folder, images, allow_remote_images), images)


def load_edit_prompts(
    name_or_path: str | Path,
    split: str = "train",
    image_folder: str | Path | None = None,
    exclude: "Dataset | None" = None,
    max_images: int | None = None,
    source_column: str | None = None,
    allow_remote_images: bool = False,
) -> "Dataset":
    """
    Load editing prompts from the Hub or from disk, and check their columns. Images are not decoded.

    Raw rows are converted, see [`convert_gedit_bench`] and [`convert_sharegpt_4o_image`].

    Args:
        name_or_path (`str` or `Path`):
            A `.jsonl`, `.json`, `.csv` or `.tsv` file with the paths of the images in it, such as ShareGPT-4o-Image's; a
            `.parquet` file; a directory written by `save_to_disk`; or anything else that [`~datasets.load_dataset`] reads.
        split (`str`, *optional*, defaults to `"train"`):
            Split to load. A file, or a saved `Dataset`, is one split, whatever its name.
        image_folder (`str` or `Path`, *optional*):
            Directory that the paths in a file are relative to and must stay in. If `None`, the directory of the file.
        exclude ([`~datasets.Dataset`], *optional*):
            Editing prompts that must not be trained on, such as a benchmark's, see [`disjoint_from`].
        max_images (`int`, *optional*):
            Largest number of source images of a row; rows with more are left out, and counted. No limit if `None`.
        source_column (`str`, *optional*):
            Column of raw GEdit-Bench rows that becomes `image`, see [`convert_gedit_bench`]. Other rows are an error.
        allow_remote_images (`bool`, *optional*, defaults to `False`):
            Download images that rows name by `http(s)` addresses, each once. Only for datasets that you trust.

    Returns:
        [`~datasets.Dataset`]: the checked prompts.

    Raises:
        ValueError: If there is no such split, the rows are not editing prompts, an image is missing, or no row is
        left.
    """
    path, shown = find_prompts(name_or_path, "editing prompts"), repr(str(name_or_path))
    if has_rows_as_text(path):
        dataset = _read_edits(path, image_folder, max_images, allow_remote_images)
    else:
        dataset = load_split(name_or_path, split, allow_remote_images)
        if _is_sharegpt(dataset.column_names) and "prompt" not in dataset.column_names:
            if image_folder is None:
                raise ValueError(f"{shown} has raw ShareGPT-4o-Image rows. Give their images as `image_folder`.")
            needed = [name for name in ("input_prompt", "input_image", "output_image") if name in dataset.column_names]
            rows = dataset.with_format(None).select_columns(needed)  # no other image is decoded
            dataset = convert_sharegpt_4o_image(rows, image_folder, max_images, allow_remote_images)
        elif image_folder is not None:
            raise ValueError(f"`image_folder` is {str(image_folder)!r}, but {shown} names no paths. Leave it out.")
    if _is_gedit(dataset.column_names) and "prompt" not in dataset.column_names:
        dataset = convert_gedit_bench(dataset, source_column=source_column)
    elif source_column is not None:
        raise ValueError(f"`source_column` is {source_column!r}, but {shown} has no raw rows of GEdit-Bench.")
    check_edit_columns(dataset, str(name_or_path))
    if max_images is not None and "images" in dataset.column_names:
        rows_left = (list_lengths(dataset, "images") <= max_images).nonzero()[0]
        _report_left_out(len(dataset) - len(rows_left), max_images)
        if len(rows_left) == 0:
            raise ValueError(f"All rows have more than {max_images} source image(s) (`max_images`): none is left.")
        dataset = dataset.select(rows_left)
    return dataset if exclude is None else disjoint_from(dataset, exclude)


def disjoint_from(dataset: "Dataset", benchmark: "Dataset") -> "Dataset":
    """
    Leave out the editing prompts that would let a model train on what a benchmark measures.

    A row is left out when

    - one of its source images is one of the benchmark's: the same file, or the same pixels in RGB, whatever the
      instruction: the model would have seen the image;
    - or it shares its instruction with the benchmark (ignoring case, punctuation, whitespace and forms of Unicode
      characters), and a source image that looks the same in another size or compression.

    An instruction alone leaks nothing ("Remove the background."), so such a row is kept. So is, and this is a limit, a
    resized or recompressed source image with another instruction. Only rows whose image size or instruction is in the
    benchmark are decoded. The number of rows left out is logged.

    Args:
        dataset ([`~datasets.Dataset`]):
            Editing prompts to train on.
        benchmark ([`~datasets.Dataset`]):
            Editing prompts to keep out.

    Returns:
        [`~datasets.Dataset`]: the other rows of `dataset`, in their order; no image is copied.

    Raises:
        ValueError: If one does not have the format, an image cannot be read, or no row is left.
    """
    check_edit_columns(dataset, "dataset")
    check_edit_columns(benchmark, "benchmark")
    sources, held_out = SourceImages(dataset, "the dataset"), SourceImages(benchmark, "the benchmark")

    sizes: set[tuple[int, int]] = set()
    contents: set[str] = set()  # digests of files and of pixels
    thumbnails: dict[str, list[np.ndarray]] = {}
    for row, instruction in enumerate(_progress(benchmark, "Reading the benchmark")):
        images = held_out.load(row)
        sizes.update(held_out.sizes(row))
        contents.update(held_out.digests(row), map(pixels_sha256, images))
        thumbnails.setdefault(instruction, []).extend(map(_thumbnail, images))

    rows_left, same_image, same_edit = [], 0, 0
    for row, instruction in enumerate(_progress(dataset, "Comparing with the benchmark")):
        may_be_same = not sizes.isdisjoint(sources.sizes(row))
        if may_be_same and not contents.isdisjoint(sources.digests(row)):  # saves decoding
            same_image += 1
            continue
        others = thumbnails.get(instruction, [])
        images = sources.load(row) if may_be_same or others else []
        if may_be_same and not contents.isdisjoint(map(pixels_sha256, images)):
            same_image += 1
        elif any(abs(_thumbnail(image) - other).mean() < _LOOKS_THE_SAME for other in others for image in images):
            same_edit += 1
        else:
            rows_left.append(row)
    if not rows_left:
        raise ValueError(f"All {len(dataset)} rows of the dataset are in the benchmark. Choose other data.")
    left_out = same_image + same_edit
    logger.log(
        logging.WARNING if left_out else logging.INFO,
        f"Left out {left_out} of {len(dataset)} rows that are in the benchmark: {same_image} with one of its source "
        f"images, {same_edit} with one of its instructions and an image that looks the same.",
    )
    return dataset.select(rows_left)


def _progress(dataset: "Dataset", description: str) -> Iterable[str]:
    """Iterate over the normalized instructions, with a progress bar."""
    prompts = dataset.with_format(None)["prompt"]
    return map(normalized, tqdm(prompts, desc=description, unit="row", disable=len(dataset) <= MANY_ROWS))


def _thumbnail(image: "Image.Image") -> "np.ndarray":
    import numpy as np
    from PIL import Image

    small = image.convert("L").resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.int16)  # (16, 16)
