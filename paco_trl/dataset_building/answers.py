# SPDX-License-Identifier: Apache-2.0
"""Queries to a served model until each question has a usable answer, with an early stop if no reply is usable."""

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Protocol

from jinja2 import Environment, PackageLoader
from tqdm.auto import tqdm

from ..utils.chat import ChatEndpoint, ChatRequest, Reply
from ..utils.journals import Journal
from ..utils.text import shorten


logger = logging.getLogger(__name__)

TEMPLATES = Environment(loader=PackageLoader("paco_trl"))

SAME_PROMPT = "the same as an earlier prompt"
# Number of unusable answers, without any usable one, after which to give up
_MAX_UNUSABLE = 24


class WritingTask(Protocol):
    """
    Protocol of texts that a model is asked to write, some number of them by each name.

    Attributes:
        purpose (`str`): What the texts are, for messages.
        target_counts (`Mapping[Any, int]`): Number of texts by name.
    """

    purpose: str
    target_counts: Mapping[Any, int]

    def request(self, name: Any, count: int) -> tuple[Any, int]:
        """Return the content of a question for `count` missing texts, and the most tokens of its answer."""
        ...

    def read(self, name: Any, reply: Reply, count: int) -> tuple[list, Counter[str]]:
        """Return the usable texts of a reply to a request of `count`, and why other texts are not usable."""
        ...

    def key_of(self, name: Any, text: Any) -> str:
        """Return the key of a text. Of texts with the same key, the first is taken."""
        ...


def ask_in_rounds(
    task: WritingTask, endpoint: ChatEndpoint, journal: Journal, seed: int, max_attempts: int
) -> tuple[dict[Any, list], dict[str, Any]]:
    """
    Request the texts of a task, in at most `max_attempts` rounds with different seeds.

    Replies are saved in the journal immediately, but used in the order of `target_counts`, so that the result does not
    depend on the order of the replies.

    Returns:
        `tuple[dict[Any, list], dict[str, Any]]`: the texts by name, and a report on the replies.
    """
    replies: dict[Any, list[Reply]] = defaultdict(list)
    for record in journal.records:
        replies[record["name"]].append(Reply(*record["reply"]))

    def build_request(name: Any, attempt: int, count: int) -> ChatRequest:
        content, max_tokens = task.request(name, count)
        key = random.Random(f"{seed}/{name}/{attempt}").getrandbits(31)
        return ChatRequest([{"role": "user", "content": content}], key, max_tokens, temperature=1.0)

    def no_usable_error(causes: Counter[str]) -> ValueError:
        name = next(name for name in task.target_counts if replies[name])
        text, reason = replies[name][0]
        return ValueError(
            f"None of {sum(map(len, replies.values()))} answers of {endpoint.name} can be used as {task.purpose} "
            f"({_format_causes(causes)}). The answer to {name!r}: {reason or shorten(text)}. Serve a model that "
            f"follows instructions, without thinking aloud; then delete {journal.path}, or choose another directory."
        )

    texts: dict[Any, list] = {name: [] for name in task.target_counts}
    num_requests = 0
    has_usable = False
    rejected = Counter[str]()
    keys = set[str]()
    for attempt in range(max_attempts):
        missing_counts = {
            name: count - len(texts[name]) for name, count in task.target_counts.items() if count > len(texts[name])
        }
        readings = {
            name: task.read(name, replies[name][attempt], count)
            for name, count in missing_counts.items()
            if len(replies[name]) > attempt
        }
        has_usable = has_usable or any(usable for usable, _ in readings.values())
        if unsent := [name for name in missing_counts if name not in readings]:
            endpoint.check()
            progress = {
                "total": len(unsent),
                "desc": f"Writing {task.purpose} (attempt {attempt + 1} of {max_attempts})",
            }
            requests = (build_request(name, attempt, missing_counts[name]) for name in unsent)
            with closing(endpoint.ask_all(requests)) as answers, tqdm(**progress) as bar:
                for index, reply in answers:
                    name = unsent[index]
                    journal.append({"name": name, "reply": list(reply)})
                    replies[name].append(reply)
                    bar.update()
                    readings[name] = task.read(name, reply, missing_counts[name])
                    has_usable = has_usable or bool(readings[name][0])
                    if not has_usable and sum(map(len, replies.values())) >= _MAX_UNUSABLE:
                        raise no_usable_error(sum((causes for _, causes in readings.values()), rejected))
        missing_causes = Counter[str]()
        for name in missing_counts:
            usable, causes = readings[name]
            missing_causes += causes
            for text in usable:
                if (key := task.key_of(name, text)) in keys:
                    missing_causes[SAME_PROMPT] += 1
                else:
                    texts[name].append(text)
                    keys.add(key)
        num_requests += len(missing_counts)
        rejected += missing_causes
    if not has_usable:
        raise no_usable_error(rejected)
    if missing_causes:
        logger.warning(f"Some {task.purpose} could not be written and are left out: {_format_causes(missing_causes)}.")
    counts = {"rejected": dict(rejected.most_common()), "left out": dict(missing_causes.most_common())}
    return texts, {"requests": num_requests, **counts}


def _format_causes(causes: Counter[str]) -> str:
    return "; ".join(f"{count} x {cause}" for cause, count in causes.most_common())


def cause_of(reply: Reply) -> str:
    """Return why a reply has no text, without details, so that equal causes can be counted."""
    return str(reply.reason).partition(" (")[0]
