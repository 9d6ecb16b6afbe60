"""Changes two modules where they are imported: torchvision, whose own library needs CUDA, and a norm of SGLang's.

- torchvision looks up two operators that its library would have declared. They are declared before.
- The norm behind the gated delta networks of Qwen3.5 is a Triton kernel. SGLang's own reference takes its place.
"""

import importlib.machinery
import sys
from typing import Any

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated"


class _BeforeImports:
    """Python asks it for each module. It finds only the module of the norm, where others would, too."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in _OPERATORS:
                self.library.define(operator + _SIGNATURE)
        return _with_reference(importlib.machinery.PathFinder.find_spec(name, path)) if name == _NORM else None


def _with_reference(spec: Any) -> Any:
    """The module's own way to be executed, and then `layernorm_fn` replaced in it."""
    execute = spec.loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)

        def layernorm_fn(x: Any, weight: Any, bias: Any, *, is_rms_norm: bool, activation: str, **how: Any) -> Any:
            # All that Qwen3.5 asks for. The reference would ignore another request and give wrong numbers.
            if not is_rms_norm or activation not in ("silu", "swish"):
                raise NotImplementedError("SGLang's reference has the RMS norm with a silu gate only")
            return module.rms_norm_ref(x, weight, bias, **how)

        module.layernorm_fn = layernorm_fn

    spec.loader.exec_module = exec_module
    return spec


sys.meta_path.insert(0, _BeforeImports())  # type: ignore[arg-type]
