# SPDX-License-Identifier: Apache-2.0
"""Images of a published folder: beside its records, or in zip files, which are extracted into the cache of `datasets`."""

import filecmp
import zipfile
from functools import cached_property
from pathlib import Path, PurePath


def _is_extracted(archive: Path, folder: Path) -> bool:
    """Tell whether all files of a zip file are in a folder, with the sizes that they have in the zip file."""
    with zipfile.ZipFile(archive) as opened:
        # The last one of a name is the one that stays
        sizes = {member.filename: member.file_size for member in opened.infolist() if not member.is_dir()}
    paths = [(folder / name, size) for name, size in sizes.items()]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _extract(archives: list[Path], num_proc: int | None) -> list[Path]:
    """Extract zip files into the cache of `datasets`, unless they are there."""
    from datasets import DownloadConfig, DownloadManager, config
    from huggingface_hub.utils import WeakFileLock

    # No ValueError: this is no matter of the record that is being read
    for archive in archives:
        if not zipfile.is_zipfile(archive):
            raise zipfile.BadZipFile(
                f"{archive} is no zip file, or an incomplete one ({archive.stat().st_size} bytes). Download it again; "
                "a clone without Git LFS has only pointers of about 130 bytes."
            )

    def extract(paths: list[Path], force: bool) -> list[Path]:
        manager = DownloadManager(download_config=DownloadConfig(num_proc=num_proc, force_extract=force))
        try:
            return [Path(folder) for folder in manager.extract([str(path) for path in paths])]
        except zipfile.BadZipFile as error:
            names = [path.name for path in paths]
            raise zipfile.BadZipFile(
                f"One of the zip files {names} in {paths[0].parent} is damaged ({error}). Download it again."
            ) from error

    cache = Path(config.EXTRACTED_DATASETS_PATH)
    cache.mkdir(parents=True, exist_ok=True)
    # `datasets` takes any folder that is not empty for an extracted one: also one that another process is filling, that
    # was left by a killed process, or that is of an older zip file at the same place
    with WeakFileLock(cache / "paco_trl.lock"):
        folders = extract(archives, force=False)
        outdated = [
            archive for archive, folder in zip(archives, folders, strict=True) if not _is_extracted(archive, folder)
        ]
        if outdated:
            extract(outdated, force=True)
    return folders


class ImageFinder:
    """Finds images beside the JSON files of a folder or in its zip files, which are extracted when first needed."""

    def __init__(self, folder: Path, num_proc: int | None):
        self.folder = folder
        self.num_proc = num_proc
        self.found: dict[PurePath, str] = {}

    @cached_property
    def extracted(self) -> list[tuple[PurePath, Path]]:
        """Each zip file's path in the folder, and the folder that it is extracted to."""
        archives = sorted(self.folder.rglob("*.zip"))
        folders = _extract(archives, self.num_proc) if archives else []
        names = [archive.relative_to(self.folder) for archive in archives]
        return list(zip(names, folders, strict=True))

    def find(self, path: PurePath) -> str:
        if path not in self.found:
            beside = self.folder / path
            self.found[path] = str(beside if beside.is_file() else self._find_in_archives(path))
        return self.found[path]

    def _find_in_archives(self, path: PurePath) -> Path:
        hits: dict[PurePath, Path] = {}
        for name, folder in self.extracted:
            # As if the zip file were unpacked in the folder, where it lies, or into a folder with its own name; and its
            # one top folder may have its name, and not be part of the path
            places = [PurePath(), name.parent, name.with_suffix("")]
            inside = [path.relative_to(place) for place in places if path.is_relative_to(place)]
            for candidate in [*inside, *(PurePath(name.stem) / one for one in inside)]:
                if (folder / candidate).is_file():
                    hits.setdefault(name, folder / candidate)
        if not hits:
            archives = [str(name) for name, _ in self.extracted]
            where = f"the zip files {archives}" if archives else "a zip file, of which there are none"
            raise ValueError(
                f"its image {str(path)!r} is neither in {self.folder} nor in {where}. Check that the download is "
                "complete."
            )
        first, *others = hits.values()
        if not all(filecmp.cmp(first, other, shallow=False) for other in others):
            raise ValueError(
                f"its image {str(path)!r} is in the zip files {[str(name) for name in hits]}, which have different "
                f"files of this name. Put the right one at {self.folder / path}."
            )
        return first
