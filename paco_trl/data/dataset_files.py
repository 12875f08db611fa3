# SPDX-License-Identifier: Apache-2.0
"""What the loaders of published folders share: finding the folder, refusing unsafe paths, leaving out broken rows."""

import logging
import os.path
from pathlib import Path, PurePath
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)

_MAX_LISTED = 20


def find_dataset_folder(path: str | Path, patterns: list[str]) -> Path:
    """Find the folder of a published dataset, on disk or, when there is none, on the Hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if folder.is_file():
        raise ValueError(f"{str(path)!r} is a file, but a dataset is a folder. Give the folder that the file is in.")
    if isinstance(path, Path) or path.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"There is no folder {str(path)!r}. Check the path, or give the id of a dataset on the Hub."
        )
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, repo_type="dataset", allow_patterns=patterns))


def load_split(path: str | Path, split: str) -> "Dataset":
    """Load a split of a dataset: saved with `save_to_disk`, or anything that [`~datasets.load_dataset`] reads."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    if not any((Path(path) / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        return load_dataset(str(path), split=split)
    dataset = load_from_disk(str(path))
    if not isinstance(dataset, DatasetDict):
        return dataset
    if split not in dataset:
        raise ValueError(f"There is no split {split!r} in {path}, only {list(dataset)}.")
    return dataset[split]


def find_dataset_file(folder: Path, name: str) -> Path:
    """Find a file of a dataset."""
    if not (folder / name).is_file():
        there = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
        listed = ", ".join(there[:_MAX_LISTED]) or "nothing"
        if len(there) > _MAX_LISTED:
            listed += f" and {len(there) - _MAX_LISTED} more"
        raise FileNotFoundError(
            f"There is no file {name!r} in {folder}, only: {listed}. Check the name, or that the folder is complete."
        )
    return folder / name


def path_inside(path: str) -> PurePath:
    """Give a path that a dataset names, if it stays in the dataset's folder."""
    if not isinstance(path, str) or not path:
        raise ValueError(f"an image is {path!r}, but it must be a path relative to the folder.")
    inside = PurePath(os.path.normpath(path))
    if inside.anchor or inside.parts[:1] == ("..",):
        raise ValueError(
            f"the path {path!r} is absolute or leaves the folder of the dataset, where it could name any file of this "
            "machine. Paths must be relative to the folder and stay in it."
        )
    return inside


def settle_broken(broken: list[str], total: int, what: str, skip_broken: bool) -> None:
    """Decide what becomes of broken rows: an error, or a warning that they are left out."""
    if not broken:
        return
    if not skip_broken:
        count = f" ({len(broken)} of {total} {what} are broken; this is the first one.)" if len(broken) > 1 else ""
        raise ValueError(f"{broken[0]} Correct it, or leave such {what} out with `skip_broken=True`.{count}")
    if len(broken) == total:
        raise ValueError(
            f"All {total} {what} are broken, so that `skip_broken=True` leaves none. The first: {broken[0]}"
        )
    lines = [f"Left out {len(broken)} of {total} {what} that are broken:", *broken[:_MAX_LISTED]]
    if len(broken) > _MAX_LISTED:
        lines.append(f"and {len(broken) - _MAX_LISTED} more.")
    logger.warning("\n".join(lines))
