# SPDX-License-Identifier: Apache-2.0
"""Can the words be read that an image should show?"""

from unicodedata import normalize

import numpy as np
from PIL import Image

from ..utils.images import to_rgb


class OcrReward:
    """
    How well a text can be read in an image: 1 minus the edits from what OCR reads to the text, per character.

    In [0, 1]: 1 if the text is there letter by letter, 0 if nothing of it is. The lines that OCR reads, from the top to
    the bottom and from left to right, are joined. Upper and lower case, white space and line breaks make no difference.
    The text is compared with the stretch of what was read that fits it best, see [`readability`], so that other words
    in the image cost nothing; words that stand between those of the text do. Text in several columns is read line by
    line across them: ask for the words of one panel. Words that have nothing to do with the text still share letters
    with it, which earns about a fifth, and up to a half where the text is short.

    The model is PP-OCR of [PaddleOCR](https://github.com/PaddlePaddle/PaddleOCR), for Chinese and English, in the
    package [rapidocr](https://github.com/RapidAI/RapidOCR), whose wheel brings the weights: nothing is downloaded. Both
    are under Apache-2.0. Which PP-OCR it is depends on the version of rapidocr: compare scores of one version.

    Needs `pip install "paco_trl[ocr]"`. Cost: it runs on the CPU, about 1 s for 512 x 512 pixels on two cores.

    Example:

    ```python
    >>> from paco_trl.rewards import OcrReward

    >>> ocr = OcrReward()
    >>> ocr(prompts=["A shop with the sign 'Open'."], completions=[image], text=["Open"])
    [1.0]
    ```
    """

    def __init__(self):
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ImportError(
                'Reading text in images needs `rapidocr` and `onnxruntime`: pip install "paco_trl[ocr]".'
            ) from error
        self.__name__ = "ocr"  # TRL takes it for the metric names, `rewards/ocr/mean`
        self.needed_columns = ("text",)  # the trainer looks at it before it loads a model
        self.model_name = "RapidOCR"  # for cards
        # Below "error" it reports its files, and each image without text
        self.engine = RapidOCR(params={"Global.log_level": "error"})

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        text: list[str] | None = None,
        **kwargs,
    ) -> list[float]:
        """
        Score images.

        Args:
            prompts (`list[str]`):
                Prompts; named in an error.
            completions (`list[PIL.Image.Image]`):
                Images.
            text (`list[str]`):
                The words that must be readable, for each completion.

        Returns:
            `list[float]`: one score per completion, in [0, 1].

        Raises:
            ValueError: If `text` is missing, or that of a completion has no letters.
        """
        if text is None or len(text) != len(completions):
            found = "no `text`" if text is None else f"{len(text)} entries of `text`"
            raise ValueError(
                f"The words in an image are compared with those that must be readable, but there are {found} for "
                f"{len(completions)} completions. Fill the column `text` in the dataset."
            )
        for index, words in enumerate(text):
            if not isinstance(words, str) or not _letters(words):
                raise ValueError(
                    f"`text` of completion {index} (prompt {prompts[index]!r}) is {words!r}, but the reward needs words "
                    "to look for. Fill the column `text` in every row of the dataset, or leave this reward out."
                )
        images = [to_rgb(image, f"Completion {index}") for index, image in enumerate(completions)]
        return [readability(words, self._read(image)) for words, image in zip(text, images, strict=True)]

    def _read(self, image: Image.Image) -> str:
        bgr = np.ascontiguousarray(np.asarray(image)[:, :, ::-1])  # (height, width, 3), as OpenCV has it
        return "\n".join(self.engine(bgr).txts or ())


def readability(text: str, recognised: str) -> float:
    """
    1 minus the smallest Levenshtein distance of a text and any stretch of what was read, over the text's length.

    Both without white space, in lower case, and with characters that differ in width alone made one.

    Args:
        text (`str`):
            Words that must be readable; not empty.
        recognised (`str`):
            What was read.

    Returns:
        `float`: in [0, 1].
    """
    wanted, found = _letters(text), _letters(recognised)
    # Row by row of the table of distances. The stretch begins and ends anywhere: its first row is zero, and the
    # smallest value of the last row counts. https://en.wikipedia.org/wiki/Approximate_string_matching
    row = [0] * (len(found) + 1)
    for count, letter in enumerate(wanted, start=1):
        above, row = row, [count]
        for place, other in enumerate(found, start=1):
            row.append(min(above[place - 1] + (letter != other), above[place] + 1, row[-1] + 1))
    return 1 - min(row) / len(wanted)


def _letters(text: str) -> str:
    return "".join(normalize("NFKC", text).lower().split())
