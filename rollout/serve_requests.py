"""Reads bodies of `POST /generate` as requests of the engine: bodies of `rollout.wire`, or plain bodies for SGLang.

`read_body` reads the JSON, `requests_of` then the prompts with their patches; samples can be aborted in between.
Samples that differ only in their number and their tokens so far become one request, whose prompt is prefilled once. Any
error in a body raises `wire.BadRequest`.
"""

import collections
import dataclasses
import json
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from models.config import DecoderConfig
from models.inputs import ModelInput
from models.processing import Processor

from .engine import GenerateRequest, SamplingParams
from .requests import as_integer, checked_sampling
from .wire import FIELDS, BadRequest, Json, array_of, completed, given_prompt, our_media, sampling_of

# The fields of a body that are read, and hints for routers and logs, which change no answer.
READ = {
    *FIELDS, "input_ids", "rid", "sampling_params", "stream", "return_logprob", "session_id", "modalities", "mm_hashes",
    "mm_content_hashes", "log_metrics", "no_logs", "custom_labels", "routing_key", "conversation_id", "priority",
    "extra_key", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "http_worker_ipc",
}  # fmt: skip
SAMPLING = {
    "max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos", "logit_bias", "n",
    "stream_interval", "skip_special_tokens", "sampling_seed", "custom_params", "no_stop_trim",
    "spaces_between_special_tokens",
}  # fmt: skip
# The neutral values of these fields of SGLang; false, 0 and empty values of all other fields are neutral
NOTHING = {"repetition_penalty": 1, "logprob_start_len": -1}


@dataclasses.dataclass(frozen=True)
class BodySample:
    """One sample of a body. The last `begun` tokens of `ids` were generated earlier."""

    rid: str
    ids: tuple[int, ...]
    begun: int
    number: int  # the sample's number, on which the sampled tokens depend
    seed: int
    sampling: SamplingParams
    interval: int  # tokens between two events of a stream
    skip_special_tokens: bool
    media: Mapping[str, Json]  # by field of `FIELDS`


@dataclasses.dataclass(frozen=True)
class Body:
    samples: tuple[BodySample, ...]
    batch: bool  # the reply is a list, and events have an index
    stream: bool
    session: str  # as in `GenerateRequest`


def read_json_object(raw: bytes) -> Json:
    """The JSON object in a request's body; empty for an empty body."""
    try:
        content = json.loads(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadRequest(f"the body must be an object, not a {type(content).__name__}")
    return content


def read_body(raw: bytes, vocabulary: int, eos_ids: tuple[int, ...]) -> Body:
    """Reads a body, but not the arrays of its media. Without `ignore_eos`, `eos_ids` end a response, too."""
    content = read_json_object(raw)
    _refuse_wishes("", content, READ)
    ids = content.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids must be a list of token ids, or a list of such lists")
    batch, seed = isinstance(ids[0], list), secrets.randbits(63)
    n = len(ids) if batch else 1
    columns = {name: _column(content, name, n, batch) for name in ("rid", "sampling_params", *FIELDS)}
    samples = []
    for place, tokens in enumerate(ids if batch else [ids]):
        given = {name: column[place] for name, column in columns.items()}
        samples.append(_sample(place, tokens, given, seed, vocabulary, eos_ids))
    if len({sample.rid for sample in samples}) < n:
        raise BadRequest("rid: two samples have the same one")
    session = content.get("session_id") or ""
    if not isinstance(session, str):
        raise BadRequest("session_id must be a string")
    return Body(tuple(samples), batch, content.get("stream") is True, session)


def _column(content: Json, name: str, n: int, batch: bool) -> Sequence[Any]:
    value = content.get(name)
    if not batch or value is None or isinstance(value, dict):
        return [value] * n
    if not isinstance(value, list) or len(value) != n:
        raise BadRequest(f"{name} must be a list with one entry for each of the {n} input_ids")
    return value


def _media(field: str, value: Any) -> Json:
    entries = value if isinstance(value, list) else [value]
    if len(entries) != 1:
        raise BadRequest(f"{field} must have one entry for each sample, with all media of the sample")
    return our_media(field, entries[0])


def _refuse_wishes(where: str, fields: Json, read: Container[str]) -> None:
    """Raises BadRequest for a field that is not in `read` and has an effect; neutral values are allowed."""
    for name, value in fields.items():
        nothing = NOTHING.get(name, False)
        wishes = [wish for wish in (value if isinstance(value, list) else [value]) if wish is not None]
        if name not in read and any(wish != nothing and (wish or nothing) for wish in wishes):
            raise BadRequest(f"{where}{name[:99]} is not supported: only null and {json.dumps(nothing)} are possible")


def _sample(place: int, ids: Any, given: Json, seed: int, vocabulary: int, eos_ids: tuple[int, ...]) -> BodySample:
    rid = uuid.uuid4().hex if given["rid"] is None else given["rid"]
    if not isinstance(rid, str) or not rid:
        raise BadRequest("rid must be a string that is not empty")
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int}:
        raise BadRequest(f"input_ids of {rid!r} must be a list of integers that is not empty")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise BadRequest(f"input_ids of {rid!r}: there are ids outside of the vocabulary of {vocabulary}")
    params = _object(f"sampling_params of {rid!r}", given["sampling_params"])
    _refuse_wishes("sampling_params.", params, SAMPLING)
    params = {name: value for name, value in params.items() if value is not None or name == "max_new_tokens"}
    custom = _object("sampling_params.custom_params", params.get("custom_params"))
    named = custom.get("seed", params.get("sampling_seed"))
    # Without a seed, samples of a prompt must still differ.
    number = custom.get("sample", place if named is None else 0)
    try:
        as_integer("n", params.get("n", 1), 1, 1)
        begun = as_integer("custom_params.begun", custom.get("begun", 0), 0, len(ids) - 1)
        sampling = checked_sampling(sampling_of(params, begun), vocabulary)
        stop = () if params.get("ignore_eos") else tuple(sorted({*sampling.stop_ids, *eos_ids}))  # as in SGLang
        return BodySample(
            rid,
            tuple(ids),
            begun,
            as_integer("custom_params.sample", number, 0),
            as_integer("sampling_seed", seed if named is None else named, -(1 << 63), (1 << 64) - 1),
            dataclasses.replace(sampling, stop_ids=stop),
            as_integer("stream_interval", params.get("stream_interval", 1), 1),
            params.get("skip_special_tokens") is not False,
            {field: _media(field, given[field]) for field in FIELDS if given[field]},
        )
    except ValueError as error:
        raise error if isinstance(error, BadRequest) else BadRequest(f"sampling_params of {rid!r}: {error}") from None


def _object(name: str, value: Any) -> Json:
    if not isinstance(value, dict | None):
        raise BadRequest(f"{name} must be an object")
    return value or {}


def requests_of(
    body: Body, config: DecoderConfig, processor: Processor, kept: OrderedDict[str, np.ndarray]
) -> list[tuple[GenerateRequest, list[int]]]:
    """The requests of a body, not checked by the engine yet, each with the indices of its samples in the body. Reads
    arrays, and thus belongs in a thread. `kept` has the media of earlier turns (`wire.completed`)."""
    sent: dict[str, Json] = {}  # media whose patches are sent, by key; several samples may show one medium
    for field, media in (pair for sample in body.samples for pair in sample.media.items()):
        if "patches" in media:
            sent[media["key"]] = {**media, "patches": completed(field, media, kept)}
    shown = list(map(_prompt_key, body.samples))
    groups: dict[Hashable, list[int]] = {}
    seen: collections.Counter[Hashable] = collections.Counter()  # samples of one request have different numbers
    for place, sample in enumerate(body.samples):
        alike = (shown[place], sample.sampling, sample.seed)
        groups.setdefault((alike, seen[alike, sample.number]), []).append(place)
        seen[alike, sample.number] += 1
    prompts: dict[Hashable, ModelInput] = {}
    incoming = []
    for places in groups.values():
        samples = [body.samples[place] for place in places]
        first, key = samples[0], shown[places[0]]
        if key not in prompts:
            prompts[key] = _prompt(first, sent, config, processor)
        request = GenerateRequest(
            f"{first.rid}/",  # no sample's name: names of samples end with a number
            prompts[key],
            first.sampling,
            n=len(samples),
            seed=first.seed,
            prefix_ids=tuple(sample.ids[len(sample.ids) - sample.begun :] for sample in samples),
            samples=tuple(sample.number for sample in samples),
            session=body.session,
        )
        incoming.append((request, places))
    return incoming


def _prompt(sample: BodySample, sent: Mapping[str, Json], config: DecoderConfig, processor: Processor) -> ModelInput:
    if not sample.media:
        try:
            return processor.prepare_ids(sample.ids[: len(sample.ids) - sample.begun])
        except ValueError as error:
            raise BadRequest(f"input_ids of {sample.rid!r}: {error}") from None
    if not config.vision:
        raise BadRequest(f"{', '.join(sample.media)}: the model reads text only")
    whole = {}
    for field, media in sample.media.items():
        if (patches := sent.get(media["key"])) is None:
            raise BadRequest(f"{field}: no sample of this body has the patches of media {media['key']!r}")
        whole[field] = {**media, "patches": patches["patches"], "grid_thw": patches.get("grid_thw")}
    return given_prompt(sample.ids, sample.begun, whole, config)


def _prompt_key(sample: BodySample) -> Hashable:
    prompt = len(sample.ids) - sample.begun
    media = ((field, entry["key"], _positions(entry, prompt)) for field, entry in sorted(sample.media.items()))
    return sample.ids[:prompt], tuple(media)


def _positions(media: Json, prompt: int) -> Hashable:
    positions, delta = array_of("positions", media.get("positions")), media.get("position_delta")
    if positions.ndim != 2 or type(delta) is not int:
        raise BadRequest("positions must be [3, tokens], position_delta an integer")
    return positions[:, :prompt].tobytes(), delta
