# SPDX-License-Identifier: Apache-2.0
"""What a judge is: something that answers questions about pairs of images."""

from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple, Protocol

from PIL import Image


# An image in one of the forms that a judge takes
ImageSource = Image.Image | str | Path | bytes
ImagePair = tuple[ImageSource, ImageSource]
# What one question is about: a pair, or one image
ImageGroup = ImagePair | tuple[ImageSource]


class JudgeUnavailableError(RuntimeError):
    """A judge cannot be asked at all: it is down, refuses the key, or does not have the model. It stops a run."""


class Answer(NamedTuple):
    """
    What a judge says of a pair, or why it says nothing.

    Attributes:
        score (`float`, *optional*):
            P(Yes) / (P(Yes) + P(No)), `None` if there is none.
        reason (`str`, *optional*):
            Why there is none, in a few words.
    """

    score: float | None
    reason: str | None = None


class Judge(Protocol):
    """
    Scores pairs of images: [`~paco_trl.PaCoReward`] in the process, [`ServedJudge`] on a server, or any object with
    this method and a name. One that waits for a server has `answer` besides, as [`ServedJudge.answer`]: it is then asked
    while other images are drawn.

    Attributes:
        name (`str`):
            Name for reports.
    """

    name: str

    def score(self, images: list[ImagePair], prompts: list[str]) -> list[float | None]:
        """
        Scores pairs of images.

        Args:
            images (`list[tuple]`):
                Pairs.
            prompts (`list[str]`):
                Question for each pair.

        Returns:
            `list[float | None]`: score of each pair, for a vision-language model P(Yes) / (P(Yes) + P(No)). `None` for
            a pair that could not be scored.

        Raises:
            JudgeUnavailableError: the judge cannot be asked at all.
        """
        ...


def image_key(image: ImageSource) -> Hashable:
    """What makes two images the same without looking at them: the object, or the name."""
    return str(image) if isinstance(image, (str, Path)) else id(image)


def name_image(group: ImageGroup, place: int, index: int) -> str:
    """An image of a question, for errors: `Second image of pair 3`, or `Image 3` if the question is about one."""
    return f"Image {index}" if len(group) == 1 else f"{('First', 'Second')[place]} image of pair {index}"


def single_images(images: list[ImageSource]) -> list[tuple[ImageSource]]:
    """Make groups of one image, for questions about single images."""
    if not isinstance(images, (list, tuple)):
        raise ValueError(
            f"`images` is {type(images).__name__}, not a list of images. `score_images` takes several, "
            "`[image, other, ...]`; for one there is `[image]`."
        )
    return [(image,) for image in images]


def one_question_each(prompts: str | list[str], count: int, what: str) -> list[str]:
    """Give each of `count` things its question, from one for each or one for all."""
    if isinstance(prompts, str):
        return [prompts] * count
    if len(prompts) != count:
        raise ValueError(
            f"{len(prompts)} questions for {count} {what}: `prompts` must be one text for all, or one for each."
        )
    return list(prompts)
