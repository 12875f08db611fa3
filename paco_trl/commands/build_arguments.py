# SPDX-License-Identifier: Apache-2.0
r"""
Build a dataset of consistent and inconsistent pairs of images like PaCo-Dataset, with one directory per stage.

    paco-trl build prompts --dataset_name prompts.jsonl
    paco-trl build grids --model_name_or_path black-forest-labs/FLUX.1-dev
    paco-trl build panels
    paco-trl build rank
    paco-trl build pairs
    paco-trl build reasons --base_url http://127.0.0.1:8000/v1 --model Qwen/Qwen2.5-VL-72B-Instruct
    paco-trl build publish --hub_model_id user/my-pairs

Instead of `rank` (by construction or with a judge), people can rank with `annotate`, a Gradio app. `paco-trl build
<stage> --help` lists the options of a stage; `--config file.yaml` reads them from a file.

Interrupted stages resume automatically. The pairs train a judge:

    paco-trl reward --dataset_name build/pairs/dataset --dataset_split train --eval_split test \
        --first_token_weight 1 --output_dir my-judge
"""

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..utils.errors import OptionError
from ..utils.option_checks import DTYPES, QUANTIZATIONS
from .options import find_unused, option
from .script_arguments import check_names
from .stages import run_stage


if TYPE_CHECKING:
    from ..generation.inference import PipelineSpec

PIPELINE_QUANTIZATION = (
    "Quantization of transformer and text encoders: `auto` (as in the run), `nf4`, `int8`, `fp8`, `fp8_storage`, or "
    "`None`."
)


@dataclass
class BuildArguments:
    """Directory of a dataset build."""

    build_dir: str = option("build", "Directory of the dataset, with one subdirectory per stage.")


@dataclass
class RequestArguments:
    """Requests to an OpenAI-compatible server."""

    api_key_variable: str | None = option(
        None, "Environment variable with the server's key. If `None`, no key is sent."
    )
    max_concurrency: int = option(8, "Number of concurrent requests to a server.")


@dataclass
class ServerArguments(RequestArguments):
    """Model on an OpenAI-compatible server."""

    base_url: str | None = option(None, "Address of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`.")
    model: str | None = option(None, "Name of the model on the server.")

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of contradictory options."""
        if self.base_url is None or self.model is None:
            message = f"`--base_url` is {self.base_url!r} and `--model` is {self.model!r}. Pass both."
            yield OptionError(message, "base_url", "model")


@dataclass
class PipelineArguments:
    """Diffusers pipeline that generates the images, and its call options, by default those of the adapter's run."""

    adapter: str | None = option(
        None,
        "Adapter, or full transformer of a run: Hub id, directory or LoRA file. If `None`, the unmodified model.",
    )
    model_name_or_path: str | None = option(
        None, "Hub id or directory of the pipeline. Defaults to the adapter's base model, or FLUX.1-dev."
    )
    dtype: str = option(
        "auto", "Dtype of the pipeline: `auto` (of the run, or `bfloat16`), `bfloat16`, `float16` or `float32`.",
        choices=("auto", *DTYPES),
    )  # fmt: skip
    quantization: str | None = option("auto", PIPELINE_QUANTIZATION, choices=("auto", *QUANTIZATIONS))
    offload: bool | None = option(
        None, "Whether text encoders and transformer take turns on the GPU. Defaults to the run's setting, or `True`."
    )
    vae_tiling: bool | None = option(
        None, "Whether the VAE decodes in tiles. Defaults to the run's setting, or `False`."
    )
    num_inference_steps: int | None = option(
        None, "Number of denoising steps. Defaults to the run's evaluations, or the pipeline's default."
    )
    guidance_scale: float | None = option(None, "Guidance scale. Defaults to the run's, or the pipeline's.")
    true_cfg_scale: float | None = option(None, "Scale of true CFG (Qwen-Image). Defaults to `guidance_scale`.")
    negative_prompt: str | None = option(None, "Negative prompt. Defaults to the run's, if any.")
    height: int | None = option(
        None, "Height in pixels. Defaults to the column `height`, or for edits to the pipeline's choice."
    )
    width: int | None = option(
        None, "Width in pixels. Defaults to the column `width`, or for edits to the pipeline's choice."
    )

    def read_loading_spec(self) -> "PipelineSpec":
        """Read the specification of the pipeline."""
        from ..generation.inference import DEFAULT_MODEL, read_adapter, read_pipeline

        model = self.model_name_or_path
        names = ("dtype", "quantization", "offload", "vae_tiling")
        options = {name: getattr(self, name) for name in names}
        if self.adapter is None:
            return read_pipeline(model or DEFAULT_MODEL, **options)
        return read_adapter(self.adapter, model, **options)

    def get_call_arguments(self, spec: "PipelineSpec") -> dict[str, Any]:
        """Return the call options besides the size, by default those of the run."""
        return {name: value for name, value in spec.call.items() if name not in ("height", "width")} | self.call

    @property
    def call(self) -> dict[str, Any]:
        """Return the call options that were passed, besides the size."""
        names = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "negative_prompt")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass
class PromptsArguments(ServerArguments, BuildArguments):
    """Image-set prompts from a dataset or a language model, of which the most diverse are selected."""

    dataset_name: str | None = option(None, "Prompts: Hub id, directory or file. If `None`, an LLM writes them.")
    dataset_config: str | None = option(None, "Configuration of the dataset if it has several.")
    dataset_split: str = option("train", "Split of the dataset.")
    num_written: int = option(2000, "Number of prompts to write (paper).")
    categories: list[str] | None = option(None, "Categories to write prompts for. Defaults to all of the paper.")
    layouts: list[str] = option(["2x2"], "Layouts to write prompts for, rows x columns (paper).")
    embedding_model: str | None = option(
        None, "Model of sentence-transformers (Hub id or directory) to find diverse prompts."
    )
    num_selected: int | None = option(None, "Number of prompts to keep; the paper kept 708 of 2,000. If `None`, all.")
    duplicate_threshold: float = option(
        0.95, "Cosine similarity from which prompts are near-duplicates, to keep only one of them."
    )
    seed: int = option(0, "Seed of the written prompts.")

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of contradictory options."""
        if self.dataset_name is None:
            yield from super().errors()
            yield from find_unused(
                self, ("dataset_config", "dataset_split"), "without `--dataset_name`", "dataset_name"
            )
        else:
            server_options = [field.name for field in fields(ServerArguments)]
            writing_options = ("num_written", "categories", "layouts", "seed", *server_options)
            yield from find_unused(self, writing_options, "with `--dataset_name`", "dataset_name")
        if not all(re.fullmatch(r"\d+x\d+", text) for text in self.layouts):
            message = f"`--layouts` is {self.layouts}, but must be rows x columns, such as 2x2."
            yield OptionError(message, "layouts")
        if (self.num_selected is None) != (self.embedding_model is None):
            values = f"`--num_selected` is {self.num_selected!r} and `--embedding_model` {self.embedding_model!r}"
            yield OptionError(f"{values}. Pass both or neither.", "num_selected", "embedding_model")
        elif self.num_selected is None:
            yield from find_unused(self, ("duplicate_threshold",), "without `--num_selected`", "num_selected")


@dataclass
class GridsArguments(PipelineArguments, BuildArguments):
    """Grids of each prompt with several seeds."""

    seeds: list[int] = option([0, 1, 2, 3], "Seeds for each prompt (paper: four).")
    batch_size: int = option(1, "Images per pipeline call. More are faster, but take more memory.")


@dataclass
class PanelsArguments(BuildArguments):
    """Panels of the grids, and their ranking instances."""

    exclude_prompts: list[str] = option([], "Ids of prompts to leave out, for example because of flat grids.")


@dataclass
class AnnotateArguments(BuildArguments):
    """Ranking by people in a Gradio app on this machine."""

    host: str = option("127.0.0.1", "Address to listen on. There is no password, so everyone who reaches it can rank.")
    port: int = option(8090, "Port to listen on.")
    annotations_per_instance: int = option(
        3, "Number of people who rank each instance. An odd number gives fewer ties."
    )


@dataclass
class RankArguments(BuildArguments):
    """Ranking with a judge, or by construction: panels from the reference's grid are more consistent."""

    judge_model: str = option(
        "automatic", "`automatic` (construction) or a judge: Hub id, directory, or name at `judge_url`."
    )
    judge_url: str | None = option(
        None, "Address of its server (key: `VLLM_API_KEY`). If `None`, it runs in this process."
    )
    annotator: str | None = option(None, "Name of the judge as annotator. Defaults to the last part of its name.")
    dtype: str = option(
        "auto", "Dtype of a judge in this process: `auto`, `bfloat16`, `float16` or `float32`.",
        choices=("auto", *DTYPES),
    )  # fmt: skip

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of contradictory options."""
        if self.judge_model == "automatic":
            of_judge = ("judge_url", "annotator", "dtype")
            yield from find_unused(self, of_judge, "without `--judge_model`", "judge_model")
        elif self.judge_url is not None:
            yield from find_unused(self, ("dtype",), "with `--judge_url`", "judge_url")


@dataclass
class PairsArguments(BuildArguments):
    """Pairs in two splits, and held-out rankings."""

    annotators: list[str] | None = option(
        None, "Annotators to count. Defaults to all, but `automatic` only if there are no others."
    )
    num_negatives: int = option(
        1, "Maximum number of inconsistent pairs per instance, if candidates are tied as the worst."
    )
    test_size: float = option(0.1, "Fraction of the prompts to hold out.")
    max_rankings: int | None = option(3136, "Maximum number of rankings to hold out (paper).")
    seed: int = option(0, "Seed of the split and of all sampling.")

    def errors(self) -> Iterator[OptionError]:
        """Yield errors of contradictory options."""
        if not 0 <= self.test_size < 1:
            message = f"`--test_size` is {self.test_size}; it must be a fraction of the prompts, from 0 to below 1."
            yield OptionError(message, "test_size")
        if self.test_size == 0:
            yield from find_unused(self, ["max_rankings"], "with `--test_size 0`", "test_size")


@dataclass
class ReasonsArguments(ServerArguments, BuildArguments):
    """Reasons for the label of each pair, written by a vision-language model on a server."""

    max_attempts: int = option(3, "Maximum number of queries about a pair before it is left out.")
    min_words: int = option(15, "Minimum number of words of the reasons.")
    max_words: int = option(200, "Maximum number of words of the reasons.")
    seed: int = option(0, "Seed of the answers.")


@dataclass(kw_only=True)
class PublishArguments(BuildArguments):
    """Dataset on the Hub, with its card."""

    hub_model_id: str = option(MISSING, "Hub id of the dataset.")
    private: bool = option(True, "Whether a new dataset is private.")
    license: str | None = option(
        None, "License of the dataset. Defaults to the license of the model that generated the grids."
    )


STAGES = {
    "prompts": (PromptsArguments, "build:make_prompts"),
    "grids": (GridsArguments, "build:make_grids"),
    "panels": (PanelsArguments, "build:make_panels"),
    "annotate": (AnnotateArguments, "build:annotate"),
    "rank": (RankArguments, "build:rank"),
    "pairs": (PairsArguments, "build:make_pairs"),
    "reasons": (ReasonsArguments, "build:make_reasons"),
    "publish": (PublishArguments, "build:publish"),
}


def main(argv: list[str]) -> int:
    """Run a stage."""
    return run_stage(argv, STAGES, "build", __doc__, check_names)
