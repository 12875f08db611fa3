# SPDX-License-Identifier: Apache-2.0
"""Checks of a repository before something is pushed to it, and errors that say that the Hub cannot be reached."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import get_session

from ..utils.files import read_record
from ..utils.model_files import CARD_DATA_FILE
from ..utils.names import is_same_model, public_name
from .files import is_one_of


# The common base class of Hub and connection errors: `httpx.HTTPError` or, since huggingface_hub 2, `httpx2.HTTPError`
HTTPError: type[Exception] = next(cls for cls in HfHubHTTPError.__mro__ if cls.__name__ == "HTTPError")
_OUTAGES = (HTTPError, ConnectionError, TimeoutError, LocalEntryNotFoundError)  # Xet raises built-in errors

# Files of a repository that has no model yet
_UNPUBLISHED_FILES = {".gitattributes", ".gitignore", "LICENSE", "LICENSE.md", "LICENSE.txt", "README.md"}

_TIMEOUT = (30.0, 120.0, 120.0, None)  # seconds to connect, read, write, and wait for a connection


def _limit_hub_timeout() -> None:
    """Give the Hub's client a timeout, if it has none. Otherwise a lost connection hangs the run."""
    session = get_session()
    if session.timeout.read is None:
        session.timeout = _TIMEOUT


def _is_outage(error: BaseException) -> bool:
    """Return whether the Hub does not answer, or is still overloaded after its client's retries."""
    if not isinstance(error, _OUTAGES) or isinstance(error, OfflineModeIsEnabled):  # a missing file, for example
        return False
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 503
    return status >= 500 or status in (408, 409, 412, 425, 429)


@contextmanager
def explain_outages(api: HfApi, remedy: str = "Try again when the Hub can be reached.") -> Iterator[None]:
    """
    Raise a `ConnectionError` with a remedy if the Hub cannot be reached. A request that the Hub refuses keeps its error.

    The Hub's client gets a timeout, so that a lost connection is an error too.
    """
    _limit_hub_timeout()  # each time, since the client is replaced by a new one when it cannot connect
    try:
        yield
    except (*_OUTAGES, RuntimeError) as error:
        cause: BaseException = error
        while type(cause) is RuntimeError and cause.__cause__ is not None:  # LFS uploads wrap their error
            cause = cause.__cause__
        if not _is_outage(cause):
            raise
        raise ConnectionError(
            f"{api.endpoint} cannot be reached ({type(cause).__name__}: {' '.join(str(cause).split())}). {remedy}"
        ) from error


def check_token(api: HfApi) -> None:
    """Check that a token is set. Whether it is valid is checked by the first request."""
    if not (api.token or get_token()):
        raise LocalTokenNotFoundError("There is no token of the Hub. Log in with `hf auth login`, or set `HF_TOKEN`.")


def check_repo(
    api: HfApi, repo_id: str, private: bool | None, repo_type: str = "model", revision: str | None = None
) -> tuple[str, Any]:
    """
    Check the token, and that an existing repository is writable, and private if `private` is set.

    Returns the full id and the repository's `ModelInfo` or `DatasetInfo`, `None` if it does not exist.
    """
    check_token(api)
    with explain_outages(api):
        user = api.whoami()["name"]
        repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
        try:
            info = api.repo_info(repo_id, repo_type=repo_type, revision=revision)
        except RevisionNotFoundError:  # a new branch starts from the main one
            info = api.repo_info(repo_id, repo_type=repo_type)
        except RepositoryNotFoundError:
            return repo_id, None
        api.auth_check(repo_id, repo_type=repo_type, write=True)
    if private and not info.private:
        # The Hub's client ignores `private=True` for existing repositories
        raise ValueError(
            f"{repo_id} exists and is public. Make it private in its settings, or choose another repository."
        )
    return repo_id, info


def check_repo_contents(api: HfApi, info: ModelInfo, base_model: str | None, published_patterns: list[str]) -> None:
    """
    Check that a push only replaces an earlier version of the model.

    Weights that do not match `published_patterns` would remain next to the pushed weights.
    """
    files = {file.rfilename for file in info.siblings or []} - _UNPUBLISHED_FILES
    if not files:
        return
    if CARD_DATA_FILE not in files:
        raise ValueError(
            f"{info.id} has {len(files)} other files, such as {min(files)!r}, and no {CARD_DATA_FILE}, so paco_trl "
            "did not create it. Choose another repository, or delete them."
        )
    weights = {name for name in files if name.endswith(".safetensors") and "checkpoint" not in name.split("/")[0]}
    if other_weights := [name for name in weights if not is_one_of(name, published_patterns)]:
        raise ValueError(
            f"{info.id} has other weights, such as {min(other_weights)!r}. Choose another repository, or delete them."
        )
    with explain_outages(api):
        other_base = read_record(api.hf_hub_download(info.id, CARD_DATA_FILE, revision=info.sha)).get("base_model")
    if isinstance(other_base, str) and base_model is not None and not is_same_model(other_base, base_model):
        raise ValueError(
            f"{info.id} has a model trained from {other_base}, not from {public_name(base_model)}. Choose another "
            "repository."
        )


def prepare_repo(
    api: HfApi,
    repo_id: str,
    private: bool | None,
    revision: str | None,
    base_model: str | None,
    published_patterns: list[str],
) -> str:
    """Check a repository, create it and the branch if they do not exist, and return the full id."""
    repo_id, info = check_repo(api, repo_id, private, revision=revision)
    if info is not None:
        check_repo_contents(api, info, base_model, published_patterns)
    with explain_outages(api):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id
