# SPDX-License-Identifier: Apache-2.0
"""Runs `accelerate launch`; at a signal its processes have the last word, and not torchrun's traceback."""

import sys

from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.api import SignalException


if __name__ == "__main__":
    try:
        main()
    except SignalException as error:
        sys.exit(128 + error.sigval)
