# SPDX-License-Identifier: Apache-2.0
"""Selection of prompts that best represent all prompts, without near-duplicates."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ..data.image_sets import check_image_set_columns
from ..utils.names import check_model_name, is_local


logger = logging.getLogger(__name__)

# Similarities are integer ten-thousandths, so that their sums do not depend on the order, nor on the last bits of
# products, which change with the number of threads
_SCALE = 10_000
_RANDOM_SEED = 0
# Cosine similarity from which a selected row represents another row
_COVERAGE_THRESHOLD = 0.8


def diversify(
    embeddings: np.ndarray, num_selected: int, duplicate_threshold: float = 0.95
) -> tuple[list[int], dict[str, Any]]:
    """
    Select rows of unit vectors (n, d) that represent all rows, without near-duplicates, with O(n^2) memory. Returns
    the rows in the order of selection, so that the first m are the selection of m, and a report of their coverage.
    """
    total = len(embeddings)
    if not 1 <= num_selected <= total:
        raise ValueError(f"`num_selected` is {num_selected}, but must be between 1 and the number of rows, {total}.")
    if not 0 < duplicate_threshold <= 1:
        raise ValueError(f"`duplicate_threshold` is {duplicate_threshold}, but must be in (0, 1].")
    similarities = np.maximum(np.rint(embeddings @ embeddings.T * np.float32(_SCALE)), 0).astype(np.int16)  # (n, n)
    np.fill_diagonal(similarities, _SCALE)

    nearest = np.zeros(total, dtype=np.int16)  # (n,) similarity of each row to the nearest selected one
    gains = similarities.sum(axis=0, dtype=np.int64)  # (n,) increase of the total similarity if a row were selected
    is_available = np.ones(total, dtype=bool)  # (n,)
    selected: list[int] = []
    while len(selected) < num_selected:
        if not is_available.any():
            raise ValueError(
                f"After {len(selected)} of {num_selected} rows, all others are near-duplicates. Select fewer."
            )
        row = int(np.where(is_available, gains, -1).argmax())  # ties by row
        selected.append(row)
        is_available &= similarities[row] < _threshold(duplicate_threshold)
        before = nearest
        nearest = np.maximum(nearest, similarities[row])
        is_nearer = nearest > before  # (n,)
        for similar, old, new in zip(similarities[is_nearer], before[is_nearer], nearest[is_nearer], strict=True):
            gains -= np.maximum(similar - old, 0) - np.maximum(similar - new, 0)

    def coverage(nearest: np.ndarray) -> float:
        return round(float((nearest >= _threshold(_COVERAGE_THRESHOLD)).mean()), 4)

    random_rows = np.random.default_rng(_RANDOM_SEED).permutation(total)[:num_selected]
    return selected, {
        "near-duplicates left out": int(total - is_available.sum()) - len(selected),
        "coverage threshold": _COVERAGE_THRESHOLD,
        "coverage": coverage(nearest),
        "coverage of random ones": coverage(similarities[random_rows].max(axis=0)),
    }


def _threshold(similarity: float) -> int:
    return math.ceil(similarity * _SCALE - 1e-6)


def embed_texts(model: str | Path, texts: list[str]) -> np.ndarray:
    """Embed texts as unit vectors (len(texts), D), float32."""
    from accelerate import PartialState

    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError('Embeddings need sentence-transformers: pip install "paco_trl[embeddings]".') from error
    if is_local(str(model)) or "/" in str(model):  # sentence-transformers has names without an owner
        check_model_name(model)
    # Neither load pickled weights, nor run code from the model
    options = {"dtype": "float32", "use_safetensors": True}
    encoder = SentenceTransformer(str(model), device=str(PartialState().device), model_kwargs=options)
    limit = encoder.max_seq_length or math.inf
    if num_truncated := sum(len(ids) > limit for ids in encoder.tokenizer(texts, verbose=False)["input_ids"]):
        logger.warning(f"{num_truncated} of {len(texts)} texts are longer than the {limit} tokens that {model} reads.")
    embeddings = encoder.encode(texts, batch_size=64, normalize_embeddings=True, show_progress_bar=True)
    if not np.isfinite(embeddings).all():
        raise ValueError(f"Embeddings of {model} are not finite. Check its weights.")
    return embeddings


def diversify_prompts(
    dataset: Dataset, model: str | Path, num_selected: int, duplicate_threshold: float = 0.95
) -> tuple[Dataset, dict[str, Any]]:
    """
    Select image-set prompts that represent all prompts, without near-duplicates, by greedy facility location.

    Embeds the theme and the texts of the panels, without panel markers.

    Args:
        dataset ([`~datasets.Dataset`]):
            Image-set prompts.
        model (`str` or `Path`):
            Hub id or directory of a sentence-transformers model (the extra `embeddings`).
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
    selected, coverage = diversify(embed_texts(model, texts), num_selected, duplicate_threshold)
    report = {"selected": num_selected, "model": str(model), "duplicate threshold": duplicate_threshold}
    return dataset.select(selected), report | coverage
