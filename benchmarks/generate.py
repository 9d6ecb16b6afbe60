"""Measures the decoding speed of the embedded engine and of transformers' `generate`, on a model with random weights.

    python benchmarks/generate.py                           Qwen2.5-0.5B's shape, 1 and 8 prompts at once
    python benchmarks/generate.py --peer-python PYTHON      an interpreter that has torch and transformers
    python benchmarks/generate.py --shape tiny --repeats 1  whether it runs

Prints one JSON line on standard output and its progress on standard error. What is measured and how:
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from common import ROOT, Worker, WorkerError, cores, spread, thread_environment

SHAPES = {
    "0.5b": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error for settings that cannot work, 1 for a worker that failed."""
    options = _parser().parse_args(argv)
    problem = _problem(options)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    try:
        print(json.dumps(measure(options)))
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the whole benchmark. Raises `WorkerError`."""
    load_before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-"))
        settings = {"shape": SHAPES[options.shape], "folder": folder, "batches": options.batches,
                    "prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens}  # fmt: skip
        workers: dict[str, Worker] = {}
        for name, python, script in (
            ("fluxjax", sys.executable, "fluxjax_generate.py"),
            ("peer", options.peer_python, "peers/transformers_generate.py"),
        ):
            _say(f"{name}: building")
            command = [python, str(ROOT / "benchmarks" / script)]
            environment = thread_environment(cores()) | {"JAX_PLATFORMS": "cpu"}
            workers[name] = stack.enter_context(Worker(name, command, settings, environment))
        answers = {name: {batch: [] for batch in options.batches} for name in workers}
        for index in range(1 + options.repeats):  # the first round compiles
            for batch in options.batches:
                for name, worker in workers.items():  # one at a time; the others wait for their pipe
                    answer = worker.ask(do="generate", batch=batch, number=index)
                    answers[name][batch].append(answer)
                    _say(f"{name}: batch {batch}, round {index}: {answer['seconds']:.2f} s")
        peaks = {name: worker.finish()["peak_rss_mib"] for name, worker in workers.items()}
        sides = {
            name: _side(answers[name], options.new_tokens)
            | {"peak_rss_mib": peaks[name], "versions": workers[name].about["versions"]}
            for name in workers
        }
    rates = {name: side["tokens_per_second"] for name, side in sides.items()}
    return {
        "benchmark": "generate",
        "shape": SHAPES[options.shape],
        "dtype": "float32",
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "cores": cores(),
        "load_average_before": round(load_before, 2),
        "repeats": options.repeats,
        **sides,
        "equal_tokens": _equal(answers),
        "ratio": {str(batch): round(rates["fluxjax"][str(batch)] / rates["peer"][str(batch)], 3)
                  for batch in options.batches},
        "ratio_is": "tokens a second of fluxjax / transformers: above 1, fluxjax is faster",
    }  # fmt: skip


def _side(answers: Mapping[int, list[dict[str, Any]]], new_tokens: int) -> dict[str, Any]:
    seconds = {batch: [answer["seconds"] for answer in rounds[1:]] for batch, rounds in answers.items()}
    return {
        "seconds": {str(batch): spread(times) for batch, times in seconds.items()},
        "first_call_seconds": {str(batch): round(rounds[0]["seconds"], 2) for batch, rounds in answers.items()},
        "tokens_per_second": {
            str(batch): round(batch * new_tokens / statistics.median(times), 2) for batch, times in seconds.items()
        },
    }


def _equal(answers: Mapping[str, Mapping[int, list[dict[str, Any]]]]) -> float:
    """The share of generated tokens, over all rounds, that are equal on both sides."""
    same = total = 0
    for batch, rounds in answers["fluxjax"].items():
        for ours, theirs in zip(rounds, answers["peer"][batch], strict=True):
            for our_row, their_row in zip(ours["tokens"], theirs["tokens"], strict=True):
                same += sum(a == b for a, b in zip(our_row, their_row, strict=True))
                total += len(our_row)
    return round(same / total, 4)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="prompts at once (default: 1 8)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of both sides (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=0, help="limit both sides to so many (default: all)")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with torch and transformers")
    return parser


def _problem(options: argparse.Namespace) -> str:
    """Says in one line why these settings cannot work; empty if they can."""
    for name in ("repeats", "prompt_tokens", "new_tokens"):
        if getattr(options, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1"
    if min(options.batches) < 1 or len(set(options.batches)) < len(options.batches):
        return "--batches must be at least 1, and all different"
    try:
        code = "import torch, transformers"
        done = subprocess.run([options.peer_python, "-c", code], capture_output=True, text=True)
    except OSError as error:
        return f"--peer-python {options.peer_python} does not start: {error.strerror}"
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return f"--peer-python {options.peer_python} can't import torch and transformers: {' '.join(last)}"
    return ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
