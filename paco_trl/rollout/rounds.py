# SPDX-License-Identifier: Apache-2.0
"""A round: the images that all processes generate together, and the completions, batches and groups they belong to."""

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
from .prompt_rows import ResolvedRows
from .recording_pipeline import TransformerStep, split_step


@dataclass(frozen=True)
class RoundRow:
    """A row of the dataset in a round: what the images generated from it have in common."""

    index: int  # row index in the dataset
    prompt_indices: range  # indices of the prompts of its panels among the image prompts of all rows
    size: tuple[int, int]  # height and width of an image in pixels
    round_key: tuple[int, int, int]
    shares_noise: bool  # whether the images of a set begin from the noise of the first


@dataclass(eq=False)
class Sample:
    """
    One generated image of a round.

    Rewards score a *completion*: an image, or a set of separate images, its panels. A round compares the completions
    of one row of the dataset, a *group* of `num_generations`. So a sample is the image of a `panel` in a `generation`
    of a group; a grid has one panel here, the whole of it.

    Prompt, size and noise follow from the row of its completion. The noise depends only on its key: seed, stream,
    round, prompt and generation.
    """

    completion: "Completion"
    panel: int
    is_anchored: bool  # whether it is generated from the first image of its set
    is_padding: bool = False  # whether it only pads a batch: it is generated, and neither scored nor trained
    advantage: float = 0.0
    weight: float = 0.0  # weight in the loss of its optimizer step, at each trained step

    @property
    def row_index(self) -> int:
        """Row index in the dataset."""
        return self.completion.row.index

    @property
    def generation(self) -> int:
        """Index of its completion in the group."""
        return self.completion.generation

    @property
    def prompt_index(self) -> int:
        """Index of its prompt among the image prompts of all rows, `rows.image_prompts`."""
        return self.completion.row.prompt_indices[self.panel]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.completion.row.size

    @property
    def noise_key(self) -> tuple[int, ...]:
        """Key of the noise of its stochastic steps."""
        return (*self.completion.row.round_key, self.prompt_index, self.generation)

    @property
    def initial_noise_key(self) -> tuple[int, ...]:
        """Key of its initial noise. With `shared_noise`, all images of a set have the key of the set's first image."""
        row = self.completion.row
        return (*row.round_key, row.prompt_indices[0 if row.shares_noise else self.panel], self.generation)

    def as_padding(self) -> "Sample":
        """Return a sample of the same image that only pads a batch."""
        sample = copy.copy(self)
        sample.is_padding = True
        return sample


@dataclass(eq=False)
class Completion:
    """What rewards score: an image, or a set of separate images, side by side."""

    index: int  # row of the reward table: the groups in order, each with its generations
    group: int
    generation: int
    row: RoundRow
    samples: list[Sample] = field(default_factory=list)
    panels: dict[int, Image.Image] = field(default_factory=dict)  # images by panel; empty once all are generated
    image: Any = None  # PIL image, or `None` before all panels are generated and after the round's callbacks

    @property
    def row_index(self) -> int:
        """Row index in the dataset."""
        return self.row.index

    def add_panels(self, panels: dict[int, Image.Image]) -> bool:
        """Add images by panel; return whether the completion now has all of them, and thus its `image`."""
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
    steps: list[TransformerStep] = field(default_factory=list)  # steps at which the samples are trained

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
    """
    Pad a process's batches with copies that are generated but neither scored nor trained. Every process then makes the
    same number of forward passes, as ZeRO-3 requires.
    """
    return batches + [padding.as_padding()] * (count - len(batches))


class Round:
    """
    All images of some rows, the same on every process.

    Args:
        rows (`ResolvedRows`):
            Rows of the dataset.
        row_indices (`Sequence[int]`):
            Indices of the round's rows in the dataset, one for each group.
        num_generations (`int`):
            Completions of a group.
        key (`tuple[int, int, int]`):
            Seed, stream and index of the round. Every noise key begins with them.
        sizes (`Sequence[tuple[int, int]]`):
            Height and width of the images of each row of the dataset.
        num_prompts (`int`, *optional*):
            Prompts of a full round. If the rows have fewer, their samples are repeated as padding.
    """

    def __init__(
        self,
        rows: ResolvedRows,
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
        # A row has decoded source images, which may be large: decode them once for the pipeline and for the rewards
        self.reward_row = functools.lru_cache(8)(rows.row)
        self.completions: list[Completion] = []
        self.samples: list[Sample] = []  # the images of a prompt one after the other
        self.batches: list[list[Batch]] = []  # batches of each process
        for group, row_index in enumerate(row_indices):
            first = len(self.completions)
            round_row = self._round_row(row_index)
            completions = [Completion(first + k, group, k, round_row) for k in range(num_generations)]
            self.completions += completions
            for panel in range(rows.images_per_row[row_index]):
                for completion in completions:
                    completion.samples.append(Sample(completion, panel, rows.is_anchored and panel > 0))
                self.samples += [completion.samples[panel] for completion in completions]
        num_samples = len(self.samples)
        for position in range(num_samples, (num_prompts or 0) * num_generations):
            self.samples.append(self.samples[position % num_samples].as_padding())

    def _round_row(self, row_index: int) -> RoundRow:
        rows = self.rows
        return RoundRow(row_index, rows.prompt_indices[row_index], self.sizes[row_index], self.key, rows.shares_noise)

    @property
    def row_indices(self) -> list[int]:
        """Row index of each group."""
        return [completion.row_index for completion in self.completions[:: self.num_generations]]

    @property
    def has_separate(self) -> bool:
        """Whether a completion is a set of separate images."""
        return any(len(completion.samples) > 1 for completion in self.completions)

    def replace(self, group: int, row_index: int) -> None:
        """Replace the row of a group by another one with images of the same size and number."""
        row = self._round_row(row_index)
        for completion in self.completions[group * self.num_generations :][: self.num_generations]:
            completion.row = row
            completion.image = None
            completion.panels = {}

    def row_indices_of(self, batches: list[Batch]) -> list[int]:
        """
        Return the distinct rows of these batches in order. Anchored sets add the round's first row, because padding
        batches are generated from it.
        """
        row_indices = [sample.row_index for batch in batches for sample in batch.samples]
        if self.rows.is_anchored:
            row_indices.append(self.samples[0].row_index)
        return list(dict.fromkeys(row_indices))

    def phases(
        self, batches: list[Batch], gather: Callable[[list], list]
    ) -> Iterator[tuple[list[Batch], dict[int, Image.Image]]]:
        """
        Yield the batches in the phases in which they can be generated, each phase with the first images that it needs,
        by completion.

        Anchored sets take two phases: all first images, then the images generated from them. Both phases are padded to
        the same number of batches on every process. `gather` gathers a list from all processes.
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
        """Return the first images of the sets of some batches. Other processes may have generated them."""
        needed = {sample.completion.index for batch in batches for sample in batch.samples}
        # An unfinished set has only its first image now
        generated = [
            (completion.index, image) for completion in self.completions for image in completion.panels.values()
        ]
        first_images: dict[int, Image.Image] = {}
        # Gather one image of each process at a time, to bound the memory
        for position in range(max(gather([len(generated)]))):
            gathered = gather(generated[position : position + 1])
            first_images |= {
                completion_index: image for completion_index, image in gathered if completion_index in needed
            }
        return first_images

    def add_images(self, batch: Batch, images: Sequence[Image.Image]) -> list[Completion]:
        """Give the completions the images of a batch; return the completions that now have all of their images."""
        finished = []
        for sample, image in zip(batch.samples, images, strict=True):
            if not sample.is_padding and sample.completion.add_panels({sample.panel: image}):
                finished.append(sample.completion)
        return finished

    def exchange(self, accelerator: Accelerator) -> list[Completion]:
        """Return this process's part of sets shared by several processes. Collective: call on all ranks."""
        processes, finished = accelerator.num_processes, []
        unfinished = [completion.index for completion in self.completions if completion.panels]
        completion_indices = sorted(set(gather_object(unfinished)))
        # Exchange one set for each process at a time, to bound the memory
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
                        f"Set {completion_index} of a round has {len(panels)} of its {expected} images on all "
                        "processes."
                    )
                if process == accelerator.process_index and self.completions[completion_index].add_panels(panels):
                    finished.append(self.completions[completion_index])
        for completion in self.completions:
            completion.panels = {}  # another process has finished the set
        return finished
