# SPDX-License-Identifier: Apache-2.0
"""What a judge is: something that answers questions about pairs of images."""

from pathlib import Path
from typing import NamedTuple, Protocol

from PIL import Image


# An image in one of the forms that a judge takes
ImageSource = Image.Image | str | Path | bytes
ImagePair = tuple[ImageSource, ImageSource]


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
