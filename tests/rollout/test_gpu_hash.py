"""SGLang's hash of tensors on GPUs, against its own kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest
from protocol_cases import sglang_python

from rollout.weights.published import TILE, TILES, gpu_hash

# By bytes: what SGLang 0.5.23's kernel says of `content(bytes)`.
SAID = {
    4: "5733f11e314b0bb4",
    14: "9e7e614da73c655a",
    32768: "b07809ef6d9a0ce7",
    40002: "1fee0655fa2150bc",
    98324: "a1ed78d8346e727f",
}
KERNEL = """
import numpy as np, torch, triton
import sglang.kernels.ops.memory.gpu_tensor_hash as theirs

def said(data, seed=0x243F6A88, tile=8192, chunk=1024):
    words = torch.from_numpy(np.frombuffer(data + bytes(-len(data) % 4), np.int32).copy()).view(torch.uint32)
    sums = torch.empty(triton.cdiv(words.numel(), tile), dtype=torch.uint64)
    theirs.hash_tiles32_kernel_blocked[(sums.numel(),)](
        words, sums, words.numel(), seed1=seed, seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=theirs.FMIX32_C1, FM_C2=theirs.FMIX32_C2, POS_A=theirs.POS_C1, POS_B=theirs.POS_C2,
        TILE=tile, BLOCK=256, USE_CG=False)
    while sums.numel() > 1:
        fewer = torch.empty(triton.cdiv(sums.numel(), chunk), dtype=torch.uint64)
        theirs.add_tree_reduce_u64_kernel[(fewer.numel(),)](sums, fewer, sums.numel(), CHUNK=chunk)
        sums = fewer
    return f"{theirs._final_splitmix64(int(sums.item())):016x}"

for size in SIZES:
    index = np.arange(size, dtype=np.int64)
    print(size, said(((index * index * 31 + index * 7) % 251).astype(np.uint8).tobytes()))
"""


def content(size: int) -> np.ndarray:
    index = np.arange(size, dtype=np.int64)
    return ((index * index * 31 + index * 7) % 251).astype(np.uint8)


@pytest.mark.parametrize("size", SAID)
def test_known_values(size: int) -> None:
    data = content(size)
    assert gpu_hash([data]) == SAID[size]
    assert gpu_hash([data[: size // 3], data[size // 3 :]]) == SAID[size]


def test_a_bit_and_the_order_count() -> None:
    data = content(98324)
    other = data.copy()
    other[-1] ^= 1
    assert len({gpu_hash([x]) for x in (data, other, np.roll(data, 4), data[:-4])}) == 4


@pytest.mark.slow
@pytest.mark.long
def test_sglang_kernel() -> None:
    """Larger than a call of ours, and as the kernel is today."""
    sizes = (*SAID, 4 * TILE * TILES + 12)
    program = f"SIZES = {sizes}" + KERNEL
    done = subprocess.run(
        [sglang_python(), "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert dict(line.split() for line in done.stdout.splitlines()) == {str(n): gpu_hash([content(n)]) for n in sizes}
