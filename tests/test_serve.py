# SPDX-License-Identifier: Apache-2.0
"""
`paco-trl serve` without vLLM: the command that it would run, and what becomes of the processes.

The place of vLLM is taken by a script that answers as it does, and that can be told to fail in every way that a server
does. tests/test_vllm.py has the real one.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from launching import free_port
from paco_trl import rewards
from paco_trl.commands import serve
from paco_trl.commands.main import main
from paco_trl.commands.serve import ServeArguments, find_adapter, serve_command
from paco_trl.rewards.judge import JudgeUnavailableError


ROOT = Path(__file__).parent.parent
KEY = "sk-not-for-anyones-eyes"

# Plays `vllm serve MODEL ...`. Failures are asked for by the name of the model.
STAND_IN = """#!{python} -IS
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

arguments, key = sys.argv[1:], os.environ.get("VLLM_API_KEY")
_, mode = arguments[:2]
option = dict(zip(arguments, arguments[1:]))
print("arguments:", json.dumps(arguments), flush=True)
print("GPUs:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
print("first on the PATH:", os.environ["PATH"].split(os.pathsep)[0], flush=True)
print("line\\n" * 100 + "the last line", file=sys.stderr, flush=True)
if mode == "exits":
    sys.exit(3)
if mode == "exits-with-success":
    sys.exit(0)
if mode == "is-killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Inherits that
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__])
if mode == "leaves-a-child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__])


class Handler(BaseHTTPRequestHandler):
    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuses(self):
        if key and self.headers.get("Authorization") != "Bearer " + key:
            self.answer({{"error": "Unauthorized"}}, 401)
            return True

    def do_GET(self):
        if self.path == "/health":
            self.answer({{}}, 503 if mode == "never-healthy" else 200)
        elif self.path == "/exit":
            os._exit(5)
        elif not self.refuses():
            self.answer({{"object": "list", "data": [{{"id": option["--served-model-name"], "object": "model"}}]}})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if mode == "refuses-and-exits":  # the check fails while the process is still alive
            self.answer({{"error": "broken"}}, 400)
            time.sleep(1.0)
            os._exit(7)
        if mode == "hangs-when-asked":
            time.sleep(600)
        if self.refuses():
            return
        words = ("Maybe", "Perhaps") if mode == "does-not-judge" else ("Yes", "No")
        top = [{{"token": word, "logprob": -0.7, "bytes": None}} for word in words]
        self.answer({{
            "id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [{{
                "index": 0, "finish_reason": "length", "message": {{"role": "assistant", "content": words[0]}},
                "logprobs": {{"content": [{{**top[0], "top_logprobs": top}}]}},
            }}],
        }})

    def log_message(self, *args):
        pass


ThreadingHTTPServer((option["--host"], int(option["--port"])), Handler).serve_forever()
"""


class PlainJudge:
    """In the place of the client, which takes long to import."""

    timeout = 60.0

    def __init__(self, base_url, model):
        self.base_url, self.model = base_url, model

    def check(self, time_budget):
        body = json.dumps({"model": self.model}).encode()
        try:
            answer = json.loads(urllib.request.urlopen(self.base_url + "/chat/completions", body, timeout=60).read())
        except OSError as error:
            raise JudgeUnavailableError(str(error)) from None
        if answer["choices"][0]["message"]["content"] != "Yes":
            raise JudgeUnavailableError("it does not judge")

    def close(self):
        pass


def run_command(options: list[str], environment: dict, output: Path, prepare: Callable[[], None]) -> None:
    """Runs the command in a process that was just forked: another one would take long to import everything."""
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(environment)
    prepare()
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as Python does when it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    rewards.ServedJudge = PlainJudge
    serve.find_adapter = lambda model: None  # without a look at the model
    serve._GRACE = 1.0
    serve._POLL = 0.02
    os.chdir(ROOT)
    sys.exit(main(["serve", *options]))


class Forked:
    """`run_command` with the interface of `subprocess.Popen`."""

    def __init__(self, *arguments):
        self._process = multiprocessing.get_context("fork").Process(target=run_command, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        assert self.poll() is not None
        return self.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def pids_with(text: Path | str) -> list[int]:
    """The processes that are alive and have a text in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # has just ended
            continue
        if str(text) in line:
            found.append(int(file.parent.name))
    return found


@pytest.fixture
def stand_in(tmp_path) -> Path:
    """The stand-in of vLLM, in a folder of its own."""
    script = tmp_path / "environment" / "bin" / "vllm"
    script.parent.mkdir(parents=True)
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(0o755)
    return script


def as_in_a_terminal() -> None:
    """Tests that were started in the background, or under nohup, hand on that these signals are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Command:
    """`paco-trl serve` in a process of its own, with its output in a file: a forked one, or a program."""

    def __init__(self, program: list[str] | None, stand_in: Path, mode: str, *arguments: str, env: dict, prepare):
        self.script = stand_in
        self.port = free_port()
        self.file = stand_in.parent / "output"
        options = ["--model_name_or_path", mode, "--vllm", str(stand_in), "--port", str(self.port), *arguments]
        environment = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
        self.file.touch()
        if program is None:
            self.process = Forked(options, environment, self.file, prepare)
            return
        with self.file.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
                preexec_fn=prepare,
            )

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code. Nothing may be left of it."""
        code = self.process.wait(seconds)
        assert pids_with(self.script) == []
        return code


@pytest.fixture
def start(stand_in):
    """Starts the command with the stand-in in a mode; ends all at the end of the test, whatever came of it."""
    started = []

    def run(mode: str, *arguments: str, program=None, key: str | None = None, prepare=as_in_a_terminal) -> Command:
        command = Command(program, stand_in, mode, *arguments, env={"VLLM_API_KEY": key}, prepare=prepare)
        started.append(command)
        return command

    yield run
    for command in started:
        if command.process.poll() is None:
            command.process.send_signal(signal.SIGTERM)
            command.process.wait(60)


def save_adapter(folder: Path, layers: dict[str, int], **config) -> Path:
    """Files of a LoRA adapter: layers with their ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "some/base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for name, rank in layers.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(rank, 3)
        weights[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(3, rank)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


LANGUAGE = "model.language_model.layers.0.self_attn.q_proj"
VISION = "model.visual.blocks.0.attn.qkv"


def command_for(model: Path | str, **options) -> list[str]:
    args = ServeArguments(model_name_or_path=str(model), **options)
    return serve_command(args, "/vllm/bin/vllm", find_adapter(args.model_name_or_path))


def value_of(command: list[str], option: str) -> str:
    assert command.count(option) == 1
    return command[command.index(option) + 1]


class TestCommandLine:
    def test_full_model(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        assert command_for(tmp_path) == [
            *["/vllm/bin/vllm", "serve", str(tmp_path), "--served-model-name", "paco-reward"],
            *["--host", "127.0.0.1", "--port", "8000", "--dtype", "auto", "--max-model-len", "8192"],
            *["--limit-mm-per-prompt", '{"image": 2, "video": 0}'],
            *["--mm-processor-cache-gb", "4", "--enable-prefix-caching"],
            *["--generation-config", "vllm", "--load-format", "safetensors", "--disable-uvicorn-access-log"],
        ]

    def test_options(self, tmp_path):
        command = command_for(
            tmp_path,
            served_model_name="judge",
            host="::1",
            port=8001,
            dtype="float32",
            max_model_len=2048,
            gpu_memory_utilization=0.5,
            vllm_args=["--tensor-parallel-size", 2],
        )
        expected = {
            "--served-model-name": "judge",
            "--host": "::1",
            "--port": "8001",
            "--dtype": "float32",
            "--max-model-len": "2048",
            "--gpu-memory-utilization": "0.5",
        }
        assert {name: value_of(command, name) for name in expected} == expected
        # Last, so that they win
        assert command[-2:] == ["--tensor-parallel-size", "2"]

    def test_adapter(self, tmp_path):
        # A comma, at which vLLM's short form `name=path` fails
        folder = save_adapter(tmp_path / "lr=1e-4,r=4", {LANGUAGE: 4})
        command = command_for(folder)
        assert command[2] == "some/base"
        assert value_of(command, "--served-model-name") == "paco-reward-base"
        assert json.loads(value_of(command, "--lora-modules")) == {"name": "paco-reward", "path": str(folder)}
        assert "--enable-lora" in command
        for option in ("--enable-tower-connector-lora", "--revision", "--mm-processor-kwargs"):
            assert option not in command

    @pytest.mark.parametrize("rank, allowed", [(8, 8), (9, 16), (512, 512)])
    def test_rank(self, tmp_path, rank, allowed):
        """The largest of its layers counts, whatever `r` is."""
        folder = save_adapter(tmp_path, {LANGUAGE: rank, LANGUAGE.replace("q_proj", "v_proj"): 1})
        assert value_of(command_for(folder), "--max-lora-rank") == str(allowed)

    @pytest.mark.parametrize(
        "layer",
        [
            VISION,
            "visual.blocks.0.attn.qkv",  # before transformers 4.52
            "model.multi_modal_projector.linear_1",
        ],
    )
    def test_adapter_of_vision_layers(self, tmp_path, layer):
        assert "--enable-tower-connector-lora" in command_for(save_adapter(tmp_path, {LANGUAGE: 4, layer: 4}))

    def test_adapter_of_a_revision(self, tmp_path):
        assert value_of(command_for(save_adapter(tmp_path, {LANGUAGE: 4}, revision="v2")), "--revision") == "v2"

    @pytest.mark.parametrize(
        "name, content",
        [
            ("processor_config.json", {"image_processor": {"size": {"shortest_edge": 784, "longest_edge": 3136}}}),
            ("preprocessor_config.json", {"size": {"shortest_edge": 784, "longest_edge": 3136}}),
            ("preprocessor_config.json", {"min_pixels": 784, "max_pixels": 3136}),
        ],
    )
    def test_adapter_with_a_size_of_images(self, tmp_path, name, content):
        folder = save_adapter(tmp_path, {LANGUAGE: 4})
        (folder / name).write_text(json.dumps(content))
        kwargs = json.loads(value_of(command_for(folder), "--mm-processor-kwargs"))
        assert kwargs == {"size": {"shortest_edge": 784, "longest_edge": 3136}}

    def test_adapters_that_cannot_be_served(self, tmp_path):
        for rank in (0, 513):
            with pytest.raises(ValueError, match=f"rank {rank}"):
                find_adapter(str(save_adapter(tmp_path / f"rank-{rank}", {LANGUAGE: rank})))
        folder = save_adapter(tmp_path / "pickled", {LANGUAGE: 4})
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
        (folder / "adapter_model.safetensors").write_bytes(b"not what it says")
        with pytest.raises(ValueError, match="cannot be read"):
            find_adapter(str(folder))


class TestArguments:
    @pytest.mark.parametrize("argument", ["--api_key=x", "--host=0.0.0.0"])
    def test_options_of_the_command_itself(self, argument, capsys):
        assert main(["serve", "--", argument, "x"]) == 1
        assert "which this command sets itself" in capsys.readouterr().err

    def test_values_out_of_range(self, capsys):
        assert main(["serve", "--port=0"]) == 1
        assert "`port` is 0" in capsys.readouterr().err

    def test_without_vllm(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert main(["serve"]) == 1
        assert "pip install vllm" in capsys.readouterr().err

    def test_port_in_use(self, stand_in, capfd):
        with socket.socket() as other:
            other.bind(("0.0.0.0", 0))
            other.listen()
            port = str(other.getsockname()[1])
            assert main(["serve", "--vllm", str(stand_in), "--port", port]) == 1
        captured = capfd.readouterr()
        assert f"port {port}: Address already in use" in captured.err
        assert "arguments:" not in captured.out  # vLLM was not started

    def test_without_the_client_of_servers(self, stand_in, capfd, monkeypatch):
        monkeypatch.setitem(sys.modules, "openai", None)
        assert main(["serve", "--vllm", str(stand_in)]) == 1
        captured = capfd.readouterr()
        assert 'requires `openai`: pip install "paco_trl[served]"' in captured.err
        assert "arguments:" not in captured.out  # vLLM was not started


class TestProcesses:
    @pytest.mark.slow
    def test_the_full_command(self, start, stand_in):
        """With the real client, and a key."""
        command = start("judge", program=["-m", "paco_trl.commands.main", "serve"], key=KEY)
        command.wait_for("Ctrl-C stops it.")
        url = f"http://127.0.0.1:{command.port}/v1"
        assert f"The judge is ready: 'paco-reward' at {url}\n" in command.output
        assert f'reward = ConsistencyReward(base_url="{url}", model="paco-reward")\n' in command.output
        assert "(with the same VLLM_API_KEY in the environment)" in command.output
        # What the server says is shown too; its own tools come first
        assert f"first on the PATH: {stand_in.parent}\n" in command.output
        assert KEY not in command.output and not pids_with(KEY)
        assert "Warning" not in command.output
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 0
        assert "Stopping vLLM." in command.output

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
    def test_stops_as_asked(self, start, number):
        command = start("leaves-a-child")
        command.wait_for("Ctrl-C stops it.")
        assert len(pids_with(command.script)) == 2  # the server and its child
        # As a terminal does, to the whole group; the server is not in it
        os.killpg(command.process.pid, number)
        assert command.wait() == 0
        assert "KeyboardInterrupt" not in command.output

    def test_stops_while_starting(self, start):
        command = start("hangs-when-asked")
        command.wait_for("the last line")
        time.sleep(0.5)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(60) == 0
        assert "ready" not in command.output

    def test_ignored_signals_stay_ignored(self, start):
        """`nohup paco-trl serve &` lives on when the terminal is closed."""
        command = start("judge", prepare=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        command.wait_for("Ctrl-C stops it.")
        command.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert command.process.poll() is None
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 0

    def test_what_ignores_the_signal_is_killed(self, start):
        command = start("ignores")
        command.wait_for("Ctrl-C stops it.")
        assert len(pids_with(command.script)) == 2  # the server and its child
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 0

    @pytest.mark.parametrize(
        "mode, code, how",
        [
            ("exits-with-success", 1, "with exit code 0"),
            ("is-killed", 137, "by signal 9"),
            ("refuses-and-exits", 7, "with exit code 7"),
        ],
    )
    def test_ends_before_it_is_ready(self, start, mode, code, how):
        command = start(mode)
        assert command.wait() == code
        passed_on, message = command.output.split(f"vLLM ended before it was ready, {how}. Its last lines:\n")
        assert passed_on.count("line\n") == 101 and "judge is ready" not in passed_on
        assert message.splitlines() == ["    line"] * 19 + ["    the last line"]

    def test_ends_later(self, start):
        command = start("judge")
        command.wait_for("Ctrl-C stops it.")
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{command.port}/exit")
        assert command.wait() == 5
        assert "vLLM ended by itself, with exit code 5. Its last lines:\n" in command.output

    @pytest.mark.slow
    def test_is_not_a_judge(self, start):
        command = start("does-not-judge")
        assert command.wait() == 1
        assert "The server runs, but not as a judge: it does not judge\n" in command.output

    @pytest.mark.slow
    def test_is_not_ready_in_time(self, start):
        command = start("never-healthy", "--startup_timeout", "3")
        assert command.wait() == 1
        assert "vLLM is not ready after 3 seconds (`--startup_timeout`" in command.output
        assert command.output.endswith("    the last line\n")

    @pytest.mark.parametrize(
        "key, message", [(None, "put one into VLLM_API_KEY"), (KEY, "guards the addresses below")]
    )
    def test_warns_of_the_network(self, start, key, message):
        command = start("exits", "--host", "0.0.0.0", key=key)
        assert command.wait() == 3
        assert "Warning: `--host` is 0.0.0.0, which other machines may reach." in command.output
        assert message in command.output and KEY not in command.output

    def test_settings_in_a_file(self, start, tmp_path):
        settings = {"served_model_name": "panels", "max_model_len": 4096, "vllm_args": ["--max-num-seqs", 64]}
        (tmp_path / "judge.yaml").write_text(yaml.safe_dump(settings))
        command = start("exits", "--config", str(tmp_path / "judge.yaml"), "--", "--max-num-seqs", "32")
        assert command.wait() == 3
        line = next(line for line in command.output.splitlines() if line.startswith("arguments: "))
        arguments = json.loads(line.removeprefix("arguments: "))
        assert arguments[:2] == ["serve", "exits"] and value_of(arguments, "--served-model-name") == "panels"
        assert value_of(arguments, "--max-model-len") == "4096"
        assert arguments[-4:] == ["--max-num-seqs", "64", "--max-num-seqs", "32"]
