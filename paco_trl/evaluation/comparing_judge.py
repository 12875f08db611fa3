# SPDX-License-Identifier: Apache-2.0
"""A judge on a server that is shown two edits and names the better one."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from ..utils.chat import ChatEndpoint, ChatRequest
from ..utils.files import digest
from ..utils.images import data_url
from ..utils.names import public_name
from ..utils.text import read_text


# From GEditBench v2's code: pixels of the longer side, tokens per answer, and attempts
_MAX_SIDE = 1024
_MAX_TOKENS = 2048
_ATTEMPTS = 4
_WINNER = re.compile(r'"winner":\s*"(?:image[ _])?(a|b|tie)"', re.IGNORECASE)


class ComparingJudge:
    """
    Scorer for [`evaluate_rankings`]: a judge on a server that sees both edits, such as PVC-Judge.

    `template` is the prompt, a YAML file of `src/prompts/assets` in a clone of
    [GEditBench v2](https://github.com/ZhangqiJiang07/GEditBench_v2). PVC-Judge's is
    `vlm/assessment/visual_consistency/pairwise/v1.yaml`.
    """

    compares = True

    def __init__(self, endpoint: ChatEndpoint, template: str | Path):
        self.endpoint = endpoint
        self.name = endpoint.name
        self.model_name = public_name(endpoint.model)
        self.prompt = yaml.safe_load(read_text(template))
        for key in ("prompt_id", "version", "system_prompt", "user_prompt"):
            if not isinstance(self.prompt, dict) or key not in self.prompt:
                raise ValueError(f"'{template}' has no `{key}`, so it is not a prompt of GEditBench v2.")
        self.template = f"{self.prompt['prompt_id']} {self.prompt['version']} ({digest(self.prompt)[:8]})"

    def score(self, images: Sequence[tuple[Image.Image, ...]], prompts: Sequence[str]) -> list[float | None]:
        """Compare two edits of a source: 1 if the first is better, 0 if the second is, 0.5 for a tie, or `None`."""
        scores: list[float | None] = [None] * len(images)
        for attempt in range(_ATTEMPTS):
            unscored = [index for index, score in enumerate(scores) if score is None]
            requests = [self._request(images[index], prompts[index], attempt) for index in unscored]
            for position, reply in self.endpoint.ask_all(requests):
                if winners := _WINNER.findall(reply.text or ""):
                    scores[unscored[position]] = {"a": 1.0, "b": 0.0, "tie": 0.5}[winners[-1].lower()]
        return scores

    def _request(self, images: tuple[Image.Image, ...], instruction: str, attempt: int) -> ChatRequest:
        content: list[dict[str, Any]] = []
        for block in self.prompt["user_prompt"]:
            if "text" in block:
                text = "\n" * bool(content) + block["text"].replace("{{ instruction }}", instruction)
                content.append({"type": "text", "text": text})
            else:
                image = images[block["image"].get("index", -1) + 1].copy()  # the source image has no index
                image.thumbnail((_MAX_SIDE, _MAX_SIDE))
                content.append({"type": "image_url", "image_url": {"url": data_url(image, "png", compress_level=1)}})
        messages = [{"role": "system", "content": self.prompt["system_prompt"]}, {"role": "user", "content": content}]
        # At temperature 0, another attempt would give the same unreadable answer
        return ChatRequest(messages, 42 + attempt, _MAX_TOKENS, 0.7 if attempt else 0.0)
