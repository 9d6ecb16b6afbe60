"""Freed memory is used again, counted in page faults of a fresh process."""

import ctypes
import subprocess
import sys

import pytest
from conftest import ROOT

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
