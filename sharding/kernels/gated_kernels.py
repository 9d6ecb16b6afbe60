"""The Triton kernel of a gated MLP's backward pass. Only a launch by `gated` imports it; without Triton that fails."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def gradients(
    gate, up, dinner, size, dgate, dup, inner, NUMBERS: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr
):
    """Grid: blocks of NUMBERS numbers; `FULL` says that the last block is full. All arrays have `size` numbers.

    Writes `inner = silu(gate) * up`, and the gradients of gate and up through `dinner`. Arithmetic is float32.
    """
    start = tl.program_id(0).to(tl.int64) * NUMBERS
    place = tl.arange(0, NUMBERS)
    real = place < NUMBERS if FULL else place < size - start
    gates = tl.load(gate + start + place, mask=real, other=0.0).to(tl.float32)
    ups = tl.load(up + start + place, mask=real, other=0.0).to(tl.float32)
    dinners = tl.load(dinner + start + place, mask=real, other=0.0).to(tl.float32)
    share = tl.sigmoid(gates)
    silus = gates * share
    dgates = dinners * ups * share * (1 + gates - silus)
    tl.store(dgate + start + place, dgates.to(dgate.dtype.element_ty), mask=real)
    tl.store(dup + start + place, (dinners * silus).to(dup.dtype.element_ty), mask=real)
    tl.store(inner + start + place, (silus * ups).to(inner.dtype.element_ty), mask=real)
