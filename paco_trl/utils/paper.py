# SPDX-License-Identifier: Apache-2.0
"""The paper, for cards."""

import yaml

from .files import read_template


# Its title, arXiv id and citation
PAPER: dict[str, str] = yaml.safe_load(read_template("citations.yaml"))["paper"]
