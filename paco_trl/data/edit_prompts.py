# SPDX-License-Identifier: Apache-2.0
"""Editing prompts: an instruction, and the image or images that it is about.

The columns are `prompt` (the instruction), `image` (the source) or `images` (a list of sources) and, where known, `id`,
`height` and `width` (inference size), and `rows`, `cols` and `panels` where the edited image is itself a grid.
"""

import hashlib
import logging
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ..utils.text import shorten
from .columns import check_is_dataset
from .dataset_files import path_inside
from .image_sets import check_row, read_json_rows
from .source_images import SourceImages


if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from PIL import Image


logger = logging.getLogger(__name__)

_GRID_COLUMNS = ["rows", "cols", "panels"]

# Side of the thumbnails that say whether two images look the same, and the mean difference of their pixels (of 255)
# below which they do. Encoding and resizing change less than 3; different pictures differ by tens
_THUMBNAIL = 16
_LOOKS_THE_SAME = 8

# Rows from which on a comparison shows a progress bar
_MANY_ROWS = 1000


def check_edit_columns(dataset: "Dataset", name: str = "dataset") -> None:
    """
    Check that a dataset is in the format of editing prompts, without reading its images.

    Images are not opened: [`SourceImages`] does that.

    Args:
        dataset ([`~datasets.Dataset`]):
            The dataset.
        name (`str`, *optional*, defaults to `"dataset"`):
            Name of the dataset in errors.

    Raises:
        TypeError: If it is no [`~datasets.Dataset`].
        ValueError: If it has no rows, if a column is missing or of the wrong type, if there are both `image` and
            `images`, or if a row has an empty instruction, half a size, or a grid that its panels do not fit.
    """
    check_is_dataset(dataset, name)
    names = dataset.column_names
    sources = [column for column in ("image", "images") if column in names]
    if "prompt" not in names or not sources:
        missing = [
            column for column, there in (("prompt", "prompt" in names), ("image` or `images", sources)) if not there
        ]
        hint = "Rename or add them."
        if _is_gedit(names):
            hint = "These look like raw GEdit-Bench rows: `paco_trl.data.convert_gedit_bench(dataset)`."
        elif _is_sharegpt(names):
            hint = (
                "These look like raw ShareGPT-4o-Image rows: "
                "`paco_trl.data.convert_sharegpt_4o_image(dataset, image_folder)`."
            )
        raise ValueError(
            f"Editing prompts need `{'` and `'.join(missing)}`, but `{name}` has only the columns {names}. {hint}"
        )
    if len(sources) == 2:
        raise ValueError(
            f"`{name}` has both `image` and `images`, and nothing says which of them is edited. Remove one: "
            '`dataset.remove_columns("image")`.'
        )
    _check_image_column(dataset, sources[0], name)

    plain = dataset.with_format(None)
    prompts = list(plain["prompt"])
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(
                f"`prompt` of row {row} of `{name}` is {shorten(prompt)}. It must be the instruction, a text that is "
                "not empty."
            )
    sizes = [plain[column] if column in names else [None] * len(dataset) for column in ("height", "width")]
    for row, size in enumerate(zip(*sizes, strict=True)):
        if size != (None, None) and not all(type(value) is int and value > 0 for value in size):
            raise ValueError(
                f"`height` and `width` of row {row} of `{name}` are {size[0]!r} and {size[1]!r}. Give both, as an int "
                "of at least 1, or neither: the size then follows from the source image."
            )
    grid = [column for column in _GRID_COLUMNS if column in names]
    if not grid:
        return
    if grid != _GRID_COLUMNS:
        raise ValueError(
            f"`{name}` has {grid} without {[column for column in _GRID_COLUMNS if column not in grid]}. An edited "
            "image that is a grid needs all three; remove them where it is none."
        )
    for row, values in enumerate(zip(*(plain[column] for column in _GRID_COLUMNS), strict=True)):
        if values != (None, None, None):
            check_row(row, prompts[row], *values)


def _check_image_column(dataset: "Dataset", column: str, name: str) -> None:
    from datasets import Image as ImageFeature
    from datasets import LargeList, List

    feature = dataset.features[column]
    if column == "image":
        fits, wanted, cast = isinstance(feature, ImageFeature), "an image", "datasets.Image()"
    else:
        fits = isinstance(feature, (List, LargeList)) and isinstance(feature.feature, ImageFeature)
        wanted, cast = "a list of images", "datasets.List(datasets.Image())"
    if not fits:
        raise ValueError(
            f"The column `{column}` of `{name}` has the type {shorten(feature)}, but it must be {wanted}. Convert it "
            f'(paths become images): `dataset.cast_column("{column}", {cast})`.'
        )


def _is_gedit(names: Iterable[str]) -> bool:
    return "instruction" in names and ("input_image_raw" in names or "input_image" in names)


def _is_sharegpt(names: Iterable[str]) -> bool:
    return "input_prompt" in names and "input_image" in names


def convert_gedit_bench(
    dataset: "Dataset", language: str | None = None, source_column: str | None = None
) -> "Dataset":
    """
    Convert raw rows of GEdit-Bench (https://huggingface.co/papers/2504.17761) to editing prompts.

    Images are not decoded or copied.

    The columns are those that public code reads from `stepfun-ai/GEdit-Bench`: `key`, `task_type`, `instruction`,
    `instruction_language`, `input_image`, `input_image_raw` and `Intersection_exist`. They were not compared with the
    data on the Hub.

    Args:
        dataset ([`~datasets.Dataset`]):
            The raw rows.
        language (`str`, *optional*):
            Language of the instructions to keep, `"en"` or `"cn"`. When left out, all.
        source_column (`str`, *optional*):
            Column that becomes `image`. When left out, `input_image_raw`, in its own size, or `input_image` where that
            column is missing. The benchmark's own script shows its judge `input_image`.

    Returns:
        [`~datasets.Dataset`]: the columns `id` (the key), `prompt`, `image`, `task_type` and `language`, and where the
        rows have `Intersection_exist`, `intersection` (bool): whether the row is in the subset of instructions that all
        models of the benchmark's authors answered.

    Raises:
        TypeError: If it is no [`~datasets.Dataset`].
        ValueError: If a column is missing, if an instruction is empty, if no row is in this language, or if a value of
            `Intersection_exist` is neither true nor false.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from paco_trl.data import convert_gedit_bench

    >>> benchmark = convert_gedit_bench(load_dataset("stepfun-ai/GEdit-Bench", split="train"), language="en")
    ```
    """
    check_is_dataset(dataset, "dataset")
    names = dataset.column_names
    source = source_column or ("input_image_raw" if "input_image_raw" in names else "input_image")
    renamed = {
        "key": "id",
        "instruction": "prompt",
        source: "image",
        "task_type": "task_type",
        "instruction_language": "language",
    }
    missing = [column for column in renamed if column not in names]
    if missing:
        raise ValueError(
            f"Raw GEdit-Bench rows need the columns {list(renamed)}, but {missing} are missing; there are {names}. "
            "Rows that already have `prompt` and `image` need no conversion."
        )
    dataset = dataset.with_format(None)
    if language is not None:
        languages = list(dataset["instruction_language"])
        if language not in languages:
            raise ValueError(f"No instruction is in the language {language!r}, only in {sorted(set(languages))}.")
        dataset = dataset.select([row for row, value in enumerate(languages) if value == language])
    subset = _intersection(dataset) if "Intersection_exist" in names else None
    dataset = dataset.select_columns(list(renamed)).rename_columns(
        {old: new for old, new in renamed.items() if old != new}
    )
    if subset is not None:
        dataset = dataset.add_column("intersection", subset)
    check_edit_columns(dataset)
    return dataset


def _intersection(dataset: "Dataset") -> list[bool]:
    values = list(dataset["Intersection_exist"])
    for row, value in enumerate(values):
        if value not in (True, False):  # also 1 and 0
            raise ValueError(
                f"`Intersection_exist` of row {row} is {shorten(value)}, but must be true or false. Correct it, or remove "
                'the column: `dataset.remove_columns("Intersection_exist")`.'
            )
    return [bool(value) for value in values]


def convert_sharegpt_4o_image(
    rows: "Iterable[Mapping[str, Any]] | Dataset", image_folder: str | Path, max_images: int | None = None
) -> "Dataset":
    """
    Convert raw editing rows of ShareGPT-4o-Image (https://huggingface.co/papers/2506.18095) to editing prompts.

    The images that GPT-4o made of the sources are not needed and left out; `id` is the path of that image, where there
    is one. Images are stored as paths; that the files exist is checked.

    The layout is the one that public code reads from `text_and_image_to_image.json` of
    `FreedomIntelligence/ShareGPT-4o-Image`: `input_prompt`, `input_image` (a list of paths) and `output_image`, with
    the images in tar archives, to be extracted first. It was not compared with the data on the Hub.

    Args:
        rows (`Iterable[Mapping]` or [`~datasets.Dataset`]):
            The raw rows.
        image_folder (`str` or `Path`):
            Folder that the paths are relative to.
        max_images (`int`, *optional*):
            Largest number of sources of a row; rows with more are left out, and counted. When left out, all are kept.

    Returns:
        [`~datasets.Dataset`]: the columns `id`, `prompt` and `image`, or `images` if any row has several sources.

    Raises:
        ValueError: With the number of the row: a text or a path is missing, or there is no such file. Or no row is
            left.
    """
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    folder = Path(image_folder).expanduser().absolute()
    ids, prompts, sources, left_out = [], [], [], 0
    for number, row in enumerate(rows):
        prompt, paths = row.get("input_prompt"), row.get("input_image")
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(prompt, str) or not prompt.strip() or not isinstance(paths, list) or not paths:
            raise ValueError(
                f"Row {number} of ShareGPT-4o-Image has the `input_prompt` {shorten(prompt)} and the `input_image` "
                f"{shorten(paths)}. It must have an instruction and at least one path; rows for drawing from text "
                "alone are no editing prompts."
            )
        if max_images is not None and len(paths) > max_images:
            left_out += 1
            continue
        ids.append(row.get("output_image"))
        prompts.append(prompt)
        sources.append([_find_image(path, folder, f"Row {number} of ShareGPT-4o-Image") for path in paths])
    _report_left_out(left_out, max_images)
    if not prompts:
        raise ValueError("ShareGPT-4o-Image has no rows. Check the file that they come from, and `max_images`.")
    features = {"id": Value("string"), "prompt": Value("string")}
    if all(len(paths) == 1 for paths in sources):
        column, images, feature = "image", [path for (path,) in sources], ImageFeature()
    else:
        column, images, feature = "images", sources, List(ImageFeature())
    return Dataset.from_dict(
        {"id": ids, "prompt": prompts, column: images}, features=Features({**features, column: feature})
    )


def _at_most(dataset: "Dataset", max_images: int) -> "Dataset":
    """The rows with so many source images at most. Nothing is decoded."""
    table = dataset.select_columns("images").with_format("arrow")
    counts = [len(table[row].column("images")[0].values or []) for row in range(len(dataset))]
    kept = [row for row, count in enumerate(counts) if count <= max_images]
    _report_left_out(len(counts) - len(kept), max_images)
    if not kept:
        raise ValueError(f"All rows have more than {max_images} source image(s) (`max_images`): none is left.")
    return dataset.select(kept)


def _report_left_out(count: int, max_images: int | None) -> None:
    if count:
        logger.warning(f"{count} row(s) with more than {max_images} source image(s) (`max_images`) are left out.")


def _find_image(path: Any, folder: Path, where: str) -> str:
    if isinstance(path, str) and "://" in path:
        raise ValueError(f"{where}: the image {path!r} is no file on this machine. Download it first.")
    try:
        found = folder / path_inside(path)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not found.is_file():
        raise ValueError(
            f"{where}: there is no image {found}. Check the path, that archives are extracted, and the folder that "
            "paths are relative to (`image_folder`)."
        )
    return str(found)


def _edit_rows_of_file(path: Path, image_folder: str | Path | None, max_images: int | None) -> "Dataset":
    from datasets import Dataset, List
    from datasets import Image as ImageFeature

    rows = read_json_rows(path)
    folder = path.absolute().parent if image_folder is None else Path(image_folder).expanduser().absolute()
    # Every key of every row: `Dataset.from_list` takes the keys of the first row only
    names = list(dict.fromkeys(name for row in rows for name in row))
    if _is_sharegpt(names) and "prompt" not in names:
        return convert_sharegpt_4o_image(rows, folder, max_images)
    columns = {name: [row.get(name) for row in rows] for name in names}
    if "image" in columns:
        columns["image"] = [
            _find_image(image, folder, f"Row {number} of {path}") for number, image in enumerate(columns["image"])
        ]
    if "images" in columns:
        for number, images in enumerate(columns["images"]):
            if not isinstance(images, list) or not images:
                raise ValueError(
                    f"Row {number} of {path}: `images` is {images!r}. It must be a list of at least one path."
                )
        columns["images"] = [
            [_find_image(image, folder, f"Row {number} of {path}") for image in images]
            for number, images in enumerate(columns["images"])
        ]
    dataset = Dataset.from_dict(columns)
    for name, feature in (("image", ImageFeature()), ("images", List(ImageFeature()))):
        if name in columns:
            dataset = dataset.cast_column(name, feature)
    return dataset


def load_edit_prompts(
    name_or_path: str | Path,
    split: str = "train",
    image_folder: str | Path | None = None,
    exclude: "Dataset | None" = None,
    max_images: int | None = None,
    source_column: str | None = None,
) -> "Dataset":
    """
    Load editing prompts, from the Hub or from disk, and check their columns. Images are not decoded.

    Raw rows of GEdit-Bench and ShareGPT-4o-Image are converted, see [`convert_gedit_bench`] and
    [`convert_sharegpt_4o_image`]; what these say of the layout of the published data holds here too.

    Args:
        name_or_path (`str` or `Path`):
            One of:

            - a `.jsonl` file, or a `.json` file with a list of rows or with one row on each line, with the paths of
              the images in it; ShareGPT-4o-Image is such a file;
            - a folder written by `save_to_disk` of a [`~datasets.Dataset`] or [`~datasets.DatasetDict`];
            - any other folder that [`~datasets.load_dataset`] reads, or the id of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Split to load. A file, or a saved `Dataset`, is one split, which is loaded whatever its name.
        image_folder (`str` or `Path`, *optional*):
            Folder that the paths in a file are relative to, and that they may not leave. When left out, the folder of
            the file.
        exclude ([`~datasets.Dataset`], *optional*):
            Editing prompts that must not be trained on, such as a benchmark's: rows that are among them are left out,
            see [`disjoint_from`].
        max_images (`int`, *optional*):
            Largest number of source images of a row, such as the pipeline takes; rows with more are left out, and
            counted. When left out, all are kept.
        source_column (`str`, *optional*):
            Column of raw GEdit-Bench rows that becomes `image`, see [`convert_gedit_bench`]. Other rows are an error.

    Returns:
        [`~datasets.Dataset`]: the checked prompts.

    Raises:
        FileNotFoundError: If `name_or_path` is a local path and does not exist.
        ValueError: If there is no such split, if the rows are not editing prompts, if a file names an image that is
            not there, or if `exclude` leaves no rows.

    Example:

    ```python
    >>> from paco_trl.data import load_edit_prompts

    >>> benchmark = load_edit_prompts("stepfun-ai/GEdit-Bench")
    >>> dataset = load_edit_prompts("ShareGPT-4o-Image/text_and_image_to_image.json", exclude=benchmark)
    ```
    """
    path = Path(name_or_path).expanduser()
    looks_local = isinstance(name_or_path, Path) or name_or_path.startswith((".", "/", "~"))
    if not path.exists() and (looks_local or path.suffix in (".json", ".jsonl")):
        raise FileNotFoundError(f"There is no file or folder {str(name_or_path)!r} with editing prompts.")
    if path.is_file():
        if path.suffix not in (".json", ".jsonl"):
            raise ValueError(f"The file {str(path)!r} is not read: editing prompts are `.jsonl` or `.json` files.")
        dataset = _edit_rows_of_file(path, image_folder, max_images)
    else:
        dataset = _load_split(path, str(name_or_path), split)
        if _is_sharegpt(dataset.column_names) and "prompt" not in dataset.column_names:
            if image_folder is None:
                raise ValueError(
                    f"{str(name_or_path)!r} has raw ShareGPT-4o-Image rows, which name their images by path. Download "
                    "and extract the archives, and give their folder as `image_folder`."
                )
            needed = [name for name in ("input_prompt", "input_image", "output_image") if name in dataset.column_names]
            rows = dataset.with_format(None).select_columns(needed)
            dataset = convert_sharegpt_4o_image(rows, image_folder, max_images)
        elif image_folder is not None:
            raise ValueError(
                f"`image_folder` is {str(image_folder)!r}, but {str(name_or_path)!r} is no file with paths in it: its "
                "images are where it says. Leave `image_folder` out."
            )
    if _is_gedit(dataset.column_names) and "prompt" not in dataset.column_names:
        dataset = convert_gedit_bench(dataset, source_column=source_column)
    elif source_column is not None:
        raise ValueError(
            f"`source_column` is {source_column!r}, but {str(name_or_path)!r} has no raw rows of GEdit-Bench, only the "
            f"columns {dataset.column_names}. Give the benchmark's own rows."
        )
    check_edit_columns(dataset, str(name_or_path))
    if max_images is not None and "images" in dataset.column_names:
        dataset = _at_most(dataset, max_images)
    return dataset if exclude is None else disjoint_from(dataset, exclude)


def _load_split(path: Path, name: str, split: str) -> "Dataset":
    from datasets import DatasetDict, load_dataset, load_from_disk

    if not (path / "state.json").is_file() and not (path / "dataset_dict.json").is_file():
        return load_dataset(str(path) if path.is_dir() else name, split=split)
    dataset = load_from_disk(str(path))
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise ValueError(f"{str(path)!r} has no split {split!r}, only {list(dataset)}. Choose one of these.")
        dataset = dataset[split]
    return dataset


def disjoint_from(dataset: "Dataset", benchmark: "Dataset") -> "Dataset":
    """
    Leave out the editing prompts that would let a model train on what a benchmark measures.

    A row is left out when

    - one of its source images is a source image of the benchmark: the same file, or the same pixels in RGB in another
      encoding. The instruction does not matter: to be rewarded for keeping a picture as it is, is to have seen it;
    - or its instruction is one of the benchmark, and one of its source images looks like one that the benchmark has
      with this instruction: the same picture in another size or compression. Instructions are compared without regard
      to case, punctuation, whitespace and the forms of Unicode characters.

    An instruction alone leaks nothing ("Remove the background." is asked of many pictures), so a row that shares only
    that is kept. So is, and this is a limit, a resized or recompressed source image with an instruction of its own.

    Rows are read one by one, and only those whose image size or instruction is in the benchmark are decoded. The
    result selects rows of the dataset and copies no images. One line in the log says how many were left out.

    Args:
        dataset ([`~datasets.Dataset`]):
            Editing prompts to train on.
        benchmark ([`~datasets.Dataset`]):
            Editing prompts to keep away from, see [`convert_gedit_bench`].

    Returns:
        [`~datasets.Dataset`]: the other rows of `dataset`, in their order.

    Raises:
        TypeError: If one of the two is no [`~datasets.Dataset`].
        ValueError: If one is not in the format, if an image cannot be read, or if no rows are left.
    """
    check_edit_columns(dataset, "dataset")
    check_edit_columns(benchmark, "benchmark")
    sources, held_out = SourceImages(dataset, "the dataset"), SourceImages(benchmark, "the benchmark")

    sizes: set[tuple[int, int]] = set()
    contents: set[str] = set()  # of files and of pixels; the two kinds of digests do not meet
    thumbnails: dict[str, list[np.ndarray]] = {}
    for row, instruction in enumerate(_progress(benchmark, "Reading the benchmark")):
        images = held_out.load(row)
        sizes.update(held_out.sizes(row))
        contents.update(held_out.digests(row), map(_pixel_digest, images))
        thumbnails.setdefault(instruction, []).extend(map(_thumbnail, images))

    kept, same_image, same_edit = [], 0, 0
    for row, instruction in enumerate(_progress(dataset, "Comparing with the benchmark")):
        may_be_same = not sizes.isdisjoint(sources.sizes(row))
        if may_be_same and not contents.isdisjoint(sources.digests(row)):  # spares the decoding
            same_image += 1
            continue
        others = thumbnails.get(instruction, [])
        images = sources.load(row) if may_be_same or others else []
        if may_be_same and not contents.isdisjoint(map(_pixel_digest, images)):
            same_image += 1
        elif others and any(_look_the_same(_thumbnail(image), other) for image in images for other in others):
            same_edit += 1
        else:
            kept.append(row)
    if not kept:
        raise ValueError(
            f"All {len(dataset)} rows of the dataset are in the benchmark, so that none are left to train on. Give "
            "other data."
        )
    left_out = same_image + same_edit
    logger.log(
        logging.WARNING if left_out else logging.INFO,
        f"Left out {left_out} of {len(dataset)} rows that are in the benchmark: {same_image} with one of its source "
        f"images, {same_edit} with one of its instructions and an image that looks the same.",
    )
    return dataset.select(kept)


def _progress(dataset: "Dataset", description: str) -> Iterable[str]:
    """The normalised instruction of each row."""
    prompts = dataset.with_format(None)["prompt"]
    return map(_normalised, tqdm(prompts, desc=description, unit="row", disable=len(dataset) <= _MANY_ROWS))


def _normalised(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(" " if unicodedata.category(char).startswith("P") else char for char in text).split())


def _pixel_digest(image: "Image.Image") -> str:
    return hashlib.blake2b(f"{image.size} ".encode() + image.tobytes(), digest_size=32).hexdigest()


def _thumbnail(image: "Image.Image") -> "np.ndarray":
    import numpy as np
    from PIL import Image

    small = image.convert("L").resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.int16)  # (16, 16)


def _look_the_same(first: "np.ndarray", second: "np.ndarray") -> bool:
    return bool(abs(first - second).mean() < _LOOKS_THE_SAME)
