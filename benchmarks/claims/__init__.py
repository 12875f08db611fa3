# SPDX-License-Identifier: Apache-2.0
"""Claims about PaCo-RL that `miniature.py` tests: the runs of each, what a run does, and its figures."""

import sys
from pathlib import Path


# Before `benchmarks`, where a script has the name of the package `miniature`
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
