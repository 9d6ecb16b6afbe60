"""Runs Triton kernels on the CPU, under JAX: `install()` lets `sharding.kernels` launch them in Triton's interpreter.

`install` is for a process of its own with `TRITON_INTERPRET=1`, which Triton reads when a kernel is defined. Arrays are
numpy's: Triton asks a tensor for its address, shape and storage only, and `Tensor` answers as torch's does.
"""

import importlib
from typing import Any

import jax
import numpy as np


class Storage:
    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return Storage(self.array.copy())

    def copy_(self, other):
        self.array.reshape(-1)[...] = other.array.reshape(-1)


class Tensor:
    def __init__(self, array):
        self.array = np.ascontiguousarray(array)
        self.dtype = str(self.array.dtype)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return Storage(self.array)

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    @property
    def shape(self):
        return self.array.shape

    def new_empty(self, _, device=None):
        return Tensor(np.empty(0, self.array.dtype))

    def set_(self, storage, _, size, stride):
        self.array = storage.array.reshape(size)


def launch(module, kernel, arguments, outs, grid, tiling, **constants):
    """Stands in for `sharding.mesh.launch`. Results that a kernel does not write stay NaN, or the least integer."""
    kernels: Any = importlib.import_module(f"sharding.kernels.{module}")

    def run(*arguments):
        inputs = [Tensor(np.array(x)) if x.ndim else x.item() for x in map(np.asarray, arguments)]
        results = [Tensor(np.full(out.shape, np.nan).astype(out.dtype)) for out in outs]
        getattr(kernels, kernel)[grid](*inputs, *results, PRECISION=tiling.precision, **constants)
        return tuple(result.array for result in results)

    return list(jax.pure_callback(run, tuple(outs), *arguments))


def install():
    """Lets kernels be launched in the interpreter, and mends what Triton 3.7's does with bfloat16, which it keeps as
    bits: products multiplied the bits themselves, and rounding cut off what the hardware rounds to the nearest."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    tl: Any = importlib.import_module("triton.language")
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def wide(x):
        bits = x.data.astype(np.uint32) << 16
        return handle(bits.view(np.float32), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def create_dot(self, a, b, *rest):
        return dot(self, wide(a), wide(b), *rest)

    def cast_impl(self, x, dtype):
        if x.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return handle(x.data.astype(jax.numpy.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, x, dtype)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_trunc = cast_impl
    for module in ("sharding.kernels.flash", "sharding.kernels.paged", "sharding.vocab"):
        launching: Any = importlib.import_module(module)
        launching.launch = launch
