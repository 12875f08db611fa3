# SPDX-License-Identifier: Apache-2.0
"""
Questions for the pairwise judge and for benchmarks.

P(Yes) is only comparable between answers to the same wording, so the trainer, rewards and evaluations share these
questions. They are copied from the published code (https://github.com/X-GenGroup/PaCo-RL), with its uneven wording
(`"Yes" and "No" first`). The paper (https://arxiv.org/abs/2512.04784) always prints `"Yes" or "No"`; it is not known
which wording the published weights were trained on. Texts are inserted unchanged; an empty one raises `ValueError`.
"""

import yaml

from ..utils.files import read_template


_QUESTIONS: dict[str, str] = yaml.safe_load(read_template("questions.yaml"))


def question(kind: str, **texts: str) -> str:
    """Insert texts into a question template; `kind` is a key of questions.yaml."""
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"`{name}` is {text!r}, so there is nothing to ask. Pass a text that is not empty.")
    return _QUESTIONS[kind].format(**texts)


def theme_question(theme: str) -> str:
    """Ask whether two panels of an image set with this theme are consistent: the published reward's default."""
    return question("theme", theme=theme)


def criterion_question(criterion: str) -> str:
    """Ask whether two images meet a criterion, such as those of T2IS-Bench: the published reward's question."""
    return question("criterion", criterion=criterion)


def reference_question(role: str) -> str:
    """Ask whether the second image keeps the identity, style or logic of a reference: our criterion."""
    return criterion_question(_QUESTIONS[f"reference_{role}"])


def edit_consistency_question(instruction: str) -> str:
    """Ask the published reward's question: whether an edit (second image) keeps what its instruction does not name."""
    return question("edit_consistency", instruction=instruction)


def edit_following_question(instruction: str) -> str:
    """Ask whether an edit (second image) follows its instruction: the published reward's question."""
    return question("edit_following", instruction=instruction)


def plain_question() -> str:
    """Ask whether two images are consistent, without a theme: the published ConsistencyRank evaluation's default."""
    return question("plain")


def t2is_bench_question(criterion: str) -> str:
    """Ask whether two images meet a criterion, without reasons, in the wording of T2IS-Bench's evaluation."""
    return question("t2is_bench", criterion=criterion)


def shows_question(text: str) -> str:
    """Ask whether one image shows a text: the default of [VQAScore](https://huggingface.co/papers/2404.01291)."""
    return question("shows", text=text)
