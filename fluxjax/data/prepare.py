"""Prepares prompts that were drawn: Grain decodes their media and tokenises their text, ahead of their use."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import grain
import jax
import numpy as np
from absl import flags

from models.inputs import ModelInput, VisionInput
from models.processing import MediaError, PromptError
from sharding.planner.vision_units import surely_hold

from ..base.errors import DataError
from ..base.types import PreparedPrompt, Prompt
from ..config import Config
from .loader import Drawn, Mixture, PromptLoader, SkippedPrompt, at

log = logging.getLogger("fluxjax.data")
_LOGGED = 5  # skips of one source and reason that are logged one by one; the rest is counted
Result: TypeAlias = PreparedPrompt | SkippedPrompt
Sorted: TypeAlias = tuple[list[PreparedPrompt], list[tuple[Prompt, str]]]  # usable, and skipped with the reason
_HOPELESS = 1000  # skips in a row that end the run: the data, or where it is looked for, must be wrong


@runtime_checkable
class TextAndMedia(Protocol):
    """The part of `models.processing.Processor` that is used here."""

    def prepare(self, text: str, media: Sequence[tuple[str, str | bytes]]) -> ModelInput: ...

    def prepare_chat(self, text: str, media: Sequence[tuple[str, str | bytes]]) -> ModelInput: ...


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

    def hold(self, vision: VisionInput) -> bool:
        """Returns True where the devices surely can compute `vision`, however it is dealt out."""
        frame = int(np.bincount(vision.frame_segments_P).max())
        return surely_hold(vision.num_patches, frame, self.devices, self.patches)


def prepare_prompt(processor: TextAndMedia, prompt: Drawn, limits: PromptLimits, chat_template: bool = False) -> Result:
    """Decodes and tokenises a prompt for engine and trainer, or says why it cannot be used. A skipped one stays so."""
    if isinstance(prompt, SkippedPrompt):
        return prompt
    media = [(item.kind.value, item.path if item.data is None else item.data) for item in prompt.media]
    try:
        inputs = (processor.prepare_chat if chat_template else processor.prepare)(prompt.text, media)
    except MediaError as error:
        return SkippedPrompt(prompt, error.reason.partition(":")[0], str(error))
    except PromptError as error:
        return SkippedPrompt(prompt, error.reason, str(error))
    except MemoryError:
        raise
    except Exception as error:  # a decoder's surprise about one file must not end the run
        return SkippedPrompt(prompt, f"failed with {type(error).__name__}", str(error))
    if len(inputs) > limits.tokens:
        detail = f"{len(inputs)} tokens, at most {limits.tokens} leave room to answer"
        return SkippedPrompt(prompt, "prompt too long", detail)
    if inputs.vision is not None and not limits.hold(inputs.vision):
        room = f"{limits.devices} devices of {limits.patches} (packing.patches_per_device)"
        return SkippedPrompt(prompt, "too many patches", f"{inputs.vision.num_patches}, more than fit {room}")
    return PreparedPrompt(dataclasses.replace(prompt, tokens=len(inputs)), inputs)


def _begin_worker(index: int, count: int) -> None:
    """Runs first in a worker process, which ends with the run; Ctrl-C and SIGTERM are left to the run."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):  # Slurm sends it to every process of a job
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True, name="end-with-parent").start()


class Preparer:
    """The prompt source of the runtime: draws in order, prepares in threads or processes, a step's worth ahead.

    `state_dict` describes what has been handed out, not what was read ahead. Prompts that cannot be used come
    back with a reason, in place: whoever needs more draws again. One draw at a time.
    """

    def __init__(self, processor: TextAndMedia, loader: PromptLoader, config: Config, *, ahead: int = 0) -> None:
        """Keeps `ahead` prompts prepared beyond those that were drawn, `rollout.prompts_per_step` by default."""
        self.processor = processor
        self.loader = loader
        self.skipped: collections.Counter[str] = collections.Counter()  # by reason, of handed-out draws
        self._prepare = functools.partial(
            prepare_prompt, processor, limits=PromptLimits.of(config), chat_template=config.data.chat_template
        )
        self._workers = config.data.workers
        self._ahead = ahead or config.rollout.prompts_per_step
        self._next_index = 0  # the draw after the last one that was handed out
        self._iterator: grain.DatasetIterator[Result] | None = None  # begins with the first draw
        self._lock = threading.Lock()  # of the iterator: an abandoned draw may still be reading
        self._logged: collections.Counter[tuple[str, str]] = collections.Counter()  # by source and reason
        self._skips_in_a_row = 0
        self._patience = min(_HOPELESS, 2 * sum(map(len, loader.sources.values())))

    async def draw(self, count: int) -> Sorted:
        """Returns the next `count` draws: those prepared, and those skipped, with reasons.

        Raises `DataError` when so many prompts in a row were skipped that the data must be wrong as a whole, when a
        file cannot be read, and when a worker process has ended.
        """
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
                    f"of {item.prompt.source}: {item.reason}; by reason: {dict(self.skipped)}"
                )
        self._next_index += len(items)
        return prepared, skipped

    def prepare_all(self, prompts: Iterable[Drawn]) -> Sorted:
        """Prepares prompts that are not drawn, such as the held-out ones; in order, in threads, blocking."""
        with contextlib.closing(self._iterate(grain.MapDataset.source(list(prompts)))) as iterator:
            return self._sort(list(iterator))

    def again(self, draws: Iterable[int]) -> list[PreparedPrompt]:
        """Prepares prompts again that were drawn before a checkpoint. A prompt that cannot be used any more is logged
        and left out. Raises `DataError` if its source is not here any more."""
        return self.prepare_all(at(self.loader.order, draw) for draw in draws)[0]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the last completed draw, as JSON values: `next_index` is that of Grain's iterator."""
        order = {"seed": self.loader.seed, "mixtures": self.loader.mixtures}
        return {"next_index": self._next_index, **order, "skipped": dict(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the draw at which `state` was taken; what was read ahead is dropped. Raises `DataError` where
        the data is not what it was."""
        self.close()
        if "loader" in state:
            state = _from_earlier_release(state)
        self._next_index = state["next_index"]
        self.loader.resume(state["seed"], state["mixtures"], self._next_index)
        self.skipped = collections.Counter(state["skipped"])

    def close(self) -> None:
        """Ends threads and processes; a later draw starts them again."""
        with self._lock:
            if self._iterator is not None:
                self._iterator.close()
                self._iterator = None

    def _take(self, count: int) -> list[Result]:
        """Reads the next `count` items. Blocks."""
        with self._lock:
            if self._iterator is None:
                self._iterator = self._iterate(self.loader.order[self._next_index :], self._workers)
            try:
                return [next(self._iterator) for _ in range(count)]
            except RuntimeError as error:
                if "terminated unexpectedly" not in str(error):  # Grain's words; other errors are a source's own
                    raise
                raise DataError(f"data.workers={self._workers}: {error} Fewer, or 0, need less memory.") from error

    def _iterate(self, dataset: grain.MapDataset[Drawn], workers: int = 0) -> grain.DatasetIterator[Result]:
        prepared = dataset.map(self._prepare)
        if not workers:
            threads = min(8, max(2, os.cpu_count() or 1))
            return iter(prepared.to_iter_dataset(grain.ReadOptions(threads, max(threads, self._ahead))))
        buffer = max(1, self._ahead // workers // 2)  # of a process; Grain keeps as many again on this side
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain reads flags of its own, which only absl's `app.run` would parse
        processes = grain.MultiprocessingOptions(workers, buffer)
        return iter(prepared.to_iter_dataset(grain.ReadOptions(0, 0)).mp_prefetch(processes, _begin_worker))

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


def _from_earlier_release(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reads the state as it was before the order of draws was Grain's."""
    loader = state["loader"]
    if loader["draw"] != loader["position"]:
        raise DataError(
            "the checkpoint is of an earlier release, and the weights of data.sources were changed during its run: "
            "finish the run with that release"
        )
    mixture = Mixture(start=0, weights=loader["weights"], sizes=loader["sizes"])
    return {"next_index": loader["draw"], "seed": loader["seed"], "mixtures": [mixture], "skipped": state["skipped"]}
