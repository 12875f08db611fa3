# SPDX-License-Identifier: Apache-2.0
"""Pictures of a round: each prompt's images beside one another, with their scores."""

import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate.logging import get_logger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from transformers import TrainerCallback, is_trackio_available, is_wandb_available
from transformers.integrations import TensorBoardCallback


logger = get_logger(__name__)

# A sheet shows this much of a round, whatever its size
MAX_PROMPTS = 8
MAX_IMAGES = 8
THUMBNAIL = 256

TRACKERS_WITH_PICTURES = ("tensorboard", "wandb", "trackio")


@dataclass
class SheetImage:
    """
    One image of a contact sheet.

    Attributes:
        prompt (`int`):
            Position of the prompt in the round: the row of the sheet.
        generation (`int`):
            Which of the prompt's images it is: the column.
        image (`PIL.Image.Image`):
            Thumbnail.
        prompt_text (`str`):
            Title of the row.
        caption (`str`):
            Scores, below the image.
    """

    prompt: int
    generation: int
    image: Image.Image
    prompt_text: str
    caption: str = ""


def thumbnail(image: Image.Image) -> Image.Image:
    """A copy of the image, at most `THUMBNAIL` pixels wide and high; small images stay as they are."""
    copy = image.copy()
    copy.thumbnail((THUMBNAIL, THUMBNAIL))
    return copy


def save_contact_sheet(images: list[SheetImage], title: str, path: str | Path) -> Image.Image:
    """
    Draws a contact sheet and saves it.

    Args:
        images (`list[SheetImage]`):
            Images, in any order.
        title (`str`):
            Title of the sheet.
        path (`str` or `Path`):
            PNG file.

    Returns:
        `PIL.Image.Image`: the sheet.
    """
    prompts = sorted({image.prompt for image in images})
    columns = max(image.generation for image in images) + 1
    # Rows are as high as their images, so that wide sets are not shrunk to the height of square ones
    aspects = [max(i.image.height / i.image.width for i in images if i.prompt == prompt) for prompt in prompts]
    cell = 1.7  # inches
    text_height = 0.62
    heights = [cell * aspect + text_height for aspect in aspects]
    figure = Figure(figsize=(cell * columns * 1.06 + 0.3, sum(heights) + 0.5), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        len(prompts), columns, height_ratios=heights, wspace=0.06, hspace=0.0, left=0.02, right=0.98, bottom=0.01,
        top=1 - 0.45 / figure.get_figheight(),
    )  # fmt: skip
    figure.suptitle(title, fontsize=10, x=0.02, ha="left", y=1 - 0.1 / figure.get_figheight(), va="top")
    for image in images:
        axes = figure.add_subplot(grid[prompts.index(image.prompt), image.generation])
        axes.imshow(image.image, interpolation="nearest" if image.image.width < 128 else "antialiased")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_anchor("C")
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel(image.caption, fontsize=6, labelpad=2)
        if image.generation == 0:
            width = int(columns * 26)
            axes.set_title(textwrap.shorten(image.prompt_text, width, placeholder=" …"), fontsize=7, loc="left", pad=3)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    with Image.open(path) as sheet:
        return sheet.convert("RGB")


def send_to_trackers(sheet: Image.Image, name: str, step: int, callbacks: list[TrainerCallback]) -> None:
    """
    Sends a contact sheet to the trackers that a run reports to and that show pictures.

    Args:
        sheet (`PIL.Image.Image`):
            Sheet.
        name (`str`):
            Name in the tracker.
        step (`int`):
            Optimizer step.
        callbacks (`list[TrainerCallback]`):
            Callbacks of the trainer, among them those of its trackers.
    """
    names = {type(callback).__name__ for callback in callbacks}
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_image(name, np.asarray(sheet), step, dataformats="HWC")
    if "WandbCallback" in names and is_wandb_available():
        import wandb

        if wandb.run is not None:
            wandb.log({name: wandb.Image(sheet), "train/global_step": step})
    if "TrackioCallback" in names and is_trackio_available():
        import trackio

        trackio.log({name: trackio.Image(np.asarray(sheet)), "train/global_step": step})
