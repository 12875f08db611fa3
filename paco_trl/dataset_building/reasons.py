# SPDX-License-Identifier: Apache-2.0
"""Stage 6: write reasons for labeled pairs with a served model that gets the images and the label."""

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from ..data.pairs import check_pair_columns, content_text, decision_of, pair_features
from ..utils.chat import ChatEndpoint, Reply
from ..utils.files import read_template
from ..utils.stage_folder import StageFolder
from .answers import TEMPLATES, ask_in_rounds, cause_of
from .prompt_writing import DIMENSIONS


# Words for visible attributes, by type. Reasons without such a word would fit any pair
VISIBLE_ATTRIBUTES: dict[str, str] = json.loads(read_template("visible_attributes.json"))

NO_LABEL = "does not begin with the label"
TWO_LABELS = "says Yes or No twice"
LENGTH = "another length"
NOTHING_VISIBLE = "names nothing that one can see"
GIVEN_LABEL = "speaks of a given answer"
CONTROL_TOKEN = "a control token"

_VISIBLE = re.compile(rf"\b(?:{'|'.join(' '.join(VISIBLE_ATTRIBUTES.values()).split())})\b", re.IGNORECASE)
# Allows "the label on" and "the label reads", since an image may show a label, on a bottle for example
_GIVEN_LABEL = re.compile("|".join(read_template("given_label.txt").splitlines()), re.IGNORECASE)
_CONTROL_TOKEN = re.compile(r"<\|\w+\|>")

# Patch size of Qwen2-VL and Qwen2.5-VL for `load_image`, so that the model sees the same pixels as in training
_PATCH_SIZE = 14
# Generous limit of tokens per word, so that answers that are too long can be detected
_TOKENS_PER_WORD = 3
# Cached encoded images, about 1 MB each: enough for concurrent requests
_CACHE_SIZE = 64


def write_reasons(
    pairs: Dataset,
    endpoint: ChatEndpoint,
    stage: StageFolder,
    max_attempts: int = 3,
    min_words: int = 15,
    max_words: int = 200,
    seed: int = 0,
) -> Dataset:
    """
    Write reasons for the label of each pair with a vision-language model.

    The model gets both images, the question, the label and the dimensions of the pair. Its answer must begin with the
    label ("Yes." or "No."), name something visible (a word of `VISIBLE_ATTRIBUTES`), have an allowed number of words,
    and not reveal that the label was given. Failures are requested again with another seed, and left out and counted
    after `max_attempts`. Interrupted runs resume automatically.

    Images are sent as PNG, with the same pixels as in training.

    Args:
        pairs ([`~datasets.Dataset`]):
            Pairs with `id` and, optionally, `dimensions` (by default all). Existing reasons are replaced.
        endpoint ([`ChatEndpoint`]):
            Vision-language model.
        stage ([`StageFolder`]):
            Directory of the stage. Its settings should include the model, the pairs and the other arguments.
        max_attempts (`int`, *optional*, defaults to `3`):
            Attempts per pair.
        min_words (`int`, *optional*, defaults to `15`), max_words (`int`, *optional*, defaults to `200`):
            Allowed number of words.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the requests.

    Returns:
        [`~datasets.Dataset`]: the pairs with reasons, in their order, with the same columns and completions
        `"Yes. <reasons>"`. Also saved in `stage`.

    Raises:
        ValueError: If no answer is usable. The error has an example.
        EndpointUnavailableError: If the endpoint cannot be reached. Earlier answers are kept.
    """
    if stage.is_done:
        return stage.load()
    if max_attempts < 1 or not 1 <= min_words <= max_words:
        raise ValueError(
            f"`max_attempts` is {max_attempts} and the words {min_words} to {max_words}, but both must be at least 1."
        )
    check_pair_columns(pairs, "pairs")
    ids = pairs.with_format(None)["id"][:]
    if len(set(ids)) < len(ids):
        raise ValueError(f"The `id` {Counter(ids).most_common(1)[0][0]!r} of `pairs` occurs twice. Make ids unique.")
    names = [name for name in ("prompt", "completion", "dimensions") if name in pairs.column_names]
    rows = dict(zip(ids, pairs.with_format(None).select_columns(names), strict=True))
    for row in rows.values():
        row["label"] = decision_of(row["completion"])
        row["dimensions"] = row.get("dimensions") or list(DIMENSIONS)
    if unknown := {name for row in rows.values() for name in row["dimensions"]} - set(DIMENSIONS):
        raise ValueError(f"`pairs` has the dimensions {sorted(unknown)}, but must only have {list(DIMENSIONS)}.")
    task = _ReasonTask(pairs, rows, min_words, max_words)
    texts_by_pair, report = ask_in_rounds(task, endpoint, stage.journal("reasons"), seed, max_attempts)
    texts = {name: text for name, pair_texts in texts_by_pair.items() for text in pair_texts}
    completions = [[{"role": "assistant", "content": texts[name]}] for name in ids if name in texts]
    # Does not decode images, nor read images that are stored as paths
    pairs_with_reasons = pairs.with_format(None).select([row for row, name in enumerate(ids) if name in texts])
    pairs_with_reasons = pairs_with_reasons.remove_columns("completion")
    pairs_with_reasons = pairs_with_reasons.add_column(
        "completion", completions, feature=pair_features()["completion"]
    )
    report = {"pairs": len(ids), "with reasons": len(texts), **report}
    stage.finish(pairs_with_reasons.select_columns(pairs.column_names), report)
    return stage.load()


class _ReasonTask:
    """Reasons to write, by the `id` of their pair."""

    purpose = "reasons"

    def __init__(self, pairs: Dataset, rows: dict[str, dict[str, Any]], min_words: int, max_words: int):
        self.target_counts: Mapping[Any, int] = dict.fromkeys(rows, 1)
        self._rows, self._min_words, self._max_words = rows, min_words, max_words
        self._numbers = {name: number for number, name in enumerate(rows)}
        self._arrow_images = pairs.with_format("arrow").select_columns(["images"])  # stored paths or bytes
        self._encode = functools.lru_cache(_CACHE_SIZE)(_encode)  # pairs share images

    def request(self, name: str, count: int) -> tuple[list[dict[str, Any]], int]:
        row = self._rows[name]
        images = self._arrow_images[self._numbers[name]]["images"][0].as_py()
        urls = [self._encode(image["path"], image["bytes"]) for image in images]
        text = TEMPLATES.get_template("write_reasons.txt.jinja").render(
            prompt=content_text(row["prompt"][-1]["content"]) or "",
            label=row["label"],
            meanings={dimension: DIMENSIONS[dimension] for dimension in row["dimensions"]},
            fewest=min(2 * self._min_words, self._max_words),
            most=max(3 * self._max_words // 4, self._min_words),
        )
        image_content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return [*image_content, {"type": "text", "text": text}], _TOKENS_PER_WORD * self._max_words

    def read(self, name: str, reply: Reply, count: int) -> tuple[list[str], Counter[str]]:
        if reply.text is None:
            return [], Counter([cause_of(reply)])
        cause = check_reasons(reply.text, self._rows[name]["label"], self._min_words, self._max_words)
        return ([], Counter([cause])) if cause else ([reply.text.strip()], Counter())

    def key_of(self, name: str, text: str) -> str:
        return name


def check_reasons(answer: str, decision: str, min_words: int = 15, max_words: int = 200) -> str | None:
    """Return what is wrong with the reasons for a label, or `None` if they are valid."""
    label, _, reasons = answer.strip().partition(".")
    if label != decision or not reasons[:1].isspace():
        return NO_LABEL
    reasons = reasons.strip()
    if re.match(r"\W*(?:yes|no)\b", reasons, re.IGNORECASE):
        return TWO_LABELS
    if _CONTROL_TOKEN.search(reasons):
        return CONTROL_TOKEN
    if not min_words <= len(reasons.split()) <= max_words:
        return LENGTH
    if _GIVEN_LABEL.search(reasons):
        return GIVEN_LABEL
    if not _VISIBLE.search(reasons):
        return NOTHING_VISIBLE
    return None


def _encode(path: str | None, content: bytes | None) -> str:
    """Encode an image as a data URL."""
    from ..utils.images import data_url
    from ..utils.vision_language import load_image

    image = load_image({"path": path, "bytes": content}, _PATCH_SIZE, "An image of a pair")
    # Higher compression levels take more time than they save
    return data_url(image, "png", compress_level=1)
