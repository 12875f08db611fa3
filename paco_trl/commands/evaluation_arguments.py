# SPDX-License-Identifier: Apache-2.0
"""Arguments of `examples/evaluate_reward.py` and of the steps of `examples/evaluate_generation.py`."""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from ..rewards import ServedJudge
    from ..rewards.paco_reward import PaCoReward


DTYPES = ("bfloat16", "float16", "float32")

_BENCHMARK = {"help": "`t2is` (T2IS-Bench) or `gedit` (GEdit-Bench)."}
_DATASET = {
    "help": "Hub id, folder or JSON-lines file of the benchmark's prompts: with `t2is` those of T2IS-Bench with the "
    "criteria, with `gedit` raw or converted rows of GEdit-Bench."
}
_SPLIT = {"help": "Split of the dataset."}
_ALIGNMENT_FILE = {"help": "`prompt_alignment.json` of T2IS-Bench: what each panel should show."}
_PROTOCOL = {"help": "`default`, or `published` for what the benchmark's own script does."}
_MISSING = {"help": "What missing pictures are: `error`, or `zero` for a score of 0 each."}


@dataclass
class JudgeArguments:
    """
    Where a judge is: in the process, or on a server.

    Args:
        judge_url (`str`, *optional*):
            Address of an OpenAI-compatible server that has the judge, for example `http://127.0.0.1:8000/v1`.
        api_key_variable (`str`, *optional*):
            Name of the environment variable that holds the key of the server. If `None`, no key is sent.
        max_concurrency (`int`, *optional*, defaults to `8`):
            Requests to a server under way at the same time.
        device (`str`, *optional*):
            Device to score on. If `None`, an accelerator if there is one, else the CPU.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype of a judge in the process: `float32`, `bfloat16`, `float16`, or `auto` for its own.
        batch_size (`int`, *optional*, defaults to `16`):
            Questions of a forward pass.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether code that comes with a judge may be run.
    """

    judge_url: str | None = field(
        default=None,
        metadata={
            "help": "Address of an OpenAI-compatible server that has the judge, for example `http://127.0.0.1:8000/v1`."
        },
    )
    api_key_variable: str | None = field(
        default=None,
        metadata={
            "help": "Name of the environment variable that holds the key of the server. If `None`, no key is sent."
        },
    )
    max_concurrency: int = field(default=8, metadata={"help": "Requests to a server under way at the same time."})
    device: str | None = field(
        default=None,
        metadata={"help": "Device to score on. If `None`, an accelerator if there is one, else the CPU."},
    )
    dtype: str = field(
        default="auto",
        metadata={"help": "Dtype of a judge in the process: `float32`, `bfloat16`, `float16`, or `auto` for its own."},
    )
    batch_size: int = field(default=16, metadata={"help": "Questions of a forward pass."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether code that comes with a judge may be run."}
    )

    def __post_init__(self):
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"`--dtype` is {self.dtype!r}, but must be auto or one of {', '.join(DTYPES)}.")
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise ValueError(f"The environment variable {self.api_key_variable!r} (`--api_key_variable`) is not set.")


def load_judge(args: JudgeArguments, name: str, url: str | None) -> "PaCoReward | ServedJudge":
    """Make a judge in the process, or at `url` on a server, which is not asked yet whether it is there."""
    if url is not None:
        from ..rewards import ServedJudge

        key = None if args.api_key_variable is None else os.environ[args.api_key_variable]
        return ServedJudge(url, name, api_key=key, max_concurrency=args.max_concurrency)
    from ..rewards.paco_reward import PaCoReward

    return PaCoReward.from_pretrained(
        name,
        device=args.device,
        dtype=args.dtype,
        batch_size=args.batch_size,
        trust_remote_code=args.trust_remote_code,
    )


@dataclass
class DrawArguments:
    """
    The pictures of one system: a pipeline, with or without an adapter.

    Args:
        benchmark (`str`, *optional*, defaults to `"t2is"`):
            `t2is` (T2IS-Bench) or `gedit` (GEdit-Bench).
        dataset_name (`str`, *optional*):
            Hub id, folder or JSON-lines file of the benchmark's prompts: with `t2is` those of T2IS-Bench with the
            criteria, with `gedit` raw or converted rows of GEdit-Bench.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of the dataset.
        output_dir (`str`, *optional*, defaults to `"evaluation/base"`):
            Folder of the system; each needs one of its own.
        model (`str`, *optional*, defaults to `"black-forest-labs/FLUX.1-dev"`):
            Hub id or folder of a diffusers pipeline.
        adapter (`str`, *optional*):
            Hub id or folder of a trained adapter. If `None`, the untouched model.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Dtype of the pipeline: `bfloat16`, `float16` or `float32`.
        seeds (`list[int]`, *optional*, defaults to `[0]`):
            Seeds that each prompt is drawn with; with `gedit` one.
        batch_size (`int`, *optional*, defaults to `1`):
            Images of one call of the pipeline; not for `gedit`.
        num_inference_steps (`int`, *optional*):
            Denoising steps. If `None`, the pipeline's default.
        guidance_scale (`float`, *optional*):
            Guidance scale. If `None`, the pipeline's default.
        true_cfg_scale (`float`, *optional*):
            Scale of true guidance, for pipelines that have both, such as Qwen-Image. If `None`, the pipeline's
            default.
        negative_prompt (`str`, *optional*):
            Negative prompt. If `None`, none, and a pipeline such as Qwen-Image does not guide.
        height (`int`, *optional*):
            Height of an image in pixels. If `None`, the column `height`, or for edits the pipeline's default.
        width (`int`, *optional*):
            Width of an image in pixels. If `None`, the column `width`, or for edits the pipeline's default.
        panel_files (`bool`, *optional*, defaults to `False`):
            Whether to write each panel of the grids into the folder `panels` as well, with the names that the script of
            T2IS-Bench looks for.
    """

    benchmark: str = field(default="t2is", metadata=_BENCHMARK)
    dataset_name: str | None = field(default=None, metadata=_DATASET)
    dataset_split: str = field(default="train", metadata=_SPLIT)
    output_dir: str = field(
        default="evaluation/base", metadata={"help": "Folder of the system; each needs one of its own."}
    )
    model: str = field(
        default="black-forest-labs/FLUX.1-dev", metadata={"help": "Hub id or folder of a diffusers pipeline."}
    )
    adapter: str | None = field(
        default=None, metadata={"help": "Hub id or folder of a trained adapter. If `None`, the untouched model."}
    )
    dtype: str = field(
        default="bfloat16", metadata={"help": "Dtype of the pipeline: `bfloat16`, `float16` or `float32`."}
    )
    seeds: list[int] = field(
        default_factory=lambda: [0], metadata={"help": "Seeds that each prompt is drawn with; with `gedit` one."}
    )
    batch_size: int = field(default=1, metadata={"help": "Images of one call of the pipeline; not for `gedit`."})
    num_inference_steps: int | None = field(
        default=None, metadata={"help": "Denoising steps. If `None`, the pipeline's default."}
    )
    guidance_scale: float | None = field(
        default=None, metadata={"help": "Guidance scale. If `None`, the pipeline's default."}
    )
    true_cfg_scale: float | None = field(
        default=None,
        metadata={
            "help": "Scale of true guidance, for pipelines that have both, such as Qwen-Image. If `None`, the "
            "pipeline's default."
        },
    )
    negative_prompt: str | None = field(
        default=None,
        metadata={"help": "Negative prompt. If `None`, none, and a pipeline such as Qwen-Image does not guide."},
    )
    height: int | None = field(
        default=None,
        metadata={
            "help": "Height of an image in pixels. If `None`, the column `height`, or for edits the pipeline's default."
        },
    )
    width: int | None = field(
        default=None,
        metadata={
            "help": "Width of an image in pixels. If `None`, the column `width`, or for edits the pipeline's default."
        },
    )
    panel_files: bool = field(
        default=False,
        metadata={
            "help": "Whether to write each panel of the grids into the folder `panels` as well, with the names that the "
            "script of T2IS-Bench looks for."
        },
    )


@dataclass
class ScoreArguments(JudgeArguments):
    """
    Scores of one system: by one judge or several, and by whatever else is named. It can be run again with other ones.

    Args:
        benchmark (`str`, *optional*, defaults to `"t2is"`):
            `t2is` (T2IS-Bench) or `gedit` (GEdit-Bench).
        dataset_name (`str`, *optional*):
            Hub id, folder or JSON-lines file of the benchmark's prompts: with `t2is` those of T2IS-Bench with the
            criteria, with `gedit` raw or converted rows of GEdit-Bench.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of the dataset.
        alignment_file (`str`, *optional*):
            `prompt_alignment.json` of T2IS-Bench: what each panel should show.
        output_dir (`str`, *optional*, defaults to `"evaluation/base"`):
            Folder of the system.
        images (`str`, *optional*):
            Folder of pictures that somebody else made. If `None`, those that `draw` made in the folder of the system.
        name (`str`, *optional*):
            Name of such a system in the report. If `None`, that of the folder.
        missing (`str`, *optional*, defaults to `"error"`):
            What missing pictures are: `error`, or `zero` for a score of 0 each.
        rescore_changed (`bool`, *optional*, defaults to `False`):
            Whether to score pictures anew that were changed since they were scored. Otherwise they are an error.
        judges (`list[str]`, *optional*):
            Judges of consistency, one after the other: Hub ids or folders, or with `judge_url` the names of models on
            the server. With `gedit` one, on a server.
        alignment_model (`str`, *optional*):
            Vision-language model that is asked whether each panel shows its texts: Hub id or folder, or with
            `alignment_url` the name of a model on the server.
        alignment_url (`str`, *optional*):
            Address of an OpenAI-compatible server that has it.
        aesthetics_head (`str`, *optional*):
            Safetensors file of an aesthetic predictor on CLIP embeddings, or Hub id or folder with one.
        clip_model (`str`, *optional*, defaults to `"openai/clip-vit-large-patch14"`):
            CLIP of the aesthetic predictor.
        protocol (`str`, *optional*, defaults to `"default"`):
            With `gedit`: `default`, or `published` for the questions of the benchmark's own script. With `t2is` the
            protocol is a matter of the report.
        gedit_repo (`str`, *optional*):
            Folder of a clone of `stepfun-ai/Step1X-Edit`, from which the published protocol of `gedit` reads its
            prompts.
    """

    benchmark: str = field(default="t2is", metadata=_BENCHMARK)
    dataset_name: str | None = field(default=None, metadata=_DATASET)
    dataset_split: str = field(default="train", metadata=_SPLIT)
    alignment_file: str | None = field(default=None, metadata=_ALIGNMENT_FILE)
    output_dir: str = field(default="evaluation/base", metadata={"help": "Folder of the system."})
    images: str | None = field(
        default=None,
        metadata={
            "help": "Folder of pictures that somebody else made. If `None`, those that `draw` made in the folder of the "
            "system."
        },
    )
    name: str | None = field(
        default=None, metadata={"help": "Name of such a system in the report. If `None`, that of the folder."}
    )
    missing: str = field(default="error", metadata=_MISSING)
    rescore_changed: bool = field(
        default=False,
        metadata={
            "help": "Whether to score pictures anew that were changed since they were scored. Otherwise they are an error."
        },
    )
    judges: list[str] | None = field(
        default=None,
        metadata={
            "help": "Judges of consistency, one after the other: Hub ids or folders, or with `judge_url` the names of "
            "models on the server. With `gedit` one, on a server."
        },
    )
    alignment_model: str | None = field(
        default=None,
        metadata={
            "help": "Vision-language model that is asked whether each panel shows its texts: Hub id or folder, or with "
            "`alignment_url` the name of a model on the server."
        },
    )
    alignment_url: str | None = field(
        default=None, metadata={"help": "Address of an OpenAI-compatible server that has it."}
    )
    aesthetics_head: str | None = field(
        default=None,
        metadata={
            "help": "Safetensors file of an aesthetic predictor on CLIP embeddings, or Hub id or folder with one."
        },
    )
    clip_model: str = field(
        default="openai/clip-vit-large-patch14", metadata={"help": "CLIP of the aesthetic predictor."}
    )
    protocol: str = field(
        default="default",
        metadata={
            "help": "With `gedit`: `default`, or `published` for the questions of the benchmark's own script. With "
            "`t2is` the protocol is a matter of the report."
        },
    )
    gedit_repo: str | None = field(
        default=None,
        metadata={
            "help": "Folder of a clone of `stepfun-ai/Step1X-Edit`, from which the published protocol of `gedit` reads "
            "its prompts."
        },
    )


@dataclass
class ReportArguments:
    """
    The figures of one system, or of two and their difference: JSON, Markdown, an HTML page, and the card.

    Args:
        benchmark (`str`, *optional*, defaults to `"t2is"`):
            `t2is` (T2IS-Bench) or `gedit` (GEdit-Bench).
        dataset_name (`str`, *optional*):
            Hub id, folder or JSON-lines file of the benchmark's prompts: with `t2is` those of T2IS-Bench with the
            criteria, with `gedit` raw or converted rows of GEdit-Bench.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of the dataset.
        alignment_file (`str`, *optional*):
            `prompt_alignment.json` of T2IS-Bench: what each panel should show.
        base (`str`, *optional*, defaults to `"evaluation/base"`):
            Folder of the system to compare with, or of the only one.
        tuned (`str`, *optional*):
            Folder of the system that is compared with it.
        output_dir (`str`, *optional*, defaults to `"evaluation/report"`):
            Folder for `results.json`, `results.md` and `report.html`.
        missing (`str`, *optional*, defaults to `"error"`):
            What missing pictures are: `error`, or `zero` for a score of 0 each.
        train_dataset_name (`str`, *optional*):
            Hub id, folder or JSON-lines file of the prompts that were trained on, to find those of the benchmark among
            them. If `None`, the report says that it was not checked.
        train_dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of them.
        protocol (`str`, *optional*, defaults to `"default"`):
            `default`, or `published` for what the benchmark's own script does.
        num_shown (`int`, *optional*, defaults to `6`):
            Sets that the page shows of each kind: best, worst, most changed.
        card (`str`, *optional*):
            Folder of the adapter whose model card gets the results of the last system.
    """

    benchmark: str = field(default="t2is", metadata=_BENCHMARK)
    dataset_name: str | None = field(default=None, metadata=_DATASET)
    dataset_split: str = field(default="train", metadata=_SPLIT)
    alignment_file: str | None = field(default=None, metadata=_ALIGNMENT_FILE)
    base: str = field(
        default="evaluation/base", metadata={"help": "Folder of the system to compare with, or of the only one."}
    )
    tuned: str | None = field(default=None, metadata={"help": "Folder of the system that is compared with it."})
    output_dir: str = field(
        default="evaluation/report",
        metadata={"help": "Folder for `results.json`, `results.md` and `report.html`."},
    )
    missing: str = field(default="error", metadata=_MISSING)
    train_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub id, folder or JSON-lines file of the prompts that were trained on, to find those of the "
            "benchmark among them. If `None`, the report says that it was not checked."
        },
    )
    train_dataset_split: str = field(default="train", metadata={"help": "Split of them."})
    protocol: str = field(default="default", metadata=_PROTOCOL)
    num_shown: int = field(
        default=6, metadata={"help": "Sets that the page shows of each kind: best, worst, most changed."}
    )
    card: str | None = field(
        default=None,
        metadata={"help": "Folder of the adapter whose model card gets the results of the last system."},
    )
