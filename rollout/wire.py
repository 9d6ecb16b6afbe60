"""Requests and replies as JSON of SGLang's native `/generate`, both ways: servers read the bodies that clients write.

The samples of a request travel together as a batch. Each has its own prompt and prefix as `input_ids`, its own `rid`,
and in `custom_params` the seed and number by which `rollout.serve` samples its tokens.

Media travel as the patches, grids and rotary positions that the trainer computes on. Patches are in raster order, as in
Hugging Face's processors; prompts have expanded placeholders. `rollout.serve` reads this format (`FORMAT`), and so does
SGLang with our extension (`rollout/sglang_plugin`). Only the first sample of a batch carries the patches, the others
their key. In a conversation that goes on, only new pieces of the patches are sent (`completed`). An engine that fetches
pixels itself gets tickets in place of patches (`SHADOW`), in the vision tower's window order.
"""

import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from models.config import DecoderConfig, Grid, PatchLayout, VisionConfig
from models.inputs import ModelInput
from models.processing.patches import arrange
from models.processing.processor import arranged
from models.shadow import Rows, ShadowTensor

from .engine import EngineError, FinishReason, GenerateRequest, SamplingParams
from .requests import as_integer, as_number

Json: TypeAlias = dict[str, Any]
FORMAT = "data:application/x-fluxjax+json,"  # the prefix of our media; SGLang needs our extension for it
SERVE_VERSION = "fluxjax"  # `version` of `rollout.serve` in /server_info, where SGLang states its release
ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: spreads consecutive seeds
NEVER = -1e30  # the bias of forbidden tokens; JSON has no infinity
DTYPES = ("float32", "int32")
KEPT_BYTES = 1 << 30  # bytes of the patches that a server keeps for later turns of conversations, at most
MOST_GRID = 1 << 16  # bound of each side of a grid, so that the product of three sides does not overflow
SHADOW = "shadow"  # key of `patches`: {"dtype", "shape", "rows": [[ticket, start, stop], or an array of values, ...]}
FIELDS = {"image_data": "image_token_id", "video_data": "video_token_id"}


# --- requests -------------------------------------------------------------------------------------


def request_body(
    request: GenerateRequest,
    rids: Mapping[int, str],
    config: DecoderConfig,
    *,
    interval: int,
    known: Collection[str] = (),
    names: set[str] | None = None,
) -> Json:
    """The body of `POST /generate` for the samples that are keys of `rids`, with an event every `interval` tokens.
    `rollout.requests.checked` must have returned `request`. The body of a request with a session lacks the pixels of
    the media that the server has by the names `known`; `names` gets the names of all its media. Raises EngineError for
    media that the format can't express."""
    prompt, samples = request.prompt, list(rids)
    prefixes = [request.prefix_ids[i] if request.prefix_ids else () for i in samples]
    ids = prompt.token_ids_T.tolist()
    body: Json = {
        "rid": list(rids.values()),
        "input_ids": [[*ids, *prefix] for prefix in prefixes],
        "sampling_params": [
            _sampling_json(request, i, len(prefix), interval) for i, prefix in zip(samples, prefixes, strict=True)
        ],
        "return_logprob": True,
        "stream": True,
        **({"session_id": request.session} if request.session else {}),
    }
    if prompt.vision is not None:
        for field, media in _media(prompt, config, known if request.session else None).items():
            (set() if names is None else names).update(name for name, _ in media.get("pieces", ()))
            shown = [media, *({"key": media["key"]} for _ in samples[1:])]
            entries = (part | _positions(prompt, len(prefix)) for part, prefix in zip(shown, prefixes, strict=True))
            body[field] = [[FORMAT + json.dumps(entry)] for entry in entries]
    return body


def _sampling_json(request: GenerateRequest, sample: int, begun: int, interval: int) -> Json:
    sampling, number = request.sampling, request.numbers[sample]
    return {
        "max_new_tokens": sampling.max_new_tokens - begun,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": not sampling.stop_ids,  # True makes SGLang ignore stop ids, too
        "logit_bias": {str(id): NEVER for id in sampling.forbidden_ids} or None,
        "stream_interval": interval,
        "skip_special_tokens": False,
        # SGLang samples by this seed alone, or by no seed. The samples of a prompt must have different seeds.
        "sampling_seed": _signed(request.seed * ODD + number),
        "custom_params": {"seed": _signed(request.seed), "sample": number, "begun": begun},
    }


def _signed(seed: int) -> int:
    """The lowest 64 bits of a seed as a signed number, as SGLang takes seeds."""
    return (seed + 2**63) % 2**64 - 2**63


def _positions(prompt: ModelInput, begun: int) -> Json:
    following = np.broadcast_to(prompt.next_position + np.arange(begun, dtype=np.int32), (3, begun))
    return {
        "positions": array_json(np.concatenate([prompt.positions_3T, following], axis=1)),
        "position_delta": prompt.next_position - len(prompt),
    }


def _media(prompt: ModelInput, config: DecoderConfig, known: Collection[str] | None) -> dict[str, Json]:
    """A prompt's images and videos, by field of the body: patches are in raster order, tickets in window order. If
    `known` is not None, each piece of the patches has a name; those of known pieces are left out."""
    vision, tower = prompt.vision, config.vision
    assert vision is not None and tower is not None  # other models refuse media
    unit = tower.merge_unit
    patches_PX = vision.patches_PX
    frames_M = vision.frame_segments_P[::unit]
    shown = prompt.feature_index_T >= 0
    found: dict[str, Json] = {}
    told = 0  # tokens of the media described so far
    for field, name in FIELDS.items():
        token, pieces = getattr(config, name), Json()
        of_kind = shown & (prompt.token_ids_T == token)
        places = np.flatnonzero(of_kind)
        if not len(places):
            continue
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        grids = [_grid(prompt, frames_M, run, field, unit) for run in runs]
        frames = [frame for run, grid in zip(runs, grids, strict=True) for frame in np.split(run, grid[0])]
        arrays = {
            "grid_thw": np.asarray(grids, np.int32),
            "offsets": np.asarray([(frame[0], frame[-1]) for frame in frames], np.int32),  # first, last token
        }
        if isinstance(patches_PX, ShadowTensor):
            patches = shadow_json(_in_window_order(prompt, patches_PX, runs, grids, tower))
            name = json.dumps(patches).encode()
        else:
            blocks_MX = patches_PX.reshape(len(patches_PX) // unit, -1)
            raster_PX = blocks_MX[prompt.feature_index_T[places]].reshape(-1, patches_PX.shape[1])
            pieces_PX = np.split(raster_PX, np.cumsum([len(run) * unit for run in runs])[:-1])
            if known is not None:
                hashes = [hashlib.sha256(piece.tobytes()).hexdigest()[:32] for piece in pieces_PX]
                pieces_PX = [p[: 0 if h in known else None] for h, p in zip(hashes, pieces_PX, strict=True)]
                pieces["pieces"] = list(zip(hashes, map(len, pieces_PX), strict=True))
            patches, name = array_json(np.concatenate(pieces_PX)), raster_PX.tobytes()
        key = hashlib.sha256(b"".join([name, *(array.tobytes() for array in arrays.values())])).hexdigest()
        found[field] = {"key": key, "patches": patches} | pieces | {k: array_json(a) for k, a in arrays.items()}
        told += len(places)
    if int(shown.sum()) != told:
        raise EngineError("the prompt shows media at tokens that are neither image nor video placeholders")
    return found


def _in_window_order(
    prompt: ModelInput,
    patches_PX: ShadowTensor,
    runs: Sequence[np.ndarray],
    grids: Sequence[Grid],
    config: VisionConfig,
) -> ShadowTensor:
    """The patches of the media that these runs of tokens show. Raises EngineError unless they are in window order."""
    tensors = []
    for run, grid in zip(runs, grids, strict=True):
        rows = prompt.feature_index_T[run]
        first = int(rows.min())
        if not np.array_equal(rows - first, arrange([grid], PatchLayout.of(config)).feature_order):
            raise EngineError(f"tokens {run[0]} .. {run[-1]} of the prompt show a medium with patches in another order")
        tensors.append(patches_PX[first * config.merge_unit : (first + len(run)) * config.merge_unit])
    return tensors[0] if len(tensors) == 1 else np.concatenate(tensors)  # type: ignore[call-overload]


def _grid(prompt: ModelInput, frames_M: np.ndarray, run: np.ndarray, field: str, unit: int) -> tuple[int, int, int]:
    """(frame pairs, patch rows, patch columns) of the medium that this run of placeholder tokens shows."""
    vision = prompt.vision
    assert vision is not None
    frames = np.unique(frames_M[prompt.feature_index_T[run]])
    rows, columns = vision.positions_P2[vision.frame_segments_P == frames[0]].max(axis=0) + 1
    grid = (len(frames), int(rows), int(columns))
    if int(np.prod(grid)) != len(run) * unit or (field == "image_data" and len(frames) != 1):
        raise EngineError(
            f"tokens {run[0]} .. {run[-1]} of the prompt show {len(frames)} frame pairs of {rows} x {columns} patches: "
            "media that follow each other need a token between them"
        )
    return grid


# --- bodies as a server reads them ----------------------------------------------------------------


class BadRequest(ValueError):
    """A body that can't be read as a request; the message names the field."""


def our_media(field: str, entry: Any) -> Json:
    """The media in an entry of `image_data` or `video_data`. Raises BadRequest for an entry in another format."""
    if not isinstance(entry, str) or not entry.startswith(FORMAT):
        raise BadRequest(f"{field} must have media in the format of rollout.wire: this server decodes no files")
    try:
        media = json.loads(entry[len(FORMAT) :])
    except ValueError as error:
        raise BadRequest(f"media: {error}") from None
    if not isinstance(media, dict) or not isinstance(media.get("key"), str):
        raise BadRequest("media must be an object with a key")
    return media


def array_json(array: np.ndarray) -> Json:
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "data": base64.b64encode(np.ascontiguousarray(array).data).decode("ascii"),
    }


def shadow_json(tensor: ShadowTensor) -> Json:
    """The JSON of a shadow tensor, which says where each row of the patches can be fetched."""
    rows = [
        [piece.ticket, piece.start, piece.stop] if isinstance(piece, Rows) else array_json(piece)
        for piece in tensor.pieces
    ]
    return {SHADOW: {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "rows": rows}}


def patches_of(name: str, value: Any) -> np.ndarray | ShadowTensor:
    """The patches written by `array_json` (raster order) or `shadow_json` (window order). Raises BadRequest."""
    if isinstance(value, np.ndarray):  # read before, by `completed`
        return value
    if not isinstance(value, dict) or SHADOW not in value:
        return array_of(name, value)
    try:
        told = value[SHADOW]
        dtype, shape, rows = told["dtype"], tuple(told["shape"]), told["rows"]
        if dtype != "float32" or len(shape) != 2 or not all(type(side) is int and side > 0 for side in shape):
            raise ValueError(f"{dtype} {shape} must be float32 and [P, X]")
        pieces = [_rows_of(row) if isinstance(row, list) else array_of(name, row) for row in rows]
        if any(isinstance(piece, np.ndarray) and piece.shape[1:] != shape[1:] for piece in pieces):
            raise ValueError(f"an array among the rows is not [P, {shape[1]}]")
        tensor = ShadowTensor(pieces, shape[1:], np.dtype(dtype))
        if tensor.shape != shape:
            raise ValueError(f"there are {len(tensor)} rows, but the shape says {shape[0]}")
    except (TypeError, KeyError, ValueError) as error:
        raise error if isinstance(error, BadRequest) else BadRequest(f"{name}.{SHADOW}: {error!r}") from None
    return tensor


def completed(field: str, media: Json, kept: OrderedDict[str, np.ndarray]) -> Any:
    """The patches of a field of a body. Pieces that the body lacks are in `kept`, which gets the other pieces, and
    drops the least recently used ones beyond `KEPT_BYTES`. Raises BadRequest."""
    if "pieces" not in media:
        return media.get("patches")
    patches, found = array_of(f"{field}.patches", media.get("patches")), []
    try:
        for name, count in media["pieces"]:
            if count:
                kept[str(name)], patches = patches[:count], patches[count:]
            found.append(kept[name])
            kept.move_to_end(name)
        if len(patches):
            raise ValueError(f"{len(patches)} patches have no name")
        while sum(piece.nbytes for piece in tuple(kept.values())) > KEPT_BYTES:
            kept.popitem(last=False)
        return np.concatenate(found)
    except (TypeError, LookupError, ValueError) as error:
        raise BadRequest(f"{field}.pieces: {error!r}: send all patches again") from None


def _rows_of(row: list[Any]) -> Rows:
    ticket, start, stop = row
    if not isinstance(ticket, str) or type(start) is not int or type(stop) is not int or not 0 <= start < stop:
        raise ValueError(f"{str(row)[:200]} is no [ticket, start, stop]")
    return Rows(ticket, start, stop)


def array_of(name: str, value: Any) -> np.ndarray:
    """Reads an array written by `array_json`. Raises BadRequest."""
    try:
        dtype, shape, data = value["dtype"], value["shape"], base64.b64decode(value["data"], validate=True)
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is none of {DTYPES}")
        return np.frombuffer(data, dtype).reshape(shape)
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise BadRequest(f"{name}: {error}") from None


def given_prompt(ids: Sequence[int], begun: int, media: Mapping[str, Json], config: DecoderConfig) -> ModelInput:
    """The prompt of a sample whose media have our format: `ids` without the last `begun` ids. `media` has an entry with
    patches for each field of `FIELDS` that the body has. Raises BadRequest."""
    ids_T = np.asarray(ids[: len(ids) - begun], np.int32)
    first = next(iter(media.values()))
    positions, delta = array_of("positions", first.get("positions")), first.get("position_delta")
    if type(delta) is not int:
        raise BadRequest("position_delta must be an integer")
    if positions.shape != (3, len(ids)):
        raise BadRequest(f"positions has the shape {positions.shape}; {len(ids)} tokens need (3, {len(ids)})")
    assert config.vision is not None  # `serve_requests` refuses media for other models
    unit = config.vision.merge_unit
    layout = PatchLayout.of(config.vision)
    runs: list[tuple[int, np.ndarray | ShadowTensor, tuple[int, ...]]] = []  # first token, patches, grid
    for field, entry in media.items():
        patches = patches_of(f"{field}.patches", entry.get("patches"))
        grids = array_of(f"{field}.grid_thw", entry.get("grid_thw"))
        if patches.ndim != 2 or grids.ndim != 2 or grids.shape[1] != 3 or grids.dtype != np.int32:
            raise BadRequest(
                f"{field}: patches {patches.shape} and grid_thw {grids.dtype} {grids.shape} must be [P, X] and "
                "int32 [media, 3]"
            )
        places = np.flatnonzero(ids_T == getattr(config, FIELDS[field]))
        sizes = grids.astype(np.int64).prod(axis=1)
        if not ((grids > 0) & (grids < MOST_GRID)).all() or (sizes % unit).any():
            raise BadRequest(
                f"{field}.grid_thw must have sides of 1 to {MOST_GRID - 1}, and for each medium a multiple of {unit} "
                "patches"
            )
        if sizes.sum() != len(patches) or len(places) * unit != len(patches):
            raise BadRequest(
                f"{field}: {len(patches)} patches, grids of {int(sizes.sum())} patches, and {len(places)} placeholder "
                f"tokens of {unit} patches each; the three must have the same number of patches"
            )
        if layout.timed:  # tokens of times separate the frame pairs of a video
            grids = np.repeat(grids, grids[:, 0], axis=0)
            grids[:, 0] = 1
            sizes = grids.prod(axis=1)
        ends = np.cumsum(sizes)
        for start, end, grid in zip(ends - sizes, ends, grids.tolist(), strict=True):
            shown = places[start // unit : end // unit]
            if shown[-1] - shown[0] >= len(shown):
                raise BadRequest(f"{field}: the {len(shown)} placeholder tokens of a medium must follow each other")
            runs.append((int(shown[0]), patches[start:end], tuple(grid)))
    runs.sort(key=lambda run: run[0])
    try:
        whole = arrange([grid for *_, grid in runs], layout)
        packed = [
            patches if isinstance(patches, ShadowTensor) else arrange([grid], layout).packed(patches)
            for _, patches, grid in runs
        ]
        vision, feature_order = arranged(whole, np.concatenate(packed)), whole.feature_order
    except ValueError as error:
        raise BadRequest(f"grid_thw: {error}") from None
    feature_index = np.full(len(ids_T), -1, np.int32)
    start = 0
    for place, patches, _ in runs:
        count = len(patches) // unit
        feature_index[place : place + count] = feature_order[start : start + count]
        start += count
    positions_3T = np.ascontiguousarray(positions[:, : len(ids_T)])
    return ModelInput(ids_T, positions_3T, feature_index, delta + len(ids_T), vision)


def sampling_of(params: Json, begun: int) -> SamplingParams:
    """`sampling_params` of a body, with SGLang's defaults. `max_new_tokens` then includes the `begun` prefix tokens.
    Raises ValueError, naming the field, for settings that an embedded engine lacks, and for wrong types."""
    bias = params.get("logit_bias") or {}
    if not isinstance(bias, dict) or not all(id.isdecimal() and len(id) < 10 for id in bias):
        raise ValueError("logit_bias must be an object with a value for each of its token ids")
    if not all(isinstance(value, int | float) and value <= NEVER / 10 for value in bias.values()):
        raise ValueError(f"logit_bias: only {NEVER:g} is possible, which forbids a token")
    stop, top_k = params.get("stop_token_ids") or [], as_integer("top_k", params.get("top_k", -1))
    if not isinstance(stop, list) or any(type(id) is not int for id in stop):
        raise ValueError("stop_token_ids must be a list of integers")
    return SamplingParams(
        max_new_tokens=as_integer("max_new_tokens", params.get("max_new_tokens", 128)) + begun,
        temperature=as_number("temperature", params.get("temperature", 1.0)),
        top_p=as_number("top_p", params.get("top_p", 1.0)),
        top_k=0 if top_k == -1 else top_k,
        stop_ids=tuple(stop),
        forbidden_ids=tuple(int(id) for id in bias),
    )


# --- replies --------------------------------------------------------------------------------------


def finish_json(finish: FinishReason | None, ids: Sequence[int]) -> Json | None:
    if finish is None:
        return None
    if finish is FinishReason.ABORT:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    stopped = finish is FinishReason.STOP
    return {"type": finish.value, **({"matched": ids[-1] if ids else None} if stopped else {"length": len(ids)})}


def spans_json(versions: Sequence[int]) -> list[Json]:
    """`weight_versions` of a reply: the versions of runs of output tokens, each run from `start` to before `end`."""
    spans: list[Json] = []
    for token, version in enumerate(versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": token, "end": token})
        spans[-1]["end"] = token + 1
    return spans
