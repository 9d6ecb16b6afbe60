"""Stands in for SGLang's CPU kernels on a processor without AMX, where its models compute with PyTorch's operators.

SGLang imports these names when it starts. The two that move cache entries are here, and in `mamba` those of Qwen3.5;
any other raises when called.
"""

import ctypes
from typing import Any

import torch

from . import mamba

__version__ = "0.0.0+fluxjax"

# `convert_weight_packed` must not be among them: it is how SGLang recognises real AMX kernels.
for _operator in mamba.LOOKED_UP:
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)


def copy_all_layer_kv_cache_cpu(addresses: Any, strides: Any, to: Any, source: Any) -> None:
    """Copies rows `source` of every buffer to rows `to`; they may overlap, so all are read before any is written."""
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * stride, stride) for row in source.tolist()]
        for row, content in zip(to.tolist(), rows, strict=True):
            ctypes.memmove(address + row * stride, content, stride)


def assign_req_to_token_pool_cpu(
    requests: Any, table: Any, starts: Any, ends: Any, places: Any, width: int, *_: Any
) -> None:
    """Writes the cache places of new tokens, one request's after the other's, into the requests' rows of the table."""
    used = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = places[used : used + end - start].to(table.dtype)
        used += end - start


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(f"this stand-in for sgl_kernel has no {name}")

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not in this stand-in")

    return missing
