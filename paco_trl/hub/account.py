# SPDX-License-Identifier: Apache-2.0
"""Check a token and a repository before a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from ..utils.files import read_record
from ..utils.names import is_same_model, public_name
from .files import SETTINGS, is_one_of


# The common class of the Hub's errors and of connection errors; its name depends on the version of huggingface_hub
HTTPError = HfHubHTTPError.__bases__[0]

# Files of a repository in which nothing was published yet
_HARMLESS = {".gitattributes", ".gitignore", "LICENSE", "LICENSE.md", "LICENSE.txt", "README.md"}

# Seconds to connect, read and write, and to get a connection. The Hub's client has no timeout: a run would hang forever
_TIMEOUT = (30.0, 120.0, 120.0, None)


@contextmanager
def hub_outages(api: HfApi, remedy: str = "Try again when the Hub can be reached.") -> Iterator[None]:
    """
    Raise a `ConnectionError` with a remedy where the Hub does not answer, or is overloaded, also after the retries of its
    client. What the Hub refuses stays its own error.
    """
    session = get_session()
    if session.timeout.read is None:
        session.timeout = _TIMEOUT
    try:
        yield
    except (HTTPError, ConnectionError, LocalEntryNotFoundError, RuntimeError) as error:
        cause: BaseException = error
        while type(cause) is RuntimeError and cause.__cause__ is not None:  # of an upload to LFS
            cause = cause.__cause__
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else 503
        if isinstance(cause, OfflineModeIsEnabled) or (status < 500 and status not in (408, 409, 412, 425, 429)):
            raise
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        raise ConnectionError(f"{api.endpoint} cannot be reached ({reason}). {remedy}") from error


def find_repository(
    api: HfApi, repo_id: str, private: bool | None, repo_type: str = "model"
) -> tuple[str, ModelInfo | DatasetInfo | None]:
    """
    Check the token, and that an existing repository can be written to and is private where that is asked for.

    Return the full id, and what the Hub knows of the repository, `None` where it does not exist.
    """
    with hub_outages(api):
        user = api.whoami()["name"]
        repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
        try:
            info: Any = api.repo_info(repo_id, repo_type=repo_type)
        except RepositoryNotFoundError:
            return repo_id, None
        api.auth_check(repo_id, repo_type=repo_type, write=True)
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
    with hub_outages(api):
        if revision not in [branch.name for branch in api.list_repo_refs(repo_id).branches]:
            revision = None  # a new branch begins with what is on the main one
        files = {*api.list_repo_files(repo_id, revision=revision)} - _HARMLESS
        if files and SETTINGS not in files:
            raise ValueError(
                f"{repo_id} has {len(files)} files of something else, such as {min(files)!r}, and no {SETTINGS}. Name "
                "another repository, or delete them."
            )
        settings = read_record(api.hf_hub_download(repo_id, SETTINGS, revision=revision)) if files else {}
    weights = [name for name in files if name.endswith(".safetensors") and "checkpoint" not in name.split("/")[0]]
    others = [name for name in weights if not is_one_of(name, published_files)]
    if published_files and others:
        raise ValueError(
            f"{repo_id} has other weights, such as {min(others)!r}. Name another repository, or delete them."
        )
    other_base = settings.get("base_model")
    if isinstance(other_base, str) and base_model is not None and not is_same_model(other_base, base_model):
        raise ValueError(
            f"{repo_id} has a model made of {other_base}, not of {public_name(base_model)}. Name another one."
        )
    return repo_id, True


def prepare_repository(api: HfApi, repo_id: str, *, revision: str | None, **checks: Any) -> str:
    """Run [`check_repository`], create the repository and the branch where they do not exist, and return the full id."""
    repo_id, exists = check_repository(api, repo_id, revision=revision, **checks)
    with hub_outages(api):
        if not exists:
            api.create_repo(repo_id, private=checks["private"])
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id
