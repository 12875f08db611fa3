# SPDX-License-Identifier: Apache-2.0
"""
From annotations to pairs.

The rule, where the paper (Sec. 3.1 of https://arxiv.org/abs/2512.04784) says "clear positives and negatives":

1. In each instance the annotators vote on each pair of candidates; a pair without a majority is a tie.
2. The reference and a candidate are **consistent** if the majority puts the candidate before each other one,
   **inconsistent** if it puts it before none and behind at least one. Of several such candidates (they are tied)
   `num_negatives` are taken.
3. Two panels meet in several instances. In those where they are clearly consistent, each annotator who put the
   candidate alone at the top is a vote for Yes; where they are clearly inconsistent, each who put it at the bottom one
   for No. More votes decide; as many of both contradict each other, and the pair is dropped.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm.auto import tqdm

from ..data.columns import column_types
from ..data.pairs import make_pair, pair_features
from ..data.rankings import default_question
from .annotations import Annotation
from .split import keyed_hash
from .voting import Vote, majority_vote


if TYPE_CHECKING:
    from datasets import Dataset, Features


class Decision(NamedTuple):
    """What all instances say of two panels."""

    first: str
    second: str
    prompt_id: str
    yes: int
    no: int


def vote_on_instances(annotations: Sequence[Annotation]) -> dict[str, tuple[Vote, list[tuple[int, ...]]]]:
    """Count the votes on each instance."""
    ranks: dict[str, list[tuple[int, ...]]] = {}
    for annotation in annotations:
        if annotation.ranks is not None:
            ranks.setdefault(annotation.instance, []).append(annotation.ranks)
    return {instance: (majority_vote(given), given) for instance, given in ranks.items()}


def _votes_for_yes(given: Sequence[Sequence[int]], index: int) -> int:
    """Count the annotators who put a candidate alone at the top."""
    return sum(ranks[index] == min(ranks) and ranks.count(ranks[index]) == 1 for ranks in map(list, given))


def _votes_for_no(given: Sequence[Sequence[int]], index: int) -> int:
    """Count the annotators who put a candidate at the bottom, with or without others."""
    return sum(ranks[index] == max(ranks) > min(ranks) for ranks in given)


def decide_pairs(
    instances: Sequence[Mapping[str, Any]],
    votes: Mapping[str, tuple[Vote, Sequence[Sequence[int]]]],
    num_negatives: int = 1,
    seed: int = 0,
) -> list[Decision]:
    """Add up what the instances say of each two panels, by the rule of this module."""
    found: dict[tuple[str, str], Decision] = {}

    def add(row: Mapping[str, Any], index: int, yes: int, no: int) -> None:
        reference, candidate = row["reference"], row["candidates"][index]
        key = (min(reference, candidate), max(reference, candidate))
        before = found.get(key, Decision(reference, candidate, row["prompt_id"], 0, 0))
        found[key] = before._replace(yes=before.yes + yes, no=before.no + no)

    for row in instances:
        if row["id"] not in votes:
            continue
        vote, given = votes[row["id"]]
        if vote.best is not None:
            add(row, vote.best, _votes_for_yes(given, vote.best), 0)
        worst = sorted(vote.worst, key=lambda index: keyed_hash(seed, row["id"], index))[:num_negatives]
        for index in sorted(worst):
            add(row, index, 0, _votes_for_no(given, index))
    return list(found.values())


def built_pair_features() -> "Features":
    """Give the column types of built pairs."""
    from datasets import Features

    lists = {"dimensions": ["string"], "panels": ["string"], "sha256": ["string"]}
    ours = column_types(group="string", category="string", **lists, votes={"yes": "int64", "no": "int64"})
    return Features({**column_types(id="string"), **pair_features(), **ours})


def pairs_dataset(decisions: Sequence[Decision], panels: "Dataset", prompts: "Dataset") -> "Dataset":
    """Make the pairs of decisions; those with as many votes for Yes as for No are left out."""
    from datasets import Dataset, Image

    stored = panels.cast_column("image", Image(decode=False))
    row_of = {name: row for row, name in enumerate(stored["id"][:])}
    sha_of = dict(zip(stored["id"][:], stored["sha256"][:], strict=True))
    decided = [decision for decision in decisions if decision.yes != decision.no]
    names = {name for decision in decided for name in (decision.first, decision.second)}
    images = {name: stored[row_of[name]]["image"] for name in names}
    rows = {row["id"]: row for row in prompts.with_format(None)}
    questions = {name: default_question(rows[name]) for name in {decision.prompt_id for decision in decided}}

    features = built_pair_features()
    columns: dict[str, list[Any]] = {name: [] for name in features}
    for decision in tqdm(decided, desc="Making pairs", unit="pair"):
        prompt = rows[decision.prompt_id]
        pair = make_pair(
            images[decision.first], images[decision.second], questions[decision.prompt_id], decision.yes > decision.no
        )
        pair |= {
            "id": f"{decision.first}~{decision.second}",
            "group": decision.prompt_id,
            "category": prompt.get("category"),
            "dimensions": prompt.get("dimensions") or [],
            "panels": [decision.first, decision.second],
            "sha256": [sha_of[decision.first], sha_of[decision.second]],
            "votes": {"yes": decision.yes, "no": decision.no},
        }
        for name in columns:
            columns[name].append(pair[name])
    return Dataset.from_dict(columns, features=features)
