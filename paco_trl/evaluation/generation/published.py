# SPDX-License-Identifier: Apache-2.0
"""
The figures that the paper publishes on T2IS-Bench and GEdit-Bench, as data, to be shown beside a measurement.

None of them was measured here. They belong under a heading of their own that says so, and never into one table, one
mean or one model-index with figures that were.
"""

from dataclasses import dataclass

from ...utils.paper import PAPER


@dataclass(frozen=True)
class PublishedTable:
    """
    A table of published figures.

    Attributes:
        title (`str`):
            What it shows.
        columns (`tuple[str, ...]`):
            Head; the first column names the systems.
        rows (`tuple[tuple[str | float, ...], ...]`):
            Name of a system, then its figures.
        source (`str`):
            Where they were published.
        remarks (`tuple[str, ...]`):
            What a reader has to know before comparing anything with them.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    source: str
    remarks: tuple[str, ...] = ()


_SOURCE = f"{PAPER['title']} (arXiv {PAPER['id']})"

_T2IS_COLUMNS = (
    "system",
    "aesthetics",
    "entity",
    "attribute",
    "relation",
    "identity",
    "style",
    "logic",
    "average",
)
_T2IS_REMARKS = (
    "These are four of the ten rows of the table.",
    "The scorer of aesthetics is named neither in the paper nor in the code of the benchmark: the column, and with it "
    "the average, can be compared with a measurement only if its scorer gives 0.533 for Gemini & FLUX.1-dev.",
    "Gemini & FLUX.1-dev draws the panels one by one, from prompts that a language model wrote. It is not the untuned "
    "FLUX.1-dev that draws the whole set from one prompt, which the paper does not list and which a tuned model has to "
    "be compared with.",
    "Against Gemini & FLUX.1-dev the tuned model gains in consistency and loses in prompt alignment: the mean of "
    "entity, attribute and relation falls from 0.789 to 0.728.",
    "Whether the table is of all 596 prompts of the benchmark, or of a part of them, is not published.",
)

T2IS_QWEN = PublishedTable(
    title="T2IS-Bench, judge of consistency Qwen2.5-VL-7B-Instruct",
    columns=_T2IS_COLUMNS,
    rows=(
        ("Gemini & FLUX.1-dev", 0.533, 0.791, 0.790, 0.786, 0.249, 0.302, 0.328, 0.490),
        ("AutoT2IS", 0.520, 0.729, 0.756, 0.743, 0.359, 0.414, 0.356, 0.515),
        ("FLUX.1-dev + PaCo-Reward-7B", 0.555, 0.721, 0.732, 0.731, 0.508, 0.549, 0.422, 0.576),
        ("Seedream 4.0", 0.551, 0.813, 0.800, 0.805, 0.486, 0.479, 0.458, 0.589),
    ),
    source=f"{_SOURCE}, Table 3",
    remarks=(
        *_T2IS_REMARKS,
        "The averages follow 0.2 aesthetics + 0.3 alignment + 0.5 consistency within 0.0005. The weights are not "
        "published; they were found from the table.",
    ),
)
T2IS_GEMMA = PublishedTable(
    title="T2IS-Bench, judge of consistency Gemma-3-4B-IT",
    columns=_T2IS_COLUMNS,
    rows=(
        ("Gemini & FLUX.1-dev", 0.533, 0.791, 0.790, 0.786, 0.636, 0.619, 0.754, 0.659),
        ("AutoT2IS", 0.520, 0.729, 0.756, 0.743, 0.723, 0.737, 0.794, 0.686),
        ("FLUX.1-dev + PaCo-Reward-7B", 0.555, 0.721, 0.732, 0.731, 0.837, 0.867, 0.859, 0.757),
        ("Seedream 4.0", 0.551, 0.813, 0.800, 0.805, 0.809, 0.763, 0.862, 0.758),
    ),
    source=f"{_SOURCE}, Table 3",
    remarks=(
        *_T2IS_REMARKS,
        "The averages of Gemini & FLUX.1-dev and of AutoT2IS do not follow 0.2 aesthetics + 0.3 alignment + 0.5 "
        "consistency, as those of FLUX.1-dev + PaCo-Reward-7B and Seedream 4.0 do: the formula gives 0.678 and 0.702, "
        "published are 0.659 and 0.686. Do not compare the one kind with the other.",
    ),
)
T2IS_ABLATION = PublishedTable(
    title="T2IS-Bench, what the parts of the method contribute, judge of consistency Qwen2.5-VL-7B-Instruct",
    columns=("trained", "aesthetics", "prompt following", "visual consistency", "time"),
    rows=(
        ("in full", 0.555, 0.728, 0.493, "6.0 h"),
        ("without resolution decoupling", 0.542, 0.698, 0.452, "12.0 h"),
        ("without log-taming", 0.471, 0.616, 0.557, "6.0 h"),
    ),
    source=f"{_SOURCE}, Table 5",
    remarks=(
        "Without log-taming the consistency is highest and everything else lowest: the sets are near-identical panels "
        "of low quality. Consistency alone rewards copies.",
        "The scorer of aesthetics is not named.",
    ),
)
GEDIT = PublishedTable(
    title="GEdit-Bench, English instructions",
    columns=("system", "overall"),
    rows=(
        ("FLUX.1-Kontext-dev", 5.956),
        ("PaCo-FLUX.1-Kontext-dev", 6.469),
        ("Qwen-Image-Edit", 7.223),
        ("PaCo-QwenImage-Edit", 7.325),
    ),
    source=_SOURCE,
    remarks=(
        "Which judge gave the scores is not known here. The benchmark's own code asks GPT-4.1 or Qwen2.5-VL-72B, which "
        "give different numbers for the same images: scores of two judges cannot be compared, nor can those of two "
        "versions of a served one.",
    ),
)

_TABLES = {"T2IS-Bench": (T2IS_QWEN, T2IS_GEMMA, T2IS_ABLATION), "GEdit-Bench": (GEDIT,)}


def published_tables(benchmark: str) -> tuple[PublishedTable, ...]:
    """
    Gives the published figures of a benchmark.

    Args:
        benchmark (`str`):
            `"T2IS-Bench"` or `"GEdit-Bench"`.

    Returns:
        `tuple[PublishedTable, ...]`.

    Raises:
        ValueError: If the paper has no figures of it.

    Example:

    ```python
    >>> published_tables("GEdit-Bench")[0].rows[0]
    ('FLUX.1-Kontext-dev', 5.956)
    ```
    """
    if benchmark not in _TABLES:
        raise ValueError(f"There are no published figures of {benchmark!r}. There are of: {', '.join(_TABLES)}.")
    return _TABLES[benchmark]
