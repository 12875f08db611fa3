# SPDX-License-Identifier: Apache-2.0
"""A round: the images that are generated together, on all processes, and what becomes of each."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from ..data import join_grid
from ..utils.tensors import to_device
from .families import Family
from .prompt_rows import PromptRows
from .recording_pipeline import split_step


@dataclass(eq=False)
class Sample:
    """
    One generated image of a round.

    Rewards score a *completion*: an image, or a set of separate images, its panels. A round compares the completions
    of one row of the dataset, a *group* of `num_generations`. So a sample is the image of a `panel` in a `generation`
    of a group; a grid has one panel here, the whole of it.

    `prompt_index` counts the image prompts of all rows of the dataset. With seed, stream, round and generation it is
    the key of the image's noise, which depends on nothing else; the initial noise may be that of its set's first
    image.
    """

    completion: "Completion"
    panel: int
    is_anchored: bool  # whether it is generated from the first image of its set
    is_padding: bool = False  # it only fills a batch: it is generated, and neither scored nor trained
    prompt_index: int = field(init=False)  # index in `rows.image_prompts`
    size: tuple[int, int] = field(init=False)  # height and width in pixels
    noise_key: tuple[int, ...] = field(init=False)
    initial_noise_key: tuple[int, ...] = field(init=False)
    advantage: float = 0.0
    weight: float = 0.0  # weight in the loss of its optimizer step, at each trained step

    @property
    def row_index(self) -> int:
        """Row index in the dataset."""
        return self.completion.row_index

    @property
    def generation(self) -> int:
        """Number of its completion in the group."""
        return self.completion.generation

    def as_padding(self) -> "Sample":
        """Return a sample of the same image that only fills a batch."""
        sample = copy.copy(self)
        sample.is_padding = True
        return sample


@dataclass(eq=False)
class Completion:
    """What rewards score: an image, or a set of separate images, side by side."""

    index: int  # row index in the reward table: the groups in order, each with its generations
    group: int
    generation: int
    row_index: int  # row index in the dataset
    samples: list[Sample] = field(default_factory=list)
    panels: dict[int, Image.Image] = field(default_factory=dict)  # panel number -> image, until all are here
    image: Any = None  # PIL, from when it is finished until nothing needs it

    def add(self, panels: dict[int, Image.Image]) -> bool:
        """Add images by panel; return whether the completion has all of them now, and so its `image`."""
        self.panels |= panels
        if len(self.panels) < len(self.samples):
            return False
        images = [image for _, image in sorted(self.panels.items())]
        self.image = images[0] if len(images) == 1 else join_grid(images, 1, len(images))
        self.panels = {}
        return True


@dataclass(eq=False)
class Batch:
    """Samples that are generated and trained together, with the steps at which they are trained."""

    samples: list[Sample]
    steps: list[Any] = field(default_factory=list)  # trained steps, of a kind of `TransformerStep`

    @property
    def groups(self) -> set[int]:
        """The groups that its samples belong to."""
        return {sample.completion.group for sample in self.samples if not sample.is_padding}

    def as_padding(self) -> "Batch":
        """Return a batch of the same images that is neither scored nor trained."""
        return Batch([sample.as_padding() for sample in self.samples])

    def column(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return an attribute of all samples: (B,)."""
        return to_device(torch.tensor([getattr(sample, name) for sample in self.samples]), device)

    def split(self, parts: int, family: Family) -> list["Batch"]:
        """Split the batch into equal micro-batches."""
        size = len(self.samples) // parts
        split_steps = zip(*(split_step(step, parts, family) for step in self.steps), strict=True)
        return [
            Batch(self.samples[part * size : (part + 1) * size], [*steps]) for part, steps in enumerate(split_steps)
        ]


def pad_batches(batches: list[Batch], count: int, padding: Batch) -> list[Batch]:
    """Add batches that are neither scored nor trained: with ZeRO-3 every process must generate as many."""
    return batches + [padding.as_padding()] * (count - len(batches))


class Round:
    """
    All images of some rows, the same on every process.

    Args:
        rows (`PromptRows`):
            Rows of the dataset.
        row_indices (`Sequence[int]`):
            Numbers of the round's rows, one for each group.
        num_generations (`int`):
            Completions of a group.
        key (`tuple[int, int, int]`):
            Seed, stream and number of the round, which every key of noise begins with.
        sizes (`Sequence[tuple[int, int]]`):
            Height and width of the images of each row of the dataset.
        num_prompts (`int`, *optional*):
            Prompts of a full round. If the rows have fewer, fillers repeat them.
    """

    def __init__(
        self,
        rows: PromptRows,
        row_indices: Sequence[int],
        num_generations: int,
        key: tuple[int, int, int],
        sizes: Sequence[tuple[int, int]],
        num_prompts: int | None = None,
    ):
        self.rows = rows
        self.num_generations = num_generations
        self.key = key
        self.sizes = sizes
        # Decodes source images, which may be large: once for the pipeline and for the rewards
        self.row = functools.lru_cache(8)(rows.row)
        self.completions: list[Completion] = []
        self.samples: list[Sample] = []  # the images of a prompt one after the other
        self.batches: list[list[Batch]] = []  # batches of each process
        for group, row_index in enumerate(row_indices):
            first = len(self.completions)
            completions = [Completion(first + k, group, k, row_index) for k in range(num_generations)]
            self.completions += completions
            for panel in range(rows.lengths[row_index]):
                for completion in completions:
                    sample = Sample(completion, panel, rows.is_anchored and panel > 0)
                    self._assign(sample)
                    completion.samples.append(sample)
                self.samples += [completion.samples[panel] for completion in completions]
        num_samples = len(self.samples)
        for position in range(num_samples, (num_prompts or 0) * num_generations):
            self.samples.append(self.samples[position % num_samples].as_padding())

    def _assign(self, sample: Sample) -> None:
        """Give a sample the prompt, size and noise keys that follow from its row."""
        prompt_indices = self.rows.prompt_indices[sample.row_index]
        sample.prompt_index = prompt_indices[sample.panel]
        sample.size = self.sizes[sample.row_index]
        sample.noise_key = (*self.key, sample.prompt_index, sample.generation)
        first = prompt_indices[0] if self.rows.shares_noise else sample.prompt_index
        sample.initial_noise_key = (*self.key, first, sample.generation)

    @property
    def row_indices(self) -> list[int]:
        """Number of the row of each group."""
        return [completion.row_index for completion in self.completions[:: self.num_generations]]

    @property
    def has_sets(self) -> bool:
        """Whether a completion has several images."""
        return any(len(completion.samples) > 1 for completion in self.completions)

    def replace(self, group: int, row_index: int) -> None:
        """Put another row, of the same size and number of images, in the place of a group's."""
        for completion in self.completions[group * self.num_generations :][: self.num_generations]:
            completion.row_index = row_index
            completion.image = None
        for sample in self.samples:  # with those that fill batches
            if sample.completion.group == group:
                self._assign(sample)

    def row_indices_of(self, batches: list[Batch]) -> list[int]:
        """Return the distinct row numbers of some batches in order, with the row of the padding batches."""
        row_indices = [sample.row_index for batch in batches for sample in batch.samples]
        if self.rows.is_anchored:
            row_indices.append(self.samples[0].row_index)
        return list(dict.fromkeys(row_indices))

    def phases(
        self, batches: list[Batch], gather: Callable[[list], list]
    ) -> Iterator[tuple[list[Batch], dict[int, Image.Image]]]:
        """
        Yield the batches that are generated before others, with the images that they are generated from, by set.

        Anchored sets have two phases: their first images, and all others from these. Each process then generates as
        many batches in either. `gather` gathers a list from all processes.
        """
        if not self.rows.is_anchored:
            yield batches, {}
            return
        padding = Batch(self.samples[:1] * len(batches[0].samples))
        for is_anchored in (False, True):
            phase = [batch for batch in batches if batch.samples[0].is_anchored is is_anchored]
            first_images = self._gather_first_images(phase, gather) if is_anchored else {}
            yield pad_batches(phase, max(gather([len(phase)])), padding), first_images

    def _gather_first_images(self, batches: list[Batch], gather: Callable[[list], list]) -> dict[int, Image.Image]:
        """Return the first images of the sets of some batches, which other processes may have generated."""
        needed = {sample.completion.index for batch in batches for sample in batch.samples}
        # Each unfinished set has its first image alone
        generated = [
            (completion.index, image) for completion in self.completions for image in completion.panels.values()
        ]
        first_images: dict[int, Image.Image] = {}
        # One of each process at a time, which bounds the memory
        for position in range(max(gather([len(generated)]))):
            gathered = gather(generated[position : position + 1])
            first_images |= {
                completion_index: image for completion_index, image in gathered if completion_index in needed
            }
        return first_images

    def add(self, batch: Batch, images: Sequence[Image.Image]) -> list[Completion]:
        """Give the completions the images of a batch; return those that are finished with them."""
        finished = []
        for sample, image in zip(batch.samples, images, strict=True):
            if not sample.is_padding and sample.completion.add({sample.panel: image}):
                finished.append(sample.completion)
        return finished

    def exchange(self, accelerator: Accelerator) -> list[Completion]:
        """Return this process's part of sets shared by several processes. Collective: call on all ranks."""
        processes, finished = accelerator.num_processes, []
        unfinished = [completion.index for completion in self.completions if completion.panels]
        completion_indices = sorted(set(gather_object(unfinished)))
        # A set for each process at a time, which bounds the memory
        for first in range(0, len(completion_indices), processes):
            block = completion_indices[first : first + processes]
            parts = gather_object(
                [(completion_index, self.completions[completion_index].panels) for completion_index in block]
            )
            for process, completion_index in enumerate(block):
                panels = {panel: image for n, part in parts if n == completion_index for panel, image in part.items()}
                expected = len(self.completions[completion_index].samples)
                if len(panels) < expected:
                    raise RuntimeError(
                        f"Set {completion_index} of a round has {len(panels)} of its {expected} images on all processes."
                    )
                if process == accelerator.process_index and self.completions[completion_index].add(panels):
                    finished.append(self.completions[completion_index])
        for completion in self.completions:
            completion.panels = {}  # other processes have finished these
        return finished
