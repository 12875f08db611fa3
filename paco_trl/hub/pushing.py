# SPDX-License-Identifier: Apache-2.0
"""Background uploads, so that an outage of the Hub delays them, but not training."""

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
from ..utils.errors import is_user_error
from ..utils.files import read_record, write_atomically
from ..utils.names import is_local, public_name
from .files import is_one_of, select_files
from .repositories import explain_outages


# Not accelerate's logger, which raises without an accelerate state: a log line must never stop a run
logger = logging.getLogger(__name__)

# In the output directory: the target of uploads, and the files of pending uploads
PUSH_DIR = ".pushing"
_REPOSITORY = "repository.json"


def reset_push_dir(output_dir: str | Path, repo_id: str, revision: str | None, private: bool | None = None) -> None:
    """Record the target of a run's uploads, and delete files that a killed run has left. The main branch is `None`."""
    shutil.rmtree(Path(output_dir) / PUSH_DIR, ignore_errors=True)
    repository = {"repo_id": repo_id, "revision": revision, "private": private}
    write_atomically(Path(output_dir) / PUSH_DIR / _REPOSITORY, json.dumps(repository))


def load_push_target(output_dir: str | Path) -> dict[str, Any]:
    """Read the record of [`reset_push_dir`], an empty dictionary if no upload was ever prepared."""
    return read_record(Path(output_dir) / PUSH_DIR / _REPOSITORY)


@dataclass
class HubPusher:
    """
    Upload saved models and checkpoints one after the other, while training goes on.

    Files are first staged in `output_dir/.pushing` as hard links, so that saving over the originals does not change a
    pending upload.
    """

    api: HfApi
    repo_id: str
    revision: str | None  # `None` is the main branch
    output_dir: Path
    published_patterns: list[str]
    _job: Future | None = None  # the last background upload
    # Not `run_as_future`: the process would not exit before its uploads end, and a scheduler would kill it
    _background: CallExecutor = field(default_factory=lambda: CallExecutor(1, "push to the Hub"))

    def push_checkpoint(
        self, checkpoint: str | Path, message: str, checkpoint_name: str | None = None, replace: bool = True
    ) -> None:
        """
        Upload a checkpoint in the background. With `replace`, a waiting upload is canceled. With `checkpoint_name`,
        the full checkpoint is also uploaded to the folder of that name, so that training can resume.
        """
        staging_dir = self._stage(checkpoint, checkpoint_name)
        if replace and self._job is not None:
            self._job.cancel()
        self._job = self._background.submit(self._try_upload, staging_dir, message)
        # Also called if the job is canceled
        self._job.add_done_callback(lambda job: shutil.rmtree(staging_dir, ignore_errors=True))

    def push_model(
        self, folder: str | Path, message: str, contents: Mapping[str, str] | None = None, blocking: bool = True
    ) -> CommitInfo | Future:
        """Upload a model and wait, or return a `Future`; `contents` (name -> text) replace files of the folder."""
        staging_dir = self._stage(folder, contents=contents)

        def upload() -> CommitInfo:
            self.wait()
            return self._upload(staging_dir, message, f"`paco-trl push {folder}` uploads it when the Hub is back.")

        # As the client's own `upload_folder` does: the caller, who gets the future, has asked not to wait
        return upload() if blocking else self.api.run_as_future(upload)

    def wait(self) -> None:
        """Wait for background uploads. Failures are logged, not raised."""
        if self._job is not None:
            wait([self._job])

    def _stage(
        self, folder: str | Path, checkpoint_name: str | None = None, contents: Mapping[str, str] | None = None
    ) -> Path:
        (self.output_dir / PUSH_DIR).mkdir(parents=True, exist_ok=True)
        staging_dir = Path(tempfile.mkdtemp(dir=self.output_dir / PUSH_DIR))
        for name, path in select_files(folder, self.published_patterns).items():
            (staging_dir / name).parent.mkdir(exist_ok=True)
            _link(path, staging_dir / name)
        if checkpoint_name is not None:
            ignore = shutil.ignore_patterns("training_args.bin")  # contains the token, and is a pickle
            shutil.copytree(folder, staging_dir / checkpoint_name, copy_function=_link, ignore=ignore)
        for config in staging_dir.rglob("adapter_config.json"):
            values = json.loads(config.read_text(encoding="utf-8"))
            base = values.get("base_model_name_or_path")
            if base and is_local(base):  # publish no local path
                text = json.dumps(values | {"base_model_name_or_path": public_name(base)}, indent=2)
                # Padded to the recorded size: `incomplete_files` takes a shorter file for a truncated one
                write_atomically(config, text.ljust(config.stat().st_size))
        for name, text in (contents or {}).items():
            write_atomically(staging_dir / name, text)
        return staging_dir

    def _upload(self, staging_dir: Path, message: str, remedy: str) -> CommitInfo:
        """Upload a staging directory in one commit that also deletes files of earlier uploads; delete the directory."""
        try:
            with explain_outages(self.api, remedy):
                remote_files = self.api.list_repo_files(self.repo_id, revision=self.revision)
                # By exact name: `*` in the client's patterns crosses directories, into full checkpoints
                old_files = [glob.escape(name) for name in remote_files if is_one_of(name, self.published_patterns)]
                checkpoints = [f"{path.name}/*" for path in staging_dir.glob("*checkpoint*") if path.is_dir()]
                return self.api.upload_folder(
                    repo_id=self.repo_id, folder_path=staging_dir, revision=self.revision, commit_message=message,
                    delete_patterns=[*checkpoints, *old_files],
                )  # fmt: skip
        finally:
            shutil.rmtree(staging_dir, ignore_errors=True)

    def _try_upload(self, staging_dir: Path, message: str) -> None:
        try:
            remedy = f"`paco-trl push {self.output_dir}` uploads the newest model, `hf upload` a full checkpoint."
            self._upload(staging_dir, message, remedy)
        # Any error: training continues, and the user is warned
        except Exception as error:
            has_traceback = not is_user_error(error)
            logger.warning(
                f"A checkpoint was not pushed to the Hub, and training continues. {error}", exc_info=has_traceback
            )


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)
