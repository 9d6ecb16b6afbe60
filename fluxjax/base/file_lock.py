"""Locks between processes, by files that a crash leaves behind without harm."""

import contextlib
import errno
import logging
import os

from filelock import FileLock

log = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # the file system has none, as some network file systems


def lock_file(file: str | os.PathLike[str], *, wait: bool = True) -> contextlib.ExitStack:
    """Locks `file` for this process until the returned stack is closed or the process ends, however it ends; processes
    that it forks do not hold the lock. A file system without locks is a warning.

    Raises `filelock.Timeout` where another process holds the lock and this one should not `wait`, other OSErrors where
    the file cannot be written.
    """
    held = contextlib.ExitStack()
    try:
        held.enter_context(FileLock(file, blocking=wait, thread_local=False, fallback_to_soft=False))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("%s cannot be locked (%s): start no second process that writes there", file, error.strerror)
    return held
