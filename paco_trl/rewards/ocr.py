# SPDX-License-Identifier: Apache-2.0
"""Can the text that an image should show be read?"""

from collections.abc import Callable
from unicodedata import normalize

import numpy as np
from PIL import Image

from ..utils.images import to_rgb
from .columns import column_of


class OcrReward:
    """
    Score how well a text can be read in an image: 1 minus the edits between the OCR result and the text, per
    character.

    In [0, 1]: 1 if the text is there letter by letter, 0 if nothing of it is. The lines that OCR finds, from top to
    bottom and left to right, are joined. Case, white space and line breaks are ignored. The text is compared with the
    best-fitting part of the result, see [`readability`]: other words in the image cost nothing, except those between
    the words of the text. Columns of text are read line by line across them: use the words of one panel. Unrelated
    words still share letters with the text, which scores about a fifth, and up to a half for short texts.

    The model is PP-OCR of [PaddleOCR](https://github.com/PaddlePaddle/PaddleOCR), for Chinese and English, in the
    package [rapidocr](https://github.com/RapidAI/RapidOCR), whose wheel contains the weights: nothing is downloaded.
    Both are under Apache-2.0. Compare scores of one version of rapidocr only. It requires `pip install
    "paco_trl[ocr]"`. Cost: it runs on the CPU, about 1 s for 512 x 512 pixels on two cores.
    """

    __name__ = "ocr"  # names TRL's metrics, `rewards/ocr/mean`
    needed_columns = ("text",)  # the trainer checks them before it loads a model
    model_name = "RapidOCR"  # for cards

    def __init__(self):
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ImportError('OcrReward requires `rapidocr` and onnxruntime: pip install "paco_trl[ocr]".') from error
        # Below "error" it logs its files, and each image without text
        self.engine: Callable = RapidOCR(params={"Global.log_level": "error"})

    def __call__(
        self, prompts: list[str], completions: list[Image.Image], text: list[str] | None = None, **kwargs
    ) -> list[float]:
        """Return one score per completion, in [0, 1], for the words of the column `text`."""
        text = column_of(text, "text", len(completions), "`OcrReward`")
        for index, words in enumerate(text):
            if not isinstance(words, str) or not _letters(words):
                raise ValueError(
                    f"`text` of completion {index} (prompt {prompts[index]!r}) is {words!r}, but the reward requires "
                    "words. Fill the column `text` in every row of the dataset, or leave this reward out."
                )
        images = [to_rgb(image, f"Completion {index}") for index, image in enumerate(completions)]
        return [readability(words, self._read(image)) for words, image in zip(text, images, strict=True)]

    def _read(self, image: Image.Image) -> str:
        bgr = np.ascontiguousarray(np.asarray(image)[:, :, ::-1])  # (height, width, 3), as OpenCV has it
        return "\n".join(self.engine(bgr).txts or ())


def readability(text: str, recognized: str) -> float:
    """Return 1 minus the smallest edit distance of a text and any part of the OCR result, per character."""
    expected, found = _letters(text), _letters(recognized)
    # Levenshtein distance of the best substring: https://en.wikipedia.org/wiki/Approximate_string_matching
    row = [0] * (len(found) + 1)
    for count, letter in enumerate(expected, start=1):
        above, row = row, [count]
        for place, other in enumerate(found, start=1):
            row.append(min(above[place - 1] + (letter != other), above[place] + 1, row[-1] + 1))
    return 1 - min(row) / len(expected)


def _letters(text: str) -> str:
    """Normalize a text: without white space, in lower case, full-width characters as usual ones."""
    return "".join(normalize("NFKC", text).lower().split())
