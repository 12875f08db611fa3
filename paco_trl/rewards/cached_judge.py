# SPDX-License-Identifier: Apache-2.0
"""A cache around a judge: each distinct question is put to it once."""

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from PIL import Image

from .judge import Answer, Judge


# Several rounds at the paper's settings (672 images with 6 pairs each), in about 15 MB
_MAX_ANSWERS = 50_000

Question = tuple[Image.Image, Image.Image, str]


def image_digest(image: Image.Image) -> str:
    """Compute a digest of what makes images equal: mode, size, palette, transparent color and pixels."""
    pixels = image.tobytes()  # first: it loads the file
    description = f"{image.mode} {image.size} {image.getpalette(None)} {image.info.get('transparency')} "
    return hashlib.sha256(description.encode() + pixels).hexdigest()


class CachedJudge:
    """Caches the answers of a judge. Pending questions are shared; those without an answer are asked again."""

    def __init__(self, judge: Judge):
        self.judge: Any = judge  # with `answer` if it is served
        # Pending answers are futures
        self._answers: OrderedDict[bytes, Answer | Future[Answer]] = OrderedDict()
        self._lock = threading.Lock()

    def query(self, questions: list[Question]) -> tuple[list[Answer], int]:
        """Query a judge in the process; also return how many of the questions were new to it."""
        answers, new = self._claim(questions)
        with self._resolving(new) as found:
            if new:
                scores = self.judge.score(*_arguments(questions, new))
                found += [Answer(score, "undecided" if score is None else None) for score in scores]
        return [answer.result() if isinstance(answer, Future) else answer for answer in answers], len(new)

    async def query_server(self, questions: list[Question]) -> tuple[list[Answer], int]:
        """Query a served judge, as `query` does one in the process."""
        answers, new = self._claim(questions)
        with self._resolving(new) as found:
            if new:
                found += await self.judge.answer(*_arguments(questions, new))
        return [
            await asyncio.shield(asyncio.wrap_future(answer)) if isinstance(answer, Future) else answer
            for answer in answers
        ], len(new)

    def _claim(self, questions: list[Question]) -> tuple[list[Answer | Future], dict[bytes, tuple[int, Future]]]:
        """Return the answers, available or pending, and the new questions: key -> (index, pending answer)."""
        digests = {id(image): image_digest(image) for first, second, _ in questions for image in (first, second)}
        names = [(self.judge.name, text, digests[id(first)], digests[id(second)]) for first, second, text in questions]
        keys = [hashlib.sha256(repr(name).encode()).digest() for name in names]
        new = {}
        with self._lock:
            for index, key in enumerate(keys):
                if key not in self._answers:
                    pending: Future[Answer] = Future()
                    self._answers[key], new[key] = pending, (index, pending)
                self._answers.move_to_end(key)
            answers = [self._answers[key] for key in keys]
            while len(self._answers) > _MAX_ANSWERS and isinstance(next(iter(self._answers.values())), Answer):
                self._answers.popitem(last=False)
        return answers, new

    @contextmanager
    def _resolving(self, new: dict[bytes, tuple[int, Future]]) -> Iterator[list[Answer]]:
        """Finalize the pending answers of new questions, also on failure, since other threads may wait for them."""
        found: list[Answer] = []
        try:
            yield found
            resolved = dict(zip(new, found, strict=True))
        except BaseException as error:
            problem = error if isinstance(error, Exception) else RuntimeError("The question was canceled.")
            for key, (_, future) in new.items():
                with self._lock:
                    del self._answers[key]
                future.set_exception(problem)
            raise
        for key, answer in resolved.items():
            with self._lock:
                if answer.score is None:
                    del self._answers[key]
                else:
                    self._answers[key] = answer
            new[key][1].set_result(answer)


def _arguments(questions: list[Question], new: dict[bytes, tuple[int, Future]]) -> tuple[list, list[str]]:
    asked = [questions[index] for index, _ in new.values()]
    return [question[:2] for question in asked], [text for *_, text in asked]
