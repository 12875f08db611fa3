# SPDX-License-Identifier: Apache-2.0
"""Stage 6: write the reasons of labeled pairs with a served model that sees the images and is given the label."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.pairs import check_pair_columns, content_text, decision_of, pair_features
from ..utils.chat import ChatEndpoint, ChatRequest, Reply
from ..utils.files import read_template
from ..utils.stage_folder import StageFolder
from .answers import Answers, cause_of, causes_text, sampled_request
from .prompts import DIMENSIONS, TEMPLATES


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)

# Visible attributes, by kind. Reasons that name none of them could be those of any pair
VISIBLE_ATTRIBUTES: dict[str, str] = json.loads(read_template("visible_attributes.json"))

NO_LABEL = "does not begin with the label"
TWO_LABELS = "says Yes or No twice"
LENGTH = "another length"
NOTHING_VISIBLE = "names nothing that one can see"
GIVEN = "speaks of a given answer"
CONTROL_TOKEN = "a control token"

_VISIBLE = re.compile(rf"\b(?:{'|'.join(' '.join(VISIBLE_ATTRIBUTES.values()).split())})\b", re.IGNORECASE)
# A label may also be seen in an image, on a bottle: "the label on", "the label reads" are let through
_GIVEN = re.compile("|".join(read_template("given_label.txt").splitlines()), re.IGNORECASE)
_CONTROL_TOKEN = re.compile(r"<\|\w+\|>")

# Answers after which it is clear that there will be no usable one
_TRIED_ENOUGH = 24
# Pixels of a patch of Qwen2-VL and Qwen2.5-VL, for `load_image`: the model sees the pixels that training sees
_PATCH_SIZE = 14
# Tokens of a word, at the most usual: room for a little more than the longest answer, so that too long ones are known
_TOKENS_PER_WORD = 3


class _Question(NamedTuple):
    """Pair to query; its images are read when it is sent."""

    id: str
    images: list[dict[str, Any]]
    prompt: str
    decision: str
    dimensions: list[str]


def write_reasons(
    pairs: "Dataset",
    endpoint: ChatEndpoint,
    folder: StageFolder,
    max_attempts: int = 3,
    min_words: int = 15,
    max_words: int = 200,
    seed: int = 0,
) -> "Dataset":
    """
    Write the reasons for the label of each pair with a vision-language model.

    The model gets both images, the question, the label and the dimensions of the pair. Its answer must begin with the
    label ("Yes." or "No."), name something visible (a word of `VISIBLE_ATTRIBUTES`), have a number of words in the
    range, and not reveal that the label was given. What fails is requested again with another seed, and left out and
    counted after `max_attempts`. Interrupted runs resume automatically.

    Images are sent as PNG, with the pixels that the trainer sees. The last ones stay encoded, so pairs of the same
    prompt should be next to each other.

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
        raise ValueError(
            f"`max_attempts` is {max_attempts}, the words are {min_words} to {max_words}: not in order from 1."
        )
    ids = _checked_ids(pairs)
    labels = {row.id: row.decision for row in _questions(pairs, ids, with_images=False)}
    journal = folder.journal("reasons")
    answers = Answers(endpoint, journal, "reasons", _TRIED_ENOUGH)
    problems: dict[str, list[str | None]] = {name: [] for name in ids}  # of each reply
    texts: dict[str, str] = {}

    def add(name: str, reply: Reply) -> bool:
        if reply.text is None:
            problem = cause_of(reply)
        elif (problem := check_reasons(reply.text, labels[name], min_words, max_words)) is None:
            texts[name] = reply.text.strip()
        problems[name].append(problem)
        answers.add(name, reply, problem is None, Counter([problem] if problem else []))
        return is_done(name)

    def is_done(name: str) -> bool:
        return name in texts or len(problems[name]) >= max_attempts

    for record in journal.records:
        if record["id"] in labels:  # others are of pairs that have changed since
            add(record["id"], Reply(*record["reply"]))
    # Enough for the pairs under way and a failed pair, which is sent again at once. About 1 MB each
    encode = _encoder(4 * endpoint.max_concurrency + 32)

    def request(question: _Question) -> ChatRequest:
        content = _content(question, [encode(question.id, image) for image in question.images], min_words, max_words)
        key = f"{seed}/{question.id}/{len(problems[question.id])}"
        return sampled_request(content, key, _TOKENS_PER_WORD * max_words)

    def save(question: _Question, reply: Reply) -> bool:
        journal.append({"id": question.id, "reply": list(reply)})
        return add(question.id, reply)

    waiting = {name for name in ids if not is_done(name)}
    if waiting:
        questions = (question for question in _questions(pairs, ids) if question.id in waiting)
        progress = {"total": len(ids), "initial": len(ids) - len(waiting), "desc": "Writing reasons"}
        answers.collect(questions, request, save, **progress)
    rows = [row for row, name in enumerate(ids) if name in texts]
    if not rows:
        raise answers.none_usable()
    completions = [[{"role": "assistant", "content": texts[ids[row]]}] for row in rows]
    rejected = Counter(problem for causes in problems.values() for problem in causes if problem)
    dropped = Counter(causes[-1] for causes in problems.values() if causes[-1])
    report = {
        "pairs": len(ids),
        "with reasons": len(rows),
        "requests": answers.count,
        "rejected": dict(rejected.most_common()),
        "left out": dict(dropped.most_common()),
    }
    if dropped:
        logger.warning(f"{len(rows)} of {len(ids)} pairs have reasons. Left out: {causes_text(dropped)}.")
    # Images are neither decoded nor, if given by path, read
    reasoned = pairs.with_format(None).select(rows).remove_columns("completion")
    reasoned = reasoned.add_column("completion", completions, feature=pair_features()["completion"])
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
    if _GIVEN.search(reasons):
        return GIVEN
    if not _VISIBLE.search(reasons):
        return NOTHING_VISIBLE
    return None


def _checked_ids(pairs: "Dataset") -> list[str]:
    check_pair_columns(pairs, "pairs")
    if "id" not in pairs.column_names:
        raise ValueError(f"`pairs` has no column `id`, by which answers are saved, only {pairs.column_names}.")
    ids = pairs.with_format(None)["id"][:]
    if len(set(ids)) < len(ids):
        raise ValueError(f"The `id` {Counter(ids).most_common(1)[0][0]!r} of `pairs` is there twice.")
    return ids


def _questions(pairs: "Dataset", ids: Sequence[str], with_images: bool = True) -> Iterator[_Question]:
    columns = ["prompt", "completion", *(["dimensions"] if "dimensions" in pairs.column_names else [])]
    columns += ["images"] if with_images else []
    # As Arrow tables, which have the images as stored, paths or bytes: only those that are sent are opened
    tables = pairs.with_format("arrow").select_columns(columns).iter(batch_size=32)
    for name, row in zip(ids, (row for table in tables for row in table.to_pylist()), strict=True):
        dimensions = row.get("dimensions") or list(DIMENSIONS)
        unknown = [dimension for dimension in dimensions if dimension not in DIMENSIONS]
        if unknown:
            raise ValueError(f"Pair {name!r} has the dimensions {unknown}, but there are only {list(DIMENSIONS)}.")
        prompt = content_text(row["prompt"][-1]["content"]) or ""
        yield _Question(name, row.get("images", []), prompt, decision_of(row["completion"]), dimensions)


def _content(question: _Question, images: list[str], min_words: int, max_words: int) -> list[dict[str, Any]]:
    fewest, most = min(2 * min_words, max_words), max(3 * max_words // 4, min_words)
    template = TEMPLATES.get_template("write_reasons.txt.jinja")
    text = template.render(question=question, meanings=DIMENSIONS, fewest=fewest, most=most)
    return [*({"type": "image_url", "image_url": {"url": url}} for url in images), {"type": "text", "text": text}]


def _encoder(size: int) -> Callable[[str, Mapping[str, Any]], str]:
    """Return a function that encodes an image as a data URL, and stores the last ones."""
    from ..utils.images import data_url, load_image

    urls: dict[str, str] = {}  # the oldest first

    def encode(pair: str, image: Mapping[str, Any]) -> str:
        content = image.get("bytes")
        key = image["path"] if content is None else hashlib.sha256(content).hexdigest()
        url = urls.pop(key, None)
        if url is None:
            # Higher levels of compression take longer than they save in sending
            url = data_url(load_image(image, _PATCH_SIZE, f"An image of pair {pair!r}"), "png", compress_level=1)
            while len(urls) >= size:
                del urls[next(iter(urls))]
        urls[key] = url
        return url

    return encode
