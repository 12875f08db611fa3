# SPDX-License-Identifier: Apache-2.0
"""Check a token, a repository and a base model before a run."""

import json
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import DatasetInfo, ModelInfo
from huggingface_hub.utils import get_session, validate_repo_id

from ..utils.names import is_local, is_same_model, public_name
from .files import SETTINGS


# The common class of the Hub's errors and of connection errors; its name depends on the version of huggingface_hub
HTTPError = HfHubHTTPError.__bases__[0]

# Full checkpoints in a repository
CHECKPOINT_FOLDERS = ("last-checkpoint/", "checkpoint-")
# Other files that may be next to ours
_HARMLESS = (".gitattributes", ".gitignore", "LICENSE*")

# Seconds to connect, read and write, and to get a connection. The Hub's client has no timeout: a run would hang forever
_TIMEOUT = (30.0, 120.0, 120.0, None)
# The client is one for the process: the first thread that needs the timeout sets it, the last one takes it back
_timeout_lock = threading.Lock()
_timeouts: list[Any] = []  # of the client before, for each thread

_NEW_TOKEN = "Make one with the right to write at https://huggingface.co/settings/tokens, and log in: `hf auth login`."
_TRY_AGAIN = "Try again when the Hub can be reached."


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of a refused request, `None` where there was no answer."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def cause_of(error: BaseException) -> BaseException:
    """Return what is behind the `RuntimeError` of an LFS upload or the `ConnectionError` of [`hub_errors`]."""
    while type(error) in (RuntimeError, ConnectionError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def describe(error: BaseException) -> str:
    """Describe an error of a client in one line. The clients' errors do not contain the token."""
    cause = cause_of(error)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


@contextmanager
def _timeout() -> Iterator[None]:
    """Add a timeout to the client while requests are made."""
    session = get_session()
    with _timeout_lock:
        _timeouts.append(_timeouts[0] if _timeouts else session.timeout)
        if session.timeout.read is None:
            session.timeout = _TIMEOUT
    try:
        yield
    finally:
        with _timeout_lock:
            before = _timeouts.pop()
            if not _timeouts:
                get_session().timeout = before


@contextmanager
def hub_errors(api: HfApi, repo_id: str, remedy: str, right: str = "write to") -> Iterator[None]:
    """Turn errors of requests into ones that name the Hub and a remedy, and add a timeout to the client."""
    # A refused token becomes a `PermissionError`, another refusal a `ValueError`, an outage a `ConnectionError`
    try:
        with _timeout():
            yield
    except (HTTPError, ConnectionError, LocalEntryNotFoundError, RuntimeError) as error:
        status = status_of(cause_of(error))
        if status in (401, 403):
            raise PermissionError(
                f"{api.endpoint} does not allow the token to {right} {repo_id} ({describe(error)}). Give a token with "
                f"the right to {right} it, or another repository."
            ) from error
        if status is not None and not is_outage(error):
            raise ValueError(f"{api.endpoint} refuses a request about {repo_id} ({describe(error)}).") from error
        raise ConnectionError(
            f"The request about {repo_id} to {api.endpoint} failed ({describe(error)}). {remedy}"
        ) from error


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Check whether a path matches one of some patterns, in which `*` does not cross directories."""
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in patterns)


def check_account(api: HfApi, repo_id: str) -> str:
    """Check the token and the form of a repository's id, and return the id with its user or organization."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"The Hub does not allow the repository's name {repo_id!r} (`user/name`): {error}") from error
    with hub_errors(api, repo_id, _TRY_AGAIN):
        try:
            account = api.whoami()
        except LocalTokenNotFoundError as error:
            raise PermissionError(f"There is no token for {api.endpoint}. {_NEW_TOKEN}") from error
        except HfHubHTTPError as error:
            if status_of(error) != 401:
                raise
            raise PermissionError(f"{api.endpoint} does not know the token. {_NEW_TOKEN}") from error
    user, organizations = account["name"], [name["name"] for name in account.get("orgs", [])]
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise PermissionError(f"The token of {user} for {api.endpoint} may only read. {_NEW_TOKEN}")
    namespace, _, name = repo_id.rpartition("/")
    if namespace.lower() not in ("", user.lower(), *(name.lower() for name in organizations)):
        accounts = f"{user} and of {', '.join(organizations)}" if organizations else user
        raise PermissionError(
            f"The repository is {repo_id}, but the token for {api.endpoint} is that of {accounts}: it has no right to "
            f"{namespace!r}. Give a token of {namespace}, or another repository, such as '{user}/{name}'."
        )
    return repo_id if namespace else f"{user}/{repo_id}"


def check_base_model(api: HfApi, base_model: str) -> None:
    """Check that the account may read a base model on the Hub, which may be gated; a directory is not checked."""
    if is_local(base_model):
        return
    with hub_errors(api, base_model, _TRY_AGAIN, "read"):
        try:
            api.auth_check(base_model)
        except GatedRepoError as error:
            page = f"{api.endpoint}/{base_model}"
            raise PermissionError(
                f"The base model {base_model} is gated. Accept its terms at {page} first."
            ) from error
        except RepositoryNotFoundError as error:
            raise ValueError(
                f"There is no model {base_model!r} at {api.endpoint}, or the token may not read it."
            ) from error


def find_repository(
    api: HfApi, repo_id: str, private: bool | None, repo_type: str = "model"
) -> tuple[str, ModelInfo | DatasetInfo | None]:
    """
    Check the account, and that an existing repository is private where that is asked for: every push begins here.

    Return the full id, and what the Hub knows of the repository, `None` where it does not exist.
    """
    repo_id = check_account(api, repo_id)
    with hub_errors(api, repo_id, _TRY_AGAIN):
        try:
            info: Any = api.repo_info(repo_id, repo_type=repo_type)
        except RepositoryNotFoundError:
            return repo_id, None
    if private and not info.private:
        # `private=True` of the Hub's client is for a new repository, and ignored for an existing one
        raise ValueError(
            f"{repo_id} exists and is public, not private. Change that in its settings, or name another one."
        )
    return repo_id, info


def check_repository(
    api: HfApi,
    repo_id: str,
    *,
    private: bool | None,
    revision: str | None,
    published_files: list[str],
    base_model: str | None,
) -> tuple[str, bool]:
    """Check whether `published_files` (patterns) may be pushed, and return the full id and whether it exists."""
    # An adapter of another `base_model` (Hub id or directory) in the repository is not overwritten
    repo_id, info = find_repository(api, repo_id, private)
    if info is None:
        return repo_id, False
    with hub_errors(api, repo_id, _TRY_AGAIN):
        _check_contents(api, repo_id, revision, published_files, base_model)
        api.auth_check(repo_id, write=True)
    return repo_id, True


def prepare_repository(
    api: HfApi, repo_id: str, *, private: bool | None, revision: str | None, **contents: Any
) -> str:
    """Run [`check_repository`], create the repository and the branch where they do not exist, and return the full id."""
    repo_id, exists = check_repository(api, repo_id, private=private, revision=revision, **contents)
    with hub_errors(api, repo_id, _TRY_AGAIN):
        if not exists:
            try:
                api.create_repo(repo_id, private=private)
            except HfHubHTTPError as error:
                if status_of(error) != 400:
                    raise
                raise ValueError(f"{api.endpoint} does not allow the name {repo_id} ({describe(error)}).") from error
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id


def _check_contents(
    api: HfApi, repo_id: str, revision: str | None, published_files: list[str], base_model: str | None
) -> None:
    """Check that a push would replace an earlier state of the same model and nothing else."""
    if revision not in [branch.name for branch in api.list_repo_refs(repo_id).branches]:
        revision = None  # a new branch begins with what is on the main one
    files = api.list_repo_files(repo_id, revision=revision)
    expected = (*published_files, *_HARMLESS)
    others = [name for name in files if not name.startswith(CHECKPOINT_FOLDERS) and not matches(name, expected)]
    if others:
        raise ValueError(
            f"{repo_id} has {len(others)} files of something else, such as {others[0]!r}. Name another repository, or delete them."
        )
    weights = [name for name in files if name.endswith((".safetensors", ".bin")) and matches(name, published_files)]
    if not weights:
        return
    if SETTINGS not in files:
        raise ValueError(
            f"{repo_id} has {weights[0]!r} of a model that was not made here: it has no {SETTINGS}. Name another one."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(repo_id, SETTINGS, revision=revision, local_dir=folder)
        other_base = json.loads(Path(path).read_text(encoding="utf-8")).get("base_model")
    if isinstance(other_base, str) and base_model is not None and not is_same_model(other_base, base_model):
        raise ValueError(
            f"{repo_id} has a model made of {other_base}, not of {public_name(base_model)}. Name another one."
        )


def is_outage(error: BaseException) -> bool:
    """Check whether a request may work when it is retried: no connection, an overloaded Hub, or a concurrent commit."""
    cause = cause_of(error)
    status = status_of(cause)
    if status is not None:
        return status in (408, 409, 412, 425, 429) or status >= 500
    if isinstance(cause, OfflineModeIsEnabled):
        return False
    return isinstance(cause, (HTTPError, ConnectionError, TimeoutError, LocalEntryNotFoundError, RuntimeError))
