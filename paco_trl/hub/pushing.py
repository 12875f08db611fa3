# SPDX-License-Identifier: Apache-2.0
"""Upload in the background: training does not wait, and an outage of the Hub delays only the uploads."""

import glob
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi

from ..utils.background import CallExecutor
from ..utils.errors import is_message_enough
from ..utils.files import read_record, write_atomically
from ..utils.names import is_local, public_name
from .account import hub_outages
from .files import is_one_of, select_files


# Not accelerate's logger. It raises where no accelerate state exists, and a log line must never stop a run
logger = logging.getLogger(__name__)

# In the output directory: where uploads go, and the files of those that are not done
STAGING = ".pushing"
_REPOSITORY = "repository.json"


def remember_repository(
    output_dir: str | Path, repo_id: str, revision: str | None, private: bool | None = None
) -> None:
    """Save where the uploads of an output directory go (`revision=None` is the main branch), and `private` as given."""
    shutil.rmtree(Path(output_dir) / STAGING, ignore_errors=True)  # a killed run may have left files
    repository = {"repo_id": repo_id, "revision": revision, "private": private}
    write_atomically(Path(output_dir) / STAGING / _REPOSITORY, json.dumps(repository))


def remembered_repository(output_dir: str | Path) -> dict[str, Any]:
    """Read what [`remember_repository`] saved, an empty dictionary if no upload was ever prepared."""
    return read_record(Path(output_dir) / STAGING / _REPOSITORY)


@dataclass
class HubPusher:
    """Uploads what a run saves, one directory after the other, while it trains."""

    # Files to upload are first kept in `output_dir/.pushing`, as hard links to the saved files (no copies): what is saved
    # again or deleted meanwhile changes nothing there

    api: HfApi
    repo_id: str
    revision: str | None  # `None` is the main branch
    output_dir: Path
    published_files: list[str]
    _job: Future | None = None  # the last one in the background
    # Not `run_as_future`, for whose uploads the end of a process waits: a scheduler would kill it
    _background: CallExecutor = field(default_factory=lambda: CallExecutor(1, "push to the Hub"))

    def push_later(
        self, checkpoint: str | Path, message: str, checkpoint_name: str | None = None, replace: bool = True
    ) -> None:
        """
        Upload a checkpoint in the background, with `replace` instead of the one that waits for the upload before it; as
        `checkpoint_name` in full, so that training can resume.
        """
        staged = self._stage(checkpoint, checkpoint_name)
        if replace and self._job is not None:
            self._job.cancel()
        self._job = self._background.submit(self._try_upload, staged, message)
        self._job.add_done_callback(lambda job: shutil.rmtree(staged, ignore_errors=True))  # also a cancelled one

    def push_now(
        self, folder: str | Path, message: str, contents: Mapping[str, str] | None = None, blocking: bool = True
    ) -> CommitInfo | Future:
        """Upload a saved model and wait for it, or return its `Future`; `contents` by name replace files of the directory."""
        staged = self._stage(folder, contents=contents)

        def upload() -> CommitInfo:
            self.wait()
            return self._upload(staged, message, f"`paco-trl push {folder}` uploads it when the Hub is back.")

        return upload() if blocking else self.api.run_as_future(upload)

    def wait(self) -> None:
        """Wait for the uploads in the background. Failures are logged, not raised."""
        if self._job is not None:
            wait([self._job])

    def _stage(
        self, folder: str | Path, checkpoint_name: str | None = None, contents: Mapping[str, str] | None = None
    ) -> Path:
        (self.output_dir / STAGING).mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(dir=self.output_dir / STAGING))
        for name, path in select_files(folder, self.published_files).items():
            (staged / name).parent.mkdir(exist_ok=True)
            _link(path, staged / name)
        if checkpoint_name is not None:
            ignore = shutil.ignore_patterns("training_args.bin")  # contains the token, and is a pickle
            shutil.copytree(folder, staged / checkpoint_name, copy_function=_link, ignore=ignore)
        for config in staged.rglob("adapter_config.json"):
            values = json.loads(config.read_text(encoding="utf-8"))
            base = values.get("base_model_name_or_path")
            if base and is_local(base):  # a path of this machine
                text = json.dumps(values | {"base_model_name_or_path": public_name(base)}, indent=2)
                write_atomically(
                    config, text.ljust(config.stat().st_size)
                )  # shorter, the file would count as truncated
        for name, text in (contents or {}).items():
            write_atomically(staged / name, text)
        return staged

    def _upload(self, staged: Path, message: str, remedy: str) -> CommitInfo:
        """Upload a directory in one commit, without what an earlier upload of the same files had besides, and delete it."""
        try:
            with hub_outages(self.api, remedy):
                there = self.api.list_repo_files(self.repo_id, revision=self.revision)
                # By name: `*` of the client's patterns crosses directories, and full checkpoints have such files, too
                old = [glob.escape(name) for name in there if is_one_of(name, self.published_files)]
                checkpoints = [f"{path.name}/*" for path in staged.glob("*checkpoint*") if path.is_dir()]
                return self.api.upload_folder(
                    repo_id=self.repo_id, folder_path=staged, revision=self.revision, commit_message=message,
                    delete_patterns=[*checkpoints, *old],
                )  # fmt: skip
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _try_upload(self, staged: Path, message: str) -> None:
        try:
            remedy = f"`paco-trl push {self.output_dir}` uploads the newest model, `hf upload` a full checkpoint."
            self._upload(staged, message, remedy)
        # Whatever it is: training continues, and the user is told
        except Exception as error:
            trace = not is_message_enough(error)
            logger.warning(f"A checkpoint was not pushed to the Hub, and training continues. {error}", exc_info=trace)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
