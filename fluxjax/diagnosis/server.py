"""Compares a server with the trainer on probes. Each check looks at a cause of differences in the checks after it.

The server tokenises texts and chats, states checksums of its weights, and samples answers. The trainer computes the
log-probs of the answers again. If log-probs differ for a probe, the trainer also computes log-probs of suspects: a
suspect is the request that a server with a certain fault would compute. The suspect nearest to the server is named.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

import models
from models.parity import Probe, our_parts
from models.processing import MediaError, Processor, PromptError
from rollout.engine import EngineError, GenerateRequest, SamplingParams
from rollout.listening import TOKEN
from rollout.requests import EngineLimits, checked
from rollout.sglang import ServerClient
from rollout.weights.published import SharedFolders
from rollout.wire import request_body
from sharding.mesh import make_mesh

from ..algorithms import find_algorithm
from ..base.errors import said
from ..base.types import Group, PreparedPrompt, Prompt, Response, Reward, Sample
from ..batch.composer import Composer
from ..config import Config, DType
from ..learner.gradients import Gradients, TrainingPhase
from ..learner.loss_inputs import logprobs_of
from . import Finding
from .dumps import TensorDumps
from .installation import clip_file, picture_file

Answered: TypeAlias = tuple[GenerateRequest, list[Response]]
Suspect: TypeAlias = tuple[str, str, GenerateRequest]  # the part that would differ, the fault, the faulty request
BOX = " [14, 28, 83, 55] <|box_start|>(14,28),(83,55)<|box_end|>"
TOKENS, SAMPLES = 12, 2  # tokens of an answer; answers to each probe
EXACT, ROUGH = 1e-3, 0.05  # tolerances of mean differences of log-probs, in nats: for float32, for other dtypes
COOL = 0.6  # the temperature of the check of sampling
NORMALISATIONS = {  # (mean, standard deviation) of each channel
    "from 0 to 1": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "by mean and deviation 0.5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
FIXES = {  # by a word of the part that differs
    "token ids": "give the server and the trainer the same tokenizer.json, or send token ids and never text",
    "template": "give the server and the trainer the same chat_template.jinja, or send token ids and never messages",
    "weights": "the last update did not arrive, or the server has another checkpoint: update or restart it",
    "pixels": "see which media reach the server, and give the server and the trainer the same preprocessor_config.json",
    "positions": "update the server, or send it the trainer's positions (rollout.serve, rollout/sglang_plugin)",
    "temperature": "log-probs must be of the sampled distribution: SGLANG_RETURN_ORIGINAL_LOGPROB must be unset",
    "sampling": "the server must apply logit_bias, to log-probs too: compare its logits processors",
    "packed rows": "the trainer's packing or kernels are at fault: please report it",
    "": "if `python -m models.parity` finds nothing, compare the server's config.json (Qwen3.5: docs/servers.md), "
    "version, quantisation and kernels",
}


class ServerComparison:
    """Compares `options.server` with the trainer, which has the checkpoint folder `options.model`. Raises ValueError or
    OSError for a folder, a text or a file that can't be used."""

    _trainer: TrainerSide  # loaded when the server has stated its dtype

    def __init__(self, options: argparse.Namespace) -> None:
        self._folder, self._tolerance, self._processor = options.model, options.tolerance, Processor.load(options.model)
        self._dumps = TensorDumps(options.dumps) if options.dumps else None
        self._probes = {"text": Probe(self._processor, options.text, [])}
        self._refused: list[Finding] = []  # about probes that this checkpoint's processor refuses
        image, video = [("image", picture_file())], [("video", clip_file())]
        media = {"image": image, "boxes": [*image, ("image", picture_file(turns=1))], "video": video}
        media |= {file: [("image", pathlib.Path(file).read_bytes())] for file in options.image}
        media |= {file: [("video", pathlib.Path(file).read_bytes())] for file in options.video}
        for name, files in media.items():
            try:
                self._probes[name] = Probe(self._processor, options.text + BOX * (name == "boxes"), files)
            except (PromptError, MediaError) as error:
                self._refused.append(Finding(name, str(error), asked=False))
        self._client = ServerClient(options.server, token=os.environ.get(TOKEN, ""))
        self._agreed: list[Answered] = []  # answers on whose log-probs both sides agree

    async def findings(self) -> AsyncIterator[Finding]:
        """Yields the finding of each check. Raises EngineError for a server that can't be reached."""
        try:
            info = {**await self._client.ask("/model_info"), **await self._client.ask("/server_info")}
            names, exact = ("version", "model_path", "dtype", "weight_version"), info.get("dtype") == "float32"
            yield Finding("server", ", ".join(f"{name} {info.get(name)}" for name in names))
            self._tolerance = self._tolerance or (EXACT if exact else ROUGH)
            self._trainer = TrainerSide(self._folder, "float32" if exact else "bfloat16")
            checks = {"token ids": self._tokens, "template": self._tokens, "weights": self._weights}
            checks |= dict.fromkeys(self._probes, self._log_probs)
            checks |= {f"{name} as files": self._log_probs for name, probe in self._probes.items() if probe.media}
            checks |= {"packed rows": self._packed_rows, "sampling": self._sampling}
            for name, check in checks.items():
                try:
                    finding = await check(name)
                except (EngineError, OSError, KeyError, TypeError) as error:  # KeyError, TypeError: unusable reply
                    finding = Finding(name, " ".join(said(error).split())[:300], asked=False)
                yield finding
            for finding in self._refused:
                yield finding
        finally:
            await self._client.close()

    async def _tokens(self, name: str) -> Finding:
        """Compares the token ids of each probe: of its prompt as text (`token ids`), or of its message (`template`)."""
        if name == "template" and not self._processor.chat_template:
            return Finding(name, f"{self._folder} has no chat template", asked=False)
        decode = functools.partial(self._processor.decode, skip_special_tokens=False)
        for of_probe, probe in self._probes.items():
            urls = [
                (f"{kind}_url", f"data:{kind};base64,{base64.b64encode(data).decode()}") for kind, data in probe.media
            ]
            media = [{"type": kind, kind: {"url": url}} for kind, url in urls]
            content = [*media, {"type": "text", "text": probe.text}] if media else probe.text
            body: dict[str, Any] = {"prompt": decode(probe.ids), "add_special_tokens": False}
            if name == "template":
                body = {"messages": [{"role": "user", "content": content}]}
            theirs = (await self._client.ask("/tokenize", body))["tokens"]
            if theirs != probe.ids:
                server, trainer = (f"{decode(ids)!r} {ids}" for ids in (theirs, probe.ids))
                return _differs(name, f"{of_probe}: the server has {server}, the trainer {trainer}")
        return Finding(name, f"of {len(self._probes)} prompts")

    async def _weights(self, name: str) -> Finding:
        ranks = await self._client.checksums()
        folders = SharedFolders(self._trainer.model.config, self._trainer.dtype)
        try:
            names, count = folders.write(0, self._trainer.params).checksums.differing(ranks)
        finally:
            folders.close()
        if not names:
            return Finding(name, f"checksums of {count} tensors")
        *_, part, first = min((*_part_of(tensor), tensor) for tensor in names)
        detail = f"{len(names)} of {count} checksums differ, the first is that of {first}"
        return _differs("weights" if 2 * len(names) > count else f"{part} (weights)", detail)

    async def _log_probs(self, name: str) -> Finding:
        """Compares log-probs of a probe. The server gets media as patches, or as files if `name` says so."""
        probe, files = self._probes[name.removesuffix(" as files")], name.endswith(" as files")
        sampling = SamplingParams(TOKENS, forbidden_ids=self._processor.media_token_ids)  # as in a run
        request = GenerateRequest("doctor", probe.inputs, sampling, SAMPLES)
        rest = "pixels" if files else "tower" if probe.media else "decoder"
        faulty = suspects(self._processor, probe, request)
        finding = await self._compared(name, rest, request, faulty, probe if files else None)
        dumps = self._dumps if finding.name in ("decoder", "tower") else None
        return finding if dumps is None else await self._located(finding, probe, dumps)

    async def _located(self, unexplained: Finding, probe: Probe, dumps: TensorDumps) -> Finding:
        """Compares hidden states after each decoder layer. Returns a finding with the name of the first layer that
        differs. If no layer differs, or if layer 0 differs for a probe with media, the finding has the name of
        `unexplained`."""
        ours = [state_TD for part, state_TD in our_parts(self._trainer.model, probe.inputs).items() if "layer" in part]
        earlier = dumps.passes()
        try:
            await self._answers(GenerateRequest("doctor", probe.inputs, SamplingParams(1)), None)
            theirs = dumps.states(earlier, len(ours), len(probe.inputs))
        except (EngineError, OSError) as error:
            return unexplained._replace(detail=f"{unexplained.detail}; layers cannot be compared: {said(error)}")
        norm_T, pairs = functools.partial(np.linalg.norm, axis=-1), zip(ours, theirs, strict=True)
        gaps = [float(np.mean(norm_T(a_TD - b_TD) / norm_T(a_TD))) for a_TD, b_TD in pairs]  # means over tokens
        beyond = [number for number, gap in enumerate(gaps) if not gap <= self._tolerance]  # NaN counts, too
        layer = beyond[0] if beyond else int(np.argmax(gaps))
        before = f"by {gaps[layer - 1]:.1e} before this layer" if layer else "which is the first layer"
        detail = f"{unexplained.detail}; hidden states differ by {gaps[layer]:.1e} behind layer {layer}, {before}"
        detail += "" if beyond else ": compare the final norm, the head and decoding"
        of_tower = unexplained.name == "tower" and layer == 0  # layer 0 reads the tower's features
        return _differs(f"layer {layer}", detail) if beyond and not of_tower else unexplained._replace(detail=detail)

    async def _packed_rows(self, name: str) -> Finding:
        if not self._agreed:
            return Finding(name, "there are no answers on which both sides agree", asked=False)
        gap = self._trainer.gap(self._agreed)
        detail = f"log-probs of all answers in one row differ by {gap:.1e} on average"
        return Finding(name, detail) if gap <= self._tolerance else _differs(name, detail)

    async def _sampling(self, name: str) -> Finding:
        """Compares log-probs at a low temperature, with likely tokens forbidden."""
        if not self._agreed:
            return Finding(name, "there are no answers on which both sides agree", asked=False)
        plain, likely = self._agreed[0]
        never = plain.sampling.forbidden_ids
        mask = (*never, *sorted({id for answer in likely for id in answer.token_ids})[:TOKENS])
        asked, hot, free = (
            dataclasses.replace(plain, sampling=SamplingParams(TOKENS, temperature, forbidden_ids=forbidden))
            for temperature, forbidden in ((COOL, mask), (1.0, mask), (COOL, never))
        )
        faulty = [("temperature", "without temperature", hot), ("sampling mask", "without sampling mask", free)]
        faulty.append(("temperature", "without temperature and sampling mask", plain))
        return await self._compared(name, name, asked, faulty)

    async def _compared(
        self, name: str, rest: str, request: GenerateRequest, faulty: Iterable[Suspect], files: Probe | None = None
    ) -> Finding:
        """Compares log-probs. The finding names the part of the suspect that explains a difference, else `rest`."""
        answers, tokens = await self._answers(request, files)
        if tokens != len(request.prompt):
            return _differs(
                "pixels", f"{name}: the server counts {tokens} tokens in the prompt, the trainer {len(request.prompt)}"
            )
        if broken := {id for answer in answers for id in answer.token_ids} & {*request.sampling.forbidden_ids}:
            return _differs("sampling mask", f"{name}: forbidden tokens are sampled: {sorted(broken)}")

        def gap_of(request: GenerateRequest) -> float:  # the mean over answers, each computed in a row of its own
            return float(np.mean([self._trainer.gap([(request, [answer])]) for answer in answers]))

        tolerance = max(self._tolerance, ROUGH) if files else self._tolerance  # libraries resize with other rounding
        gap = gap_of(request)
        detail = f"log-probs differ by {gap:.1e} on average"
        if gap <= tolerance:
            self._agreed += [(request, answers)] if files is None else []
            return Finding(name, detail)
        least, part, fault = min((gap_of(asked), part, fault) for part, fault, asked in [*faulty, (rest, "", request)])
        if least > min(tolerance, gap / 3):
            return _differs(rest, f"{name}: {detail}; no fault that the doctor knows explains this")
        return _differs(part, f"{name}: {fault}: {detail}, but only by {least:.1e} if the trainer has this fault")

    async def _answers(self, request: GenerateRequest, files: Probe | None) -> tuple[list[Response], int]:
        """Returns sampled answers, and the tokens of the prompt by the server's count. With `files`, the server gets
        the files of this probe instead of patches, and expands placeholders itself."""
        config, rids = self._trainer.model.config, [f"doctor-{uuid.uuid4().hex}" for _ in range(request.n)]
        limits = EngineLimits.of(config, request.n, len(request.prompt) + TOKENS)
        body = request_body(checked(request, limits), dict(enumerate(rids)), config, interval=TOKENS)
        if self._dumps is not None:
            body["extra_key"] = rids[0]  # no prefix is cached: the dump has all tokens of the prompt
        if files is not None:
            body["input_ids"] = [files.ids] * request.n
            for kind in dict(files.media):
                media = [base64.b64encode(data).decode() for of_kind, data in files.media if of_kind == kind]
                body[f"{kind}_data"] = [media] * request.n
        answers, replies = [], await self._client.ask("/generate", body | {"stream": False})
        for sample, (rid, reply) in enumerate(zip(rids, replies, strict=True)):
            ids, entries = tuple(reply["output_ids"]), reply["meta_info"]["output_token_logprobs"]
            logprobs = tuple(float(entry[0]) for entry in entries)
            answers.append(Response(rid, 0, sample, ids, logprobs, (0,) * len(ids), "length"))
        return answers, int(replies[0]["meta_info"]["prompt_tokens"])


def _differs(part: str, detail: str) -> Finding:
    return Finding(part, detail, next(fix for word, fix in FIXES.items() if word in part))


def _part_of(tensor: str) -> tuple[int, int, str]:
    """Returns two numbers that sort tensors in the order of computation, and the name of the tensor's part."""
    if "visual" in tensor:
        return 1, 0, "tower"
    if layer := re.search(r"layers\.(\d+)\.", tensor):
        return 2, int(layer[1]), f"layer {layer[1]}"
    return (0, 0, "embedding") if "embed_tokens" in tensor else (3, 0, "final norm or head")


def suspects(processor: Processor, probe: Probe, request: GenerateRequest) -> Iterator[Suspect]:
    """Yields the suspects for the request of a probe."""
    if not probe.media:
        free = dataclasses.replace(request.sampling, forbidden_ids=())
        yield "sampling mask", "log-probs are without sampling mask", dataclasses.replace(request, sampling=free)
        return
    inputs, positions_3T, shown_T = probe.inputs, probe.inputs.positions_3T, probe.inputs.feature_index_T >= 0
    blind = dataclasses.replace(inputs, vision=None, feature_index_T=np.full_like(inputs.feature_index_T, -1))
    yield "pixels", "the server computes without the media", dataclasses.replace(request, prompt=blind)
    for words, (mean, std) in NORMALISATIONS.items():
        image, video = (dataclasses.replace(kind, mean=mean, std=std) for kind in (processor.image, processor.video))
        prompt = dataclasses.replace(processor, image=image, video=video).prepare_ids(probe.ids, probe.media)
        yield "pixels", f"the server's pixels are scaled {words}", dataclasses.replace(request, prompt=prompt)
    if len(probe.media) > 1:  # the probes of several media have pictures of one size
        prompt = processor.prepare_ids(probe.ids, probe.media[::-1])
        yield "pixels", "the server has the media in reverse order", dataclasses.replace(request, prompt=prompt)
    for factor in (2, 0.5):
        layout = dataclasses.replace(processor.layout, tokens_per_second=factor * processor.layout.tokens_per_second)
        prompt = dataclasses.replace(processor, layout=layout).prepare_ids(probe.ids, probe.media)
        yield "positions (time)", f"a video's time is scaled by {factor}", dataclasses.replace(request, prompt=prompt)
    prompt = dataclasses.replace(inputs, next_position=len(inputs))
    yield (
        "positions (all axes)",
        "the answer's positions go on from the number of tokens",
        dataclasses.replace(request, prompt=prompt),
    )
    misplaced = {
        ("all axes", "the server counts tokens on all axes, as for text"): np.tile(np.arange(len(inputs)), (3, 1)),
        ("height and width", "the server has the positions of time for both height and width"): positions_3T[[0, 0, 0]],
        ("height and width", "the server exchanges height and width"): positions_3T[[0, 2, 1]],
    }
    for (axis, name), by in itertools.product(enumerate(("time", "height", "width")), (1, -1)):
        shift_3T = by * np.outer(np.arange(3) == axis, shown_T)
        misplaced[name, f"the positions of the media are shifted by {by:+d}"] = positions_3T + shift_3T
    for (axes, fault), faulty_3T in misplaced.items():
        following = int(faulty_3T[0, -1]) + 1  # the prompt ends with text
        prompt = dataclasses.replace(inputs, positions_3T=faulty_3T.astype(np.int32), next_position=following)
        yield f"positions ({axes})", fault, dataclasses.replace(request, prompt=prompt)


class TrainerSide:
    """A checkpoint as a training step computes it in `dtype`, on one device."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.model, self.dtype, self._config = models.load(folder, jnp.float32), dtype, Config()
        self.params = models.split(self.model)[1]
        self._config.model.compute_dtype, self._config.packing.rows_per_device = DType(dtype), 1
        loss, mesh = find_algorithm(self._config.algorithm).token_loss, make_mesh(1)
        self._gradients = functools.cache(  # by the temperature, and the ids that are never sampled
            lambda *sampling: Gradients(self._config, self.model, TrainingPhase(loss, *sampling), mesh)
        )

    def gap(self, answered: Sequence[Answered]) -> float:
        """Returns the mean absolute difference between the answers' log-probs and the trainer's, in nats. The trainer
        packs all prompts, each once, and all answers into one row. All requests must have equal sampling parameters."""
        groups, prepared, tokens = [], {}, 0
        for draw, (request, answers) in enumerate(answered):
            prompt = Prompt(str(draw), "doctor", "", "", draw=draw)
            samples = [Sample(dataclasses.replace(answer, draw=draw), Reward(0.0, False), 1.0) for answer in answers]
            groups.append(Group(prompt, tuple(samples)))
            prepared[draw] = PreparedPrompt(prompt, request.prompt)
            tokens += len(request.prompt) + sum(answer.num_tokens for answer in answers)
        sizes, packing, sampling = self.model.config, self._config.packing, answered[0][0].sampling
        packing.tokens_per_row = 1 << tokens.bit_length()
        packing.patches_per_device = packing.tokens_per_row * (sizes.vision.merge_unit if sizes.vision else 1)
        composition = Composer(self._config, 1, sizes.vision, sizes.text).compose(groups, prepared)
        gradients = self._gradients(sampling.temperature, sampling.forbidden_ids)
        ours = composition.of_responses(logprobs_of(composition, gradients, gradients.strategy.shard(self.params)))
        theirs = composition.of_responses([batch.behaviour_logprobs_BT for batch in composition.batches])
        return float(np.abs(ours - theirs).mean())
