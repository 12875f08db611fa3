# SPDX-License-Identifier: Apache-2.0
"""Directories of stages: a killed stage resumes there, and its result is never half written."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_from_disk
from datasets.arrow_writer import ArrowWriter

from .differences import differences
from .files import read_record, scratch_folder, write_atomically
from .journals import Journal
from .text import join_first


_SETTINGS = "settings.json"
_REPORT = "report.json"


def is_saved(path: str | Path) -> bool:
    """Return whether `save_to_disk` wrote a directory."""
    return any((Path(path).expanduser() / marker).is_file() for marker in ("state.json", "dataset_dict.json"))


def save_with_paths(dataset: Dataset | DatasetDict, path: str | Path) -> None:
    """Save a dataset as `save_to_disk` does, but keep images that are given by path as paths."""
    # `save_to_disk` would copy the file of an image into each row that has it, and a panel is in dozens of rows
    if isinstance(dataset, DatasetDict):
        for name, split in dataset.items():
            save_with_paths(split, Path(path) / name)
        write_atomically(Path(path) / "dataset_dict.json", json.dumps({"splits": list(dataset)}))
        return
    dataset.select([]).save_to_disk(str(path), num_shards=1)
    (file,) = Path(path).glob("*.arrow")
    with ArrowWriter(path=str(file), features=dataset.features) as writer:
        for batch in dataset.with_format("arrow").iter(batch_size=1000):
            writer.write_table(batch)
        writer.finalize()


class StageFolder:
    """
    Directory of one stage, created if needed.

    It holds `settings.json`, the images and journals of the stage and, once it is finished, `dataset/` and
    `report.json`. `settings` are all options and input digests that the result depends on. If the directory was begun
    with other settings, you get an error. With `settings=None` the stage always starts from scratch.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any] | None = None):
        self.path = Path(path).expanduser().absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self._dataset = self.path / "dataset"
        self._replaced = self.path / "dataset.replaced"
        self.images = self.path / "images"
        if not self._dataset.exists() and self._replaced.exists():  # killed between the two renames
            os.replace(self._replaced, self._dataset)
        if settings is not None:
            self._check_settings(settings)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Record the settings in a new directory, and raise an error if the stage was begun with other settings."""
        paths = (path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
        files = sorted(str(path) for path in paths if not path.name.startswith("."))
        # Round trip through JSON, so that tuples compare equal
        settings = json.loads(json.dumps(settings))
        # Read the record last: another process may be starting the stage
        begun = self.settings
        if files and not begun.keys() & settings.keys():
            raise self._foreign(join_first(files), _SETTINGS)
        # Without another file, the first attempt ended in an error, without a result
        if files in ([], [_SETTINGS]):
            self._write(_SETTINGS, settings)
            return
        if changed := "; ".join(differences(begun, dict.fromkeys(begun) | settings)):
            raise ValueError(f"{self.path} was begun with other settings: {changed}. Resume with those, or delete it.")

    @staticmethod
    def image_folders(result: Path) -> list[Path]:
        """Return the image directories of all stages of a build; `result` is of one stage, or a split of it."""
        stages = [stage for stage in result.parents[:2] if (stage / _REPORT).is_file()]
        return [report.parent / "images" for stage in stages for report in stage.parent.glob(f"*/{_REPORT}")]

    @property
    def is_done(self) -> bool:
        """Return whether the stage is finished."""
        return is_saved(self._dataset)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that the stage was started with; empty without settings."""
        return read_record(self.path / _SETTINGS)

    @property
    def report(self) -> dict[str, Any]:
        """Return the report of a finished stage; empty before."""
        return read_record(self.path / _REPORT)

    def _foreign(self, what: str, record: str) -> ValueError:
        return ValueError(
            f"{self.path} has {what}, but no {record} of paco_trl that says it wrote this. Move it away, or choose "
            "another directory."
        )

    def _check_dataset(self) -> None:
        if self._dataset.exists() and not (self.path / _REPORT).exists():
            raise self._foreign(self._dataset.name, _REPORT)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def journal(self, name: str) -> Journal:
        """Open the journal `name`.jsonl of this stage."""
        return Journal(self.path / f"{name}.jsonl")

    def finish(self, dataset: Dataset | DatasetDict, report: Mapping[str, Any]) -> None:
        """Save the stage's result, in place of an earlier one, and its report. Images given by path stay paths."""
        self._check_dataset()
        with scratch_folder(self.path / "dataset.saving") as staged:
            save_with_paths(dataset, staged)
            self._write(_REPORT, report)
            if self._dataset.exists():
                shutil.rmtree(self._replaced, ignore_errors=True)
                os.replace(self._dataset, self._replaced)
            os.replace(staged, self._dataset)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def clear(self) -> None:
        """Remove the result of an earlier run, if this run has none."""
        self._check_dataset()
        shutil.rmtree(self._dataset, ignore_errors=True)
        (self.path / _REPORT).unlink(missing_ok=True)

    def load(self, stage: str | None = None) -> Dataset | DatasetDict:
        """Load the result, or raise a `FileNotFoundError` that names the stage, by default as the directory."""
        if not self.is_done:
            name = stage or self.path.name
            raise FileNotFoundError(f"No result in {self.path}: stage {name!r} is not finished. Run it.")
        return load_from_disk(str(self._dataset))
