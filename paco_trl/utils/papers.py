# SPDX-License-Identifier: Apache-2.0
"""The papers, for cards."""

import yaml

from .files import read_template


_CITATIONS = yaml.safe_load(read_template("citations.yaml"))
# Title, arXiv id and citation
PAPER: dict[str, str] = _CITATIONS["paper"]
# Papers of DiffusionNFT and AWM. PaCo-RL is cited too, for rounds, resolution and log-taming
NFT_PAPER, AWM_PAPER = (
    _CITATIONS[name] | {"citation": _CITATIONS[name]["citation"] + PAPER["citation"]} for name in ("nft", "awm")
)
