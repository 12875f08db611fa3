# SPDX-License-Identifier: Apache-2.0
"""Diversify prompts: select those that best represent all of them, no two of them nearly the same."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

from ..data.image_sets import check_image_set_columns
from ..utils.names import check_model_name


logger = logging.getLogger(__name__)

# Similarities are integer ten-thousandths: their sums depend neither on the order nor on the last bits of a product,
# which change with the number of threads
_SCALE = 10_000
_RANDOM_SEED = 0
# Cosine similarity from which a selected row represents another
_COVERAGE_THRESHOLD = 0.8


class Diversified(NamedTuple):
    """Selected rows, and how well they represent the rest."""

    indices: np.ndarray  # in the order of selection: the first m are the selection of m
    coverage: float  # fraction of all rows with a selected one at `coverage_threshold` or more
    coverage_of_random: float  # the same for as many random rows, from a fixed seed
    num_duplicates: int  # rows left out because a selected one is at `duplicate_threshold` or more


def diversify(
    embeddings: np.ndarray,
    num_selected: int,
    duplicate_threshold: float = 0.95,
    num_neighbors: int = 32,
    coverage_threshold: float = _COVERAGE_THRESHOLD,
) -> Diversified:
    """Select rows of unit vectors (n, d) that cover all others, no two near-duplicates; (n, n) numbers are in memory."""
    total = len(embeddings)
    if not 1 <= num_selected <= total:
        raise ValueError(f"`num_selected` is {num_selected}, but must be between 1 and the number of rows, {total}.")
    if not 0 < duplicate_threshold <= 1:
        raise ValueError(f"`duplicate_threshold` is {duplicate_threshold}, but must be in (0, 1].")
    gains = _linked(_similarities(embeddings, range(total)), num_neighbors)  # (n, n)

    nearest = np.full(total, -_SCALE, dtype=np.int16)  # (n,) similarity to the selected row nearest to each
    added = gains.sum(axis=0, dtype=np.int64)  # (n,) what each row would add to the selection
    is_open = np.ones(total, dtype=bool)  # (n,)
    selected: list[int] = []
    while len(selected) < num_selected:
        if not is_open.any():
            raise ValueError(f"After {len(selected)} of {num_selected} rows all are near-duplicates. Select fewer.")
        row = int(np.where(is_open, added, -1).argmax())  # ties by row
        selected.append(row)
        similar = _similarities(embeddings, [row])[:, 0]  # (n,)
        is_open &= similar < _threshold(duplicate_threshold)
        before, nearest = nearest, np.maximum(nearest, similar)
        changed = nearest > np.maximum(before, 0)  # (n,)
        for links, old, new in zip(gains[changed], before[changed], nearest[changed], strict=True):
            added -= np.maximum(links - max(old, 0), 0) - np.maximum(links - new, 0)

    def coverage(nearest: np.ndarray) -> float:
        return float((nearest >= _threshold(coverage_threshold)).mean())

    random_rows = np.random.default_rng(_RANDOM_SEED).permutation(total)[:num_selected]
    return Diversified(
        indices=np.array(selected),
        coverage=coverage(nearest),
        coverage_of_random=coverage(_similarities(embeddings, random_rows).max(axis=1)),
        num_duplicates=int(total - is_open.sum()) - len(selected),
    )


def _threshold(similarity: float) -> int:
    return math.ceil(similarity * _SCALE - 1e-6)


def _similarities(embeddings: np.ndarray, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the similarities (n, len(rows)) of all rows to some."""
    similarities = np.rint(embeddings @ embeddings[rows].T * np.float32(_SCALE)).astype(np.int16)
    similarities[rows, np.arange(len(rows))] = _SCALE
    return similarities


def _linked(similarities: np.ndarray, num_neighbors: int) -> np.ndarray:
    """Return the positive similarities of rows of which one is among the nearest of the other, else 0."""
    is_linked = np.eye(len(similarities), dtype=bool)  # (n, n)
    for row, similar in enumerate(similarities):
        order = np.argsort(-similar, kind="stable")  # ties by row
        is_linked[row, order[order != row][:num_neighbors]] = True
    return np.where(is_linked | is_linked.T, np.maximum(similarities, 0), 0).astype(np.int16)


def embed_texts(model: str | Path, texts: list[str]) -> np.ndarray:
    """Embed texts as unit vectors (len(texts), D), float32."""
    from accelerate import PartialState

    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError('Embeddings need sentence-transformers: pip install "paco_trl[embeddings]".') from error
    check_model_name(model)
    # Pickled weights are not loaded, and no code of the model is run
    options = {"dtype": "float32", "use_safetensors": True}
    encoder = SentenceTransformer(str(model), device=str(PartialState().device), model_kwargs=options)
    limit = encoder.max_seq_length or math.inf
    if cut := sum(len(ids) > limit for ids in encoder.tokenizer(texts, verbose=False)["input_ids"]):
        logger.warning(f"{cut} of {len(texts)} texts are longer than the {limit} tokens that {model} reads.")
    embeddings = encoder.encode(texts, batch_size=64, normalize_embeddings=True, show_progress_bar=True)
    if not np.isfinite(embeddings).all():
        raise ValueError(f"Embeddings of {model} are not finite. Check its weights.")
    return embeddings


def diversify_prompts(
    dataset: Dataset, model: str | Path, num_selected: int, duplicate_threshold: float = 0.95
) -> tuple[Dataset, dict[str, Any]]:
    """
    Select image-set prompts that cover all others, no two of them near-duplicates, by greedy facility location.

    The theme and the texts of the panels are embedded, without the panel markers.

    Args:
        dataset ([`~datasets.Dataset`]):
            Image-set prompts.
        model (`str` or `Path`):
            Hub id or directory of a model that sentence-transformers loads (the extra `embeddings`).
        num_selected (`int`):
            Number of prompts to select.
        duplicate_threshold (`float`, *optional*, defaults to `0.95`):
            Cosine similarity from which two prompts are near-duplicates, in (0, 1].

    Returns:
        `tuple[Dataset, dict]`: the selected rows, in the order of selection, and a report of their coverage.
    """
    check_image_set_columns(dataset)
    names = [name for name in ("theme", "prompt", "panels") if name in dataset.column_names]
    rows = dataset.with_format(None).select_columns(names)
    texts = [" ".join([row["theme"], *row["panels"]]) if row.get("theme") else row["prompt"] for row in rows]
    result = diversify(embed_texts(model, texts), num_selected, duplicate_threshold)
    report = {
        "selected": num_selected,
        "model": str(model),
        "duplicate threshold": duplicate_threshold,
        "near-duplicates left out": result.num_duplicates,
        "coverage threshold": _COVERAGE_THRESHOLD,
        "coverage": round(result.coverage, 4),
        "coverage of random ones": round(result.coverage_of_random, 4),
    }
    return dataset.select(result.indices.tolist()), report
