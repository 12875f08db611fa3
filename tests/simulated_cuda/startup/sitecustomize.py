# SPDX-License-Identifier: Apache-2.0
"""Imported by every Python of the simulation: bitsandbytes computes by its kernels for any device, not by CUDA's."""

import sys
from types import ModuleType


sys.modules["bitsandbytes.backends.cuda.ops"] = ModuleType("bitsandbytes.backends.cuda.ops")
