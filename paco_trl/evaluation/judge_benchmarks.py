# SPDX-License-Identifier: Apache-2.0
"""
Benchmarks of judges as rankings: ConsistencyRank (https://arxiv.org/abs/2512.04784), EditReward-Bench of EditScore
(https://arxiv.org/abs/2509.23909), VCReward-Bench (https://arxiv.org/abs/2603.28547), EditReward-Compass
(https://arxiv.org/abs/2605.13062) and the edits of MMRB2 (https://arxiv.org/abs/2512.16899).
"""

import logging
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets import Image as ImageFeature
from scipy.cluster.hierarchy import DisjointSet

from ..data.columns import check_values, typed_dataset
from ..data.dataset_files import load_split
from ..data.image_paths import image_file
from ..data.rankings import RANK_FILE, load_consistency_rank
from ..utils.text import read_json, shorten


logger = logging.getLogger(__name__)

# Benchmark -> its columns of images, and its other columns
LAYOUTS = {
    "rankings": (["reference", "candidates", "images"], []),
    "edits": (["reference", "candidates"], ["ranking", "prompt", "dimension"]),
    "edit_reward": (["input_image", "output_images"], ["key", "instruction", "task_type", "dimension"]),
    "vc_reward": (["source_image", "edited_images"], ["instruction", "winner", "task"]),
    "editreward_compass": (["source_image", "winner", "loser"], ["prompt", "label", "dimension"]),
}
# Columns of pairs of edits whose rows are converted one by one
_PAIR_TYPES: dict[str, Any] = {
    "prompt": "string", "group": "string", "reference": "image", "candidates": ["image"], "ranking": ["int64"],
    "is_tie": "bool", "dimension": "string", "task_type": "string",
}  # fmt: skip
_COMPASS_DIMENSIONS = {"IA": "prompt_following", "VC": "consistency"}


def is_consistency_rank(path: str | Path) -> bool:
    """Return whether a Hub id or directory is ConsistencyRank, whose files `load_dataset` cannot read."""
    return str(path) == "X-GenGroup/ConsistencyRank-Bench" or (Path(path).expanduser() / RANK_FILE).is_file()


def load_rankings(benchmark: str, path: str | Path, split: str = "train", config: str | None = None) -> Dataset:
    """
    Load a benchmark of judges as rankings for [`evaluate_rankings`].

    Args:
        benchmark (`str`):
            Name of the benchmark, whose data have the layout that its own script reads.

            - `"rankings"`: ConsistencyRank ([`~paco_trl.data.load_consistency_rank`]), or your own rankings.
            - `"edits"`: your own rankings of pairs of edits.
            - `"edit_reward"`: EditScore's EditReward-Bench (not TIGER-Lab's): `key` (names of two edits),
              `instruction`, `input_image`, `output_images` (the preferred one first), `task_type`, `dimension`. Rows
              that share an edit, directly or through other rows, form a `group`. In the benchmarks below, rows that
              share an instruction form one.
            - `"vc_reward"`: VCReward-Bench: `instruction`, `source_image`, `edited_images` (two), `winner` (`Image A`
              or `Image B`), `task`.
            - `"editreward_compass"`: EditReward-Compass: `prompt`, `dimension` (`IA` or `VC`; `VQ`, visual quality, is
              left out), `label` (`preference` or `tie`), and relative paths `source_image`, `winner`, `loser`.
            - `"mmrb2"`: the `edit.json` that MMRB2's build script writes. Pairs with several sources or
              several images of an edit are left out.
        path (`str` or `Path`), split (`str`, *optional*, defaults to `"train"`), config (`str`, *optional*):
            Hub id, directory or file; its split, and its configuration if it has several.

    Returns:
        [`~datasets.Dataset`]: the columns that [`evaluate_rankings`] describes.

    Raises:
        ValueError: If the benchmark is unknown, a column is missing, or a verdict is unknown.
    """
    if benchmark == "mmrb2":
        return _convert_mmrb2(Path(path).expanduser())
    if benchmark == "rankings" and is_consistency_rank(path):
        return load_consistency_rank(path)
    if benchmark not in LAYOUTS:
        raise ValueError(f"`benchmark` is {benchmark!r}, but must be one of {', '.join(LAYOUTS)}, mmrb2.")
    images, others = LAYOUTS[benchmark]
    dataset = load_split(path, split, images, config=config).with_format(None)
    names = dataset.column_names
    if benchmark == "rankings":
        if "dimension" in names:
            raise ValueError(f"'{path}' has the column `dimension` of pairs of edits. Use the benchmark 'edits'.")
        return dataset
    if missing := [name for name in images + others if name not in names]:
        raise ValueError(f"'{path}' has no columns {missing}, only {names}. Check the benchmark.")
    if benchmark == "edit_reward":
        return _convert_edit_reward(dataset, path)
    if benchmark == "vc_reward":
        return _convert_vc_reward(dataset, path)
    return _convert_compass(dataset, path) if benchmark == "editreward_compass" else dataset


def _convert_edit_reward(dataset: Dataset, path: str | Path) -> Dataset:
    if "winner" in dataset.column_names:  # the first edit is the preferred one
        raise ValueError(
            f"'{path}' has the column `winner`, which EditReward-Bench does not have. Write your own pairs as the "
            "benchmark 'edits', with `ranking`."
        )
    check_values(dataset, str(path), "key", lambda names: len(names or []) == 2, "the names of two edits")
    ids = dataset["key"][:]
    groups = DisjointSet(name for pair in ids for name in pair)
    for pair in ids:
        groups.merge(*pair)
    images = {"input_image": "reference", "output_images": "candidates"}
    names = {"key": "candidate_ids", "instruction": "prompt", **images}
    dataset = dataset.select_columns([*names, "task_type", "dimension"]).rename_columns(names)
    return dataset.add_column("ranking", [[0, 1]] * len(ids)).add_column("group", [groups[name] for name, _ in ids])


def _convert_vc_reward(dataset: Dataset, path: str | Path) -> Dataset:
    orders = {"Image A": [0, 1], "Image B": [1, 0]}
    check_values(dataset, str(path), "winner", [*orders].__contains__, "Image A or Image B")
    rankings = [orders[winner] for winner in dataset["winner"]]
    names = {"instruction": "prompt", "source_image": "reference", "edited_images": "candidates", "task": "task_type"}
    dataset = dataset.select_columns([*names]).rename_columns(names).add_column("ranking", rankings)
    dataset = dataset.add_column("dimension", ["consistency"] * len(dataset))
    return dataset.add_column("group", dataset["prompt"][:])


def _convert_compass(dataset: Dataset, path: str | Path) -> Dataset:
    dataset = dataset.filter(lambda dimension: dimension != "VQ", input_columns="dimension")
    for name in LAYOUTS["editreward_compass"][0]:
        dataset = dataset.cast_column(name, ImageFeature(decode=False))
    rows: list[tuple[Any, ...]] = []
    for row in dataset:
        if row["label"] not in ("preference", "tie"):
            verdict = f"`label` of {shorten(row['prompt'])} in '{path}' is {shorten(row['label'])}"
            raise ValueError(f"{verdict}, not preference or tie.")
        dimension = _COMPASS_DIMENSIONS.get(row["dimension"], row["dimension"])
        images = (row["source_image"], [row["winner"], row["loser"]])
        rows.append((row["prompt"], row["prompt"], *images, [0, 1], row["label"] == "tie", dimension, row["label"]))
    return typed_dataset(rows, **_PAIR_TYPES)


def _convert_mmrb2(path: Path) -> Dataset:
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file '{path}'. Build MMRB2 (`python build_from_hf.py` in `benchmark` of its repository), "
            "and pass its edit.json as `dataset_name`."
        )
    content = read_json(path)
    pairs = content.get("pairs") if isinstance(content, dict) else None
    if not pairs or not all({"prompt_content", "response_a", "response_b", "chosen"} <= pair.keys() for pair in pairs):
        raise ValueError(f"'{path}' has no pairs of MMRB2 with their prompts. Pass the edit.json that it builds.")

    def images_of(content: list[list[str]]) -> list[dict[str, Any]]:
        names = [value for kind, value in content if kind == "image"]
        return [{"path": str(image_file(name, [path.parent])), "bytes": None} for name in names]

    rows: list[tuple[Any, ...]] = []
    for number, pair in enumerate(pairs):
        if pair["chosen"] not in ("A", "B"):
            raise ValueError(f"`chosen` of pair {number} of '{path}' is {shorten(pair['chosen'])}, not A or B.")
        sources = images_of(pair["prompt_content"])
        edits = [images_of(pair[name]["response_content"]) for name in ("response_a", "response_b")]
        if len(sources) == 1 and all(len(images) == 1 for images in edits):
            text = " ".join(value for kind, value in pair["prompt_content"] if kind == "text")
            ranking = [0, 1] if pair["chosen"] == "A" else [1, 0]
            values = (sources[0], [images[0] for images in edits], ranking, False, "overall")
            rows.append((text, text, *values, pair.get("prompt_source", "")))
    if len(rows) < len(pairs):
        logger.warning(
            f"{len(pairs) - len(rows)} of {len(pairs)} pairs of '{path}' are left out: they have several images."
        )
    return typed_dataset(rows, **_PAIR_TYPES)
