# SPDX-License-Identifier: Apache-2.0
"""Lookup of images in published datasets, unpacked or in zip and tar archives."""

import filecmp
import hashlib
import lzma
import re
import shutil
import tarfile
import zipfile
import zlib
from functools import cached_property
from pathlib import Path, PurePath

from datasets import config
from huggingface_hub.utils import WeakFileLock

from ..utils.files import scratch_folder
from ..utils.images import refuse_address
from .image_paths import image_file


ARCHIVE_PATTERNS = ["*.zip", "*.zip[._-]*", "*.z[0-9]*", "*.tar", "*.tar[._-]*", "*.tgz", "*.tgz[._-]*"]

_ARCHIVE = re.compile(r"\.(zip|tgz|tar(\.(gz|bz2|xz))?)$")
# Limits of the extracted size, per byte of the archive and at least: images hardly compress, bombs by a thousand
_MAX_RATIO = 100
_MIN_LIMIT = 10**9
# `zipfile` raises `RuntimeError` for an encrypted archive
_READ_ERRORS = (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, RuntimeError)


def _extract_into(archive: Path, folder: Path) -> None:
    """Extract an archive. Members that would leave the directory are moved inside (zip), or raise an error (tar)."""
    limit = min(shutil.disk_usage(folder).free, _MAX_RATIO * archive.stat().st_size + _MIN_LIMIT)
    total = 0

    def check_size(size: int) -> None:
        nonlocal total
        total += size
        if total > limit:
            raise RuntimeError(f"it unpacks to over {limit} bytes, more than images need or the disk has left")

    def check_member(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        check_size(member.size)
        return tarfile.data_filter(member, path)

    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zip_file:
            check_size(sum(member.file_size for member in zip_file.infolist()))
            zip_file.extractall(folder)
    else:
        with tarfile.open(archive) as tar_file:
            tar_file.extractall(folder, filter=check_member)


def _extract(archive: Path) -> Path:
    """Extract an archive into the cache of `datasets`, if it is not there yet, and return its directory."""
    stat = archive.stat()  # part of the key, so that a replaced archive is extracted again
    key = hashlib.sha256(f"{archive} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    folder = Path(config.EXTRACTED_DATASETS_PATH) / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with scratch_folder(Path(f"{folder}.partial")) as partial:
                try:
                    _extract_into(archive, partial)
                except _READ_ERRORS as error:
                    # Not a ValueError, or `skip_broken` would leave out all records of the archive
                    raise shutil.ReadError(
                        f"{archive} ({stat.st_size} bytes) is damaged: {error}. Unpack it in its directory, or "
                        "download it again: a file of about 130 bytes is a Git LFS pointer."
                    ) from error
                partial.rename(folder)
    return folder


class ImageFinder:
    """Finds images in a directory or in its archives, which are extracted on first use."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.paths: dict[str, str] = {}

    @cached_property
    def extracted_archives(self) -> list[tuple[PurePath, Path]]:
        """Extract all archives; return their relative paths, and their directories in the cache."""
        archives = [
            path
            for path in sorted(self.folder.rglob("*"))
            if _ARCHIVE.search(path.name)
            and not any(name.startswith(".") for name in path.relative_to(self.folder).parts)
            and not path.with_suffix(".z01").exists()  # `.zip` is the last part of a split archive
        ]
        return [(path.relative_to(self.folder), _extract(path)) for path in archives]

    def find(self, name: str, folder_in_dataset: str | PurePath = "") -> str:
        """Find the file of an image in a record. Errors are worded to follow `<file>, record <number>: `."""
        refuse_address(str(name))
        path = str(PurePath(folder_in_dataset, str(name)))
        if path not in self.paths:
            file = image_file(path, [self.folder])
            self.paths[path] = str(file if file.is_file() else self._find_in_archives(PurePath(path)))
        return self.paths[path]

    def _find_in_archives(self, path: PurePath) -> Path:
        matches: dict[str, Path] = {}
        for archive, folder in self.extracted_archives:
            # The archive may unpack into the dataset's directory, its own directory, or a directory of its name. Its
            # top directory may also have its name, without being part of the path
            stem = _ARCHIVE.sub("", archive.name)
            directories = [PurePath(), archive.parent, archive.parent / stem]
            relative_paths = [
                path.relative_to(directory) for directory in directories if path.is_relative_to(directory)
            ]
            for candidate in [*relative_paths, *(PurePath(stem) / relative_path for relative_path in relative_paths)]:
                if (folder / candidate).is_file():
                    matches.setdefault(str(archive), folder / candidate)
        if not matches:
            archives = [str(archive) for archive, _ in self.extracted_archives]
            raise ValueError(
                f"its image {str(path)!r} is neither in {self.folder} nor in {archives}. Check the download, and join "
                "split archives: `bash decompress.sh`, `cat <parts> | tar -xz` or `zip -s 0`."
            )
        first, *copies = matches.values()
        if not all(filecmp.cmp(first, copy, shallow=False) for copy in copies):
            raise ValueError(f"its image {str(path)!r} differs between the archives {list(matches)}.")
        return first
