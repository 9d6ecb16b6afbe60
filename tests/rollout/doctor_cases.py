"""A server for the doctor, in a thread: `rollout.serve` behind a fake that has SGLang's further routes.

The fake renders chats, tokenises text, and decodes images and videos with a processor of its own. Tests replace its
parts by faulty ones.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import pathlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from rollout_cases import HANG, VL, build
from serve_cases import answering, media_model
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import models
from models.inputs import ModelInput
from models.processing import Processor
from rollout import wire
from rollout.engine import GenerateRequest, SamplingParams
from rollout.jax_engine import JaxEngine
from rollout.serve_app import RolloutServer

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz ?.0123456789[](),<|_>"
Body = dict[str, Any]


class FakeSGLang:
    """The application. `inputs` and `sampling` change the prompt and the sampling parameters on which the engine
    computes, `reply` changes each answer to the prompt; `dump` gets all prompts; `refused` are routes that
    it does not have. A `plain` one is `rollout.serve` itself."""

    def __init__(self, app: ASGIApp, processor: Processor, config: Any) -> None:
        self._app, self._processor, self._config = app, processor, config
        self.reset()

    def reset(self) -> None:
        self.processor = self._processor
        self.inputs: Callable[[ModelInput], ModelInput] = lambda prompt: prompt
        self.sampling: Callable[[Body], Body] = lambda params: params
        self.reply: Callable[[ModelInput, Body], None] | None = None
        self.dump: Callable[[ModelInput], None] = lambda prompt: None
        self.refused: tuple[str, ...] = ()
        self.plain = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.plain:
            return await self._app(scope, receive, send)
        request = Request(scope, receive)
        path, raw = request.url.path, await request.body()
        if path in self.refused:
            return await JSONResponse({"error": {"message": "no such route"}}, 404)(scope, receive, send)
        body = json.loads(raw) if raw else {}
        if path == "/tokenize":
            return await JSONResponse({"tokens": self._tokens(body)})(scope, receive, send)
        if path == "/generate":
            body.pop("extra_key", "")  # of requests that share no cache
            prompt, body = self._computed(body)
            raw = json.dumps(body).encode()
            self.dump(prompt)
            send = send if self.reply is None else functools.partial(self._replied, send, prompt, [])
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        sent = iter([{"type": "http.request", "body": raw, "more_body": False}])

        async def body_then_rest() -> Any:
            return next(sent, None) or await receive()

        await self._app({**scope, "headers": headers}, body_then_rest, send)

    async def _replied(self, send: Send, prompt: ModelInput, held: list[Any], message: Any) -> None:
        """Sends an answer that comes in one piece, as `reply` changes it."""
        held.append(message)
        if message["type"] == "http.response.body":
            start, body = held
            answers = json.loads(body["body"])
            for answer in answers:
                self.reply(prompt, answer)  # type: ignore[misc]
            data = json.dumps(answers).encode()
            await send({**start, "headers": [(b"content-length", str(len(data)).encode())]})
            await send({**body, "body": data})

    def _tokens(self, body: Body) -> list[int]:
        if (text := body.get("prompt")) is not None:
            return self.processor.encode(text, ends=body["add_special_tokens"])
        (message,) = body["messages"]
        parts = message["content"]
        if isinstance(parts, str):
            return self.processor.tokenise_chat(parts)
        media = [part["type"].removesuffix("_url") for part in parts[:-1]]
        text = "".join(f"<{kind}>" for kind in media) + parts[-1]["text"]
        return self.processor.tokenise_chat(text, [(kind, b"") for kind in media])

    def _computed(self, body: Body) -> tuple[ModelInput, Body]:
        """(the prompt on which this server computes, the body with this prompt)."""
        (ids, *_), n = body["input_ids"], len(body["input_ids"])
        entries = {field: body.pop(field)[0] for field in wire.FIELDS if field in body}
        if not entries:
            prompt = self.processor.prepare_ids(ids)
        elif next(iter(entries.values()))[0].startswith(wire.FORMAT):
            media = {field: wire.our_media(field, found[0]) for field, found in entries.items()}
            prompt = wire.given_prompt(ids, 0, media, self._config)
        else:
            files = [(f.partition("_")[0], base64.b64decode(data)) for f, found in entries.items() for data in found]
            prompt = self.processor.prepare_ids(ids, files)
        request = GenerateRequest("fake", prompt := self.inputs(prompt), SamplingParams(), n)
        computed = wire.request_body(request, dict(enumerate(body["rid"])), self._config, interval=1)
        fields = {name: value for name, value in body.items() if name != "input_ids"}
        fields["sampling_params"] = [self.sampling(dict(params)) for params in body["sampling_params"]]
        return prompt, computed | fields


@dataclasses.dataclass
class Patient:
    """The server, and the trainer's checkpoint folder."""

    folder: pathlib.Path
    model: Any
    processor: Processor
    fake: FakeSGLang
    engine: JaxEngine
    address: str
    loop: asyncio.AbstractEventLoop

    def serve(self, model: Any) -> None:
        """Gives the engine the weights of a model."""
        update: Coroutine[Any, Any, None] = self.engine.update_weights(0, models.split(model)[1])
        asyncio.run_coroutine_threadsafe(update, self.loop).result(HANG)


@contextlib.contextmanager
def patient(folder: pathlib.Path) -> Iterator[Patient]:
    config, plain = media_model([LETTERS], VL)
    processor = dataclasses.replace(plain, chat_template=TEMPLATE).configured(max_pixels=32 * 32)
    rope = dataclasses.replace(config.text.rope, theta=100.0)  # so that all axes of positions matter
    text = dataclasses.replace(config.text, vocab_size=processor.tokenizer.get_vocab_size(), rope=rope)
    model = build(dataclasses.replace(config, text=text))
    models.save(model, folder)
    processor.save(folder)
    ready: concurrent.futures.Future[Patient] = concurrent.futures.Future()
    over = asyncio.Event()

    async def serve() -> None:
        engine = JaxEngine(model, slots=4, max_sequence_tokens=256, steps_per_sync=3)
        server = RolloutServer(engine, model.config, processor, info={"model_path": str(folder), "dtype": "float32"})
        server.app = fake = FakeSGLang(server.app, processor, model.config)
        async with answering(engine, server) as address:
            loop = asyncio.get_running_loop()
            ready.set_result(Patient(folder, model, processor, fake, engine, address, loop))
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    found = ready.result(HANG)
    try:
        yield found
    finally:
        found.loop.call_soon_threadsafe(over.set)
        thread.join(HANG)


def changed(model: Any, *path: str, layer: int = 0, by: float = 1.5) -> Any:
    """A copy of the model in which one stacked weight of a layer, or the row of another weight, is scaled."""
    graphdef, params = models.split(model)
    copy = models.merge(graphdef, jax.tree.map(jnp.array, params))
    weight: Any = functools.reduce(getattr, path, copy)
    weight[...] = weight[...].at[layer].multiply(by)
    return copy
