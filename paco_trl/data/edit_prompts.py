# SPDX-License-Identifier: Apache-2.0
"""
Editing prompts: an instruction, and the image or images to edit.

Columns: `prompt` (the instruction) and `image` (the source) or `images` (a list of sources). Optional: `id`; `height`
and `width` (inference size); `rows`, `cols` and `panels` if the edited image is a grid; `references` and
`reference_roles` for [`~paco_trl.rewards.ReferenceReward`].
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from datasets import Dataset, Value
from tqdm.auto import tqdm

from ..utils.text import is_text
from .columns import check_image_column, check_is_dataset, check_references, check_values, is_size, list_lengths
from .dataset_files import load_split
from .grids import pixels_sha256
from .image_sets import GRID_COLUMNS, SEPARATE, check_grid_row
from .source_images import MANY_ROWS, SourceImages


logger = logging.getLogger(__name__)

_IMAGE_COLUMNS = ("image", "images", "references", "input_image")


def check_edit_columns(dataset: Dataset, name: str = "dataset") -> None:
    """
    Check that a dataset has the format of editing prompts, without opening its images ([`SourceImages`] does that).

    Raises a `ValueError` if it has no rows, a column is missing or of the wrong type, there are both `image` and
    `images`, or a row has an empty instruction, half a size, or a grid that does not fit its panels. Errors call the
    dataset `name`.
    """
    check_is_dataset(dataset, name)
    names = dataset.column_names
    sources = [column for column in ("image", "images") if column in names]
    if "prompt" not in names or len(sources) != 1:
        hint = "Rename or add them. If there are no source images, use `--edits False`, or `load_image_set_prompts`."
        if {"prompt", "target"} == {*names}:  # a directory of images with texts
            hint = "Put source images in `input1/`, and edited ones with their texts in `target/`; or, without these, "
            hint += 'write rows such as {"image": "photos/1.jpg", "prompt": "Add a hat."} into a .jsonl file.'
        if _is_gedit(names):
            hint = "Convert GEdit-Bench with `paco_trl.data.convert_gedit_bench(dataset)`."
        raise ValueError(f"Editing prompts need `prompt` and either `image` or `images`; `{name}` has {names}. {hint}")
    check_image_column(dataset, sources[0], name, decoded=False, is_list=sources == ["images"])
    check_references(dataset, name)
    check_values(dataset, name, "prompt", is_text, "an instruction")
    check_values(dataset, name, "layout", lambda layout: layout != SEPARATE, "left out: a row edits one image")
    row_columns = ("prompt", *GRID_COLUMNS)
    size = ("height", "width")
    for column in size:
        check_values(dataset, name, column, is_size, "a number of pixels")
    columns = [column for column in (*row_columns, *size) if column in names]
    for row_index, row in enumerate(dataset.with_format(None).select_columns(columns)):
        height, width = map(row.get, size)
        if (height is None) != (width is None):
            raise ValueError(f"Row {row_index} of `{name}` is {height} x {width} pixels. Give both, or neither.")
        if any(row.get(column) is not None for column in GRID_COLUMNS):
            check_grid_row(row_index, *map(row.get, row_columns))


def _is_gedit(names: Iterable[str]) -> bool:
    # More than one column, since other datasets, such as InstructPix2Pix, share these names
    return {"instruction", "task_type"} <= {*names} and ("input_image_raw" in names or "input_image" in names)


def convert_gedit_bench(dataset: Dataset, language: str | None = None, source_column: str | None = None) -> Dataset:
    """
    Convert raw rows of GEdit-Bench (https://huggingface.co/papers/2504.17761) to editing prompts. No image is decoded.

    Public code reads these columns from `stepfun-ai/GEdit-Bench`: `key`, `task_type`, `instruction`,
    `instruction_language`, `input_image`, `input_image_raw` and `Intersection_exist`. Not verified against the Hub.

    Args:
        dataset ([`~datasets.Dataset`]):
            Raw rows.
        language (`str`, *optional*):
            Language of the instructions to keep, `"en"` or `"cn"`; all if `None`.
        source_column (`str`, *optional*):
            Column that becomes `image`. If `None`, `input_image_raw`, in its original size, if present, otherwise
            `input_image`, which the benchmark's script shows to its judge.

    Returns:
        [`~datasets.Dataset`]: the columns `id` (the key), `prompt`, `image`, `task_type`, `language` and, if the rows
        have `Intersection_exist`, `intersection` (bool): whether all of the authors' models answered the row.

    Raises:
        ValueError: If a column is missing, an instruction is empty, or no row is in this language.
    """
    source = source_column or ("input_image_raw" if "input_image_raw" in dataset.column_names else "input_image")
    new_names = {"key": "id", "instruction": "prompt", source: "image", "instruction_language": "language"}
    new_names |= {"Intersection_exist": "intersection"} if "Intersection_exist" in dataset.column_names else {}
    dataset = dataset.with_format(None).select_columns([*new_names, "task_type"]).rename_columns(new_names)
    if language is not None:
        dataset = dataset.select([row for row, value in enumerate(dataset["language"]) if value == language])
    if "intersection" in dataset.column_names:
        dataset = dataset.cast_column("intersection", Value("bool"))  # from 1 and 0, too
    check_edit_columns(dataset)
    return dataset


def load_edit_prompts(
    name_or_path: str | Path,
    split: str = "train",
    image_folder: str | Path | None = None,
    exclude: Dataset | None = None,
    max_images: int | None = None,
    source_column: str | None = None,
    config: str | None = None,
) -> Dataset:
    """
    Load editing prompts from the Hub or from disk, and check their columns. Images are not decoded.

    Raw rows of GEdit-Bench ([`convert_gedit_bench`]) and of ShareGPT-4o-Image
    (https://huggingface.co/papers/2506.18095: `input_prompt`, `input_image` and `output_image`) are converted.

    Args:
        name_or_path (`str` or `Path`):
            A `.jsonl`, `.json`, `.csv` or `.tsv` file with image paths, such as ShareGPT-4o-Image's; a `.parquet`
            file; a directory written by `save_to_disk`; or anything else that [`~datasets.load_dataset`] reads.
        split (`str`, *optional*, defaults to `"train"`):
            Split or slice to load, such as `"train[:50%]"`. A file or a saved `Dataset` has a single split, `"train"`.
        image_folder (`str` or `Path`, *optional*):
            Directory that image paths are relative to, and must stay in. Defaults to the directory of the file.
        exclude ([`~datasets.Dataset`], *optional*):
            Editing prompts to leave out, such as a benchmark's, see [`exclude_benchmark_images`].
        max_images (`int`, *optional*):
            Most source images per row. Rows with more are left out, and their number is logged. If `None`, no limit.
        source_column (`str`, *optional*):
            Column that becomes `image`, only for raw rows of GEdit-Bench, see [`convert_gedit_bench`].
        config (`str`, *optional*):
            Configuration of the dataset if it has several: `name` of [`~datasets.load_dataset`].

    Raises:
        ValueError: If there is no such split, the rows are not editing prompts, or no row is left.
    """
    dataset = load_split(name_or_path, split, _IMAGE_COLUMNS, image_folder, config)
    names = dataset.column_names
    if "prompt" not in names and _is_gedit(names):
        dataset = convert_gedit_bench(dataset, source_column=source_column)
    elif source_column is not None:
        raise ValueError(f"`source_column` is {source_column!r}, but '{name_or_path}' has no raw rows of GEdit-Bench.")
    elif "prompt" not in names and {"input_prompt", "input_image"} <= {*names}:  # ShareGPT-4o-Image
        new_names = {"output_image": "id", "input_prompt": "prompt", "input_image": "images"}
        dataset = dataset.select_columns(list(new_names)).rename_columns(new_names)
    if max_images is not None and "images" in dataset.column_names:
        remaining_rows = (list_lengths(dataset, "images") <= max_images).nonzero()[0].tolist()
        dataset = _keep(dataset, remaining_rows, f"more than {max_images} source image(s) (`max_images`)")
    check_edit_columns(dataset, str(name_or_path))
    return dataset if exclude is None else exclude_benchmark_images(dataset, exclude)


def exclude_benchmark_images(dataset: Dataset, benchmark: Dataset) -> Dataset:
    """
    Leave out editing prompts with source images of a benchmark, which a model must not train on.

    Images are equal if their RGB pixels are, in whatever files; resized or recompressed copies are not found. Only
    images with a size of the benchmark's are decoded. The number of rows left out is logged.

    Returns the remaining rows of `dataset` in their order, without copying images. Raises a `ValueError` if a dataset
    does not have the format, an image cannot be read, or no row is left.
    """
    check_edit_columns(dataset, "dataset")
    check_edit_columns(benchmark, "benchmark")
    sources = SourceImages(dataset, "the dataset")
    benchmark_sources = SourceImages(benchmark, "the benchmark")
    sizes = {size for row in range(len(benchmark_sources)) for size in benchmark_sources.sizes(row)}
    pixels = {pixels_sha256(image) for row in range(len(benchmark_sources)) for image in benchmark_sources.load(row)}
    remaining_rows = [
        row
        for row in tqdm(range(len(sources)), desc="Comparing with the benchmark", disable=len(sources) <= MANY_ROWS)
        if sizes.isdisjoint(sources.sizes(row)) or pixels.isdisjoint(map(pixels_sha256, sources.load(row)))
    ]
    if not remaining_rows:
        raise ValueError(f"All {len(dataset)} rows of the dataset are in the benchmark. Choose other data.")
    return _keep(dataset, remaining_rows, "a source image of the benchmark")


def _keep(dataset: Dataset, rows: Sequence[int], reason: str) -> Dataset:
    left_out = len(dataset) - len(rows)
    level = logging.WARNING if left_out else logging.INFO
    logger.log(level, f"Left out {left_out} of {len(dataset)} rows that have {reason}.")
    return dataset.select(rows)
