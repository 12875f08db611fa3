# SPDX-License-Identifier: Apache-2.0
"""Read VCReward-Bench and EditReward-Compass, and ask a judge which of two edits is better."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, concatenate_datasets
from datasets import Image as ImageFeature
from PIL import Image

from ..data.columns import typed_dataset
from ..data.dataset_files import load_split
from ..utils.chat import ChatEndpoint, ChatRequest
from ..utils.files import digest
from ..utils.images import data_url
from ..utils.names import public_name
from ..utils.text import read_text, shorten


# Columns that the benchmarks' own scripts read: instruction, verdict, kind; and images
LAYOUTS = {
    "vc_reward": (["instruction", "winner", "task"], ["source_image", "edited_images"]),
    "editreward_compass": (["prompt", "label", "dimension"], ["source_image", "winner", "loser"]),
}
# Verdict of people -> place of the preferred edit
VERDICTS: dict[str, dict[str, int | None]] = {
    "vc_reward": {"Image A": 0, "Image B": 1},
    "editreward_compass": {"preference": 0, "tie": None},
}
DIMENSIONS = {"IA": "prompt_following", "VC": "consistency"}
# How GEditBench v2's code asks: pixels of the longer side, length of an answer, and how often
_MAX_SIDE, _MAX_TOKENS, _ATTEMPTS = 1024, 2048, 4
_WINNER = re.compile(r'"winner":\s*"(?:image[ _])?(a|b|tie)"', re.IGNORECASE)


def load_edit_pairs(benchmark: str, path: str | Path, split: str = "train", config: str | None = None) -> Dataset:
    """
    Load VCReward-Bench (`"vc_reward"`) or EditReward-Compass (`"editreward_compass"`) for [`evaluate_edit_reward`].

    `path` is a Hub id, directory or file, `config` a configuration of it, where it has several. VCReward-Bench has `instruction`, `source_image`, `edited_images` (two), `winner`
    (`Image A` or `Image B`) and `task`; EditReward-Compass `dimension` (`IA`, `VC` or `VQ`), `prompt`, `label`
    (`preference` or `tie`), and the paths `source_image`, `winner` and `loser` in the directory of the file. Its rows of
    `VQ` are left out: how natural an image looks is no question about a pair. A column that is missing or another verdict
    raises `ValueError`.
    """
    has_files, verdicts, (texts, images) = benchmark == "editreward_compass", VERDICTS[benchmark], LAYOUTS[benchmark]
    dataset = load_split(path, split, images, config=config).with_format(None)
    if missing := [name for name in texts + images if name not in dataset.column_names]:
        raise ValueError(f"'{path}' has no columns {missing}, only {dataset.column_names}. Check `benchmark`.")
    if has_files:
        for name in images:
            dataset = dataset.cast_column(name, ImageFeature(decode=False))
        dataset = dataset.filter(lambda dimension: dimension != "VQ", input_columns="dimension")
    rows: list[tuple[Any, ...]] = []
    for number, row in enumerate(dataset.select_columns(texts + images * has_files)):
        instruction, verdict, kind = (row[name] for name in texts)
        if verdict not in verdicts:
            where = f"`{texts[1]}` of {shorten(instruction)} in '{path}'"
            raise ValueError(f"{where} is {shorten(verdict)}, not {' or '.join(verdicts)}.")
        described, pictures = (kind, "consistency"), []
        if has_files:
            described = (verdict, DIMENSIONS.get(kind, kind))
            pictures = [row["source_image"], [row["winner"], row["loser"]]]
        rows.append(([f"{number}/0", f"{number}/1"], instruction, *described, verdicts[verdict], *pictures))
    names = ("instruction", "task_type", "dimension")
    kinds: dict[str, Any] = {"key": ["string"], **dict.fromkeys(names, "string"), "winner": "int64"}
    if has_files:
        return typed_dataset(rows, **kinds, input_image="image", output_images=["image"])
    shown = dataset.select_columns(images)
    shown = shown.rename_columns(dict(zip(images, ("input_image", "output_images"), strict=True)))
    return concatenate_datasets([typed_dataset(rows, **kinds), shown], axis=1)


class ComparingJudge:
    """
    Judge on a server that is shown both edits, such as PVC-Judge, as a scorer of [`evaluate_edit_reward`].

    `template` is the prompt: a YAML file of `src/prompts/assets` in a clone of
    [GEditBench v2](https://github.com/ZhangqiJiang07/GEditBench_v2); PVC-Judge's is
    `vlm/assessment/visual_consistency/pairwise/v1.yaml`.
    """

    compares = True

    def __init__(self, endpoint: ChatEndpoint, template: str | Path):
        self.endpoint, self.name, self.model_name = endpoint, endpoint.name, public_name(endpoint.model)
        self.prompt = yaml.safe_load(read_text(template))
        for key in ("prompt_id", "version", "system_prompt", "user_prompt"):
            if not isinstance(self.prompt, dict) or key not in self.prompt:
                raise ValueError(f"'{template}' has no `{key}`, which a prompt of GEditBench v2 has.")
        self.template = f"{self.prompt['prompt_id']} {self.prompt['version']} ({digest(self.prompt)[:8]})"

    def score(self, images: Sequence[tuple[Image.Image, ...]], prompts: Sequence[str]) -> list[float | None]:
        """Compare two edits of a source by their instruction: 1 if the first is better, 0, 0.5 for a tie, or `None`."""
        scores: list[float | None] = [None] * len(images)
        for attempt in range(_ATTEMPTS):
            missing = [number for number, score in enumerate(scores) if score is None]
            requests = [self._request(images[number], prompts[number], attempt) for number in missing]
            for place, reply in self.endpoint.ask_all(requests):
                if found := _WINNER.findall(reply.text or ""):
                    scores[missing[place]] = {"a": 1.0, "b": 0.0, "tie": 0.5}[found[-1].lower()]
        return scores

    def _request(self, images: tuple[Image.Image, ...], instruction: str, attempt: int) -> ChatRequest:
        content: list[dict[str, Any]] = []
        for block in self.prompt["user_prompt"]:
            if "text" in block:
                text = "\n" * bool(content) + block["text"].replace("{{ instruction }}", instruction)
                content.append({"type": "text", "text": text})
            else:
                image = images[block["image"].get("index", -1) + 1].copy()  # the source has no index
                image.thumbnail((_MAX_SIDE, _MAX_SIDE))
                content.append({"type": "image_url", "image_url": {"url": data_url(image, "png", compress_level=1)}})
        messages = [{"role": "system", "content": self.prompt["system_prompt"]}, {"role": "user", "content": content}]
        # At 0 an answer that cannot be read would come again
        return ChatRequest(messages, 42 + attempt, _MAX_TOKENS, 0.7 if attempt else 0.0)
