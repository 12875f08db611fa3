# SPDX-License-Identifier: Apache-2.0
r"""
Is an adapter better than its base model on your own prompts? One call generates, scores, and writes a page:

    paco-trl evaluate prompts --dataset_name sets.jsonl --adapter paco-flux \
        --rewards consistency clip_t --output_dir evaluation/prompts

An adapter and its base model on T2IS-Bench or GEdit-Bench, in one call, or in the steps `generate`, `score` and
`report`:

    paco-trl evaluate images t2is --dataset_name t2is.jsonl --adapter user/paco-flux \
        --judges Qwen/Qwen2.5-VL-7B-Instruct google/gemma-3-4b-it --output_dir evaluation

`paco-trl evaluate <stage> --help` lists the options of a stage, which a YAML file can give as well (`--config
file.yaml`). Interrupted stages resume. Images that were generated elsewhere are scored with `score --images
directory`.

A judge is evaluated on rankings by people, or on EditReward-Bench:

    paco-trl evaluate judge --judge_model X-GenGroup/PaCo-Reward-7B --output_dir results
"""

import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING

from ..utils.chat import read_api_key
from ..utils.errors import OptionError, collect_errors
from ..utils.option_checks import DTYPES, PANEL_GENERATIONS, PROTOCOLS, QUANTIZATIONS, SET_LAYOUTS
from .build_arguments import PIPELINE_QUANTIZATION, PipelineArguments, RequestArguments
from .options import find_unused, option
from .script_arguments import (
    JUDGE_ANSWERS,
    JUDGE_ATTENTION,
    JUDGE_QUANTIZATION,
    WORDS,
    PromptDataArguments,
    RewardOptions,
    check_names,
    find_unused_reward_options,
    judge_options,
    read_words_prompt,
)
from .stages import run_stage


if TYPE_CHECKING:
    from ..rewards import ServedJudge
    from ..rewards.paco_reward import PaCoReward


# Options only for a judge on a server
SERVED_ONLY = ("api_key_variable", "max_concurrency")
# Benchmark -> its dataset
BENCHMARKS = {
    "rankings": "X-GenGroup/ConsistencyRank-Bench",
    "edits": "",  # your own
    "edit_reward": "EditScore/EditReward-Bench",
    "vc_reward": "GEditBench-v2/VCReward-Bench",
    "editreward_compass": "DogNeverSleep/EditReward-Compass",
    "mmrb2": "edit.json",  # written by its build script
}
# Options only for a judge in the process
OF_JUDGES = ("judge_quantization", "judge_attn_implementation")
IN_PROCESS_ONLY = (*OF_JUDGES, "device", "dtype", "trust_remote_code")
# Options of `score` that only one of the benchmarks has
_T2IS_ONLY = ("alignment_file", "alignment_model", "alignment_url", "aesthetics_head", "clip_model", "device", "dtype")
_T2IS_ONLY += ("batch_size", "trust_remote_code", *OF_JUDGES)
_GEDIT_ONLY = ("protocol", "gedit_repo")
# Option of `score` -> options that depend on it
_DEPENDENT_OPTIONS = {
    "judges": ("judge_url",),
    "alignment_model": ("alignment_file", "alignment_url"),
    "aesthetics_head": ("clip_model",),
}


@dataclass
class JudgeOptions(RequestArguments):
    """Location of a judge, in the process or on a server, and how it runs."""

    judge_url: str | None = option(None, "OpenAI-compatible server of the judge, such as `http://127.0.0.1:8000/v1`.")
    judge_quantization: str | None = option(None, JUDGE_QUANTIZATION)
    judge_attn_implementation: str | None = option(None, JUDGE_ATTENTION)
    device: str | None = option(None, "Device to score on. Defaults to an accelerator if there is one, or the CPU.")
    dtype: str = option(
        "auto", "Dtype of a judge in the process: `float32`, `bfloat16`, `float16`, `auto` (its own).",
        choices=("auto", *DTYPES),
    )  # fmt: skip
    batch_size: int = option(16, "Queries per forward pass.")
    trust_remote_code: bool = option(False, "Whether to run code that comes with a judge.")


def load_judge(args: JudgeOptions, name: str, url: str | None) -> "PaCoReward | ServedJudge":
    """Load a judge into the process, or create a client of a judge at `url`, without a check."""
    if url is not None:
        from ..rewards import ServedJudge

        key = read_api_key(args.api_key_variable)
        return ServedJudge(url, name, api_key=key, max_concurrency=args.max_concurrency)
    from ..rewards.paco_reward import PaCoReward

    options = {option: getattr(args, option) for option in ("device", "dtype", "batch_size", "trust_remote_code")}
    return PaCoReward.from_pretrained(name, **options, **judge_options(args, None))


@dataclass
class SetOptions:
    """Layout of image sets."""

    set_layout: str | None = option(
        None,
        "Layout of image sets: a `grid`, or `separate` images. Defaults to the adapter's run, or the layout in its "
        "row.",
        choices=SET_LAYOUTS,
    )


@dataclass
class PanelOptions(SetOptions):
    """Layout of image sets, and generation of separate images."""

    panel_template: str | None = option(
        None, "Prompt of a separate image. Defaults to the adapter's run, or `{theme} {panel}`."
    )
    panel_generation: str | None = option(
        None,
        "Separate images are `independent`, from `shared_noise`, or `anchored`: the first is the source of the "
        "others. Defaults to the adapter's run, or `independent`.",
        choices=(None, *PANEL_GENERATIONS),
    )


@dataclass
class PromptsArguments(RewardOptions, PanelOptions, PromptDataArguments):
    """Your own prompts: compare the base model with adapters by any rewards, on a page with side-by-side images."""

    adapter: list[str] | None = option(
        None,
        "Adapters, or full transformers of runs, to compare with the base model. If `None`, only the base model is "
        "evaluated.",
    )
    model_name_or_path: str | None = option(  # type: ignore[assignment]  # has a default in training
        None, "Hub id or directory of the pipeline. Defaults to the first adapter's base model, or FLUX.1-dev."
    )
    output_dir: str = option("evaluation/prompts", "Directory for images, scores, and one page per adapter.")
    num_generations: int = option(1, "Number of images per prompt and model.")
    num_inference_steps: int | None = option(None, "Denoising steps. Defaults to the run's evaluations, or 20.")
    guidance_scale: float | None = option(None, "Guidance scale. Defaults to the run's, or 3.5.")
    negative_prompt: str | None = option(None, "Negative prompt. Defaults to the run's, if any.")
    height: int | None = option(None, "Height in pixels, for rows without one. Defaults to the run's, or 1024.")
    width: int | None = option(None, "Width in pixels, for rows without one. Defaults to the run's, or 1024.")
    seed: int = option(42, "Seed of the noise, the same for the base model and all adapters.")
    bf16: bool | None = option(
        None, "Whether to generate in bf16 instead of float32. Defaults to the run's setting, or `True`."
    )
    quantization: str | None = option("auto", PIPELINE_QUANTIZATION, choices=("auto", *QUANTIZATIONS))
    vae_tiling: bool | None = option(
        None, "Whether the VAE decodes in tiles. Defaults to the run's setting, or `False`."
    )
    num_shown: int = option(24, "Number of images per model on the page, with the largest gains and losses.")

    @property
    def folders(self) -> list[str]:
        """Return the directories of the results, for the base model and the adapters."""
        return ["base", *(os.path.basename(os.path.abspath(adapter)) for adapter in self.adapter or ())]

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of contradictory options."""
        yield from find_unused_reward_options(self)
        if len({*self.folders}) < len(self.folders):
            yield OptionError(
                f"`--adapter` is {', '.join(self.adapter or ())}, so that two systems would write to one directory, "
                "named after the last part of a name (or `base`). Evaluate them in separate calls with their own "
                "`--output_dir`.", "adapter",
            )  # fmt: skip


@dataclass
class BenchmarkArguments(SetOptions):
    """Benchmark of image models."""

    benchmark: str = option(
        "t2is",
        "`t2is` (T2IS-Bench), `gedit` (GEdit-Bench), or only for `generate` `stories` (ViStoryBench).",
        choices=("t2is", "gedit", "stories"),
    )
    dataset_name: str | None = option(
        None,
        "Hub id, directory or JSON lines of its prompts: `t2is` with the criteria, `gedit` raw or converted.",
        required=True,
    )
    dataset_config: str | None = option(None, "Configuration of the dataset if it has several.")
    dataset_split: str = option("train", "Split of the dataset.")


@dataclass
class ScoredArguments(BenchmarkArguments):
    """Benchmark of image models, and the files that its scores depend on."""

    alignment_file: str | None = option(None, "`prompt_alignment.json` of T2IS-Bench: what each panel should show.")
    missing: str = option("error", "Missing images: `error`, or `zero` to score them as 0.", choices=("error", "zero"))
    protocol: str = option(
        "default", "`default`, or `published` as its own script does (`t2is`: in `report` only).", choices=PROTOCOLS
    )

    def errors(self) -> Iterator[OptionError]:
        """Yield an error for a benchmark that is scored elsewhere."""
        if self.benchmark == "stories":
            message = "ViStoryBench's evaluator scores them: `generate --panel_files True` writes its input."
            yield OptionError(message, "benchmark")


@dataclass
class GenerateArguments(PipelineArguments, PanelOptions, BenchmarkArguments):
    """Images of one system: a pipeline, with or without an adapter."""

    seeds: list[int] = option([0], "Seeds for each prompt; only one with `gedit`.")
    batch_size: int = option(1, "Images per call of the pipeline; not for `gedit`.")
    panel_files: bool = option(
        False, "Whether to also write panels as T2IS-Bench's or ViStoryBench's script reads them."
    )
    output_dir: str = option("evaluation/base", "Directory of the system. Each system needs a directory of its own.")

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of contradictory options."""
        if self.benchmark == "gedit":
            yield from find_unused(self, ("panel_files", "batch_size"), "with `--benchmark gedit`", "benchmark")
        if len(self.seeds) > 1 and (self.benchmark == "gedit" or self.panel_files):
            message = f"`--seeds` are {self.seeds}, but GEdit-Bench and `--panel_files` take one."
            yield OptionError(message, "seeds", "panel_files", "benchmark")


@dataclass
class ScoringOptions(ScoredArguments, JudgeOptions):
    """Scorers of images: one or more judges, and optionally other models."""

    judges: list[str] | None = option(
        None, "Judges of consistency: Hub ids, directories, or names at `judge_url`. With `gedit` one, on a server."
    )
    alignment_model: str | None = option(
        None, "Model that decides whether a panel shows its texts: Hub id, directory, or name at `alignment_url`."
    )
    alignment_url: str | None = option(None, "Address of the OpenAI-compatible server of `alignment_model`.")
    aesthetics_head: str | None = option(None, "Aesthetic predictor on CLIP: safetensors, Hub id or directory.")
    clip_model: str = option("openai/clip-vit-large-patch14", "CLIP model of the aesthetic predictor.")
    gedit_repo: str | None = option(None, "Clone of `stepfun-ai/Step1X-Edit`, for prompts of the published protocol.")


@dataclass
class ScoreArguments(ScoringOptions):
    """Scores of one system. Rerun the stage to add other scores."""

    output_dir: str = option("evaluation/base", "Directory of the system.")
    images: str | None = option(
        None, "Directory of images generated elsewhere. Defaults to those saved by `generate`."
    )

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of contradictory options."""
        yield from super().errors()
        is_gedit = self.benchmark == "gedit"
        judges = self.judges or []
        urls = ("judge_url", "alignment_url")
        others = _T2IS_ONLY if is_gedit else _GEDIT_ONLY
        yield from find_unused(self, others, f"with `--benchmark {self.benchmark}`", "benchmark")
        if self.judge_url is None and self.alignment_url is None:
            yield from find_unused(self, SERVED_ONLY, "without `--judge_url` or `--alignment_url`", *urls)
        for name, unused in _DEPENDENT_OPTIONS.items():
            if getattr(self, name) is None:
                yield from find_unused(self, unused, f"without `--{name}`", name)
        if is_gedit and (self.judge_url is None or len(judges) != 1):
            message = "`--benchmark gedit` takes one judge on a server: `--judge_url` and its name in `--judges`."
            yield OptionError(message, "benchmark", "judge_url", "judges")
        if not is_gedit and self.alignment_model is not None and self.alignment_file is None:
            message = "`--alignment_model` requires `--alignment_file`, which has what each panel should show."
            yield OptionError(message, "alignment_model", "alignment_file")
        addresses = [self.judge_url] * len(judges) + [self.alignment_url] * (self.alignment_model is not None)
        if not is_gedit and None not in addresses:
            of_judge = (*OF_JUDGES, "trust_remote_code")
            yield from find_unused(self, of_judge, "without a judge in the process", *urls)
            if self.aesthetics_head is None:
                of_model = ("device", "dtype", "batch_size")
                yield from find_unused(self, of_model, "without a model in the process", *urls)


@dataclass
class ReportOptions(ScoredArguments):
    """Options of a report."""

    train_dataset_name: str | None = option(
        None, "Training prompts to search for the benchmark's. If `None`, leakage is not checked."
    )
    num_shown: int = option(12, "Number of sets on the page, with the largest gains and losses.")
    card: str | None = option(None, "Directory of the adapter whose model card gets the results of the last system.")


@dataclass
class ReportArguments(ReportOptions):
    """Results of one system, or of two and their difference, as JSON, Markdown, an HTML page, and in the card."""

    base: str = option("evaluation/base", "Directory of the system to compare with, or of the only system.")
    tuned: str | None = option(None, "Directory of the system to compare with `base`.")
    output_dir: str = option("evaluation/report", "Directory for `results.json`, `results.md` and `report.html`.")

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of contradictory options."""
        yield from super().errors()
        if self.card is not None and self.tuned is None:
            message = "`--card` is for the adapter of a tuned system, but there is none. Give `--tuned` too."
            yield OptionError(message, "card", "tuned")


@dataclass(kw_only=True)
class ImagesArguments(GenerateArguments, ScoringOptions, ReportOptions):
    """A benchmark in one call: generate with the base model and an adapter, score, and compare in a report."""

    benchmark: str = option(MISSING, "`t2is` (T2IS-Bench) or `gedit` (GEdit-Bench).", choices=("t2is", "gedit"))
    output_dir: str = option("evaluation", "Directory, with `base`, `tuned` and `report` in it.")

    def errors(self) -> Iterator[OptionError]:
        """Yield missing options. Contradictions are found by the stages at their start."""
        if not self.judges:
            yield OptionError("`--judges` is missing. Pass at least one, or there is nothing to report.", "judges")


@dataclass
class JudgeArguments(JudgeOptions):
    """Judge or baseline, benchmark, and the directory of the results."""

    judge_model: str = option(
        "X-GenGroup/PaCo-Reward-7B",
        "Hub id or directory of a judge, its name on the server with `judge_url`, or the baseline `clip-i`.",
    )
    benchmark: str = option(
        "rankings",
        "`rankings`, or of edits `edit_reward`, `vc_reward`, `editreward_compass`, `mmrb2`, or `edits` of your own.",
        choices=tuple(BENCHMARKS),
    )
    dataset_name: str | None = option(
        None,
        "Hub id, directory or file: a copy of the benchmark, or rankings or pairs in the formats of `paco-trl "
        "reward`; with `edits`, rankings of two edits with a `dimension`. If `None`, the benchmark on the Hub.",
    )
    dataset_config: str | None = option(None, "Configuration of the dataset if it has several.")
    dataset_split: str = option("train", "Split to evaluate on; ConsistencyRank-Bench has only one.")
    protocol: str = option(
        "default",
        "Protocol: `default`, or `published` to repeat the published scripts.",
        choices=PROTOCOLS,
    )
    template: str | None = option(
        None,
        "Rankings: `theme`, `criteria` or `plain`; default: the judge's own question, else `theme` (`plain` with the "
        "published protocol). Edits: `words:editscore` and the like, as in `--rewards`, or for `vc_reward` a YAML "
        "prompt of GEditBench v2 about both edits; default: P(Yes) of each edit.",
    )
    judge_answers: int = option(1, JUDGE_ANSWERS)
    output_dir: str = option("results", "Directory for the scores, `results.json` and `results.md`.")
    clip_model: str = option("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "CLIP model of the judge `clip-i`.")

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of contradictory options."""
        if self.benchmark == "edits" and self.dataset_name is None:
            yield OptionError("`--benchmark edits` is your own. Name its dataset: `--dataset_name`.", "dataset_name")
        in_words = self.template is not None and self.template.startswith(WORDS)
        if in_words and self.benchmark == "rankings":
            message = f"`--template {self.template}` is for benchmarks of edits, such as `--benchmark edit_reward`."
            yield OptionError(message, "template", "benchmark")
        elif in_words:
            yield from collect_errors(read_words_prompt, self.template, self.judge_url, options=("template",))
        else:
            yield from find_unused(self, ("judge_answers",), "without `--template words:...`", "template")
        unused = ["template"] * (not in_words and self.benchmark not in ("rankings", "vc_reward"))
        unused += ["protocol"] * (in_words or self.benchmark not in ("rankings", "edit_reward"))
        unused += ["dataset_config", "dataset_split"] * (self.benchmark == "mmrb2")
        yield from find_unused(self, unused, f"with `--benchmark {self.benchmark}`", "benchmark")
        if self.judge_model == "clip-i":
            of_judge = (*OF_JUDGES, "trust_remote_code")
            yield from find_unused(self, of_judge, "with `--judge_model clip-i`", "judge_model")
        else:
            yield from find_unused(self, ("clip_model",), "without `--judge_model clip-i`", "judge_model")
        where, others = ("without", SERVED_ONLY) if self.judge_url is None else ("with", IN_PROCESS_ONLY)
        yield from find_unused(self, others, f"{where} `--judge_url`", "judge_url")


STAGES = {
    "prompts": (PromptsArguments, "evaluate_prompts:evaluate_prompts"),
    "images": (ImagesArguments, "evaluate:evaluate_images"),
    "generate": (GenerateArguments, "evaluate:generate_images"),
    "score": (ScoreArguments, "evaluate:score_images"),
    "report": (ReportArguments, "evaluate:report_images"),
    "judge": (JudgeArguments, "evaluate_judge:evaluate"),
}


def main(argv: list[str]) -> int:
    """Run a stage."""
    return run_stage(argv, STAGES, "evaluate", __doc__, check_names, positional={"images": "benchmark"})
