"""Makes the C library keep freed memory instead of giving it back to the kernel.

XLA's CPU client allocates the temporary buffers of a program at each execution. By default glibc maps and unmaps blocks
of that size, so that every step touches fresh pages: a quarter to a third of the CPU time of a tiny model's train step
was page faults. The price of keeping memory is that resident memory stays at its peak.
"""

import ctypes

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Must be called before there are threads: arenas that exist already are not changed.

    Returns False, and changes nothing, where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  other C libraries have a mallopt that does nothing
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # One arena, because those of threads cannot hold large blocks; no block mapped apart; no trimming below 2 GB.
    return all(
        mallopt(option, value) for option, value in [(_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1)]
    )
