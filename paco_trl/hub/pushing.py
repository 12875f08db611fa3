# SPDX-License-Identifier: Apache-2.0
"""Uploads beside training: they do not hold it up, and an outage of the Hub delays them and nothing else."""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from ..utils.names import is_local, public_name
from .account import CHECKPOINT_FOLDERS, asking, describe, is_outage, matches


# Not accelerate's logger, which raises where no accelerate state exists: a report must never be what stops a run
logger = logging.getLogger(__name__)

# In the output folder: what is to be uploaded and is not there yet, a folder for each checkpoint
WAITING = ".pushing"
_REPOSITORY = "repository.json"
_PUSH = ".push.json"  # where it goes, with which message

# An upload that fails is tried again after about 2 and 4 seconds, beside what the Hub's client tries by itself, which is
# half a minute each time where nothing answers. A longer outage is left to the next checkpoint: the end of a run waits
# for the last upload.
_ATTEMPTS = 3
_FIRST_WAIT, _LONGEST_WAIT = 2.0, 60.0

_LISTING_SECONDS = 60.0

# An upload that takes longer than so many seconds is said to be waited for
_PATIENCE = 3.0


def remember_repository(
    output_dir: str | Path, repo_id: str, revision: str | None, private: bool | None = None
) -> None:
    """
    Notes where the uploads of an output folder go.

    Args:
        output_dir (`str` or `Path`):
            Output folder.
        repo_id (`str`):
            Repository.
        revision (`str`, *optional*):
            Branch; `None` is the main one.
        private (`bool`, *optional*):
            Whether it is to be private, as was asked for.
    """
    folder = Path(output_dir) / WAITING
    folder.mkdir(parents=True, exist_ok=True)
    where = {"repo_id": repo_id, "revision": revision, "private": private}
    (folder / _REPOSITORY).write_text(json.dumps(where), encoding="utf-8")


def remembered_repository(output_dir: str | Path) -> dict[str, str | bool | None] | None:
    """
    Where the uploads of an output folder go.

    Args:
        output_dir (`str` or `Path`):
            Output folder.

    Returns:
        `dict` with `repo_id`, `revision` and `private`, or `None` if no upload was ever prepared.
    """
    try:
        return json.loads((Path(output_dir) / WAITING / _REPOSITORY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def select_files(folder: str | Path, patterns: Iterable[str]) -> dict[str, Path]:
    """
    Files of a folder that are uploaded. All others stay on this machine.

    Args:
        folder (`str` or `Path`):
            Folder.
        patterns (`Iterable[str]`):
            Patterns of paths in it.

    Returns:
        `dict[str, Path]`: files by their path in the repository.
    """
    folder = Path(folder)
    found = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


def retrying(api: HfApi, repo_id: str) -> Retrying:
    """
    How a request is made again when the Hub is down for a moment.

    Args:
        api ([`~huggingface_hub.HfApi`]):
            Client.
        repo_id (`str`):
            Repository, for the log.

    Returns:
        [`~tenacity.Retrying`]: called with a function and its arguments.
    """
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


def upload(
    api: HfApi,
    repo_id: str,
    revision: str | None,
    files: dict[str, Path | bytes],
    message: str,
    published_files: list[str],
) -> CommitInfo:
    """
    Uploads files in one commit: others see all of them or none.

    Files of an earlier upload that these do not have any more (pictures, parts of a checkpoint) are deleted. Content
    that is there already is not sent again.

    Args:
        api ([`~huggingface_hub.HfApi`]):
            Client.
        repo_id (`str`):
            Repository.
        revision (`str`, *optional*):
            Branch.
        files (`dict[str, Path | bytes]`):
            Files, or their content, by their path in the repository.
        message (`str`):
            Message of the commit.
        published_files (`list[str]`):
            Patterns of what an earlier upload may have left at the top of the repository.

    Returns:
        [`~huggingface_hub.CommitInfo`].
    """
    folders = {name.split("/")[0] for name in files if name.startswith(CHECKPOINT_FOLDERS)}
    is_whole = any(not name.startswith(CHECKPOINT_FOLDERS) for name in files)  # not a mere checkpoint
    operations = [CommitOperationAdd(name, _public_content(name, path)) for name, path in files.items()]
    # Not `list_repo_files`, which has no limit of time
    there = api.model_info(repo_id, revision=revision, timeout=_LISTING_SECONDS).siblings
    for name in [each.rfilename for each in there]:
        is_old = name.split("/")[0] in folders or (is_whole and matches(name, published_files))
        if is_old and name not in files:
            operations.append(CommitOperationDelete(name))
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision)


def _public_content(name: str, path: Path | bytes) -> str | bytes:
    """The file; an adapter's config without the folder of this machine that the base model was loaded from."""
    if isinstance(path, bytes):
        return path
    if name != "adapter_config.json":
        return str(path)
    config = json.loads(path.read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if base and is_local(base):
        config["base_model_name_or_path"] = public_name(base)
    return json.dumps(config, indent=2, sort_keys=True).encode()


class HubPusher:
    """
    Uploads what a run saves, beside training.

    What is to be uploaded is first kept in `output_dir/.pushing`, as second names of the checkpoint's files (no copies),
    so that old checkpoints can be deleted meanwhile. From there a thread uploads it, and takes it away when it has
    arrived. Where several wait for one another, only the newest is uploaded, and of the others the whole checkpoints
    that `hub_strategy="all_checkpoints"` asks for. An outage is tried over; then it is reported, and the files wait for
    the next checkpoint, or for `paco-trl push`.

    Args:
        api ([`~huggingface_hub.HfApi`]):
            Client.
        repo_id (`str`):
            Repository.
        revision (`str`, *optional*):
            Branch; `None` is the main one.
        output_dir (`str` or `Path`):
            Output folder.
        published_files (`list[str]`):
            Patterns of the files that a published model consists of.
        always_push (`bool`, *optional*, defaults to `False`):
            Whether each is uploaded, even if a newer one waits (`hub_always_push`).
    """

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
        self._lock = threading.Lock()  # of the thread's beginning and end
        self._thread: threading.Thread | None = None

    def push_later(self, checkpoint: str | Path, step: int, message: str, checkpoint_name: str | None = None) -> None:
        """
        Uploads a checkpoint beside training.

        Args:
            checkpoint (`str` or `Path`):
                Its folder. Its files must not change any more; they may be deleted.
            step (`int`):
                Its optimizer step.
            message (`str`):
                Message of the commit.
            checkpoint_name (`str`, *optional*):
                Folder of the repository for the whole checkpoint, with which training can go on. If `None`, only the
                published files are uploaded.
        """
        new = self.folder / ".new"
        shutil.rmtree(new, ignore_errors=True)  # of an attempt that failed
        for name, path in select_files(checkpoint, self.published_files).items():
            _link(path, new / name)
        if checkpoint_name is not None:
            for name, path in select_files(checkpoint, ["**/*"]).items():
                if name != "training_args.bin":  # holds the token, and is a pickle of this package's classes
                    _link(path, new / checkpoint_name / name)
        (new / _PUSH).write_text(json.dumps({**self._destination, "message": message}), encoding="utf-8")
        with self._lock:
            # In the order in which they were saved: a run that was resumed comes to the same steps again
            os.replace(new, self.folder / f"{time.time_ns()}-step-{step}")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="push to the Hub", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Waits for the uploads that are under way. One that failed is not tried again."""
        thread = self._thread
        if thread is None:
            return
        thread.join(_PATIENCE)
        if thread.is_alive():
            logger.warning(
                "Waiting for the upload to %s. Everything is saved in %s: if you stop it, `paco-trl push %s` does it later.",
                self.repo_id, self.output_dir, self.output_dir,
            )  # fmt: skip
            thread.join()

    def waiting(self) -> list[Path]:
        """
        What is to be uploaded to this repository and branch, and is not there yet.

        Returns:
            `list[Path]`: folders, oldest first.
        """
        found = sorted(path.parent for path in self.folder.glob(f"[0-9]*/{_PUSH}"))
        return [path for path in found if self._destination.items() <= _read(path / _PUSH).items()]

    def push_waiting(self, are_replaced: bool = False) -> None:
        """
        Uploads what waits, and comes back when it is there.

        Args:
            are_replaced (`bool`, *optional*, defaults to `False`):
                Whether something newer will be uploaded next, so that only whole checkpoints are still needed.

        Raises:
            PermissionError: the Hub refuses the token.
            ValueError: the Hub refuses the upload for another reason.
            ConnectionError: the Hub cannot be reached, or an upload did not come to its end.
        """
        if not self.folder.is_dir():
            return
        with FileLock(self.folder / ".lock"):  # `paco-trl push` may be at it beside a run
            if are_replaced and not self.always_push:
                waiting = self.waiting()
                for each in waiting:
                    self._drop_top(each, keep_last=each is waiting[-1])
            while waiting := self.waiting():
                if len(waiting) > 1 and not self.always_push:
                    self._drop_top(waiting[0], keep_last=False)
                files = {name: path for name, path in select_files(waiting[0], ["**/*"]).items() if name != _PUSH}
                if files:
                    self._upload(files, _read(waiting[0] / _PUSH)["message"])
                shutil.rmtree(waiting[0])

    def push_now(self, folder: str | Path, message: str, card: str | None = None) -> CommitInfo:
        """
        Uploads a saved model, and comes back when it is there.

        Args:
            folder (`str` or `Path`):
                Folder with its published files.
            message (`str`):
                Message of the commit.
            card (`str`, *optional*):
                Card in place of the folder's own.

        Returns:
            [`~huggingface_hub.CommitInfo`].

        Raises:
            PermissionError: the Hub refuses the token.
            ValueError: the Hub refuses the upload for another reason.
            ConnectionError: the Hub cannot be reached, or the upload did not come to its end.
        """
        self.wait()
        try:
            self.push_waiting(are_replaced=True)
            files = select_files(folder, self.published_files)
            if card is not None:
                files["README.md"] = card.encode()
            return self._upload(files, message)
        except ConnectionError as error:
            raise ConnectionError(
                f"{error} `paco-trl push {folder}` uploads it when the Hub is there again."
            ) from error

    def _drop_top(self, waiting: Path, keep_last: bool) -> None:
        """Leaves out what a newer upload replaces: the model itself, and the last whole checkpoint."""
        for path in waiting.iterdir():
            is_last = path.name == "last-checkpoint" and keep_last
            if path.name == _PUSH or path.name.startswith("checkpoint-") or is_last:
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _upload(self, files: dict[str, Path | bytes], message: str) -> CommitInfo:
        with asking(self.api, self.repo_id, "Nothing is lost."):
            return retrying(self.api, self.repo_id)(
                upload, self.api, self.repo_id, self.revision, files, message, self.published_files
            )

    def _work(self) -> None:
        tried = None
        while True:
            with self._lock:
                newest = next(reversed(self.waiting()), None)
                if newest is None or newest == tried:  # one that came meanwhile has found this thread alive
                    self._thread = None
                    return
            tried = newest
            try:
                self.push_waiting()
            # Whatever it is: training must not notice, and its user must
            except Exception as error:
                logger.warning(
                    "A checkpoint was not pushed to the Hub, and training goes on. %s It waits in %s, and is uploaded "
                    "with the next checkpoint, or by `paco-trl push %s`.",
                    error,
                    self.folder,
                    self.output_dir,
                )


def _read(path: Path) -> dict:
    """A file of [`HubPusher.push_later`]; nothing where another process has just uploaded it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _link(path: Path, target: Path) -> None:
    """A second name of a file, which outlives the first one; a copy where the file system knows no second names."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except FileExistsError:
        raise  # a copy would be written into the file that is there, which has other names
    except OSError:
        shutil.copyfile(path, target)
