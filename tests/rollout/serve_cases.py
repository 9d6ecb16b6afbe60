"""A rollout server over a tiny model in the test's own event loop, its clients, and what they send."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
from protocol_cases import clip, picture
from rollout_cases import LONGEST, TEXT, VL, build, collect
from safetensors.numpy import load_file

import models
from models.config import DecoderConfig, PatchLayout
from models.inputs import ModelInput
from models.processing import Processor, tiny
from rollout import wire
from rollout.engine import GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine
from rollout.listening import http_server
from rollout.requests import EngineLimits, checked
from rollout.serve_app import RolloutServer

TEXTS = ["abcdefghijklmnopqrstuvwxyz ?"]


def checkpoint(folder: pathlib.Path, config: Any, processor: Processor, seed: int = 0) -> pathlib.Path:
    text = dataclasses.replace(config.text, vocab_size=processor.tokenizer.get_vocab_size())
    models.save(build(dataclasses.replace(config, text=text), seed), folder)
    processor.save(folder)
    return folder


def media_model(texts: Sequence[str], config: DecoderConfig) -> tuple[DecoderConfig, Processor]:
    """A configuration with the media tokens of a processor of these letters, and the processor."""
    assert config.vision is not None
    layout = PatchLayout.of(config.vision)
    processor = tiny.build(texts, layout=layout, max_pixels=16 * 16, min_pixels=8 * 8)
    tokens = ("vision_start", "vision_end", "image_pad", "video_pad")
    ids = {f"{name.removesuffix('_pad')}_token_id": processor.tokenizer.token_to_id(f"<|{name}|>") for name in tokens}
    return dataclasses.replace(config, **ids), processor


def checkpoints(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Checkpoint folders: a vision-language model, the same with other weights, and a text model."""
    vl, processor = media_model(TEXTS, VL)
    return {
        "vl": checkpoint(root / "vl", vl, processor),
        "other": checkpoint(root / "other", vl, processor, seed=1),
        "text": checkpoint(root / "text", TEXT, tiny.build(TEXTS)),
    }


PICTURE, SECOND, CLIP = picture(16, 16, 0), picture(8, 16, 1), clip(4, 28, 28, 2, rate=2)
PROMPTS = {
    "text": ("what is this?", []),
    "image": ("what <image> is", [("image", PICTURE)]),
    "video": ("see <video> now", [("video", CLIP)]),
    "mixed": ("a <image> b <video> c <image>", [("image", PICTURE), ("video", CLIP), ("image", SECOND)]),
}
SAMPLING = SamplingParams(max_new_tokens=10, temperature=0.9, forbidden_ids=(3, 4, 5, 6, 7))


class SlowEngine(JaxEngine):
    """An engine whose turns take long enough that something may happen in between."""

    delay = 0.03  # seconds

    async def _one_turn(self) -> None:
        await asyncio.sleep(self.delay)
        await super()._one_turn()


@dataclasses.dataclass
class Served:
    """A server, and its clients."""

    engine: JaxEngine
    server: RolloutServer
    client: aiohttp.ClientSession
    processor: Processor
    config: Any

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.client.post(path, json=body) as reply:
            raw = await reply.read()
            return reply.status, json.loads(raw) if reply.content_type == "application/json" else raw.decode()

    async def get(self, path: str) -> Any:
        async with self.client.get(path) as reply:
            assert reply.status == 200
            return await reply.json() if reply.content_type == "application/json" else await reply.text()

    async def ok(self, path: str, body: Any = None) -> Any:
        status, reply = await self.post(path, body)
        assert status == 200, reply
        return reply

    async def events(self, body: Any) -> AsyncIterator[dict[str, Any]]:
        async with self.client.post("/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
                else:
                    assert line in (b"\n", b"data: [DONE]\n"), line

    def prompt(self, name: str) -> ModelInput:
        return self.processor.prepare(*PROMPTS[name])

    def body(self, request: GenerateRequest, samples: Any = None, **changes: Any) -> dict[str, Any]:
        """As our client would write it; rids are those of the request, with the number of the sample."""
        limits = EngineLimits.of(self.config, 16, LONGEST, shadows=True)
        rids = {i: f"{request.rid}-{i}" for i in samples or range(request.n)}
        return wire.request_body(checked(request, limits), rids, self.config, interval=1) | changes

    def request(self, name: str = "text", rid: str = "r", n: int = 1, **how: Any) -> GenerateRequest:
        given = {field: how.pop(field) for field in ("prefix_ids", "seed") if field in how}
        return GenerateRequest(rid, self.prompt(name), dataclasses.replace(SAMPLING, **how), n, **given)

    async def in_process(self, request: GenerateRequest) -> list[Any]:
        return await collect(self.engine.generate(request), request.n)


@contextlib.asynccontextmanager
async def answering(engine: JaxEngine, server: RolloutServer) -> AsyncIterator[str]:
    """The address of a server of this engine; in the end both are closed."""
    listening = socket.create_server(("127.0.0.1", 0))
    http = http_server(server.app)
    task = asyncio.create_task(http.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await server.stop(5)
        http.should_exit = True
        await task
        await engine.close()


@contextlib.asynccontextmanager
async def serving(
    folder: pathlib.Path, kind: Callable[..., JaxEngine] = JaxEngine, longest: int = LONGEST, **options: Any
) -> AsyncIterator[Served]:
    model, processor = models.load(folder), Processor.load(folder)
    engine = kind(model, slots=16, max_sequence_tokens=longest, steps_per_sync=3)
    server = RolloutServer(engine, model.config, processor, **options)
    headers = {"Authorization": f"Bearer {options['token']}"} if "token" in options else {}
    async with answering(engine, server) as address:
        # A connection that is kept may be closed by the server just when the next request goes out on it.
        each = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(address, headers=headers, connector=each) as client:
            yield Served(engine, server, client, processor, model.config)


def same(reply: dict[str, Any], answer: Any) -> None:
    meta = reply["meta_info"]
    assert reply["output_ids"] == list(answer.ids)
    assert [entry[0] for entry in meta["output_token_logprobs"]] == list(answer.logprobs)  # bit for bit
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[id, None] for id in answer.ids]
    assert meta["finish_reason"] == wire.finish_json(answer.finish, answer.ids)
    assert meta["completion_tokens"] == len(answer.ids)


async def refused(served: Served, body: Any, complaint: str, path: str = "/generate") -> None:
    status, reply = await served.post(path, body)
    assert status == 400 and reply["error"]["code"] == 400, reply
    assert reply["error"]["type"] == "invalid_request_error"
    assert re.search(complaint, reply["error"]["message"], re.DOTALL), reply


def checksum(tensor: np.ndarray) -> str:
    return hashlib.sha256(tensor.tobytes()).hexdigest()[:16]


def on_disk(folder: pathlib.Path) -> dict[str, str]:
    """The checksums of a checkpoint with one file, as `/weights_checker` answers them."""
    tensors = load_file(folder / "model.safetensors")
    return {name: checksum(tensor) for name, tensor in tensors.items()}


async def checksums(served: Served) -> dict[str, str]:
    reply = await served.ok("/weights_checker", {"action": "checksum"})
    (rank,) = reply["ranks"]
    whole = "".join(name + rank["checksums"][name] for name in sorted(rank["checksums"]))
    assert rank["per_gpu_checksum"] == hashlib.sha256(whole.encode()).hexdigest() and reply["success"]
    return rank["checksums"]


async def last(stream: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [event async for event in stream][-1]


def single(served: Served, rid: str, tokens: int = 40, prompt: str = "text", **changes: Any) -> dict[str, Any]:
    body = served.body(served.request(prompt, rid, max_new_tokens=tokens))
    return {key: value[0] if isinstance(value, list) else value for key, value in body.items()} | {"rid": rid} | changes


def refused_flags(main: Callable[..., int], flags: Sequence[str], complaint: str, capsys: Any) -> str:
    """A program ends with code 2 and one line that says why. Returns the line."""
    try:
        code = main(flags)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2 and not captured.out
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and complaint in captured.err
    return captured.err


def help_of(program: str) -> str:
    """The help of a program, which comes before it imports what takes long."""
    code = f"import sys, {program} as it; assert not {{'jax', 'starlette'}} & sys.modules.keys(); it.main(['--help'])"
    root = pathlib.Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
