"""Freed memory is used again, counted in page faults of a fresh process; garbage is looked for among what is new."""

import ctypes
import gc
import subprocess
import sys

import pytest
from conftest import ROOT

from fluxjax.run.callbacks import SettledHeap

PROGRAM = """
import resource, sys
from fluxjax.base.process import give_back_large_blocks, keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
if sys.argv[1:] == ["keep", "large"]:
    assert give_back_large_blocks()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(256 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc")
def test_freed_memory_is_used_again():
    def faults(*modes):
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, *modes], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
        )
        return int(result.stdout)

    assert faults("plain") > 100  # 256 MB are 128 huge pages, or 65,536 small ones
    assert faults("keep") < 20
    assert faults("keep", "large") > 100


@pytest.mark.medium
def test_what_a_run_keeps_is_taken_out_of_the_collectors_sight():
    """After steps 1, 2, 4, ...: new programs come ever more rarely."""
    settled, kept, seen = SettledHeap(), [], []
    try:
        for _ in range(5):
            kept.append([[]])
            settled.count()
            seen.append(not any(kept[-1] is other for other in gc.get_objects()))
    finally:
        gc.unfreeze()
    assert seen == [True, True, False, True, False]
