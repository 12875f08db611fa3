# SPDX-License-Identifier: Apache-2.0
"""
Questions of the pairwise judge, and of benchmarks.

P(Yes) is comparable only between answers to the same words, so trainer, rewards and evaluation take them from here.
The strings are those of the published code (https://github.com/X-GenGroup/PaCo-RL), uneven wording (`"Yes" and "No"
first`) included. The paper (https://arxiv.org/abs/2512.04784) prints `"Yes" or "No"` in all; which of the two the
published weights were trained on is not known. Texts are inserted unchanged; an empty one raises `ValueError`.
"""

_EDIT_COMPARISON = "Compare the edited image (second) with the original image (first)."
_EDIT_ANSWER = "Answer 'Yes' or 'No' first, then provide detailed reasons."
_CONSISTENCY = (
    "the two images maintain consistency in terms of style, logic and identity? "
    'Answer "Yes" and "No" first, and then provide detailed reasons.'
)


def _filled(name: str, text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"`{name}` is {text!r}, which makes no question. Give a text that is not empty.")
    return text


def theme_question(theme: str) -> str:
    """Ask whether two panels of an image set with this theme are consistent: the published reward's default."""
    return f'Given two subfigures generated based on the theme: "{_filled("theme", theme)}", do {_CONSISTENCY}'


def criterion_question(criterion: str) -> str:
    """Ask whether two images meet a criterion, such as those of T2IS-Bench: the published reward's question."""
    return (
        f"Do images meet the following criteria? {_filled('criterion', criterion)} "
        "Please answer Yes or No first, then provide detailed reasons."
    )


def edit_consistency_question(instruction: str) -> str:
    """Ask whether an edit (second image) keeps all that its instruction does not name: the published reward's."""
    return (
        f"{_EDIT_COMPARISON} Instruction: '{_filled('instruction', instruction)}'. Except for the parts that are "
        "intentionally changed according to the instruction, does the edited image remain consistent with the original "
        f"in style, logic, and identity? {_EDIT_ANSWER}"
    )


def edit_following_question(instruction: str) -> str:
    """Ask whether an edit (second image) follows its instruction: the published reward's question."""
    return (
        f"{_EDIT_COMPARISON} Instruction: '{_filled('instruction', instruction)}'. Does the edited image accurately "
        f"follow this instruction? {_EDIT_ANSWER}"
    )


def plain_question() -> str:
    """Ask whether two images are consistent, without a theme: the published ConsistencyRank evaluation's default."""
    return f"Do {_CONSISTENCY}"


def t2is_bench_question(criterion: str) -> str:
    """Ask whether two images meet a criterion, in the words of T2IS-Bench's own evaluation, without reasons."""
    return f"Do images meet the following criteria? {_filled('criterion', criterion)} Please answer Yes or No."


def edit_reward_bench_following_question(instruction: str) -> str:
    """Ask whether an edit follows its instruction, in the words of the published evaluation on EditReward-Bench."""
    return (
        f"Given two images after an edit with instruction '{_filled('instruction', instruction)}', is the edit following "
        "the instruction well? Answer 'Yes' or 'No' only."
    )


def edit_reward_bench_consistency_question(instruction: str) -> str:
    """Ask whether an edit is consistent with its source, as in the published evaluation on EditReward-Bench."""
    return (
        f"Given two images after an edit with instruction '{_filled('instruction', instruction)}', do they maintain "
        "consistency in terms of style, logic and identity? Answer 'Yes' or 'No' only."
    )


def shows_question(text: str) -> str:
    """Ask whether one image shows a text: the default of [VQAScore](https://huggingface.co/papers/2404.01291)."""
    return f'Does this figure show "{_filled("text", text)}"? Please answer yes or no.'
