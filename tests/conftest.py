"""Strict defaults for every test: 8 CPU devices, strict dtype and rank promotion, warnings are errors (pyproject)."""

import asyncio
import compileall
import gc
import inspect
import math
import os
import pathlib
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile much and run little: optimisations would take longer than they save. Subprocesses inherit this.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
FEWER_PASSES = "--xla_cpu_use_fusion_emitters=false"  # halves what XLA takes; not every version may know it
FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
if FEWER_PASSES not in FLAGS:
    code, env = "from jaxlib import xla_client; xla_client.CompileOptions()", os.environ | {"XLA_FLAGS": FEWER_PASSES}
    if subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).returncode == 0:
        FLAGS += f" {FEWER_PASSES}"
os.environ["XLA_FLAGS"] = FLAGS.strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Processes and sessions share what they compile; the key of a program has XLA's version and the processor's features.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fluxjax" / "xla-tests"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for program in CACHE.glob("*"):
            if program.stat().st_mtime < time.time() - 30 * 24 * 3600:
                program.unlink(missing_ok=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.03")

ROOT = pathlib.Path(__file__).resolve().parent.parent
if "PYTEST_XDIST_WORKER" not in os.environ:  # or each of hundreds of subprocesses compiles all modules: 0.7 s
    for package in ("fluxjax", "models", "rollout", "sharding"):
        compileall.compile_dir(ROOT / package, quiet=2)
# They write none: of a process whose files are bounded, as some tests have it, Python 3.11 keeps half a module.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.path.insert(0, str(ROOT))  # also without an editable install

if os.environ.get("FLUXJAX_SHAPE_CHECKS") != "0":
    from jaxtyping import install_import_hook

    # Shapes and dtypes are checked where there are arrays: not in pure bookkeeping, which tests run a million times.
    PURE = ("coordinator", "simulation")
    parts = sorted(p.stem for p in (ROOT / "fluxjax").iterdir() if p.stem not in PURE and not p.stem.startswith("_"))
    install_import_hook(["sharding", "models", "rollout", *(f"fluxjax.{part}" for part in parts)], "beartype.beartype")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
import turns  # noqa: E402
from forked import collect_rarely, forked  # noqa: E402

from fluxjax.base.process import share_between_devices  # noqa: E402

if TYPE_CHECKING:
    from faulty_proxy import Servers
    from run_cases import Commands

    from rollout.jax_engine import JaxEngine


def scheduled() -> int:
    """The scheduling policy of this thread, where the system has several."""
    return os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0


# No test depends on how fast the machine is. In CI a test has the same examples each time (those of its turn), so that
# a change is judged by what it changed; everywhere else it has others.
hypothesis.settings.register_profile("fluxjax", deadline=None, derandomize="CI" in os.environ and turns.TURN is None)
if "CI" in os.environ:
    hypothesis.settings.register_profile("fluxjax", hypothesis.settings.get_profile("fluxjax"), database=None)
hypothesis.settings.load_profile("fluxjax")
share_between_devices()
SCHEDULED = scheduled()
collect_rarely()
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    if "CI" in os.environ and turns.TURN is not None and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(turns.TURN)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes every `long` test for a `slow` one, and every `slow` one for a `medium` one, which the quick loop leaves
    out. `gpu` tests are run on request."""
    items[:], later = turns.divided(items)
    if later:
        config.hook.pytest_deselected(items=later)
    if "gpu" not in config.option.markexpr:
        alone = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if item not in alone]
        config.hook.pytest_deselected(items=alone)
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")
        if item.get_closest_marker("slow"):
            item.add_marker("medium")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**given))
    return True


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that leaves this process a real-time one, as an encoder may, starves all others, its children included."""
    assert scheduled() == SCHEDULED, "this process is scheduled otherwise now: see media_files.new_video"


@pytest.fixture(scope="module")
def commands() -> "Commands":
    """Starts training runs as a user does."""
    from run_cases import Commands  # with Orbax and PyAV, which few tests need

    return Commands()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The settings of a small text task for `configs/text.py`."""
    from run_cases import letters

    return letters(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """Rollout servers of this module are forks of a process that has imported what they need."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in = types.SimpleNamespace(**vars(subprocess) | {"Popen": forked})
        patch.setattr("rollout.local_server.subprocess", stand_in)
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The folders of tiny models for servers: `vl`, `other` (the same with other weights) and `text`."""
    import serve_cases

    return serve_cases.checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def running_pair() -> Iterator["Servers"]:
    from faulty_proxy import Servers

    with Servers(2).running() as servers:
        yield servers


@pytest.fixture
def pair(running_pair: "Servers") -> "Servers":
    """Two rollout servers of a tiny text model, behind proxies that have no faults yet."""
    running_pair.reset()
    return running_pair


@pytest.fixture(scope="module")
def here() -> "JaxEngine":
    """The engine of these servers in this process, whose answers are the right ones."""
    from protocol_cases import model
    from rollout_cases import engine

    return engine(model("text"))


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of shared workloads and media that stands beside a developer's checkout."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the shared workloads in {folder}; they are not part of a user's clone")
    return folder


@pytest.fixture(scope="session")
def shared_cases(shared: pathlib.Path) -> pathlib.Path:
    """The folder of inputs of other people, with a README in each folder that says what is right."""
    folder = shared / "cases"
    if not folder.is_dir():
        pytest.skip(f"needs the cases in {folder}; they are not part of a user's clone")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Every compiled program holds memory maps. Linux allows a process 65,530 of them; beyond that, XLA crashes."""
    yield
    jax.clear_caches()


@pytest.fixture
def held_by():
    """`held_by(device)`: the bytes of all live arrays on a device, beyond those of before the test."""

    def now(device) -> int:  # asked for their shards, arrays would make further arrays
        here = [x for x in jax.live_arrays() if device in x.sharding.addressable_devices]
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in here)

    gc.collect()
    before = {device: now(device) for device in jax.devices()}
    return lambda device: now(device) - before[device]


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A real file system of 2 MiB, or of the size that the test is parametrized with."""
    mount, size = tmp_path / "small", getattr(request, "param", "2m")
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip(f"needs the right to mount a small tmpfs: {made.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
