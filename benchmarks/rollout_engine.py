"""Measures tokens a second of three rollout engines in turn: the embedded engine, `rollout.serve`, SGLang on a CPU.

    bash scripts/install_sglang.sh                                    once: SGLang, in an environment of its own
    python benchmarks/rollout_engine.py                               a tiny model
    python benchmarks/rollout_engine.py --shape 0.1b                  a model of 0.1B parameters
    python benchmarks/rollout_engine.py --sides jax serve --repeats 1 --new-tokens 4      whether it runs

Prints one JSON line on standard output and its progress on standard error. What is measured and how:
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import pathlib
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from common import ROOT, cores, spread, thread_environment

import models
from fluxjax.base.process import keep_freed_memory, settle_heap
from models.config import DecoderConfig
from models.decoder import Decoder, parameter_count
from models.inputs import ModelInput
from models.processing.tiny import SPECIAL_TOKENS
from models.processing.tiny import build as build_processor
from models.registry import read_config
from rollout.engine import Engine, EngineError, GenerateRequest, SamplingParams, TokenChunk
from rollout.fleet import Fleet
from rollout.fleet_server import FleetOptions
from rollout.jax_engine import JaxEngine
from rollout.local_server import LocalServer, ServerCommand
from rollout.requests import EngineLimits
from rollout.weights.published import SharedFolders
from rollout.weights.routes import SharedMemory

SHAPES = {
    # Qwen2's vocabulary of 151,936 would be more than half of 0.1B weights.
    "0.1b": {"vocab_size": 32768, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "num_key_value_heads": 4},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
SIDES = ("jax", "serve", "sglang")
SGLANG = ROOT / ".sglang" / "bin" / "python"  # scripts/install_sglang.sh
DTYPE = "float32"
REST = 0.1  # seconds before each turn: threads of the side before may still be spinning
START = 300.0  # seconds that a server may take to start
LOGPROB_GAP = 1e-3  # allowed difference of a token's log-prob between two sides


class Wrong(RuntimeError):
    """The benchmark can't be run, or the sides' answers differ."""


def main(argv: Sequence[str]) -> int:
    """Returns 0, or one line on standard error and 2 for settings that cannot work, 1 for a side that failed."""
    options = _parser().parse_args(argv)
    least = {"repeats": 1, "prompt_tokens": 1, "new_tokens": 1, "warmup": 1, "cores": 0}
    if wrong := [name for name, value in least.items() if getattr(options, name) < value]:
        print(f"error: --{wrong[0].replace('_', '-')} must be at least {least[wrong[0]]}", file=sys.stderr)
        return 2
    if min(*options.concurrency, *(options.sglang_threads or [1])) < 1:
        print("error: --concurrency and --sglang-threads must be at least 1", file=sys.stderr)
        return 2
    reason, sglang = _why_no_sglang(options)
    if reason and options.sglang and "sglang" in options.sides:
        print(f"error: --sglang {options.sglang}: {reason}", file=sys.stderr)
        return 2
    if reason:
        _say(f"SGLang is not measured, and there are no ratios: {reason}")
    if options.cores:  # before JAX starts its threads, and for the servers, which inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    keep_freed_memory()  # as fluxjax.train does
    jax.config.update("jax_platforms", "cpu")
    try:
        print(json.dumps(asyncio.run(measure(options, sglang, reason))))
    except (EngineError, Wrong) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def measure(options: argparse.Namespace, sglang: str, reason: str) -> dict[str, Any]:
    """Runs the whole benchmark. `sglang` is the version of SGLang; if it is empty, `reason` says why."""
    load_before = os.getloadavg()
    config = read_config({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
                          "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                          "max_position_embeddings": 32768, **SHAPES[options.shape]})  # fmt: skip
    model = models.create(config, seed=0)
    threads = dict.fromkeys((name for name in ("jax", "serve") if name in options.sides), cores())  # XLA's
    if sglang:  # PyTorch's: two threads that wait for each other are often slower than one
        threads |= {f"sglang-{n}": n for n in sorted(set(options.sglang_threads or (1, cores())))}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        _save(model, folder / "model")
        sides: dict[str, Engine] = {}
        for name in threads:
            sides[name] = stack.enter_context(_engine(name, threads[name], model, folder, options))
        for name, engine in sides.items():
            _say(f"{name}: starting")
            await engine.update_weights(1, models.split(model)[1])
        greedy = await _compare(sides, config, options)
        await _warm_up(sides, config, options)
        settle_heap()
        seconds = await _timed(sides, config, options)
        await asyncio.gather(*(engine.close() for engine in sides.values()))
    return {
        "benchmark": "rollout_engine",
        "shape": {"name": options.shape, "parameters": parameter_count(model), **SHAPES[options.shape]},
        "dtype": DTYPE,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "temperature": 1.0,
        "cores": cores(),
        "threads": threads,
        "load_average_before": [round(load, 2) for load in load_before],
        "load_average_after": [round(load, 2) for load in os.getloadavg()],
        "repeats": options.repeats,
        "greedy": greedy,
        "seconds": {name: {str(c): spread(seconds[name, c]) for c in options.concurrency} for name in sides},
        "tokens_per_second": {
            name: {
                str(c): round(c * options.new_tokens / statistics.median(seconds[name, c]), 1)
                for c in options.concurrency
            }
            for name in sides
        },
        **(
            _ratios(seconds, list(sides), options.concurrency)
            if sglang
            else {"ratio": None, "no_ratio_because": reason}
        ),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax")} | {"sglang": sglang or None},
    }


# --- the sides ------------------------------------------------------------------------------------


def _why_no_sglang(options: argparse.Namespace) -> tuple[str, str]:
    """Returns why SGLang can't be measured, and its version: one of the two is empty."""
    if "sglang" not in options.sides:
        return "--sides leaves it out", ""
    python = options.sglang or str(SGLANG)
    if shutil.which(python) is None:
        return f"there is no program {python} (bash scripts/install_sglang.sh makes an environment, .sglang)", ""
    code = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return ("", asked.stdout.strip()) if not asked.returncode else (f"{python} has no sglang", "")


@contextlib.contextmanager
def _engine(
    name: str, threads: int, model: Decoder, folder: pathlib.Path, options: argparse.Namespace
) -> Iterator[Engine]:
    """The engine of one side as in a run, with slots and cache for the highest concurrency."""
    config, slots, longest = model.config, max(options.concurrency), options.prompt_tokens + options.new_tokens
    if name == "jax":
        yield JaxEngine(model, slots=slots, max_sequence_tokens=longest)
        return
    server = LocalServer(_command(name, threads, folder / "model", slots, longest, options), folder / f"{name}.log")
    fleet = Fleet(
        config,
        EngineLimits(slots, longest, config.text.vocab_size),
        SharedMemory(SharedFolders(config, DTYPE)),
        FleetOptions(start_seconds=START),
    )
    (seat,) = fleet.add_seats([server])
    with contextlib.closing(fleet):
        yield seat


def _command(
    name: str, threads: int, checkpoint: pathlib.Path, slots: int, longest: int, options: argparse.Namespace
) -> ServerCommand:
    if name == "serve":
        flags = ("--dtype", DTYPE, "--slots", str(slots), "--max-sequence-tokens", str(longest))
        environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        return ServerCommand(name, str(checkpoint), flags=flags, environment=environment)
    shipped = runpy.run_path(str(ROOT / "configs" / "vlm_sglang.py"))  # SGLang on a CPU, as a run starts it
    # Twice the tokens that run at once: with fewer, SGLang holds requests back, since running ones may grow.
    sizes = ("--max-running-requests", str(slots), "--max-total-tokens", str(2 * slots * longest))
    environment = dict(entry.split("=", 1) for entry in shipped["ENVIRONMENT"]) | thread_environment(threads)
    # Threads are bound to cores if SGLang's own kernels run (AMX); otherwise they move between the process's cores.
    environment["SGLANG_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    return ServerCommand(
        "sglang",
        str(checkpoint),
        options.sglang or str(SGLANG),
        (*shipped["FLAGS"], "--dtype", DTYPE, *sizes),
        environment,
    )


def _save(model: Decoder, folder: pathlib.Path) -> None:
    """Writes a checkpoint for servers, with a token of the tokeniser for each id: servers turn all sampled ids into
    text."""
    letters = model.config.text.vocab_size - len(SPECIAL_TOKENS)
    models.save(model, folder)
    build_processor(["".join(map(chr, range(0x4E00, 0x4E00 + letters)))]).save(folder)


# --- turns ----------------------------------------------------------------------------------------


def _prompts(config: DecoderConfig, count: int, options: argparse.Namespace, seed: Sequence[int]) -> list[ModelInput]:
    T = options.prompt_tokens
    ids_BT = np.random.default_rng(seed).integers(0, config.text.vocab_size, (count, T), dtype=np.int32)
    positions_3T = np.broadcast_to(np.arange(T, dtype=np.int32), (3, T))
    return [ModelInput(ids_T, positions_3T, np.full(T, -1, np.int32), T) for ids_T in ids_BT]


async def _turn(
    engine: Engine, prompts: Sequence[ModelInput], options: argparse.Namespace, temperature: float = 1.0
) -> list[list[TokenChunk]]:
    """The chunks of each response; all responses are requested at once."""
    sampling = SamplingParams(max_new_tokens=options.new_tokens, temperature=temperature)

    async def read(number: int, prompt: ModelInput) -> list[TokenChunk]:
        return [chunk async for chunk in engine.generate(GenerateRequest(f"{number}", prompt, sampling, seed=number))]

    answers = await asyncio.gather(*(read(number, prompt) for number, prompt in enumerate(prompts)))
    if {sum(len(chunk.token_ids) for chunk in chunks) for chunks in answers} != {options.new_tokens}:
        raise Wrong("a response is not as long as it was to be")
    return answers


async def _compare(sides: Mapping[str, Engine], config: DecoderConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Compares the greedy responses of all sides to a prompt. Raises Wrong unless tokens and log-probs are the same."""
    prompts = _prompts(config, 1, options, [0])
    answers = {}
    for name, engine in sides.items():
        (chunks,) = await _turn(engine, prompts, options, temperature=0.0)
        ids = [id for chunk in chunks for id in chunk.token_ids]
        answers[name] = ids, np.array([logprob for chunk in chunks for logprob in chunk.logprobs])
    first, (ids, logprobs) = next(iter(answers.items()))
    gap = 0.0
    for name, (theirs, their_logprobs) in answers.items():
        if theirs != ids:
            raise Wrong(f"{first} and {name} differ in their greedy response to a prompt: {ids} and {theirs}")
        gap = max(gap, float(np.abs(logprobs - their_logprobs).max()))
    if gap > LOGPROB_GAP:
        raise Wrong(f"log-probs of the greedy response differ by {gap:.1e}")
    return {"tokens": len(ids), "equal": True, "largest_logprob_gap": float(f"{gap:.1e}")}


async def _warm_up(sides: Mapping[str, Engine], config: DecoderConfig, options: argparse.Namespace) -> None:
    """Lets every side compile. Requests do not reach our server at the same moment: it begins with one request, then
    takes 1, 2, 4, ... of the waiting requests together. So the warm-up has turns of all these numbers."""

    async def turn(name: str, count: int, number: int) -> None:
        begin = time.perf_counter()
        await _turn(sides[name], _prompts(config, count, options, [1, number, count]), options)
        _say(f"{name}: {count} at once, warm-up: {time.perf_counter() - begin:.3f} s")

    if "serve" in sides:
        most = max(options.concurrency)
        for count in [1 + 2**n for n in range(most.bit_length()) if 1 + 2**n <= most]:
            await turn("serve", count, 0)
    for number in range(options.warmup):
        for count in options.concurrency:
            for name in sides:
                await turn(name, count, 1 + number)


async def _timed(
    sides: Mapping[str, Engine], config: DecoderConfig, options: argparse.Namespace
) -> dict[tuple[str, int], list[float]]:
    """Seconds of each turn, by side and concurrency. Each side goes first equally often."""
    names = list(sides)
    seconds: dict[tuple[str, int], list[float]] = {(name, c): [] for name in names for c in options.concurrency}
    for turn in range(options.repeats):
        first = turn % len(names)
        for c in options.concurrency:
            prompts = _prompts(config, c, options, [2, turn, c])
            for name in names[first:] + names[:first]:
                await asyncio.sleep(REST)
                begin = time.perf_counter()
                await _turn(sides[name], prompts, options)
                seconds[name, c].append(time.perf_counter() - begin)
            shown = ", ".join(f"{name} {seconds[name, c][-1]:.3f} s" for name in names)
            _say(f"turn {turn + 1} of {options.repeats}, {c} at once: {shown}")
    return seconds


def _ratios(
    seconds: Mapping[tuple[str, int], Sequence[float]], names: Sequence[str], concurrency: Sequence[int]
) -> dict[str, Any]:
    """Returns the ratios of our tokens a second to those of SGLang with its fastest number of threads."""
    peers, ours = ([name for name in names if name.startswith("sglang") is theirs] for theirs in (True, False))
    best = {c: min(peers, key=lambda name: statistics.median(seconds[name, c])) for c in concurrency}

    def ratios(name: str, c: int) -> list[float]:
        return [peer / side for peer, side in zip(seconds[best[c], c], seconds[name, c], strict=True)]

    spreads = {str(c): {name: spread(ratios(name, c)) for name in ours} for c in concurrency}
    return {
        "ratio": {c: {name: values["median"] for name, values in sides.items()} for c, sides in spreads.items()},
        "ratio_spread": spreads,
        "ratio_is_over": {str(c): name for c, name in best.items()},
        "ratio_is": "tokens a second, ours / SGLang's, of the same prompts, median over turns: above 1, ours is faster",
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES, help="default: all")
    parser.add_argument(
        "--sglang", metavar="PYTHON", help="of an environment that has SGLang (default: .sglang/bin/python, if there)"
    )
    parser.add_argument(
        "--sglang-threads", type=int, nargs="+", metavar="N", help="one server each (default: 1, and all cores)"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=21, help="timed turns of each side (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="turns before (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=0, help="limit all sides to so many (default: all)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
