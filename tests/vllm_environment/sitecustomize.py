# SPDX-License-Identifier: Apache-2.0
"""
Python imports this module when it starts, in every process of the test environment of vLLM.

torchvision comes as a CUDA build beside the CPU build of torch there: its library of operators cannot be loaded, and
torchvision refuses to be imported when the operators that it describes do not exist. vLLM uses none of them.
"""

import sys


class _OperatorsOfTorchvision:
    """Defines the operators before torchvision is imported, and not before: torch takes seconds to import."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            # They exist as long as the library does
            torch._paco_trl_torchvision = library
        # The next finder finds the module itself
        return None


sys.meta_path.insert(0, _OperatorsOfTorchvision())
