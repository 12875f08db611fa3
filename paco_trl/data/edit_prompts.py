# SPDX-License-Identifier: Apache-2.0
"""
Editing prompts: an instruction, and the image or images to edit.

Columns: `prompt` (the instruction), `image` (the source) or `images` (a list of sources) and, where known, `id`,
`height` and `width` (inference size), and `rows`, `cols` and `panels` where the edited image is itself a grid, and
`references` and `reference_roles`, which [`~paco_trl.rewards.ReferenceReward`] reads.
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
from .image_sets import GRID_COLUMNS, SEPARATE, check_row
from .source_images import MANY_ROWS, SourceImages


logger = logging.getLogger(__name__)

_IMAGE_COLUMNS = ("image", "images", "references", "input_image")


def check_edit_columns(dataset: Dataset, name: str = "dataset") -> None:
    """
    Check that a dataset has the format of editing prompts, without opening its images ([`SourceImages`] does that). Raises
    `ValueError` if it has no rows, a column is missing or of the wrong type, there are both `image` and `images`, or a row
    has an empty instruction, half a size, or a grid that does not fit its panels. `name` is the dataset's in errors.
    """
    check_is_dataset(dataset, name)
    names = dataset.column_names
    sources = [column for column in ("image", "images") if column in names]
    if "prompt" not in names or len(sources) != 1:
        hint = "Rename or add them. Without source images use `--edits False`, or `load_image_set_prompts`."
        if _is_gedit(names):
            hint = "Convert GEdit-Bench with `paco_trl.data.convert_gedit_bench(dataset)`."
        raise ValueError(f"Editing prompts need `prompt` and either `image` or `images`; `{name}` has {names}. {hint}")
    check_image_column(dataset, sources[0], name, decoded=False, is_list=sources == ["images"])
    check_references(dataset, name)
    check_values(dataset, name, "prompt", is_text, "an instruction")
    check_values(dataset, name, "layout", lambda layout: layout != SEPARATE, "left out: a row edits one image")
    needed, size = ("prompt", *GRID_COLUMNS), ("height", "width")
    for column in size:
        check_values(dataset, name, column, is_size, "a number of pixels")
    known = [column for column in (*needed, *size) if column in names]
    for row_number, row in enumerate(dataset.with_format(None).select_columns(known)):
        height, width = map(row.get, size)
        if (height is None) != (width is None):
            raise ValueError(f"Row {row_number} of `{name}` is {height} x {width} pixels. Give both, or neither.")
        if any(row.get(column) is not None for column in GRID_COLUMNS):
            check_row(row_number, *map(row.get, needed))


def _is_gedit(names: Iterable[str]) -> bool:
    # InstructPix2Pix and others have columns of these names too
    return {"instruction", "task_type"} <= {*names} and ("input_image_raw" in names or "input_image" in names)


def convert_gedit_bench(dataset: Dataset, language: str | None = None, source_column: str | None = None) -> Dataset:
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
        ValueError: If a column is missing, an instruction is empty, or no row is in this language.
    """
    source = source_column or ("input_image_raw" if "input_image_raw" in dataset.column_names else "input_image")
    renamed = {"key": "id", "instruction": "prompt", source: "image", "instruction_language": "language"}
    renamed |= {"Intersection_exist": "intersection"} if "Intersection_exist" in dataset.column_names else {}
    dataset = dataset.with_format(None).select_columns([*renamed, "task_type"]).rename_columns(renamed)
    if language is not None:
        dataset = dataset.select([row for row, value in enumerate(dataset["language"]) if value == language])
    if "intersection" in dataset.column_names:
        dataset = dataset.cast_column("intersection", Value("bool"))  # also of 1 and 0
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
            A `.jsonl`, `.json`, `.csv` or `.tsv` file with the paths of the images in it, such as ShareGPT-4o-Image's; a
            `.parquet` file; a directory written by `save_to_disk`; or anything else that [`~datasets.load_dataset`] reads.
        split (`str`, *optional*, defaults to `"train"`):
            Split to load, or a slice of it, such as `"train[:50%]"`. A file, or a saved `Dataset`, is one split, `"train"`.
        image_folder (`str` or `Path`, *optional*):
            Directory that the paths in a file are relative to and must stay in. If `None`, the directory of the file.
        exclude ([`~datasets.Dataset`], *optional*):
            Editing prompts that must not be trained on, such as a benchmark's, see [`disjoint_from`].
        max_images (`int`, *optional*):
            Largest number of source images of a row; rows with more are left out, and counted. No limit if `None`.
        source_column (`str`, *optional*):
            Column of raw GEdit-Bench rows that becomes `image`, see [`convert_gedit_bench`]. Other rows are an error.
        config (`str`, *optional*):
            Configuration of the dataset, where it has several: `name` of [`~datasets.load_dataset`].

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
        renamed = {"output_image": "id", "input_prompt": "prompt", "input_image": "images"}
        dataset = dataset.select_columns(list(renamed)).rename_columns(renamed)
    if max_images is not None and "images" in dataset.column_names:
        rows_left = (list_lengths(dataset, "images") <= max_images).nonzero()[0].tolist()
        dataset = _keep(dataset, rows_left, f"more than {max_images} source image(s) (`max_images`)")
    check_edit_columns(dataset, str(name_or_path))
    return dataset if exclude is None else disjoint_from(dataset, exclude)


def disjoint_from(dataset: Dataset, benchmark: Dataset) -> Dataset:
    """
    Leave out the editing prompts whose source images a benchmark has: a model would train on what it measures.

    Images are the same if their pixels in RGB are, whatever file they are in; a resized or recompressed copy is not
    found. Only images of a size that the benchmark has are decoded. The number of rows left out is logged.

    Returns the other rows of `dataset`, in their order; no image is copied. Raises `ValueError` if one does not have the
    format, an image cannot be read, or no row is left.
    """
    check_edit_columns(dataset, "dataset")
    check_edit_columns(benchmark, "benchmark")
    sources, held_out = SourceImages(dataset, "the dataset"), SourceImages(benchmark, "the benchmark")
    sizes = {size for row in range(len(held_out)) for size in held_out.sizes(row)}
    pixels = {pixels_sha256(image) for row in range(len(held_out)) for image in held_out.load(row)}
    rows_left = [
        row
        for row in tqdm(range(len(sources)), desc="Comparing with the benchmark", disable=len(sources) <= MANY_ROWS)
        if sizes.isdisjoint(sources.sizes(row)) or pixels.isdisjoint(map(pixels_sha256, sources.load(row)))
    ]
    if not rows_left:
        raise ValueError(f"All {len(dataset)} rows of the dataset are in the benchmark. Choose other data.")
    return _keep(dataset, rows_left, "a source image of the benchmark")


def _keep(dataset: Dataset, rows: Sequence[int], reason: str) -> Dataset:
    left_out = len(dataset) - len(rows)
    level = logging.WARNING if left_out else logging.INFO
    logger.log(level, f"Left out {left_out} of {len(dataset)} rows that have {reason}.")
    return dataset.select(rows)
