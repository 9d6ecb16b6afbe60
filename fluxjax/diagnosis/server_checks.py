"""Compares a server with the trainer on probe prompts, in the order of cause.

The server tokenises chats and texts, tells checksums of its weights, and samples answers, whose log-probs the trainer
computes again. If those of a prompt differ, the trainer computes them once more with the inputs of each suspect
(`suspects`): the suspect whose log-probs are the server's is named.
"""

from __future__ import annotations

import base64
import functools
import itertools
import os
import pathlib
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from models.inputs import ModelInput
from models.parity import Probe
from models.processing import Processor
from rollout.engine import EngineError, GenerateRequest, SamplingParams
from rollout.requests import EngineLimits, checked
from rollout.sglang import ServerClient, ServerError
from rollout.weights.published import SharedFolders
from rollout.wire import request_body

from .findings import Finding, State, differs, ok, unknown
from .suspects import blind, suspects
from .trainer_side import Reply, TrainerSide

TOKENS, SAMPLES = 12, 2  # of each probe's answers
EXACT, ROUGH = 1e-3, 0.05  # tolerances of mean differences of log-probs: float32 on both sides, and narrower dtypes
COOL = 0.6  # the temperature of the check of sampling
STALE = "the last update did not arrive, or the server was started with another checkpoint: update or restart it"
KERNELS = "if the weights are equal: compare the server's version, quantisation and kernels with the trainer's"


class ServerComparison:
    """The comparison of a server with a checkpoint folder on probes, among them `text`. `dtype` is that of the packed
    rows; `tolerance` is the largest mean difference of log-probs (None: as the dtypes of both sides allow)."""

    def __init__(
        self,
        client: ServerClient,
        folder: str | os.PathLike[str],
        processor: Processor,
        probes: Mapping[str, Probe],
        tolerance: float | None,
        dtype: str,
    ) -> None:
        self._client, self._folder, self._processor, self._probes = client, folder, processor, probes
        self._dtype, self._tolerance = dtype, tolerance or 0.0
        self._never = processor.media_token_ids  # never sampled, as in a run
        self._said: dict[str, Any] = {}  # the server's settings
        self._answered: list[tuple[ModelInput, list[Reply]]] = []  # prompts, and answers on which both sides agree

    async def findings(self) -> AsyncIterator[Finding]:
        """Yields findings, in the order of cause. Raises EngineError if the server can't be reached, and what
        `models.load` raises."""
        model, server = await self._client.ask("/model_info"), await self._client.ask("/server_info")
        self._said = {**server, **model, "dtype": str(server.get("dtype"))}
        exact = self._said["dtype"] == self._dtype == "float32"
        self._tolerance = self._tolerance or (EXACT if exact else ROUGH)
        names = ("version", "model_path", "dtype", "weight_version")
        yield ok("server", ", ".join(f"{name} {self._said.get(name)}" for name in names))
        checks = {"template": self._template, "token ids": self._token_ids, "weights": self._weights}
        for name, probe in self._probes.items():
            checks[name] = functools.partial(self._log_probs, name, probe, False)
        for name, probe in self._probes.items():
            if probe.media:
                checks[f"{name} as files"] = functools.partial(self._log_probs, f"{name} as files", probe, True)
        checks |= {"sampling": self._sampling, "packed rows": self._packed_rows}
        for name, check in checks.items():
            try:
                finding = await check()
            except EngineError as error:
                finding = unknown(name, error)
            yield finding

    @functools.cached_property
    def _trainer(self) -> TrainerSide:
        return TrainerSide(self._folder)

    # --- texts ----------------------------------------------------------------------------------

    async def _template(self) -> Finding:
        if not self._processor.chat_template:
            return unknown("template", f"{self._folder} has no chat template")
        fix = "give both the same chat_template.jinja, or send token ids and never messages"
        try:
            for name, probe in self._probes.items():
                tokens = await self._told("/tokenize", "tokens", messages=[_message(probe)])
                text = await self._told("/detokenize", "text", tokens=tokens, skip_special_tokens=False)
                if found := _first(self._written(probe), text):
                    return differs("template", f"{name}: {found}", fix)
        except EngineError as error:
            return self._by_folder("template", lambda processor: processor.chat_template, error, fix)
        return ok("template", f"of {len(self._probes)} prompts")

    async def _token_ids(self) -> Finding:
        fix = "give both the same tokenizer.json and tokenizer_config.json, or send token ids and never text"
        written = {name: self._written(probe) for name, probe in self._probes.items()}
        try:
            for name, text in written.items():
                ids = await self._told("/tokenize", "tokens", prompt=text, add_special_tokens=False)
                if found := _first(self._probes[name].ids, ids):
                    return differs("token ids", f"{name}: {found}", fix)
        except EngineError as error:
            texts = "".join(written.values())
            return self._by_folder("token ids", lambda processor: processor.encode(texts), error, fix)
        return ok("token ids", f"of {len(self._probes)} prompts")

    def _written(self, probe: Probe) -> str:
        return self._processor.decode(probe.ids, skip_special_tokens=False)

    async def _told(self, route: str, field: str, **body: Any) -> Any:
        answer = await self._client.ask(route, body)
        if not isinstance(answer, dict) or field not in answer:
            raise ServerError(f"{self._client.address}{route}: answers {str(answer)[:200]}")
        return answer[field]

    def _by_folder(self, name: str, read: Callable[[Processor], Any], why: EngineError, fix: str) -> Finding:
        """Compares with the server's folder, if it is on this host, in the place of a route that the server lacks."""
        folder = str(self._said.get("tokenizer_path") or self._said.get("model_path"))
        if not pathlib.Path(folder).is_dir():
            return unknown(name, f"{why}; its folder {folder} is not on this host")
        try:
            found = _first(read(self._processor), read(Processor.load(folder)))
        except (ValueError, OSError) as error:
            return unknown(name, error)
        where = f"by the files of {folder}, since the server has no such route"
        return differs(name, f"{found} ({where})", fix) if found else ok(name, where)

    # --- numbers --------------------------------------------------------------------------------

    async def _weights(self) -> Finding:
        """Compares checksums in the server's dtype, which SGLang may not tell."""
        ranks = await self._client.checksums()
        told, names, count = self._said["dtype"], [""], 1
        for dtype in [told] if told in ("float32", "bfloat16") else ["bfloat16", "float32"]:
            folders = SharedFolders(self._trainer.config, dtype)
            try:
                names, count = folders.write(0, self._trainer.params).checksums.differing(ranks)
            except OSError as error:  # no room for a copy
                return unknown("weights", error)
            finally:
                folders.close()
            if len(names) < count:
                break
        if not names:
            return ok("weights", f"checksums of {count} tensors")
        first, (_, part) = min(((name, _part_of(name)) for name in names), key=lambda entry: entry[1])
        part = "weights" if 2 * len(names) > count else f"{part} (weights)"
        version = self._said.get("weight_version")
        return differs(
            part, f"{len(names)} of {count} checksums, first {first}; the server has version {version}", STALE
        )

    async def _log_probs(self, name: str, probe: Probe, files: bool) -> Finding:
        """Compares log-probs of a probe, whose media the server gets as patches, or as `files` to decode."""
        answers, tokens = await self._answers(probe.inputs, media=probe if files else None)
        if tokens != len(probe.inputs):
            detail = f"{name}: the server's prompt has {tokens} tokens, the trainer's {len(probe.inputs)}"
            return differs("pixels", detail, "give both the same bounds of pixels (preprocessor_config.json)")
        rest = "pixels" if files else "tower" if probe.media else "decoder"
        tolerance = max(self._tolerance, ROUGH) if files else self._tolerance  # libraries resize with other rounding
        found = self._judged(name, rest, probe, answers, tolerance)
        if found.name == "decoder":
            return await self._where_in_decoder(probe, found)
        if found.state is State.OK and not files:
            self._answered.append((probe.inputs, answers))
        if found.state is State.OK and probe.media and self._gap(blind(probe.inputs), answers) <= self._tolerance:
            return unknown(name, "the model's answers do not depend on the media")
        return found

    def _judged(self, name: str, rest: str, probe: Probe, answers: Sequence[Reply], tolerance: float) -> Finding:
        """Compares log-probs, and finds the suspect that explains a difference; if there is none, `rest` is named."""
        gap = self._gap(probe.inputs, answers)
        if gap <= tolerance:
            return ok(name, f"log-probs differ by {gap:.1e} on average")
        found = [(self._gap(suspect.inputs, answers), suspect) for suspect in suspects(self._processor, probe)]
        least, suspect = min(found, key=itemgetter(0), default=(np.inf, None))
        if suspect is None or least > min(tolerance, gap / 3):
            return differs(rest, f"{name}: log-probs differ by {gap:.1e} on average; no suspect explains it", KERNELS)
        detail = f"{name}: {suspect.fault}: log-probs differ by {gap:.1e} on average, and by {least:.1e} if so here"
        return differs(suspect.name, detail, suspect.fix)

    def _gap(self, inputs: ModelInput, answers: Sequence[Reply], temperature: float = 1.0, never: Any = None) -> float:
        return _mean_gap(self._trainer.alone(inputs, answers, temperature, never or self._never), answers)

    async def _where_in_decoder(self, probe: Probe, found: Finding) -> Finding:
        """Says on which side of the final norm the difference begins, if the server tells hidden states."""
        body = {"input_ids": probe.inputs.token_ids_T.tolist(), "sampling_params": {"max_new_tokens": 1}}
        try:
            answer = await self._client.ask("/generate", body | {"return_hidden_states": True})
            theirs_TD = np.asarray(answer["meta_info"]["hidden_states"][0], np.float32)
            ours_TD = self._trainer.final_hidden(probe.inputs)
            equal = np.abs(ours_TD - theirs_TD).mean() <= self._tolerance * np.abs(ours_TD).mean()
        except (EngineError, KeyError, IndexError, TypeError, ValueError):
            more = (
                "the layer can't be asked (SGLang tells the last states if started with --enable-return-hidden-states)"
            )
            return found._replace(detail=f"{found.detail}; {more}")
        part, more = ("head", "agree") if equal else ("layers", "differ")
        return found._replace(name=part, detail=f"{found.detail}; the states behind the final norm {more}")

    async def _sampling(self) -> Finding:
        """Compares log-probs at a low temperature, with likely tokens forbidden."""
        inputs = self._probes["text"].inputs
        likely = {
            id for prompt, answers in self._answered if prompt is inputs for answer in answers for id in answer.ids
        }
        mask = (*self._never, *sorted(likely)[:TOKENS])
        answers, _ = await self._answers(inputs, temperature=COOL, forbidden=mask)
        if broken := {id for answer in answers for id in answer.ids} & {*mask}:
            return differs("sampling mask", f"it samples the forbidden tokens {sorted(broken)}", "apply logit_bias")
        (gap, _), *faulty = [
            (self._gap(inputs, answers, temperature, never), ["temperature"] * hot + ["sampling mask"] * free)
            for (temperature, hot), (never, free) in itertools.product(
                ((COOL, False), (1.0, True)), ((mask, False), (self._never, True))
            )
        ]
        detail = f"temperature {COOL}, {len(mask)} forbidden tokens: log-probs differ by {gap:.1e} on average"
        if gap <= self._tolerance:
            return ok("sampling", detail)
        least, faults = min(faulty)
        if least > self._tolerance:
            return differs("sampling", detail, "compare the server's logits processors")
        fix = "log-probs must be of the distribution that is sampled (SGLANG_RETURN_ORIGINAL_LOGPROB unset)"
        return differs(faults[0], f"{detail}, and by {least:.1e} without {' and '.join(faults)}", fix)

    async def _packed_rows(self) -> Finding:
        answers = [answer for _, answers in self._answered for answer in answers]
        if not answers:
            return unknown("packed rows", "there are no answers on which both sides agree")
        gap = _mean_gap(self._trainer.packed(self._answered, self._dtype, self._never), answers)
        detail = f"log-probs of {len(answers)} answers in one row ({self._dtype}) differ by {gap:.1e} on average"
        if gap <= self._tolerance:
            return ok("packed rows", detail)
        return differs("packed rows", detail, "the trainer's packing or kernels are at fault: please report it")

    async def _answers(
        self, prompt: ModelInput, *, media: Probe | None = None, temperature: float = 1.0, forbidden: Any = None
    ) -> tuple[list[Reply], int]:
        """Samples answers. Returns them, and the server's number of tokens of the prompt. The server gets the files of
        `media`, if given, in the place of patches, and expands placeholders itself."""
        config = self._trainer.config
        sampling = SamplingParams(TOKENS, temperature, forbidden_ids=forbidden or self._never)
        request = GenerateRequest("doctor", prompt if media is None else _unexpanded(media), sampling, SAMPLES)
        limits = EngineLimits.of(config, SAMPLES, len(prompt) + TOKENS)
        rids = {sample: f"doctor-{uuid.uuid4().hex}" for sample in range(SAMPLES)}
        body = request_body(checked(request, limits), rids, config, interval=TOKENS) | {"stream": False}
        files: dict[str, list[str]] = {}
        for kind, data in media.media if media is not None else ():
            files.setdefault(f"{kind}_data", []).append(base64.b64encode(data).decode())
        body |= {field: [of_sample] * SAMPLES for field, of_sample in files.items()}
        replies = await self._client.ask("/generate", body)
        try:
            answers = [
                Reply(tuple(reply["output_ids"]), tuple(float(entry[0]) for entry in meta["output_token_logprobs"]))
                for reply, meta in ((reply, reply["meta_info"]) for reply in replies)
            ]
            return answers, int(replies[0]["meta_info"]["prompt_tokens"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise ServerError(f"{self._client.address}/generate: answers {str(replies)[:200]}") from None


def _message(probe: Probe) -> dict[str, Any]:
    """The probe as a user's message of OpenAI's API."""
    if not probe.media:
        return {"role": "user", "content": probe.text}
    parts = [(kind, f"data:{kind};base64,{base64.b64encode(data).decode()}") for kind, data in probe.media]
    content = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}} for kind, url in parts]
    return {"role": "user", "content": [*content, {"type": "text", "text": probe.text}]}


def _unexpanded(probe: Probe) -> ModelInput:
    """The probe's ids as a prompt of text, with one placeholder for each medium."""
    ids = np.asarray(probe.ids, np.int32)
    positions_3T = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids)))
    return ModelInput(ids, positions_3T, np.full_like(ids, -1), len(ids))


def _first(ours: Any, theirs: Any) -> str:
    """The first place where two sequences differ, in words; empty if they are equal."""
    if list(ours) == list(theirs):
        return ""
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"from place {place} on, the server has {theirs[place:][:24]!r}, the trainer {ours[place:][:24]!r}"


def _mean_gap(ours: Iterable[np.ndarray], answers: Iterable[Reply]) -> float:
    gaps = [np.abs(a - np.asarray(answer.logprobs)) for a, answer in zip(ours, answers, strict=True)]
    return float(np.concatenate(gaps).mean())


def _part_of(tensor: str) -> tuple[tuple[int, int], str]:
    """The part of the model that a tensor belongs to, and its place in the order of computation."""
    if "visual" in tensor:
        return (1, 0), "tower"
    if layer := re.search(r"layers\.(\d+)\.", tensor):
        return (2, int(layer[1])), f"layer {layer[1]}"
    place, part = (
        (0, "embedding") if "embed_tokens" in tensor else (4, "head") if "head" in tensor else (3, "final norm")
    )
    return (place, 0), part
