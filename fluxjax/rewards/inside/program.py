"""Runs the code of a response as a program of its own, with its own input and output."""

import builtins
import sys


def main(path: str) -> None:
    """Runs the file. `exit` and `quit`, which programs use and the module `site` would make, are there without it."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    with open(path) as file:
        source = file.read()
    module = sys.modules["__main__"]
    module.__dict__.clear()
    module.__dict__.update(__name__="__main__", __builtins__=builtins, __file__=path)
    sys.argv = [path]
    sys.path.pop(0)
    exec(compile(source, path, "exec"), module.__dict__)
