"""A trainer process without a model: it draws, plans, lays out and waits. Run by `benchmarks/shadow_loader.py`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import os
import pathlib
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grain
import numpy as np
from absl import flags

from fluxjax.base.process import keep_freed_memory
from fluxjax.base.types import Group, Media, PreparedPrompt, Prompt, Response, Reward, Sample
from fluxjax.batch.composer import Composer
from fluxjax.batch.composition import Composition
from fluxjax.batch.share import Share
from fluxjax.config import Config, FlexUlysses, SourceConfig
from fluxjax.data.loader import PromptLoader, open_sources
from fluxjax.data.local_store import GIB, LocalStore
from fluxjax.data.materializer import Materializer
from fluxjax.data.near_pixels import NearPixels
from fluxjax.data.prepare import Preparer
from fluxjax.data.shadows import MediaIndex, ProxyMedia
from fluxjax.data.sources import all_texts
from fluxjax.data.tickets import Ticket, ref_of
from fluxjax.hosts.coming import ComingPrompts
from fluxjax.hosts.orders import Coming, Learn, MediaTold, decode, encode, shares_of, told, told_media
from fluxjax.runtime.flight_store import FlightStore
from models.config import PatchLayout, TextConfig, VisionConfig
from models.inputs import PromptInput
from models.processing import tiny
from models.processing.media import MediaSettings

if TYPE_CHECKING:
    from shadow_loader import World

GROUP = 4  # responses of a prompt
LONGEST = 512  # tokens of a response
PATCH = 14
WARM = 2  # untimed media before each timing


class TrainerProcess:
    """The data of one process of a run: prompts, composer, stores of media and pixels."""

    def __init__(self, world: World, rank: int) -> None:
        if world.pinned:
            os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
        config = self.config = Config()
        config.data.sources = {"clips": SourceConfig(path=world.manifest)}
        config.data.workers, config.data.near_gib = world.workers, world.near_gib
        config.rollout.prompts_per_step, config.rollout.max_new_tokens = world.prompts, LONGEST
        config.rollout.max_sequence_tokens = 1 << 14
        config.sharding.strategy = FlexUlysses()
        config.packing.patches_per_device = 1 << 18
        config.packing.tokens_per_row, config.packing.rows_per_device = world.row, 1
        config.sharding.devices = world.processes
        sources = open_sources(config)
        layout = PatchLayout(patch_size=PATCH, window_size=8 * PATCH)
        self.processor = tiny.build(
            all_texts(sources.values()),
            layout=layout,
            num_frames=world.frames,
            min_pixels=28 * 28,
            max_pixels=224 * 224,
        )
        vision = VisionConfig(
            hidden_size=64,
            intermediate_size=128,
            depth=2,
            num_heads=4,
            out_hidden_size=64,
            full_attention_layers=(1,),
            patch_size=PATCH,
            window_size=8 * PATCH,
        )
        text = TextConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8
        )
        self.composer = Composer(config, world.processes, vision, text)
        self.store: FlightStore | LocalStore | None = None
        proxy, self.near = None, None
        if world.loader == "flight":
            self.store = FlightStore(world.addresses, self.processor.settings)
        elif world.loader == "uri":
            self.store = LocalStore(self.processor.settings, config.data, workers=world.workers)
        if self.store is not None:
            index = MediaIndex()
            if isinstance(self.store, FlightStore) and world.near_gib:
                self.near = NearPixels(self.store, int(world.near_gib * GIB))
            proxy = ProxyMedia(self.store, index, self.near, among=world.processes)
        pixels = self.near or self.store
        self.materializer = Materializer(pixels.fetch if pixels is not None else _nothing)
        loader = PromptLoader(sources, dict.fromkeys(sources, 1.0), 0)
        self.prompts = Preparer(self.processor, loader, config, proxy=proxy)
        self.coming = ComingPrompts(self.prompts, most=4 * world.prompts)
        self.loop = asyncio.new_event_loop()

    def draw(self, count: int) -> tuple[list[PreparedPrompt], list[tuple[Prompt, str]]]:
        """Draws prompts in one event loop, as in a run: `asyncio.run` installs signal handlers at each call, and to do
        so formats the last call's result, pixels included."""
        return self.loop.run_until_complete(self.prompts.draw(count))

    def inputs(self, media: Mapping[int, MediaTold]) -> Mapping[int, PromptInput]:
        """Returns the inputs of a step by draw, like `run.follower`."""
        tickets = {draw: seen for draw, seen in media.items() if seen is not None}
        self.hear(tickets.values())
        elsewhere = self.coming.laid_out({draw: [ticket for ticket, _ in seen] for draw, seen in tickets.items()})
        here = self.prompts.again(draw for draw, seen in media.items() if seen is None)
        return elsewhere | {prepared.prompt.draw: prepared.inputs for prepared in here}

    def hear(self, media: Iterable[Sequence[tuple[str, str]]]) -> None:
        """Tells the store the holder of each medium, as process 0 sends it."""
        if isinstance(self.store, FlightStore):
            for ticket, place in itertools.chain.from_iterable(media):
                self.store.hint(ticket, place)

    def prepare(self, order: Coming) -> None:
        """Prepares the prompts of a `Coming` order, as `run.follower` does while its engines generate."""
        self.hear(told for _, told in order.media)
        self.coming.hear(order)

    def holder(self, ticket: str) -> str:
        return self.store.holder(ticket) if isinstance(self.store, FlightStore) else ""

    def prefill(self, prompts: Sequence[Any], compute: float) -> float:
        """Reads the pixels of each prompt in turn, and waits instead of computing, `compute` seconds in all. Returns
        the seconds that pixels were late."""
        patches = [{"patches": pixels} for pixels in prompts]
        self.materializer.expect(patches)
        late = 0.0
        for batch in patches:
            began = time.perf_counter()
            self.materializer.read(batch)
            late += time.perf_counter() - began
            time.sleep(compute / len(patches))
            self.materializer.forget([batch])
        if not patches:
            time.sleep(compute)
        return late

    def train(self, composition: Composition, compute: float) -> float:
        """Reads the pixels of each microbatch in turn, and waits instead of computing, `compute` seconds in all.
        Returns the seconds that pixels were late."""
        batches = composition.batches
        self.materializer.expect(batches)
        late = 0.0
        for batch in batches:
            began = time.perf_counter()
            self.materializer.read(batch)
            late += time.perf_counter() - began
            time.sleep(compute / len(batches))
        self.materializer.forget(batches)
        return late

    def close(self) -> None:
        self.prompts.close()
        self.loop.close()
        self.materializer.close()
        if self.near is not None:
            self.near.close()
        if self.store is not None:
            self.store.close()


def _nothing(rows: Any) -> list[np.ndarray]:
    raise AssertionError("central has its pixels")


def responses(prompts: Sequence[PreparedPrompt]) -> list[Group]:
    """Groups of responses of lognormal length, which depend on the draw alone."""
    groups = []
    for prepared in prompts:
        draw = random.Random(prepared.prompt.draw)
        samples = []
        for number in range(GROUP):
            count = max(1, min(LONGEST, int(draw.lognormvariate(math.log(100), 0.8))))
            logprobs, versions = (-1.0,) * count, (0,) * count
            tokens = Response("", prepared.prompt.draw, number, (5,) * count, logprobs, versions, "stop", 1.0)
            samples.append(Sample(tokens.packed(), Reward(0.0, False), advantage=1.0 - 2 * (number % 2)))
        groups.append(Group(prepared.prompt, tuple(samples)))
    return groups


def patches_of(prepared: PreparedPrompt) -> Any:
    return prepared.inputs.patches_PX


def controller(world: World, compute: float, steps: int) -> list[dict[str, float]]:
    """Runs process 0, and starts the processes that follow it. Returns the seconds of each step."""
    context = multiprocessing.get_context("spawn")
    pipes, followers = [], []
    for rank in range(1, world.processes):
        ours, theirs = context.Pipe()
        followers.append(context.Process(target=_follow, args=(world, rank, compute, theirs), daemon=True))
        followers[-1].start()
        pipes.append(ours)
    process = TrainerProcess(world, 0)
    for pipe in pipes:
        pipe.recv()  # it has started
    result = [_step(process, world, compute, pipes) for _ in range(steps)]
    for pipe in pipes:
        pipe.send(None)
    for follower in followers:
        follower.join(30)
    process.close()
    return result


def _step(process: TrainerProcess, world: World, compute: float, pipes: Sequence[Any]) -> dict[str, float]:
    began = time.perf_counter()
    prompts, _ = process.draw(world.prompts)
    draw = time.perf_counter() - began
    # Each process generates for its share of the prompts; if process 0 has the pixels, it sends them.
    shares = [prompts[rank :: world.processes] for rank in range(world.processes)]
    began = time.perf_counter()
    media = [[ready.prompt.draw, told_media(ready.inputs, process.holder)] for ready in prompts]
    news = b"".join(encode(Coming([[draw, told] for draw, told in media if told is not None])))
    for pipe, share in zip(pipes, shares[1:], strict=True):
        pipe.send([patches_of(prepared) for prepared in share])
        pipe.send_bytes(news)
    sending = time.perf_counter() - began
    late = process.prefill([patches_of(prepared) for prepared in shares[0]], compute / 2)
    prefill = sending + max([late, *(pipe.recv() for pipe in pipes)])
    began = time.perf_counter()
    planned = shares_of_step(process, world, prompts)
    for pipe, share in zip(pipes, planned[1:], strict=True):
        pipe.send_bytes(b"".join(learn(share, process)))
    composition = process.composer.lay_out(planned[0])
    process.materializer.expect(composition.batches)
    plan = time.perf_counter() - began
    began = time.perf_counter()
    for pipe in pipes:
        pipe.recv()
    inputs = time.perf_counter() - began
    for pipe in pipes:
        pipe.send(True)  # all begin together
    train = inputs + max([process.train(composition, compute / 2), *(pipe.recv() for pipe in pipes)])
    return {
        "data": draw + prefill + train,
        "compute": compute,
        "plan": plan,
        "busy": busy_seconds(),
        "at": time.perf_counter(),
        "draw": draw,
        "prefill": prefill,
        "train": train,
    }


def busy_seconds() -> float:
    """Seconds that the machine's cores have worked, added up, since its start; 0 without /proc/stat."""
    if not pathlib.Path("/proc/stat").exists():
        return 0.0
    user, nice, system, *rest = map(int, pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + sum(rest[2:4])) / os.sysconf("SC_CLK_TCK")


def _follow(world: World, rank: int, compute: float, pipe: Any) -> None:
    process = TrainerProcess(world, rank)
    pipe.send(True)
    with contextlib.suppress(EOFError):
        while (prompts := pipe.recv()) is not None:
            news = decode(pipe.recv_bytes())
            assert isinstance(news, Coming)
            preparing = threading.Thread(target=process.prepare, args=(news,))
            preparing.start()
            late = process.prefill(prompts, compute / 2)
            preparing.join()
            pipe.send(late)
            order = decode(pipe.recv_bytes())
            assert isinstance(order, Learn)
            [share] = shares_of(order, process.inputs)
            composition = process.composer.lay_out(share)
            process.materializer.expect(composition.batches)
            pipe.send(True)
            pipe.recv()
            pipe.send(process.train(composition, compute / 2))
    process.close()


def one_batch(world: World) -> None:
    """Lets process 0 draw two steps and plan them for all processes; no process reads pixels that others hold."""
    keep_freed_memory()  # as in `fluxjax.train`
    process = TrainerProcess(world, 0)
    for _ in range(2):  # while the second is drawn, the third is prepared
        _tell_step(process, world)
    process.close()


def _tell_step(process: TrainerProcess, world: World) -> None:
    """Draws and plans a step, and writes the orders for the other processes. The step's prompts and groups are freed
    before the next step is drawn, as in a run."""
    prompts, _ = process.draw(world.prompts)
    for share in shares_of_step(process, world, prompts)[1:]:
        learn(share, process)


def shares_of_step(process: TrainerProcess, world: World, prompts: Sequence[PreparedPrompt]) -> list[Share]:
    """Plans a step; returns the share of every process."""
    by_draw = {prepared.prompt.draw: prepared for prepared in prompts}
    return process.composer.outline(responses(prompts), by_draw).cut(world.processes)


def learn(share: Share, process: TrainerProcess) -> list[bytes]:
    """Encodes the order to learn from a share."""
    rows, data = told(share, process.holder)
    return encode(Learn(1, [rows], data))


def slices_fetched(world: World) -> dict[str, Any]:
    """Measures the bytes that each of several materializers fetches for a step."""
    process = TrainerProcess(world, 0)
    prompts, _ = process.draw(world.prompts)
    shares = shares_of_step(process, world, prompts)
    whole = sum(patches_of(prepared).nbytes for prepared in prompts)
    fetched, samples = [], []
    for share in shares:
        composition = process.composer.lay_out(share)
        materializer = Materializer(process.store.fetch if process.store is not None else _nothing)
        for batch in composition.batches:
            materializer.read(batch)
        materializer.close()
        fetched.append(materializer.totals.bytes)
        groups = [share.groups[k] for k in share.needed]
        needed = {group.name: group.inputs.patches_PX for group in groups}
        samples.append(sum(patches_PX.nbytes for patches_PX in needed.values() if patches_PX is not None))
    process.close()
    share_bytes = whole / world.processes
    return {
        "largest_over_share": round(max(fetched) / share_bytes, 4),
        "sum_over_whole": round(sum(fetched) / whole, 4),
        "whole_samples_over_share": round(max(samples) / share_bytes, 4),  # fetching complete samples
    }


def frames_per_second(world: World) -> float | None:
    """Sampled frames a second that two processes decode, and that arrive in this process and are normalised; None if
    the peer is not installed."""
    process = TrainerProcess(dataclasses.replace(world, loader="central"), 0)
    settings, (source,) = process.processor.settings, process.prompts.loader.sources.values()
    media = [medium for k in range(len(source)) for medium in source[k].media]
    arrivals = {"shadow": _by_preprocessors, "torch": _by_torch, "grain": _by_grain}[world.loader]
    arrived = arrivals(world, settings, media)
    if arrived is None:
        return None
    for _ in range(WARM):  # the processes start
        next(arrived)
    began = time.perf_counter()
    frames = world.frames * sum(1 for _ in arrived)
    return frames / (time.perf_counter() - began)


def _by_preprocessors(world: World, settings: MediaSettings, media: Sequence[Media]) -> Iterator[np.ndarray]:
    store = FlightStore(world.addresses, settings)

    def arrive(medium: Media) -> np.ndarray:
        (ticket,) = store.look([ref_of(medium)])
        assert isinstance(ticket, Ticket)
        return store.fetch(ticket.shadow(settings.patch_bytes).elsewhere)[0]

    with concurrent.futures.ThreadPoolExecutor(2 * len(world.addresses)) as threads:
        yield from threads.map(arrive, media)
    store.close()


def _by_torch(world: World, settings: MediaSettings, media: Sequence[Media]) -> Iterator[np.ndarray] | None:
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        return None
    files: Any = _Files([medium.path for medium in media], settings)
    loader = DataLoader(files, batch_size=None, num_workers=2, prefetch_factor=4, multiprocessing_context="spawn")
    return (settings.normalised("video", np.asarray(patches)) for patches in loader)


def _by_grain(world: World, settings: MediaSettings, media: Sequence[Media]) -> Iterator[np.ndarray]:
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    files = _Files([medium.path for medium in media], settings)
    dataset = grain.MapDataset.source(range(len(media))).map(files.__getitem__).to_iter_dataset(grain.ReadOptions(0, 0))
    loader = dataset.mp_prefetch(grain.MultiprocessingOptions(2, 4))
    return (settings.normalised("video", patches) for patches in loader)


class _Files:
    """Clips, decoded when an item is read; can be pickled."""

    def __init__(self, files: Sequence[str], settings: MediaSettings) -> None:
        self._files, self._settings = files, settings

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._settings.load("video", self._files[index])[1]
