# SPDX-License-Identifier: Apache-2.0
"""
A small Hub for the tests: repositories of models and datasets in memory, over HTTP, for the real clients.

`HF_ENDPOINT` is read when `huggingface_hub` is imported: `HubServer.connected` makes the clients of this process read it
again. Files go over plain LFS: there is no Xet.
"""

import base64
import contextlib
import hashlib
import io
import json
import logging
import re
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

import pytest
import yaml
from huggingface_hub import HfFileSystem
from huggingface_hub.utils import close_session

from judge_server import _Server
from launching import _read_hub_variables


TOKEN, READ_TOKEN, WRONG_TOKEN = "hf_rightTokenOfTheTester", "hf_tokenThatMayOnlyRead", "hf_wrongTokenOfNobody"
_DATE = "2025-01-01T00:00:00.000Z"
_LFS_SUFFIXES = (".arrow", ".bin", ".gz", ".jpg", ".parquet", ".png", ".pt", ".safetensors", ".tar", ".webp", ".zip")
_LICENSES = {"apache-2.0", "bsd-3-clause", "cc-by-4.0", "cc-by-nc-4.0", "mit", "openrail", "other", "unknown"}
_SIZES = {"n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M"}
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


class Blob(NamedTuple):
    """Content of a file, and whether it is in LFS."""

    content: bytes
    is_lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def oid(self) -> str:
        return self.sha256 if self.is_lfs else self.git_oid


@dataclass
class Repo:
    """A repository: the files of each commit, and where the branches are."""

    repo_type: str
    repo_id: str
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)  # in their order
    titles: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # LFS

    def commit(self, branch: str, files: dict[str, Blob], title: str) -> str:
        listed = json.dumps([self.repo_id, len(self.commits), {path: blob.oid for path, blob in files.items()}])
        sha = hashlib.sha1(listed.encode()).hexdigest()
        self.commits[sha], self.titles[sha], self.branches[branch] = files, title, sha
        return sha

    def sha_of(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class HubServer:
    """
    `tokens` has the user of each token; all users may write to `organizations`, beside their own namespace.

    `fault`, which may be changed at any time, says of a method and a path what goes wrong with the request: a status
    ("429", "500", ...), "cut" (the connection breaks in the middle of what the client sends), or "slow" (an answer
    after `latency` seconds).
    """

    def __init__(self, tokens: dict[str, str], organizations=(), fault=None, port: int = 0):
        self.tokens, self.organizations = dict(tokens), list(organizations)
        self.fault: Callable[[str, str], str | None] = fault or (lambda method, path: None)
        self.latency = 1.0
        self.readers: set[str] = set()  # tokens that may only read
        self.gated: set[str] = set()  # repositories whose terms nobody has accepted
        self.reserved: set[str] = set()  # names that are not allowed
        self.repos: dict[tuple[str, str], Repo] = {}
        self.requests: list[tuple[str, str]] = []  # method and path of all, in their order
        self.unknown: list[tuple[str, str]] = []  # of those that this Hub does not know
        self.uploads: list[str] = []  # digests of what was put into LFS, in its order
        self._lock = threading.Lock()
        self._port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @contextlib.contextmanager
    def connected(self, cache: str | Path, token: str | None = None) -> Iterator[io.StringIO]:
        """
        Let the clients of this process know this Hub alone, as new ones would, with caches in a folder.

        Gives what is printed and logged meanwhile. The waits between retries are a hundredth of theirs.
        """
        environment = {
            "HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
            "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        with pytest.MonkeyPatch.context() as patch, printed_and_logged() as text:
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.delenv("HF_HUB_CACHE", raising=False)
            patch.delenv("HF_TOKEN", raising=False)
            if token is not None:
                patch.setenv("HF_TOKEN", token)
            patch.setattr(
                "huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100))
            )
            _renew_clients()
            try:
                yield text
            finally:
                patch.undo()
                _renew_clients()

    def call(self, cache: str | Path, function, *arguments, client_token: str | None = None, **keywords) -> dict:
        """Call a function with clients of this Hub: its "result" or "error", and the "log", which shows no token."""
        with self.connected(cache, client_token) as log:
            try:
                outcome = {"result": function(*arguments, **keywords)}
            except Exception as error:
                traceback.print_exc()
                outcome = {"error": type(error).__name__, "message": str(error), "raised": error}
        assert not any(secret in log.getvalue() for secret in (TOKEN, READ_TOKEN, WRONG_TOKEN))
        return outcome | {"log": log.getvalue()}

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self._port), _handler(self))
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops; `start` goes on at the same port with the same repositories."""
        self._server.shutdown()
        self._server.server_close()
        self._server.break_connections()
        self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.stop()

    def add_repo(self, repo_id: str, files: dict[str, bytes], repo_type: str = "model", private: bool = False) -> Repo:
        """Puts a repository there, with files."""
        repo = self.repos[repo_type, repo_id] = Repo(repo_type, repo_id, private)
        repo.commit(
            "main", {path: Blob(content, _goes_to_lfs(path, len(content))) for path, content in files.items()}, ""
        )
        return repo

    def files(self, repo_id: str, repo_type: str = "dataset", revision: str = "main") -> dict[str, bytes]:
        """Files of a repository by path."""
        repo = self.repos[repo_type, repo_id]
        return {path: blob.content for path, blob in repo.commits[repo.sha_of(revision)].items()}


@contextlib.contextmanager
def printed_and_logged() -> Iterator[io.StringIO]:
    """Record what is printed and logged, by libraries too whose loggers do not propagate."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    loggers = [logging.getLogger(name) for name in (None, "datasets", "diffusers", "huggingface_hub", "transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield text
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _renew_clients() -> None:
    _read_hub_variables()
    close_session()
    HfFileSystem.clear_instance_cache()


def _goes_to_lfs(path: str, size: int) -> bool:
    return path.lower().endswith(_LFS_SUFFIXES) or size > 10 * 1024**2


def _metadata(content: bytes | str) -> dict:
    """Metadata of a README; raises ValueError with what is wrong."""
    text = content.decode() if isinstance(content, bytes) else content
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise ValueError(f"the metadata is no YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError("the metadata is no dictionary")
    if data.get("license", "mit") not in _LICENSES:
        raise ValueError(f'"license" must be one of {sorted(_LICENSES)}')
    values = [data.get(name, []) for name in ("size_categories", "language")]
    sizes, languages = (value if isinstance(value, list) else [value] for value in values)
    if not set(sizes) <= _SIZES:
        raise ValueError(f'"size_categories" must be of {sorted(_SIZES)}')
    if not all(re.fullmatch("[a-z]{2,3}", name) for name in languages):
        raise ValueError('"language" must be ISO 639 codes')
    return data


class _Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


def _handler(hub: HubServer):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args):
            pass

        def do_GET(self):
            self.handle_request()

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def handle_request(self):
            path, _, query = self.path.partition("?")
            self.query = {name: values[-1] for name, values in parse_qs(query).items()}
            with hub._lock:
                hub.requests.append((self.command, path))
            fault = hub.fault(self.command, path)
            if fault == "cut":
                self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
                return
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if fault == "slow":
                time.sleep(hub.latency)
            elif fault is not None:
                self.reply(int(fault), {"error": f"fault {fault}"})
                return
            try:
                with hub._lock:
                    answer = self.route([unquote(part) for part in path.strip("/").split("/")])
            except _Refused as refusal:
                headers = {"X-Error-Message": str(refusal)} | ({"X-Error-Code": refusal.code} if refusal.code else {})
                # The two ways in which clients read what is wrong
                content = {"error": str(refusal), "errors": [{"message": str(refusal)}]}
                self.reply(refusal.status, content, headers)
            else:
                self.reply(*answer)

        def reply(self, status: int, content: bytes | dict | list, headers: dict[str, str] | None = None):
            kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            headers = {"Content-Type": kind, "Content-Length": str(len(content))} | (headers or {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        # Who asks, and for what

        def token(self) -> str | None:
            given = self.headers["Authorization"]
            return None if given is None else given.removeprefix("Bearer ")

        def user(self) -> str | None:
            given = self.token()
            if given is None:
                return None
            user = hub.tokens.get(given)
            if user is None:
                raise _Refused(401, "Invalid credentials in Authorization header")
            return user

        def check_may_write(self, repo_id: str) -> None:
            user, namespace = self.user(), repo_id.split("/")[0]
            if user is None:
                raise _Refused(401, "Invalid username or password.")
            if self.token() in hub.readers:
                raise _Refused(403, "Forbidden: this token has no write role")
            if namespace != user and namespace not in hub.organizations:
                raise _Refused(403, f"You don't have the rights to create or change a repository under {namespace!r}")

        def repo(self, repo_type: str, repo_id: str) -> Repo:
            repo, user = hub.repos.get((repo_type, repo_id)), self.user()
            if repo is None or repo.private and user is None:
                raise _Refused(401 if user is None else 404, "Repository not found", "RepoNotFound")
            if repo.private and repo_id.split("/")[0] not in (user, *hub.organizations):
                raise _Refused(404, "Repository not found", "RepoNotFound")
            return repo

        def files(self, repo: Repo, revision: str) -> tuple[str, dict[str, Blob]]:
            sha = repo.sha_of(revision)
            if sha is None:
                raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return sha, repo.commits[sha]

        def route(self, parts: list[str]) -> tuple:
            path = "/".join(parts)
            if path == "api/whoami-v2":
                user = self.user()
                if user is None:
                    raise _Refused(401, "Invalid username or password.")
                role = "read" if self.token() in hub.readers else "write"
                auth = {"type": "access_token", "accessToken": {"displayName": "tests", "role": role}}
                organizations = [{"name": name} for name in hub.organizations]
                return 200, {"type": "user", "name": user, "orgs": organizations, "auth": auth}
            if path == "api/validate-yaml":
                return self.validate(json.loads(self.body)["content"])
            if path == "api/repos/create":
                return self.create(json.loads(self.body))
            if parts[0] == "lfs":  # addresses that `answer_batch` gives
                return self.store(hub.repos[parts[1], "/".join(parts[2:4])], parts[4], is_check=parts[-1] == "verify")
            if parts[0] == "api" and parts[1] in ("models", "datasets", "spaces") and len(parts) >= 4:
                return self.answer_api(parts[1][:-1], "/".join(parts[2:4]), parts[4:])
            repo_type, rest = ("dataset", parts[1:]) if parts[0] == "datasets" else ("model", parts)
            if rest[2:] == ["info", "lfs", "objects", "batch"]:
                return self.answer_batch(repo_type, "/".join(rest[:2]).removesuffix(".git"))
            if rest[2:3] == ["resolve"] and self.command in ("GET", "HEAD"):
                if "/".join(rest[:2]) in hub.gated:
                    raise _Refused(403, "Access to this model is restricted", "GatedRepo")
                return self.resolve(self.repo(repo_type, "/".join(rest[:2])), rest[3], "/".join(rest[4:]))
            hub.unknown.append((self.command, path))
            raise _Refused(404, "Not Found")

        def validate(self, content: str) -> tuple:
            try:
                data = _metadata(content)
            except ValueError as error:
                raise _Refused(400, str(error)) from error
            return 200, {"errors": [], "warnings": [] if data else [{"message": "empty or missing yaml metadata"}]}

        # Repositories

        def create(self, asked: dict) -> tuple:
            repo_type = asked.get("type") or "model"
            repo_id = f"{asked.get('organization') or self.user()}/{asked['name']}"
            self.check_may_write(repo_id)
            url = f"{hub.url}/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
            if asked["name"] in hub.reserved:
                raise _Refused(400, f"The name {asked['name']!r} is reserved")
            if (repo_type, repo_id) in hub.repos:
                return 409, {"error": "You already created this repository", "url": url}
            is_private = asked.get("visibility", "private" if asked.get("private") else "public") == "private"
            attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in _LFS_SUFFIXES)
            hub.add_repo(repo_id, {".gitattributes": attributes.encode()}, repo_type, is_private)
            return 200, {"url": url, "name": repo_id, "id": repo_id}

        def answer_api(self, repo_type: str, repo_id: str, rest: list[str]) -> tuple:
            repo = self.repo(repo_type, repo_id)
            what, revision = (rest or ["revision"])[0], rest[1] if len(rest) > 1 else "main"
            if what == "auth-check":
                if repo_id in hub.gated:
                    raise _Refused(403, "Access to this model is restricted", "GatedRepo")
                if rest[1:] == ["write"]:
                    self.check_may_write(repo_id)
                return 200, {}
            if what == "branch":
                self.check_may_write(repo_id)
                asked = json.loads(self.body or b"{}")
                if revision in repo.branches:
                    return 409, {"error": f"Reference already exists: {revision}"}
                repo.branches[revision] = self.files(repo, asked.get("startingPoint", "main"))[0]
                return 200, {}
            if what == "refs":
                heads = [(name, f"refs/heads/{name}", sha) for name, sha in repo.branches.items()]
                branches = [dict(zip(("name", "ref", "targetCommit"), head, strict=True)) for head in heads]
                return 200, {"branches": branches, "converts": [], "tags": []}
            sha, files = self.files(repo, revision)
            if what == "revision":
                return 200, self.describe(repo, sha, files)
            if what == "tree":
                return self.list_tree(files, "/".join(rest[2:]))
            if what == "preupload":
                self.check_may_write(repo_id)
                return 200, {"files": [self.describe_upload(files, asked) for asked in json.loads(self.body)["files"]]}
            if what == "commit":
                self.check_may_write(repo_id)
                return self.commit(repo, revision, dict(files))
            hub.unknown.append((self.command, self.path))
            raise _Refused(404, "Not Found")

        def describe(self, repo: Repo, sha: str, files: dict[str, Blob]) -> dict:
            card = _metadata(files["README.md"].content) if "README.md" in files else {}
            flags = {"private": repo.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
            return {
                "_id": hashlib.sha1(repo.repo_id.encode()).hexdigest()[:24], "id": repo.repo_id, "sha": sha, **flags,
                "author": repo.repo_id.split("/")[0], "lastModified": _DATE, "createdAt": _DATE, "cardData": card,
                "tags": card.get("tags") or [], "siblings": [{"rfilename": path} for path in sorted(files)],
            }  # fmt: skip

        def list_tree(self, files: dict[str, Blob], folder: str) -> tuple:
            entries = [entry for entry in _entries(files) if entry["path"].startswith(f"{folder}/" if folder else "")]
            if folder and not entries:
                raise _Refused(404, f"{folder} does not exist", "EntryNotFound")
            if self.query.get("recursive", "").lower() != "true":
                depth = folder.count("/") + 1 if folder else 0
                entries = [entry for entry in entries if entry["path"].count("/") == depth]
            return 200, entries

        # Files on their way in

        def describe_upload(self, files: dict[str, Blob], asked: dict) -> dict:
            there = files.get(asked["path"])
            mode = "lfs" if _goes_to_lfs(asked["path"], asked["size"]) else "regular"
            described = {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False}
            return described | ({"oid": there.oid} if there is not None else {})

        def answer_batch(self, repo_type: str, repo_id: str) -> tuple:
            repo = self.repo(repo_type, repo_id)
            self.check_may_write(repo_id)
            objects = []
            for asked in json.loads(self.body)["objects"]:
                described = {"oid": asked["oid"], "size": asked["size"]}
                if asked["oid"] not in repo.stored:
                    address = f"{hub.url}/lfs/{repo_type}/{repo_id}/{asked['oid']}"
                    described["actions"] = {"upload": {"href": address}, "verify": {"href": f"{address}/verify"}}
                objects.append(described)
            return 200, {"transfer": "basic", "objects": objects}

        def store(self, repo: Repo, oid: str, is_check: bool) -> tuple:
            if is_check:
                if len(repo.stored.get(oid, b"")) != json.loads(self.body)["size"]:
                    raise _Refused(404, "The object is not there")
                return 200, {}
            if hashlib.sha256(self.body).hexdigest() != oid:
                raise _Refused(400, "The content does not have this digest")
            repo.stored[oid] = self.body
            hub.uploads.append(oid)
            return 200, b""

        def commit(self, repo: Repo, branch: str, files: dict[str, Blob]) -> tuple:
            lines = [json.loads(line) for line in self.body.splitlines() if line]
            title = lines[0]["value"]["summary"]
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = Blob(base64.b64decode(value["content"]), is_lfs=False)
                elif line["key"] == "lfsFile":
                    if value["oid"] not in repo.stored:
                        raise _Refused(400, f"LFS pointer of {value['path']} points to a file that does not exist")
                    files[value["path"]] = Blob(repo.stored[value["oid"]], is_lfs=True)
                else:
                    assert line["key"] == "deletedFile"
                    del files[value["path"]]
            if "README.md" in files:
                self.validate(files["README.md"].content.decode())
            sha = repo.commit(branch, files, title)
            return 200, {"success": True, "commitOid": sha, "commitUrl": f"{hub.url}/{repo.repo_id}/commit/{sha}"}

        # Files on their way out

        def resolve(self, repo: Repo, revision: str, path: str) -> tuple:
            sha, files = self.files(repo, revision)
            if path not in files:
                raise _Refused(404, f"{path} does not exist", "EntryNotFound")
            blob = files[path]
            content, size = blob.content, len(blob.content)
            headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"}
            if blob.is_lfs:
                headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(size)}
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked is None:
                return 200, content, headers
            start, end = int(asked[1]), min(int(asked[2] or size), size - 1)
            return 206, content[start : end + 1], headers | {"Content-Range": f"bytes {start}-{end}/{size}"}

    return Handler


def _entries(files: dict[str, Blob]) -> list[dict]:
    """Files and folders as the Hub lists them."""
    folders = {path.rsplit("/", depth)[0] for path in files for depth in range(1, path.count("/") + 1)}
    listed = [
        {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}
        for path in folders
    ]
    for path, blob in files.items():
        entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.git_oid}
        if blob.is_lfs:
            entry["lfs"] = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": 134}
        listed.append(entry)
    return sorted(listed, key=lambda entry: entry["path"])
