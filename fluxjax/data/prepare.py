"""From drawn prompts to prepared ones: media decoded and text tokenised in threads, ahead of their use."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from models.inputs import ModelInput, VisionInput
from models.processing.bad_media import MediaError, PromptError
from sharding.planner.vision_units import surely_hold

from ..base.errors import DataError, RecordError
from ..base.types import PreparedPrompt, Prompt
from ..config import Config
from .loader import PromptLoader

log = logging.getLogger("fluxjax.data")
_LOGGED = 5  # skips of one reason that are logged one by one; the rest is counted
_PLACE = ("draw", "source", "row", "epoch")
_HOPELESS = 1000  # skips in a row that end the run: the data, or where it is looked for, must be wrong


@runtime_checkable
class TextAndMedia(Protocol):
    """The part of `models.processing.Processor` that is used here."""

    def prepare(self, text: str, media: Sequence[tuple[str, str | bytes]]) -> ModelInput: ...

    def prepare_chat(self, text: str, media: Sequence[tuple[str, str | bytes]]) -> ModelInput: ...


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """What a prompt may be at most, so that the engine's cache and a microbatch can hold it. Its media are computed by
    `devices` devices, one frame pair by one of them."""

    tokens: int
    patches: int  # of a device
    devices: int = 1

    @classmethod
    def of(cls, config: Config) -> PromptLimits:
        devices = config.sharding.devices or jax.device_count()
        return cls(
            tokens=config.rollout.max_sequence_tokens - config.rollout.max_new_tokens,
            patches=config.packing.patches_per_device,
            devices=devices & -devices if config.sharding.strategy.spreads else 1,
        )

    def hold(self, vision: VisionInput) -> bool:
        """Whether the devices surely can."""
        frame = int(np.bincount(vision.frame_segments_P).max())
        return surely_hold(vision.num_patches, frame, self.devices, self.patches)


def prepare_prompt(
    processor: TextAndMedia, prompt: Prompt, limits: PromptLimits, chat_template: bool = False
) -> PreparedPrompt | str:
    """The prompt ready for engine and trainer, or a short reason why it cannot be used (for counting: the log
    has the file's name)."""
    media = [(item.kind.value, item.path if item.data is None else item.data) for item in prompt.media]
    try:
        inputs = (processor.prepare_chat if chat_template else processor.prepare)(prompt.text, media)
    except MediaError as error:
        return _skip(prompt, error.reason.partition(":")[0], str(error))
    except PromptError as error:
        return _skip(prompt, error.reason, str(error))
    except MemoryError:
        raise
    except Exception as error:  # a decoder's surprise about one file must not end the run
        return _skip(prompt, f"failed with {type(error).__name__}", str(error))
    if len(inputs) > limits.tokens:
        return _skip(prompt, "prompt too long", f"{len(inputs)} tokens, at most {limits.tokens} leave room to answer")
    if inputs.vision is not None and not limits.hold(inputs.vision):
        room = f"{limits.devices} devices of {limits.patches} (packing.patches_per_device)"
        return _skip(prompt, "too many patches", f"{inputs.vision.num_patches}, more than fit {room}")
    return PreparedPrompt(dataclasses.replace(prompt, tokens=len(inputs)), inputs)


def _skip(prompt: Prompt, reason: str, detail: str) -> str:
    _SKIPS.say(prompt, reason, detail)
    return reason


class _SkipLog:
    """Logs the first few skips of each reason."""

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.lock = threading.Lock()

    def say(self, prompt: Prompt, reason: str, detail: str) -> None:
        with self.lock:
            self.counts[prompt.source, reason] += 1
            count = self.counts[prompt.source, reason]
        if count <= _LOGGED:
            more = "; more of this kind are only counted" if count == _LOGGED else ""
            log.warning("skipped prompt %s of %s: %s (%s)%s", prompt.id, prompt.source, reason, detail, more)


_SKIPS = _SkipLog()


@dataclasses.dataclass
class _Item:
    """A drawn prompt on its way, with the loader's state just after it was drawn."""

    prompt: Prompt
    result: concurrent.futures.Future[PreparedPrompt | str]
    state: dict[str, Any]


class Preparer:
    """The prompt source of the runtime: draws in order, prepares in threads, keeps one step's worth ahead.

    `state_dict` describes what has been handed out, not what was read ahead. Prompts that cannot be used come
    back with a reason, in place: whoever needs more draws again. One draw at a time.
    """

    def __init__(self, processor: TextAndMedia, loader: PromptLoader, config: Config, workers: int = 0) -> None:
        self.processor = processor
        self.loader = loader
        self.limits = PromptLimits.of(config)
        self.chat_template = config.data.chat_template
        self.skipped: collections.Counter[str] = collections.Counter()  # by reason, of handed-out draws
        self._workers = concurrent.futures.ThreadPoolExecutor(
            workers or min(8, os.cpu_count() or 1), thread_name_prefix="prepare"
        )
        self._reader = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="read")  # keeps the draw order
        self._reading: concurrent.futures.Future[None] | None = None
        self._queue: collections.deque[_Item] = collections.deque()
        self._state = loader.state_dict()
        self._ahead = 0
        self._skips_in_a_row = 0
        self._patience = min(_HOPELESS, 2 * sum(map(len, loader.sources.values())))

    async def draw(self, count: int) -> tuple[list[PreparedPrompt], list[tuple[Prompt, str]]]:
        """The next `count` draws: those prepared and those skipped, with reasons; fewer when the data is exhausted.

        Raises `DataError` when so many prompts in a row were skipped that the data must be wrong as a whole.
        """
        self._ahead = max(self._ahead, count)
        await self._read(count)
        items = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        self._start_reading(self._ahead)  # the next draw is prepared while this one is generated and trained on
        prepared: list[PreparedPrompt] = []
        skipped: list[tuple[Prompt, str]] = []
        for item in items:
            result = await asyncio.wrap_future(item.result)
            if isinstance(result, str):
                skipped.append((item.prompt, result))
                self.skipped[result] += 1
                self._skips_in_a_row += 1
                if self._skips_in_a_row >= self._patience:
                    raise DataError(
                        f"{self._skips_in_a_row} prompts in a row could not be used; the last, {item.prompt.id} "
                        f"of {item.prompt.source}: {result}; by reason: {dict(self.skipped)}"
                    )
            else:
                prepared.append(result)
                self._skips_in_a_row = 0
        if items:
            self._state = items[-1].state
        return prepared, skipped

    def prepare_all(self, prompts: Iterable[Prompt]) -> tuple[list[PreparedPrompt], list[tuple[Prompt, str]]]:
        """Prepare prompts that are not drawn, such as the held-out ones; in order, in threads, blocking."""
        prompts = list(prompts)
        prepared: list[PreparedPrompt] = []
        skipped: list[tuple[Prompt, str]] = []
        for prompt, result in zip(prompts, self._workers.map(self._prepare, prompts), strict=True):
            if isinstance(result, str):
                skipped.append((prompt, result))
            else:
                prepared.append(result)
        return prepared, skipped

    def again(self, held: Iterable[Mapping[str, Any]]) -> list[PreparedPrompt]:
        """Prompts that were drawn before a checkpoint, from the `draw`, `source`, `row` and `epoch` of each. What can't
        be prepared any more is logged and left out."""
        prompts = []
        for one in held:
            try:
                prompts.append(self.loader.again(**{name: one[name] for name in _PLACE}))
            except RecordError as error:
                log.warning("prompt %s of %s can't be read any more: %s", error.id, one["source"], error.reason)
        return self.prepare_all(prompts)[0]

    def state_dict(self) -> dict[str, Any]:
        """The state after the last completed draw, as JSON values."""
        return {"loader": self._state, "skipped": dict(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the draw at which `state` was taken; what was read ahead is dropped."""
        self._drop()
        self.loader.load_state_dict(state["loader"])
        self._state = self.loader.state_dict()
        self.skipped = collections.Counter(state["skipped"])

    def close(self) -> None:
        self._drop()
        self._reader.shutdown()
        self._workers.shutdown()

    def _prepare(self, prompt: Prompt) -> PreparedPrompt | str:
        return prepare_prompt(self.processor, prompt, self.limits, self.chat_template)

    async def _read(self, count: int) -> None:
        """Make the queue hold `count` items, if the data has as many."""
        if self._reading is not None:
            await asyncio.wrap_future(self._reading)
        if len(self._queue) < count:
            self._start_reading(count)
            if self._reading is not None:
                await asyncio.wrap_future(self._reading)

    def _start_reading(self, count: int) -> None:
        self._reading = self._reader.submit(self._fill, count)

    def _fill(self, count: int) -> None:
        """Runs in the reader thread, which alone touches the loader."""
        while len(self._queue) < count and (taken := self.loader.take()) is not None:
            prompt, reason = taken
            if reason:
                future: concurrent.futures.Future[PreparedPrompt | str] = concurrent.futures.Future()
                future.set_result(_skip(prompt, reason, "unusable record"))
            else:
                future = self._workers.submit(self._prepare, prompt)
            self._queue.append(_Item(prompt, future, self.loader.state_dict()))

    def _drop(self) -> None:
        if self._reading is not None:
            concurrent.futures.wait([self._reading])  # its error, if any, belongs to draws that nobody asks for now
            self._reading = None
        for item in self._queue:
            item.result.cancel()
        self._queue.clear()
