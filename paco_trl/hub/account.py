# SPDX-License-Identifier: Apache-2.0
"""Check a token, a repository and a base model before a run."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import DatasetInfo, ModelInfo
from huggingface_hub.utils import get_session

from ..utils.names import is_local, is_same_model, public_name
from .files import SETTINGS


# The common class of the Hub's errors and of connection errors; its name depends on the version of huggingface_hub
HTTPError = HfHubHTTPError.__bases__[0]

# Files of a repository in which nothing was published yet
_HARMLESS = {".gitattributes", ".gitignore", "LICENSE", "LICENSE.md", "LICENSE.txt", "README.md"}

# Seconds to connect, read and write, and to get a connection. The Hub's client has no timeout: a run would hang forever
_TIMEOUT = (30.0, 120.0, 120.0, None)

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


def is_outage(error: BaseException) -> bool:
    """Check whether a request may work when it is retried: no connection, an overloaded Hub, or a concurrent commit."""
    cause = cause_of(error)
    status = status_of(cause)
    if status is not None:
        return status in (408, 409, 412, 425, 429) or status >= 500
    if isinstance(cause, OfflineModeIsEnabled):
        return False
    return isinstance(cause, (HTTPError, ConnectionError, TimeoutError, LocalEntryNotFoundError, RuntimeError))


@contextmanager
def hub_errors(api: HfApi, repo_id: str, remedy: str, right: str = "write to") -> Iterator[None]:
    """Turn errors of requests into ones that name the Hub and a remedy, and give the client a timeout."""
    # A refused token becomes a `PermissionError`, another refusal a `ValueError`, an outage a `ConnectionError`
    session = get_session()
    if session.timeout.read is None:
        session.timeout = _TIMEOUT
    try:
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


def check_base_model(api: HfApi, base_model: str) -> None:
    """Check that the account may read a base model on the Hub, which may be gated; a directory is not checked."""
    if not is_local(base_model):
        with hub_errors(api, base_model, _TRY_AGAIN, "read"):
            api.auth_check(base_model)


def find_repository(
    api: HfApi, repo_id: str, private: bool | None, repo_type: str = "model"
) -> tuple[str, ModelInfo | DatasetInfo | None]:
    """
    Check the account, and that an existing repository is private where that is asked for: every push begins here.

    Return the full id, and what the Hub knows of the repository, `None` where it does not exist.
    """
    with hub_errors(api, repo_id, _TRY_AGAIN):
        account = api.whoami()
        accounts = [account["name"], *(each["name"] for each in account.get("orgs", []))]
        namespace, _, name = repo_id.rpartition("/")
        is_reader = account.get("auth", {}).get("accessToken", {}).get("role") == "read"
        if is_reader or namespace.lower() not in ("", *map(str.lower, accounts)):
            raise PermissionError(
                f"The token of {accounts[0]} for {api.endpoint} has no right to write to {repo_id}, but "
                f"{'may only read' if is_reader else f'to {accounts}'}. Make another one: `hf auth login`."
            )
        repo_id = f"{namespace or accounts[0]}/{name}"
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
    base_model: str | None,
    published_files: Sequence[str] = (),
) -> tuple[str, bool]:
    """
    Check that a push replaces nothing but an earlier state of the model; return the full id and whether it exists.

    Weights at other places than `published_files`, patterns, would stay next to those of the push.
    """
    repo_id, info = find_repository(api, repo_id, private)
    if info is None:
        return repo_id, False
    with hub_errors(api, repo_id, _TRY_AGAIN):
        api.auth_check(repo_id, write=True)
        if revision not in [branch.name for branch in api.list_repo_refs(repo_id).branches]:
            revision = None  # a new branch begins with what is on the main one
        files = {*api.list_repo_files(repo_id, revision=revision)} - _HARMLESS
        if files and SETTINGS not in files:
            raise ValueError(
                f"{repo_id} has {len(files)} files of something else, such as {min(files)!r}, and no {SETTINGS}. Name "
                "another repository, or delete them."
            )
        settings = api.hf_hub_download(repo_id, SETTINGS, revision=revision) if files else None
    weights = [name for name in files if name.endswith(".safetensors") and "checkpoint" not in name.split("/")[0]]
    others = [name for name in weights if not any(fnmatch(name, pattern) for pattern in published_files)]
    if published_files and others:
        raise ValueError(
            f"{repo_id} has other weights, such as {min(others)!r}. Name another repository, or delete them."
        )
    other_base = json.loads(Path(settings).read_text(encoding="utf-8")).get("base_model") if settings else None
    if isinstance(other_base, str) and base_model is not None and not is_same_model(other_base, base_model):
        raise ValueError(
            f"{repo_id} has a model made of {other_base}, not of {public_name(base_model)}. Name another one."
        )
    return repo_id, True


def prepare_repository(api: HfApi, repo_id: str, *, revision: str | None, **checks: Any) -> str:
    """Run [`check_repository`], create the repository and the branch where they do not exist, and return the full id."""
    private = checks["private"]
    repo_id, exists = check_repository(api, repo_id, revision=revision, **checks)
    with hub_errors(api, repo_id, _TRY_AGAIN):
        if not exists:
            api.create_repo(repo_id, private=private)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id
