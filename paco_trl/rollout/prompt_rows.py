# SPDX-License-Identifier: Apache-2.0
"""The rows of a dataset, prepared for generation: layout, sizes, source images."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from datasets import Dataset
from PIL import Image

from ..data import SourceImages, check_edit_columns, has_source_images
from ..data.image_sets import complete_image_sets
from . import Family
from .resolution import check_inference_size, training_size


class Sizes(Protocol):
    """Settings for rows without a size of their own."""

    height: int
    width: int
    resolution_scale: float


@dataclass(frozen=True)
class PromptKey:
    """What an image is generated from, `images` as digests. Rows with the same condition are encoded once."""

    prompt: str
    images: tuple[str, ...] = ()
    scale: float = 1.0


class PromptRows:
    """Rows of image-set prompts, or of editing prompts with source images; `where` names the dataset in messages."""

    def __init__(self, dataset: Dataset, args: Sizes, where: str):
        self.given, self.args, self.where = dataset, args, where
        self.sources: SourceImages | None = None
        if has_source_images(dataset):
            check_edit_columns(dataset, where)
            self.sources = SourceImages(dataset, where)
        else:
            dataset = complete_image_sets(dataset)
        self.references = SourceImages(dataset, where, "references") if "references" in dataset.column_names else None
        self.dataset = dataset
        self.prompts: list[str] = list(dataset["prompt"])
        self.layouts = list(zip(self._column("rows", 1), self._column("cols", 1), strict=True))
        self.own_sizes = list(zip(self._column("height"), self._column("width"), strict=True))
        for number, ((rows, cols), (height, width)) in enumerate(zip(self.layouts, self.own_sizes, strict=True)):
            if self.sources is not None and (height is None or width is None):
                continue  # the source image decides
            where_row = f"row {number} of {where}"
            check_inference_size(height or args.height, width or args.width, rows, cols, None, where_row)
        self.inference_sizes: list[tuple[int, int]] = []
        self.training_sizes: list[tuple[int, int]] = []
        self.image_columns = [images for images in (self.sources, self.references) if images is not None]
        self._without_images = dataset.remove_columns([images.column for images in self.image_columns])

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def kind(self) -> str:
        """What is generated: `"sets"` (if only some rows have several panels), `"single images"` or `"edits"`."""
        if self.sources not in (None, self.references):
            return "edits"
        return "single images" if set(self.layouts) <= {(1, 1)} else "sets"

    def measure(self, pipeline, family: Family) -> "PromptRows":
        """Compute height and width of each row, for inference and training, and check them against the pipeline."""
        if self.sources is None and family.max_images > 1:
            self.sources = self.references
        self._check_source_images(pipeline, family)
        args, multiple = self.args, family.size_multiple(pipeline)
        self.inference_sizes = []
        for number, ((rows, cols), (height, width)) in enumerate(zip(self.layouts, self.own_sizes, strict=True)):
            if self.sources not in (None, self.references) and (height is None or width is None):
                edited = family.edited_size(pipeline, self.sources.sizes(number), args.height * args.width)
                # The panels of an edited set must divide evenly too
                height, width = (
                    max(1, round(size / step)) * step
                    for size, step in zip(edited, (math.lcm(multiple, rows), math.lcm(multiple, cols)), strict=True)
                )
            height, width = height or args.height, width or args.width
            check_inference_size(height, width, rows, cols, multiple, f"row {number} of {self.where}")
            self.inference_sizes.append((height, width))
        self.training_sizes = [
            training_size(*size, *layout, args.resolution_scale, multiple)
            for size, layout in zip(self.inference_sizes, self.layouts, strict=True)
        ]
        return self

    def row(self, number: int) -> dict[str, Any]:
        """Return a row for rewards: with a layout, and with its source images and references decoded, in RGB."""
        row = dict(self._without_images[number])
        rows, cols = self.layouts[number]
        row |= {"rows": rows, "cols": cols}
        for each in self.image_columns:
            images = each.load(number)
            row[each.column] = images[0] if each.column == "image" else images
        return row

    def images_in(self, row: dict[str, Any]) -> list[Image.Image]:
        """Return the source images of a row from [`PromptRows.row`]."""
        if self.sources is None:
            return []
        return [row["image"]] if self.sources.column == "image" else row[self.sources.column]

    def images(self, number: int) -> list[Image.Image]:
        """Return the source images of a row, decoded, in RGB."""
        return [] if self.sources is None else self.sources.load(number)

    def first_images(self, numbers: list[int], count: int) -> dict[int, list[Image.Image]] | None:
        """Return the source images of the first `count` rows by place; `None` where the dataset has none."""
        if self.sources is None:
            return None
        return {place: self.sources.load(number) for place, number in enumerate(numbers[:count])}

    def prompt_key(self, number: int, scale: float) -> PromptKey:
        """Return what a row's images are generated from, its source images read at `scale` per side."""
        if self.sources is None:
            return PromptKey(self.prompts[number])
        return PromptKey(self.prompts[number], self.sources.digests(number), scale)

    @contextmanager
    def add_row_to_errors(self, number: int) -> Iterator[None]:
        """Name the row in a `ValueError` that is raised within the context."""
        try:
            yield
        except ValueError as error:
            name = f"Row {number} of {self.where}"
            if str(error).startswith(name):
                raise
            raise ValueError(f"{name}: {error}") from error

    def content(self, number: int) -> dict[str, Any]:
        """Return a row for a digest: images as digests of their files."""
        row = dict(self._without_images[number])
        return row | {images.column: images.digests(number) for images in self.image_columns}

    def _column(self, name: str, default: Any = None) -> list:
        values = self.dataset[name] if name in self.dataset.column_names else [None] * len(self.dataset)
        return [default if value is None else value for value in values]

    def _check_source_images(self, pipeline, family: Family) -> None:
        name = type(pipeline).__name__
        if self.sources is None:
            if family.needs_images:
                raise ValueError(
                    f"{name} edits images, but {self.where} has no source images. Add them in a column `image` (or "
                    "`images`, for several), or choose a text-to-image pipeline."
                )
            return
        if self.sources.max_count > family.max_images:
            taken = f"at most {family.max_images}" if family.max_images else "none"
            other = "" if self.sources is self.references else " Images for a reward alone need another column name."
            raise ValueError(
                f"Row {self.sources.row_with_most} of {self.where} has {self.sources.max_count} source image(s), but "
                f"{name} takes {taken}. Leave images out, or choose another pipeline.{other}"
            )
        for number in range(len(self)):
            with self.add_row_to_errors(number):
                for width, height in self.sources.sizes(number):
                    family.check_image_size(width, height)
