# SPDX-License-Identifier: Apache-2.0
"""Gradio app that compares a base model with its adapter, for the same prompt and noise, scored by a judge."""

import html
import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data import (
    ImageSetPrompt,
    demo_prompts_path,
    load_image_set_prompts,
    parse_image_set_prompt,
    split_grid,
    theme_question,
)
from ..data.image_sets import SEPARATE, arrange_sets, prompt_texts, prompts_of_row
from ..generation.inference import read_adapter
from ..generation.offloading import offloader_of
from ..rollout.families import get_family
from ..rollout.prompt_rows import check_panel_generation
from ..rollout.resolution import check_inference_size
from ..rollout.sde import keyed_generator
from ..utils.errors import is_user_error
from ..utils.files import read_app_template
from ..utils.images import data_url, to_rgb
from ..utils.names import public_name
from ..utils.option_checks import check_panel_options


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from gradio import Blocks
    from PIL.Image import Image

    from ..rewards.paco_reward import PaCoReward


NUM_EXAMPLES = 6  # packaged prompts to choose from
_ROLES = ("Base model", "With the adapter")
_MAX_SEED = 2**31 - 1
# Limits for visitors, in the fields or in a prompt that names its layout
MAX_PANELS = 16
MAX_PIXELS = 2304 * 2304
MAX_STEPS = 100
MAX_CHARACTERS = 10_000
_ZERO_GPU_SECONDS = 120  # time of a comparison; ZeroGPU's default limit is 60
_APP = read_app_template("comparison_app.html")


class Comparison:
    """Generates image sets without and with an adapter from the same noise, and scores them."""

    def __init__(
        self,
        pipeline: "DiffusionPipeline",
        judge: "PaCoReward | None",
        panel_size: tuple[int, int],  # height and width
        guidance_scale: float,
        negative_prompt: str | None = None,
        panel_template: str | None = None,  # prompts of separate images; if `None`, a set is a grid
        panel_generation: str = "independent",
    ):
        self.pipeline = pipeline
        self.judge = judge
        self.panel_size = panel_size
        self.offloader = offloader_of(pipeline)
        self._judge_models = [] if judge is None or self.offloader is None else [judge.model.to("cpu")]
        pipeline.set_progress_bar_config(disable=True)
        self.family = get_family(pipeline)
        self.guidance_scale = guidance_scale
        if self.family.requires_source_image:
            name = type(pipeline).__name__
            raise ValueError(f"{name} edits a source image, but this app compares image sets generated from text.")
        self.negative_prompt = self.family.resolve_negative_prompt(pipeline, guidance_scale, negative_prompt)
        self.panel_template, self.panel_generation = panel_template, panel_generation
        if panel_template is not None:
            check_panel_options(panel_template, panel_generation)
        check_panel_generation(panel_generation, type(pipeline).__name__, self.family)

    def parse(self, prompt: str) -> ImageSetPrompt | None:
        """Parse a prompt into panels. For separate images, the first line is the theme, each further line a panel."""
        if len(prompt) > MAX_CHARACTERS:
            return None
        if self.panel_template is not None:
            theme, *panels = [line for line in map(str.strip, prompt.split("\n")) if line] or [""]
            return ImageSetPrompt(theme, 1, len(panels), panels)
        try:
            return parse_image_set_prompt(prompt)
        except ValueError:  # another format
            return None

    def _image_layout(self, rows: int, cols: int) -> tuple[int, int, int, int]:
        """Return the height, width, rows and columns of one image of the pipeline."""
        rows, cols = (rows, cols) if self.panel_template is None else (1, 1)
        return rows * self.panel_size[0], cols * self.panel_size[1], rows, cols

    def check(self, prompt: str, rows: int, cols: int, seed: int, steps: int) -> None:
        """Reject inputs that would overload the device or the page."""
        if self.panel_template is not None and cols == 0:
            raise ValueError("Write what all images show in the first line, then one line per image.")
        if any(type(number) is not int for number in (rows, cols, seed, steps)):
            raise ValueError("Rows, columns, seed and steps must be integers. Choose others.")
        for name, number, minimum, maximum in (
            ("seed", seed, 0, _MAX_SEED),
            ("steps", steps, 1, MAX_STEPS),
            ("rows", rows, 1, MAX_PANELS),
            ("columns", cols, 1, MAX_PANELS),
            ("panels", rows * cols, 1, MAX_PANELS),
            ("pixels", rows * self.panel_size[0] * cols * self.panel_size[1], 1, MAX_PIXELS),
            ("characters in the prompt", len(prompt), 0, MAX_CHARACTERS),
        ):
            if not minimum <= number <= maximum:
                raise ValueError(f"{name}: {number:,} is not allowed. Choose from {minimum} to {maximum:,}.")
        where = "the grid" if self.panel_template is None else "a panel"
        check_inference_size(*self._image_layout(rows, cols), self.family.size_multiple(self.pipeline), where)

    @torch.no_grad()
    def generate(self, prompt: str, rows: int, cols: int, seed: int, steps: int) -> Iterator[list["Image"]]:
        """Yield the panels of the base model, then the panels with the adapter."""
        self.check(prompt, rows, cols, seed, steps)
        pipeline = self.pipeline
        family = self.family
        texts = [prompt]
        if self.panel_template is not None and (parsed := self.parse(prompt)) is not None:
            texts = prompts_of_row({"layout": SEPARATE, **parsed._asdict()}, self.panel_template)
        height, width, *layout = self._image_layout(rows, cols)
        # Encode as in training, and once for both models
        device = pipeline.transformer.device if self.offloader is None else self.offloader.device
        embeddings = [family.encode_prompt(pipeline, text, device) for text in texts]
        if self.negative_prompt is not None:
            negative = family.encode_prompt(pipeline, self.negative_prompt, device)
            embeddings = [
                row | {f"negative_{name}": tensor for name, tensor in negative.items()} for row in embeddings
            ]
        for adapter_context in (pipeline.transformer.disable_adapter, nullcontext):
            panels: list[Image] = []
            with adapter_context():
                for number, arguments in enumerate(map(family.batch_arguments, embeddings)):
                    is_anchored = self.panel_generation == "anchored" and number > 0
                    sources = [family.prepare_panel(pipeline, panels[0])] if is_anchored else []
                    call = arguments | family.call_arguments(height, width, self.guidance_scale, sources)
                    noise = 0 if self.panel_generation == "shared_noise" else number
                    # On the CPU, for the same noise on any device
                    generator = keyed_generator(seed, noise) if noise else torch.Generator().manual_seed(seed)
                    with family.generation_context(pipeline, sources):
                        image = pipeline(**call, num_inference_steps=steps, generator=generator).images[0]
                    panels += split_grid(to_rgb(image, "The generated image"), *layout)
            yield panels

    def score(self, prompt: str, sets: Sequence[list["Image"]]) -> list[list[float]] | None:
        """Return P(Yes) of each pair of panels in each set, or `None` without a judge or for single panels."""
        count = len(sets[0])
        if self.judge is None or count < 2:
            return None
        pairs: list = [pair for panels in sets for pair in combinations(panels, 2)]
        theme = parsed.theme if (parsed := self.parse(prompt)) else prompt
        if self.offloader is not None:
            self.offloader.activate(self._judge_models)
        scores = self.judge.score(pairs, self.judge.question or theme_question(theme))
        pairs_per_set = len(pairs) // len(sets)
        return [scores[start : start + pairs_per_set] for start in range(0, len(pairs), pairs_per_set)]


def _on_gpu(function: Callable) -> Callable:
    """Run a function in a ZeroGPU worker, if the package `spaces` is installed."""
    try:
        import spaces
    except ImportError:
        return function
    return spaces.GPU(duration=_ZERO_GPU_SECONDS)(function)


def _board(
    names: Sequence[str], rows: int, cols: int, note: str, doing: str = "", panels: Sequence[list] = (),
    scores: Sequence[Sequence[float]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the content of the page: its current activity, the panels of each set, and the scores of their pairs."""
    means = [None, None] if scores is None else [sum(row) / len(row) for row in scores]
    sets = [
        {"role": role, "name": html.escape(name), "panels": images, "score": mean}
        for role, name, images, mean in zip(_ROLES, names, [*panels, [], []][:2], means, strict=True)
    ]
    numbers = combinations(range(1, rows * cols + 1), 2)
    pairs = [] if scores is None else list(zip(map(list, numbers), *scores, strict=True))
    return {"sets": sets, "rows": rows, "cols": cols, "note": note, "doing": doing, "pairs": pairs}


def make_app(
    comparison: Comparison,
    names: tuple[str, str],
    prompts: Sequence[str],
    title: str,
    layout: tuple[int, int] = (2, 2),
    num_inference_steps: int = 20,
) -> "Blocks":
    """Build the app. `names` are of the base model and the adapter, and `layout` is for prompts that name none."""
    import gradio as gr

    judge = comparison.judge

    def note(rows: int, cols: int) -> str:
        if judge is None or rows * cols == 1:
            return ""
        name = html.escape(judge.model_name)
        sure = f"Score: how sure {name} is that two panels are consistent, the mean over all pairs."
        return f"{sure} Copies score high too, so look at the images."

    def follow(prompt: str) -> list[Any]:
        parsed = comparison.parse(prompt)
        return [gr.skip()] * 2 if parsed is None or is_separate else [parsed.rows, parsed.cols]

    @_on_gpu
    def compare(prompt: str, rows: int, cols: int, seed: int, steps: int) -> Iterator[dict[str, Any]]:
        sets: list = []
        panels: list = []
        try:
            if (parsed := comparison.parse(prompt)) is not None:
                rows, cols = parsed.rows, parsed.cols
            comparison.check(prompt, rows, cols, seed, steps)
            page = (names, rows, cols, note(rows, cols))
            yield _board(*page, doing=_ROLES[0])
            for images in comparison.generate(prompt, rows, cols, seed, steps):
                sets.append(images)
                panels.append([data_url(panel, "jpeg", quality=95, subsampling=0) for panel in images])
                yield _board(
                    *page, panels=panels, doing=_ROLES[1] if len(sets) == 1 else "judge" * (judge is not None)
                )
            yield _board(*page, panels=panels, scores=comparison.score(prompt, sets))
        # Gradio shows the message as HTML, and ZeroGPU only forwards `gr.Error`
        except Exception as error:
            if isinstance(error, ValueError) and is_user_error(error):  # about a size or a prompt
                raise gr.Error(html.escape(str(error)), print_exception=False) from error
            error_type = type(error).__name__
            raise gr.Error(f"The comparison failed ({error_type}). Choose fewer panels, or see the log.") from error

    rows, cols = layout if (first := comparison.parse(prompts[0])) is None else (first.rows, first.cols)
    is_set = rows * cols > 1
    is_separate = comparison.panel_template is not None
    base, adapter = (html.escape(name) for name in names)
    with gr.Blocks(title=title, analytics_enabled=False) as app:
        gr.Markdown(
            f"# {html.escape(title)}: before and after\n"
            + ("A prompt asks for several images that belong together. " if is_set else "")
            + f"**{base}** generates {'them' if is_set else 'an image'} without and with the adapter **{adapter}**, "
            "from the same noise: what differs is what training changed.",
            elem_id="head",
        )
        with gr.Group():
            prompt = gr.Textbox(
                prompts[0], label="Prompt", lines=3, max_lines=8, max_length=MAX_CHARACTERS, elem_id="prompt",
                info="What all images show in the first line, then a line for each image" if is_separate else None,
            )  # fmt: skip
            with gr.Row():
                number: dict[str, Any] = {"precision": 0, "minimum": 1, "min_width": 60}
                seed = gr.Number(0, label="Seed", maximum=_MAX_SEED, **number | {"minimum": 0})
                steps = gr.Number(num_inference_steps, label="Steps", maximum=MAX_STEPS, **number)
                number |= {"maximum": MAX_PANELS, "visible": is_set and not is_separate}
                rows_, cols_ = (
                    gr.Number(max(1, min(value, MAX_PANELS)), label=label, **number)
                    for value, label in ((rows, "Rows"), (cols, "Columns"))
                )
        with gr.Row():
            compare_button = gr.Button("Compare", variant="primary", elem_id="compare")
            noise_button = gr.Button("Compare from other noise", elem_id="noise")
        board = gr.HTML(
            _board(names, rows, cols, note(rows, cols)),
            html_template=_APP.board,
            css_template=_APP.style,
            js_on_load=_APP.script,
            apply_default_css=False,
        )
        if len(prompts) > 1:
            labels = [textwrap.shorten(text.split("grid layout of ")[-1], 60, placeholder=" …") for text in prompts]
            gr.Examples([[text] for text in prompts], prompt, example_labels=labels, label="Other prompts")
        options: dict[str, Any] = {"api_visibility": "private"}
        prompt.change(follow, prompt, [rows_, cols_], show_progress="hidden", **options)
        inputs = [prompt, rows_, cols_, seed, steps]
        # The default concurrency limit is 1: one comparison at a time is on the device
        gr.on([compare_button.click, prompt.submit], compare, inputs, board, show_progress="hidden", **options)
        new_seed = noise_button.click(lambda: random.randint(0, _MAX_SEED), None, seed, **options)
        new_seed.then(compare, inputs, board, show_progress="hidden", **options)
    return app


def serve_comparison(
    model: str,
    adapter: str | Path,
    judge: str | None = None,
    prompts: Sequence[str] = (),
    layout: tuple[int, int] = (2, 2),
    panel_size: tuple[int, int] = (512, 512),
    num_inference_steps: int = 20,
    guidance_scale: float = 3.5,
    negative_prompt: str | None = None,
    panel_template: str | None = None,
    panel_generation: str = "independent",
    dtype: str = "bfloat16",
    quantization: str | None = "auto",
    offload: bool | None = None,
    title: str | None = None,
    prevent_thread_lock: bool = False,
) -> "Blocks":
    """
    Serve a browser app that compares a base model with its adapter, by images of the same prompt and noise.

    Visitors are limited to 16 panels, 2304 x 2304 pixels, 100 steps and 10,000 characters. Outside of a Space, the app
    only listens on 127.0.0.1. `paco-trl space` writes a Space that calls this function.

    Args:
        model (`str`):
            Hub id or directory of the base model, a text-to-image diffusers pipeline.
        adapter (`str` or `Path`):
            Hub id or directory of the adapter.
        judge (`str`, *optional*):
            Hub id or directory of a judge that scores the sets, see [`PaCoReward`]. If `None`, nothing is scored.
        prompts (`Sequence[str]`, *optional*):
            Prompts to choose from. Defaults to packaged ones.
        layout (`tuple[int, int]`, *optional*, defaults to `(2, 2)`):
            Rows and columns of prompts that name no layout in the T2IS format; `(1, 1)` for single images.
        panel_size (`tuple[int, int]`, *optional*, defaults to `(512, 512)`):
            Height and width of a panel in pixels.
        num_inference_steps (`int`, *optional*, defaults to `20`):
            Denoising steps.
        guidance_scale (`float`, *optional*, defaults to `3.5`), negative_prompt (`str`, *optional*):
            Guidance, as in training.
        panel_template (`str`, *optional*), panel_generation (`str`, *optional*, defaults to `"independent"`):
            Options for separate images, see [`PaCoGRPOConfig`]: the first line of a prompt is for all images, followed
            by one line per image. If `None`, sets are grids.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Compute dtype of the pipeline and the judge.
        quantization (`str`, *optional*, defaults to `"auto"`), offload (`bool`, *optional*):
            See [`load_for_inference`]. The judge also takes turns on the device.
        title (`str`, *optional*):
            Title of the page. Defaults to the name of the adapter.
        prevent_thread_lock (`bool`, *optional*, defaults to `False`):
            Whether to return while the app is served, instead of blocking until it is stopped.

    Returns:
        `gradio.Blocks`: the app.
    """
    try:
        import gradio as gr
    except ImportError as error:
        raise ImportError('The app needs `gradio`: pip install "paco_trl[apps]".') from error
    from ..rewards.paco_reward import PaCoReward

    adapter = str(adapter)
    if judge is not None:
        PaCoReward.load_processor(judge)  # fails before gigabytes are read
    if not prompts:
        demo = arrange_sets(load_image_set_prompts(demo_prompts_path()), panel_template and SEPARATE)
        prompts = prompt_texts(demo.select(range(NUM_EXAMPLES)))
    options: dict[str, Any] = {"quantization": quantization, "offload": offload}
    pipeline = read_adapter(adapter, model, dtype=dtype, **options).load()
    scorer = None if judge is None else PaCoReward.from_pretrained(judge, dtype=dtype)
    call_settings = (guidance_scale, negative_prompt, panel_template, panel_generation)
    comparison = Comparison(pipeline, scorer, panel_size, *call_settings)
    title = title or public_name(adapter)
    names = (public_name(model), title if Path(adapter).is_dir() else public_name(adapter))
    app = make_app(comparison, names, prompts, title, layout, num_inference_steps)
    app.launch(
        share=False, inline=False, ssr_mode=False, footer_links=[], run_history=False, enable_monitoring=False,
        max_file_size=1,  # nothing is uploaded
        css=_APP.page_style, theme=gr.themes.Default(primary_hue="teal"), prevent_thread_lock=prevent_thread_lock,
    )  # fmt: skip
    return app
