# SPDX-License-Identifier: Apache-2.0
r"""
Build a dataset of consistent and inconsistent pairs of images as PaCo-Dataset was built, in a directory for each stage.

    paco-trl build prompts --dataset_name prompts.jsonl
    paco-trl build grids --model_name_or_path black-forest-labs/FLUX.1-dev
    paco-trl build panels
    paco-trl build rank
    paco-trl build pairs
    paco-trl build reasons --base_url http://127.0.0.1:8000/v1 --model Qwen/Qwen2.5-VL-72B-Instruct
    paco-trl build publish --hub_model_id user/my-pairs

Instead of `rank` (by construction or by a judge) people rank with `annotate`, a Gradio app. `paco-trl build <stage>
--help` lists the options of a stage; `--config file.yaml` reads them from a file.

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
    from ..generation.inference import LoadingSpec

PIPELINE_QUANTIZATION = "Quantization of transformer and text encoders: `auto` (as in the run), `nf4`, `int8`, `fp8`, `fp8_storage`, or `None`."


@dataclass
class BuildArguments:
    """Directory of a dataset build."""

    build_dir: str = option("build", "Directory of the dataset, with a subdirectory for each stage.")


@dataclass
class RequestArguments:
    """Requests to an OpenAI-compatible server."""

    api_key_variable: str | None = option(None, "Environment variable with the server's key. If `None`, none is sent.")
    max_concurrency: int = option(8, "Number of concurrent requests to a server.")


@dataclass
class ServerArguments(RequestArguments):
    """Model on an OpenAI-compatible server."""

    base_url: str | None = option(None, "Address of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`.")
    model: str | None = option(None, "Name of the model on the server.")

    def errors(self) -> Iterator[OptionError]:
        """Find what contradicts one another."""
        if self.base_url is None or self.model is None:
            message = f"`--base_url` is {self.base_url!r} and `--model` is {self.model!r}. Give both."
            yield OptionError(message, "base_url", "model")


@dataclass
class PipelineArguments:
    """Diffusers pipeline that generates the images, and the options of its call: an adapter's are those of its run."""

    adapter: str | None = option(
        None,
        "Adapter, or whole transformer of a run: Hub id, directory or LoRA file. If `None`, the untouched model.",
    )
    model_name_or_path: str | None = option(
        None, "Hub id or directory of the pipeline. If `None`, the base of the adapter, or FLUX.1-dev."
    )
    dtype: str = option(
        "auto", "Dtype of the pipeline: `auto` (of the run, or `bfloat16`), `bfloat16`, `float16` or `float32`.",
        choices=("auto", *DTYPES),
    )  # fmt: skip
    quantization: str | None = option("auto", PIPELINE_QUANTIZATION, choices=("auto", *QUANTIZATIONS))
    offload: bool | None = option(
        None, "Whether text encoders and transformer take turns on the GPU. If `None`, as in the run, or `True`."
    )
    vae_tiling: bool | None = option(None, "Whether the VAE decodes in tiles. If `None`, as in the run, or not.")
    num_inference_steps: int | None = option(
        None, "Number of denoising steps. If `None`, that of the run's evaluations, or the pipeline's default."
    )
    guidance_scale: float | None = option(
        None, "Guidance scale. If `None`, that of the run, or the pipeline's default."
    )
    true_cfg_scale: float | None = option(None, "Scale of true CFG (Qwen-Image). If `None`, as `guidance_scale`.")
    negative_prompt: str | None = option(None, "Negative prompt. If `None`, that of the run, or none.")
    height: int | None = option(None, "Height in pixels. If `None`, the column `height`, or the pipeline's for edits.")
    width: int | None = option(None, "Width in pixels. If `None`, the column `width`, or the pipeline's for edits.")

    def read_loading_spec(self) -> "LoadingSpec":
        """Read what is loaded, and how."""
        from ..generation.inference import DEFAULT_MODEL, read_adapter, read_pipeline

        model, names = self.model_name_or_path, ("dtype", "quantization", "offload", "vae_tiling")
        options = {name: getattr(self, name) for name in names}
        if self.adapter is None:
            return read_pipeline(model or DEFAULT_MODEL, **options)
        return read_adapter(self.adapter, model, **options)

    def call_of(self, spec: "LoadingSpec") -> dict[str, Any]:
        """Return the options of the call besides the size: those given, and those of the run."""
        return {name: value for name, value in spec.call.items() if name not in ("height", "width")} | self.call

    @property
    def call(self) -> dict[str, Any]:
        """Those options of the call that were given, besides the size."""
        names = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "negative_prompt")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass
class PromptsArguments(ServerArguments, BuildArguments):
    """Image-set prompts: from a dataset, or written by a language model; then the most diverse of them."""

    dataset_name: str | None = option(None, "Prompts: Hub id, directory or file. If `None`, an LLM writes them.")
    dataset_config: str | None = option(None, "Configuration of the dataset, where it has several.")
    dataset_split: str = option("train", "Split of the dataset.")
    num_written: int = option(2000, "Number of prompts to write (paper).")
    categories: list[str] | None = option(None, "Categories to write prompts for. If `None`, all of the paper.")
    layouts: list[str] = option(["2x2"], "Layouts to write prompts for, rows x columns (paper).")
    embedding_model: str | None = option(
        None, "Model of sentence-transformers (Hub id or directory) to find diverse ones."
    )
    num_selected: int | None = option(None, "Number of prompts to keep; the paper kept 708 of 2,000. If `None`, all.")
    duplicate_threshold: float = option(0.95, "Cosine similarity of near-duplicate prompts, of which one is kept.")
    seed: int = option(0, "Seed of the written prompts.")

    def errors(self) -> Iterator[OptionError]:
        """Find what contradicts one another."""
        if self.dataset_name is None:
            yield from super().errors()
            yield from find_unused(
                self, ("dataset_config", "dataset_split"), "without `--dataset_name`", "dataset_name"
            )
        else:
            of_server = [declared.name for declared in fields(ServerArguments)]
            of_writing = ("num_written", "categories", "layouts", "seed", *of_server)
            yield from find_unused(self, of_writing, "with `--dataset_name`", "dataset_name")
        if not all(re.fullmatch(r"\d+x\d+", text) for text in self.layouts):
            message = f"`--layouts` is {self.layouts}, but must be rows x columns, such as 2x2."
            yield OptionError(message, "layouts")
        if (self.num_selected is None) != (self.embedding_model is None):
            values = f"`--num_selected` is {self.num_selected!r} and `--embedding_model` {self.embedding_model!r}"
            yield OptionError(f"{values}. Give both or none.", "num_selected", "embedding_model")
        elif self.num_selected is None:
            yield from find_unused(self, ("duplicate_threshold",), "without `--num_selected`", "num_selected")


@dataclass
class GridsArguments(PipelineArguments, BuildArguments):
    """Grids: each prompt generated with several seeds."""

    seeds: list[int] = option([0, 1, 2, 3], "Seeds for each prompt (paper: four).")
    batch_size: int = option(1, "Images per pipeline call: more are faster, and take more memory.")


@dataclass
class PanelsArguments(BuildArguments):
    """Panels, cut from the grids, and the ranking instances that they give."""

    exclude_prompts: list[str] = option([], "Ids of prompts to leave out, for example of those with flat grids.")


@dataclass
class AnnotateArguments(BuildArguments):
    """Ranking by people, in a Gradio app on this machine."""

    host: str = option("127.0.0.1", "Address to listen on. It has no password: who reaches it can rank.")
    port: int = option(8090, "Port to listen on.")
    annotations_per_instance: int = option(3, "Number of people who rank each instance. An odd number has fewer ties.")


@dataclass
class RankArguments(BuildArguments):
    """Ranking by a judge, or by construction: a panel of the reference's own grid is more consistent with it."""

    judge_model: str = option(
        "automatic", "`automatic` (construction) or a judge: Hub id, directory, or name at `judge_url`."
    )
    judge_url: str | None = option(None, "Address of its server (key: `VLLM_API_KEY`). If `None`, in this process.")
    annotator: str | None = option(None, "Name of the judge as an annotator. If `None`, the last part of its name.")
    dtype: str = option(
        "auto", "Dtype of a judge in this process: `auto`, `bfloat16`, `float16` or `float32`.",
        choices=("auto", *DTYPES),
    )  # fmt: skip

    def errors(self) -> Iterator[OptionError]:
        """Find what contradicts one another."""
        if self.judge_model == "automatic":
            of_judge = ("judge_url", "annotator", "dtype")
            yield from find_unused(self, of_judge, "without `--judge_model`", "judge_model")
        elif self.judge_url is not None:
            yield from find_unused(self, ("dtype",), "with `--judge_url`", "judge_url")


@dataclass
class PairsArguments(BuildArguments):
    """Pairs in two splits, and rankings that are held out."""

    annotators: list[str] | None = option(None, "Annotators to count. If `None`, all; `automatic` only if alone.")
    num_negatives: int = option(1, "Maximum of inconsistent pairs per instance, of candidates tied at the bottom.")
    test_size: float = option(0.1, "Fraction of the prompts to hold out.")
    max_rankings: int | None = option(3136, "Maximum number of rankings to hold out (paper).")
    seed: int = option(0, "Seed of the split and of all sampling.")

    def errors(self) -> Iterator[OptionError]:
        """Find what contradicts one another."""
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
    """The dataset on the Hub, with its card."""

    hub_model_id: str = option(MISSING, "Hub id of the dataset.")
    private: bool = option(True, "Whether a new dataset is private.")
    license: str | None = option(None, "License of the dataset. If `None`, that of the model of the grids.")


STAGES = {
    "prompts": PromptsArguments,
    "grids": GridsArguments,
    "panels": PanelsArguments,
    "annotate": AnnotateArguments,
    "rank": RankArguments,
    "pairs": PairsArguments,
    "reasons": ReasonsArguments,
    "publish": PublishArguments,
}


def main(words: list[str]) -> int:
    """Run a stage."""
    return run_stage(words, STAGES, "build", __doc__, check_names)
