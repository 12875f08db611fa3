# SPDX-License-Identifier: Apache-2.0
"""Atomic file writes, safe file names, digests and locks."""

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from .names import check_adapter_name, check_model_name, is_local
from .processes import wait_for_all


if TYPE_CHECKING:
    from PIL.Image import Image

# What a file name has only in an encoded form
_UNSAFE = re.compile(r"^\.|[^\w.~-]")
_PEFT_WEIGHTS = "adapter_model.safetensors"
# Names of diffusers and transformers for a model's own weights, or parts of them
_ALL_WEIGHTS = re.compile(r"(?:diffusion_pytorch_)?model[.-]")
# Bytes of a file name, of which there can be 255: endings are added
_LONGEST_NAME = 200
# Seconds until a file of another machine must be seen
_SHARED_FILE_TIMEOUT = 10


def write_atomically(path: str | Path, data: bytes | str, durable: bool = True) -> None:
    """Write a file whole or not at all, and synced to the disk unless `durable=False`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:60]}.{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb") as file:  # not `mkstemp`, which allows only the owner whatever the umask
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, temporary)  # of a file that is replaced
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def open_weights(paths: Iterable[Path]) -> None:
    """Give files of weights the permissions that the umask allows: safetensors lets the owner alone read them."""
    mask = os.umask(0o077)
    os.umask(mask)
    for path in paths:
        if path.suffix == ".safetensors":
            path.chmod(0o666 & ~mask)


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Make an empty directory, and delete it if what fills it fails or is interrupted."""
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
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"'{folder}' exists and is not empty. Nothing is overwritten: name a new `--output_dir`.")
    with scratch_folder(folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")) as staged:
        yield staged
        open_weights(staged.rglob("*"))
        os.replace(staged, folder)


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say where on the Hub a file is."""
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}


def find_model_file(model: str, name: str, **hub_arguments: Any) -> str | None:
    """Find a file of a model, by Hub id or directory; return its path, or `None` if the model has no such file."""
    from transformers.utils import cached_file  # takes a second to import

    check_model_name(model)
    return cached_file(model, name, _raise_exceptions_for_missing_entries=False, **hub_arguments)


def find_adapter_file(adapter: str, **hub_arguments: Any) -> str:
    """Return the weights of an adapter or LoRA: a file, that of a directory or repository, or `user/repo/file`."""
    check_adapter_name(adapter)
    folder, file = split_adapter(adapter)
    names = (_PEFT_WEIGHTS, "pytorch_lora_weights.safetensors")
    read = [name for name in ([file] if file else names) if name.endswith(".safetensors")]
    paths = list(filter(None, (find_model_file(folder, name, **hub_arguments) for name in read)))[:1]
    if not paths and file is None:
        paths = [str(path) for path in Path(adapter).glob("*.safetensors") if not _ALL_WEIGHTS.match(path.name)]
    if len(paths) != 1:
        what = f"{len(paths)} safetensors files" if paths else f"no {' or '.join(names)}"
        where = "" if os.path.exists(adapter) else ", which is no directory here,"
        raise ValueError(
            f"The adapter '{adapter}'{where} has {what}. Name the file, such as 'style.safetensors', or on the Hub "
            "'user/name/style.safetensors'. Other formats are pickles, which can run code. A checkpoint with all weights is "
            "no adapter."
        )
    return paths[0]


def peft_folder(adapter: str) -> str | None:
    """Return the directory or Hub id of an adapter in PEFT's format, also for the file in it; `None` for a LoRA file."""
    if os.path.basename(find_adapter_file(adapter)) != _PEFT_WEIGHTS:
        return None
    folder, file = split_adapter(adapter)
    if subfolder := os.path.dirname(file or ""):  # of a repository
        from huggingface_hub import snapshot_download  # takes half a second to import

        patterns = [f"{subfolder}/{name}" for name in (_PEFT_WEIGHTS, "*.json", "*.jinja")]
        return os.path.join(snapshot_download(folder, allow_patterns=patterns), subfolder)
    return folder


def split_adapter(adapter: str) -> tuple[str, str | None]:
    """Return the directory or Hub id of an adapter, and the file in it that is named."""
    if os.path.isfile(adapter):
        return os.path.split(os.path.abspath(adapter))
    if not is_local(adapter) and adapter.endswith(".safetensors") and adapter.count("/") > 1:
        owner, name, file = adapter.split("/", 2)
        return f"{owner}/{name}", file
    return adapter, None


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


@contextlib.contextmanager
def reading(image: str, remedy: str = "Replace the file, or leave the row out") -> Iterator[None]:
    """Name an image in whatever its decoder raises: Pillow alone has half a dozen kinds of errors."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{image} cannot be read: {type(error).__name__}: {error}. {remedy}.") from error


def to_png(image: "Image") -> bytes:
    """Encode an image."""
    buffer = io.BytesIO()
    # Three times as fast as the default for such images, and as small
    image.save(buffer, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


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


@contextlib.contextmanager
def sole_writer(folder: str | Path, what: str, is_inside: bool = False) -> Iterator[Path | None]:
    """
    Lock a directory against other runs; `what` is written there. Call it in all processes of a run: if there are several,
    they check that they share it. Gives them a file in it for errors, which stays after one.
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object

    # Next to the directory where its contents tell whether anything was begun. The system releases it with the process
    folder = Path(folder).expanduser().absolute()
    path = folder / ".lock" if is_inside else folder.parent / f".{folder.name}.lock"
    state, lock, host = PartialState(), FileLock(path), socket.gethostname()
    refusal, mark = None, None
    wait_for_all()
    if state.is_main_process:
        refusal = take_lock(lock, what, folder)
        if refusal is None and state.num_processes > 1:
            mark = _leave_mark(path)
    refusal, name, first_host = gather_object([(refusal, mark and mark.name, host)])[0]
    mark = name and path.with_name(name)  # of this process's own directory
    try:
        if mark is not None:
            strangers = gather_object([] if _is_seen(mark) else [host])
            if strangers:
                refusal = (
                    f"{folder} on {', '.join(sorted(set(strangers)))} is not the directory that the first process sees "
                    f"on {first_host}. All processes write {what} there: give a directory that the machines share."
                )
        if refusal is None:
            yield mark
        if state.is_main_process and mark is not None:
            mark.unlink(missing_ok=True)
        if refusal is not None:
            raise ValueError(refusal)
    finally:
        if state.is_main_process:
            lock.release()


def _leave_mark(path: Path) -> Path | None:
    """Write a new empty file next to the lock of a run, in place of those that runs with errors have left."""
    with contextlib.suppress(OSError):
        for earlier in path.parent.glob(f"{path.name}-*"):
            earlier.unlink(missing_ok=True)
        # A new name: network file systems remember that a file was not there
        mark = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
        mark.touch()
        return mark
    return None


def _is_seen(mark: Path) -> bool:
    """Tell whether this process sees a file that the first one has written."""
    end = time.monotonic() + _SHARED_FILE_TIMEOUT
    while not mark.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def take_lock(lock: FileLock, what: str, folder: str | Path, timeout: float = 0) -> str | None:
    """Acquire a lock (-1: as soon as it is free), or return the error that another run holds it."""
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout)
    except Timeout:
        return f"Another run is writing {what} in {folder}. Wait for it, stop it, or give another directory."
    except (OSError, NotImplementedError):  # a file system without locks, or one that cannot be written to
        pass
    return None
