"""Functions that the tests of `WorkerPool` call in other processes: good ones, and every way to go wrong."""

import os
import signal
import subprocess
import sys
import time


def doubled(argument):
    return argument * 2


def has_jax(argument):
    return "jax" in sys.modules


def sleeps(seconds):
    time.sleep(seconds)
    return os.getpid()


def meets(argument):
    """Returns when as many processes have come as are expected."""
    folder, expected = argument
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while len(os.listdir(folder)) < expected:
        time.sleep(0.01)
    return os.getpid()


def spins(argument):
    while True:
        pass


def misbehaves(how):
    if how == "raises":
        raise KeyError("nothing here")
    if how == "exits":
        sys.exit(3)
    if how == "exits at once":
        os._exit(3)
    if how == "kills itself":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "allocates":
        grown = []
        while True:
            grown.append(bytearray(1 << 24))
    if how == "recurses":
        return misbehaves(how)
    if how == "returns an object":
        return object()
    if how == "forks":  # and both come back
        os.fork()
    if how == "stops the alarm and hangs":
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
        time.sleep(600)
    return how


def leaves_a_child(argument):
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid)
    if argument is not None:
        with open(argument, "w") as file:
            file.write(str(child.pid))
    time.sleep(600)
