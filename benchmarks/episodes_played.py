"""Plays episodes with images on the embedded engine and on `rollout.serve`, and counts prefilled tokens and bytes of
pixels. A part of `episodes.py`.

Requests, observations, tickets and what is trained on are made as in a run: by `fluxjax.runtime`, `fluxjax.data`,
`rollout.wire` and the `Composer`. Models are tiny and random; environments answer at once, in this process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import pathlib
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from PIL import Image

import models
from fluxjax.base.medium import Media, MediaKind
from fluxjax.base.scored import request_seed
from fluxjax.base.types import Group, PreparedPrompt, Prompt, Response, Reward, Sample
from fluxjax.batch.composer import Composer
from fluxjax.config import TINY, Config, ModelConfig
from fluxjax.coordinator.messages import Request, Turn, request_id
from fluxjax.data.local_store import LocalStore
from fluxjax.data.shadows import MediaIndex, ProxyMedia
from fluxjax.environments import EnvironmentLimits, Observed
from fluxjax.run.build import tiny_model, tiny_vision
from fluxjax.runtime.conversations import begun_of, longer, session_of, to_train, turn_request
from fluxjax.runtime.episodes import Episodes, LayOut
from models.config import PatchLayout
from models.decoder import Decoder
from models.inputs import ModelInput
from models.processing import Processor
from models.processing.conversation import ObservationProcessor
from models.processing.tiny import build as build_processor
from models.shadow import Rows
from rollout.engine import Engine, GenerateRequest, SamplingParams, TokenChunk
from rollout.fleet import Fleet
from rollout.jax_engine import JaxEngine
from rollout.listening import http_server
from rollout.requests import EngineLimits
from rollout.serve_app import RolloutServer
from rollout.weights.published import SharedFolders
from rollout.weights.routes import SharedMemory
from rollout.wire import FIELDS, FORMAT

SAID, PICTURE = 16, 80  # tokens of a turn; pixels along a side of a picture
TEXT = "you look around and see <image> what do you do now?"
LONGEST = 64  # tokens of a turn with the observation behind it, at most
QWEN, HYBRID = "qwen2_5_vl", "qwen3_5"
SIZES: Mapping[str, Mapping[str, object]] = {
    QWEN: {"num_layers": 2},
    HYBRID: {"num_layers": 4, "num_heads": 2, "mrope_section": (1, 1, 2)},  # as configs/vlm.py:qwen3_5
}


@dataclasses.dataclass(eq=False)
class Scene:
    """An environment, and the pool that it is from: every answer shows another picture of `folder`."""

    folder: pathlib.Path
    turns: int = 0
    draw: int = 0
    limits: ClassVar[EnvironmentLimits] = EnvironmentLimits()
    observation: ClassVar[Observed] = Observed("", (), 0.0, False, {})  # of its reset

    async def start(self, name: str, prompt: Prompt, seed: int, arguments: Mapping[str, Any]) -> Scene:
        return Scene(self.folder, 0, prompt.draw)

    async def act(self, text: str) -> Observed:
        self.turns += 1
        name = f"{self.draw}-{self.turns}-{abs(hash(text))}"
        return Observed(TEXT, (picture(self.folder, name),), 0.0, False, {})

    async def end(self) -> None: ...

    async def kill(self) -> None: ...


def picture(folder: pathlib.Path, name: str) -> Media:
    file = folder / f"{name}.png"
    pixels = np.random.default_rng(list(name.encode())).integers(0, 256, (PICTURE, PICTURE, 3), np.uint8)
    Image.fromarray(pixels).save(file)
    return Media(MediaKind.IMAGE, str(file))


@dataclasses.dataclass
class Played:
    """A group of episodes: its requests, turn by turn, and what is trained on."""

    requests: list[GenerateRequest]
    prepared: PreparedPrompt
    responses: list[Response]
    seconds: float


class Player:
    """Plays groups of episodes with a tiny model of an architecture."""

    def __init__(self, architecture: str, folder: pathlib.Path, turns: int, group: int) -> None:
        settings = ModelConfig(tiny={**TINY, "architecture": architecture, **SIZES[architecture]})
        vision = tiny_vision(settings)
        assert vision is not None
        self.processor: Processor = build_processor([TEXT, "abcdefghijklmnopqrstuvwxyz"], layout=PatchLayout.of(vision))
        self.model: Decoder = models.create(tiny_model(settings, self.processor, vision), seed=0)
        self.folder, self.turns, self.group = folder, turns, group
        self.longest = LONGEST + turns * (SAID + LONGEST + (PICTURE // vision.patch_size // 2) ** 2)
        never = tuple(self.processor.media_token_ids)
        # No end is sampled: all turns have equal lengths.
        self.sampling = SamplingParams(self.longest, forbidden_ids=(*self.processor.eos_ids, *never))

    def engine(self, **how: Any) -> JaxEngine:
        states = 2 * self.group if self.model.config.text.delta is not None else 0
        return JaxEngine(
            self.model, slots=self.group, max_sequence_tokens=self.longest, kept_states=states, steps_per_sync=4, **how
        )

    def lay_out(self, ids: Sequence[int], prompt: Prompt) -> ModelInput:
        return self.processor.prepare_ids(ids, [(medium.kind.value, medium.path) for medium in prompt.media])

    async def play(self, engine: Engine, draw: int, *, session: bool, lay_out: LayOut | None = None) -> Played:
        """Plays the episodes of a prompt. Without a session, each turn's history is computed anew."""
        lay_out, started = lay_out or self.lay_out, time.perf_counter()
        medium = picture(self.folder, f"{draw}-prompt")
        prompt = Prompt(f"{draw}", "benchmark", TEXT, "", (medium,), draw=draw, environment="scene")
        ids = self.processor.tokenise(TEXT, [(medium.kind.value, medium.path)])
        prepared = PreparedPrompt(prompt, lay_out(ids, prompt))
        pool: Any = Scene(self.folder)
        episodes = Episodes(pool, ObservationProcessor(self.processor), lay_out, self.longest, seed=0)
        seed = request_seed(0, draw)
        responses = [begun_of(Request(prompt, self.group), sample) for sample in range(self.group)]
        first = GenerateRequest(
            request_id(draw, 0), prepared.inputs.laid_out(), self.sampling, self.group, seed, session=session_of(prompt)
        )
        played: list[GenerateRequest] = []
        for turn in range(self.turns):
            asked = [first]
            if turn:
                turns = [Turn(prompt, response, 0) for response in responses]
                asked = [turn_request(begun, prepared, self.sampling, seed, episodes.merge_unit) for begun in turns]
            asked = [self._as_played(request, session) for request in asked]
            played += asked
            streams = await asyncio.gather(*(_collected(engine, request) for request in asked))
            chunks = [chunks for stream in streams for chunks in stream]
            responses = [longer(response, said) for response, said in zip(responses, chunks, strict=True)]
            if turn < self.turns - 1:
                answers = [await episodes.act(prepared, response) for response in responses]
                responses = [answer.response for answer in answers]
                prepared.responses.update({a.response.sample: a.inputs for a in answers})  # type: ignore[attr-defined]
        await engine.end_session(session_of(prompt))
        return Played(played, prepared, responses, time.perf_counter() - started)

    def _as_played(self, request: GenerateRequest, session: bool) -> GenerateRequest:
        sampling = dataclasses.replace(request.sampling, max_new_tokens=SAID)
        return dataclasses.replace(request, sampling=sampling, session=request.session if session else "")


async def _collected(engine: Engine, request: GenerateRequest) -> list[list[TokenChunk]]:
    """Returns the chunks of each sample."""
    chunks: list[list[TokenChunk]] = [[] for _ in range(request.n)]
    async for chunk in engine.generate(request):
        chunks[chunk.sample].append(chunk)
    return chunks


# --- tokens that are prefilled --------------------------------------------------------------------


def prefill(turns: int, group: int, repeats: int) -> dict[str, Any]:
    """Counts the tokens that an embedded engine prefills with and without sessions, prompt by prompt in turn."""
    result: dict[str, Any] = {}
    for name, architecture in (("", QWEN), ("_qwen3_5", HYBRID)):
        with tempfile.TemporaryDirectory(prefix="episodes-") as folder:
            player = Player(architecture, pathlib.Path(folder), turns, group)
            sides = asyncio.run(_prefilled(player, repeats))
        tokens = {side: sum(count for count, _ in found) for side, found in sides.items()}
        seconds = {side: statistics.median(seconds for _, seconds in found) for side, found in sides.items()}
        result[f"prefill_saving{name}"] = round(1 - tokens["kept"] / tokens["without"], 3)
        result[f"prefill{name}"] = {
            "tokens": tokens,
            "seconds": {side: round(value, 3) for side, value in seconds.items()},
            "speedup": round(seconds["without"] / seconds["kept"], 2),
        }
        print(f"{architecture}: {tokens} tokens prefilled", file=sys.stderr, flush=True)
    return result


async def _prefilled(player: Player, repeats: int) -> dict[str, list[tuple[int, float]]]:
    """Returns prefilled tokens and seconds of each group, by side. The first group of each side compiles."""
    engine = player.engine()
    found: dict[str, list[tuple[int, float]]] = {"kept": [], "without": []}
    for repeat in range(repeats + 1):
        texts = []
        for side, groups in found.items():
            before = engine.stats().tokens_prefilled
            played = await player.play(engine, repeat, session=side == "kept")
            texts.append([response.token_ids for response in played.responses])
            if repeat:
                groups.append((engine.stats().tokens_prefilled - before, played.seconds))
        if texts[0] != texts[1]:
            print("the sides sampled other tokens, by rounding", file=sys.stderr, flush=True)
    await engine.close()
    return found


# --- bytes of pixels ------------------------------------------------------------------------------


def pixels(turns: int, group: int) -> dict[str, Any]:
    """Counts bytes of pixels on three ways, against all images of a conversation with each turn: in the requests of
    servers, in what an engine fetches by tickets, and in what is trained on."""
    with tempfile.TemporaryDirectory(prefix="episodes-") as folder:
        player = Player(QWEN, pathlib.Path(folder), turns, group)
        sent, played = asyncio.run(_sent(player))
        counts = {"servers": sent, "tickets": asyncio.run(_fetched(player)), "trainer": _trained(player, played)}
    savings = {way: round(1 - count["once"] / count["each_turn"], 3) for way, count in counts.items()}
    print(f"bytes of pixels: {counts}", file=sys.stderr, flush=True)
    return {
        "pixel_saving": min(savings.values()),
        **{f"pixel_saving_{way}": saving for way, saving in savings.items()},
        "pixel_bytes": counts,
    }


class CountedApp:
    """An ASGI application that keeps the bodies of `/generate`."""

    def __init__(self, app: Any) -> None:
        self._app, self.bodies = app, list[bytes]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != "/generate":
            return await self._app(scope, receive, send)
        parts: list[bytes] = []

        async def heard() -> Any:
            message = await receive()
            parts.append(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                self.bodies.append(b"".join(parts))
            return message

        await self._app(scope, heard, send)

    def pixel_bytes(self) -> int:
        """Returns the bytes of pixels in all bodies since the last call, as text of base64."""
        bodies, self.bodies = self.bodies, []
        entries = [e for body in map(json.loads, bodies) for field in FIELDS for e in _flat(body.get(field) or [])]
        media = [json.loads(entry.removeprefix(FORMAT)) for entry in entries]
        return sum(len(medium["patches"]["data"]) for medium in media if medium.get("patches"))


def _flat(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    else:
        for part in value:
            yield from _flat(part)


async def _sent(player: Player) -> tuple[dict[str, int], Played]:
    """Plays a group on a server, with a session and without one, in which each request has all images."""
    model = player.model
    with _serving(player) as (address, app):
        route = SharedMemory(SharedFolders(model.config, "float32"))
        fleet = Fleet(model.config, EngineLimits.of(model.config, player.group, player.longest), route)
        (seat,) = fleet.add_seats([address])
        with contextlib.closing(fleet):
            await seat.update_weights(1, models.split(model)[1])
            counts = {}
            for side, session in (("once", True), ("each_turn", False)):
                played = await player.play(seat, 0, session=session)
                counts[side] = app.pixel_bytes()
    return counts, played


@contextlib.contextmanager
def _serving(player: Player) -> Iterator[tuple[str, CountedApp]]:
    """A server in a thread of its own."""
    ready: concurrent.futures.Future[tuple[Any, CountedApp]] = concurrent.futures.Future()
    listening = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        engine = player.engine()
        app = CountedApp(RolloutServer(engine, player.model.config, player.processor).app)
        http = http_server(app)
        ready.set_result((http, app))
        await http.serve([listening])
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    http, app = ready.result()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", app
    finally:
        http.should_exit = True
        thread.join()


async def _fetched(player: Player) -> dict[str, int]:
    """Plays a group whose prompts have tickets in the place of pixels, which the engine fetches."""
    store = LocalStore(player.processor.settings, Config().data, workers=0)
    proxy, rows = ProxyMedia(store, MediaIndex()), [0]

    def fetch(pieces: Sequence[Rows]) -> list[np.ndarray]:
        rows[0] += sum(map(len, pieces))
        return store.fetch(pieces)

    def lay_out(ids: Sequence[int], prompt: Prompt) -> ModelInput:
        return proxy.inputs(player.processor, ids, prompt).laid_out()

    engine, counts = player.engine(fetch=fetch), {}
    for side, session in (("once", True), ("each_turn", False)):
        rows[0] = 0
        await player.play(engine, 0, session=session, lay_out=lay_out)
        counts[side] = rows[0] * player.processor.settings.patch_bytes
    await engine.close()
    store.close()
    return counts


def _trained(player: Player, played: Played) -> dict[str, int]:
    """Composes a group as it is trained on, and as samples of one turn each, with all images before that turn."""
    group = Group(played.prepared.prompt, tuple(Sample(r, Reward(0.0, False), 1.0) for r in played.responses))
    unit = player.processor.layout.spatial_merge_size**2
    entire = {group.prompt.draw: to_train(played.prepared, group, unit)}
    return {"once": _composed(player, [group], entire), "each_turn": _composed(player, *_turn_by_turn(player, played))}


def _turn_by_turn(player: Player, played: Played) -> tuple[list[Group], dict[int, PreparedPrompt]]:
    groups, prepared = [], {}
    for draw, request in enumerate(played.requests):
        prompt = Prompt(f"{draw}", "benchmark", "", "", draw=draw)
        said = [
            Response(f"{draw}/{i}", draw, i, (9,) * SAID, (-1.0,) * SAID, (0,) * SAID, "stop") for i in range(request.n)
        ]
        groups.append(Group(prompt, tuple(Sample(response, Reward(0.0, False), 1.0) for response in said)))
        prepared[draw] = PreparedPrompt(prompt, request.prompt)
    return groups, prepared


def _composed(player: Player, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt]) -> int:
    """Returns the bytes of pixels, without padding, in the microbatches of a step."""
    config, vision = Config(), player.model.config.vision
    assert vision is not None
    config.packing.tokens_per_row = 16 * math.ceil(player.longest * player.group / 16)
    config.packing.patches_per_device = 64 * math.ceil(player.longest * player.group / 16)
    batches = Composer(config, 1, vision, player.model.config.text).compose(groups, prepared).batches
    inputs = [batch.inputs.vision for batch in batches if batch.inputs.vision is not None]
    return sum(int((i.frame_segments_P > 0).sum()) * i.patches_PX.shape[1] * i.patches_PX.itemsize for i in inputs)
