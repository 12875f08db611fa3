# SPDX-License-Identifier: Apache-2.0
"""
Train the toy FLUX Kontext of `examples/miniature` on the scores of its judge, with several seeds, and read the truth.

    python benchmarks/miniature/edits.py  # about ten minutes on one core

Finished trainings are kept in `--work_dir`. Intervals are bootstrapped over the test edits of all seeds together.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from claims.common import before_and_after
from miniature.edit_world import EditTruth
from miniature.edits import EditMiniature, edit_and_read
from miniature.settings import EDIT_ADAPTER, EDITS


def run_seed(folder: Path, seed: int) -> dict[str, Any]:
    miniature = EditMiniature(folder, replace(EDITS, seed=seed), say=print)
    results = miniature.run()
    evaluation, adapter = miniature.step_folder("evaluation"), miniature.step_folder("generator") / EDIT_ADAPTER
    run: dict[str, Any] = {"seed": seed, "judge": results["evaluation"]["judge"], "generator": results["generator"]}
    for name, of in (("before", None), ("after", adapter)):
        truths = edit_and_read(evaluation / name, of, miniature.prompts("test"), miniature.settings)  # the same again
        run[name] = {f"{prompt}/{noise}": list(map(float, truth)) for (prompt, noise), truth in truths.items()}
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--work_dir", type=Path, default=Path("miniature-benchmark"))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    runs = [run_seed(arguments.work_dir / f"edits-{seed}", seed) for seed in arguments.seeds]
    results = before_and_after(runs, EditTruth._fields)
    judge = {name: round(float(np.mean([run["judge"][name] for run in runs])), 3) for name in runs[0]["judge"]}
    names = ("success", "done", "unchanged")
    ratios = {
        "change": {name: results[name]["difference"]["mean"] for name in names},
        "before": {name: results[name]["before"]["mean"] for name in names},
        "AUROC of the judge": judge,
    }
    setting = {"device": "cpu", "threads": 1, "seeds": arguments.seeds}
    setting |= {name: getattr(EDITS, name) for name in ("num_test_prompts", "test_seeds", "num_rounds")}
    record = {"setting": setting, "torch": torch.__version__, "ratios": ratios, "results": results}
    record["rewards of each seed, first and last round"] = {
        name: [[round(run["generator"][name][place], 3) for place in (0, -1)] for run in runs]
        for name in ("rewards/edit/mean", "rewards/rubric_instruction/mean")
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
