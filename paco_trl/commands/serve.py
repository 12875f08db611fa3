# SPDX-License-Identifier: Apache-2.0
"""`paco-trl serve`: a judge behind vLLM, checked with a real query before it is called ready."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import requests
from safetensors import SafetensorError, safe_open

from ..hub.cards import LORA_RANKS
from ..rewards.judge import JudgeUnavailableError
from ..utils.addresses import check_port, is_loopback
from ..utils.files import find_model_file
from .main import say
from .options import option
from .parser import CommandParser


# vLLM reads it too. In the environment and nowhere else: a command line can be read by every user of the machine.
API_KEY_VARIABLE = "VLLM_API_KEY"

# Two images of at most 2,097,152 pixels (the `max_pixels` of PaCo-Reward) become at most 2,674 tokens of 28 x 28 pixels
# each. Of 8,192 tokens, 2,844 are left for the query and the answer.
_MAX_MODEL_LEN = 8192
# GiB of the machine's memory, in the server's process and in the engine's. A processed image takes 24 bytes a pixel in
# float32, so this holds the panels of some 680 images of 512 x 512 pixels, and each panel is in several queries.
_IMAGE_CACHE = 4
# Layers in front of the language model, in the names that transformers gives them
_VISION_LAYERS = re.compile(r"\.(visual|vision_tower|vision_model|multi_modal_projector|connector)\.")
# vLLM's options that this command sets from its own, and what to use
_OWN_OPTIONS = {
    "--api-key": f"the environment variable {API_KEY_VARIABLE}",
    "--host": "`--host`",
    "--port": "`--port`",
    "--served-model-name": "`--served_model_name`",
}

# Seconds that the server has to stop by itself
_GRACE = 30.0
# Seconds for the exit of a server whose check failed
_EXIT_WAIT = 5.0
_POLL = 0.2
# Bytes and lines of the server's output that are kept for an error
_TAIL_BYTES, _TAIL_LINES = 20_000, 20

_PROGRAM = "paco-trl serve"


@dataclass
class ServeArguments:
    """Judge to serve, and how vLLM serves it."""

    model_name_or_path: str = option(
        "X-GenGroup/PaCo-Reward-7B", "Hub id or directory of a judge: a whole model, or a LoRA adapter of one."
    )
    served_model_name: str = option("paco-reward", "Name of the judge on the server. An adapter's base gets `-base`.")
    host: str = option("127.0.0.1", "Address to listen on. The default can be reached from this machine only.")
    port: int = option(8000, "Port to listen on.")
    dtype: str = option("auto", "`auto` (float32 files become float16), `bfloat16`, `float16` or `float32`.")
    max_model_len: int = option(_MAX_MODEL_LEN, "Tokens of a query with its two images, and its answer.")
    gpu_memory_utilization: float | None = option(None, "Fraction of the GPU's memory. If `None`, vLLM's default.")
    vllm: str = option(
        "vllm", "Command that starts vLLM, or its path (`~/vllm/bin/vllm`): usually in an environment of its own."
    )
    startup_timeout: float = option(1800.0, "Seconds until a server that is not ready is stopped, downloads included.")
    vllm_args: list[str] = option([], "Further arguments for `vllm serve`. On the command line they follow `--`.")

    def __post_init__(self):
        if not 1 <= self.port <= 65535:
            raise ValueError(f"`port` is {self.port}, but must be between 1 and 65535.")
        if self.startup_timeout <= 0:
            raise ValueError(f"`startup_timeout` is {self.startup_timeout}, but must be positive.")
        # In a YAML file numbers are numbers
        self.vllm_args = [str(argument) for argument in self.vllm_args]
        for argument in self.vllm_args:
            name = argument.partition("=")[0].replace("_", "-")
            if name in _OWN_OPTIONS:
                raise ValueError(f"`vllm_args` has {name}, which this command sets itself. Use {_OWN_OPTIONS[name]}.")


class Adapter(NamedTuple):
    """LoRA adapter, as vLLM is told about it."""

    folder: str
    base: str
    revision: str | None
    rank: int  # the largest of its layers
    has_vision_layers: bool
    image_size: dict[str, int] | None  # limits in pixels of the adapter's own processor, if it has one


def find_adapter(model: str) -> Adapter | None:
    """Read the LoRA adapter of a Hub id or directory; `None` for a whole model."""
    # Takes seconds to import
    from ..rewards.paco_reward import PROCESSOR_FILES, resolve_base_model, safetensors_of

    base, base_kwargs, is_adapter = resolve_base_model(model, {})
    if not is_adapter:
        return None
    weights = safetensors_of(model)
    try:
        with safe_open(weights, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{weights} cannot be read: {error}. Save or download the adapter again.") from error
    # From the weights, since single layers may have a rank of their own
    rank = max((shape[0] for name, shape in shapes.items() if "lora_A" in name), default=0)
    if not 0 < rank <= LORA_RANKS[-1]:
        raise ValueError(
            f"The adapter {model!r} has rank {rank}, and vLLM serves LoRA adapters of rank 1 to {LORA_RANKS[-1]}. "
            "Merge it into its model (`paco-trl merge`) and serve that."
        )
    return Adapter(
        folder=str(Path(weights).parent.absolute()),
        base=base,
        revision=base_kwargs.get("revision"),
        rank=rank,
        has_vision_layers=any(_VISION_LAYERS.search(name) for name in shapes),
        image_size=_image_size(*(find_model_file(model, name) for name in PROCESSOR_FILES)),
    )


def _image_size(*files: str | None) -> dict[str, Any] | None:
    """Return the `size` of an image processor whose limits are numbers of pixels."""
    processor, config = (json.loads(Path(file).read_text(encoding="utf-8")) if file else {} for file in files)
    config = processor.get("image_processor") or config
    size = config.get("size") or {}
    # Files of older versions have the limits under their own names
    edges = {
        "shortest_edge": config.get("min_pixels") or size.get("shortest_edge"),
        "longest_edge": config.get("max_pixels") or size.get("longest_edge"),
    }
    return edges if all(edges.values()) else None


def serve_command(args: ServeArguments, executable: str, adapter: Adapter | None = None) -> list[str]:
    """Build the command that starts vLLM."""
    name = args.served_model_name
    command = [executable, "serve", args.model_name_or_path if adapter is None else adapter.base]
    # With an adapter the two names must differ, or vLLM answers with the base model
    command += ["--served-model-name", name if adapter is None else f"{name}-base"]
    command += ["--host", args.host, "--port", str(args.port)]
    command += ["--dtype", args.dtype, "--max-model-len", str(args.max_model_len)]
    # A query has two images. Memory is reserved for the largest possible query.
    command += ["--limit-mm-per-prompt", json.dumps({"image": 2, "video": 0})]
    # A panel is in several queries: it is processed once, and the common start of two queries is computed once
    command += ["--mm-processor-cache-gb", str(_IMAGE_CACHE), "--enable-prefix-caching"]
    # That of a published judge samples and penalizes repetitions
    command += ["--generation-config", "vllm"]
    # Other formats are pickles
    command += ["--load-format", "safetensors"]
    # A line for each request would bury everything else
    command += ["--disable-uvicorn-access-log"]
    if args.gpu_memory_utilization is not None:
        command += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
    if adapter is not None:
        # As JSON, since the short form `name=path` fails for paths with a comma
        command += ["--enable-lora", "--lora-modules", json.dumps({"name": name, "path": adapter.folder})]
        command += ["--max-lora-rank", str(next(rank for rank in LORA_RANKS if rank >= adapter.rank))]
        if adapter.has_vision_layers:
            # Without it vLLM leaves these layers out and says nothing
            command += ["--enable-tower-connector-lora"]
        if adapter.revision is not None:
            command += ["--revision", adapter.revision]
        if adapter.image_size is not None:
            # vLLM uses the processor of the base model; the judge was trained on images of this size
            command += ["--mm-processor-kwargs", json.dumps({"size": adapter.image_size})]
    return command + args.vllm_args


class Server:
    """Process of a server, with all that it starts itself."""

    def __init__(self, command: list[str]):
        # Tools that vLLM calls (ninja) are in its environment, which need not be the active one
        path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)])
        self.process: Any = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": path},
            # A process group of its own: Ctrl-C reaches this command alone, which then stops them all
            start_new_session=True,
        )
        self._tail = b""
        self._reader = threading.Thread(target=self._forward_output, daemon=True)
        self._reader.start()

    def _forward_output(self) -> None:
        # As it comes, not line by line: progress bars have no lines
        output = self.process.stdout.fileno()
        while chunk := os.read(output, 65536):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            # If nobody reads it any more, the pipe must still be emptied, or the server would block
            with suppress(OSError, ValueError):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()

    def last_lines(self) -> str:
        """Return the end of the output."""
        self._reader.join(timeout=5.0)
        lines = self._tail.decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines)

    def stop(self) -> None:
        """End the process, by force if it does not end by itself, and kill what is left of its group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE)
        self._reader.join(timeout=1.0)


class _Failure(RuntimeError):
    """Failure of the command, with its exit code."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect the signals that should stop the command; those that are ignored (`nohup`) stay ignored."""
    # A list, not an `Event`, whose lock the interrupted wait may hold
    received: list[int] = []
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Check(threading.Thread):
    """Thread that waits for the server and sends a real query; the main thread watches process and signals."""

    def __init__(self, url: str, model: str):
        super().__init__(daemon=True)
        self.url, self.model = url, model
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            from ..rewards import ServedJudge  # takes seconds

            with requests.Session() as session:
                session.trust_env = False  # a proxy does not know this machine's own addresses
                while not self._is_healthy(session):
                    time.sleep(_POLL)
            # A server that calls itself healthy may fail at its first query, and its answer may take longer
            judge = ServedJudge(base_url=f"{self.url}/v1", model=self.model)
            judge.check(time_budget=judge.timeout)
            judge.close()
        except Exception as error:
            self.error = error

    def _is_healthy(self, session: requests.Session) -> bool:
        try:
            return session.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except requests.RequestException:
            return False


def _wait_until_ready(server: Server, check: _Check, stop_signals: list[int], timeout: float) -> None:
    """Wait until the judge has answered, or the command should stop."""
    deadline = time.monotonic() + timeout
    check.start()
    while check.is_alive() and server.process.poll() is None and not stop_signals:
        time.sleep(_POLL)
        if time.monotonic() > deadline:
            raise _Failure(
                f"vLLM is not ready after {timeout:g} seconds (`--startup_timeout`; set it higher if a large model was "
                f"being downloaded). Its last lines:\n{server.last_lines()}"
            )
    if check.error is not None:
        # The query may have ended the server, whose exit shows only after the broken connection
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(_EXIT_WAIT)
    if server.process.poll() is not None:
        raise _ended(server, "before it was ready")
    if check.error is not None:
        kind = "" if isinstance(check.error, JudgeUnavailableError) else f"{type(check.error).__name__}: "
        raise _Failure(f"The server runs, but not as a judge: {kind}{check.error}")


def _ended(server: Server, when: str) -> _Failure:
    """Build the failure of a server that ended by itself; its exit code is never that of success."""
    code = server.process.returncode
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return _Failure(
        f"vLLM ended {when}, {how}. Its last lines:\n{server.last_lines()}", 128 - code if code < 0 else code or 1
    )


def _serve(args: ServeArguments) -> None:
    executable = shutil.which(os.path.expanduser(args.vllm))
    if executable is None:
        raise _Failure(
            f"There is no command {args.vllm!r} (`--vllm`): vLLM is not installed, or not on the PATH. It requires other "
            "versions of its dependencies than this package, so install it in an environment of its own, and give its "
            "path:\n"
            "    python -m venv ~/vllm && ~/vllm/bin/pip install vllm\n"
            f"    {_PROGRAM} --vllm ~/vllm/bin/vllm"
        )
    if find_spec("openai") is None:  # vLLM takes minutes to start
        raise _Failure('The first query of the server requires `openai`: pip install "paco_trl[served]".')
    check_port(args.host, args.port)
    adapter = find_adapter(args.model_name_or_path)
    command = serve_command(args, os.path.abspath(executable), adapter)
    has_key = bool(os.environ.get(API_KEY_VARIABLE))
    if not is_loopback(args.host):
        guard = f"Without a key everyone there can use the server: put one into {API_KEY_VARIABLE}."
        if has_key:
            guard = "The key guards the addresses below /v1, and not all others that vLLM has."
        say(
            "serve",
            f"Warning: `--host` is {args.host}, which other machines may reach. {guard} Use it in a network that you trust.",
        )

    # Wildcard addresses cannot be connected to
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(args.host, args.host)
    url = f"http://[{host}]:{args.port}" if ":" in host else f"http://{host}:{args.port}"
    with _stop_signals() as stop_signals:
        server = Server(command)
        try:
            _wait_until_ready(server, _Check(url, args.served_model_name), stop_signals, args.startup_timeout)
            if not stop_signals:
                name = args.served_model_name
                base = "" if adapter is None else f"The base model: {name + '-base'!r}\n"
                key = f"    (with the same {API_KEY_VARIABLE} in the environment)\n" if has_key else ""
                sys.stdout.write(
                    f"\nThe judge is ready: {name!r} at {url}/v1\n{base}\n    from paco_trl.rewards import ConsistencyReward\n"
                    f'    reward = ConsistencyReward(base_url="{url}/v1", model="{name}")\n{key}\nCtrl-C stops it.\n'
                )
                sys.stdout.flush()
            while not stop_signals:
                if server.process.poll() is not None:
                    raise _ended(server, "by itself")
                time.sleep(_POLL)
        finally:
            if server.process.poll() is None:
                say("serve", "Stopping vLLM.")
            server.stop()


def main(arguments: list[str]) -> int:
    """Run the command; return 0 if the server was stopped on request, else 1 or the server's own exit code."""
    parser = CommandParser(
        ServeArguments,
        prog=_PROGRAM,
        usage=f"{_PROGRAM} [options] [-- options of vllm serve]",
        description="Starts vLLM for a judge, checks it with a query, and runs until it is stopped.",
    )
    place = [*arguments, "--"].index("--")
    (args,) = parser.parse_args_and_config(arguments[:place])
    try:
        # After those of a YAML file: vLLM uses the last of a repeated option
        _serve(replace(args, vllm_args=args.vllm_args + arguments[place + 1 :]))
    except _Failure as failure:
        say("serve", str(failure))
        return failure.exit_code
    return 0
