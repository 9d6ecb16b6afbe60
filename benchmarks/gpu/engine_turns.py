"""Lets the embedded engine answer prompts of equal length, and notes when its calls of the device begin and end."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rollout.engine import GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine
from rollout.turns import RoundPlan

from . import random_qwen


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the device: a start of samples, or a round of decoding (which has a plan)."""

    began: float  # seconds of a clock
    ended: float  # of a round: when its tokens were read
    plan: RoundPlan | None = None

    @property
    def samples(self) -> int:
        return 0 if self.plan is None else len(self.plan[0])


@dataclasses.dataclass(frozen=True)
class _Noted:
    """The tokens of a round, with a note that is made when they are read."""

    tokens: Any
    note: Callable[[], None]

    @property
    def slots_B(self) -> np.ndarray:
        return self.tokens.slots_B

    def read(self) -> Any:
        new = self.tokens.read()
        self.note()
        return new


class Calls:
    """The calls of an engine's device since `clear`. `around` stands around each round of decoding."""

    def __init__(self, engine: JaxEngine, around: Callable[[Callable[[], Any], RoundPlan], Any] | None = None) -> None:
        self.calls: list[Call] = []
        self._state = engine._device
        start, decode = self._state.start, self._state.decode

        def noted_start(plan: Any) -> Any:
            began = time.perf_counter()
            new = start(plan)
            self.calls.append(Call(began, time.perf_counter()))
            return new

        def noted_decode(plan: RoundPlan) -> Any:
            began = time.perf_counter()
            tokens = around(lambda: decode(plan), plan) if around else decode(plan)
            return _Noted(tokens, lambda: self.calls.append(Call(began, time.perf_counter(), plan)))

        self._state.start, self._state.decode = noted_start, noted_decode

    def clear(self) -> None:
        self.calls = []

    def full_rounds(self, samples: int) -> list[tuple[Call, float]]:
        """Returns each round of `samples` samples before another such round, and the seconds until that one begins."""
        pairs = itertools.pairwise(sorted(self.calls, key=lambda call: call.began))
        return [(call, after.began - call.began) for call, after in pairs if call.samples == after.samples == samples]

    def program_seconds(self, plan: RoundPlan, repeats: int = 10) -> float:
        """The seconds of a round's program alone: the program runs `repeats` times, and only its last result is waited
        for. The cache then holds the plan's tokens; the engine must be idle."""
        state, batch = self._state, jax.device_put(plan[1])
        took = []
        for _ in range(2):  # the first time, the plan is on its way to the device
            began = time.perf_counter()
            for _ in range(repeats):
                state.cache, state.last_N, *new = state.programs.decode(state.params, state.cache, state.last_N, batch)
            jax.block_until_ready(new)
            took.append((time.perf_counter() - began) / repeats)
        return took[-1]


def engine(dry: bool, slots: int, tokens: int) -> JaxEngine:
    """An engine with random weights in bfloat16, for so many sequences of so many tokens."""
    model = random_qwen.drawn(random_qwen.sizes(dry), "bfloat16")
    paced = {"steps_per_sync": 4} if dry else {}  # a CPU's round would have all tokens of the short responses
    return JaxEngine(model, slots=slots, max_sequence_tokens=tokens, compute_dtype="bfloat16", **paced)


async def generate(engine: JaxEngine, vocabulary: int, samples: int, prompt: int, new: int) -> tuple[float, float]:
    """Lets the engine answer `samples` prompts, all queued before it begins. Returns the seconds until each response
    has its first token, and the seconds until all responses are complete."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=new)
    first: dict[int, float] = {}

    async def read(number: int, stream: Any) -> int:
        tokens = 0
        async for chunk in stream:
            first.setdefault(number, time.perf_counter())
            tokens += len(chunk.token_ids)
        return tokens

    await engine.pause()
    streams = []
    for number in range(samples):
        inputs = random_qwen.text_input(rng.integers(0, vocabulary, prompt, dtype=np.int32))
        streams.append(engine.generate(GenerateRequest(f"{number}", inputs, sampling, seed=number)))
    began = time.perf_counter()
    await engine.resume()
    counts = await asyncio.gather(*(read(number, stream) for number, stream in enumerate(streams)))
    if set(counts) != {new}:
        raise RuntimeError(f"responses have {sorted(set(counts))} tokens, not {new}")
    return max(first.values()) - began, time.perf_counter() - began
