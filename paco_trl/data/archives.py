# SPDX-License-Identifier: Apache-2.0
"""Images of a published directory: unpacked, or in zip and tar archives."""

import filecmp
import hashlib
import lzma
import re
import shutil
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path, PurePath

from .dataset_files import image_file, path_inside


# For `find_dataset_folder`
ARCHIVE_PATTERNS = ["*.zip", "*.zip[._-]*", "*.z[0-9]*", "*.tar", "*.tar[._-]*", "*.tgz", "*.tgz[._-]*"]

_ARCHIVE = re.compile(r"\.(zip|tgz|tar(\.(gz|bz2|xz))?)$")
_PART = re.compile(r"\.(z\d+|(zip|tgz|tar)[._-].+)$")
# Unpacked bytes for each byte of an archive, and in any case: images hardly compress, a bomb does by a thousand
_MAX_RATIO, _MIN_LIMIT = 100, 10**9
_DAMAGE = (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, RuntimeError)


class _TooLargeError(Exception):
    pass


def _extract_zip(archive: Path, folder: Path, limit: int) -> None:
    with zipfile.ZipFile(archive) as file:
        paths = {member: PurePath(member.filename) for member in file.infolist()}
        if sum(member.file_size for member in paths) > limit:
            raise _TooLargeError
        # Not what would be written outside of the directory
        file.extractall(folder, [one for one, path in paths.items() if not path.anchor and ".." not in path.parts])


def _extract_tar(archive: Path, folder: Path, limit: int) -> None:
    total = 0

    def keep(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        nonlocal total
        total += member.size
        if total > limit:
            raise _TooLargeError
        try:
            return tarfile.data_filter(member, path)
        except tarfile.FilterError:
            return None  # the same, or a device

    with tarfile.open(archive) as file:
        file.extractall(folder, filter=keep)


def _extract(archive: Path) -> Path:
    """Extract an archive into the cache of `datasets`, unless it is there, and return its directory."""
    from datasets import config
    from huggingface_hub.utils import WeakFileLock

    is_zip, stat = archive.suffix == ".zip", archive.stat()
    # Not a ValueError, which would be taken for a defect of the record
    error_type = zipfile.BadZipFile if is_zip else tarfile.ReadError
    if not (zipfile.is_zipfile(archive) if is_zip else tarfile.is_tarfile(archive)):
        raise error_type(
            f"{archive} is not a {'zip' if is_zip else 'tar'} file, or an incomplete one ({stat.st_size} bytes). Download "
            "it again; a clone without Git LFS has only pointers of about 130 bytes."
        )
    # An archive that replaces another one at its place gets a directory of its own
    key = hashlib.sha256(f"{archive} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    folder = Path(config.EXTRACTED_DATASETS_PATH) / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(f"{folder}.lock"):
        if not folder.is_dir():
            partial = Path(f"{folder}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # that of a killed process
            try:
                partial.mkdir()
                limit = min(shutil.disk_usage(partial).free, _MAX_RATIO * stat.st_size + _MIN_LIMIT)
                (_extract_zip if is_zip else _extract_tar)(archive, partial, limit)
                partial.rename(folder)
            except _TooLargeError as error:
                raise error_type(
                    f"{archive} ({stat.st_size} bytes) unpacks to more than {limit} bytes: more than the disk has "
                    "left, or than images take. Free some space; if you trust it, unpack it in its directory."
                ) from error
            except _DAMAGE as error:
                raise error_type(f"{archive} cannot be read ({error}). Download it again, or unpack it.") from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


class ImageFinder:
    """Find images in a directory or in its archives, which are extracted when first needed."""

    def __init__(self, folder: Path, num_proc: int | None = None, allow_remote_images: bool = False):
        self.folder = folder
        self.allow_remote_images = allow_remote_images
        self.num_proc = num_proc
        self.found: dict[str, str] = {}
        self.parts: list[str] = []  # of archives that were split, which are not opened

    @cached_property
    def extracted(self) -> list[tuple[PurePath, Path]]:
        """Extract all archives; return the path of each and its directory in the cache."""
        archives = []
        for path in sorted(self.folder.rglob("*")):
            # `hf download --local-dir` keeps `.cache/huggingface/download/images.zip.metadata`
            if any(name.startswith(".") for name in path.relative_to(self.folder).parts):
                continue
            # The last part of a split zip file has the name of a complete one
            if _ARCHIVE.search(path.name) and not path.with_suffix(".z01").is_file():
                archives.append(path)
            elif _PART.search(path.name) or _ARCHIVE.search(path.name):
                self.parts.append(str(path.relative_to(self.folder)))
        with ThreadPoolExecutor(self.num_proc or 1) as pool:
            folders = list(pool.map(_extract, archives))
        return [(path.relative_to(self.folder), folder) for path, folder in zip(archives, folders, strict=True)]

    def find(self, name: str, below: str | PurePath = "") -> str:
        """Find the file of an image that a record names. The errors continue `<file>, record <number>: `."""
        is_address = isinstance(name, str) and "://" in name
        path = name if is_address else str(PurePath(below, path_inside(name)))
        if path not in self.found:
            file = image_file(path, [self.folder], self.allow_remote_images)
            self.found[path] = str(file if file.is_file() else self._find_in_archives(PurePath(path)))
        return self.found[path]

    def _find_in_archives(self, path: PurePath) -> Path:
        hits: dict[PurePath, Path] = {}
        for name, folder in self.extracted:
            # As if it were unpacked in the dataset's directory, next to itself, or into a directory of its name; its one
            # top directory may have its name too, and not be part of the path
            stem = _ARCHIVE.sub("", name.name)
            places = [PurePath(), name.parent, name.parent / stem]
            inside = [path.relative_to(place) for place in places if path.is_relative_to(place)]
            for candidate in [*inside, *(PurePath(stem) / one for one in inside)]:
                if (folder / candidate).is_file():
                    hits.setdefault(name, folder / candidate)
        if not hits:
            raise ValueError(f"its image {str(path)!r} is neither in {self.folder} nor in {self._describe_archives()}")
        first, *others = hits.values()
        if not all(filecmp.cmp(first, other, shallow=False) for other in others):
            raise ValueError(
                f"its image {str(path)!r} is in the archives {[str(name) for name in hits]}, which have different "
                f"files of this name. Put the right one at {self.folder / path}."
            )
        return first

    def _describe_archives(self) -> str:
        archives = [str(name) for name, _ in self.extracted]
        where = f"the archives {archives}" if archives else "an archive, of which there are none"
        remedy = "Check that the download is complete."
        if self.parts:
            where += f"; {self.parts[:3]} look like parts of archives, which are not joined here"
            remedy = f"Join and unpack them in {self.folder} (`cat <parts> | tar -xz`, or `zip -s 0`)."
        if (self.folder / "decompress.sh").is_file():
            remedy = f"Check that the download is complete, and unpack it: `cd {self.folder} && bash decompress.sh`."
        return f"{where}. {remedy}"
