# SPDX-License-Identifier: Apache-2.0
"""Encoding of many prompts per turn, where text encoders and transformer take turns on the device."""

import copy
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device

from ..utils.pipelines import truncations_counted
from .offloading import offloader_of


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_PROMPTS_PER_TURN = 32


@contextmanager
def encoding_ahead(
    pipeline: "DiffusionPipeline", upcoming: list[str | list[str]], truncations: Counter[str]
) -> Iterator[None]:
    """
    Replace the pipeline's `encode_prompt` by an [`AheadEncoder`], unless all its models are on the device together.
    """
    offloader = offloader_of(pipeline)
    if offloader is None or not hasattr(pipeline, "encode_prompt"):
        yield
        return
    pipeline.encode_prompt = AheadEncoder(pipeline, offloader.device, upcoming, truncations)
    try:
        yield
    finally:
        del pipeline.encode_prompt


class AheadEncoder:
    """
    Encodes a prompt of a pipeline together with the next prompts, and keeps their embeddings on the CPU.

    `upcoming` has the prompts in the order of their calls. `truncations` counts a truncated prompt whenever it is used,
    as if it were encoded each time.
    """

    def __init__(
        self,
        pipeline: "DiffusionPipeline",
        device: torch.device,
        upcoming: list[str | list[str]],
        truncations: Counter[str],
    ):
        self.pipeline = pipeline
        self.encode = pipeline.encode_prompt
        self.device = device
        self.upcoming = upcoming
        self.next_index = 0  # in `upcoming`
        self.truncations = truncations
        # Embeddings and truncations by the arguments of a call. Prompts outside `upcoming`, mostly negative prompts, are
        # kept until there are many
        self.prompts: dict[str, tuple[Any, Counter[str]]] = {}
        self.negative_prompts: dict[str, tuple[Any, Counter[str]]] = {}
        self.settings: set[str] = set()  # the arguments without the prompt

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Many pipelines pass the prompt by position
        arguments = inspect.signature(self.encode).bind(*args, **kwargs).arguments
        if "prompt" not in arguments or not all(map(_is_plain, arguments.values())):  # has source images, for example
            return self.encode(*args, **kwargs)
        self.settings.add(_key(arguments, ""))
        key = _key(arguments, arguments["prompt"])
        if key not in self.prompts and key not in self.negative_prompts:
            self._encode_turn(arguments)
        embeddings, truncations = self.prompts.get(key) or self.negative_prompts[key]
        self.truncations.update(truncations)
        return send_to_device(embeddings, self.device)

    def _encode_turn(self, arguments: dict[str, Any]) -> None:
        """Encode the prompt and, if it is in `upcoming`, the prompts after it."""
        prompt = arguments["prompt"]
        if prompt in self.upcoming[self.next_index :]:
            self.next_index = self.upcoming.index(prompt, self.next_index)
            self.prompts.clear()
            # With negative prompts per row, upcoming prompts have other arguments
            count = _PROMPTS_PER_TURN if len(self.settings) == 1 else 1
            for text in self.upcoming[self.next_index : self.next_index + count]:
                if _key(arguments, text) not in self.prompts:
                    self.prompts[_key(arguments, text)] = self._encode(arguments | {"prompt": text})
            return
        if len(self.negative_prompts) == _PROMPTS_PER_TURN:
            self.negative_prompts.clear()
        self.negative_prompts[_key(arguments, prompt)] = self._encode(arguments)

    def _encode(self, arguments: dict[str, Any]) -> tuple[Any, Counter[str]]:
        """Return embeddings on the CPU, and the truncations, which are counted when the embeddings are used."""
        with truncations_counted(self.pipeline) as truncations:
            arguments = copy.deepcopy(arguments)  # Z-Image modifies lists in place
            return send_to_device(self.encode(**arguments), "cpu"), truncations


def _key(arguments: dict[str, Any], prompt: str | list[str]) -> str:
    return repr(arguments | {"prompt": prompt})


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    return all(item is None or isinstance(item, str | int | float | torch.device) for item in items)
