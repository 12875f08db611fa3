# SPDX-License-Identifier: Apache-2.0
"""Upload in the background: training does not wait, and an outage of the Hub delays only the uploads."""

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from huggingface_hub import CommitInfo, HfApi
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from ..utils.names import is_local, public_name
from .account import CHECKPOINT_FOLDERS, describe, hub_errors, is_outage


# Not accelerate's logger, which raises where no accelerate state exists: a log line must never stop a run
logger = logging.getLogger(__name__)

# In the output directory: what has not been uploaded yet, a directory for each checkpoint
WAITING = ".pushing"
_REPOSITORY = "repository.json"
_PUSH = ".push.json"  # where it goes, with which message
_LAST = "last-checkpoint"

# A failed upload is retried after about 2 and 4 seconds, besides the retries of the Hub's client (half a minute each time
# without an answer). A longer outage is left to the next checkpoint: the end of a run waits for the last upload.
_ATTEMPTS = 3
_FIRST_WAIT, _LONGEST_WAIT = 2.0, 60.0

# Seconds of waiting for an upload before a message
_PATIENCE = 3.0


def remember_repository(
    output_dir: str | Path, repo_id: str, revision: str | None, private: bool | None = None
) -> None:
    """Save where the uploads of an output directory go (`revision=None` is the main branch), and `private` as given."""
    folder = Path(output_dir) / WAITING
    folder.mkdir(parents=True, exist_ok=True)
    where = {"repo_id": repo_id, "revision": revision, "private": private}
    (folder / _REPOSITORY).write_text(json.dumps(where), encoding="utf-8")


def remembered_repository(output_dir: str | Path) -> dict[str, Any] | None:
    """Read what [`remember_repository`] saved, `None` if no upload was ever prepared."""
    return _read(Path(output_dir) / WAITING / _REPOSITORY) or None


def select_files(folder: str | Path, patterns: Iterable[str]) -> dict[str, Path]:
    """Return the files of a directory that match patterns, by their path in it. Only these are uploaded."""
    folder = Path(folder)
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def retrying(api: HfApi, repo_id: str) -> Retrying:
    """Return a caller, used with a function and its arguments, that retries requests in a short outage of the Hub."""
    return Retrying(
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_exponential_jitter(_FIRST_WAIT, _LONGEST_WAIT),
        retry=retry_if_exception(is_outage),
        before_sleep=lambda state: logger.warning(
            "%s at %s could not be reached (%s). Trying again in %.0f seconds.",
            repo_id, api.endpoint, describe(state.outcome.exception()), state.next_action.sleep,
        ),
        reraise=True,
    )  # fmt: skip


class HubPusher:
    """Uploads what a run saves while training continues."""

    # Files to upload are first kept in `output_dir/.pushing`, as hard links to the checkpoint's files (no copies):
    # old checkpoints can be deleted meanwhile. Of several that wait, only the newest is uploaded, and the full
    # checkpoints that `hub_strategy="all_checkpoints"` asks for; `always_push` (`hub_always_push`) uploads each. An
    # outage is retried, then reported; the files wait for the next checkpoint, or for `paco-trl push`.

    def __init__(
        self,
        api: HfApi,
        repo_id: str,
        revision: str | None,
        output_dir: str | Path,
        published_files: list[str],
        always_push: bool = False,
    ):
        self.api, self.repo_id, self.revision = api, repo_id, revision
        self.output_dir, self.folder = Path(output_dir), Path(output_dir) / WAITING
        self.published_files, self.always_push = list(published_files), always_push
        self._destination = {"repo_id": repo_id, "revision": revision}
        self._lock = threading.Lock()  # for starting and ending the thread
        self._thread: threading.Thread | None = None

    def push_later(self, checkpoint: str | Path, step: int, message: str, checkpoint_name: str | None = None) -> None:
        """Upload a checkpoint in the background; as `checkpoint_name` in full, so that training can resume."""
        with self._lock:
            # In the order of saving: a resumed run reaches the same steps again
            self._stage(checkpoint, f"step-{step}", message, checkpoint_name)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="push to the Hub", daemon=True)
                self._thread.start()

    def push_now(self, folder: str | Path, message: str, contents: Mapping[str, str] | None = None) -> CommitInfo:
        """Upload a saved model and wait for it, see [`hub_errors`]; `contents` by name replace files of the directory."""
        self.wait()
        self._stage(folder, "model", message, contents=contents)
        try:
            return self.push_waiting()
        except ConnectionError as error:
            raise ConnectionError(f"{error} `paco-trl push {folder}` uploads it when the Hub is back.") from error

    def _stage(
        self,
        folder: str | Path,
        name: str,
        message: str,
        checkpoint_name: str | None = None,
        contents: Mapping[str, str] | None = None,
    ) -> None:
        """Link the files to upload; the adapter's config without a path of this machine, and nothing with a token."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # `paco-trl push` may stage at the same time as the run
        new, contents = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder)), dict(contents or {})
        config = Path(folder) / "adapter_config.json"
        if config.is_file():
            values = json.loads(config.read_text(encoding="utf-8"))
            base = values.get("base_model_name_or_path")
            if base and is_local(base):
                contents[config.name] = json.dumps(values | {"base_model_name_or_path": public_name(base)}, indent=2)
        for path_in_repo, path in select_files(folder, self.published_files).items():
            if path_in_repo not in contents:
                _link(path, new / path_in_repo)
        for path_in_repo, text in contents.items():
            (new / path_in_repo).write_text(text, encoding="utf-8")
        if checkpoint_name is not None:
            for path_in_repo, path in select_files(folder, ["**/*"]).items():
                target = new / checkpoint_name / path_in_repo
                if path_in_repo in contents:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(contents[path_in_repo], encoding="utf-8")
                elif path_in_repo != "training_args.bin":  # contains the token, and is a pickle
                    _link(path, target)
        (new / _PUSH).write_text(json.dumps({**self._destination, "message": message}), encoding="utf-8")
        os.replace(new, self.folder / f"{time.time_ns()}-{name}")

    def wait(self) -> None:
        """Wait for running uploads. A failed one is not retried."""
        thread = self._thread
        if thread is None:
            return
        thread.join(_PATIENCE)
        if thread.is_alive():
            logger.warning(
                "Waiting for the upload to %s. Everything is saved in %s: if you stop now, `paco-trl push %s` uploads it later.",
                self.repo_id, self.output_dir, self.output_dir,
            )  # fmt: skip
            thread.join()

    def waiting(self) -> list[Path]:
        """Return the directories that wait for an upload to this repository and branch, oldest first."""
        folders = sorted(path.parent for path in self.folder.glob(f"[0-9]*/{_PUSH}"))
        return [path for path in folders if self._destination.items() <= _read(path / _PUSH).items()]

    def push_waiting(self) -> CommitInfo | None:
        """Upload everything that waits, see [`hub_errors`]: of several the newest model and all full checkpoints."""
        commit = None
        with FileLock(self.folder / ".lock"):  # `paco-trl push` may run at the same time
            while waiting := self.waiting():
                if len(waiting) > 1 and not self.always_push:
                    self._drop_top(waiting[0], keep_last=not any((one / _LAST).is_dir() for one in waiting[1:]))
                if any(path.name != _PUSH for path in waiting[0].iterdir()):
                    commit = self._upload(waiting[0])
                shutil.rmtree(waiting[0])
        return commit

    def _drop_top(self, waiting: Path, keep_last: bool) -> None:
        """Delete what a newer upload replaces: the model itself, and the last full checkpoint."""
        for path in waiting.iterdir():
            is_last = path.name == _LAST and keep_last
            if path.name == _PUSH or path.name.startswith("checkpoint-") or is_last:
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _upload(self, folder: Path) -> CommitInfo:
        """Upload a directory in one commit, and delete what an earlier upload of the same files had besides."""
        names = [path.name for path in folder.iterdir() if path.name != _PUSH]
        replaced = [f"{name}/*" for name in names if f"{name}/".startswith(CHECKPOINT_FOLDERS)]
        if len(names) > len(replaced):
            replaced += self.published_files
        with hub_errors(self.api, self.repo_id, "Nothing is lost."):
            return retrying(self.api, self.repo_id)(
                self.api.upload_folder, folder_path=folder, repo_id=self.repo_id, revision=self.revision,
                commit_message=_read(folder / _PUSH)["message"], ignore_patterns=[_PUSH], delete_patterns=replaced,
            )  # fmt: skip

    def _work(self) -> None:
        tried = None
        while True:
            with self._lock:
                newest = next(reversed(self.waiting()), None)
                if newest is None or newest == tried:  # a later one found this thread alive
                    self._thread = None
                    return
            tried = newest
            try:
                self.push_waiting()
            # Whatever it is: training continues, and the user is told
            except Exception as error:
                logger.warning(
                    "A checkpoint was not pushed to the Hub, and training continues. %s It waits in %s, and is uploaded "
                    "with the next checkpoint, or by `paco-trl push %s`.", error, self.folder, self.output_dir,
                )  # fmt: skip


def _read(path: Path) -> dict:
    """Read a JSON file; an empty dictionary where it does not exist (another process may just have uploaded it)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _link(path: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except FileExistsError:
        raise  # a copy would overwrite the existing file under all its names
    except OSError:
        shutil.copyfile(path, target)
