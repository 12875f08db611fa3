# SPDX-License-Identifier: Apache-2.0
"""Diversify prompts: select those that best represent all of them, no two of them nearly the same."""

import heapq
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.columns import check_is_dataset
from .text_embeddings import embed_texts


if TYPE_CHECKING:
    import numpy as np
    import scipy.sparse as sp
    from datasets import Dataset


# Similarities are integer ten-thousandths: their sums depend neither on the order nor on the last bits of a product,
# which change with the number of threads
_SCALE = 10_000
# Elements of a block of the similarity matrix: 64 MiB
_BLOCK_ELEMENTS = 2**24
_RANDOM_SEED = 0
# Cosine similarity from which a selected row represents another
_COVERAGE_THRESHOLD = 0.8


class Diversified(NamedTuple):
    """Selected rows, and how well they represent the rest."""

    indices: "np.ndarray"  # in the order of selection: the first m are the selection of m
    coverage: float  # fraction of all rows with a selected one at `coverage_threshold` or more
    coverage_of_first: float  # the same for as many first rows
    coverage_of_random: float  # the same for as many random rows, from a fixed seed
    num_duplicates: int  # rows left out because a selected one is at `duplicate_threshold` or more
    mean_similarity: float  # of a row to the selected one nearest to it
    min_similarity: float  # that of the row that is farthest from all selected ones


def diversify(
    embeddings: "np.ndarray",
    num_selected: int,
    duplicate_threshold: float = 0.95,
    num_neighbors: int = 32,
    coverage_threshold: float = _COVERAGE_THRESHOLD,
) -> Diversified:
    """Select rows of unit vectors (n, d) that cover all others, no two near-duplicates, see docs/build_dataset.md."""
    import numpy as np

    total = len(embeddings)
    _check_num_selected(num_selected, total)
    if not 0 < duplicate_threshold <= 1:
        raise ValueError(f"`duplicate_threshold` is {duplicate_threshold}, but must be in (0, 1].")
    graph = _neighbor_graph(embeddings, min(num_neighbors, total - 1))
    nearest = np.full(total, -_SCALE, dtype=np.int16)  # (n,) similarity to the selected row nearest to each
    is_open = np.ones(total, dtype=bool)  # (n,)
    selected: list[int] = []

    def gain(row: int) -> int:
        links = slice(graph.indptr[row], graph.indptr[row + 1])
        return int(np.maximum(graph.data[links] - np.maximum(nearest[graph.indices[links]], 0), 0).sum())

    # Lazy greedy: gains only shrink, so one that is still the largest after an update is the largest. Ties by row
    heap = [(-gain(row), row) for row in range(total)]
    heapq.heapify(heap)
    while len(selected) < num_selected:
        if not heap:
            raise ValueError(
                f"After {len(selected)} of {num_selected} rows all {total} are near-duplicates. Select fewer."
            )
        _, row = heapq.heappop(heap)
        if not is_open[row]:
            continue
        current = (-gain(row), row)
        if heap and current > heap[0]:
            heapq.heappush(heap, current)
            continue
        selected.append(row)
        similarities = _rounded(embeddings @ embeddings[row])  # (n,)
        similarities[row] = _SCALE
        np.maximum(nearest, similarities, out=nearest)
        is_open &= similarities < _threshold(duplicate_threshold)

    def coverage(similarities: "np.ndarray") -> float:
        return float((similarities >= _threshold(coverage_threshold)).mean())

    random_rows = np.random.default_rng(_RANDOM_SEED).permutation(total)[:num_selected]
    return Diversified(
        indices=np.array(selected),
        coverage=coverage(nearest),
        coverage_of_first=coverage(_nearest(embeddings, np.arange(num_selected))),
        coverage_of_random=coverage(_nearest(embeddings, random_rows)),
        num_duplicates=int(total - is_open.sum()) - len(selected),
        mean_similarity=float(nearest.mean()) / _SCALE,
        min_similarity=int(nearest.min()) / _SCALE,
    )


def diversify_prompts(
    dataset: "Dataset", model: str | Path, num_selected: int, duplicate_threshold: float = 0.95
) -> "tuple[Dataset, dict[str, Any]]":
    """
    Select image-set prompts that cover all others, no two of them near-duplicates, by greedy facility location.

    The theme and the texts of the panels are embedded, without the panel markers. A CLIP reads 77 tokens of it, which
    is the theme and little more; a sentence-embedding model reads all.

    Args:
        dataset ([`~datasets.Dataset`]):
            Image-set prompts.
        model (`str` or `Path`):
            Hub id or directory of a sentence-embedding model or a CLIP.
        num_selected (`int`):
            Number of prompts to select.
        duplicate_threshold (`float`, *optional*, defaults to `0.95`):
            Cosine similarity from which two prompts are near-duplicates, in (0, 1].

    Returns:
        `tuple[Dataset, dict]`: the selected rows, in the order of selection, and a report of their coverage.
    """
    from ..data.image_sets import check_image_set_columns

    check_is_dataset(dataset, "dataset")
    check_image_set_columns(dataset)
    _check_num_selected(num_selected, len(dataset))  # before anything is embedded
    names = [name for name in ("theme", "prompt", "panels") if name in dataset.column_names]
    rows = dataset.with_format(None).select_columns(names)
    texts = [" ".join([row["theme"], *row["panels"]]) if row.get("theme") else row["prompt"] for row in rows]
    embeddings, cut = embed_texts(model, texts)
    result = diversify(embeddings, num_selected, duplicate_threshold)
    report = {
        "prompts": len(dataset),
        "selected": num_selected,
        "model": str(model),
        "texts cut": cut,
        "duplicate threshold": duplicate_threshold,
        "near-duplicates left out": result.num_duplicates,
        "coverage threshold": _COVERAGE_THRESHOLD,
        "coverage": round(result.coverage, 4),
        "coverage of the first": round(result.coverage_of_first, 4),
        "coverage of random ones": round(result.coverage_of_random, 4),
        "mean similarity to the nearest selected": round(result.mean_similarity, 4),
        "smallest similarity to the nearest selected": round(result.min_similarity, 4),
    }
    return dataset.select(result.indices.tolist()), report


def _check_num_selected(num_selected: int, total: int) -> None:
    if not 1 <= num_selected <= total:
        raise ValueError(f"`num_selected` is {num_selected}, but must be between 1 and the number of rows, {total}.")


def _threshold(similarity: float) -> int:
    return math.ceil(similarity * _SCALE - 1e-6)


def _rounded(similarities: "np.ndarray") -> "np.ndarray":
    """Round to ten-thousandths, as int16, which numpy sorts in linear time."""
    import numpy as np

    return np.rint(similarities * np.float32(_SCALE)).astype(np.int16)


def _blocks(embeddings: "np.ndarray", columns: int):
    size = max(1, _BLOCK_ELEMENTS // columns)
    return ((start, embeddings[start : start + size]) for start in range(0, len(embeddings), size))


def _neighbor_graph(embeddings: "np.ndarray", num_neighbors: int) -> "sp.csr_matrix":
    """Compute the positive similarities of linked rows, in ten-thousandths; others add nothing to any gain."""
    import numpy as np
    import scipy.sparse as sp
    from tqdm.auto import tqdm

    total, size = len(embeddings), num_neighbors + 1  # a row is linked with itself too
    neighbors = np.zeros((total, size), dtype=np.int32)  # (n, k + 1)
    values = np.zeros((total, size), dtype=np.int32)  # (n, k + 1)
    with tqdm(total=total, desc="Linking prompts") as bar:
        for start, block in _blocks(embeddings, total):
            similarities = _rounded(block @ embeddings.T)  # (B, n)
            for row, similar in enumerate(similarities, start):
                similar[row] = 2 * _SCALE  # before all others, even before copies of it
                neighbors[row] = np.argsort(-similar, kind="stable")[:size]  # ties by row
                values[row] = similar[neighbors[row]]
                values[row, 0] = _SCALE
            bar.update(len(block))
    links = np.arange(0, neighbors.size + 1, size)
    graph = sp.csr_matrix((np.maximum(values, 0).ravel(), neighbors.ravel(), links), shape=(total, total))
    graph = graph.maximum(graph.T).tocsr()
    graph.eliminate_zeros()
    return graph


def _nearest(embeddings: "np.ndarray", rows: "np.ndarray") -> "np.ndarray":
    """Compute the similarity of each row to the nearest of some rows, in ten-thousandths."""
    import numpy as np

    chosen = embeddings[rows]  # (k, d)
    nearest = np.concatenate([_rounded(block @ chosen.T).max(axis=1) for _, block in _blocks(embeddings, len(rows))])
    nearest[rows] = _SCALE
    return nearest
