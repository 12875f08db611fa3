# SPDX-License-Identifier: Apache-2.0
"""Query a served model, and stop early if none of its replies can be used."""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from ..utils.chat import ChatEndpoint, ChatRequest, Reply
from ..utils.journals import Journal
from ..utils.text import shorten


def causes_text(causes: Counter[str]) -> str:
    """List causes, the most frequent first."""
    return "; ".join(f"{count} x {cause}" for cause, count in causes.most_common())


def cause_of(reply: Reply) -> str:
    """Return why a reply has no text, without details, so that equal causes are counted together."""
    return str(reply.problem).partition(" (")[0]


def sampled_request(content: Any, key: str, max_tokens: int) -> ChatRequest:
    """Ask for one answer, sampled with a seed that depends on the key alone."""
    seed = random.Random(key).getrandbits(31)
    return ChatRequest([{"role": "user", "content": content}], seed, max_tokens, temperature=1.0)


class Answers:
    """Replies of a model to named questions. If none of the first `enough` can be used, asking ends with an error."""

    def __init__(self, endpoint: ChatEndpoint, journal: Journal, purpose: str, enough: int):
        self.endpoint, self.journal, self.purpose, self.enough = endpoint, journal, purpose, enough
        self.count, self.has_usable = 0, False
        self.causes: Counter[str] = Counter()
        self.first: dict[str, Reply] = {}  # to each question

    def add(self, name: str, reply: Reply, is_usable: bool, causes: Counter[str]) -> None:
        """Count a reply to a question."""
        self.count += 1
        self.has_usable |= is_usable
        self.causes += causes
        self.first.setdefault(name, reply)

    def collect(
        self,
        questions: Iterator[Any],
        request: Callable[[Any], ChatRequest],
        save: Callable[[Any, Reply], bool],
        **bar_options: Any,
    ) -> None:
        """Send questions; `save` adds a reply and tells whether its question is done, or must be sent again."""
        from tqdm.auto import tqdm

        self.endpoint.check()
        sent: dict[int, Any] = {}
        again: deque[tuple[int, ChatRequest]] = deque()

        def requests() -> Iterator[ChatRequest]:
            for number, question in enumerate(questions):
                sent[number] = question
                yield request(question)

        self._check_usable()
        with closing(self.endpoint.ask_all(requests(), again)) as replies, tqdm(**bar_options) as bar:
            for number, reply in replies:
                if save(sent[number], reply):
                    del sent[number]
                    bar.update()
                else:
                    again.append((number, request(sent[number])))
                self._check_usable()

    def _check_usable(self) -> None:
        if not self.has_usable and self.count >= self.enough:
            raise self.none_usable()

    def none_usable(self) -> ValueError:
        """Build the error for a model without a usable reply, with an example."""
        name = min(self.first)  # whichever reply came first
        text, problem = self.first[name]
        return ValueError(
            f"None of {self.count} answers of {self.endpoint.name} can be used as {self.purpose} "
            f"({causes_text(self.causes)}). The answer to {name!r}: {problem or shorten(text)}. Serve a model that "
            f"follows instructions, without thinking aloud; then delete {self.journal.path}, or choose another directory."
        )
