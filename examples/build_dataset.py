# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[apps]"]
# ///
"""
Builds a dataset of consistent and inconsistent pairs of images as PaCo-Dataset was built, in a directory for each stage.

The code is in `paco_trl/commands/build.py`: `paco-trl build <stage>` takes the same options without a checkout, and its
`--help` shows the commands in their order.

    python examples/build_dataset.py prompts --dataset_name prompts.jsonl
    accelerate launch examples/build_dataset.py grids --model black-forest-labs/FLUX.1-dev
"""

from paco_trl.commands.main import run_script


if __name__ == "__main__":
    run_script("build")
