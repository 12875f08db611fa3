# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl"]
# ///
"""
Evaluates a judge of consistency on human rankings (ConsistencyRank) or on EditReward-Bench.

The code and the options are in `paco_trl/commands/evaluate_reward.py`: `paco-trl evaluate reward` takes the same options
without a checkout.

    python examples/evaluate_reward.py --judge X-GenGroup/PaCo-Reward-7B --output_dir results
    python examples/evaluate_reward.py --judge clip-i --output_dir results

EditReward-Bench:

    python examples/evaluate_reward.py --judge X-GenGroup/PaCo-Reward-7B --benchmark edit_reward \
        --dataset_name EditScore/EditReward-Bench --protocol published --output_dir results
    python examples/evaluate_reward.py --judge paco-reward --judge_url http://127.0.0.1:8000/v1 --output_dir results
"""

from paco_trl.commands.main import run_script


if __name__ == "__main__":
    run_script("evaluate", "reward")
