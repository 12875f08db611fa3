# SPDX-License-Identifier: Apache-2.0
"""Arguments of the stages of `examples/build_dataset.py`."""

from dataclasses import dataclass, field


@dataclass
class PromptsArguments:
    """
    Image-set prompts: taken from a dataset, or written by a language model; then the most diverse ones of them.

    Args:
        build_dir (`str`, *optional*, defaults to `"build"`):
            Folder of the whole dataset, with a folder for each stage.
        dataset_name (`str`, *optional*):
            Hub id, folder or JSON-lines file of prompts. If `None`, a language model writes them.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of the dataset.
        base_url (`str`, *optional*):
            Address of an OpenAI-compatible server, for example `http://127.0.0.1:8000/v1`.
        model (`str`, *optional*):
            Name under which the server has the model.
        api_key_variable (`str`, *optional*):
            Name of the environment variable that holds the server's key. If `None`, no key is sent.
        max_concurrency (`int`, *optional*, defaults to `8`):
            Requests under way at the same time.
        num_written (`int`, *optional*, defaults to `2000`):
            Prompts that the language model writes (paper).
        categories (`list[str]`, *optional*):
            Categories that it writes prompts of. If `None`, all of the paper.
        layouts (`list[str]`, *optional*, defaults to `["2x2"]`):
            Layouts that it writes prompts for, rows x columns (paper).
        embedding_model (`str`, *optional*):
            Hub id or folder of a sentence-embedding or CLIP text model, by which the diverse ones are found.
        num_selected (`int`, *optional*):
            Prompts to keep, of the paper's 2,000 it was 708. If `None`, all.
        duplicate_threshold (`float`, *optional*, defaults to `0.95`):
            Cosine similarity from which two prompts are near-duplicates, of which one at most is kept.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the written prompts.
        hub_id (`str`, *optional*):
            Hub id to push the result of this stage to as well, as a private dataset.
    """

    build_dir: str = field(
        default="build", metadata={"help": "Folder of the whole dataset, with a folder for each stage."}
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Hub id, folder or JSON-lines file of prompts. If `None`, a language model writes them."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset."})
    base_url: str | None = field(
        default=None,
        metadata={"help": "Address of an OpenAI-compatible server, for example `http://127.0.0.1:8000/v1`."},
    )
    model: str | None = field(default=None, metadata={"help": "Name under which the server has the model."})
    api_key_variable: str | None = field(
        default=None,
        metadata={"help": "Name of the environment variable that holds the server's key. If `None`, no key is sent."},
    )
    max_concurrency: int = field(default=8, metadata={"help": "Requests under way at the same time."})
    num_written: int = field(default=2000, metadata={"help": "Prompts that the language model writes (paper)."})
    categories: list[str] | None = field(
        default=None, metadata={"help": "Categories that it writes prompts of. If `None`, all of the paper."}
    )
    layouts: list[str] = field(
        default_factory=lambda: ["2x2"],
        metadata={"help": "Layouts that it writes prompts for, rows x columns (paper)."},
    )
    embedding_model: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder of a sentence-embedding or CLIP text model, by which the diverse ones are found."
        },
    )
    num_selected: int | None = field(
        default=None, metadata={"help": "Prompts to keep, of the paper's 2,000 it was 708. If `None`, all."}
    )
    duplicate_threshold: float = field(
        default=0.95,
        metadata={
            "help": "Cosine similarity from which two prompts are near-duplicates, of which one at most is kept."
        },
    )
    seed: int = field(default=0, metadata={"help": "Seed of the written prompts."})
    hub_id: str | None = field(
        default=None, metadata={"help": "Hub id to push the result of this stage to as well, as a private dataset."}
    )


@dataclass
class GridsArguments:
    """
    Grids: each prompt drawn with several seeds.

    Args:
        build_dir (`str`, *optional*, defaults to `"build"`):
            Folder of the whole dataset, with a folder for each stage.
        model (`str`, *optional*, defaults to `"black-forest-labs/FLUX.1-dev"`):
            Hub id or folder of a diffusers pipeline (paper).
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Dtype of the pipeline: `bfloat16`, `float16` or `float32`.
        seeds (`list[int]`, *optional*, defaults to `[0, 1, 2, 3]`):
            Seeds that each prompt is drawn with (paper: four).
        batch_size (`int`, *optional*, defaults to `4`):
            Images of one call of the pipeline. The number of seeds encodes each prompt once.
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
            Height of a grid in pixels. If `None`, the column `height`.
        width (`int`, *optional*):
            Width of a grid in pixels. If `None`, the column `width`.
        hub_id (`str`, *optional*):
            Hub id to push the result of this stage to as well, as a private dataset.
    """

    build_dir: str = field(
        default="build", metadata={"help": "Folder of the whole dataset, with a folder for each stage."}
    )
    model: str = field(
        default="black-forest-labs/FLUX.1-dev", metadata={"help": "Hub id or folder of a diffusers pipeline (paper)."}
    )
    dtype: str = field(
        default="bfloat16", metadata={"help": "Dtype of the pipeline: `bfloat16`, `float16` or `float32`."}
    )
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2, 3], metadata={"help": "Seeds that each prompt is drawn with (paper: four)."}
    )
    batch_size: int = field(
        default=4,
        metadata={"help": "Images of one call of the pipeline. The number of seeds encodes each prompt once."},
    )
    num_inference_steps: int | None = field(
        default=None, metadata={"help": "Denoising steps. If `None`, the pipeline's default."}
    )
    guidance_scale: float | None = field(
        default=None, metadata={"help": "Guidance scale. If `None`, the pipeline's default."}
    )
    true_cfg_scale: float | None = field(
        default=None,
        metadata={
            "help": "Scale of true guidance, for pipelines that have both, such as Qwen-Image. If `None`, the pipeline's default."
        },
    )
    negative_prompt: str | None = field(
        default=None,
        metadata={"help": "Negative prompt. If `None`, none, and a pipeline such as Qwen-Image does not guide."},
    )
    height: int | None = field(
        default=None, metadata={"help": "Height of a grid in pixels. If `None`, the column `height`."}
    )
    width: int | None = field(
        default=None, metadata={"help": "Width of a grid in pixels. If `None`, the column `width`."}
    )
    hub_id: str | None = field(
        default=None, metadata={"help": "Hub id to push the result of this stage to as well, as a private dataset."}
    )


@dataclass
class PanelsArguments:
    """
    Panels, cut from the grids, and the ranking instances that they give.

    Args:
        build_dir (`str`, *optional*, defaults to `"build"`):
            Folder of the whole dataset, with a folder for each stage.
        num_workers (`int`, *optional*, defaults to `2`):
            Processes that cut grids.
        exclude_prompts (`list[str]`, *optional*, defaults to `[]`):
            Ids of prompts to leave out, for example of those with flat grids.
        max_instances_per_prompt (`int`, *optional*):
            Instances of a prompt at most, chosen by the seed. If `None`, all: 48 for four 2x2 grids.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the choice.
        hub_id (`str`, *optional*):
            Hub id to push the result of this stage to as well, as a private dataset.
    """

    build_dir: str = field(
        default="build", metadata={"help": "Folder of the whole dataset, with a folder for each stage."}
    )
    num_workers: int = field(default=2, metadata={"help": "Processes that cut grids."})
    exclude_prompts: list[str] = field(
        default_factory=lambda: [],
        metadata={"help": "Ids of prompts to leave out, for example of those with flat grids."},
    )
    max_instances_per_prompt: int | None = field(
        default=None,
        metadata={"help": "Instances of a prompt at most, chosen by the seed. If `None`, all: 48 for four 2x2 grids."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the choice."})
    hub_id: str | None = field(
        default=None, metadata={"help": "Hub id to push the result of this stage to as well, as a private dataset."}
    )


@dataclass
class AnnotateArguments:
    """
    Ranking by people, in a Gradio app on this machine.

    Args:
        build_dir (`str`, *optional*, defaults to `"build"`):
            Folder of the whole dataset, with a folder for each stage.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen on. The app has no password: other than loopback, whoever reaches it can rank.
        port (`int`, *optional*, defaults to `8090`):
            Port to listen on.
        annotations_per_instance (`int`, *optional*, defaults to `3`):
            People who rank each instance. An odd number has fewer ties.
        gold (`str`, *optional*):
            File of rankings that are known to be right, mixed in to see who is careful.
    """

    build_dir: str = field(
        default="build", metadata={"help": "Folder of the whole dataset, with a folder for each stage."}
    )
    host: str = field(
        default="127.0.0.1",
        metadata={
            "help": "Address to listen on. The app has no password: other than loopback, whoever reaches it can rank."
        },
    )
    port: int = field(default=8090, metadata={"help": "Port to listen on."})
    annotations_per_instance: int = field(
        default=3, metadata={"help": "People who rank each instance. An odd number has fewer ties."}
    )
    gold: str | None = field(
        default=None, metadata={"help": "File of rankings that are known to be right, mixed in to see who is careful."}
    )


@dataclass
class RankArguments:
    """
    Ranking by a judge, or by construction: a panel of the reference's own grid is more consistent with it.

    Args:
        build_dir (`str`, *optional*, defaults to `"build"`):
            Folder of the whole dataset, with a folder for each stage.
        judge (`str`, *optional*, defaults to `"automatic"`):
            `automatic` for construction, or a judge: Hub id or folder, or its name on the server of `base_url`.
        base_url (`str`, *optional*):
            Address of the server that has the judge (its key in `VLLM_API_KEY`, if it wants one). If `None`, it runs
            in this process.
        annotator (`str`, *optional*):
            Name under which the judge annotates. If `None`, the last part of its name.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype of a judge in this process: `auto`, `bfloat16`, `float16` or `float32`.
    """

    build_dir: str = field(
        default="build", metadata={"help": "Folder of the whole dataset, with a folder for each stage."}
    )
    judge: str = field(
        default="automatic",
        metadata={
            "help": "`automatic` for construction, or a judge: Hub id or folder, or its name on the server of `base_url`."
        },
    )
    base_url: str | None = field(
        default=None,
        metadata={
            "help": "Address of the server that has the judge (its key in `VLLM_API_KEY`, if it wants one). If `None`, it runs in this process."
        },
    )
    annotator: str | None = field(
        default=None, metadata={"help": "Name under which the judge annotates. If `None`, the last part of its name."}
    )
    dtype: str = field(
        default="auto",
        metadata={"help": "Dtype of a judge in this process: `auto`, `bfloat16`, `float16` or `float32`."},
    )


@dataclass
class ExchangeArguments:
    """
    Instances and rankings for other tools, and rankings from them.

    Args:
        build_dir (`str`, *optional*, defaults to `"build"`):
            Folder of the whole dataset, with a folder for each stage.
        file (`str`, *optional*):
            The file: `.csv` or `.json` to write, also `.jsonl` to read. A project that Label Studio exported as JSON is
            read too.
        what (`str`, *optional*, defaults to `"tasks"`):
            What to write: `tasks` (the instances with their image files), `label_studio` (tasks of a project, and its
            labeling configuration) or `annotations`.
    """

    build_dir: str = field(
        default="build", metadata={"help": "Folder of the whole dataset, with a folder for each stage."}
    )
    file: str | None = field(
        default=None,
        metadata={
            "help": "The file: `.csv` or `.json` to write, also `.jsonl` to read. A project that Label Studio exported as JSON is read too."
        },
    )
    what: str = field(
        default="tasks",
        metadata={
            "help": "What to write: `tasks` (the instances with their image files), `label_studio` (tasks of a project, and its labeling configuration) or `annotations`."
        },
    )


@dataclass
class PairsArguments:
    """
    Pairs in two splits, and rankings that are held out.

    Args:
        build_dir (`str`, *optional*, defaults to `"build"`):
            Folder of the whole dataset, with a folder for each stage.
        annotators (`list[str]`, *optional*):
            Annotators to count. If `None`, all, but `automatic` only where there are no others.
        gold (`str`, *optional*):
            File of rankings that are known to be right, to measure annotators by.
        min_gold_agreement (`float`, *optional*):
            Least share of the gold questions' pairs that an annotator must order right to be counted.
        num_negatives (`int`, *optional*, defaults to `1`):
            Inconsistent pairs of an instance at most, when several candidates are tied at the bottom.
        test_size (`float`, *optional*, defaults to `0.1`):
            Share of the prompts that are held out.
        max_rankings (`int`, *optional*, defaults to `3136`):
            Rankings to hold out at most (paper).
        seed (`int`, *optional*, defaults to `0`):
            Seed of the split and of all choices.
        hub_id (`str`, *optional*):
            Hub id to push the result of this stage to as well, as a private dataset.
    """

    build_dir: str = field(
        default="build", metadata={"help": "Folder of the whole dataset, with a folder for each stage."}
    )
    annotators: list[str] | None = field(
        default=None,
        metadata={"help": "Annotators to count. If `None`, all, but `automatic` only where there are no others."},
    )
    gold: str | None = field(
        default=None, metadata={"help": "File of rankings that are known to be right, to measure annotators by."}
    )
    min_gold_agreement: float | None = field(
        default=None,
        metadata={
            "help": "Least share of the gold questions' pairs that an annotator must order right to be counted."
        },
    )
    num_negatives: int = field(
        default=1,
        metadata={
            "help": "Inconsistent pairs of an instance at most, when several candidates are tied at the bottom."
        },
    )
    test_size: float = field(default=0.1, metadata={"help": "Share of the prompts that are held out."})
    max_rankings: int | None = field(default=3136, metadata={"help": "Rankings to hold out at most (paper)."})
    seed: int = field(default=0, metadata={"help": "Seed of the split and of all choices."})
    hub_id: str | None = field(
        default=None, metadata={"help": "Hub id to push the result of this stage to as well, as a private dataset."}
    )


@dataclass
class ReasonsArguments:
    """
    Reasons for the label of each pair, written by a vision-language model on a server.

    Args:
        build_dir (`str`, *optional*, defaults to `"build"`):
            Folder of the whole dataset, with a folder for each stage.
        base_url (`str`, *optional*):
            Address of an OpenAI-compatible server, for example `http://127.0.0.1:8000/v1`.
        model (`str`, *optional*):
            Name under which the server has the model.
        api_key_variable (`str`, *optional*):
            Name of the environment variable that holds the server's key. If `None`, no key is sent.
        max_concurrency (`int`, *optional*, defaults to `8`):
            Requests under way at the same time.
        max_attempts (`int`, *optional*, defaults to `3`):
            How often a pair is asked about before it is left out.
        min_words (`int`, *optional*, defaults to `15`):
            Fewest words of the reasons.
        max_words (`int`, *optional*, defaults to `200`):
            Most words of the reasons.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the answers.
        hub_id (`str`, *optional*):
            Hub id to push the result of this stage to as well, as a private dataset.
    """

    build_dir: str = field(
        default="build", metadata={"help": "Folder of the whole dataset, with a folder for each stage."}
    )
    base_url: str | None = field(
        default=None,
        metadata={"help": "Address of an OpenAI-compatible server, for example `http://127.0.0.1:8000/v1`."},
    )
    model: str | None = field(default=None, metadata={"help": "Name under which the server has the model."})
    api_key_variable: str | None = field(
        default=None,
        metadata={"help": "Name of the environment variable that holds the server's key. If `None`, no key is sent."},
    )
    max_concurrency: int = field(default=8, metadata={"help": "Requests under way at the same time."})
    max_attempts: int = field(default=3, metadata={"help": "How often a pair is asked about before it is left out."})
    min_words: int = field(default=15, metadata={"help": "Fewest words of the reasons."})
    max_words: int = field(default=200, metadata={"help": "Most words of the reasons."})
    seed: int = field(default=0, metadata={"help": "Seed of the answers."})
    hub_id: str | None = field(
        default=None, metadata={"help": "Hub id to push the result of this stage to as well, as a private dataset."}
    )


@dataclass
class PublishArguments:
    """
    The dataset on the Hub, with its card.

    Args:
        build_dir (`str`, *optional*, defaults to `"build"`):
            Folder of the whole dataset, with a folder for each stage.
        repo_id (`str`, *optional*):
            Hub id of the dataset.
        private (`bool`, *optional*, defaults to `True`):
            Whether a new dataset is private.
        license (`str`, *optional*):
            Licence of the dataset. If `None`, that of the model that drew the grids.
        pretty_name (`str`, *optional*):
            Title of the card. If `None`, the name of the dataset.
    """

    build_dir: str = field(
        default="build", metadata={"help": "Folder of the whole dataset, with a folder for each stage."}
    )
    repo_id: str | None = field(default=None, metadata={"help": "Hub id of the dataset."})
    private: bool = field(default=True, metadata={"help": "Whether a new dataset is private."})
    license: str | None = field(
        default=None, metadata={"help": "Licence of the dataset. If `None`, that of the model that drew the grids."}
    )
    pretty_name: str | None = field(
        default=None, metadata={"help": "Title of the card. If `None`, the name of the dataset."}
    )
