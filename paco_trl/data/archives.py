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


# For `find_dataset_folder`
ARCHIVE_PATTERNS = ["*.zip", "*.zip[._-]*", "*.z[0-9]*", "*.tar", "*.tar[._-]*", "*.tgz", "*.tgz[._-]*"]

_ARCHIVE = re.compile(r"\.(zip|tgz|tar(\.(gz|bz2|xz))?)$")
_PART = re.compile(r"\.(z\d+|(zip|tgz|tar)[._-].+)$")
_DAMAGE = (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, RuntimeError)


def _extract(archive: Path) -> Path:
    """Extract an archive into the cache of `datasets`, unless it is there, and return its directory."""
    from datasets import config
    from datasets.utils.extract import TarExtractor, ZipExtractor
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
                # They leave out what would be written outside of the directory
                (ZipExtractor if is_zip else TarExtractor).extract(archive, partial)
                partial.rename(folder)
            except _DAMAGE as error:
                raise error_type(f"{archive} cannot be read ({error}). Download it again, or unpack it.") from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


class ImageFinder:
    """Find images in a directory or in its archives, which are extracted when first needed."""

    def __init__(self, folder: Path, num_proc: int | None = None):
        self.folder = folder
        self.num_proc = num_proc
        self.found: dict[PurePath, str] = {}
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

    def find(self, path: PurePath) -> str:
        """Find the file of an image. The errors continue `<file>, record <number>: `."""
        if path not in self.found:
            unpacked = self.folder / path
            self.found[path] = str(unpacked if unpacked.is_file() else self._find_in_archives(path))
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
