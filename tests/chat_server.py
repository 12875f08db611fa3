# SPDX-License-Identifier: Apache-2.0
"""A small OpenAI-compatible server for the tests that says what a function says. Faults are those of `JudgeServer`."""

import time

from judge_server import JudgeServer, _handler, completion
from paco_trl.utils.chat import ChatEndpoint


class ChatServer(JudgeServer):
    """
    Args:
        say (`Callable`):
            Body of a request -> text of the answer, the whole answer as a `dict`, or a status and the message of an
            error. Changeable at any time.

    The other arguments are those of [`JudgeServer`].
    """

    def __init__(self, say, models=("writer",), **kwargs):
        self.say = say
        self._endpoints: list[ChatEndpoint] = []
        super().__init__(None, models=models, **kwargs)

    def start(self) -> None:
        super().start()
        self._server.RequestHandlerClass = _chat_handler(self)

    def endpoint(self, **kwargs) -> ChatEndpoint:
        """An endpoint for the server, without retries."""
        self._endpoints.append(ChatEndpoint(self.url, "writer", **{"timeout": 5.0, "max_retries": 0, **kwargs}))
        return self._endpoints[-1]

    def forget_requests(self) -> None:
        while self._endpoints:  # of this process, whose idle connections stay open
            self._endpoints.pop().close()
        super().forget_requests()


def answer(text: str | None, finish_reason: str = "stop") -> dict:
    """What the interface gives for a text."""
    reply = completion(None, text)
    reply["choices"][0]["finish_reason"] = finish_reason
    return reply


def _chat_handler(server: ChatServer):
    class Handler(_handler(server)):
        def answer(self, body: dict, fault: str | None):
            if fault is not None or body["model"] not in server.models or server.refuse(body) is not None:
                return super().answer(body, fault)
            time.sleep(server.latency)
            said = server.say(body)
            if isinstance(said, tuple):
                self.error(*said)
            else:
                self.reply(200, said if isinstance(said, dict) else answer(said))

    return Handler
