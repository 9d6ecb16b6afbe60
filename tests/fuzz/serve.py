"""Requests that nobody should send to `rollout.serve`: bodies, buckets of weights, commands, and what is no HTTP.

Each is answered, with less than 500 where it is HTTP; the server serves afterwards what it served before, and nothing
is raised on its event loop.
"""

import asyncio
import base64
import json
import pathlib
import random
import tempfile
from typing import Any

import numpy as np
from junk import ODD, spoiled, spoiled_bytes
from safetensors.numpy import save
from serve_cases import Served, checkpoints, serving

from fuzz.draws import Failures
from rollout import wire

DRAWS = 40
SECONDS = 300.0  # of one request: the first ones wait for what is compiled, perhaps on cores that are busy
AT_ONCE = 8
LOOK_EVERY = 64  # draws
COMMANDS: dict[str, dict[str, Any]] = {
    "/abort_request": {"rid": "f", "abort_all": False},
    "/pause_generation": {"mode": "in_place"},
    "/continue_generation": {},
    "/update_weights_from_disk": {"model_path": "/nowhere", "weight_version": "0"},
    "/weights_checker": {"action": "checksum"},
    "/release_memory_occupation": {"tags": ["kv_cache"]},
    "/resume_memory_occupation": {"tags": ["kv_cache"]},
    "/flush_cache": {},
    "/begin_weight_update": {"selector": "all"},
    "/pull_weights": {"local_checkpoint_dir": "/nowhere", "source_dir": "/nowhere", "target_version": 0},
    "/v1/loads": {},
    "/nothing": {},
}
BUCKET = {"no.such": np.ones(8, np.float32), "b": np.zeros((2, 3), np.float16)}
RAW = b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{"input_ids": [1, 2]}'


def run(count: int, seed: int) -> list[str]:
    failures = Failures(count)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_fuzz(pathlib.Path(folder), range(seed, seed + count), failures))
    return failures.lines


async def _fuzz(folder: pathlib.Path, seeds: range, failures: Failures) -> None:
    weights = {"model_path": str(checkpoints(folder)["vl"])}
    async with serving(pathlib.Path(weights["model_path"])) as served:
        plain = {"input_ids": [8, 9, 10], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        good = await served.ok("/generate", plain)
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: failures.add(seeds[0], context.get("exception") or RuntimeError(context["message"]))
        )
        for first in range(0, len(seeds), LOOK_EVERY):
            some = seeds[first : first + LOOK_EVERY]
            for start in range(0, len(some), AT_ONCE):
                await asyncio.gather(*(_drawn(served, number, failures) for number in some[start : start + AT_ONCE]))
            try:
                for path in ("/resume_memory_occupation", "/continue_generation", "/update_weights_from_disk"):
                    await served.ok(path, weights)  # it may have been told to drop its own
                reply = await asyncio.wait_for(served.ok("/generate", plain), SECONDS)
                assert reply["output_ids"] == good["output_ids"], "other tokens than at the beginning"
                assert not served.server._answers and served.engine.stats().running == 0, "samples are left"
                for name, width in (("bfloat16", 2), ("float32", 4)):
                    assert np.dtype(name).itemsize == width, "a type of numpy has changed"
            except Exception as error:
                failures.add(some[0], error)
            if failures.enough:
                return


async def _drawn(served: Served, seed: int, failures: Failures) -> None:
    draw = random.Random(seed)
    kind = draw.choices((_body, _command, _bucket, _raw), (6, 2, 1, 1))[0]
    try:
        await asyncio.wait_for(kind(served, draw), SECONDS)
    except Exception as error:
        failures.add(seed, error)
    failures.done()


async def _sent(served: Served, path: str, content: Any, draw: random.Random) -> None:
    words = json.dumps(content).encode()
    data = spoiled_bytes(words, draw) if draw.random() < 0.1 else words
    async with served.client.post(path, data=data) as reply:
        said = await reply.read()
        assert reply.status < 500, f"{path}: {reply.status} {said[:300]!r} for {data[:300]!r}"
        assert said or reply.status == 200, f"{path}: {reply.status} without a word"


async def _body(served: Served, draw: random.Random) -> None:
    name = draw.choice(("text", "text", "image", "mixed"))
    request = served.request(name, rid=f"{draw.random()}", n=draw.randint(1, 2), max_new_tokens=3)
    body = served.body(request, stream=draw.random() < 0.5)
    for field in set(body) & set(wire.FIELDS) if draw.random() < 0.5 else ():
        media = json.loads(body[field][0][0][len(wire.FORMAT) :])
        body[field][0][0] = wire.FORMAT + json.dumps(spoiled(media, draw, 1))
    if draw.random() < 0.2:
        body["input_ids"] = [[8, 6, 9]] * len(body["input_ids"])
        body["image_data"] = [[draw.choice(ODD[14:28])]] * len(body["input_ids"])
    if draw.random() < 0.3:
        body[draw.choice(("stop", "text", "min_p", "top_logprobs_num", "lora_path", "seed"))] = draw.choice(ODD)
    await _sent(served, "/generate", spoiled(body, draw) if draw.random() < 0.8 else body, draw)


async def _command(served: Served, draw: random.Random) -> None:
    path = draw.choice(sorted(COMMANDS))
    await _sent(served, path, spoiled(COMMANDS[path], draw, 2) if draw.random() < 0.9 else COMMANDS[path], draw)
    if path in ("/pause_generation", "/release_memory_occupation"):
        await served.ok("/resume_memory_occupation")
        await served.ok("/continue_generation")


async def _bucket(served: Served, draw: random.Random) -> None:
    """A damaged bucket, and the end of its update: what it may change are the weights that it names, with their own."""
    await served.post("/begin_weight_update")
    data = spoiled_bytes(save(BUCKET), draw)
    body = {"serialized_named_tensors": [base64.b64encode(data).decode()], "load_format": "safetensors"}
    await _sent(served, "/update_weights_from_tensor", spoiled(body, draw, 1) if draw.random() < 0.3 else body, draw)
    await _sent(served, "/end_weight_update", {}, draw)


async def _raw(served: Served, draw: random.Random) -> None:
    address = served.client._base_url
    assert address is not None and address.host and address.port
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(draw.choice((b"", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02")) + spoiled_bytes(RAW, draw))
    if draw.random() < 0.5:
        writer.write_eof()
    else:
        writer.write(b"\r\n\r\n" * 8)
    try:
        said = await asyncio.wait_for(reader.read(200), 0.3)
        assert not said.startswith(b"HTTP/1.1 5"), said
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
