"""Measures speed and memory of one RL step: rollout, and one optimizer step on its responses.

    python benchmarks/train_step.py                                 the default model, configs/vlm.py
    python benchmarks/train_step.py --config=configs/text.py        another configuration
    python benchmarks/train_step.py --config.rollout.group_size=16  with a setting changed
    python benchmarks/train_step.py --peer trl --peer-python PYTHON the same work in TRL/PyTorch too, interleaved
    python benchmarks/train_step.py --peer tunix --peer-python PYTHON --size 2.6M --lengths natural
                                                                    in google-tunix/JAX, with a larger text model

Prints one JSON line on standard output and its progress on standard error. What is measured and how:
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

from common import ROOT, Worker, WorkerError, cores, response_lengths, spread, thread_environment

from fluxjax.config import Config, ConfigError, DType
from fluxjax.config.cli import DEFAULT_CONFIG, load
from fluxjax.config.run_folder import to_json

STAGES = ("prepare", "rollout", "train", "sync", "step")
NEEDED = {"trl": ("trl", "torch", "transformers", "datasets", "PIL"), "tunix": ("tunix", "jax", "flax", "optax")}
# Models of configs/text.py by their number of parameters; with larger ones, answers are longer and prompts fewer.
SIZES = {
    "0.13M": {},
    "2.6M": {
        "model.tiny.hidden_size": 256,
        "model.tiny.intermediate_size": 576,
        "model.tiny.num_layers": 4,
        "rollout.prompts_per_step": 16,
        "rollout.max_new_tokens": 32,
        "rollout.max_sequence_tokens": 48,
        "packing.tokens_per_row": 136,  # a prompt of 8 tokens and four of the longest responses
        "optim.lr": 1e-4,
    },
    "20M": {
        "model.tiny.hidden_size": 512,
        "model.tiny.intermediate_size": 1152,
        "model.tiny.num_layers": 8,
        "model.tiny.num_heads": 8,
        "model.tiny.num_kv_heads": 4,
        "rollout.prompts_per_step": 8,
        "rollout.max_new_tokens": 32,
        "rollout.max_sequence_tokens": 48,
        "packing.tokens_per_row": 136,
        "optim.lr": 1e-4,
    },
}
WORK = {"rollout": 2, "train": 6}  # operations for each token and each weight that it is multiplied by


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error for settings that cannot work, 1 for a worker that failed."""
    options, arguments = _parser().parse_known_args(argv)
    try:
        if options.size:
            arguments = _sized(options.size, arguments)
        config = load(arguments)
        _check(options, config)
        if options.cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
        result = measure(options, arguments, config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


def measure(options: argparse.Namespace, arguments: Sequence[str], config: Config) -> dict[str, Any]:
    """Runs the whole benchmark. Raises `WorkerError`."""
    with contextlib.ExitStack() as stack:
        load_before = os.getloadavg()[0]
        exchange = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")) if options.peer else ""
        _say("fluxjax: building")
        rollout, natural = config.rollout, options.lengths == "natural"
        lengths = response_lengths(
            natural, rollout.prompts_per_step, rollout.group_size, rollout.max_new_tokens, config.seed
        )
        ours = stack.enter_context(_ours(arguments, "step", exchange, lengths))
        workers, trials = {"fluxjax": ours}, {}
        matmul = ours.ask(do="matmul")["flops_per_second"]
        if options.peer:
            _say(f"{options.peer}: building")
            peer = stack.enter_context(_peer(options, config, exchange, ours.about["forbidden_ids"], lengths))
            workers["peer"] = peer
            if options.peer == "trl":
                trials = {"microbatches": options.peer_microbatches} | _best_threads(peer, options.peer_threads)
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        for index in range(options.warmup + options.repeats):
            for name, worker in workers.items():  # one at a time; the others wait for their pipe
                answers[name].append(worker.ask(do="step"))
                _progress(name, index - options.warmup, answers[name][-1])
        last = {name: worker.finish() for name, worker in workers.items()}
        peaks: dict[str, Any] = {"step": last["fluxjax"]["peak_rss_mib"]}
        if not options.peer:
            for stage in ("rollout", "train"):
                _say(f"fluxjax: {stage} alone, for its peak memory")
                peaks[stage] = _alone(arguments, stage, lengths)

        about = {name: worker.about for name, worker in workers.items()}
        result = {
            "benchmark": "train_step",
            "config": next((a.partition("=")[2] for a in arguments if a.startswith("--config=")), DEFAULT_CONFIG),
            "overrides": [a for a in arguments if not a.startswith("--config=")],
            "matmul_gflops_per_second": round(matmul / 1e9, 1),
            "batch": about["fluxjax"]["batch"] | {"lengths": options.lengths},
            "cores": cores(),
            "load_average_before": round(load_before, 2),
            "warmup": options.warmup,
            "repeats": options.repeats,
            "fluxjax": _side(about["fluxjax"], answers["fluxjax"], options.warmup) | {"peak_rss_mib": peaks},
        }
        if last["fluxjax"]["peak_device_mib"] is not None:
            result["fluxjax"]["peak_device_mib"] = last["fluxjax"]["peak_device_mib"]
        if options.peer:
            peaks = {"step": last["peer"]["peak_rss_mib"]}
            result["peer"] = _side(about["peer"], answers["peer"], options.warmup) | {"peak_rss_mib": peaks}
            result["peer"] |= {"name": options.peer} | trials
            result["ratio"] = _ratios(result["fluxjax"], result["peer"], "median")
            result["ratio_of_minima"] = _ratios(result["fluxjax"], result["peer"], "min")
            result["ratio_is"] = "peer / fluxjax: above 1, fluxjax is faster or smaller; minima suffer less from noise"
        if (weights := about["fluxjax"]["multiplied_parameters"]) is not None:
            batch = about["fluxjax"]["batch"]
            tokens = batch["prompts"] * batch["prompt_tokens"]["mean"] + batch["all_response_tokens"]
            for side in set(workers):
                result[side]["share_of_matmul_rate"] = {
                    stage: float(f"{work * weights * tokens / result[side]['seconds'][stage]['median'] / matmul:.3g}")
                    for stage, work in WORK.items()
                }
        return result


def _sized(size: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a run of this size; later arguments win. Raises ConfigError if a configuration is given."""
    if any(argument.startswith("--config=") for argument in arguments):
        raise ConfigError("--size is one of configs/text.py; leave out --config, or --size")
    settings = [f"--config.{name}={value}" for name, value in SIZES[size].items()]
    return ["--config=configs/text.py", *settings, *arguments]


def _ours(arguments: Sequence[str], stage: str, exchange: str, lengths: Sequence[Sequence[int]]) -> Worker:
    settings = {"arguments": list(arguments), "stage": stage, "videos": not exchange, "exchange": exchange}
    settings["lengths"] = [list(group) for group in lengths]
    command = [sys.executable, str(ROOT / "benchmarks" / "fluxjax_step.py")]
    platform = {"JAX_PLATFORMS": "cpu"} if exchange else {}  # a peer runs on the CPU
    return Worker("fluxjax", command, settings, thread_environment(cores()) | platform)


def _peer(
    options: argparse.Namespace,
    config: Config,
    exchange: str,
    forbidden_ids: Sequence[int],
    lengths: Sequence[Sequence[int]],
) -> Worker:
    settings = to_json(config) | {
        "exchange": exchange,
        "steps": max(config.steps, options.warmup + options.repeats + 1000),
        "microbatches": options.peer_microbatches,
        "forbidden_ids": list(forbidden_ids),
        "lengths": [list(group) for group in lengths],
    }
    command = [options.peer_python, str(ROOT / "benchmarks" / "peers" / f"{options.peer}_step.py")]
    return Worker(options.peer, command, settings, thread_environment(cores()) | {"JAX_PLATFORMS": "cpu"})


def _best_threads(peer: Worker, wanted: int) -> dict[str, Any]:
    """Gives the peer its fastest number of threads, or `wanted` threads. On small models one thread may beat two by
    far, and waiting for a thread on a busy core is worse than not having the thread."""
    seconds = {}
    for threads in [wanted] if wanted else sorted({1, *(2**i for i in range(1, 8) if 2**i < cores()), cores()}):
        peer.ask(do="step", threads=threads)  # after a change, the first step is slower
        steps = [peer.ask(do="step")["seconds"]["step"] for _ in range(2)]
        seconds[threads] = round(min(steps), 4)
        _say(f"peer: {threads} threads: step {seconds[threads]:.2f} s")
    best = min(seconds, key=seconds.__getitem__)
    peer.ask(do="step", threads=best)
    return {"threads": best, "step_seconds_by_threads": seconds}


def _alone(arguments: Sequence[str], stage: str, lengths: Sequence[Sequence[int]]) -> float:
    """Peak resident MiB of a new process that runs only this stage."""
    with _ours(arguments, stage, "", lengths) as worker:
        for _ in range(2):
            worker.ask(do="step")
        return worker.finish()["peak_rss_mib"]


def _side(about: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], warmup: int) -> dict[str, Any]:
    """Describes one side, and returns its measures. Rates are those of medians."""
    timed, first = answers[warmup:], answers[0]
    seconds = {
        stage: spread([answer["seconds"][stage] for answer in timed]) for stage in STAGES if stage in first["seconds"]
    }
    work = {"samples_per_second": timed[0]["samples"], "response_tokens_per_second": timed[0]["tokens"]}
    processed = {"train": first["packing"]["tokens"]} if "packing" in first else {}
    hidden = ("batch", "forbidden_ids", "multiplied_parameters")
    side: dict[str, Any] = {key: value for key, value in about.items() if key not in hidden}
    side["seconds"] = seconds
    for stage in ("rollout", "train", "step"):
        amounts = work | ({"processed_tokens_per_second": processed[stage]} if stage in processed else {})
        side[stage] = {name: round(amount / seconds[stage]["median"], 1) for name, amount in amounts.items()}
    if "compile_seconds" in first:
        side["first_step_seconds"] = round(first["seconds"]["step"], 2)
        side["compile_seconds"] = round(answers[-1]["compile_seconds"], 2)
        side["compile_seconds_while_timed"] = round(
            answers[-1]["compile_seconds"] - answers[warmup - 1]["compile_seconds"], 2
        )
    if "packing" in first:
        side["packing"] = first["packing"]
    if "logprob_gap" in first:
        side["logprob_gap"] = max(answer["logprob_gap"] for answer in timed)
    return side


def _ratios(ours: Mapping[str, Any], peer: Mapping[str, Any], of: str) -> dict[str, float]:
    stages = [stage for stage in STAGES if stage in ours["seconds"] and stage in peer["seconds"]]
    ratios = {stage: round(peer["seconds"][stage][of] / ours["seconds"][stage][of], 3) for stage in stages}
    return ratios | {"peak_rss": round(peer["peak_rss_mib"]["step"] / ours["peak_rss_mib"]["step"], 3)}


def _check(options: argparse.Namespace, config: Config) -> None:
    """Raises `ConfigError` for settings that can't be measured or compared."""
    if min(options.warmup, options.repeats, options.peer_microbatches) < 1:
        raise ConfigError("--warmup, --repeats and --peer-microbatches must be at least 1")
    if min(options.cores, options.peer_threads) < 0:
        raise ConfigError("--cores and --peer-threads must not be negative")
    if not options.peer:
        return
    if config.model.compute_dtype is not DType.FLOAT32:
        raise ConfigError("--peer compares in float32; leave model.compute_dtype as it is")
    if options.peer == "trl" and options.lengths == "natural":
        raise ConfigError("--peer trl can't be told how long each response is; leave --lengths as it is")
    if options.peer == "tunix" and (config.model.tiny["architecture"] != "qwen2" or config.algorithm.kl_coefficient):
        raise ConfigError("--peer tunix compares text models without a KL term: --size, or --config=configs/text.py")
    probe = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    try:
        found = subprocess.run(
            [options.peer_python, "-c", probe, *NEEDED[options.peer]],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--peer-python={options.peer_python} does not run: {error}") from None
    if found.stdout.strip():
        raise ConfigError(
            f"--peer {options.peer}: {options.peer_python} lacks {found.stdout.strip()}; benchmarks/README.md says how "
            "to make an environment for --peer-python"
        )


def _progress(name: str, repeat: int, answer: Mapping[str, Any]) -> None:
    parts = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in answer["seconds"].items())
    _say(f"{name}: {'warm-up' if repeat < 0 else f'repeat {repeat + 1}'}: {parts}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repeats", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before, which also compile (default 2)")
    parser.add_argument("--cores", type=int, default=0, help="CPU cores to use (default: all)")
    parser.add_argument("--size", choices=list(SIZES), help="configs/text.py with a model of so many parameters")
    parser.add_argument(
        "--lengths",
        choices=["equal", "natural"],
        default="equal",
        help="tokens of the responses: all rollout.max_new_tokens (default), or drawn, uneven and at most so many",
    )
    parser.add_argument("--peer", choices=list(NEEDED), help="also run this implementation, interleaved, on the CPU")
    parser.add_argument("--peer-python", default=sys.executable, help="its interpreter (default: this one)")
    parser.add_argument("--peer-threads", type=int, default=0, help="threads of TRL (default: what is fastest)")
    parser.add_argument(
        "--peer-microbatches", type=int, default=1, help="accumulation steps of TRL (default 1: all in one go)"
    )
    parser.epilog = "Settings of the run, --config=FILE[:variant] and --config.section.field=value, as in training."
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
