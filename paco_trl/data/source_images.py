# SPDX-License-Identifier: Apache-2.0
"""Source images of editing prompts, checked by their headers before a run, and decoded one row at a time."""

import hashlib
import io
import os
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import ExifTags, Image
from tqdm.auto import tqdm

from ..utils.images import reading, refuse_address, to_rgb
from ..utils.text import shorten_path


# Above this number of rows, a pass over the rows shows a progress bar
MANY_ROWS = 1000

# EXIF orientations that swap width and height
_SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)


def has_source_images(dataset: Dataset) -> bool:
    """Return whether rows have source images (`image` or `images`), and so are editing prompts."""
    return "image" in dataset.column_names or "images" in dataset.column_names


class SourceImages:
    """
    Source images of a dataset and their sizes, from `image` ([`~datasets.Image`]) or `images` (a list of them),
    decoded or not, or from another `column`, such as `"references"`. Errors call the dataset `where`.

    Reads the header of every image, but no pixels, so that broken files are found before a model is loaded: a
    `ValueError` names the row of an image that is missing, unreadable or a URL, or of an empty list. Nothing is
    downloaded, and the dataset is not changed.

    Attributes:
        column (`str`): Name of the column: `"image"`, `"images"` or `"references"`.
        max_count (`int`), row_with_most (`int`): Largest number of images in a row, and the first row that has it.
    """

    def __init__(self, dataset: Dataset, where: str, column: str | None = None):
        self.where = where
        self.column = column or ("image" if "image" in dataset.column_names else "images")
        self._image_type = "source image" if column is None else "reference"
        feature = dataset.features[self.column]
        # Decodes like `datasets`, since rewards may get images that it decoded
        self._feature = ImageFeature(mode=getattr(feature, "feature", feature).mode)
        # As Arrow, to decode nothing; casting a list of images to `decode=False` would copy all bytes
        self._table = dataset.select_columns(self.column).with_format("arrow")
        self._digests: dict[int, tuple[str, ...]] = {}
        description = f"Reading the headers of the {self._image_type}s of {where}"
        is_quick = len(dataset) <= MANY_ROWS
        rows = tqdm(range(len(dataset)), desc=description, unit="row", disable=is_quick)
        self._sizes = [[self._read_size(*image) for image in self._images(row)] for row in rows]
        counts = [len(sizes) for sizes in self._sizes]
        if 0 in counts:
            raise ValueError(f"Row {counts.index(0)} of {where}: `images` is empty or None. Add a source image.")
        self.max_count = max(counts, default=0)
        self.row_with_most = counts.index(self.max_count) if counts else 0

    def __len__(self) -> int:
        return len(self._sizes)

    def sizes(self, row: int) -> list[tuple[int, int]]:
        """Return width and height of the images of a row, after applying their EXIF orientations."""
        return self._sizes[row]

    def digests(self, row: int) -> tuple[str, ...]:
        """Return the BLAKE2b digests of the bytes of a row's images, computed once."""
        if row not in self._digests:
            self._digests[row] = tuple(self._digest(*image) for image in self._images(row))
        return self._digests[row]

    def lengths(self, row: int) -> list[int]:
        """Return the numbers of bytes of a row's image files."""
        images = [image for _, image in self._images(row)]
        return [os.path.getsize(image["path"]) if image["bytes"] is None else len(image["bytes"]) for image in images]

    def files(self, row: int) -> list[Path | None]:
        """Return the paths of a row's images, `None` for embedded images."""
        return [Path(image["path"]) if image["bytes"] is None else None for _, image in self._images(row)]

    def load(self, row: int, in_rgb: bool = True) -> list[Image.Image]:
        """Decode the images of a row, in RGB or their own modes; raise `ValueError` for damaged or changed images."""
        images = zip(self._images(row), self._sizes[row], strict=True)
        return [self._decode(*image, size, in_rgb) for image, size in images]

    def _images(self, row: int) -> list[tuple[str, Any]]:
        """Return the stored images of a row, each after its name for errors."""
        (value,) = self._table[row][self.column].to_pylist()
        name = f"Row {row} of {self.where}: its {self._image_type}"
        named_images = [(name, value)]
        if self.column != "image":
            named_images = [(f"{name} {index} (counted from 0)", image) for index, image in enumerate(value or [])]
        return [
            (f"{name} ({shorten_path(image['path'] or 'embedded')})" if image else name, image)
            for name, image in named_images
        ]

    def _read_size(self, name: str, image: dict[str, Any] | None) -> tuple[int, int]:
        if image is None:
            raise ValueError(f"{name} is None. Add an image, or leave the row out.")
        with reading(name):
            if image["bytes"] is None:
                refuse_address(image["path"])
            with _open_stream(image) as stream:
                return decoded_size(stream)

    def _digest(self, name: str, image: dict[str, Any]) -> str:
        with reading(name), _open_stream(image) as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()

    def _decode(self, name: str, image: dict[str, Any], size: tuple[int, int], in_rgb: bool) -> Image.Image:
        with reading(name):
            decoded_image = self._feature.decode_example(image)
            decoded_image = to_rgb(decoded_image, "The image") if in_rgb else decoded_image
        if decoded_image.size != size:
            raise ValueError(
                f"{name} has {decoded_image.width} x {decoded_image.height} pixels (width x height), but {size[0]} x "
                f"{size[1]} in its header. Save it again, unless it was changed during the run."
            )
        return decoded_image


def _open_stream(image: dict[str, Any]) -> Any:
    return open(image["path"], "rb") if image["bytes"] is None else io.BytesIO(image["bytes"])


def decoded_size(stream: Any) -> tuple[int, int]:
    """Read the size that `datasets` decodes an image to from its header."""
    image: Any = Image.open(stream)
    width, height = image.size
    if image.format == "TIFF":
        # The stored size: newer versions of Pillow already report the rotated one
        width, height = (image.tag_v2[tag] for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength))
    # `Image.getexif` skips what follows the pixels of a PNG, for which Pillow would decode them
    exif = Image.Image.getexif(image) if image.format == "PNG" else image.getexif()
    return (height, width) if exif.get(ExifTags.Base.Orientation) in _SIDEWAYS_ORIENTATIONS else (width, height)
