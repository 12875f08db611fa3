# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl"]
# ///
"""
Evaluates image models on T2IS-Bench or GEdit-Bench: the base model and the tuned one, under the same settings.

The code is in `paco_trl/commands/evaluate_generation.py`: `paco-trl evaluate <stage>` takes the same options without a
checkout, and its `--help` shows the commands in their order.

    accelerate launch examples/evaluate_generation.py generate --dataset_name t2is.jsonl --output_dir evaluation/base
"""

from paco_trl.commands.main import run_script


if __name__ == "__main__":
    run_script("evaluate")
