# SPDX-License-Identifier: Apache-2.0
"""Atomic file writes, safe file names, digests and templates."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple


# Characters that must be encoded in a file name
_UNSAFE = re.compile(r"^\.|[^\w.~-]")
# Longest file name in bytes. The limit is 255, and endings are added
_LONGEST_NAME = 200


def write_atomically(path: str | Path, data: bytes | str, durable: bool = True) -> None:
    """Write a file whole or not at all, and synced to the disk unless `durable=False`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:60]}.{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb") as file:  # not `mkstemp`: it lets only the owner read, whatever the umask
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, temporary)  # a file that is replaced keeps its permissions
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def file_on_path(folder: str | Path) -> Path | None:
    """Return the file that stands where a directory, or one of its parents, should be."""
    return next((path for path in (Path(folder), *Path(folder).parents) if path.is_file()), None)


def why_unwritable(folder: str | Path) -> str | None:
    """Return why a directory, or the one above it if it does not exist, cannot be written to; `None` if it can."""
    existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.is_dir())
    try:
        os.rmdir(tempfile.mkdtemp(dir=existing))  # `os.access` takes /proc, and a file system mounted read-only
    except OSError as error:
        return f"'{existing}' cannot be written to: {error.strerror}."
    return None


def apply_umask(paths: Iterable[Path]) -> None:
    """Give files of weights the permissions that the umask allows: safetensors lets the owner alone read them."""
    mask = os.umask(0o077)
    os.umask(mask)
    for path in paths:
        if path.suffix == ".safetensors":
            path.chmod(0o666 & ~mask)


def check_new_folder(folder: Path) -> None:
    """Refuse a path that has something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"'{folder}' exists and is not empty. Nothing is overwritten: name a new `--output_dir`.")


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Make an empty directory, and delete it if the block that fills it fails or is interrupted."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Provide a directory that becomes `folder`, a new or empty one, at the end, or is deleted after an error."""
    folder = Path(folder).absolute()
    check_new_folder(folder)
    with scratch_folder(folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")) as staged:
        yield staged
        apply_umask(staged.rglob("*"))
        try:
            os.replace(staged, folder)
        except OSError as error:  # files have come into it meanwhile
            kept = folder.with_name(f"{folder.name}-{secrets.token_hex(4)}")
            os.replace(staged, kept)
            raise OSError(f"'{folder}' cannot be made ({error.strerror}). The result is in '{kept}'.") from error


def read_record(path: str | Path) -> dict[str, Any]:
    """Read a JSON object that the package may have written; empty if there is none, or another file."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def read_template(name: str) -> str:
    """Read a file of the package's `templates`."""
    return (files("paco_trl") / "templates" / name).read_text(encoding="utf-8")


class AppTemplate(NamedTuple):
    """Parts of an app: its board as `gradio.HTML` takes it, with style and script, and the style of the page."""

    board: str
    style: str
    page_style: str
    script: str


def read_app_template(name: str) -> AppTemplate:
    """Read an app from a file of the package's `templates`."""
    parts = re.findall(r"<(template|style|script)>(.*?)</\1>", read_template(name), re.DOTALL)
    return AppTemplate(*(part for _, part in parts))


def file_name(name: str) -> str:
    """Return a safe and unique file name for an id: unchanged if it is harmless, short if it is long."""
    if not name:
        raise ValueError("An empty text names no file. Give each row an id.")
    # No separator, no `..`, nothing hidden. A percent sign is always written as %25, so that no two names are the same
    written = _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)
    if len(written.encode()) <= _LONGEST_NAME:
        return written
    start = written.encode()[: _LONGEST_NAME - 34].decode(errors="ignore")
    return f"{start}%-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def digest(value: Any) -> str:
    """Compute the SHA-256 of the canonical JSON of a value, as 64 hexadecimal digits; dictionaries have no order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
