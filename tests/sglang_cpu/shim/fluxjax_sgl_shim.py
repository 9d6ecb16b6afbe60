"""Declares two operators of torchvision before it is imported: its own library needs CUDA, and does not load."""

import sys
from typing import Any

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision:
    """Finds no module; is asked for each, and acts when it is torchvision's turn."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in _OPERATORS:
                self.library.define(operator + _SIGNATURE)


sys.meta_path.insert(0, _BeforeTorchvision())  # type: ignore[arg-type]
