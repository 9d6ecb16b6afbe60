"""Prepares prompts ahead of their use: decodes their media, or has a store look at them, and tokenises their text."""

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
_LOGGED = 5  # skips of one source and reason that are logged one by one; the rest is counted
Item = TypeVar("Item")
Result: TypeAlias = PreparedPrompt | SkippedPrompt
Sorted: TypeAlias = tuple[list[PreparedPrompt], list[tuple[Prompt, str]]]  # usable, and skipped with the reason
Media: TypeAlias = Sequence[tuple[str, str | bytes]]
MAX_SKIPPED = 0.5  # share of the draws that may be skipped
_JUDGED = 100  # draws before the share of skipped ones says something
_HOPELESS = 1000  # skips in a row that end the run: the data, or where it is looked for, must be wrong


@runtime_checkable
class TextAndMedia(Protocol):
    """The part of `models.processing.Processor` that is used here."""

    def tokenise(self, text: str, media: Media) -> Sequence[int]: ...

    def tokenise_chat(self, text: str, media: Media) -> Sequence[int]: ...

    def outline(self, token_ids: Sequence[int], media: Media, *, count: bool = False) -> PromptOutline: ...

    def prepare_ids(self, token_ids: Sequence[int], media: Media) -> ModelInput: ...


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """The most that a prompt may need, so that the engine's cache and a microbatch can hold it. Its media are computed
    by `devices` devices, each frame pair by one of them."""

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

    def refuse(self, prompt: Prompt, tokens: int, patches: int, largest_frame: int) -> SkippedPrompt | None:
        """Returns why the prompt is skipped, if it needs too much: of `patches` that are dealt out in frame pairs of at
        most `largest_frame`, each device must surely hold its share."""
        if not tokens:
            return SkippedPrompt(prompt, "empty prompt", "it has no tokens")
        if tokens > self.tokens:
            detail = f"{tokens} tokens, at most {self.tokens} leave room to answer"
            return SkippedPrompt(prompt, "prompt too long", detail)
        if patches and not surely_hold(patches, largest_frame, self.devices, self.patches):
            room = f"{self.devices} devices of {self.patches} (packing.patches_per_device)"
            return SkippedPrompt(prompt, "too many patches", f"{patches}, more than fit {room}")
        return None


def prepare_prompt(
    processor: TextAndMedia,
    prompt: Drawn,
    limits: PromptLimits,
    chat_template: bool = False,
    proxy: ProxyMedia | None = None,
) -> Result:
    """Tokenises a prompt and decodes its media for engine and trainer, or says why it cannot be used. A skipped one
    stays so, and of one that needs too much nothing is decoded. With a `proxy`, a store decodes what is in files,
    and shadows come back in the place of pixels."""
    if isinstance(prompt, SkippedPrompt):
        return prompt
    try:
        if proxy is not None and proxy.can_name(prompt.media) and isinstance(processor, Processor):
            token_ids = tokenised(processor, prompt, chat_template)
            outline = functools.partial(proxy.outline, processor, token_ids, prompt)
            prepare = functools.partial(proxy.inputs, processor, token_ids, prompt)
        else:
            media = _sources(prompt)
            token_ids = tokenised(processor, prompt, chat_template)
            outline = functools.partial(processor.outline, token_ids, media)
            prepare = functools.partial(processor.prepare_ids, token_ids, media)
        if refused := _refused_undecoded(outline, prompt, limits):
            return refused
        inputs = prepare()
    except MediaError as error:
        return SkippedPrompt(prompt, error.reason.partition(":")[0], str(error))
    except PromptError as error:
        return SkippedPrompt(prompt, error.reason, str(error))
    except (MemoryError, DataError):  # no store, for one: that is not the prompt's fault
        raise
    except Exception as error:  # a decoder's surprise about one file must not end the run
        return SkippedPrompt(prompt, f"failed with {type(error).__name__}", str(error))
    frames = np.diff(inputs.frame_edges)
    refused = limits.refuse(prompt, len(inputs), int(np.sum(frames)), int(np.max(frames, initial=0)))
    return refused or PreparedPrompt(dataclasses.replace(prompt, tokens=len(inputs)), inputs)


def _sources(prompt: Prompt) -> Media:
    if not prompt.media:
        return []
    from .tickets import source_of

    return [(item.kind.value, source_of(item)) for item in prompt.media]


def tokenised(processor: TextAndMedia, prompt: Prompt, chat_template: bool) -> Sequence[int]:
    """The ids of a prompt, with one placeholder for each of its media. Raises PromptError."""
    media = [(item.kind.value, item.path) for item in prompt.media]
    return (processor.tokenise_chat if chat_template else processor.tokenise)(prompt.text, media)


def _refused_undecoded(
    outline: Callable[..., PromptOutline], prompt: Prompt, limits: PromptLimits
) -> SkippedPrompt | None:
    """Returns why a prompt is skipped, where the headers of its media show that it needs too much. Such headers are
    checked: `outline(count=True)` counts frames."""
    with contextlib.suppress(MediaError):  # decoding says better what is wrong
        for count in (False, True):
            sizes = outline(count=count)
            refused = limits.refuse(prompt, len(sizes), sizes.num_patches, sizes.largest_frame)
            if refused is None or sizes.certain:
                return refused
    return None


class ReadAhead(Generic[Item]):
    """The items `first`, `first + 1`, ..., of which `ahead` are made beyond those that were taken, in threads.

    No further item is begun until all of a `take` were handed over: woken threads would compete with the taker for the
    interpreter's lock. Grain's own iterator begins another item with each one taken.

    `make` is called from `threads` threads. What it raises is raised by the `take` that comes to this item, and by all
    later ones. `ready` hears of each item once, in their order, and must not block. One thread takes at a time.
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
        self._begun = first  # the first item that nobody makes yet
        self._taken = first  # the first one that was not taken
        self._most = first + ahead  # the first one that is not to be begun
        self._made: dict[int, Item | Exception] = {}  # those behind one that is not made
        self._queue: collections.deque[Item] = collections.deque()
        self._failed: Exception | None = None  # the item behind the queue
        self._closed = False
        for _ in range(threads):
            threading.Thread(target=self._work, name="prepare", daemon=True).start()

    def there(self, count: int) -> bool:
        """Says whether `take(count)` returns at once."""
        return len(self._queue) >= count

    def take(self, count: int) -> list[Item]:
        """Returns the next items, and waits for them."""
        with self._changed:
            self._make_to(self._taken + count)
            while len(self._queue) < count:
                if self._failed is not None:
                    raise self._failed
                if self._closed:
                    raise RuntimeError("what reads ahead is closed")
                self._changed.wait()
            self._taken += count
            items = [self._queue.popleft() for _ in range(count)]
            self._make_to(self._taken + self._ahead)
        return items

    def close(self) -> list[Item]:
        """Ends the threads, each after the item that it is making, without waiting for that. Returns the items of which
        `ready` has heard and that nobody took."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return list(self._queue)

    def _make_to(self, number: int) -> None:
        """Lets the threads make all items before `number`. The caller holds the lock."""
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
        """Puts the next items that are made into the queue. The caller holds the lock."""
        while not (self._closed or self._failed) and (number := self._taken + len(self._queue)) in self._made:
            item = self._made.pop(number)
            if isinstance(item, Exception):
                self._failed = item
            else:
                self._queue.append(item)
                self._ready(item)
        self._changed.notify_all()


class Preparer:
    """The prompt source of the runtime: draws in order, prepares in threads, some steps' worth ahead.

    `state_dict` describes what has been handed out, not what was read ahead. Prompts that cannot be used come
    back with a reason, in place: whoever needs more draws again. One draw at a time.
    """

    def __init__(
        self,
        processor: TextAndMedia,
        loader: PromptLoader,
        config: Config,
        *,
        ahead: int = 0,
        proxy: ProxyMedia | None = None,
    ) -> None:
        """Keeps `ahead` prompts prepared beyond those that were drawn, by default a step's, or two steps' with
        `data.near_gib`. Media are decoded by the store of `proxy`, which hears which prompts come next; without it,
        whole prompts are decoded here and keep their pixels."""
        self.processor = processor
        self.loader = loader
        self.skipped: collections.Counter[str] = collections.Counter()  # by reason, of handed-out draws
        self._prepare = functools.partial(
            prepare_prompt,
            processor,
            limits=PromptLimits.of(config),
            chat_template=config.data.chat_template,
            proxy=proxy,
        )
        self._chat_template, self._proxy = config.data.chat_template, proxy
        self._threads = min(8, max(2, os.cpu_count() or 1)) if proxy is None else proxy.store.concurrency
        self._step = ahead or config.rollout.prompts_per_step
        self._ahead = ahead or (1 + bool(config.data.near_gib)) * self._step
        self._next_index = 0  # the draw after the last one that was handed out
        self._reading: ReadAhead[Result] | None = None  # begins with the first draw
        self._lock = threading.Lock()  # of `_reading`: an abandoned draw may still be reading
        self._handed: collections.deque[PreparedPrompt] = collections.deque()  # not yet passed by
        self._logged: collections.Counter[tuple[str, str]] = collections.Counter()  # by source and reason
        self._skips_in_a_row = 0
        self._patience = min(_HOPELESS, 2 * sum(map(len, loader.sources.values())))

    async def draw(self, count: int) -> Sorted:
        """Returns the next `count` draws: those prepared, and those skipped, with reasons.

        Raises `DataError` when so many prompts in a row were skipped that the data must be wrong as a whole, when more
        than `MAX_SKIPPED` of all were, and when a file cannot be read.
        """
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
        """Prepares prompts that are not drawn, such as the held-out ones; in order, in threads, blocking."""
        with concurrent.futures.ThreadPoolExecutor(self._threads) as threads:
            return self._sort(list(threads.map(self._prepare, prompts)))

    def again(self, draws: Iterable[int]) -> list[PreparedPrompt]:
        """Prepares prompts again that were drawn before a checkpoint. A prompt that cannot be used any more is logged
        and left out. Raises `DataError` if its source is not here any more."""
        return self.prepare_all(at(self.loader.order, draw) for draw in draws)[0]

    def laid_out(self, tickets: Mapping[int, Sequence[str]]) -> dict[int, ModelInput]:
        """The inputs of prompts, by draw, whose media another process has looked at: no medium is touched here.

        Raises `DataError` for a draw that is none here, or is not of these media."""
        return {draw: self._laid_out(draw, list(map(Ticket.parse, words))) for draw, words in tickets.items()}

    def _laid_out(self, draw: int, tickets: Sequence[Ticket]) -> ModelInput:
        from .shadows import layout

        prompt = at(self.loader.order, draw)
        assert isinstance(self.processor, Processor)
        try:
            if isinstance(prompt, SkippedPrompt):
                raise PromptError(prompt.detail)
            return layout(self.processor, tokenised(self.processor, prompt, self._chat_template), tickets)()
        except (PromptError, ValueError) as error:
            raise DataError(f"draw {draw} is another prompt here than in process 0: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last completed draw, as JSON values: `next_index` is that of Grain's iterator."""
        order = {"seed": self.loader.seed, "mixtures": self.loader.mixtures, "contents": self.loader.contents}
        return {"next_index": self._next_index, **order, "skipped": dict(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the draw at which `state` was taken; what was read ahead is dropped. Raises `DataError` where
        the data is not what it was."""
        self.close()
        self._next_index = state["next_index"]
        self.loader.resume(state["seed"], state["mixtures"], self._next_index)
        self.skipped = collections.Counter(state["skipped"])

    def close(self) -> None:
        """Ends the threads; a later draw starts them again."""
        with self._lock:
            if self._reading is not None:
                self._pass_by(self._reading.close(), keep=0)
                self._reading = None

    def _taken_at_once(self, count: int) -> list[Result] | None:
        """Returns the next items where they are ready, without a thread, which would wait for its turn to run."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            reading = self._reading
            return reading.take(count) if reading is not None and reading.there(count) else None
        finally:
            self._lock.release()

    def _take(self, count: int) -> list[Result]:
        """Reads the next `count` items. Blocks."""
        with self._lock:
            if self._reading is None:
                order = self.loader.order
                self._reading = ReadAhead(
                    lambda draw: self._prepare(at(order, draw)),
                    self._next_index,
                    ahead=self._ahead,
                    threads=self._threads,
                    ready=self._expect,
                )
            return self._reading.take(count)

    def _expect(self, item: Result) -> None:
        if self._proxy is not None and isinstance(item, PreparedPrompt):
            self._proxy.expect(item.prompt.draw, item.inputs)

    def _pass_by(self, items: Iterable[Result], keep: int) -> None:
        """Notes that these prompts are handed out, or never will be. Prompts before the last `keep` of them were used
        by now, or never will be."""
        if self._proxy is None:
            return
        self._handed.extend(item for item in items if isinstance(item, PreparedPrompt))
        while len(self._handed) > keep:
            self._proxy.pass_by(self._handed.popleft().inputs)

    def _sort(self, items: Sequence[Result]) -> Sorted:
        """Splits prepared prompts from skipped ones, of which it logs the first few of each source and reason."""
        skipped = [item for item in items if isinstance(item, SkippedPrompt)]
        for item in skipped:
            id, source, reason = item.prompt.id, item.prompt.source, item.reason
            self._logged[source, reason] += 1
            if (count := self._logged[source, reason]) <= _LOGGED:
                more = "; more of this kind are only counted" if count == _LOGGED else ""
                log.warning("skipped prompt %s of %s: %s (%s)%s", id, source, reason, item.detail, more)
        prepared = [item for item in items if isinstance(item, PreparedPrompt)]
        return prepared, [(item.prompt, item.reason) for item in skipped]
