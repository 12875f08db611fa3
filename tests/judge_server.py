# SPDX-License-Identifier: Apache-2.0
"""
A small OpenAI-compatible server for the tests: it scores with a function, and does what a healthy server does not.

It speaks HTTP/1.1 over real sockets, one thread for each connection.
"""

import base64
import json
import math
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import openai._base_client
from PIL import Image


# Retries of openai's client begin soon
openai._base_client.INITIAL_RETRY_DELAY = 0.02


class LoopClock:
    """
    Clock of the event loop on which all clients ask. A test puts it forward, so that it does not wait for a timeout,
    and the timeout can be long enough for an answer on a machine that stalls. A context manager.
    """

    def __init__(self):
        from paco_trl.utils.chat import _event_loop  # takes long to import

        self._loop, self._ahead, self._lock = _event_loop(), 0.0, threading.Lock()

    def __enter__(self):
        self._loop.time = lambda: time.monotonic() + self._ahead
        return self

    def __exit__(self, *_):
        del self._loop.time

    def forward(self, seconds: float) -> None:
        with self._lock:
            self._ahead += seconds
        self._loop.call_soon_threadsafe(lambda: None)  # wakes it up: timers may be due

    def after(self, seconds: float, fault: str | None = None) -> str | None:
        """A fault, or a right answer, that takes so many seconds."""
        time.sleep(0.1)  # the timeout begins when the client has sent all
        self.forward(seconds)
        return fault

    def forward_when(self, condition: Callable[[], bool], seconds: float = 1000.0) -> None:
        """Puts it forward, from another thread, as soon as a condition holds."""

        def wait() -> None:
            end = time.monotonic() + 60
            while not condition() and time.monotonic() < end:
                time.sleep(0.005)
            self.forward(seconds)

        threading.Thread(target=wait, daemon=True).start()


class JudgeServer:
    """
    `log_odds` gives, for images and a question, the logit of Yes against No, or tokens with their log-probabilities;
    `fault`, changeable at any time, for the number of a question from 0, the name of a fault, or `None` for a right
    answer. `latency` is the seconds that an answer takes, `key` the key that it wants, and `port` 0 a free one.

    The attribute `roots` has the names under which models were loaded and, of an adapter, a pair with its base's name;
    `models_reply` takes the place of the list of models, `retry_after` is the header of a 429, `refuse`
    gives the message of a 400 for the body of a question, `others` is the log-probability of the likeliest token beside
    Yes and No.
    """

    def __init__(self, log_odds, models=("judge",), fault=None, latency=0.0, key=None, port=0):
        self.log_odds, self.models, self.latency, self.key = log_odds, list(models), latency, key
        self.fault: Callable[[int], str | None] = fault or (lambda number: None)
        self.requests: list[dict] = []  # bodies of the questions, in their order
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []  # of all requests, names in lower case
        self.models_reply: bytes | None = None
        self.roots: dict[str, str | tuple[str, str]] = {}
        self.retry_after = "1"
        self.refuse: Callable[[dict], str | None] = lambda body: None
        self.others = -20.0
        self.connections = 0  # that were ever opened
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._port = port
        self.start()

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self._port), _handler(self))
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()

    def stop(self) -> None:
        """Goes down as a killed server does: nobody listens, open connections break."""
        self._server.shutdown()
        self._server.server_close()
        self._server.break_connections()

    def forget_requests(self) -> None:
        """Clears `requests`, after the clients are gone: what a killed one sent may still wait to be read."""
        # Connections are accepted in their order: when this one is answered, those before it are in `sockets`
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(self.url.removesuffix("/v1") + "/health", timeout=60):
            pass
        end = time.monotonic() + 60
        while self._server.sockets or self.at_once:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.open_connections} connections are still open.")
            time.sleep(0.01)
        self.requests.clear()

    def answer_only_when_asked(self, count: int) -> None:
        """Lets the first questions wait until so many are there at once, for half a minute."""

        def fault(number: int) -> str | None:
            end = time.monotonic() + 30
            while self.most_at_once < count and time.monotonic() < end:
                time.sleep(0.01)
            return None

        self.fault = fault

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def open_connections(self) -> int:
        return len(self._server.sockets)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def pictures_of(body: dict) -> tuple[list[Image.Image], str]:
    """Images and question of a request."""
    parts = body["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    images = [Image.open(BytesIO(base64.b64decode(url.partition("base64,")[2]))) for url in urls]
    return images, "".join(part["text"] for part in parts if part["type"] == "text")


def completion(logprobs: dict[str, float] | None, text: str = "Yes", model: str = "judge") -> dict:
    content = None
    if logprobs is not None:
        top = [{"token": token, "logprob": value, "bytes": None} for token, value in logprobs.items()]
        content = {"content": [{**top[0], "top_logprobs": top}]}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": content, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": usage}


def decision_logprobs(log_odds: float, others: float = -20.0) -> dict[str, float]:
    """Log-probabilities of Yes and No that have these log-odds, and of eighteen others, in no order."""
    yes, no = -math.log1p(math.exp(-log_odds)), -math.log1p(math.exp(log_odds))
    return {"Yes": yes - 0.01, "No": no - 0.01} | {f"other{index}": others - index for index in range(18)}


# Answers without a score, by the names of faults
REPLIES: dict[str, bytes | dict] = {
    "garbage": b'{"choices": [{"logp',
    "null": b"null",
    "choice is null": {**completion(None), "choices": [None]},
    "log-probabilities are words": completion({"Yes": "likely", "No": "hardly"}),
    "no choices": {**completion(None), "choices": []},
    "no logprobs": completion(None),
    "neither": completion({"Maybe": -0.1, "yes": -2.0, " No": -3.0}),
    "only Yes": completion({"Yes": -0.7, "Maybe": -0.9, "maybe": -4.0}),
    "only Yes, surely": completion({"Yes": -1e-4, "Maybe": -12.0}),
    "the logarithm of 0": completion({"Maybe": 0.0, "Yes": -9999.0, "No": -9999.0}),
    "NaN": completion({"Yes": float("nan"), "No": -1.0}),
}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *args):
        self.sockets: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request, client_address):
        self.sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        pass  # a client that went away

    def break_connections(self) -> None:
        for connection in list(self.sockets):
            try:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _handler(judge: JudgeServer):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self):
            super().setup()
            with judge._lock:
                judge.connections += 1

        def log_message(self, *args):
            pass

        def reply(self, status: int, content: bytes | dict, kind="application/json", headers=()):
            content = json.dumps(content).encode() if isinstance(content, dict) else content
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def error(self, status: int, message: str, headers=()):
            self.reply(status, {"error": {"message": message, "type": "error", "code": status}}, headers=headers)

        def is_welcome(self) -> bool:
            judge.paths.append(self.path)
            judge.headers.append({name.lower(): value for name, value in self.headers.items()})
            if judge.key is not None and self.headers["Authorization"] != f"Bearer {judge.key}":
                self.error(401, "Unauthorized")
                return False
            return True

        def do_GET(self):
            if not self.is_welcome():
                return
            if self.path == "/health":
                self.reply(200, b"")
            elif self.path == "/v1/models" and judge.models_reply is not None:
                self.reply(200, judge.models_reply)
            elif self.path == "/v1/models":
                data = [{"id": name, "object": "model", "created": 1, "owned_by": "tests"} for name in judge.models]
                for entry in data:
                    root = judge.roots.get(entry["id"], ())
                    entry |= zip(("root", "parent"), [root] if isinstance(root, str) else root, strict=False)
                self.reply(200, {"object": "list", "data": data})
            else:
                self.error(404, "Not Found")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.is_welcome():
                return
            if self.path != "/v1/chat/completions":
                self.error(404, "Not Found")
                return
            with judge._lock:
                number = len(judge.requests)
                judge.requests.append(body)
                judge.at_once += 1
                judge.most_at_once = max(judge.most_at_once, judge.at_once)
            try:
                self.answer(body, judge.fault(number))
            finally:
                with judge._lock:
                    judge.at_once -= 1

        def answer(self, body: dict, fault: str | None):
            time.sleep(judge.latency)
            if (refusal := judge.refuse(body)) is not None:
                self.error(400, refusal)
            elif body["model"] not in judge.models:
                self.error(404, f"The model `{body['model']}` does not exist.")
            elif fault is None:
                images, question = pictures_of(body)
                logprobs = judge.log_odds(*images, question)
                logprobs = logprobs if isinstance(logprobs, dict) else decision_logprobs(logprobs, judge.others)
                top = sorted(logprobs.items(), key=lambda token: -token[1])[: body["top_logprobs"]]
                length = body.get("max_tokens") or body["max_completion_tokens"]
                logprobs, text = dict(top), "Yes" if length == 1 else f"Yes. {question}"
                self.reply(200, completion(logprobs, text, body["model"]))
            elif fault.isdecimal():
                headers = [("Retry-After", judge.retry_after)] if fault == "429" else []
                self.error(int(fault), f"fault {fault}", headers)
            elif fault == "hang":
                self.connection.recv(1)  # until the client goes away, or the server stops
                self.close_connection = True
            elif fault == "cut before":
                self.cut()
            elif fault == "cut in the middle":
                content = json.dumps(completion({"Yes": -0.1, "No": -3.0})).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.cut()
            elif fault == "page":
                self.reply(200, b"<html>Bad gateway</html>", "text/html")
            else:
                self.reply(200, REPLIES[fault])

        def cut(self):
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

    return Handler
