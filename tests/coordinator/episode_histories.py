"""Runs of many episodes, whose engines, environments and checkpoints are recorded: `EpisodeHistory`."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

from episode_records import DELIMITERS, END, FAILS, PROCESSOR, SAMPLED, Prompts, Records, lay_out
from runtime_cases import Checkpointer, Run, Trainer
from scripted_engine import ScriptedEngine

from fluxjax.base.types import PreparedPrompt, Prompt, Response, Reward
from fluxjax.coordinator import messages
from fluxjax.runtime.episodes import AnsweredTurn, Episodes
from models.processing.conversation import ObservationProcessor
from rollout.engine import EngineError, FinishReason, GenerateRequest, SamplingParams, TokenChunk


class Speaker(ScriptedEngine):
    """An engine that samples at random and records it."""

    def __init__(self, records: Records) -> None:
        super().__init__()
        self.records, self.ended = records, set[str]()
        records.engines.append(self)

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        assert not self.asleep
        return self._speak(request)

    async def abort(self, rid: str) -> None:
        self.ended.add(rid)

    async def _speak(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        records, dice = self.records, self.records.dice
        self.open_streams += 1
        try:
            failing = {i: records.happens(FAILS) for i in range(request.n)}
            if records.happens(FAILS):
                raise EngineError(f"{request.rid} does not fit")
            left = {i: dice.choice((0, 1, 2, 4, 12)) for i in range(request.n)}  # tokens before the end of the turn
            streams = {i: records.begin(request, request.numbers[i]) for i in left}
            serving: ScriptedEngine = self
            while left:
                await self._go.wait()
                await records.pause()
                i = dice.choice(list(left))
                stream, finish = streams[i], None
                if self.ended & {request.rid, f"{request.rid}/{i}"}:
                    del left[i]
                    yield TokenChunk(request.rid, i, (), (), (), FinishReason.ABORT)
                    continue
                if failing[i]:
                    if dice.random() < 0.5:
                        return  # the stream ends too early
                    raise EngineError(f"{request.rid} was lost")
                if records.happens(0.02):  # the response moves to another server of the fleet
                    serving = dice.choice([e for e in records.engines if e.version >= serving.version])
                    records.counts["moved"] += 1
                chunk: list[tuple[int, float, int]] = []
                while finish is None and (not chunk or dice.random() < 0.7):
                    id = dice.choice(SAMPLED) if left[i] else END
                    left[i] -= 1
                    chunk.append((id, records.say(stream, id, serving.version), serving.version))
                    most = request.sampling.max_new_tokens
                    if id == END or len(stream.ids) == most:
                        finish = FinishReason.STOP if id == END else FinishReason.LENGTH
                if finish is not None:
                    del left[i]
                ids, logprobs, versions = zip(*chunk, strict=True)
                yield TokenChunk(request.rid, i, ids, logprobs, versions, finish)
        finally:
            self.open_streams -= 1


class ForgetfulEpisodes(Episodes):
    """Some environments are gone between two turns, as after a resume."""

    async def act(self, prepared: PreparedPrompt, response: Response) -> AnsweredTurn:
        pool: Any = self.pool
        if pool.happens(0.02):
            pool.counts["forgotten"] += 1
            self._seats.pop((response.draw, response.sample), None)
        return await super().act(prepared, response)


class ComparingTrainer(Trainer):
    records: Records

    def train(self, step: int, groups: Any, prepared: Any) -> Any:
        self.records.hear(groups, prepared)
        return super().train(step, groups, prepared)

    def accumulate(self, step: int, groups: Any, prepared: Any, engines: Any = ()) -> None:
        self.records.hear(groups, prepared)
        super().accumulate(step, groups, prepared, engines)


class Killed(Exception):
    """Ends a run. Its newest checkpoint stays."""


class KeepingCheckpointer(Checkpointer):
    def state(self) -> dict[str, Any]:
        self.needed = self.run.records.needed(self.run.coordinator.ledger.entries)
        return {**super().state(), "episodes": self.run.episodes.state_dict()}

    def save(self, step: int, state: dict[str, Any]) -> None:
        super().save(step, state)
        self.run.records.saved, self.run.records.since = self.needed, []


class AtOnce(concurrent.futures.ThreadPoolExecutor):
    """Works in the calling thread, because a small layout takes less time than another thread needs to begin."""

    def submit(self, fn: Any, /, *args: Any, **how: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **how))
        except BaseException as error:
            future.set_exception(error)
        return future


class EpisodeHistory(Run):
    """A run of episodes of a seed, which may be killed up to two times."""

    def __init__(self, seed: int, policy: Callable[[], Any]) -> None:
        self.records, self.policy = Records(seed), policy
        dice = random.Random(f"settings {seed}")
        self.count, self.most = dice.randint(1, 3), dice.choice((150, 1200, 1200))
        self.options: dict[str, Any] = {
            "steps": dice.randint(4, 8),
            "prompts_per_step": dice.randint(2, 4),
            "group_size": dice.randint(2, 4),
            "max_new_tokens": self.most,
            "max_attempts": 90,
            "checkpoint_every": dice.choice((1, 1, 2)),
        }
        self.kills = [dice.randint(30, 500) for _ in range(dice.choice((0, 1, 2)))]  # events before each
        self._begin()

    def _begin(self) -> None:
        super().__init__(*(Speaker(self.records) for _ in range(self.count)), policy=self.policy(), **self.options)
        self.source, self.trainer, self.checkpointer = Prompts(), ComparingTrainer(), KeepingCheckpointer(self)
        self.trainer.records, self.prepared, self.snapshots = self.records, {}, {}

    def go(self) -> Any:
        while True:
            try:
                return super().go()
            except Killed:
                self._resume()

    def _resume(self) -> None:
        saved = self.checkpointer.saved
        self.records.resume()
        self._begin()
        if not saved:
            return
        self.checkpointer.saved, state = saved, saved[max(saved)]
        for entry in state["coordinator"]["ledger"]["entries"]:
            self.prepared[entry["draw"]] = Prompts.prepared(entry["draw"], entry["responses"] + entry["begun"])
        prompts = {draw: prepared.prompt for draw, prepared in self.prepared.items()}
        self.coordinator.load_state_dict(state["coordinator"], prompts)
        self.source.position = state["source"]["position"]
        self.trainer.version, self.snapshots = state["coordinator"]["version"], state["episodes"]

    def build(self) -> Any:
        runtime, records = super().build(), self.records
        runtime._prepared |= self.prepared
        observations = ObservationProcessor(PROCESSOR, DELIMITERS)
        self.episodes = ForgetfulEpisodes(records, observations, lay_out, self.most, seed=7)  # type: ignore[arg-type]
        self.episodes.load_state_dict(self.snapshots)
        runtime.environments = self.episodes
        runtime.sampling = SamplingParams(max_new_tokens=self.most, stop_ids=(END,))
        runtime.score = self._score
        post, handle = runtime._post, self.coordinator.handle
        reports: collections.deque[messages.Event] = collections.deque(maxlen=8)
        left = self.kills.pop() if self.kills else 0  # events before a kill; 0 or less: none comes

        def doubled(event: messages.Event) -> None:
            post(event)
            if isinstance(event, messages.ResponseFinished | messages.TurnObserved):
                reports.append(event)
                if records.happens(0.02):
                    records.counts["repeated"] += 1
                    post(records.dice.choice(reports))

        def handled(event: messages.Event) -> list[messages.Instruction]:
            nonlocal left
            if (left := left - 1) == 0:
                raise Killed
            said = handle(event)
            records.see(said)
            return said

        runtime._post, self.coordinator.handle = doubled, handled
        return runtime

    async def _go(self) -> Any:
        asyncio.get_running_loop().set_default_executor(AtOnce(1))
        return await super()._go()

    @staticmethod
    async def _score(prompt: Prompt, response: Response) -> Reward:
        await asyncio.sleep(0)
        return Reward(sum(response.rewards), sum(response.rewards) > 1)
