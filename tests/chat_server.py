# SPDX-License-Identifier: Apache-2.0
"""A small OpenAI-compatible server for the tests that says what a function says. Faults are those of `JudgeServer`."""

import time

from judge_server import JudgeServer, _handler, completion


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
        super().__init__(None, models=models, **kwargs)

    def start(self) -> None:
        super().start()
        self._server.RequestHandlerClass = _chat_handler(self)


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
