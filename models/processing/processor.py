"""Turns text with media marks into a `ModelInput`: tokenises, decodes media, expands placeholders, places features."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ..config import Grid, JsonObject, ModelConfigError, PatchLayout
from ..folder import one_line, read_json, why_missing, write_json
from ..inputs import ModelInput, VisionInput, frame_bound
from ..registry import ARCHITECTURES, architecture_of, read_config
from ..shadow import ShadowTensor
from .media_file import Medium, PromptError, Source
from .patches import Arrangement, arrange
from .settings import (
    BICUBIC,
    PROCESSORS,
    TIMED_LAYOUT,
    TIMED_VIDEO_PIXELS,
    VIDEO_PIXELS,
    DecodeLimits,
    FrameSettings,
    PixelSettings,
    read_configs,
    read_frames,
    read_layout,
    read_pixels,
    write_configs,
)
from .tokens import find_template, load_tokenizer, named_tokens, read_settings, render

if TYPE_CHECKING:
    from .media import MediaSettings

MARKS = {"<image>": "image", "<video>": "video"}
MARK = re.compile("|".join(MARKS))
PADS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
MEDIA_TOKENS = (VISION_START, VISION_END, "<|vision_pad|>", *PADS.values())


@dataclasses.dataclass(frozen=True)
class PromptOutline:
    """A tokenised prompt with one placeholder for each of `blocks`, and its media, in order. `certain` is False if a
    number of frames comes from a video's header: decoding may show another number."""

    token_ids: np.ndarray  # int32, placeholders not repeated
    media: tuple[Medium, ...]
    merge_size: int  # patches along a side of the square that becomes one token
    certain: bool = True

    def __len__(self) -> int:
        """The number of tokens that the model sees."""
        return len(self.token_ids) - len(self.blocks) + self.num_patches // self.merge_size**2

    @property
    def blocks(self) -> list[tuple[str, Grid]]:
        """The kind and the grid of each part of the media that has a placeholder."""
        return [(medium.kind, grid) for medium in self.media for grid in medium.blocks]

    @property
    def grids(self) -> list[Grid]:
        return [medium.grid for medium in self.media]

    @property
    def num_patches(self) -> int:
        return sum(pairs * rows * columns for pairs, rows, columns in self.grids)

    @property
    def largest_frame(self) -> int:
        """The number of patches of the largest frame pair; 0 without media."""
        return max((rows * columns for _, rows, columns in self.grids), default=0)


class SequenceLayout(NamedTuple):
    """The fields of a `ModelInput` that its tokens and the sizes of its media determine."""

    positions_3T: np.ndarray
    feature_index_T: np.ndarray
    next_position: int


@dataclasses.dataclass(frozen=True)
class Processor:
    """Turns prompts into model inputs, and ids back into text. A processor is immutable, and can be pickled."""

    tokenizer: Tokenizer
    architecture: str = "qwen2_5_vl"  # a key of `ARCHITECTURES`
    layout: PatchLayout = dataclasses.field(default_factory=PatchLayout)
    image: PixelSettings = dataclasses.field(default_factory=PixelSettings)
    video: PixelSettings = VIDEO_PIXELS
    frames: FrameSettings = dataclasses.field(default_factory=FrameSettings)
    limits: DecodeLimits = dataclasses.field(default_factory=DecodeLimits)
    eos_ids: tuple[int, ...] = ()
    chat_template: str = ""
    tokenizer_config: str = "{}"  # tokenizer_config.json, with settings of older files
    generation_config: str = "{}"  # the content of generation_config.json

    @classmethod
    @one_line(ValueError)
    def load(cls, path: str | os.PathLike[str]) -> Processor:
        """The processor of a local checkpoint folder. Raises FileNotFoundError or ValueError, which name the file."""
        folder = pathlib.Path(path)
        if why := why_missing(path):
            raise FileNotFoundError(why)
        tokenizer_config = read_settings(folder)
        tokenizer = load_tokenizer(folder, tokenizer_config)
        config = read_json(folder / "config.json")
        image, video = read_configs(folder)
        if video.get("resample") not in (None, BICUBIC):
            raise ValueError(f"{folder}: videos are resized bicubically (resample 3), not {video['resample']}")
        architecture, layout = _kind(folder, config, image)
        return cls(
            tokenizer=tokenizer,
            architecture=architecture,
            layout=layout,
            image=read_pixels(image, PixelSettings()),
            video=read_pixels(video, TIMED_VIDEO_PIXELS if layout.timed else VIDEO_PIXELS),
            frames=read_frames(video, timed=layout.timed),
            eos_ids=_eos_ids(folder, config, tokenizer_config, tokenizer),
            chat_template=find_template(folder),
            tokenizer_config=json.dumps(tokenizer_config),
            generation_config=json.dumps(read_json(folder / "generation_config.json")),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes tokenizer, template and preprocessing files, which `load` and transformers read."""
        folder = pathlib.Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", json.loads(self.tokenizer_config))
        if self.chat_template:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        file = folder / "generation_config.json"
        generation = read_json(file) | json.loads(self.generation_config)
        if self.eos_ids and _ids(generation.get("eos_token_id")) != self.eos_ids:
            generation["eos_token_id"] = list(self.eos_ids)
        if generation:
            write_json(file, generation)
        if self.vision:
            write_configs(folder, self.layout, self.image, self.video, self.frames)

    def configured(
        self, *, min_pixels: int = 0, max_pixels: int = 0, num_frames: int = 0, limits: DecodeLimits | None = None
    ) -> Processor:
        """A processor with other bounds for images and videos; 0 and None leave the present values. A given bound moves
        a present opposite bound that it crosses. Raises ValueError if `min_pixels` is above `max_pixels`."""
        if min_pixels > max_pixels > 0:
            raise ValueError(f"min_pixels={min_pixels} is above max_pixels={max_pixels}")

        def bounded(pixels: PixelSettings) -> PixelSettings:
            low = min_pixels or min(pixels.min_pixels, max_pixels or pixels.min_pixels)
            high = max_pixels or max(pixels.max_pixels, low)
            return dataclasses.replace(pixels, min_pixels=low, max_pixels=high)

        frames = dataclasses.replace(self.frames, num_frames=num_frames) if num_frames else self.frames
        return dataclasses.replace(
            self, image=bounded(self.image), video=bounded(self.video), frames=frames, limits=limits or self.limits
        )

    @property
    def vision(self) -> bool:
        """Says whether the model reads media."""
        return ARCHITECTURES[self.architecture].rope_index is not None

    @functools.cached_property
    def settings(self) -> MediaSettings:
        from .media import MediaSettings  # imports decoders

        return MediaSettings(self.layout, self.image, self.video, self.frames, self.limits)

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """The ids that stand for media and must never be generated; empty if the vocabulary has none."""
        ids = (self.tokenizer.token_to_id(token) for token in MEDIA_TOKENS)
        return tuple(id for id in ids if id is not None)

    def encode(self, text: str, *, ends: bool = False) -> list[int]:
        """The token ids of a text; `ends` adds the tokens that the tokenizer puts before and behind a text.
        Raises PromptError for characters that the vocabulary can't write."""
        try:
            return self.tokenizer.encode(text, add_special_tokens=ends).ids
        except Exception as error:  # the library raises bare Exceptions
            plain = re.sub(r"<\|\w+\|>", "", text)
            unknown = sorted({character for character in plain if self.tokenizer.token_to_id(character) is None})
            message = f"cannot be written with this vocabulary: {unknown} ({error})"
            raise PromptError(message, "characters that the vocabulary lacks") from error

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def prepare(self, text: str, media: Sequence[tuple[str, Source]] = ()) -> ModelInput:
        """The model input of `text`, in which each `<image>` or `<video>` stands for one of `media`, in order. Each of
        `media` is a pair: "image" or "video", and a path or the bytes of an encoded file. Raises PromptError if marks
        and media differ, MediaError for a file that can't be used."""
        return self.prepare_ids(self.tokenise(text, media), media)

    def tokenise(self, text: str, media: Sequence[tuple[str, Source]] = ()) -> list[int]:
        """The ids of `text`, with one placeholder for each of `media`, which are not read. Raises PromptError."""
        self._check_marks(text, media)
        if media:
            text = MARK.sub(lambda mark: f"{VISION_START}{PADS[MARKS[mark[0]]]}{VISION_END}", text)
        return self.encode(text, ends=True)

    def prepare_chat(self, text: str, media: Sequence[tuple[str, Source]] = (), *, system: str = "") -> ModelInput:
        """The model input of `text` as the user's message in the checkpoint's chat template, if any: see `prepare`.
        Raises PromptError for a `system` message if there is no template."""
        return self.prepare_ids(self.tokenise_chat(text, media, system=system), media)

    def tokenise_chat(self, text: str, media: Sequence[tuple[str, Source]] = (), *, system: str = "") -> list[int]:
        """The ids of `text` as the user's message in the checkpoint's chat template, if any: see `tokenise`."""
        if not self.chat_template:
            if isinstance(templates := json.loads(self.tokenizer_config).get("chat_template"), list):
                names = ", ".join(str(entry["name"]) for entry in templates)
                raise PromptError(f"of the chat templates {names} none is the default one", "no default chat template")
            if system:
                message = "this checkpoint has no chat template, which a system message needs"
                raise PromptError(message, "no chat template")
            return self.tokenise(text, media)
        messages: list[JsonObject] = [{"role": "system", "content": system}] if system else []
        return self.tokenise_messages([*messages, {"role": "user", "content": self.content(text, media)}])

    def content(self, text: str, media: Sequence[tuple[str, Source]] = ()) -> str | list[dict[str, str]]:
        """The content of a message, as chat templates read it. Raises PromptError if marks and media differ."""
        self._check_marks(text, media)
        if not media:
            return text  # templates of text models accept strings only
        parts = [part for part in re.split(f"({MARK.pattern})", text) if part]
        return [{"type": MARKS[part]} if part in MARKS else {"type": "text", "text": part} for part in parts]

    def tokenise_messages(self, messages: Sequence[JsonObject]) -> list[int]:
        """The ids of a conversation up to the assistant's next answer, in the chat template. Raises PromptError."""
        rendered = self.render_messages(messages)
        bos = named_tokens(json.loads(self.tokenizer_config)).get("bos_token")
        # As in transformers, `ends` is set for models with vision whose text does not begin with the bos token.
        return self.encode(rendered, ends=self.vision and not (bos and rendered.startswith(bos)))

    def render_messages(self, messages: Sequence[JsonObject]) -> str:
        """The text of a conversation up to the assistant's next answer. Raises PromptError."""
        return render(self.chat_template, messages, **named_tokens(json.loads(self.tokenizer_config)))

    def _check_marks(self, text: str, media: Sequence[tuple[str, Source]]) -> None:
        if not self.vision and not media:
            return  # a text model reads marks as words
        marks = [MARKS[mark] for mark in MARK.findall(text)]
        kinds = [kind for kind, _ in media]
        if wrong := set(kinds) - set(PADS):
            raise PromptError(f"media are of kind image or video, not {', '.join(sorted(wrong))}")
        if marks != kinds:
            raise PromptError(
                f"the text marks {len(marks)} media ({', '.join(marks) or 'none'}), "
                f"{len(kinds)} were given ({', '.join(kinds) or 'none'}); it needs one mark for each, in order"
            )
        self._check_vision(media)

    def _check_vision(self, media: Sequence[object]) -> None:
        if media and not self.vision:
            raise PromptError("this checkpoint reads text only, but media were given", "media for a text-only model")

    def outline(
        self, token_ids: Sequence[int], media: Sequence[tuple[str, Source]] = (), *, count: bool = False
    ) -> PromptOutline:
        """The outline of the input that `prepare_ids` returns, read from the headers of `media`. `count` reads all
        packets of videos, without decoding them. Raises PromptError, or MediaError for a file that can't be read."""
        self._check_placeholders(token_ids, [kind for kind, _ in media])
        found = [self.settings.glance(kind, source, count=count) for kind, source in media]
        return self.outline_of(token_ids, [medium for medium, _ in found], certain=all(sure for _, sure in found))

    def outline_of(self, token_ids: Sequence[int], media: Sequence[Medium], *, certain: bool = True) -> PromptOutline:
        """The outline of these ids and media. Raises PromptError if ids and media don't fit together."""
        ids = np.array(token_ids, np.int32)
        self._check_placeholders(ids, [medium.kind for medium in media])
        if any(medium.times for medium in media):
            ids = self._with_times(ids, media)
        return PromptOutline(ids, tuple(media), self.layout.spatial_merge_size, certain)

    def _with_times(self, token_ids: np.ndarray, media: Sequence[Medium]) -> np.ndarray:
        """The ids with a time and a placeholder for each frame pair of a video that has times. A time is written
        `<0.5 seconds>`; the tokens of a medium's start and end enclose the placeholder. As in transformers, another
        pair of start and end encloses the complete video."""
        pad_of = self._pads()
        start, end = self._media_token(VISION_START), self._media_token(VISION_END)
        parts, done = [], 0
        for slot, medium in zip(np.flatnonzero(_are_among(token_ids, pad_of.values())).tolist(), media, strict=True):
            if medium.times:
                parts.append(token_ids[done:slot])
                for time in medium.times:
                    parts.append([*self.encode(f"<{time:.1f} seconds>"), start, pad_of[medium.kind], end])
                done = slot + 1
        return np.concatenate([*parts, token_ids[done:]]).astype(np.int32)

    def _pads(self) -> dict[str, int]:
        """The placeholder of each kind of medium. Raises PromptError if the vocabulary lacks a placeholder."""
        return {kind: self._media_token(token) for kind, token in PADS.items()}

    def _media_token(self, token: str) -> int:
        if (token_id := self.tokenizer.token_to_id(token)) is None:
            raise PromptError(f"the tokenizer has no {token}", "no token for media")
        return token_id

    def _check_placeholders(self, token_ids: Sequence[int] | np.ndarray, kinds: Sequence[str]) -> None:
        """Raises PromptError if the placeholders do not stand for media of these `kinds`, in order."""
        self._check_vision(kinds)
        if not self.vision:
            return
        pad_of, ids = self._pads(), np.asarray(token_ids)
        slots = np.flatnonzero(_are_among(ids, pad_of.values()))
        if ids[slots].tolist() != [pad_of[kind] for kind in kinds]:
            raise PromptError(
                f"the tokenised prompt has {len(slots)} media placeholders for {len(kinds)} media: "
                "does the text spell out a placeholder token, or the template drop a medium?"
            )

    def prepare_ids(self, token_ids: Sequence[int], media: Sequence[tuple[str, Source]] = ()) -> ModelInput:
        """The model input of a tokenised prompt that holds one placeholder for each medium, in order. Raises
        PromptError if placeholders and media differ, MediaError for a file that can't be used."""
        self._check_placeholders(token_ids, [kind for kind, _ in media])
        found, patches_PX = self._loaded(media)
        return self.lay_out(self.outline_of(token_ids, found), patches_PX)

    def prepare_response(
        self, token_ids: Sequence[int], media: Sequence[tuple[str, Source]] = (), *, start: int = 0
    ) -> ModelInput:
        """The model input of a response: see `response_layout`. Raises MediaError for a file that can't be used."""
        return self.lay_out_response(token_ids, *self._loaded(media), start=start)

    def lay_out_response(
        self,
        token_ids: Sequence[int],
        media: Sequence[Medium],
        patches_PX: np.ndarray | ShadowTensor | None,
        *,
        start: int = 0,
    ) -> ModelInput:
        """The model input of a response, from the patches of its media (as `lay_out`): see `response_layout`."""
        layout = self.response_layout(token_ids, media, start=start)
        vision = None if patches_PX is None else arranged(arrange([m.grid for m in media], self.layout), patches_PX)
        return ModelInput(np.asarray(token_ids, np.int32), *layout, vision)

    def _loaded(self, media: Sequence[tuple[str, Source]]) -> tuple[list[Medium], np.ndarray | None]:
        """The media, and the patches of all, in order."""
        loaded = [(kind, *self.settings.load(kind, source)) for kind, source in media]
        parts = [self.settings.normalised(kind, patches) for kind, _, patches in loaded]
        return [medium for _, medium, _ in loaded], (np.concatenate(parts) if parts[1:] else next(iter(parts), None))

    def lay_out(
        self, outline: PromptOutline, patches_PX: np.ndarray | ShadowTensor | None = None, *, start: int = 0
    ) -> ModelInput:
        """The model input of a prompt or an observation. `patches_PX` are the patches of its media, or their shadow,
        each medium in the window order of `patches.py`. The first token has the rotary position `start`."""
        ids = outline.token_ids
        if not outline.media:
            return ModelInput(ids, *self.response_layout(ids, start=start))
        merge = outline.merge_size**2
        repeats = np.ones(len(ids), np.int64)
        repeats[_are_among(ids, self._pads().values())] = [math.prod(grid) // merge for _, grid in outline.blocks]
        tokens_T = np.repeat(ids, repeats)
        layout = self.response_layout(tokens_T, outline.media, start=start)
        assert patches_PX is not None
        return ModelInput(tokens_T, *layout, arranged(arrange(outline.grids, self.layout), patches_PX))

    def response_layout(
        self, token_ids_T: Sequence[int] | np.ndarray, media: Sequence[Medium] = (), *, start: int = 0
    ) -> SequenceLayout:
        """The layout of tokens whose first has the rotary position `start`, such as a response, with a run of
        placeholders for each of `media`, in order (else ValueError). The layout of a sequence is that of its parts,
        each from the `next_position` of the part before, with feature indices from 0 on."""
        self._check_vision(media)
        tokens_T = np.asarray(token_ids_T, np.int32)
        pad_of = self._pads() if self.vision else {}
        shown_T = _are_among(tokens_T, pad_of.values()) if self.vision else np.zeros(len(tokens_T), bool)
        _check_runs(tokens_T, shown_T, [pad_of[medium.kind] for medium in media for _ in medium.blocks])
        feature_index_T = np.full(len(tokens_T), -1, np.int32)
        rope_index = ARCHITECTURES[self.architecture].rope_index
        if rope_index is None or not media:
            next_position = start + len(tokens_T)
            positions_T = np.arange(start, next_position, dtype=np.int32)
            return SequenceLayout(np.tile(positions_T, (3, 1)), feature_index_T, next_position)
        positions_3T, next_position = rope_index(
            tokens_T,
            [grid for medium in media if medium.kind == "image" for grid in medium.blocks],
            [grid for medium in media if medium.kind == "video" for grid in medium.blocks],
            # one entry for each block; the positions of a block with one frame pair do not depend on its entry
            [medium.seconds_per_grid for medium in media if medium.kind == "video" for _ in medium.blocks],
            image_token_id=pad_of["image"],
            video_token_id=pad_of["video"],
            spatial_merge_size=self.layout.spatial_merge_size,
            tokens_per_second=self.layout.tokens_per_second,
            first_position=start,
        )
        feature_index_T[shown_T] = arrange([medium.grid for medium in media], self.layout).feature_order
        return SequenceLayout(positions_3T, feature_index_T, next_position)


def arranged(arrangement: Arrangement, packed_PX: np.ndarray | ShadowTensor) -> VisionInput:
    """The vision tower's input, from patches in window order."""
    return VisionInput(
        packed_PX,
        arrangement.positions_P2,
        arrangement.frame_segments_P,
        arrangement.window_segments_P,
        frame_bound=frame_bound(arrangement.frame_segments_P),
    )


def pack_patches(
    patches_PX: np.ndarray, grid_thw: Sequence[Sequence[int]] | np.ndarray, layout: PatchLayout
) -> tuple[VisionInput, np.ndarray]:
    """The vision tower's input, from patches of all media in raster order, and `Arrangement.feature_order`. Raises
    ValueError if patches and grids do not fit together."""
    arrangement = arrange(grid_thw, layout)
    return arranged(arrangement, arrangement.packed(patches_PX)), arrangement.feature_order


def _are_among(token_ids: np.ndarray, few: Iterable[int]) -> np.ndarray:
    """`np.isin` for few ids, in a fraction of its time."""
    return functools.reduce(np.logical_or, [token_ids == token_id for token_id in few])


def _check_runs(tokens_T: np.ndarray, shown_T: np.ndarray, pads: Sequence[int]) -> None:
    """Raises ValueError if the runs of placeholders, which `shown_T` marks, do not consist of `pads`, in order."""
    starts = np.flatnonzero(shown_T & (np.diff(tokens_T, prepend=-1) != 0))
    runs = tokens_T[starts].tolist()
    if runs != list(pads):
        pairs = enumerate(itertools.zip_longest(runs, pads))
        number, (run, pad) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        where = f"at token {starts[number]} " if number < len(starts) else ""
        raise ValueError(
            f"{len(runs)} runs of placeholders for {len(pads)} parts of media: run {number} {where}has the placeholder "
            f"{run}, but the media need {pad} there (None: no more)"
        )


def _kind(folder: pathlib.Path, config: JsonObject, image: JsonObject) -> tuple[str, PatchLayout]:
    """(architecture, layout) of config.json. Without config.json, a model counts as reading media if `image` has
    settings. Raises ValueError if config.json is not supported or contradicts preprocessing settings."""
    if not config:
        if image.get("processor_class") == PROCESSORS[True][0]:
            return "qwen3_vl", read_layout(image, TIMED_LAYOUT)
        return "qwen2_5_vl" if image else "qwen2", read_layout(image, PatchLayout())
    try:
        architecture = architecture_of(config)
        vision = read_config(config).vision if "vision_config" in config else None
    except ModelConfigError as error:
        raise ModelConfigError(f"{folder / 'config.json'}: {error}") from None
    if vision is None:
        return architecture, read_layout(image, PatchLayout())
    layout = PatchLayout.of(vision)
    said = read_layout(image, layout)
    if said != layout:
        raise ValueError(f"{folder}: preprocessor_config.json ({said}) contradicts config.json ({layout})")
    return architecture, layout


def _eos_ids(
    folder: pathlib.Path, config: JsonObject, tokenizer_config: JsonObject, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """The ids that end an answer, by generation_config.json, else by config.json, else the tokenizer's end token."""
    said = (
        read_json(folder / "generation_config.json").get("eos_token_id"),
        config.get("eos_token_id"),
        (config.get("text_config") or {}).get("eos_token_id"),
        tokenizer.token_to_id(named_tokens(tokenizer_config).get("eos_token", "")),
    )
    try:
        return _ids(next((ids for ids in said if ids is not None), None))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _ids(entry: Any) -> tuple[int, ...]:
    """The ids of an `eos_token_id`: an id, a list of ids, or None. Raises ValueError for anything else."""
    ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if not all(type(id) is int and 0 <= id < 1 << 31 for id in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {reprlib.repr(entry)}")
    return tuple(ids)
