"""Measures the cost of bringing new weights to a rollout server: every route, deltas by learning rate,
the trainer's stall.

    bash scripts/install_sglang.sh                                   once: SGLang, in an environment of its own
    python benchmarks/weight_sync.py                                 0.1B parameters
    python benchmarks/weight_sync.py --sizes 0.1b 0.5b 1b            routes of three sizes, deltas of the first two
    python benchmarks/weight_sync.py --sizes tiny --servers serve --repeats 1 --rates 1e-6 --steps 1    whether it runs

Prints one JSON line on standard output and its progress on standard error. What is measured and how:
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
import runpy
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from common import ROOT, cores, spread, thread_environment
from fluxjax_step import Steps

import models
from fluxjax.base.process import keep_freed_memory
from fluxjax.config import Config
from fluxjax.data.loader import open_sources
from fluxjax.run.build import build_model
from models.config import DecoderConfig
from models.decoder import parameter_count
from rollout.engine import EngineError
from rollout.fleet import Fleet
from rollout.fleet_server import FleetOptions
from rollout.local_server import LocalServer, ServerCommand
from rollout.requests import EngineLimits
from rollout.sglang import ServerClient
from rollout.weights.published import Published, SharedFolders
from rollout.weights.routes import Buckets, OrbaxFolders, Pause, SharedMemory, SyncRoute
from rollout.weights.version_folders import VersionFolders, pull

SIZES = {  # hidden, intermediate, layers, heads, KV heads; a vocabulary of some dozens of characters
    "tiny": (64, 160, 3, 4, 2),
    "0.1b": (1024, 2816, 9, 16, 4),
    "0.5b": (1536, 4096, 21, 12, 4),
    "1b": (2048, 5632, 23, 16, 4),
}
DELTAS = ("tiny", "0.1b", "0.5b")  # sizes whose optimizer has room here
SGLANG = ROOT / ".sglang" / "bin" / "python"  # scripts/install_sglang.sh
DTYPE = "bfloat16"
BUCKET = 256 << 20
LONGEST = 64  # most tokens of a sequence; the servers generate none here


def main(argv: Sequence[str]) -> int:
    """Returns 0, or one line on standard error: 2 for settings that cannot work, 1 for a server that failed."""
    options = _parser().parse_args(argv)
    if min(options.repeats, options.steps) < 1:
        print("error: --repeats and --steps must be at least 1", file=sys.stderr)
        return 2
    if "sglang" in options.servers and shutil.which(options.sglang) is None:
        _say(f"SGLang is not measured: there is no program {options.sglang} (bash scripts/install_sglang.sh makes one)")
        options.servers = [server for server in options.servers if server != "sglang"]
    _begin()
    load = os.getloadavg()
    try:
        with tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
            result = measure(options, pathlib.Path(folder))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    machine = {"cores": cores(), "load_average_before": load, "load_average_after": os.getloadavg()}
    print(json.dumps({"benchmark": "weight_sync", "dtype": DTYPE, "repeats": options.repeats, **result, **machine}))
    return 0


def measure(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    deltas: dict[str, Any] = {}
    routes: dict[str, Any] = {}
    stalls: dict[str, Any] = {}
    for size in options.sizes:
        config = _config(size)
        if size in DELTAS:
            deltas[size] = {f"{rate:g}": _alone(measure_delta, size, rate, options, folder) for rate in options.rates}
        model, processor = build_model(config, open_sources(config))
        sizes, weights = model.config, [models.split(model)[1]]
        _say(f"{size}: {parameter_count(model) / 1e6:.0f}M parameters")
        saved = folder / size
        models.save(model, saved, dtype=DTYPE)
        processor.save(saved)
        del model
        for name in options.servers:
            with _server(name, saved, options) as server:
                measured = Measured(server, sizes, weights, folder / "shared", name, options)
                routes.setdefault(size, {})[name] = asyncio.run(measured.routes())
                if name == "serve":
                    stalls[size] = measured.stall()
        weights.clear()
        shutil.rmtree(saved)
    return {
        "sizes": {size: dict(zip(("hidden", "intermediate", "layers", "heads", "kv_heads"), SIZES[size], strict=True))
                  for size in options.sizes},
        "routes": routes,
        "delta": deltas,
        "delta_share": {
            size: {rate: figures["share"] for rate, figures in rates.items()} for size, rates in deltas.items()
        },
        "stall": stalls,
        "stall_share": {size: figures["share"] for size, figures in stalls.items()},
    }  # fmt: skip


# --- deltas -----------------------------------------------------------------------------------------


def _alone(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Calls `measure` in a process of its own, so that the state of one training is freed before the next begins."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin) as process:
        return process.submit(measure, *arguments).result()


def _begin() -> None:
    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")


def measure_delta(size: str, rate: float, options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Measures the deltas of weights after steps of AdamW on policy gradients: their bytes over those of all weights,
    and the seconds of both."""
    config = _config(size)
    config.optim.lr = rate
    steps = Steps(config, "train", [[config.rollout.max_new_tokens] * config.rollout.group_size] *
                  config.rollout.prompts_per_step, videos=False)  # fmt: skip
    sizes = steps.model.config
    folders, local = SharedFolders(sizes, DTYPE), folder / "local"
    shared = VersionFolders(folder / "shared")
    found: dict[str, list[float]] = {"bytes": [], "changed": [], "write": [], "apply": []}
    whole: dict[str, float] = {}
    before: Published | None = None
    for number in range(3 + options.steps):  # the first steps fill Adam's moments
        asyncio.run(steps.run())
        if number < 2:
            continue
        published = folders.write(number, steps.trainer.weights())
        began = time.perf_counter()
        shared.publish(published)
        middle = time.perf_counter()
        written = _size(shared.folder(published))
        pull(local, shared.source, number)
        ended = time.perf_counter()
        if before is None:
            whole = {"bytes": written, "write": middle - began, "apply": ended - middle}
        else:
            found["bytes"].append(written)
            found["write"].append(middle - began)
            found["apply"].append(ended - middle)
            found["changed"].append(_changed(before, published))
        before = published
        folders.keep([published])
        shared.keep([published])
    assert before is not None
    share = statistics.median(found["bytes"]) / before.bytes
    _say(f"{size}, rate {rate:g}: {share:.2%} of the bytes")
    result = {
        "share": round(share, 5),
        "bytes": before.bytes,
        "changed_words": round(statistics.median(found["changed"]), 5),
        "seconds": {name: spread(found[name]) for name in ("write", "apply")},
        "whole_seconds": {name: round(whole[name], 3) for name in ("write", "apply")},
        "whole_bytes_of_orbax": int(whole["bytes"]),
    }
    shared.close()
    folders.close()
    shutil.rmtree(local)
    return result


def _changed(before: Published, after: Published) -> float:
    """The share of 16-bit words that differ."""
    old, new = (
        np.memmap(version.folder / "model.safetensors", np.uint16, "r", offset=8) for version in (before, after)
    )
    return float(np.count_nonzero(old != new) / len(new))


# --- routes -----------------------------------------------------------------------------------------


class Measured:
    """One server; each route in turn brings weights to it."""

    def __init__(
        self, server: LocalServer, sizes: DecoderConfig, weights: list[Any], shared: pathlib.Path, name: str,
        options: argparse.Namespace,
    ) -> None:  # fmt: skip
        """`weights` has one entry: the newest."""
        self._server, self._sizes, self._weights, self._name, self._options = server, sizes, weights, name, options
        self._shared, self._local = shared, shared.with_name("pulled")
        self._version = 0

    def _route(self, name: str) -> SyncRoute:
        memory = SharedFolders(self._sizes, DTYPE)
        if name == "shm":
            return SharedMemory(memory)
        if name == "bucket":
            return Buckets(memory, BUCKET, pickled=self._name == "sglang")
        folders = VersionFolders(self._shared, delta=name == "orbax with delta")
        return OrbaxFolders(memory, folders, self._local, {}, here=self._name == "sglang")

    def _fleet(self, route: SyncRoute) -> Fleet:
        limits = EngineLimits(4, LONGEST, self._sizes.text.vocab_size)
        fleet = Fleet(self._sizes, limits, route, FleetOptions(patience=120.0))
        fleet.add_seats([self._server.address])
        return fleet

    def _next(self, share: float = 1.0) -> tuple[int, Mapping[str, Any]]:
        """Makes the next version of the weights, replacing the version before. About this share of their words
        changes."""
        self._version += 1
        key = jax.random.key(self._version)

        @functools.partial(jax.jit, donate_argnums=0)  # two of the largest versions don't fit into memory
        def moved(weight: jax.Array) -> jax.Array:
            here = jax.random.uniform(key, weight.shape) < share
            return jnp.where(here, weight * 1.01, weight)

        self._weights[0] = jax.block_until_ready(jax.tree.map(moved, self._weights[0]))
        return self._version, self._weights[0]

    async def routes(self) -> dict[str, Any]:
        """Measures for each route the seconds until the server is proven to have a version, the seconds in which it
        can't generate meanwhile, and the bytes that travel."""
        names = ["shm", "bucket", "orbax", "orbax with delta"]
        total: dict[str, list[float]] = {name: [] for name in names}
        paused: dict[str, list[float]] = {name: [] for name in names}
        carried: dict[str, int] = {}
        for turn in range(self._options.repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with contextlib.closing(self._fleet(route := self._route(name))) as fleet:
                    seat, watch = fleet.seats[0], Watch(route)
                    await seat.update_weights(*self._next())
                    while not all(status.up for status in fleet.servers()):  # and brought to these
                        await asyncio.sleep(0.05)
                    newer = self._next(0.02 if "delta" in name else 1.0)
                    watch.began.clear()
                    began = time.perf_counter()
                    await seat.update_weights(*newer)
                    ended = time.perf_counter()
                    total[name].append(ended - began)
                    paused[name].append(ended - watch.began[-1])
                    (published,) = {server.holds for server in fleet.members}
                    assert published is not None
                    carried[name] = self._bytes(name, route, published)
                _say(f"{self._name}, {name}: {total[name][-1]:.2f} s, {paused[name][-1]:.2f} s of them paused")
        return {
            name: {"seconds": spread(total[name]), "paused_seconds": spread(paused[name]), "bytes": carried[name]}
            for name in names
        }

    def _bytes(self, name: str, route: SyncRoute, published: Published) -> int:
        """Returns the bytes that travel: those of files or weights; `bucket` sends weights as base64 in JSON."""
        if isinstance(route, OrbaxFolders):
            return _size(route._folders.folder(published))
        return published.bytes * 4 // 3 if name == "bucket" else published.bytes

    # --- the trainer's stall ----------------------------------------------------------------------

    def stall(self) -> dict[str, Any]:
        """Measures the seconds that a trainer loses to one publication, if it waits for the publication and if not. A
        step is a small program and sleep, as a GPU's step is for the host: the cores are free for the publication."""
        with contextlib.closing(self._fleet(self._route("shm"))) as fleet:
            seat = fleet.seats[0]
            asyncio.run(seat.update_weights(*self._next()))
            full: list[float] = []
            lost: list[float] = []
            for _ in range(self._options.repeats):
                newer = self._next()
                began = time.perf_counter()
                asyncio.run(seat.update_weights(*newer))
                full.append(time.perf_counter() - began)
                alone = _steps(full[-1], None)
                publishing = threading.Thread(target=asyncio.run, args=(seat.update_weights(*self._next()),))
                beside = _steps(full[-1], publishing)
                publishing.join()
                lost.append(max(beside - alone, 0.0))
        share = statistics.median(a / b for a, b in zip(lost, full, strict=True))
        _say(f"stall: {statistics.median(lost):.3f} s beside training, {statistics.median(full):.2f} s in line")
        return {"share": round(share, 4), "overlapped_seconds": spread(lost), "waiting_seconds": spread(full)}


class Watch:
    """Notes when a route has paused a server."""

    def __init__(self, route: SyncRoute) -> None:
        self.began: list[float] = []
        deliver = route.deliver

        async def noted(client: ServerClient, published: Published, pause: Pause) -> None:
            async def noted_pause() -> None:
                await pause()
                self.began.append(time.perf_counter())

            await deliver(client, published, noted_pause)

        route.deliver = noted  # pyright: ignore[reportAttributeAccessIssue]


def _steps(seconds: float, publishing: threading.Thread | None) -> float:
    """Seconds of the steps that take about `seconds` if nothing else runs; a publication begins with them."""
    program, x = jax.jit(lambda x: x * 2.0), jnp.ones(8)
    program(x).block_until_ready()
    count, step = max(4, round(1.5 * seconds / 0.25)), 0.25
    began = time.perf_counter()
    if publishing is not None:
        publishing.start()
    for _ in range(count):
        program(x).block_until_ready()
        time.sleep(step)
    return time.perf_counter() - began


# --- parts ------------------------------------------------------------------------------------------


def _config(size: str) -> Config:
    config: Config = runpy.run_path(str(ROOT / "configs" / "text.py"))["get_config"]("")
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    config.model.tiny |= dict(zip(names, SIZES[size], strict=True))
    config.model.tiny["initializer_range"] = 0.02  # as in published checkpoints of these sizes
    config.rollout.prompts_per_step, config.rollout.group_size = 4, 4
    config.packing.rows_per_device = 3
    config.optim.warmup_steps = 0
    config.optim.schedule = type(config.optim.schedule).CONSTANT
    return config


@contextlib.contextmanager
def _server(name: str, checkpoint: pathlib.Path, options: argparse.Namespace) -> Iterator[LocalServer]:
    if name == "serve":
        flags = ("--dtype", DTYPE, "--slots", "4", "--max-sequence-tokens", str(LONGEST))
        command = ServerCommand(name, str(checkpoint), flags=flags,
                                environment={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"})  # fmt: skip
    else:
        shipped = runpy.run_path(str(ROOT / "configs" / "vlm_sglang.py"))  # SGLang on a CPU, as a run starts it
        flags = (*shipped["FLAGS"], "--dtype", DTYPE, "--max-running-requests", "4", "--max-total-tokens", "1024")
        environment = dict(entry.split("=", 1) for entry in shipped["ENVIRONMENT"]) | thread_environment(1)
        command = ServerCommand(name, str(checkpoint), options.sglang, flags, environment)
    log = checkpoint.parent / f"{name}.log"
    server = LocalServer(command, log)
    server.start()
    try:
        asyncio.run(_until_up(server))
        yield server
    finally:
        server.stop()


async def _until_up(server: LocalServer) -> None:
    client = ServerClient(server.address)
    try:
        for _ in range(600):
            if server.ended() is not None:
                raise EngineError(f"the server ended; its log ends with:\n{server.last_words(20)}")
            with contextlib.suppress(EngineError):
                await client.load(5.0)
                return
            await asyncio.sleep(0.5)
        raise EngineError("the server did not come up in 300 s")
    finally:
        await client.close()


def _size(folder: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.1b"])
    parser.add_argument("--servers", nargs="+", choices=["serve", "sglang"], default=["serve", "sglang"])
    parser.add_argument("--sglang", default=str(SGLANG), metavar="PYTHON",
                        help="an interpreter that has SGLang and PyTorch (default: that of .sglang)")  # fmt: skip
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-7, 1e-6, 1e-5, 1e-4],
                        help="learning rates of the deltas")  # fmt: skip
    parser.add_argument("--steps", type=int, default=3, help="deltas at each rate (default 3)")
    parser.add_argument("--repeats", type=int, default=3, help="of each route, and of the stall (default 3)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
