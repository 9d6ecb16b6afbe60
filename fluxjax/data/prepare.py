"""Prepares prompts before they are drawn: tokenises their texts, and has their media decoded."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import numpy as np

from models.inputs import ModelInput
from models.processing import MediaError, Processor, PromptError
from models.processing.processor import PromptOutline
from sharding.planner.vision_units import surely_hold

from ..base.errors import DataError
from ..base.types import PreparedPrompt, Prompt
from ..config import Config
from .loader import Drawn, PromptLoader, SkippedPrompt, at
from .tickets import Ticket

if TYPE_CHECKING:
    from .shadows import ProxyMedia

log = logging.getLogger("fluxjax.data")
_LOGGED = 5  # skips that are logged for each source and reason; further skips are only counted
Item = TypeVar("Item")
Result: TypeAlias = PreparedPrompt | SkippedPrompt
Sorted: TypeAlias = tuple[list[PreparedPrompt], list[tuple[Prompt, str]]]  # usable prompts; skipped prompts and reasons
Media: TypeAlias = Sequence[tuple[str, str | bytes]]
MAX_SKIPPED = 0.5  # share of the draws that may be skipped
_JUDGED = 100  # draws before MAX_SKIPPED applies
_HOPELESS = 1000  # skips in a row that end the run, fewer for small sources: the data or their path must be wrong


@runtime_checkable
class TextAndMedia(Protocol):
    """The methods of `models.processing.Processor` that this file uses."""

    def tokenise(self, text: str, media: Media) -> Sequence[int]: ...

    def tokenise_chat(self, text: str, media: Media) -> Sequence[int]: ...

    def outline(self, token_ids: Sequence[int], media: Media, *, count: bool = False) -> PromptOutline: ...

    def prepare_ids(self, token_ids: Sequence[int], media: Media) -> ModelInput: ...


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """The largest prompt that the engine's cache and a microbatch can hold. The frame pairs of a prompt are dealt to
    `devices` devices, each pair to one device."""

    tokens: int
    patches: int  # patches of a device, at most
    devices: int = 1

    @classmethod
    def of(cls, config: Config) -> PromptLimits:
        devices = config.sharding.devices or jax.device_count()
        return cls(
            tokens=config.rollout.max_sequence_tokens - config.rollout.max_new_tokens,
            patches=config.packing.patches_per_device,
            devices=devices & -devices if config.sharding.strategy.spreads else 1,
        )

    def refuse(self, prompt: Prompt, tokens: int, patches: int, largest_frame: int) -> SkippedPrompt | None:
        """Returns a skipped prompt if the prompt is empty or too large, else None. A frame pair has at most
        `largest_frame` patches. Every way to deal frame pairs to devices must respect the limits."""
        if not tokens:
            return SkippedPrompt(prompt, "empty prompt", "the prompt has no tokens")
        if tokens > self.tokens:
            detail = f"{tokens} tokens, but at most {self.tokens} leave room for a response"
            return SkippedPrompt(prompt, "prompt too long", detail)
        if patches and not surely_hold(patches, largest_frame, self.devices, self.patches):
            room = f"{self.devices} devices with {self.patches} patches each (packing.patches_per_device)"
            return SkippedPrompt(prompt, "too many patches", f"{patches} patches, more than fit on {room}")
        return None


def prepare_prompt(
    processor: TextAndMedia,
    prompt: Drawn,
    limits: PromptLimits,
    chat_template: bool = False,
    proxy: ProxyMedia | None = None,
) -> Result:
    """Tokenises a prompt and decodes its media. Returns a `SkippedPrompt` for a prompt that cannot be used. Media are
    not decoded if their headers show that the prompt is too large. With a `proxy`, a store decodes media that are in
    files, and the inputs hold shadows in the place of pixels. Raises `DataError`."""
    if isinstance(prompt, SkippedPrompt):
        return prompt
    try:
        in_files = all(medium.data is None for medium in prompt.media)  # a ticket names only media in files
        if proxy is not None and in_files and isinstance(processor, Processor):
            token_ids = tokenised(processor, prompt, chat_template)
            outline = functools.partial(proxy.outline, processor, token_ids, prompt)
            prepare = functools.partial(proxy.inputs, processor, token_ids, prompt)
        else:
            media = _sources(prompt)
            token_ids = tokenised(processor, prompt, chat_template)
            outline = functools.partial(processor.outline, token_ids, media)
            prepare = functools.partial(processor.prepare_ids, token_ids, media)
        if refused := _refused_early(outline, prompt, limits):
            return refused
        inputs = prepare()
    except MediaError as error:
        return SkippedPrompt(prompt, error.reason.partition(":")[0], str(error))
    except PromptError as error:
        return SkippedPrompt(prompt, error.reason, str(error))
    except (MemoryError, DataError):  # errors that are not the prompt's fault, such as a lost store
        raise
    except Exception as error:  # a decoder's error about one file must not end the run
        return SkippedPrompt(prompt, f"failed with {type(error).__name__}", str(error))
    frames = np.diff(inputs.frame_edges)
    prompt = dataclasses.replace(prompt, tokens=len(inputs), patches=int(np.sum(frames)))
    refused = limits.refuse(prompt, prompt.tokens, prompt.patches, int(np.max(frames, initial=0)))
    return refused or PreparedPrompt(prompt, inputs)


def _sources(prompt: Prompt) -> Media:
    if not prompt.media:
        return []
    from .tickets import source_of

    return [(item.kind.value, source_of(item)) for item in prompt.media]


def tokenised(processor: TextAndMedia, prompt: Prompt, chat_template: bool) -> Sequence[int]:
    """Returns a prompt's token ids, with one placeholder for each of its media. Raises PromptError."""
    media = [(item.kind.value, item.path) for item in prompt.media]
    return (processor.tokenise_chat if chat_template else processor.tokenise)(prompt.text, media)


def _refused_early(outline: Callable[..., PromptOutline], prompt: Prompt, limits: PromptLimits) -> SkippedPrompt | None:
    """Returns a skipped prompt if its media are too large by their headers, else None. A header may be wrong, so that
    `outline(count=True)` counts the frames before a prompt is skipped."""
    with contextlib.suppress(MediaError):  # `prepare` will raise an error that describes the fault better
        for count in (False, True):
            sizes = outline(count=count)
            refused = limits.refuse(prompt, len(sizes), sizes.num_patches, sizes.largest_frame)
            if refused is None or sizes.certain:
                return refused
    return None


class ReadAhead(Generic[Item]):
    """Items with the numbers `first`, `first + 1` and so on. Threads make items until `ahead` items wait to be taken.

    `take` wakes threads for further items only after collecting its own items. Threads that are woken earlier would
    compete with the caller for the interpreter's lock.

    `threads` threads call `make`. Every `take` that reaches an item whose `make` failed raises the error of `make`.
    `ready` gets each successful item once, in order, and must not block. One thread may call `take` at a time.
    """

    def __init__(
        self,
        make: Callable[[int], Item],
        first: int,
        *,
        ahead: int,
        threads: int,
        ready: Callable[[Item], object] = lambda item: None,
    ) -> None:
        self._make, self._ready, self._ahead = make, ready, ahead
        self._changed = threading.Condition()
        self._begun = first  # the first item that no thread has begun
        self._taken = first  # the first item that `take` has not returned
        self._most = first + ahead  # the first item that threads may not begin yet
        self._made: dict[int, Item | Exception] = {}  # finished items that wait for an earlier item
        self._queue: collections.deque[Item] = collections.deque()
        self._failed: Exception | None = None  # the error of the item after the queue
        self._closed = False
        for _ in range(threads):
            threading.Thread(target=self._work, name="prepare", daemon=True).start()

    def there(self, count: int) -> bool:
        """Says whether `take(count)` returns at once."""
        return len(self._queue) >= count

    def take(self, count: int) -> list[Item]:
        """Waits for the next `count` items and returns them. Raises RuntimeError after `close`."""
        with self._changed:
            self._make_to(self._taken + count)
            while len(self._queue) < count:
                if self._failed is not None:
                    raise self._failed
                if self._closed:
                    raise RuntimeError("ReadAhead is closed: no item can be taken any more")
                self._changed.wait()
            self._taken += count
            items = [self._queue.popleft() for _ in range(count)]
            self._make_to(self._taken + self._ahead)
        return items

    def close(self) -> list[Item]:
        """Ends each thread after its present item, without waiting. Returns what `ready` got and nobody took."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return list(self._queue)

    def _make_to(self, number: int) -> None:
        """Lets threads make the items before `number`. The caller holds the lock."""
        if number > self._most:
            self._most = number
            self._changed.notify_all()

    def _work(self) -> None:
        while (number := self._another()) is not None:
            try:
                item = self._make(number)
            except Exception as error:
                item = error
            with self._changed:
                self._made[number] = item
                self._line_up()

    def _another(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._begun < self._most)
            if self._closed:
                return None
            self._begun += 1
            return self._begun - 1

    def _line_up(self) -> None:
        """Moves finished items into the queue, up to the first unfinished item. The caller holds the lock."""
        while not (self._closed or self._failed) and (number := self._taken + len(self._queue)) in self._made:
            item = self._made.pop(number)
            if isinstance(item, Exception):
                self._failed = item
            else:
                self._queue.append(item)
                self._ready(item)
        self._changed.notify_all()


class Preparer:
    """The runtime's source of prompts. Threads prepare prompts ahead, in the order of draws. `state_dict` counts the
    draws handed out, not the draws read ahead. Prompts that cannot be used are returned with a reason, and count as
    draws. Only one call of `draw` may run at a time."""

    def __init__(
        self,
        processor: TextAndMedia,
        loader: PromptLoader,
        config: Config,
        *,
        ahead: int = 0,
        proxy: ProxyMedia | None = None,
        opened: Callable[[Drawn], Drawn] = lambda drawn: drawn,
    ) -> None:
        """Threads prepare `ahead` prompts beyond the last draw. If `ahead` is 0, threads prepare the prompts of one
        step, or of two steps with `data.near_gib`. The store of `proxy` decodes media. Without `proxy`, this process
        decodes media, and prompts hold their pixels. `opened` adds what an environment shows first."""
        self.processor = processor
        self.loader = loader
        self.skipped: collections.Counter[str] = collections.Counter()  # by reason: number of skipped draws
        self._limits, self._opened = PromptLimits.of(config), opened
        self._chat_template, self._proxy = config.data.chat_template, proxy
        self._threads = min(8, max(2, os.cpu_count() or 1)) if proxy is None else proxy.store.concurrency
        self._step = ahead or config.rollout.prompts_per_step
        self._ahead = ahead or (1 + bool(config.data.near_gib)) * self._step
        self._next_index = 0  # the draw after the last draw that was handed out
        self._reading: ReadAhead[Result] | None = None  # begins with the first draw
        self._lock = threading.Lock()  # guards `_reading`, which a cancelled draw may still use
        self._handed: collections.deque[PreparedPrompt] = collections.deque()  # prompts whose pixels are still expected
        self._logged: collections.Counter[tuple[str, str]] = collections.Counter()  # by source and reason
        self._skips_in_a_row = 0
        self._patience = min(_HOPELESS, 2 * sum(map(len, loader.sources.values())))

    def _prepare(self, drawn: Drawn) -> Result:
        return prepare_prompt(self.processor, self._opened(drawn), self._limits, self._chat_template, self._proxy)

    async def draw(self, count: int) -> Sorted:
        """Returns the next `count` draws: prepared prompts, and skipped prompts with reasons. Raises `DataError` if a
        file cannot be read, if too many draws in a row are skipped, or more than `MAX_SKIPPED` of all."""
        items = self._taken_at_once(count)
        if items is None:
            items = await asyncio.to_thread(self._take, count)
        prepared, skipped = self._sort(items)
        for item in items:
            if not isinstance(item, SkippedPrompt):
                self._skips_in_a_row = 0
                continue
            self.skipped[item.reason] += 1
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= self._patience:
                raise DataError(
                    f"{self._skips_in_a_row} prompts in a row could not be used; the last, {item.prompt.id} "
                    f"of {item.prompt.source}: {item.reason} ({item.detail}); by reason: {dict(self.skipped)}"
                )
        self._next_index += len(items)
        if self._next_index >= _JUDGED and self.skipped.total() > MAX_SKIPPED * self._next_index:
            raise DataError(
                f"{self.skipped.total()} of {self._next_index} prompts could not be used, more than "
                f"{MAX_SKIPPED:.0%} of them; by reason: {dict(self.skipped)}"
            )
        self._pass_by(prepared, self._step)
        return prepared, skipped

    def prepare_all(self, prompts: Iterable[Drawn]) -> Sorted:
        """Prepares prompts, such as held-out prompts, in threads, and keeps their order. Counts no draws. Blocks."""
        with concurrent.futures.ThreadPoolExecutor(self._threads) as threads:
            return self._sort(list(threads.map(self._prepare, prompts)))

    def again(self, draws: Iterable[int]) -> list[PreparedPrompt]:
        """Prepares earlier draws again. A prompt that can no longer be used is logged and left out. Raises `DataError`
        if the configuration no longer has a prompt's source."""
        return self.prepare_all(at(self.loader.order, draw) for draw in draws)[0]

    def laid_out(self, tickets: Mapping[int, Sequence[str]]) -> dict[int, ModelInput]:
        """Returns the model inputs of draws from the `tickets` of their media, which process 0 sent. Reads no media.
        Raises `DataError` if a draw is another prompt in this process than in process 0, or has other media."""
        return {draw: self._laid_out(draw, list(map(Ticket.parse, words))) for draw, words in tickets.items()}

    def _laid_out(self, draw: int, tickets: Sequence[Ticket]) -> ModelInput:
        from .shadows import outlined

        prompt = self._opened(at(self.loader.order, draw))
        assert isinstance(self.processor, Processor)
        try:
            if isinstance(prompt, SkippedPrompt):
                raise PromptError(prompt.detail)
            token_ids = tokenised(self.processor, prompt, self._chat_template)
            return self.processor.lay_out(*outlined(self.processor, token_ids, tickets))
        except (PromptError, ValueError) as error:
            raise DataError(f"draw {draw} is another prompt in this process than in process 0: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last completed draw, as JSON values."""
        order = {"seed": self.loader.seed, "mixtures": self.loader.mixtures, "contents": self.loader.contents}
        return {"next_index": self._next_index, **order, "skipped": dict(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the draw at which `state` was taken. Drops items that were read ahead. Raises `DataError` if
        the seed or the size of a source has changed."""
        self.close()
        self._next_index = state["next_index"]
        self.loader.resume(state["seed"], state["mixtures"], self._next_index)
        self.skipped = collections.Counter(state["skipped"])

    def close(self) -> None:
        """Ends the threads. A later draw starts new threads."""
        with self._lock:
            if self._reading is not None:
                self._pass_by(self._reading.close(), keep=0)
                self._reading = None

    def _taken_at_once(self, count: int) -> list[Result] | None:
        """Returns the next items if all are ready, else None. Spares the detour through a thread."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            reading = self._reading
            return reading.take(count) if reading is not None and reading.there(count) else None
        finally:
            self._lock.release()

    def _take(self, count: int) -> list[Result]:
        with self._lock:
            if self._reading is None:
                order, counts = self.loader.order, {"ahead": self._ahead, "threads": self._threads}
                self._reading = ReadAhead(
                    lambda draw: self._prepare(at(order, draw)), self._next_index, ready=self._expect, **counts
                )
            return self._reading.take(count)

    def _expect(self, item: Result) -> None:
        if self._proxy is not None and isinstance(item, PreparedPrompt):
            self._proxy.expect(item.prompt.draw, item.inputs)

    def _pass_by(self, items: Iterable[Result], keep: int) -> None:
        """Queues prompts that were handed out or dropped. All queued prompts except for the newest `keep` leave the
        queue, and their pixels are no longer expected."""
        if self._proxy is None:
            return
        self._handed.extend(item for item in items if isinstance(item, PreparedPrompt))
        while len(self._handed) > keep:
            self._proxy.pass_by(self._handed.popleft().inputs)

    def _sort(self, items: Sequence[Result]) -> Sorted:
        skipped = [item for item in items if isinstance(item, SkippedPrompt)]
        for item in skipped:
            id, source, reason = item.prompt.id, item.prompt.source, item.reason
            self._logged[source, reason] += 1
            if (count := self._logged[source, reason]) <= _LOGGED:
                more = "; further prompts that are skipped for this reason are only counted" if count == _LOGGED else ""
                log.warning("skipped prompt %s of %s: %s (%s)%s", id, source, reason, item.detail, more)
        prepared = [item for item in items if isinstance(item, PreparedPrompt)]
        return prepared, [(item.prompt, item.reason) for item in skipped]
