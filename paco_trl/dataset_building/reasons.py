# SPDX-License-Identifier: Apache-2.0
"""Stage 6: write the reasons of labeled pairs with a served model that sees the images and is given the label."""

import functools
import json
import re
from collections import Counter
from typing import Any

from datasets import Dataset

from ..data.pairs import check_pair_columns, content_text, decision_of, pair_features
from ..utils.chat import ChatEndpoint, Reply
from ..utils.files import read_template
from ..utils.stage_folder import StageFolder
from .answers import TEMPLATES, ask_in_rounds, cause_of
from .prompts import DIMENSIONS


# Visible attributes, by kind. Reasons that name none of them could be those of any pair
VISIBLE_ATTRIBUTES: dict[str, str] = json.loads(read_template("visible_attributes.json"))

NO_LABEL = "does not begin with the label"
TWO_LABELS = "says Yes or No twice"
LENGTH = "another length"
NOTHING_VISIBLE = "names nothing that one can see"
GIVEN_LABEL = "speaks of a given answer"
CONTROL_TOKEN = "a control token"

_VISIBLE = re.compile(rf"\b(?:{'|'.join(' '.join(VISIBLE_ATTRIBUTES.values()).split())})\b", re.IGNORECASE)
# A label may also be seen in an image, on a bottle: "the label on", "the label reads" are let through
_GIVEN_LABEL = re.compile("|".join(read_template("given_label.txt").splitlines()), re.IGNORECASE)
_CONTROL_TOKEN = re.compile(r"<\|\w+\|>")

# Pixels of a patch of Qwen2-VL and Qwen2.5-VL, for `load_image`: the model sees the pixels that training sees
_PATCH_SIZE = 14
# Tokens of a word, at the most usual: room for a little more than the longest answer, so that too long ones are known
_TOKENS_PER_WORD = 3
# Encoded images that are kept, about 1 MB each: enough for the pairs under way
_NUM_KEPT = 64


def write_reasons(
    pairs: Dataset,
    endpoint: ChatEndpoint,
    folder: StageFolder,
    max_attempts: int = 3,
    min_words: int = 15,
    max_words: int = 200,
    seed: int = 0,
) -> Dataset:
    """
    Write the reasons for the label of each pair with a vision-language model.

    The model gets both images, the question, the label and the dimensions of the pair. Its answer must begin with the
    label ("Yes." or "No."), name something visible (a word of `VISIBLE_ATTRIBUTES`), have a number of words in the
    range, and not reveal that the label was given. What fails is requested again with another seed, and left out and
    counted after `max_attempts`. Interrupted runs resume automatically.

    Images are sent as PNG, with the pixels that the trainer sees.

    Args:
        pairs ([`~datasets.Dataset`]):
            Pairs with a column `id` and, where known, `dimensions` (all of them otherwise). Reasons are replaced.
        endpoint ([`ChatEndpoint`]):
            The model.
        folder ([`StageFolder`]):
            Directory of the stage. Its settings name the model, the pairs and the other arguments.
        max_attempts (`int`, *optional*, defaults to `3`):
            How often the reasons of a pair are requested.
        min_words (`int`, *optional*, defaults to `15`), max_words (`int`, *optional*, defaults to `200`):
            Range of the number of words of the reasons.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the requests.

    Returns:
        [`~datasets.Dataset`]: the pairs that have reasons, in their order, with the same columns and completions
        `"Yes. <reasons>"`; also saved in `folder`.

    Raises:
        ValueError: If no answer can be used; the error has an example.
        EndpointUnavailableError: If the endpoint cannot be reached. Earlier answers are saved.
    """
    if folder.is_done:
        return folder.load()
    if max_attempts < 1 or not 1 <= min_words <= max_words:
        raise ValueError(f"`max_attempts` is {max_attempts}, the words {min_words} to {max_words}: not from 1 up.")
    check_pair_columns(pairs, "pairs")
    ids = pairs.with_format(None)["id"][:]
    if len(set(ids)) < len(ids):
        raise ValueError(f"The `id` {Counter(ids).most_common(1)[0][0]!r} of `pairs` is there twice.")
    names = [name for name in ("prompt", "completion", "dimensions") if name in pairs.column_names]
    rows = dict(zip(ids, pairs.with_format(None).select_columns(names), strict=True))
    for row in rows.values():
        row["label"], row["dimensions"] = decision_of(row["completion"]), row.get("dimensions") or list(DIMENSIONS)
    if unknown := {name for row in rows.values() for name in row["dimensions"]} - set(DIMENSIONS):
        raise ValueError(f"`pairs` has the dimensions {sorted(unknown)}, but there are only {list(DIMENSIONS)}.")
    numbers = {name: number for number, name in enumerate(ids)}
    stored = pairs.with_format("arrow").select_columns(["images"])  # as they are stored: paths, or bytes
    encode = functools.lru_cache(_NUM_KEPT)(_encode)  # an image is in many pairs

    def request(name: str, _: int) -> tuple[list[dict[str, Any]], int]:
        images = stored[numbers[name]]["images"][0].as_py()
        urls = [encode(image["path"], image["bytes"]) for image in images]
        text = TEMPLATES.get_template("write_reasons.txt.jinja").render(
            prompt=content_text(rows[name]["prompt"][-1]["content"]) or "",
            label=rows[name]["label"],
            meanings={dimension: DIMENSIONS[dimension] for dimension in rows[name]["dimensions"]},
            fewest=min(2 * min_words, max_words),
            most=max(3 * max_words // 4, min_words),
        )
        shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return [*shown, {"type": "text", "text": text}], _TOKENS_PER_WORD * max_words

    def read(name: str, reply: Reply, _: int) -> tuple[list[str], Counter[str]]:
        if reply.text is None:
            cause: str | None = cause_of(reply)
        else:
            cause = check_reasons(reply.text, rows[name]["label"], min_words, max_words)
        return ([], Counter([cause])) if cause else ([str(reply.text).strip()], Counter())

    journal, wanted = folder.journal("reasons"), dict.fromkeys(ids, 1)
    texts_of_pairs, report = ask_in_rounds(
        endpoint, journal, "reasons", seed, max_attempts, wanted, request, read, lambda name, _: name
    )
    texts = {name: text for name, of_pair in texts_of_pairs.items() for text in of_pair}
    completions = [[{"role": "assistant", "content": texts[name]}] for name in ids if name in texts]
    # Images are neither decoded nor, if given by path, read
    reasoned = pairs.with_format(None).select([row for row, name in enumerate(ids) if name in texts])
    reasoned = reasoned.remove_columns("completion")
    reasoned = reasoned.add_column("completion", completions, feature=pair_features()["completion"])
    report = {"pairs": len(ids), "with reasons": len(texts), **report}
    folder.finish(reasoned.select_columns(pairs.column_names), report)
    return folder.load()


def check_reasons(answer: str, decision: str, min_words: int = 15, max_words: int = 200) -> str | None:
    """Describe what is wrong with the reasons for a label; `None` if nothing is."""
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
    # Higher levels of compression take longer than they save in sending
    return data_url(image, "png", compress_level=1)
