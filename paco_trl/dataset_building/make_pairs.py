# SPDX-License-Identifier: Apache-2.0
"""
Convert annotations to pairs.

The rule, where the paper (Sec. 3.1 of https://arxiv.org/abs/2512.04784) says "clear positives and negatives":

1. In each instance the annotators vote on each pair of candidates; a pair without a majority is a tie.
2. The reference and a candidate are **consistent** if the majority ranks the candidate above each other one,
   **inconsistent** if it ranks it above none and below at least one. Of several (tied) inconsistent candidates
   `num_negatives` are taken.
3. Two panels can meet in several instances. Where they are consistent, each annotator who ranks the candidate alone at
   the top is a vote for Yes; where they are inconsistent, each who ranks it at the bottom is a vote for No. The
   majority decides, and a tie drops the pair.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm.auto import tqdm

from ..data.columns import by_id, column_types
from ..data.pairs import make_pair, pair_features
from ..data.rankings import default_question
from .annotations import Annotation
from .split import keyed_hash
from .voting import Vote, majority_vote


if TYPE_CHECKING:
    from datasets import Dataset, Features


class Decision(NamedTuple):
    """Votes of all instances on two panels."""

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


def decide_pairs(
    instances: Sequence[Mapping[str, Any]],
    votes: Mapping[str, tuple[Vote, Sequence[Sequence[int]]]],
    num_negatives: int = 1,
    seed: int = 0,
) -> list[Decision]:
    """Add up the votes on each pair of panels, by the rule of this module."""
    found: dict[frozenset[str], Decision] = {}

    def add(row: Mapping[str, Any], index: int, yes: int, no: int) -> None:
        reference, candidate = row["reference"], row["candidates"][index]
        key = frozenset((reference, candidate))
        earlier = found.get(key, Decision(reference, candidate, row["prompt_id"], 0, 0))
        found[key] = earlier._replace(yes=earlier.yes + yes, no=earlier.no + no)

    for row in instances:
        if row["id"] not in votes:
            continue
        vote, given = votes[row["id"]]
        if vote.best is not None:
            add(
                row,
                vote.best,
                sum(ranks[vote.best] == min(ranks) and ranks.count(min(ranks)) == 1 for ranks in given),
                0,
            )
        worst = sorted(vote.worst, key=lambda index: keyed_hash(seed, row["id"], index))[:num_negatives]
        for index in sorted(worst):
            add(row, index, 0, sum(ranks[index] == max(ranks) > min(ranks) for ranks in given))
    return list(found.values())


def built_pair_features() -> "Features":
    """Return the column types of built pairs."""
    from datasets import Features

    lists = {"dimensions": ["string"], "panels": ["string"], "sha256": ["string"]}
    ours = column_types(group="string", category="string", **lists, votes={"yes": "int64", "no": "int64"})
    return Features({**column_types(id="string"), **pair_features(), **ours})


def pairs_dataset(decisions: Sequence[Decision], panels: "Dataset", prompts: "Dataset") -> "Dataset":
    """Build the pairs of decisions; those with as many votes for Yes as for No are left out."""
    from datasets import Dataset

    images, sha_of = by_id(panels, "image"), by_id(panels, "sha256")
    decided = [decision for decision in decisions if decision.yes != decision.no]
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
