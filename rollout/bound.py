"""`python -m rollout.bound COMMAND ...`: becomes the command, which ends when the process that started it does.

A server that outlives the run that started it would keep its GPU. Linux only; elsewhere the command runs unbound.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def bind() -> None:
    """Makes this process end when its parent does."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has ended meanwhile
            sys.exit(1)


def main(command: list[str]) -> None:
    bind()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
