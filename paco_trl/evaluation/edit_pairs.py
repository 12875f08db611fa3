# SPDX-License-Identifier: Apache-2.0
"""Read VCReward-Bench and EditReward-Compass, and ask a judge which of two edits is better."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from PIL import Image

from ..data.columns import list_lengths, typed_dataset
from ..data.dataset_files import image_file, load_split, report_broken
from ..data.texts import is_text
from ..utils.chat import ChatEndpoint, ChatRequest
from ..utils.files import digest
from ..utils.images import data_url
from ..utils.names import public_name


if TYPE_CHECKING:
    from datasets import Dataset


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


def load_edit_pairs(
    benchmark: str,
    path: str | Path,
    split: str = "train",
    skip_broken: bool = False,
    allow_remote_images: bool = False,
) -> "Dataset":
    """
    Load VCReward-Bench (`"vc_reward"`) or EditReward-Compass (`"editreward_compass"`) for [`evaluate_edit_reward`].

    `path` is a Hub id, directory or file. VCReward-Bench has `instruction`, `source_image`, `edited_images` (two), `winner`
    (`Image A` or `Image B`) and `task`; EditReward-Compass `dimension` (`IA`, `VC` or `VQ`), `prompt`, `label`
    (`preference` or `tie`), and the paths `source_image`, `winner` and `loser` in the directory of the file. Its rows of
    `VQ` are left out: how natural an image looks is no question about a pair. The other arguments are those of
    [`load_consistency_rank`]; a row that is broken or a column that is missing raises `ValueError`.
    """
    from datasets import concatenate_datasets

    has_files, verdicts, (texts, images) = benchmark == "editreward_compass", VERDICTS[benchmark], LAYOUTS[benchmark]
    folder = Path(path).expanduser().absolute()
    if has_files and not folder.exists():
        how = f"`hf download {path} --repo-type dataset --local-dir compass`, and pass its JSON file"
        raise ValueError(f"'{path}' is not on this disk. Download EditReward-Compass with its images: {how}.")
    folder = folder if folder.is_dir() else folder.parent
    dataset = load_split(path, split, allow_remote_images)
    if missing := [name for name in texts + images if name not in dataset.column_names]:
        raise ValueError(f"'{path}' has no columns {missing}, only {dataset.column_names}. Check `benchmark`.")
    edited = [2] * len(dataset) if has_files else list_lengths(dataset, "edited_images").tolist()
    rows: list[tuple[Any, ...]] = []
    numbers, broken = [], []
    for number, row in enumerate(dataset.with_format(None).select_columns(texts + images * has_files)):
        instruction, verdict, kind = (row[name] for name in texts)
        described, pictures = (kind, "consistency"), []
        try:
            if verdict not in verdicts or not is_text(instruction) or has_files and kind not in (*DIMENSIONS, "VQ"):
                told = {name: row[name] for name in texts}
                raise ValueError(f"it has {told}, but `{texts[1]}` must be one of {', '.join(verdicts)}.")
            if has_files and kind == "VQ":
                continue
            if edited[number] != 2:
                raise ValueError(f"`edited_images` has {edited[number]} image(s), but must have two.")
            if has_files:
                if missing := [name for name in images if not is_text(row[name])]:
                    raise ValueError(f"`{missing[0]}` is {row[missing[0]]!r}, but must be the path of an image.")
                source, *edits = (str(image_file(row[name], [folder], allow_remote_images)) for name in images)
                described, pictures = (verdict, DIMENSIONS[kind]), [source, edits]
        except ValueError as error:
            broken.append(f"Row {number} of '{path}': {error}")
            continue
        rows.append(([f"{number}/0", f"{number}/1"], instruction, *described, verdicts[verdict], *pictures))
        numbers.append(number)
    report_broken(broken, len(dataset), "rows", skip_broken)
    names = ("instruction", "task_type", "dimension")
    kinds: dict[str, Any] = {"key": ["string"], **dict.fromkeys(names, "string"), "winner": "int64"}
    if has_files:
        return typed_dataset(rows, **kinds, input_image="image", output_images=["image"])
    shown = dataset.select(numbers).select_columns(images)
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
        self.prompt = yaml.safe_load(Path(template).expanduser().read_text(encoding="utf-8"))
        if (
            not isinstance(self.prompt, dict)
            or not {"prompt_id", "version", "system_prompt", "user_prompt"} <= self.prompt.keys()
        ):
            raise ValueError(
                f"'{template}' is no prompt of GEditBench v2: it lacks `prompt_id` or another of its keys."
            )
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
