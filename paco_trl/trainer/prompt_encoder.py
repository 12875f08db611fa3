# SPDX-License-Identifier: Apache-2.0
"""Each distinct prompt is encoded once in a run; then the text encoders leave the accelerator."""

import logging
from collections import Counter
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object, send_to_device
from tqdm.auto import tqdm

from ..rollout import Family


logger = get_logger(__name__)


class PromptEncoder:
    """
    Encodes prompts and keeps the embeddings in CPU memory, each on one process only.

    A FLUX.1-dev prompt takes 4 MB in bf16, so a run over many prompts fills memory quickly if every process keeps them
    all: each process encodes and keeps its share, and a round's embeddings are exchanged when they are needed.
    Prompts are encoded one at a time, so that the embedding does not depend on its neighbours.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Pipeline with its text encoders, on the CPU.
        family ([`Family`]):
            Page of the pipeline's family.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the run.
    """

    def __init__(self, pipeline, family: Family, accelerator: Accelerator):
        self.pipeline = pipeline
        self.family = family
        self.accelerator = accelerator
        self._known: set[str] = set()
        self._embeddings: dict[str, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> None:
        """
        Encodes the prompts that are new. Every process calls it with the same list.

        Args:
            prompts (`list[str]`):
                Prompts, repetitions allowed.
        """
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._known]
        if not new:
            return
        mine = new[self.accelerator.process_index :: self.accelerator.num_processes]
        with self._text_encoders_on(self.accelerator.device), self._truncations_counted(len(mine)):
            for prompt in tqdm(mine, desc="Encoding prompts", disable=not self.accelerator.is_main_process):
                encoded = self.family.encode_prompt(self.pipeline, prompt, self.accelerator.device)
                self._embeddings[prompt] = send_to_device(encoded, "cpu")
        self._known.update(new)
        if self._embeddings:
            size = sum(tensor.nbytes for tensor in next(iter(self._embeddings.values())).values())
            logger.info(
                f"{len(self._known)} distinct prompts are encoded, {size / 2**20:.1f} MiB each, kept in the memory of "
                f"{self.accelerator.num_processes} process(es)."
            )

    def fetch(self, prompts: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        """
        Embeddings of prompts that were encoded. Every process calls it with the same list.

        Args:
            prompts (`list[str]`):
                Prompts, repetitions allowed.

        Returns:
            `dict[str, dict[str, torch.Tensor]]`: for each prompt the arguments of the pipeline's call, on the CPU.
        """
        mine = [(prompt, self._embeddings[prompt]) for prompt in dict.fromkeys(prompts) if prompt in self._embeddings]
        return dict(gather_object(mine) if self.accelerator.num_processes > 1 else mine)

    @contextmanager
    def _text_encoders_on(self, device: torch.device):
        encoders = [getattr(self.pipeline, name) for name in self.family.text_encoders]
        for encoder in encoders:
            encoder.to(device)
        try:
            yield
        finally:
            for encoder in encoders:
                encoder.to("cpu")

    @contextmanager
    def _truncations_counted(self, count: int):
        # Prompts of image sets are longer than CLIP reads, always. The pipeline says so for each prompt, with the whole
        # text; a line for each kind says as much.
        messages = Counter()

        def count_truncations(record: logging.LogRecord) -> bool:
            message = record.getMessage()
            if "was truncated" not in message:
                return True
            messages[message.split(":")[0]] += 1
            return False

        pipeline_logger = logging.getLogger(type(self.pipeline).__module__)
        pipeline_logger.addFilter(count_truncations)
        try:
            yield
        finally:
            pipeline_logger.removeFilter(count_truncations)
        for message, number in messages.items():
            logger.warning(f"For {number} of {count} prompts: {message}.")
