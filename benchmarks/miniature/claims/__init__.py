# SPDX-License-Identifier: Apache-2.0
"""Claims about PaCo-RL that `paper_claims.py` tests: the runs of each, what a run does, and its figures."""

import sys
from pathlib import Path


# For the package `miniature`
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
