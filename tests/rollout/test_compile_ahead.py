"""Programs of rounds that threads compile before an engine's first request."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from rollout_cases import TEXT, assert_equal, build, engine, request, run, serve, text_prompt, until

from fluxjax.config import Config
from fluxjax.runtime.engine_pool import EnginePool
from rollout import turns
from rollout.device import DeviceState
from rollout.engine import SamplingParams
from rollout.lowered import EngineArrays
from rollout.requests import EngineLimits

HOW = {"slots": 64, "steps_per_sync": 4}
STOPS = tuple(range(10))  # more than the least columns of ids; more than half of the samples end before the last round
ASKED = [request(f"r{i}", text_prompt(6, seed=i), n=32, seed=i, max_new_tokens=9, stop_ids=STOPS) for i in (1, 2)]


class Compilations(logging.Handler):
    """The kinds of the threads that compile a round, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Compiling jit(_decode)"):
            self.threads.append(threading.current_thread().name.partition("_")[0])


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    handler, logger = Compilations(), logging.getLogger("jax")
    logger.addHandler(handler)
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        yield handler.threads
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.removeHandler(handler)


@pytest.mark.medium
def test_threads_compile_the_rounds_that_a_run_needs() -> None:
    """The engine compiles no round itself, uses each that was compiled for it, and generates what others do."""
    jax.clear_caches()
    serving = engine(build(TEXT), **HOW)
    with watched() as threads, concurrent.futures.ThreadPoolExecutor(2, "compile") as pool:
        serving.compile_ahead(ASKED[0].sampling, 64, pool)
        ahead = set(serving._device.compiling)
        answers = run(serving, *ASKED)
    assert threads == ["compile"] * len(ahead) and len(ahead) == 2
    used = {program for program in serving.compiled_shapes if program[0] == "decode"}
    assert used == ahead and not serving._device.compiling
    assert_equal(answers, run(engine(build(TEXT), **HOW), *ASKED))


class Later(concurrent.futures.Executor):
    """Does nothing until a test ends the futures."""

    def __init__(self) -> None:
        self.pending: list[concurrent.futures.Future[Any]] = []

    def submit(self, *_: Any) -> concurrent.futures.Future[Any]:
        self.pending.append(concurrent.futures.Future())
        return self.pending[-1]


@pytest.mark.medium
async def test_a_round_waits_for_its_program() -> None:
    asked, threads = request("r", text_prompt(6), max_new_tokens=9), Later()
    (expected,) = await serve(engine(build(TEXT), **HOW), [asked])  # compiles the round
    serving = engine(build(TEXT), **HOW)
    serving.compile_ahead(asked.sampling, 64, threads)
    answered = asyncio.create_task(serve(serving, [asked]))
    await until(lambda: serving.stats().tokens_generated == 1)  # by the start
    await asyncio.sleep(0.2)
    assert serving.stats().tokens_generated == 1
    for compiling in threads.pending:
        compiling.set_result(None)
    assert_equal(await answered, [expected])


@pytest.mark.medium
def test_a_compilation_that_fails_ahead_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    serving, tried = engine(build(TEXT), **HOW), []
    monkeypatch.setattr(EngineArrays, "decode", lambda self, batch: tried.append(batch) or 1 / 0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        serving.compile_ahead(ASKED[0].sampling, 64, pool)
        answers = run(serving, *ASKED)
    assert len(tried) == 2
    assert_equal(answers, run(engine(build(TEXT), **HOW), *ASKED))


def test_nothing_is_compiled_for_a_cache_whose_size_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is a share of the memory that weights leave free, unless it is configured."""
    monkeypatch.setattr(DeviceState, "room", lambda self, share, unknown: int(share * 64 * 64 * 3))
    monkeypatch.setattr(EngineArrays, "decode", lambda self, batch: 1 / 0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for given, count in (0, 0), (64 * 64, 2):
            serving = engine(build(TEXT), kv_tokens=given, **HOW)
            serving.compile_ahead(ASKED[0].sampling, 64, pool)
            assert len(serving._device.compiling) == count


@pytest.mark.parametrize(
    ("slots", "small", "samples", "tokens", "sizes"),
    [
        (256, True, 256, 8, [256, 128]),  # two rounds of four tokens behind the first token
        (256, True, 256, 5, [256]),
        (256, True, 256, 1, []),  # starts give the only token
        (256, True, 40, 100, [64, 32]),
        (256, False, 256, 100, [256, 128, 64, 32, 16, 8, 4, 2]),
        (48, False, 200, 100, [48, 32, 16, 8, 4, 2, 1]),  # more samples than slots
    ],
)
def test_the_sizes_of_rounds(slots: int, small: bool, samples: int, tokens: int, sizes: list[int]) -> None:
    limits = EngineLimits.of(TEXT, slots, 128, small_model=small)
    assert turns.round_sizes(limits, samples, tokens) == sizes


def test_a_pool_that_closes_ends_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool compiles for as many samples as an engine gets; after the one under way, no compilation begins."""
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(EngineArrays, "decode", lambda self, batch: begun.set() or go.wait(60))
    config = Config()
    config.rollout.engines, config.rollout.slots = 2, 256
    config.rollout.prompts_per_step, config.rollout.group_size = 16, 16
    pool = EnginePool(config, build(TEXT), sampling=SamplingParams(max_new_tokens=100))
    pool.start(print)
    compiling = [list(engine._device.compiling.items()) for engine in pool.engines]
    assert [[sizes[0] for (_, sizes), _ in programs] for programs in compiling] == [[128, 64, 32]] * 2
    assert begun.wait(60)
    pool.close()
    go.set()
    futures = [future for programs in compiling for _, future in programs]
    assert [future.cancelled() for future in futures] == [False, True, True, True, True, True]


def test_few_processors_compile_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    pool = EnginePool(Config(), build(TEXT), sampling=SamplingParams())
    pool.start(print)
    assert not any(engine._device.compiling for engine in pool.engines)
    pool.close()
