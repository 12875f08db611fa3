# SPDX-License-Identifier: Apache-2.0
"""The papers, for cards."""

import yaml

from .files import read_template


_CITATIONS = yaml.safe_load(read_template("citations.yaml"))
# Title, arXiv id and citation
PAPER: dict[str, str] = _CITATIONS["paper"]
# Its own, and the paper's for rounds, resolution and log-taming
NFT_PAPER: dict[str, str] = _CITATIONS["nft"] | {"citation": _CITATIONS["nft"]["citation"] + PAPER["citation"]}
