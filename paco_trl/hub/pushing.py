# SPDX-License-Identifier: Apache-2.0
"""Upload in the background: training does not wait, and an outage of the Hub delays only the uploads."""

import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from ..utils.errors import is_message_enough, is_traceback_wanted
from ..utils.names import is_local, public_name
from .account import describe, hub_errors, is_outage
from .files import select_files


# Not accelerate's logger, which raises where no accelerate state exists: a log line must never stop a run
logger = logging.getLogger(__name__)

# In the output directory: where uploads go, and the files of those that are not done
STAGING = ".pushing"
_REPOSITORY = "repository.json"

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
    folder = Path(output_dir) / STAGING
    shutil.rmtree(folder, ignore_errors=True)  # what a run that was killed has left
    folder.mkdir(parents=True)
    where = {"repo_id": repo_id, "revision": revision, "private": private}
    (folder / _REPOSITORY).write_text(json.dumps(where), encoding="utf-8")


def remembered_repository(output_dir: str | Path) -> dict[str, Any]:
    """Read what [`remember_repository`] saved, an empty dictionary if no upload was ever prepared."""
    try:
        return json.loads((Path(output_dir) / STAGING / _REPOSITORY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


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

    # Files to upload are first kept in `output_dir/.pushing`, as hard links to the checkpoint's files (no copies): old
    # checkpoints can be deleted meanwhile. Of several that wait, only the newest is uploaded, and the full checkpoints that
    # `hub_strategy="all_checkpoints"` asks for; `always_push` (`hub_always_push`) uploads each.

    def __init__(
        self,
        api: HfApi,
        repo_id: str,
        revision: str | None,
        output_dir: str | Path,
        published_files: list[str],
        always_push: bool = False,
    ):
        self.api, self.repo_id, self.revision, self.output_dir = api, repo_id, revision, Path(output_dir)
        self.published_files, self.always_push = list(published_files), always_push
        self._newest: Path | None = None
        self._thread: threading.Thread | None = None

    def push_later(self, checkpoint: str | Path, message: str, checkpoint_name: str | None = None) -> None:
        """Upload a checkpoint in the background; as `checkpoint_name` in full, so that training can resume."""
        self._newest = staged = self._stage(checkpoint, checkpoint_name)
        is_kept = self.always_push or (checkpoint_name or "").startswith("checkpoint-")
        arguments = (staged, message, is_kept, self._thread)
        self._thread = threading.Thread(target=self._push_after, args=arguments, name="push to the Hub", daemon=True)
        self._thread.start()

    def _push_after(self, staged: Path, message: str, is_kept: bool, previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        try:
            if is_kept or staged == self._newest:
                self._upload(staged, message)
        # Whatever it is: training continues, and the user is told
        except Exception as error:
            remedy = "It is not sent again: upload its directory by `hf upload`."
            if not is_kept:
                remedy = f"The next checkpoint is pushed, or the newest one by `paco-trl push {self.output_dir}`."
            logger.warning(
                "A checkpoint was not pushed to the Hub, and training continues. %s %s", error, remedy,
                exc_info=is_traceback_wanted() or not is_message_enough(error),
            )  # fmt: skip
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def push_now(
        self, folder: str | Path, message: str, contents: Mapping[str, str] | None = None, blocking: bool = True
    ) -> Any:
        """
        Upload a saved model and wait for it, see [`hub_errors`], or return its `Future`; as it is now, also if it is saved
        again meanwhile. `contents` by name replace files of the directory.
        """
        staged = self._stage(folder, contents=contents)

        def upload() -> CommitInfo:
            try:
                self.wait()
                return self._upload(staged, message)
            except ConnectionError as error:
                raise ConnectionError(f"{error} `paco-trl push {folder}` uploads it when the Hub is back.") from error
            finally:
                shutil.rmtree(staged, ignore_errors=True)

        return upload() if blocking else self.api.run_as_future(upload)

    def _stage(
        self, folder: str | Path, checkpoint_name: str | None = None, contents: Mapping[str, str] | None = None
    ) -> Path:
        """Link the files to upload; the adapter's config without a path of this machine, and nothing with a token."""
        (self.output_dir / STAGING).mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(dir=self.output_dir / STAGING))
        folder, contents = Path(folder), dict(contents or {})
        config = folder / "adapter_config.json"
        if config.is_file():
            values = json.loads(config.read_text(encoding="utf-8"))
            base = values.get("base_model_name_or_path")
            if base and is_local(base):
                contents[config.name] = json.dumps(values | {"base_model_name_or_path": public_name(base)}, indent=2)
        files = {name: folder / name for name in contents} | select_files(folder, self.published_files)
        if checkpoint_name is not None:
            everything = select_files(folder, ["**/*"])
            everything.pop("training_args.bin", None)  # contains the token, and is a pickle
            files |= {f"{checkpoint_name}/{name}": path for name, path in everything.items()}
        for name, path in files.items():
            target, text = staged / name, contents.get(path.relative_to(folder).as_posix())
            target.parent.mkdir(parents=True, exist_ok=True)
            if text is not None:
                target.write_text(text, encoding="utf-8")
                continue
            try:
                os.link(path, target)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, target)
        return staged

    def _upload(self, staged: Path, message: str) -> CommitInfo:
        """Upload a directory in one commit, and delete what an earlier upload of the same files had besides."""
        checkpoints = [f"{path.name}/*" for path in staged.glob("*checkpoint*") if path.is_dir()]
        with hub_errors(self.api, self.repo_id, "Nothing is lost."):
            return retrying(self.api, self.repo_id)(
                self.api.upload_folder, folder_path=staged, repo_id=self.repo_id, revision=self.revision,
                commit_message=message, delete_patterns=[*checkpoints, *self.published_files],
            )  # fmt: skip

    def wait(self) -> None:
        """Wait for running uploads. A failed one is not retried."""
        if self._thread is None:
            return
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            logger.warning(
                "Waiting for the upload to %s. Everything is saved in %s: if you stop now, `paco-trl push %s` uploads it later.",
                self.repo_id, self.output_dir, self.output_dir,
            )  # fmt: skip
            self._thread.join()
