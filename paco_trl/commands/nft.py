# SPDX-License-Identifier: Apache-2.0
"""`paco-trl nft`: trains an image model with DiffusionNFT; the other options are those of `paco-trl grpo`."""

from .. import PaCoNFTConfig
from . import grpo


def main(arguments: list[str]) -> int:
    """Run the command."""
    return grpo.main(arguments, config_class=PaCoNFTConfig, prog="paco-trl nft")
