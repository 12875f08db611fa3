# SPDX-License-Identifier: Apache-2.0
"""Source images of editing prompts: check them by their headers before a run, decode them one row at a time."""

import hashlib
import io
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm.auto import tqdm

from ..utils.addresses import refuse_address


if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from PIL import Image


# Rows from which on reading the headers shows a progress bar
MANY_ROWS = 1000

# Orientations that swap width and height
_TURNED_SIDEWAYS = (5, 6, 7, 8)


class _BufferStream(io.RawIOBase):
    """Read a buffer as a file, of which only what is read comes from the disk."""

    # Arrow's own (`pyarrow.BufferReader`) refuses to seek beyond the end, which Pillow does

    def __init__(self, buffer: "pa.Buffer"):
        super().__init__()
        self._view, self._position = memoryview(buffer).cast("B"), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}[whence]
        return self._position

    def readinto(self, target: Any) -> int:
        part = self._view[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


def has_source_images(dataset: "Dataset") -> bool:
    """Tell whether rows have source images, in a column `image` or `images`, and so are editing prompts."""
    return "image" in dataset.column_names or "images" in dataset.column_names


class SourceImages:
    """
    Source images of a dataset, with their sizes.

    Reads the header of every image and no pixels, so that a missing or unreadable file is found before a model is
    loaded. Nothing is fetched from a network. The dataset itself is not changed.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rows with `image` ([`~datasets.Image`]) or `images` (a list of them), decoded or not.
        where (`str`):
            Name of the dataset in errors: "the dataset".

    Attributes:
        column (`str`):
            Name of the column: `"image"` or `"images"`.
        max_count (`int`), row_with_most (`int`):
            Largest number of images in a row, and the first row with so many.

    Raises:
        ValueError: If an image is missing, a URL, or unreadable, or a list of images is empty, by row.
    """

    def __init__(self, dataset: "Dataset", where: str):
        from datasets import Image as ImageFeature

        self.where = where
        self.column = "image" if "image" in dataset.column_names else "images"
        feature = dataset.features[self.column]
        # Decodes as `datasets` does: rewards may see what it decodes
        self._feature = ImageFeature(mode=getattr(feature, "feature", feature).mode)
        # As Arrow, which decodes nothing; casting a list of images to `decode=False` would copy all bytes
        self._table = dataset.select_columns(self.column).with_format("arrow")
        self._digests: dict[int, tuple[str, ...]] = {}
        description, is_quick = f"Reading the headers of the source images of {where}", len(dataset) <= MANY_ROWS
        rows = tqdm(range(len(dataset)), desc=description, unit="row", disable=is_quick)
        self._sizes = [self._read_sizes(row) for row in rows]
        counts = [len(sizes) for sizes in self._sizes]
        self.max_count = max(counts, default=0)
        self.row_with_most = counts.index(self.max_count) if counts else 0

    def __len__(self) -> int:
        return len(self._sizes)

    def sizes(self, row: int) -> list[tuple[int, int]]:
        """Return width and height of each decoded image of a row, turned as its EXIF orientation says."""
        return self._sizes[row]

    def digests(self, row: int) -> tuple[str, ...]:
        """Compute the BLAKE2b digest of the bytes of each image of a row, once."""
        if row not in self._digests:
            images = self._images(row)
            self._digests[row] = tuple(self._digest(row, index, image) for index, image in enumerate(images))
        return self._digests[row]

    def is_read(self, row: int) -> bool:
        """Tell whether [`SourceImages.digests`] knows a row without reading its files."""
        return row in self._digests

    def remember(self, digests: dict[int, tuple[str, ...]]) -> None:
        """Add digests that other processes have computed, by row."""
        self._digests |= digests

    def lengths(self, row: int) -> list[int]:
        """Return the number of bytes of each image file of a row."""
        return [
            len(image["bytes"].as_buffer()) if _has_bytes(image) else Path(_path_of(image)).stat().st_size
            for image in self._images(row)
        ]

    def files(self, row: int) -> list[Path | None]:
        """Return the stored paths of the images of a row; `None` for an embedded image."""
        return [None if _has_bytes(image) else Path(_path_of(image)) for image in self._images(row)]

    def load(self, row: int, in_rgb: bool = True) -> list["Image.Image"]:
        """Decode the images of a row, in RGB or in their own modes; raise `ValueError` for damaged or changed ones."""
        return [self._load(row, index, image, in_rgb) for index, image in enumerate(self._images(row))]

    def _images(self, row: int) -> list["pa.StructScalar"]:
        """Return the images of a row as Arrow has them: `bytes` and `path`, not copied."""
        value = self._table[row].column(self.column)[0]
        if self.column == "image":
            return [value]
        return list(value.values) if value.is_valid else []

    def _name(self, row: int, index: int) -> str:
        which = "" if self.column == "image" else f" {index} (counted from 0)"
        return f"Row {row} of {self.where}: its source image{which}"

    def _read_sizes(self, row: int) -> list[tuple[int, int]]:
        images = self._images(row)
        if not images:
            raise ValueError(f"Row {row} of {self.where}: `images` is empty or None. Add a source image.")
        return [self._read_size(self._name(row, index), image) for index, image in enumerate(images)]

    def _read_size(self, name: str, image: "pa.StructScalar") -> tuple[int, int]:
        path = _path_of(image)
        if not _has_bytes(image):
            if path is None:
                raise ValueError(f"{name} is None. Give an image, or leave the row out.")
            try:
                refuse_address(path)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if not Path(path).is_file():
                raise ValueError(f"{name} is {path!r}, and there is no such file. Correct it, or leave the row out.")
        try:
            with _open_stream(image) as stream:
                return _decoded_size(stream)
        except Exception as error:  # Pillow raises half a dozen kinds
            raise _unreadable(name, path, error) from error

    def _digest(self, row: int, index: int, image: "pa.StructScalar") -> str:
        try:
            with _open_stream(image) as stream:
                return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        except OSError as error:
            raise _unreadable(self._name(row, index), _path_of(image), error) from error

    def _load(self, row: int, index: int, image: "pa.StructScalar", in_rgb: bool) -> "Image.Image":
        from ..utils.images import to_rgb

        name, size = self._name(row, index), self._sizes[row][index]
        try:
            decoded = self._feature.decode_example(image.as_py())
            decoded = to_rgb(decoded, "The image") if in_rgb else decoded
        except Exception as error:  # Pillow raises half a dozen kinds
            raise _unreadable(name, _path_of(image), error) from error
        if decoded.size != size:
            raise ValueError(
                f"{name} has {decoded.width} x {decoded.height} pixels (width x height), but its header reported "
                f"{size[0]} x {size[1]} when the run began. Files must not change during a run: start it again."
            )
        return decoded


def _unreadable(name: str, path: str | None, error: Exception) -> ValueError:
    problem = f"{type(error).__name__}: {error}. Replace the file, or leave the row out."
    return ValueError(f"{name} cannot be read{f' ({path})' if path else ''}: {problem}")


def _has_bytes(image: "pa.StructScalar") -> bool:
    return image.is_valid and image["bytes"].is_valid


def _path_of(image: "pa.StructScalar") -> Any:
    return image["path"].as_py() if image.is_valid else None


def _open_stream(image: "pa.StructScalar") -> io.BufferedReader:
    if not _has_bytes(image):
        return open(_path_of(image), "rb")
    return io.BufferedReader(_BufferStream(image["bytes"].as_buffer()))


def _decoded_size(stream: BinaryIO) -> tuple[int, int]:
    """Read from its header the size that an image has when `datasets` decodes it."""
    from PIL import ExifTags, Image

    image: Any = Image.open(stream)
    width, height = image.size
    if image.format == "TIFF":
        # As stored: newer versions of Pillow already report the turned size
        width, height = (image.tag_v2[tag] for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength))
    if image.format == "PNG" and not _has_data_after_pixels(stream):
        exif = Image.Image.getexif(image)  # that of PNG decodes the pixels to see what comes after them
    else:
        exif = image.getexif()
    return (height, width) if exif.get(ExifTags.Base.Orientation) in _TURNED_SIDEWAYS else (width, height)


def _has_data_after_pixels(stream: BinaryIO) -> bool:
    """Tell whether a PNG has anything after its pixels, where its orientation may be."""
    position, end = stream.tell(), stream.seek(0, io.SEEK_END)
    start, seen_pixels, late = 8, False, False
    while not late and start + 8 <= end:
        stream.seek(start)
        length, kind = struct.unpack(">I4s", stream.read(8))
        if kind == b"IEND":
            break
        seen_pixels = seen_pixels or kind == b"IDAT"
        late = seen_pixels and kind != b"IDAT"
        start += 8 + length + 4  # the check sum comes last
    stream.seek(position)
    return late
