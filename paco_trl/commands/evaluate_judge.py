# SPDX-License-Identifier: Apache-2.0
"""
`paco-trl evaluate judge`: evaluates a judge on human rankings (ConsistencyRank), on labeled pairs such as those that
were held out of its training, or on pairs of edits.

With `--judge_url` the judge is on a server. `--protocol published` queries and counts as the published scripts do, for
figures that are comparable with the paper's. Interrupted runs resume, and a judge of the same name with new weights
is scored anew (if it is on a server, delete its old scores first). Run several judges into one directory to compare
them.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ..data import check_pair_columns, check_ranking_columns
from ..data.pairs import as_pairs
from ..evaluation import ClipIScorer, ComparingJudge, evaluate_pairs, evaluate_rankings, load_rankings, save_report
from ..evaluation.judge_benchmarks import is_consistency_rank
from ..evaluation.judge_report import read_entries
from ..evaluation.ranking_benchmark import IMAGE_COLUMNS
from ..evaluation.scoring import RowImages, read_traits
from ..rewards import WordsJudge
from ..rewards.fingerprint import describe_scorer
from ..utils.chat import ChatEndpoint
from ..utils.errors import OptionError, raise_errors
from ..utils.files import digest
from .evaluate_arguments import BENCHMARKS, JudgeArguments, load_judge
from .options import find_unused
from .script_arguments import WORDS, judge_options


def load_scorer(script_args: JudgeArguments):
    """Load the judge or the baseline."""
    if script_args.template is not None and script_args.template.startswith(WORDS):
        served: Any = load_judge(script_args, script_args.judge_model, script_args.judge_url)
        words_judge = WordsJudge(served, script_args.template.removeprefix(WORDS), script_args.judge_answers)
        words_judge.prompt.check(served)
        return words_judge
    if script_args.benchmark == "vc_reward" and script_args.template is not None:
        if script_args.judge_url is None:
            message = f"`--template {script_args.template}` requires a judge on a server. Set `--judge_url`."
            raise OptionError(message, "template", "judge_url")
        variable, concurrency = script_args.api_key_variable, script_args.max_concurrency
        endpoint = ChatEndpoint(script_args.judge_url, script_args.judge_model, variable, concurrency)
        endpoint.check()
        return ComparingJudge(endpoint, script_args.template)
    if script_args.judge_url is not None:
        judge: Any = load_judge(script_args, script_args.judge_model, script_args.judge_url)
        judge.check()
        return judge
    if script_args.judge_model == "clip-i":
        dtype = None if script_args.dtype == "auto" else getattr(torch, script_args.dtype)
        return ClipIScorer(script_args.clip_model, device=script_args.device, dtype=dtype)
    return load_judge(script_args, script_args.judge_model, None)


def evaluate(script_args: JudgeArguments) -> None:
    """Evaluate a judge, and report its results beside earlier results in the directory."""
    if (count := int(os.environ.get("WORLD_SIZE", 1))) > 1:  # each process would score all rows, into one file
        message = f"`--num_processes` is {count}, but a judge is evaluated by one process. Leave it out; a judge on a "
        message += "server (`--judge_url`) may use several GPUs."
        raise OptionError(message, "num_processes")
    benchmark = script_args.benchmark
    dataset_name = script_args.dataset_name or BENCHMARKS[benchmark]
    if benchmark == "rankings" and is_consistency_rank(dataset_name):
        raise_errors(find_unused(script_args, ("dataset_config", "dataset_split"), "with ConsistencyRank-Bench"))
    dataset = load_rankings(benchmark, dataset_name, script_args.dataset_split, script_args.dataset_config)
    if benchmark == "rankings" and "ranking" not in dataset.column_names:
        if "images" not in dataset.column_names:
            raise ValueError(
                f"'{dataset_name}' has the columns {', '.join(dataset.column_names)}: neither rankings (`reference`, "
                "`candidates`, `ranking`, `prompt`) nor pairs (`images`, `prompt`, `completion`)."
            )
        benchmark = "pairs"
        dataset = as_pairs(dataset, dataset_name, skip_broken=None)
        raise_errors(find_unused(script_args, ("protocol", "template"), "with pairs, which have their own questions"))
        check_pair_columns(dataset, "dataset")
    else:
        check_ranking_columns(dataset)
    RowImages(dataset, ("images",) if benchmark == "pairs" else IMAGE_COLUMNS).check_headers()

    read_entries(Path(script_args.output_dir))  # so that it is not refused after hours of scoring
    judge = load_scorer(script_args)
    own_template = read_traits(judge).template
    options = (
        own_template or script_args.template,
        script_args.protocol,
        script_args.dtype,
        script_args.judge_quantization,
    )
    name_parts = (judge.name, benchmark, *options, digest(describe_scorer(judge))[:8])
    name = re.sub(r"[^\w.]+", "-", "-".join(part for part in name_parts if part is not None)).strip("-.")
    scores_path = Path(script_args.output_dir) / f"{name}.jsonl"
    run = (scores_path, script_args.batch_size)
    if benchmark == "pairs":
        results = evaluate_pairs(judge, dataset, *run)
    else:
        template = None if own_template else script_args.template
        results = evaluate_rankings(judge, dataset, template, *run, script_args.protocol, benchmark)

    results["settings"] |= {
        "dataset": dataset_name,
        **{name: getattr(script_args, name) for name in ("device", "dtype", "batch_size")},
        **judge_options(script_args, None),
    }
    save_report(results, script_args.output_dir)
    report = Path(script_args.output_dir) / "results.md"
    sys.stdout.write(f"{report.read_text(encoding='utf-8')}\nScores: {scores_path}\nReport: {report}\n")
