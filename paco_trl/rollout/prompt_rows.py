# SPDX-License-Identifier: Apache-2.0
"""The rows of a dataset, prepared for generation: layout, sizes, source images, and the images of each."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from datasets import Dataset
from PIL import Image

from ..data import SourceImages, check_edit_columns, has_source_images
from ..data.image_sets import SEPARATE, arrange_sets, complete_image_sets, prompts_of_row
from .families import Family
from .resolution import check_inference_size, training_size


class RowSettings(Protocol):
    """Settings for rows without a size of their own, for sets of separate images, and for negative prompts."""

    height: int
    width: int
    guidance_scale: float
    negative_prompt: str | None
    resolution_scale: float
    set_layout: str | None
    panel_template: str
    panel_generation: str


class ImagePrompt(NamedTuple):
    """What one image is generated from: a prompt, and the row that has its source images."""

    row_index: int
    prompt: str


@dataclass(frozen=True)
class PromptKey:
    """
    Condition of an image: its prompt, and digests of its source images. Rows with the same condition are encoded once.
    """

    prompt: str
    images: tuple[str, ...] = ()
    scale: float = 1.0


class PromptRows:
    """Rows of image-set prompts, or of editing prompts with source images; `where` names the dataset in messages."""

    def __init__(self, dataset: Dataset, args: RowSettings, where: str):
        self.original_dataset = dataset
        self.args = args
        self.where = where
        dataset = dataset.with_format(None)
        self.is_anchored = args.panel_generation == "anchored"
        self.shares_noise = args.panel_generation == "shared_noise"
        self.sources: SourceImages | None = None
        if has_source_images(dataset):
            check_edit_columns(dataset, where)
            self.sources = SourceImages(dataset, where)
            if args.set_layout is not None:
                raise ValueError(f"`set_layout` is {args.set_layout!r}, but {where} has edits, not sets. Unset it.")
        else:
            dataset = arrange_sets(complete_image_sets(dataset), args.set_layout)
        self.references = SourceImages(dataset, where, "references") if "references" in dataset.column_names else None
        self.dataset = dataset
        self.prompts: list[str] = list(dataset["prompt"])
        self.layouts = list(zip(self._column("rows", 1), self._column("cols", 1), strict=True))
        self.negative_prompts: list[str | None] = self._column("negative_prompt")
        for row_index, negative in enumerate(self.negative_prompts):
            if not isinstance(negative, str | None):
                raise ValueError(
                    f"Row {row_index} of {where}: `negative_prompt` is {negative!r}. Write a text, or None."
                )
        self.requested_sizes = list(zip(self._column("height"), self._column("width"), strict=True))
        # A row has one image, or one for each panel, and each image has a prompt
        self.image_prompts: list[ImagePrompt] = []
        self.prompt_indices: list[range] = []
        self.image_layouts = list(self.layouts)  # layout of one image
        columns = zip(self._column("layout"), self._column("theme", ""), self._column("panels"), strict=True)
        for row_index, (layout, theme, panels) in enumerate(columns):
            prompts = [self.prompts[row_index]]
            if layout == SEPARATE:
                prompts = prompts_of_row({"layout": layout, "theme": theme, "panels": panels}, args.panel_template)
                self.image_layouts[row_index] = (1, 1)
            self.prompt_indices.append(range(len(self.image_prompts), len(self.image_prompts) + len(prompts)))
            self.image_prompts += [ImagePrompt(row_index, prompt) for prompt in prompts]
        self.images_per_row = list(map(len, self.prompt_indices))
        for row_index, ((rows, cols), (height, width)) in enumerate(
            zip(self.image_layouts, self.requested_sizes, strict=True)
        ):
            if self.sources is not None and (height is None or width is None):
                continue  # the source image decides
            check_inference_size(
                height or args.height, width or args.width, rows, cols, None, self._sized_row(row_index)
            )
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

    @property
    def named_prompts(self) -> list[tuple[str, str]]:
        """Names for messages, and texts, of the prompts of all images and of the distinct negative prompts."""
        named = [(f"row {row_index}", prompt) for row_index, prompt in dict.fromkeys(self.image_prompts)]
        rows_by_negative: dict[str, int] = {}
        for row_index, negative in enumerate(self.negative_prompts):
            if negative:
                rows_by_negative.setdefault(negative, row_index)
        return [*named, *((f"the negative prompt of row {n}", negative) for negative, n in rows_by_negative.items())]

    def _sized_row(self, row_index: int) -> str:
        """Name a row in an error about its size, and say if the row has no size of its own."""
        has_size = None not in self.requested_sizes[row_index]
        return f"row {row_index} of {self.where}" + ("" if has_size else ", which has no size of its own,")

    @property
    def has_separate(self) -> bool:
        """Whether some rows are sets of separate images."""
        return SEPARATE in self._column("layout")

    def resolve_for_pipeline(self, pipeline, family: Family) -> "ResolvedRows":
        """Return the rows with sizes, source images and negative prompts for a pipeline, after checks of all."""
        return ResolvedRows(self, pipeline, family)

    def row(self, row_index: int) -> dict[str, Any]:
        """Return a row for rewards: with a layout, and with its source images and references decoded, in RGB."""
        row = dict(self._without_images[row_index])
        rows, cols = self.layouts[row_index]
        row |= {"rows": rows, "cols": cols}
        for column in self.image_columns:
            images = column.load(row_index)
            row[column.column] = images[0] if column.column == "image" else images
        return row

    def images_in(self, row: dict[str, Any]) -> list[Image.Image]:
        """Return the source images of a row from [`PromptRows.row`]."""
        if self.sources is None:
            return []
        return [row["image"]] if self.sources.column == "image" else row[self.sources.column]

    def images(self, row_index: int) -> list[Image.Image]:
        """Return the source images of a row, decoded, in RGB."""
        return [] if self.sources is None else self.sources.load(row_index)

    @contextmanager
    def add_row_to_errors(self, row_index: int, remedy: str = "") -> Iterator[None]:
        """Name the row, and a remedy, in a `ValueError` that is raised within the context."""
        try:
            yield
        except ValueError as error:
            name = f"Row {row_index} of {self.where}"
            if str(error).startswith(name):
                raise
            raise ValueError(f"{name}: {error} {remedy}".rstrip()) from error

    def _column(self, name: str, default: Any = None) -> list:
        values = self.dataset[name] if name in self.dataset.column_names else [None] * len(self.dataset)
        return [default if value is None else value for value in values]

    def _has_first_panel(self, row_index: int) -> bool:
        """Return whether the first image of a row is the source of its others."""
        return self.is_anchored and len(self.prompt_indices[row_index]) > 1


class ResolvedRows(PromptRows):
    """
    Rows as a pipeline generates them. `inference_sizes` and `training_sizes` have height and width of the images of
    each row; `sources` and `negative_prompts` are what the pipeline takes.
    """

    def __init__(self, rows: PromptRows, pipeline, family: Family):
        vars(self).update(vars(rows))
        if self.sources is None and family.max_source_images > 1:
            self.sources = self.references
        self._check_source_images(pipeline, family)
        args = self.args
        multiple = family.size_multiple(pipeline)
        for row_index, negative in enumerate(self.negative_prompts):
            if negative is not None:
                with self.add_row_to_errors(row_index):
                    family.resolve_negative_prompt(pipeline, args.guidance_scale, negative)
        if None in self.negative_prompts:
            default = family.resolve_negative_prompt(pipeline, args.guidance_scale, args.negative_prompt)
            self.negative_prompts = [default if text is None else text for text in self.negative_prompts]
        self.inference_sizes = [self._inference_size(row_index, pipeline, family) for row_index in range(len(self))]
        self.training_sizes = [
            training_size(*size, *layout, args.resolution_scale, multiple)
            for size, layout in zip(self.inference_sizes, self.image_layouts, strict=True)
        ]
        for row_index in filter(self._has_first_panel, range(len(self))):
            remedy = "This is the set's first panel: raise `height`, `width` or `resolution_scale`, or change "
            with self.add_row_to_errors(row_index, remedy + "`panel_generation`."):
                for height, width in (self.inference_sizes[row_index], self.training_sizes[row_index]):
                    family.check_image_size(height, width)

    def _inference_size(self, row_index: int, pipeline, family: Family) -> tuple[int, int]:
        """Return height and width of the images of a row, after a check."""
        rows, cols = self.image_layouts[row_index]
        height, width = self.requested_sizes[row_index]
        multiple = family.size_multiple(pipeline)
        if self.sources not in (None, self.references) and (height is None or width is None):
            edited = family.edited_size(pipeline, self.sources.sizes(row_index), self.args.height * self.args.width)
            # The panels of an edited set must divide evenly too
            height, width = (
                max(1, round(size / step)) * step
                for size, step in zip(edited, (math.lcm(multiple, rows), math.lcm(multiple, cols)), strict=True)
            )
        height = height or self.args.height
        width = width or self.args.width
        check_inference_size(height, width, rows, cols, multiple, self._sized_row(row_index))
        return height, width

    def _check_source_images(self, pipeline, family: Family) -> None:
        name = type(pipeline).__name__
        check_panel_generation(self.args.panel_generation, name, family)
        if self.sources is None:
            if family.requires_source_image:
                raise ValueError(
                    f"{name} edits images, but {self.where} has no source images. Add them in a column `image` (or "
                    "`images`, for several), or choose a text-to-image pipeline."
                )
            return
        for row_index in range(len(self)):
            sizes = self.sources.sizes(row_index)
            count, besides = (
                (len(sizes) + 1, ", with its first panel") if self._has_first_panel(row_index) else (len(sizes), "")
            )
            if count > family.max_source_images:
                taken = f"at most {family.max_source_images}" if family.max_source_images else "none"
                hint = (
                    "" if self.sources is self.references else " Images for a reward alone need another column name."
                )
                raise ValueError(
                    f"Row {row_index} of {self.where} has {count} source image(s){besides}, but {name} takes "
                    f"{taken}. Leave images out, or choose another pipeline.{hint}"
                )
            with self.add_row_to_errors(row_index, "Replace it, or leave the row out."):
                for width, height in sizes:
                    family.check_image_size(height, width)


def check_panel_generation(panel_generation: str, name: str, family: Family | type[Family]) -> None:
    """Check that the pipeline supports this `panel_generation`."""
    if family.max_source_images == 0:
        reason = "takes no source image"
    elif family.requires_source_image:
        reason = "generates none without a source image"
    elif family.prompt_sees_images:
        reason = "reads source images with its text encoder, before the first panel is generated"
    else:
        return
    if panel_generation == "anchored":
        raise ValueError(
            f"`panel_generation` is 'anchored', but {name} {reason}. Choose FLUX.1-Kontext or FLUX.2, or another "
            "`panel_generation`: sets that show what is in their `references` are anchored too."
        )
