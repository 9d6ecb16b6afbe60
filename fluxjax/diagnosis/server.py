"""Compares a server with the trainer on probes, in the order of cause.

The server tokenises texts and chats, states checksums of its weights, and samples answers, whose log-probs the trainer
computes again. If the log-probs of a probe differ, the trainer computes them once more for the request of each suspect
(`probes.suspects`): the suspect with the server's log-probs is named.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import functools
import os
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from models.parity import Probe
from models.processing import Processor
from rollout.engine import EngineError, GenerateRequest, SamplingParams
from rollout.listening import TOKEN
from rollout.requests import EngineLimits, checked
from rollout.sglang import ServerClient, ServerError
from rollout.weights.published import SharedFolders
from rollout.wire import request_body

from ..base.types import Response
from . import Finding
from .probes import Suspect, probes, suspects
from .trainer import Answered, Trainer

T = TypeVar("T")
TOKENS, SAMPLES = 12, 2  # of each probe's answers
EXACT, ROUGH = 1e-3, 0.05  # tolerances of mean differences of log-probs: in float32, and in narrower dtypes
COOL = 0.6  # the temperature of the check of sampling
KERNELS = "if `python -m models.parity` finds nothing, compare the server's version, quantisation and kernels"
FIXES = {  # by a word of the part that differs
    "token ids": "give both the same tokenizer.json, or send token ids and never text",
    "template": "give both the same chat_template.jinja, or send token ids and never messages",
    "weights": "the last update did not arrive, or the server has another checkpoint: update or restart it",
    "pixels": "see which media reach the server, and give both the same preprocessor_config.json",
    "positions": "update the server, or send it the trainer's positions (rollout.serve, rollout/sglang_plugin)",
    "decoder": KERNELS,
    "tower": KERNELS,
    "temperature": "log-probs must be of the sampled distribution: SGLANG_RETURN_ORIGINAL_LOGPROB must be unset",
    "sampling": "the server must apply logit_bias, to log-probs too: compare its logits processors",
    "packed rows": "the trainer's packing or kernels are at fault: please report it",
}


async def compared(options: argparse.Namespace) -> AsyncIterator[Finding]:
    """Yields the findings of `options.server` beside the trainer with the checkpoint folder `options.model`. Raises
    EngineError for a server that can't be reached, ValueError or OSError for a folder, text or file."""
    processor = Processor.load(options.model)
    asked, refused = probes(processor, options.text, options.image, options.video)
    client = ServerClient(options.server, token=os.environ.get(TOKEN, ""))
    try:
        info = {**await client.ask("/model_info"), **await client.ask("/server_info")}
        names = ("version", "model_path", "dtype", "weight_version")
        yield Finding("server", ", ".join(f"{name} {info.get(name)}" for name in names))
        server = ServerComparison(client, options.model, processor, asked, str(info.get("dtype")), options.tolerance)
        checks = {"token ids": server.tokens, "template": server.tokens, "weights": server.weights}
        checks |= {name: functools.partial(server.log_probs, probe, False) for name, probe in asked.items()}
        with_media = {f"{name} as files": probe for name, probe in asked.items() if probe.media}
        checks |= {name: functools.partial(server.log_probs, probe, True) for name, probe in with_media.items()}
        for name, check in {**checks, "packed rows": server.packed_rows, "sampling": server.sampling}.items():
            try:
                finding = await check(name)
            except (EngineError, OSError) as error:
                finding = Finding(name, " ".join(str(error).split())[:300], asked=False)
            yield finding
        for finding in refused:
            yield finding
    finally:
        await client.close()


@dataclasses.dataclass
class ServerComparison:
    """The checks of a server; each gets its name. `dtype` is that in which the server says that it computes."""

    client: ServerClient
    folder: str
    processor: Processor
    probes: dict[str, Probe]
    dtype: str
    tolerance: float | None  # the largest mean difference of log-probs, in nats; None: as the dtype allows
    agreed: list[Answered] = dataclasses.field(default_factory=list)  # answers with equal log-probs

    @functools.cached_property
    def trainer(self) -> Trainer:
        return Trainer(self.folder, "float32" if self.dtype == "float32" else "bfloat16")

    async def tokens(self, name: str) -> Finding:
        """Compares the ids of the probes as texts (`token ids`) or, once these agree, as messages (`template`)."""
        if name == "template" and not self.processor.chat_template:
            return Finding(name, f"{self.folder} has no chat template", asked=False)
        decode = functools.partial(self.processor.decode, skip_special_tokens=False)
        for of_probe, probe in self.probes.items():
            text = {"prompt": decode(probe.ids), "add_special_tokens": False}
            body = {"messages": [_message(probe)]} if name == "template" else text
            theirs = await self._ask("/tokenize", body, lambda answer: [int(id) for id in answer["tokens"]])
            if theirs != probe.ids:
                pairs = enumerate(zip(probe.ids, theirs, strict=False))
                first = next((i for i, (ours, other) in pairs if ours != other), min(len(probe.ids), len(theirs)))
                server, trainer = (f"{ids[first:][:8]} {decode(ids[first:])!r}" for ids in (theirs, probe.ids))
                return _differs(name, f"{of_probe}: from token {first} on: {server}; the trainer has {trainer}")
        return Finding(name, f"of {len(self.probes)} prompts")

    async def weights(self, name: str) -> Finding:
        ranks = await self.client.checksums()
        folders = SharedFolders(self.trainer.model.config, self.trainer.dtype)
        try:
            names, count = folders.write(0, self.trainer.params).checksums.differing(ranks)
        finally:
            folders.close()
        if not names:
            return Finding(name, f"checksums of {count} tensors")
        *_, part, first = min((*_part_of(tensor), tensor) for tensor in names)
        detail = f"{len(names)} of {count} checksums, first that of {first}"
        return _differs("weights" if 2 * len(names) > count else f"{part} (weights)", detail)

    async def log_probs(self, probe: Probe, files: bool, name: str) -> Finding:
        """Compares log-probs of a probe, whose media the server gets as patches or, as `files`, decodes itself."""
        sampling = SamplingParams(TOKENS, forbidden_ids=self.processor.media_token_ids)  # as in a run
        request = GenerateRequest("doctor", probe.inputs, sampling, SAMPLES)
        rest = "pixels" if files else "tower" if probe.media else "decoder"
        faulty = suspects(self.processor, probe, request)
        return await self._compared(name, rest, request, faulty, probe if files else None)

    async def packed_rows(self, name: str) -> Finding:
        if not self.agreed:
            return Finding(name, "there are no answers on which both sides agree", asked=False)
        gap = self.trainer.gap(self.agreed)
        detail = f"log-probs of all answers in one row differ by {gap:.1e} on average"
        return Finding(name, detail) if gap <= self._tolerance(name) else _differs(name, detail)

    async def sampling(self, name: str) -> Finding:
        """Compares log-probs at a low temperature, with likely tokens forbidden."""
        if not self.agreed:
            return Finding(name, "there are no answers on which both sides agree", asked=False)
        plain, likely = self.agreed[0]  # of the text
        never = plain.sampling.forbidden_ids
        mask = (*never, *sorted({id for answer in likely for id in answer.token_ids})[:TOKENS])

        def request(temperature: float, forbidden_ids: tuple[int, ...]) -> GenerateRequest:
            return dataclasses.replace(plain, sampling=SamplingParams(TOKENS, temperature, forbidden_ids=forbidden_ids))

        faulty = [
            ("temperature", "without temperature", request(1.0, mask)),
            ("sampling mask", "without sampling mask", request(COOL, never)),
            ("temperature", "without temperature and sampling mask", plain),
        ]
        return await self._compared(name, name, request(COOL, mask), faulty)

    async def _compared(
        self, name: str, rest: str, request: GenerateRequest, faulty: Iterable[Suspect], files: Probe | None = None
    ) -> Finding:
        """Compares log-probs, and finds the suspect that explains a difference; `rest` differs if there is none."""
        answers, tokens = await self._answers(request, files)
        if tokens != len(request.prompt):
            return _differs("pixels", f"{name}: the prompt has {tokens} tokens, the trainer's {len(request.prompt)}")
        if broken := {id for answer in answers for id in answer.token_ids} & {*request.sampling.forbidden_ids}:
            return _differs("sampling mask", f"{name}: forbidden tokens are sampled: {sorted(broken)}")

        def gap_of(request: GenerateRequest) -> float:  # each answer in a row of its own
            return float(np.mean([self.trainer.gap([(request, [answer])]) for answer in answers]))

        gap, tolerance = gap_of(request), self._tolerance(rest)
        detail = f"log-probs differ by {gap:.1e} on average"
        if gap <= tolerance:
            self.agreed += [(request, answers)] if files is None else []
            return Finding(name, detail)
        least, part, fault = min((gap_of(asked), part, fault) for part, fault, asked in [*faulty, (rest, "", request)])
        if least > min(tolerance, gap / 3):
            return _differs(rest, f"{name}: {detail}; no suspect explains it")
        return _differs(part, f"{name}: {fault}: {detail}, and by {least:.1e} if so here")

    def _tolerance(self, part: str) -> float:
        """The largest difference; for pixels of files, at least that of libraries that resize with other rounding."""
        tolerance = self.tolerance or (EXACT if self.dtype == "float32" else ROUGH)
        return max(tolerance, ROUGH) if part == "pixels" else tolerance

    async def _answers(self, request: GenerateRequest, files: Probe | None) -> tuple[list[Response], int]:
        """Samples answers. Returns them, and the server's number of tokens of the prompt. The server gets the files of
        the probe `files`, if given, in the place of patches, and expands placeholders itself."""
        config, rids = self.trainer.model.config, [f"doctor-{uuid.uuid4().hex}" for _ in range(SAMPLES)]
        limits = EngineLimits.of(config, SAMPLES, len(request.prompt) + TOKENS)
        body = request_body(checked(request, limits), dict(enumerate(rids)), config, interval=TOKENS)
        if files is not None:
            body["input_ids"] = [files.ids] * SAMPLES
            for kind in dict(files.media):
                media = [base64.b64encode(data).decode() for of_kind, data in files.media if of_kind == kind]
                body[f"{kind}_data"] = [media] * SAMPLES

        def answer(sample: int, reply: Any) -> Response:
            ids, entries = tuple(reply["output_ids"]), reply["meta_info"]["output_token_logprobs"]
            logprobs = tuple(float(entry[0]) for entry in entries)
            return Response(rids[sample], 0, sample, ids, logprobs, (0,) * len(ids), "length")

        def read(replies: Any) -> tuple[list[Response], int]:
            return [answer(*numbered) for numbered in enumerate(replies)], int(replies[0]["meta_info"]["prompt_tokens"])

        return await self._ask("/generate", body | {"stream": False}, read)

    async def _ask(self, route: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Asks a route and reads its answer. Raises ServerError for an answer that can't be read."""
        answer = await self.client.ask(route, body)
        try:
            return read(answer)
        except (KeyError, IndexError, TypeError, ValueError):
            raise ServerError(f"{self.client.address}{route}: answers {str(answer)[:200]}") from None


def _differs(part: str, detail: str) -> Finding:
    return Finding(part, detail, next(fix for word, fix in FIXES.items() if word in part))


def _message(probe: Probe) -> dict[str, Any]:
    """The probe as a user's message of OpenAI's API."""
    content: list[dict[str, Any]] = []
    for kind, data in probe.media:
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        content.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
    return {"role": "user", "content": [*content, {"type": "text", "text": probe.text}] if content else probe.text}


def _part_of(tensor: str) -> tuple[int, int, str]:
    """The place of a tensor in the order of computation, and the part of the model that has it."""
    if "visual" in tensor:
        return 1, 0, "tower"
    if layer := re.search(r"layers\.(\d+)\.", tensor):
        return 2, int(layer[1]), f"layer {layer[1]}"
    return (0, 0, "embedding") if "embed_tokens" in tensor else (3, 0, "final norm or head")
