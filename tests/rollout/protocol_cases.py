"""What the protocol suite asks of every engine: models, prompts with real media, and the engines themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import pathlib
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from rollout_cases import build

import models
from fluxjax.config import TINY, ModelConfig
from fluxjax.run.build import tiny_model, tiny_vision
from models.config import DecoderConfig, DeepVisionConfig, PatchLayout, RopeConfig, VisionConfig
from models.decoder import Decoder
from models.inputs import ModelInput
from models.processing import Processor
from models.processing.tiny import build as build_processor
from rollout.engine import Engine
from rollout.engine_weights import served
from rollout.fleet import Fleet
from rollout.fleet_server import FleetOptions
from rollout.jax_engine import JaxEngine
from rollout.local_server import LocalServer, ServerCommand
from rollout.requests import EngineLimits
from rollout.sglang import ServerClient
from rollout.weights.published import SharedFolders
from rollout.weights.routes import Buckets, CudaIpc, OrbaxFolders, SharedMemory, SyncRoute
from rollout.weights.version_folders import VersionFolders
from sharding.kernels.delta_heads import DeltaHeads

ROOT = pathlib.Path(__file__).parents[2]
SLOTS, LONGEST = 16, 256
# SGLang on a CPU without AMX, as configs/vlm_sglang.py starts it.
SGLANG_FLAGS = ("--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "16384")
# For states, as Qwen3.5 has: the form of the prefix cache that a CPU has, and few of the states, which are large
HYBRID_FLAGS = (
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule", "--max-mamba-cache-size", "48"),
)
SGLANG_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
versions = itertools.count(1)
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3": {"rope": RopeConfig(30.0)},
    "qwen3_vl": {"rope": RopeConfig(30.0, mrope_section=(6, 3, 3), interleaved=True)},
    # Three layers, the second one with attention. The epsilon keeps the norm behind the states well-conditioned.
    "qwen3_5": {
        "rope": RopeConfig(30.0, mrope_section=(2, 2, 2), interleaved=True),
        "rotated": 0.5,
        "rms_norm_eps": 1e-3,
        "output_gate": True,
        "zero_centred_norms": True,
        "delta": DeltaHeads(2, 4, 16, 8),
        "attention_interval": 2,
    },
}


@functools.cache
def processor(kind: str) -> Processor:
    """The processor of a kind of model: `text` (Qwen2), `qwen3`, `vl` (Qwen2.5-VL), `qwen3_vl`, `qwen3_5`."""
    text = ["abcdefghijklmnopqrstuvwxyz 0123456789.?"]
    if (vision := _vision(kind)) is None:
        return build_processor(text)
    layout = PatchLayout.of(vision)
    most = 64 if layout.timed else 16  # features; all frames of a video with times share the bound
    return build_processor(text, layout=layout, min_pixels=layout.factor**2, max_pixels=most * layout.factor**2)


def _settings(kind: str) -> ModelConfig:
    if kind != "vl":
        architecture = {"text": "qwen2", "qwen3_5": "qwen3_vl"}.get(kind, kind)
        return ModelConfig(
            tiny={**TINY, "architecture": architecture, "tie_word_embeddings": True, "intermediate_size": 128}
        )
    # SGLang knows patches of 14 only.
    own = {"patch_size": 14, "window_size": 56, "mrope_section": (2, 3, 3), "intermediate_size": 128}
    return ModelConfig(tiny={**TINY, **own})


def _vision(kind: str) -> VisionConfig | None:
    if kind in ("qwen3_vl", "qwen3_5"):
        return DeepVisionConfig(
            hidden_size=32, intermediate_size=64, depth=3, num_heads=2, out_hidden_size=64, position_grid=8,
            deepstack_layers=(0, 1) if kind == "qwen3_vl" else (),
        )  # fmt: skip
    return tiny_vision(_settings(kind)) if kind == "vl" else None


def model(kind: str, seed: int = 0) -> Decoder:
    """A model whose next-token distributions are far from uniform."""
    settings = _settings(kind)
    config = tiny_model(settings, processor(kind), _vision(kind))
    if kind in TEXTS:
        architecture = "qwen3_5" if kind == "qwen3_5" else config.architecture
        text = dataclasses.replace(config.text, head_dim=24, **TEXTS[kind])
        config = dataclasses.replace(config, architecture=architecture, text=text)
    return build(config, seed)


def picture(height: int, width: int, seed: int, blank: bool = False) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.full_like(pixels, 128) if blank else pixels).save(file, "PNG")
    return file.getvalue()


def clip(frames: int, height: int, width: int, seed: int, rate: int = 8) -> bytes:
    """An h264 file in which coarse noise moves to the side."""
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (height // 14, width // 14, 3), dtype=np.uint8)
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = np.kron(np.roll(noise, number, axis=1), np.ones((14, 14, 1), np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


@functools.cache
def prompts(kind: str) -> dict[str, ModelInput]:
    """Prompts by name: text, images, video, and all of it in one."""
    prepare = processor(kind).prepare
    found = {"text": prepare("what is this?"), "long text": prepare("to be or not to be " * 4)}
    if not processor(kind).vision:
        return found
    shots = [picture(56, 84, 0), picture(84, 28, 1), picture(56, 56, 2)]
    images = [("image", shot) for shot in shots]
    film, other = ("video", clip(16, 56, 84, 3)), ("video", clip(9, 84, 56, 4))
    return found | {
        "images": prepare("<image> and <image>? no <image>", images),
        "video": prepare("see <video> now", [film]),
        "mixed": prepare("<video> <image> <video> and <image>", [film, images[0], other, images[1]]),
    }


@contextlib.asynccontextmanager
async def client_at(address: str, token: str = "") -> AsyncIterator[ServerClient]:
    client = ServerClient(address, token=token)
    try:
        yield client
    finally:
        await client.close()


@dataclasses.dataclass
class Subject:
    """An engine that the suite is run against. Its server, if it has one, is at `address`."""

    name: str
    kind: str
    engine: Engine
    process: LocalServer | None = None
    fleet: Fleet | None = None
    served: tuple[int, int] | None = None  # the seed of the weights that it has, and their version

    @property
    def address(self) -> str:
        assert self.fleet is not None
        (server,) = self.fleet.servers()
        return server.address

    def under_way(self) -> int:
        """Tokens that came of responses that have not ended; of the engine in this process, its running samples."""
        if self.fleet is None:
            return self.engine.stats().running
        servers = list(self.fleet.members)
        replies = [reply for s in servers for attempt in list(s.attempts) for reply in attempt.replies.values()]
        return sum(len(reply.ids) for reply in replies)

    async def serve(self, seed: int = 0) -> tuple[Decoder, int]:
        """The engine serves the model of this seed. Returns it, and its version."""
        wanted, version = model(self.kind, seed), self.engine.stats().version
        if self.served != (seed, version):
            version = next(versions)
            await self.engine.update_weights(version, models.split(wanted)[1])
            self.served = seed, version
        return wanted, version


def sglang_python() -> str:
    """The interpreter of an environment that has SGLang; skips where there is none."""
    python = os.environ.get("FLUXJAX_SGLANG_PYTHON", "")
    if not python:
        pytest.skip("FLUXJAX_SGLANG_PYTHON names no environment with SGLang: bash scripts/test_sglang.sh makes one")
    return python


def limits(kind: str) -> EngineLimits:
    return EngineLimits.of(model(kind).config, SLOTS, LONGEST)


@contextlib.contextmanager
def checkpoint(kind: str, folder: pathlib.Path) -> Iterator[pathlib.Path]:
    models.save(model(kind), folder)
    processor(kind).save(folder)
    yield folder


def command(name: str, folder: pathlib.Path, ranks: int = 1, *, hybrid: bool = False) -> ServerCommand:
    """How a server of this kind is started on a CPU; `hybrid`: of a model with states."""
    if name == "serve":
        sizes = ("--slots", str(SLOTS), "--max-sequence-tokens", str(LONGEST), "--dtype", "float32")
        return ServerCommand("serve", str(folder), sys.executable, sizes, {"PYTHONPATH": str(ROOT)})
    flags = (*SGLANG_FLAGS, "--dtype", "float32", "--max-running-requests", str(SLOTS), "--tp-size", str(ranks))
    flags = (*flags, *HYBRID_FLAGS) if hybrid else flags
    environment = {**SGLANG_ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    return ServerCommand(
        "sglang", str(folder), sglang_python(), flags, environment if ranks > 1 else SGLANG_ENVIRONMENT
    )


@contextlib.contextmanager
def subject(name: str, kind: str, folder: pathlib.Path, ranks: int = 1) -> Iterator[Subject]:
    whole = model(kind)
    if name == "jax":
        engine = JaxEngine(whole, slots=SLOTS, max_sequence_tokens=LONGEST)
        yield Subject(name, kind, engine)
        return
    with contextlib.ExitStack() as stack:
        process: LocalServer | None = None
        if name == "serve":
            from faulty_proxy import Servers  # which has its models from here

            sizes = {"slots": SLOTS, "max_sequence_tokens": LONGEST, "steps_per_sync": 4}  # as of the engine above
            (server,) = stack.enter_context(Servers(1, kind, **sizes).running()).upstream
        else:
            saved = stack.enter_context(checkpoint(kind, folder / "model"))
            started = command(name, saved, ranks, hybrid=whole.config.text.delta is not None)
            server = process = LocalServer(started, folder / "server.log")
        options = FleetOptions(start_seconds=300.0, interval=4)
        memory = SharedFolders(whole.config, "float32")
        fleet = Fleet(whole.config, limits(kind), SharedMemory(memory), options)
        (seat,) = fleet.add_seats([server])
        stack.enter_context(contextlib.closing(fleet))
        yield Subject(name, kind, seat, process, fleet)


def route(way: str, name: str, config: DecoderConfig, folder: pathlib.Path) -> SyncRoute:
    """A route of the weights on this host but shared memory; buckets are small, so that there are many."""
    memory = SharedFolders(config, "float32")
    if way == "bucket":
        return Buckets(memory, 1 << 18, pickled=name == "sglang")
    if way == "ipc":
        return CudaIpc(memory, served(config), 1 << 18)
    folders = VersionFolders(folder / "shared")
    return OrbaxFolders(memory, folders, folder / "local", {}, here=name == "sglang")


def fleet_by(route: SyncRoute, served: Subject, *, start_seconds: float = 300.0) -> Fleet:
    """A fleet that joins the server of a subject, and brings it weights by a route."""
    config, address, served.served = model(served.kind).config, served.address, None
    fleet = Fleet(config, limits(served.kind), route, FleetOptions(start_seconds=start_seconds))
    fleet.add_seats([address])
    return fleet


def sampling(kind: str, **how: Any) -> dict[str, Any]:
    """Settings as a run has them: ends at the end token, never draws a media token."""
    return {"stop_ids": processor(kind).eos_ids, "forbidden_ids": processor(kind).media_token_ids, **how}
