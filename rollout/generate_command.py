"""Generates text from a local checkpoint: `python -m models.generate --model DIR --prompt TEXT [--image FILE ...]`.

The text appears as it is generated. Sampling is what the checkpoint's generation_config.json says, greedy where it
says nothing; flags win. `<image>` and `<video>` in the prompt mark where the files belong; without marks they stand
before the text, images first. The checkpoint's chat template is applied if it has one (`--raw`: not). With `--json`,
one line at the end: prompt_ids, output_ids, logprobs (one an output id), text. Wrong input is one line on stderr and
exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from models.folder import read_json

from .listening import Parser, exit_status

if TYPE_CHECKING:
    from models.processing import Processor

    from .engine import SamplingParams, TokenChunk

MAX_TOKENS = 128  # used if neither the flag nor the model's positions set a limit
FILE = "generation_config.json"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoders write it for an incomplete character
WINDOW, KEPT = 32, 16  # tokens in the window: at most, in ordinary text, and after the window has moved
CHARACTER_BYTES = 4  # bytes of a UTF-8 character, at most
# Fields that change sampling and that the engine lacks, each with its neutral value.
UNKNOWN_TO_ENGINE = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "num_beams": 1,
}


def _number(
    kind: Callable[[str], Any], low: float | int, high: float | int = float("inf"), *, above: bool = False
) -> Callable[[str], Any]:
    """An argparse type: a number from `low` (`above`: greater than `low`) to `high`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not (low < value if above else low <= value) or not value <= high or value == float("inf"):
            whole = " whole" if kind is int else ""
            bounds = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < 1e30 else "")
            raise argparse.ArgumentTypeError(f"must be a{whole} number {bounds}, not {text}")
        return value

    return parse


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m models.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face checkpoint folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message, before the prompt")
    parser.add_argument("--raw", action="store_true", help="don't apply the chat template")
    parser.add_argument("--image", nargs="+", action="extend", default=[], metavar="FILE")
    parser.add_argument("--video", nargs="+", action="extend", default=[], metavar="FILE")
    positive, largest = _number(int, 1), 2**31 - 1
    media = parser.add_argument_group("images and videos (default: as the checkpoint says)")
    media.add_argument("--min-pixels", type=positive, metavar="N", help="of an image or a frame; smaller ones grow")
    media.add_argument("--max-pixels", type=positive, metavar="N", help="of an image or a frame; larger ones shrink")
    media.add_argument("--fps", type=_number(float, 0, above=True), metavar="X", help="frames read a second of video")
    media.add_argument("--max-frames", type=_number(int, 2), metavar="N", help="frames read of a video, at most")
    sampling = parser.add_argument_group("sampling (default: as generation_config.json says)")
    sampling.add_argument("--max-tokens", type=positive, metavar="N", help=f"at most so many (default {MAX_TOKENS})")
    sampling.add_argument("--temperature", type=_number(float, 0), metavar="X", help="0 is greedy")
    sampling.add_argument("--top-p", type=_number(float, 0, 1, above=True), metavar="X", help="1 is off")
    sampling.add_argument("--top-k", type=_number(int, 0, largest), metavar="N", help="0 is off")
    sampling.add_argument("--seed", type=int, default=0, help="the same seed draws the same tokens (default 0)")
    sampling.add_argument("--stop", nargs="+", action="extend", default=[], metavar="TEXT",
                          help="ends before the first of these strings")  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of weights and compute"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end instead of the text")
    options = parser.parse_args(arguments)
    if not options.prompt and not options.image and not options.video:
        parser.error("--prompt is empty: there is nothing to answer")
    if "" in options.stop:
        parser.error("--stop has an empty string, which would end every answer before it begins")
    if options.raw and options.system:
        parser.error("--system needs the chat template, which --raw leaves out")
    return options


def arrange(text: str, images: Sequence[str], videos: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The marked text and its media in the order of the marks; a text without marks gets them at its beginning.

    Raises ValueError if marks and files differ in number.
    """
    from models.processing.processor import MARK, MARKS

    files = {"image": images, "video": videos}
    if not MARK.search(text):
        text = "".join(mark * len(files[kind]) for mark, kind in MARKS.items()) + text
    marks = [MARKS[mark] for mark in MARK.findall(text)]
    for kind, given in files.items():
        if marks.count(kind) != len(given):
            raise ValueError(f"the prompt marks {marks.count(kind)} {kind}(s), but {len(given)} were given")
    left = {kind: iter(given) for kind, given in files.items()}
    return text, [(kind, next(left[kind])) for kind in marks]


class TextStream:
    """Decodes the tokens of a response as they come; `decode` turns ids into text. The first of the `stops` that
    appears ends the text, which does not include it.

    Two kinds of text are held back until more tokens come: bytes that are no complete character yet, and an end that
    may be the beginning of a stop string. Each step decodes only a window of the last tokens again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self.token_ids: list[int] = []  # up to the token that completed a stop string
        self.stopped = False
        self._pieces: list[str] = []  # the text returned so far
        self._start = 0  # the token with which the window begins
        self._shown = 0  # characters of the window's text that were returned

    @property
    def text(self) -> str:
        """The text returned so far."""
        return "".join(self._pieces)

    def add(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that has become certain since the last call."""
        before = len(self._pieces)
        # With stop strings, tokens are added one by one: those behind the end of a stop string do not count.
        for ids in [[id] for id in token_ids] if self._stops else [list(token_ids)]:
            if not self.stopped:
                self.token_ids += ids
                self._grow()
        return "".join(self._pieces[before:])

    def finish(self) -> str:
        """Returns the text that was held back: no more tokens will come."""
        if self.stopped:
            return ""
        text = self._decode(self.token_ids[self._start :])
        self._pieces.append(text[self._shown :])
        self._shown = len(text)
        return self._pieces[-1]

    def _grow(self) -> None:
        decoded = self._decode(self.token_ids[self._start :])
        text = decoded.rstrip(INCOMPLETE)
        ends = [at for at in (text.find(stop, self._shown) for stop in self._stops) if at >= 0]
        self.stopped = bool(ends)
        sure = min(ends) if ends else len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pieces.append(text[self._shown : sure])
        self._shown = max(sure, self._shown)
        if len(self.token_ids) - self._start > WINDOW:
            self._move_window(decoded)

    def _move_window(self, decoded: str) -> None:
        """Moves the window's start, if the text before it was returned and no character spans the cut. Enough text must
        follow to be sure of the character at the cut."""
        cut = len(self.token_ids) - KEPT
        head, tail = self._decode(self.token_ids[self._start : cut]), self._decode(self.token_ids[cut:])
        if head + tail == decoded and len(tail) >= CHARACTER_BYTES and len(head) <= self._shown:
            self._start, self._shown = cut, self._shown - len(head)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def run(options: argparse.Namespace) -> None:
    # processing first: a wrong file name is reported before any weight is read
    from models.processing import Processor

    processor = _with_bounds(Processor.load(options.model), options)
    text, media = options.prompt, []
    if processor.vision or options.image or options.video:  # a text model reads marks as words
        text, media = arrange(text, options.image, options.video)
    if options.raw:
        prompt = processor.prepare(text, media)
    else:
        prompt = processor.prepare_chat(text, media, system=options.system)
    folder = pathlib.Path(options.model)
    sampling = how_to_sample(folder, options.temperature, options.top_p, options.top_k)
    max_tokens = _max_tokens(options, len(prompt))
    if line := not_applied(folder):
        print(f"note: {line}", file=sys.stderr)

    import models

    from .jax_engine import generate_once

    answer = TextStream(processor.decode, options.stop)

    def show(text: str) -> None:
        if not options.json:
            print(text, end="", flush=True)

    def take(chunk: TokenChunk) -> bool:
        show(answer.add(chunk.token_ids))
        return answer.stopped

    sampling = dataclasses.replace(sampling, max_new_tokens=max_tokens, stop_ids=processor.eos_ids)
    dtype = None if options.dtype == "auto" else options.dtype
    response = asyncio.run(
        generate_once(models.load(options.model, dtype), prompt, sampling, seed=options.seed, on_chunk=take)
    )
    show(answer.finish() + "\n")
    if options.json:
        ids = answer.token_ids
        fields = {
            "prompt_ids": prompt.token_ids_T.tolist(),
            "output_ids": ids,
            "logprobs": response.logprobs[: len(ids)],
        }
        print(json.dumps(fields | {"text": answer.text}), flush=True)


def _with_bounds(processor: Processor, options: argparse.Namespace) -> Processor:
    processor = processor.configured(min_pixels=options.min_pixels or 0, max_pixels=options.max_pixels or 0)
    frames = processor.frames
    if options.fps is not None:
        frames = dataclasses.replace(frames, num_frames=0, fps=options.fps)
    if options.max_frames is not None:
        most = options.max_frames
        frames = dataclasses.replace(
            frames, num_frames=min(frames.num_frames, most), min_frames=min(frames.min_frames, most), max_frames=most
        )
    return dataclasses.replace(processor, frames=frames)


def how_to_sample(
    folder: pathlib.Path, temperature: float | None = None, top_p: float | None = None, top_k: int | None = None
) -> SamplingParams:
    """The sampling of a checkpoint folder; settings that are given replace the folder's.

    Values that its generation_config.json leaves out are off: no top-k, no top-p, temperature 1. Without
    `do_sample: true` sampling is greedy. Raises ValueError, naming the file, for impossible values, and for a
    `top_p` or `top_k` without effect because the result is greedy.
    """
    from .engine import SamplingParams

    said = read_json(folder / FILE)

    def number(name: str, otherwise: float | int, low: float | int, high: float | int) -> float | int:
        value = said.get(name)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{folder / FILE}: {name} must be a number from {low:g} to {high:g}, not {value!r}")
        return value

    if temperature is None:
        temperature = float(number("temperature", 1.0, 0, 1e6)) if said.get("do_sample") else 0.0
    if temperature == 0:
        for flag, value in (("--top-p", top_p), ("--top-k", top_k)):
            if value is not None:
                raise ValueError(f"{flag} does nothing at temperature 0, which is greedy: give --temperature, too")
        return SamplingParams(temperature=0.0)
    return SamplingParams(
        temperature=temperature,
        top_p=float(number("top_p", 1.0, 1e-6, 1) if top_p is None else top_p),
        top_k=int(number("top_k", 0, 0, 2**31 - 1) if top_k is None else top_k),
    )


def not_applied(folder: pathlib.Path) -> str:
    """One line that names the fields of generation_config.json that the engine leaves out; "" if there are none."""
    said = read_json(folder / FILE)
    wanted = [f"{name}={said[name]}" for name, off in UNKNOWN_TO_ENGINE.items() if said.get(name) not in (None, off)]
    return f"{folder / FILE}: the engine can't do this, so it is not applied: {', '.join(wanted)}" if wanted else ""


def _max_tokens(options: argparse.Namespace, prompt_tokens: int) -> int:
    """The number of tokens that may be generated. Raises ValueError if the model has too few positions."""
    from models.hf_config import read_config

    file = pathlib.Path(options.model) / "config.json"
    positions = read_config(read_json(file, needed=True)).text.max_position_embeddings
    if not prompt_tokens:
        raise ValueError("the prompt has no tokens: there is nothing to answer")
    room = positions - prompt_tokens
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens, the model {positions} positions (max_position_embeddings): "
            "nothing can be generated; shorten the prompt, or lower --max-pixels or --max-frames"
        )
    if options.max_tokens is not None and options.max_tokens > room:
        raise ValueError(
            f"{prompt_tokens} prompt tokens and --max-tokens {options.max_tokens} exceed the model's {positions} "
            f"positions (max_position_embeddings); at most --max-tokens {room} fit"
        )
    return options.max_tokens or min(MAX_TOKENS, room)


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(run, parse(arguments))
