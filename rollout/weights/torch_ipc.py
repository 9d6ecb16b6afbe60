"""Weights of this process as PyTorch in another process of this host opens them: on a GPU by CUDA IPC.

PyTorch can hand over memory of its own allocator only. So a bucket is memory of PyTorch's in this process, filled from
JAX's arrays by DLPack, from device to device: no byte goes through the host. Weights on a CPU go through PyTorch's
shared memory: the same route, on any machine.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import functools
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import AnyConfig
from models.hf import tensor_names
from models.tensor_names import TensorName
from sharding.weights import by_path

if TYPE_CHECKING:
    import torch

Bytes = Callable[[np.dtype], jax.Array | None]


def device_tensors(config: AnyConfig, params: Mapping[str, Any]) -> dict[str, Bytes]:
    """By the names of a checkpoint, how to get the bytes `[N]` (uint8) of each tensor as it stands there, cast to a
    dtype, on its device. Has none for arrays that other processes have parts of.

    Keeps no array alive: the answer is None for one that is gone."""
    values, found = by_path(params), dict[str, Bytes]()
    for entry in tensor_names(config):
        value = values[entry.path]
        if isinstance(value, jax.Array) and value.is_fully_addressable:
            for layer, name in enumerate(entry.full_names):
                found[name] = functools.partial(_bytes_of, weakref.ref(value), entry, layer)
    return found


def _bytes_of(array: weakref.ref[jax.Array], entry: TensorName, layer: int, dtype: np.dtype) -> jax.Array | None:
    value = array()
    if value is None or value.is_deleted():
        return None
    flat = _flat(value, layer, entry, dtype)
    first = min(flat.sharding.device_set, key=lambda device: device.id)
    return jax.device_put(flat, first)  # of a sharded one, all parts


@functools.partial(jax.jit, static_argnames=("entry", "dtype"))
def _flat(value: jax.Array, layer: jax.Array, entry: TensorName, dtype: np.dtype) -> jax.Array:
    if entry.stacked:
        value = jax.lax.dynamic_index_in_dim(value, layer, keepdims=False)
    return jax.lax.bitcast_convert_type(entry.laid_out(value).astype(dtype), jnp.uint8).reshape(-1)


class SharedBucket:
    """Memory that another process opens. It is filled again and again, when the other has read it."""

    def __init__(self) -> None:
        """Raises ImportError where there is no PyTorch."""
        import torch  # here, for no other route has any need of it

        self._torch = torch
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, parts: Sequence[np.ndarray | jax.Array]) -> None:
        """Puts these bytes (uint8, `[N]` each) there, one behind the other: on a GPU, if any of them is on one."""
        found = [self._opened(part) for part in parts]
        device = next((part.device for part in found if part.is_cuda), found[0].device)
        size = sum(part.numel() for part in found)
        if self._memory.numel() < size or self._memory.device != device:
            self._memory = self._torch.empty(size, dtype=self._torch.uint8, device=device)
            if not self._memory.is_cuda:
                self._torch.multiprocessing.set_sharing_strategy("file_system")  # the other way passes descriptors
                self._memory.share_memory_()
        self._filled = self._memory[:size]
        self._torch.cat(found if device.type == "cpu" else [part.to(device) for part in found], out=self._filled)
        if device.type == "cuda":
            self._torch.cuda.synchronize(device)

    def _opened(self, part: np.ndarray | jax.Array) -> torch.Tensor:
        if isinstance(part, np.ndarray):
            return self._torch.from_numpy(part)
        return self._torch.from_dlpack(part.block_until_ready())

    def handle(self) -> bytes:
        """A pickle, without its end, of what is in it, for one process."""
        from torch.multiprocessing import reductions

        rebuild, arguments = reductions.reduce_tensor(self._filled)
        if self._filled.is_cuda:  # the other process may see its GPUs under other numbers; SGLang looks for the UUID
            uuid = str(self._torch.cuda.get_device_properties(self._filled.device).uuid)
            arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        return bytes(ForkingPickler.dumps(_Reduced(rebuild, arguments)))[: -len(pickle.STOP)]


_DEVICE = 6  # its place among the arguments of `rebuild_cuda_tensor`


class _Reduced:
    """Pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call
