# SPDX-License-Identifier: Apache-2.0
"""Queries to a served model until each question has a usable answer, with an early stop if no reply is usable."""

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from jinja2 import Environment, PackageLoader
from tqdm.auto import tqdm

from ..utils.chat import ChatEndpoint, ChatRequest, Reply
from ..utils.journals import Journal
from ..utils.text import shorten


logger = logging.getLogger(__name__)

TEMPLATES = Environment(loader=PackageLoader("paco_trl"))

SAME_PROMPT = "the same as an earlier prompt"
# Number of answers without a usable one after which to give up
_MAX_UNUSABLE = 24


def ask_in_rounds(
    endpoint: ChatEndpoint,
    journal: Journal,
    purpose: str,
    seed: int,
    max_attempts: int,
    target_counts: Mapping[Any, int],
    request: Callable[[Any, int], tuple[Any, int]],
    read: Callable[[Any, Reply, int], tuple[list, Counter[str]]],
    key_of: Callable[[Any, Any], str],
) -> tuple[dict[Any, list], dict[str, Any]]:
    """
    Request the number of texts in `target_counts` per name, in at most `max_attempts` rounds with different seeds.

    Replies are saved immediately, but used in the order of `target_counts`, so that the result does not depend on
    theirs.

    Args:
        endpoint, journal, purpose, seed, max_attempts:
            Language model; its saved replies; what the texts are, for messages; seed; number of rounds.
        target_counts (`Mapping[Any, int]`):
            Number of texts by name.
        request (`Callable[[Any, int], tuple[Any, int]]`):
            Function from a name and the number of its missing texts to the content of a question, and the most tokens
            of its answer.
        read (`Callable[[Any, Reply, int], tuple[list, Counter[str]]]`):
            Function from a name, a reply and the number of missing texts to the usable texts of the reply, and why
            others are not usable.
        key_of (`Callable[[Any, Any], str]`):
            Function from a name and a text to a key. Of texts with the same key, the first is taken.

    Returns:
        `tuple[dict[Any, list], dict[str, Any]]`: the texts by name, and a report on the replies.
    """
    replies: dict[Any, list[Reply]] = defaultdict(list)
    for record in journal.records:
        replies[record["name"]].append(Reply(*record["reply"]))
    has_usable = any(
        read(name, reply, count)[0] for name, count in target_counts.items() for reply in replies[name][:max_attempts]
    )

    def build_request(name: Any, attempt: int, count: int) -> ChatRequest:
        content, max_tokens = request(name, count)
        key = random.Random(f"{seed}/{name}/{attempt}").getrandbits(31)
        return ChatRequest([{"role": "user", "content": content}], key, max_tokens, temperature=1.0)

    def no_usable_error() -> ValueError:
        causes = sum(
            (read(name, reply, count)[1] for name, count in target_counts.items() for reply in replies[name]),
            Counter(),
        )
        name = next(name for name in target_counts if replies[name])
        text, reason = replies[name][0]
        return ValueError(
            f"None of {sum(map(len, replies.values()))} answers of {endpoint.name} can be used as {purpose} "
            f"({_format_causes(causes)}). The answer to {name!r}: {reason or shorten(text)}. Serve a model that "
            f"follows instructions, without thinking aloud; then delete {journal.path}, or choose another directory."
        )

    texts: dict[Any, list] = {name: [] for name in target_counts}
    num_requests = 0
    rejected = Counter[str]()
    missing_causes = Counter[str]()
    keys = set[str]()
    for attempt in range(max_attempts):
        remaining_counts = {
            name: count - len(texts[name]) for name, count in target_counts.items() if count > len(texts[name])
        }
        unsent = [name for name in remaining_counts if len(replies[name]) <= attempt]
        if unsent:
            endpoint.check()
            progress = {"total": len(unsent), "desc": f"Writing {purpose} (attempt {attempt + 1} of {max_attempts})"}
            requests = (build_request(name, attempt, remaining_counts[name]) for name in unsent)
            with closing(endpoint.ask_all(requests)) as answers, tqdm(**progress) as bar:
                for index, reply in answers:
                    name = unsent[index]
                    journal.append({"name": name, "reply": list(reply)})
                    replies[name].append(reply)
                    bar.update()
                    has_usable = has_usable or bool(read(name, reply, remaining_counts[name])[0])
                    if not has_usable and sum(map(len, replies.values())) >= _MAX_UNUSABLE:
                        raise no_usable_error()
        missing_causes = Counter()
        for name, count in remaining_counts.items():
            usable, causes = read(name, replies[name][attempt], count)
            missing_causes += causes
            for text in usable:
                if (key := key_of(name, text)) in keys:
                    missing_causes[SAME_PROMPT] += 1
                else:
                    texts[name].append(text)
                    keys.add(key)
        num_requests += len(remaining_counts)
        rejected += missing_causes
    if not has_usable:
        raise no_usable_error()
    if missing_causes:
        logger.warning(f"Some {purpose} could not be written and are left out: {_format_causes(missing_causes)}.")
    counts = {"rejected": dict(rejected.most_common()), "left out": dict(missing_causes.most_common())}
    return texts, {"requests": num_requests, **counts}


def _format_causes(causes: Counter[str]) -> str:
    return "; ".join(f"{count} x {cause}" for cause, count in causes.most_common())


def cause_of(reply: Reply) -> str:
    """Return why a reply has no text, without details, so that equal causes can be counted."""
    return str(reply.reason).partition(" (")[0]
