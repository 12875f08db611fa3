# SPDX-License-Identifier: Apache-2.0
"""Each distinct question is put to a judge once."""

import asyncio
import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import contextmanager

from PIL import Image

from .judge import Judge
from .served_judge import Answer


# Answers that are kept: those of some rounds at the paper's settings (672 images with 6 pairs each), in 10 MB
_MAX_ANSWERS = 50_000

Question = tuple[Image.Image, Image.Image, str]


def image_digest(image: Image.Image) -> str:
    """
    What makes two images the same: mode, size, palette, transparent colour and pixels.

    Args:
        image (`PIL.Image.Image`):
            Image.

    Returns:
        `str`.
    """
    pixels = image.tobytes()  # first: it reads the file, of which the rest is known then
    description = f"{image.mode} {image.size} {image.getpalette(None)} {image.info.get('transparency')} "
    return hashlib.sha256(description.encode() + pixels).hexdigest()


class AskedOnce:
    """
    A judge that remembers: a question about two images is asked once, also when it is still under way.

    What is remembered by is the judge, the question, and both images with mode and size. A question that got no answer
    is asked again the next time.

    Args:
        judge ([`Judge`]):
            Judge.
        symmetric (`bool`, *optional*, defaults to `False`):
            Whether the judge is asked about both orders of each pair.
    """

    def __init__(self, judge: Judge, symmetric: bool = False):
        self.judge = judge
        self.arguments = {"symmetric": True} if symmetric else {}
        self._answers: OrderedDict[tuple, Future[Answer]] = OrderedDict()
        self._lock = threading.Lock()

    def ask(self, questions: list[Question]) -> tuple[list[Answer], int]:
        """
        Asks a judge in the process.

        Args:
            questions (`list[tuple]`):
                First image, second image and question.

        Returns:
            `tuple[list[Answer], int]`: answer to each question, and how many of them were put to the judge.
        """
        futures, new = self._claim(questions)
        if new:
            with self._settled(new):
                images, prompts = _arguments(questions, new)
                scores = self.judge.score(images, prompts, **self.arguments)
                self._settle(new, [Answer(score, None if score is not None else "no score") for score in scores])
        return [future.result() for future in futures], len(new)

    async def ask_server(self, questions: list[Question]) -> tuple[list[Answer], int]:
        """
        Asks a served judge.

        Args:
            questions (`list[tuple]`):
                As in [`~AskedOnce.ask`].

        Returns:
            `tuple[list[Answer], int]`: as of [`~AskedOnce.ask`].
        """
        futures, new = self._claim(questions)
        if new:
            with self._settled(new):
                images, prompts = _arguments(questions, new)
                self._settle(new, await self.judge.answer(images, prompts, **self.arguments))
        return [await asyncio.shield(asyncio.wrap_future(future)) for future in futures], len(new)

    def _claim(self, questions: list[Question]) -> tuple[list[Future], dict[tuple, tuple[int, Future]]]:
        """The answer of each question, to come or there, and those that the caller has to get: key -> question."""
        digests = {id(image): image_digest(image) for first, second, _ in questions for image in (first, second)}
        keys = [
            (self.judge.name, text, digests[id(first)], digests[id(second)], bool(self.arguments))
            for first, second, text in questions
        ]
        new = {}
        with self._lock:
            for index, key in enumerate(keys):
                if key not in self._answers:
                    self._answers[key] = Future()
                    new[key] = (index, self._answers[key])
                self._answers.move_to_end(key)
            futures = [self._answers[key] for key in keys]
            while len(self._answers) > _MAX_ANSWERS and next(iter(self._answers.values())).done():
                self._answers.popitem(last=False)
        return futures, new

    def _settle(self, new: dict[tuple, tuple[int, Future]], answers: list[Answer]) -> None:
        for (key, (_, future)), answer in zip(new.items(), answers, strict=True):
            if answer.score is None:
                self._forget(key)
            future.set_result(answer)

    @contextmanager
    def _settled(self, new: dict[tuple, tuple[int, Future]]):
        """Others may wait for what is asked: whatever happens, they hear of it."""
        try:
            yield
        except BaseException as error:
            problem = error if isinstance(error, Exception) else RuntimeError("The question was given up.")
            for key, (_, future) in new.items():
                if not future.done():
                    self._forget(key)
                    future.set_exception(problem)
            raise

    def _forget(self, key: tuple) -> None:
        with self._lock:
            self._answers.pop(key, None)


def _arguments(questions: list[Question], new: dict[tuple, tuple[int, Future]]) -> tuple[list, list[str]]:
    asked = [questions[index] for index, _ in new.values()]
    return [(first, second) for first, second, _ in asked], [text for *_, text in asked]
