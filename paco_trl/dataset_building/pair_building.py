# SPDX-License-Identifier: Apache-2.0
"""
Stage 5: build the dataset from annotations: pairs in two splits, held-out rankings, and a report.

The paper (Sec. 3.1 of https://arxiv.org/abs/2512.04784) says "clear positives and negatives"; see "Pairs" in
docs/build_dataset.md for our rule.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset, DatasetDict, Features
from tqdm.auto import tqdm

from ..data.columns import column_by_id, column_types
from ..data.pairs import make_pair, pair_features
from ..data.rankings import default_question
from ..utils.text import normalized
from .annotations import Annotation, Vote, keyed_hash, majority_vote
from .panels import instances_to_rankings


class Decision(NamedTuple):
    """Votes of all instances on a pair of panels."""

    first: str
    second: str
    prompt_id: str
    yes: int
    no: int


def vote_on_instances(annotations: Sequence[Annotation]) -> dict[str, Vote]:
    """Count the votes on each instance."""
    ranks: dict[str, list[tuple[int, ...]]] = {}
    for annotation in annotations:
        if annotation.ranks is not None:
            ranks.setdefault(annotation.instance, []).append(annotation.ranks)
    return {instance: majority_vote(orders) for instance, orders in ranks.items()}


def decide_pairs(
    instances: Sequence[Mapping[str, Any]], votes: Mapping[str, Vote], num_negatives: int = 1, seed: int = 0
) -> list[Decision]:
    """Sum the votes on each pair of panels."""
    decisions: dict[frozenset[str], Decision] = {}

    def add(row: Mapping[str, Any], index: int, yes: int, no: int) -> None:
        reference = row["reference"]
        candidate = row["candidates"][index]
        key = frozenset((reference, candidate))
        earlier = decisions.get(key, Decision(reference, candidate, row["prompt_id"], 0, 0))
        decisions[key] = earlier._replace(yes=earlier.yes + yes, no=earlier.no + no)

    for row in instances:
        if row["id"] not in votes:
            continue
        vote = votes[row["id"]]
        if vote.best is not None:
            firsts = sum(ranks[vote.best] == min(ranks) and ranks.count(min(ranks)) == 1 for ranks in vote.ranks)
            add(row, vote.best, firsts, 0)
        worst = sorted(vote.worst, key=lambda index: keyed_hash(seed, row["id"], index))[:num_negatives]
        for index in sorted(worst):
            add(row, index, 0, sum(ranks[index] == max(ranks) > min(ranks) for ranks in vote.ranks))
    return list(decisions.values())


def built_pair_features() -> Features:
    """Return the column types of built pairs."""
    lists = {"dimensions": ["string"], "panels": ["string"], "sha256": ["string"]}
    columns = column_types(group="string", category="string", **lists, votes={"yes": "int64", "no": "int64"})
    return Features({**column_types(id="string"), **pair_features(), **columns})


def pairs_dataset(decisions: Sequence[Decision], panels: Dataset, prompts: Dataset) -> Dataset:
    """Build pairs from decisions, without decisions that have as many votes for Yes as for No."""
    images = column_by_id(panels, "image")
    hashes = column_by_id(panels, "sha256")
    majorities = [decision for decision in decisions if decision.yes != decision.no]
    rows = {row["id"]: row for row in prompts.with_format(None)}
    questions = {name: default_question(rows[name]) for name in {decision.prompt_id for decision in majorities}}

    features = built_pair_features()
    pairs = []
    for first, second, prompt_id, yes, no in tqdm(majorities, desc="Making pairs", unit="pair"):
        prompt = rows[prompt_id]
        pair = make_pair(images[first], images[second], questions[prompt_id], yes > no)
        pair |= {
            "id": f"{first}~{second}",
            "group": prompt_id,
            "category": prompt.get("category"),
            "dimensions": prompt.get("dimensions") or [],
            "panels": [first, second],
            "sha256": [hashes[first], hashes[second]],
            "votes": {"yes": yes, "no": no},
        }
        pairs.append(pair)
    return Dataset.from_dict({name: [pair[name] for pair in pairs] for name in features}, features=features)


def build_pairs(
    instances: Dataset,
    panels: Dataset,
    prompts: Dataset,
    annotations: Sequence[Annotation],
    num_negatives: int = 1,
    test_size: float = 0.1,
    max_rankings: int | None = 3136,
    seed: int = 0,
) -> tuple[DatasetDict, Dataset | None, dict[str, Any]]:
    """
    Build pairs from annotated instances, split them by prompt, and hold out rankings as a benchmark.

    Args:
        instances, panels, prompts ([`~datasets.Dataset`]):
            Outputs of the earlier stages.
        annotations (`Sequence[Annotation]`):
            Annotations of one or several annotators.
        num_negatives (`int`, *optional*, defaults to `1`):
            Most inconsistent pairs per instance, if several candidates are tied as the worst.
        test_size (`float`, *optional*, defaults to `0.1`):
            Fraction of prompts to hold out. (The paper holds out 9 % of the instances, which share images.)
        max_rankings (`int`, *optional*, defaults to `3136`):
            Most held-out rankings (as in the paper), a random sample. If `None`, all.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the split and of all samples.

    Returns:
        `tuple[DatasetDict, Dataset | None, dict]`: the pairs, with `train` and, unless `test_size` is 0, `test`; the
        rankings of held-out prompts for which the majority gives a strict order, or `None`; and the report:

        - `instances`, and `votes`, the number of `ranked` instances and of `ordered` ones (with a strict order);
        - dropped pairs: `contradictions` (as many votes for Yes as for No), and `same_image_twice`;
        - `splits` (each with `pairs`, `consistent` and `prompts`) and `held_out_rankings`.
    """
    rows = list(instances.with_format(None))
    votes = vote_on_instances(annotations)
    order_by_instance = {name: vote.ranking for name, vote in votes.items() if vote.ranking is not None}
    hashes = column_by_id(panels, "sha256")
    all_decisions = decide_pairs(rows, votes, num_negatives, seed)
    # Pairs of the same image (of two flat grids, for example) would be wrong or trivial
    decisions = [pair for pair in all_decisions if hashes[pair.first] != hashes[pair.second]]
    pairs = pairs_dataset(decisions, panels, prompts)
    report = {
        "instances": len(rows),
        "votes": {"ranked": len(votes), "ordered": len(order_by_instance)},
        "contradictions": sum(pair.yes == pair.no > 0 for pair in decisions),
        "same_image_twice": len(all_decisions) - len(decisions),
    }
    if len(pairs) == 0:
        raise ValueError(f"{len(annotations)} annotations give no pairs: {report}. Rank more instances.")

    texts = column_by_id(prompts, "prompt")
    paired_prompts = set(pairs["group"][:])
    images: dict[str, set[str]] = {}
    for name, prompt_id in column_by_id(panels, "prompt_id").items():
        images.setdefault(prompt_id, set()).add(hashes[name])
    groups = connected_prompts({name: text for name, text in texts.items() if name in paired_prompts}, images)
    held_out = split_prompts(groups, test_size, seed)

    rows_by_split: dict[str, list[int]] = {"train": [], "test": []}
    for number, group in enumerate(pairs["group"][:]):
        rows_by_split["test" if group in held_out else "train"].append(number)
    splits = DatasetDict({name: pairs.select(numbers) for name, numbers in rows_by_split.items() if numbers})
    names = [row["id"] for row in rows if row["prompt_id"] in held_out and row["id"] in order_by_instance]
    names = sorted(names, key=lambda name: keyed_hash(seed, name))[:max_rankings]
    orders = {name: order_by_instance[name] for name in names}
    rankings = instances_to_rankings(instances, panels, prompts, orders) if orders else None

    report["splits"] = {
        name: {
            "pairs": len(split),
            "consistent": sum(vote["yes"] > vote["no"] for vote in split["votes"][:]),
            "prompts": len(set(split["group"][:])),
        }
        for name, split in splits.items()
    }
    report["held_out_rankings"] = len(orders)
    return splits, rankings, report


def connected_prompts(prompts: Mapping[str, str], images: Mapping[str, set[str]]) -> list[list[str]]:
    """Group prompts that must be in the same split, because they share a text or an image."""
    from scipy.cluster.hierarchy import DisjointSet

    groups = DisjointSet(prompts)
    first_prompt_with: dict[tuple[str, str], str] = {}
    for name, text in prompts.items():
        for content in [("text", normalized(text)), *(("image", image) for image in sorted(images.get(name, ())))]:
            groups.merge(first_prompt_with.setdefault(content, name), name)
    order = {name: number for number, name in enumerate(prompts)}
    sorted_groups = [sorted(group, key=order.__getitem__) for group in groups.subsets()]
    return sorted(sorted_groups, key=lambda group: order[group[0]])


def split_prompts(groups: list[list[str]], test_size: float, seed: int) -> set[str]:
    """Select the held-out prompts."""
    if not 0 <= test_size < 1:
        raise ValueError(f"`test_size` is {test_size}, but must be a fraction of the prompts, at least 0 and below 1.")
    total = sum(map(len, groups))
    if test_size == 0:
        return set()
    num_held_out = max(1, round(test_size * total))
    held_out: set[str] = set()
    for group in sorted(groups, key=lambda group: keyed_hash(seed, group[0])):
        if len(held_out) + len(group) <= min(num_held_out, total - 1):
            held_out.update(group)
    if not held_out:
        raise ValueError(
            f"`test_size` is {test_size} of {total} prompts, but all groups that share a text or image are larger. "
            "Generate more prompts, or set it to 0."
        )
    return held_out
