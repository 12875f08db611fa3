# SPDX-License-Identifier: Apache-2.0
"""Whether a token, a repository and a base model will do: found out before a run, not after it."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import get_session, validate_repo_id

from ..utils.names import is_local, is_same_model, public_name


# Both the Hub's own errors and errors of the connection are of one class of the HTTP client, which has another name in
# each version
HTTPError = HfHubHTTPError.__bases__[0]

# Whole checkpoints in a repository
CHECKPOINT_FOLDERS = ("last-checkpoint/", "checkpoint-")
# What else may be beside our files
_HARMLESS = (".gitattributes", ".gitignore", "LICENSE*")

# Seconds: connecting, waiting for an answer, sending a part. The Hub's client has no limit, and a run would wait for ever
_TIMEOUT = (30.0, 120.0, 120.0, None)

_NEW_TOKEN = "Make one with the right to write at https://huggingface.co/settings/tokens, and log in: `hf auth login`."


def status_of(error: BaseException) -> int | None:
    """
    The status code with which the Hub refused a request.

    Args:
        error (`BaseException`):
            Error of a client.

    Returns:
        `int` or `None` where there was no answer.
    """
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def cause_of(error: BaseException) -> BaseException:
    """
    What lies behind the error of an upload to LFS, which is a `RuntimeError` whatever went wrong, or of [`asking`].

    Args:
        error (`BaseException`):
            Error of a client.

    Returns:
        `BaseException`.
    """
    while type(error) in (RuntimeError, ConnectionError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def describe(error: BaseException) -> str:
    """
    An error of a client in one line. The clients' errors do not hold the token.

    Args:
        error (`BaseException`):
            Error.

    Returns:
        `str`.
    """
    cause = cause_of(error)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


@contextmanager
def asking(api: HfApi, repo_id: str, remedy: str, right: str = "write to") -> Iterator[None]:
    """
    Says of a failed request which Hub it went to, and what to do. A request that is not answered ends after minutes.

    Args:
        api ([`~huggingface_hub.HfApi`]):
            Client.
        repo_id (`str`):
            Repository that is asked for or sent to.
        remedy (`str`):
            A sentence on what to do when the Hub cannot be reached.
        right (`str`, *optional*, defaults to `"write to"`):
            What the token needs the right to do there.

    Raises:
        PermissionError: the Hub refuses the token.
        ValueError: the Hub refuses the request for a reason that does not go away by itself.
        ConnectionError: the Hub cannot be reached, or the request did not come to its end.
    """
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
            f"Sending to {repo_id} at {api.endpoint} did not come to its end ({describe(error)}). {remedy}"
        ) from error


def matches(name: str, patterns: Iterable[str]) -> bool:
    """
    Whether a path fits one of some patterns, in which `*` does not cross folders.

    Args:
        name (`str`):
            Path in a repository.
        patterns (`Iterable[str]`):
            Patterns.

    Returns:
        `bool`.
    """
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in patterns)


def check_account(api: HfApi, repo_id: str) -> str:
    """
    Checks the token and the form of a repository's id.

    Args:
        api ([`~huggingface_hub.HfApi`]):
            Client with the token, or that of `hf auth login`.
        repo_id (`str`):
            Id; without a user it is the token's.

    Returns:
        `str`: the id with its user or organisation.

    Raises:
        ValueError: the id is not of the form that the Hub allows.
        PermissionError: no token, one that the Hub does not know, one that may only read, or one that has nothing to do
            with the organisation.
        ConnectionError: the Hub cannot be reached.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"The repository's name is {repo_id!r}, which the Hub does not allow: {error} Give another one, of the form "
            "`user/name`."
        ) from error
    with asking(api, repo_id, "Try again when it can be reached."):
        try:
            account = api.whoami()
        except LocalTokenNotFoundError as error:
            raise PermissionError(f"There is no token for {api.endpoint}. {_NEW_TOKEN}") from error
        except HfHubHTTPError as error:
            if status_of(error) != 401:
                raise
            raise PermissionError(f"{api.endpoint} does not know the token. {_NEW_TOKEN}") from error
    user, organizations = account["name"], [one["name"] for one in account.get("orgs", [])]
    token = account.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise PermissionError(f"The token of {user} for {api.endpoint} may only read. {_NEW_TOKEN}")
    namespace, _, name = repo_id.rpartition("/")
    if namespace.lower() not in ("", user.lower(), *(one.lower() for one in organizations)):
        theirs = f"{user} and of {', '.join(organizations)}" if organizations else user
        raise PermissionError(
            f"The repository is {repo_id}, but the token for {api.endpoint} is that of {theirs}: it has no right to "
            f"{namespace!r}. Give a token of {namespace}, or another repository, such as '{user}/{name}'."
        )
    return repo_id if namespace else f"{user}/{repo_id}"


def check_base_model(api: HfApi, base_model: str) -> None:
    """
    Checks that the account may read a gated base model.

    Args:
        api ([`~huggingface_hub.HfApi`]):
            Client.
        base_model (`str`):
            Hub id or folder; nothing is asked about a folder.

    Raises:
        PermissionError: the base model is gated, and its terms were not accepted.
        ConnectionError: the Hub cannot be reached.
    """
    if is_local(base_model):
        return
    with asking(api, base_model, "Try again when it can be reached.", "read"):
        try:
            api.auth_check(base_model)
        except GatedRepoError as error:
            raise PermissionError(
                f"The base model {base_model} is gated, and the account of this token has no access to it yet. Accept "
                f"its terms at {api.endpoint}/{base_model} with that account, and start again."
            ) from error
        except RepositoryNotFoundError as error:
            raise ValueError(
                f"There is no model {base_model!r} at {api.endpoint}, or the token may not read it. Correct the base "
                "model's name, or give a token that may."
            ) from error


def check_private(api: HfApi, repo_id: str) -> None:
    """
    Checks that others cannot see a repository.

    Args:
        api ([`~huggingface_hub.HfApi`]):
            Client.
        repo_id (`str`):
            Repository.

    Raises:
        ValueError: it is public.
    """
    with asking(api, repo_id, "Nothing is lost."):
        if not api.model_info(repo_id).private:
            raise _not_private(repo_id)


def _not_private(repo_id: str) -> ValueError:
    return ValueError(
        f"The repository is to be private, but {repo_id} is there and public. Make it private in its settings, or give "
        "another one."
    )


def check_repository(
    api: HfApi,
    repo_id: str,
    *,
    private: bool | None,
    revision: str | None,
    published_files: list[str],
    base_model: str | None,
) -> tuple[str, bool]:
    """
    Checks whether a model may go to a repository. Nothing is made or changed.

    Args:
        api ([`~huggingface_hub.HfApi`]):
            Client.
        repo_id (`str`):
            Id of the repository.
        private (`bool`, *optional*):
            Whether others may not see it. If `None`, what the account's default is, for a new one.
        revision (`str`, *optional*):
            Branch to write to. If `None`, the main one.
        published_files (`list[str]`):
            Patterns of the files that will be written.
        base_model (`str`, *optional*):
            Hub id or folder of the base model. An adapter of another one in the repository is not overwritten.

    Returns:
        `tuple[str, bool]`: the id with its user or organisation, and whether the repository is there.

    Raises:
        ValueError: the name is not allowed, or the repository has something else in it, or is public against `private`.
        PermissionError: the token will not do.
        ConnectionError: the Hub cannot be reached.
    """
    repo_id = check_account(api, repo_id)
    with asking(api, repo_id, "Try again when it can be reached."):
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            return repo_id, False
        if private and not info.private:
            raise _not_private(repo_id)
        _check_contents(api, repo_id, revision, published_files, base_model)
        api.auth_check(repo_id, write=True)
    return repo_id, True


def prepare_repository(
    api: HfApi,
    repo_id: str,
    *,
    private: bool | None,
    revision: str | None,
    published_files: list[str],
    base_model: str | None,
) -> str:
    """
    Checks whether a model may go to a repository, and makes it where it is not there.

    Args:
        api, repo_id, private, published_files, base_model:
            As in [`check_repository`].
        revision (`str`, *optional*):
            Branch to write to; made when it is not there. If `None`, the main one.

    Returns:
        `str`: the id with its user or organisation.

    Raises:
        ValueError: the name is not allowed, or the repository has something else in it, or is public against `private`.
        PermissionError: the token will not do.
        ConnectionError: the Hub cannot be reached.
    """
    repo_id, is_there = check_repository(
        api,
        repo_id,
        private=private,
        revision=revision,
        published_files=published_files,
        base_model=base_model,
    )
    with asking(api, repo_id, "Try again when it can be reached."):
        if not is_there:
            try:
                api.create_repo(repo_id, private=private)
            except HfHubHTTPError as error:
                if status_of(error) != 400:
                    raise
                raise ValueError(
                    f"{api.endpoint} does not allow a repository of the name {repo_id} ({describe(error)}). Give "
                    "another one."
                ) from error
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id


def _check_contents(
    api: HfApi,
    repo_id: str,
    revision: str | None,
    published_files: list[str],
    base_model: str | None,
) -> None:
    """What is written there must replace an earlier state of the same, and nothing else."""
    branches = [branch.name for branch in api.list_repo_refs(repo_id).branches]
    if revision not in branches:
        revision = None  # a new branch begins with what is on the main one
    files = api.list_repo_files(repo_id, revision=revision)
    ours = (*published_files, *_HARMLESS)
    others = [name for name in files if not name.startswith(CHECKPOINT_FOLDERS) and not matches(name, ours)]
    if others:
        raise ValueError(
            f"The repository {repo_id} has {len(others)} files of something else, such as {others[0]!r}: what is "
            "trained here would be mixed with them. Give another repository, or delete them there."
        )
    weights = [name for name in files if name.endswith((".safetensors", ".bin")) and matches(name, published_files)]
    if not weights:
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = {"revision": revision, "local_dir": folder}
        card = ModelCard("")
        if "README.md" in files:
            card = ModelCard.load(api.hf_hub_download(repo_id, "README.md", **kept), ignore_metadata_errors=True)
        theirs = card.data.base_model
        if "adapter_config.json" in files:
            with open(api.hf_hub_download(repo_id, "adapter_config.json", **kept), encoding="utf-8") as file:
                theirs = json.load(file).get("base_model_name_or_path") or theirs
    if "paco-trl" not in (card.data.tags or []):
        raise ValueError(
            f"The repository {repo_id} has {weights[0]!r} of a model that was not made here, since its card has no tag "
            "'paco-trl': it would be replaced. Give another repository, or delete it there."
        )
    if isinstance(theirs, str) and base_model is not None and not is_same_model(theirs, base_model):
        raise ValueError(
            f"The repository {repo_id} has a model made of {public_name(theirs)}, and what is trained here is made of "
            f"{public_name(base_model)}. Give another repository, or delete the model there."
        )


def is_outage(error: BaseException) -> bool:
    """
    Whether a request may work when it is made again.

    Args:
        error (`BaseException`):
            Error of a client.

    Returns:
        `bool`: true of broken connections, of a Hub that is overloaded, and of a commit that another one came before.
    """
    cause = cause_of(error)
    status = status_of(cause)
    if status is not None:
        return status in (408, 409, 412, 425, 429) or status >= 500
    if isinstance(cause, OfflineModeIsEnabled):
        return False
    return isinstance(cause, (HTTPError, ConnectionError, TimeoutError, LocalEntryNotFoundError, RuntimeError))
