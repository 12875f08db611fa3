# SPDX-License-Identifier: Apache-2.0
"""Judges: objects that answer questions about pairs of images."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from PIL import Image

from ..utils.images import check_text


# Forms of an image that judges take
ImageSource = Image.Image | str | Path | bytes
ImagePair = tuple[ImageSource, ImageSource]
# What is read from an answer: P(Yes), the log-probabilities of tokens, or a text
Score = TypeVar("Score")
# Images of one question: a pair, or one image
ImageGroup = ImagePair | tuple[ImageSource]
# Why a question has no score: the server refuses it, does not answer it, or answers what cannot be read, or Yes and No
# are not among the likeliest tokens
NO_SCORE = ("refused", "unavailable", "unreadable", "undecided")
# Log-probabilities that a judge reads: the most that OpenAI's API and vLLM return
TOP_LOGPROBS = 20


class JudgeUnavailableError(RuntimeError):
    """A judge cannot be queried at all: it is down, refuses the key, or lacks the model. It stops a run."""


class Answer(NamedTuple, Generic[Score]):
    """Score of a pair by a judge, P(Yes) / (P(Yes) + P(No)), or why there is none: one of `NO_SCORE`."""

    score: Score | None
    reason: str | None = None


class Judge(Protocol):
    """
    Protocol of a judge: [`~paco_trl.PaCoReward`] in the process, [`ServedJudge`] on a server, or any object with this
    method and a name. If it also has `answer`, as [`ServedJudge.answer`], it is queried while other images are
    generated.
    """

    name: str  # for reports

    def score(self, images: list[ImagePair], prompts: list[str]) -> Sequence[float | None]:
        """
        Score pairs of images, with a question for each: P(Yes) / (P(Yes) + P(No)) for a vision-language model, `None`
        for a pair that could not be scored. Raise a `JudgeUnavailableError` if the judge cannot be queried at all.
        """
        ...


def image_key(image: ImageSource) -> Hashable:
    """Return what identifies an image without reading it: the object, or its name."""
    return str(image) if isinstance(image, (str, Path)) else id(image)


def named_images(group: ImageGroup, index: int) -> list[tuple[Hashable, ImageSource, str]]:
    """Return the key of each image of a question, the image, and its name for errors: `Second image of pair 3`."""
    names = ("First image of pair", "Second image of pair") if len(group) == 2 else ("Image",)
    return [(image_key(image), image, f"{name} {index}") for image, name in zip(group, names, strict=True)]


def single_images(images: list[ImageSource]) -> list[tuple[ImageSource]]:
    """Make groups of one image, for questions about single images."""
    if not isinstance(images, (list, tuple)):
        raise ValueError(f"`images` is {type(images).__name__}, not a list of images. Pass `[image]` for one.")
    return [(image,) for image in images]


def check_pairs(images: list[ImagePair]) -> list[ImagePair]:
    """Check that each item is a pair, and make it a tuple."""
    for index, pair in enumerate(images):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            what = f"{len(pair)} images" if isinstance(pair, (list, tuple)) else type(pair).__name__
            raise ValueError(
                f"`images[{index}]` is {what}, not a pair. Pass a list of pairs, `[(first, second), ...]`; for larger "
                "sets, use `score_sets` of `PaCoReward`."
            )
    return [(first, second) for first, second in images]


def both_orders(pairs: list[tuple]) -> list[tuple]:
    """Return each pair followed by its reverse."""
    return [order for first, second in pairs for order in ((first, second), (second, first))]


def one_question_each(
    prompts: str | list[str], count: int, what: str, find_control: Callable[[str], list[str]] = lambda text: []
) -> list[str]:
    """Repeat a single question `count` times, or check that there is one for each; refuse control tokens in them."""
    prompts = [prompts] * count if isinstance(prompts, str) else list(prompts)
    if len(prompts) != count:
        raise ValueError(f"{len(prompts)} questions for {count} {what}: `prompts` must be one text for all or each.")
    for index, prompt in enumerate(prompts):
        check_text(prompt, find_control(prompt), f"`prompts[{index}]`")
    return prompts
