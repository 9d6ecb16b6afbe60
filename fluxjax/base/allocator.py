"""The C library keeps freed memory instead of giving it back to the kernel.

XLA's CPU client allocates the temporary buffers of a program at each execution. glibc maps and unmaps blocks of that
size, so every step touches fresh pages again: a quarter to a third of the CPU time of a tiny model's train step was
page faults. The price is that resident memory stays at its peak.
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Call it first of all, before there are threads: an arena that exists keeps its ways.

    Returns False, and changes nothing, where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  others have a mallopt that does nothing
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # One arena, because those of threads can't hold large blocks; nothing mapped apart; nothing trimmed below 2 GB.
    return all(
        mallopt(option, value) for option, value in [(_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1)]
    )
