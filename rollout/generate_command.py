"""Generates text from a local checkpoint: `python -m models.generate --model DIR --prompt TEXT [--image FILE ...]`.

The text appears as it is generated. Sampling follows the checkpoint's generation_config.json (greedy without
`do_sample`); flags replace its values. `<image>` and `<video>` in the prompt mark where the files belong; without marks
the files stand before the text, images first. A chat template of the checkpoint is applied, unless `--raw` is given.
`--json` prints one line at the end, with prompt_ids, output_ids, logprobs (one for each output id) and text. Wrong
input gives one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from models.folder import read_json

from .listening import Parser, exit_status, number

if TYPE_CHECKING:
    from models.processing import Processor

    from .engine import SamplingParams, TokenChunk

MAX_TOKENS = 128  # the most tokens of a response without `--max-tokens`; fewer if the model has fewer positions left
FILE = "generation_config.json"
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
    positive, largest = number(int, 1), 2**31 - 1
    media = parser.add_argument_group(
        "images and videos (default: as the checkpoint says)",
        "Qwen3-VL bounds the pixels of all frames of a video together, other models those of each frame",
    )
    for flag, kind, sign, what in (
        ("--min-pixels", positive, "N", "the fewest pixels of an image or frame; smaller ones are enlarged"),
        ("--max-pixels", positive, "N", "the most pixels of an image or frame; larger ones are reduced"),
        ("--fps", number(float, 0, above=True), "X", "frames read from each second of a video"),
        ("--max-frames", number(int, 2), "N", "the most frames read from a video"),
    ):
        media.add_argument(flag, type=kind, metavar=sign, help=what)
    sampling = parser.add_argument_group("sampling (default: as generation_config.json says)")
    sampling.add_argument(
        "--max-tokens", type=positive, metavar="N", help=f"the most tokens of an answer (default {MAX_TOKENS})"
    )
    sampling.add_argument("--temperature", type=number(float, 0), metavar="X", help="0 is greedy")
    sampling.add_argument("--top-p", type=number(float, 0, 1, above=True), metavar="X", help="1 is off")
    sampling.add_argument("--top-k", type=number(int, 0, largest), metavar="N", help="0 is off")
    sampling.add_argument("--seed", type=int, default=0, help="the same seed gives the same tokens (default 0)")
    sampling.add_argument("--stop", nargs="+", action="extend", default=[], metavar="TEXT",
                          help="an answer ends before the first of these strings")  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="dtype of weights and compute"
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
    """The marked text, and its media in the order of the marks; a text without marks gets its marks at the beginning.
    Raises ValueError if marks and files differ in number."""
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
    """The text of a response as its tokens arrive, up to the first stop string. Text that later tokens may change is
    held back: bytes that are no complete character yet, and an end that may be the beginning of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._decoding = DecodeStream(skip_special_tokens=True)
        self._held = ""  # decoded text that may be the beginning of a stop string
        self.token_ids: list[int] = []  # up to the token that completed a stop string
        self.text = ""  # the text returned so far
        self.stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """Adds tokens. Returns the new text that later tokens can't change."""
        before = len(self.text)
        for id in token_ids:
            if self.stopped:
                break
            self.token_ids.append(id)
            self._held += self._decoding.step(self._tokenizer, id) or ""
            ends = [at for at in map(self._held.find, self._stops) if at >= 0]
            self.stopped = bool(ends)
            held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
            sure = min(ends, default=len(self._held) - held)
            self.text, self._held = self.text + self._held[:sure], self._held[sure:]
        return self.text[before:]

    def finish(self) -> str:
        """Returns the text that was held back, after the last token."""
        before = len(self.text)
        if not self.stopped:
            self.text = self._tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return self.text[before:]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def run(options: argparse.Namespace) -> None:
    # Prompt and files are processed first, so that a wrong file name is reported before any weight is read.
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

    answer = TextStream(processor.tokenizer, options.stop)

    def show(text: str) -> None:
        if not options.json:
            print(text, end="", flush=True)

    def take(chunk: TokenChunk) -> bool:
        show(answer.add(chunk.token_ids))
        return answer.stopped

    sampling = dataclasses.replace(sampling, max_new_tokens=max_tokens, stop_ids=processor.eos_ids)
    model = models.load(options.model, None if options.dtype == "auto" else options.dtype)
    response = asyncio.run(generate_once(model, prompt, sampling, seed=options.seed, on_chunk=take))
    show(answer.finish() + "\n")
    if options.json:
        ids = answer.token_ids
        fields = {
            "prompt_ids": prompt.token_ids_T.tolist(),
            "output_ids": ids,
            "logprobs": response.logprobs[: len(ids)],
            "text": answer.text,
        }
        print(json.dumps(fields), flush=True)


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
    """The sampling settings of a checkpoint folder; arguments that are not None replace them. Values that the
    generation_config.json leaves out are off. Without `do_sample: true`, sampling is greedy unless `temperature` is
    given. Raises ValueError, naming flag or file, for impossible values, and for a greedy `top_p` or `top_k`."""
    from .engine import SamplingParams
    from .requests import as_integer, as_number, checked_sampling

    said = read_json(folder / FILE)
    flags = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in flags.items() if value is not None}
    values = {name: said[name] for name in flags if said.get(name) is not None}
    if isinstance(values.get("top_k"), float) and values["top_k"].is_integer():
        values["top_k"] = int(values["top_k"])
    values |= ({} if said.get("do_sample") else {"temperature": 0.0}) | given
    if values.get("temperature") == 0:
        for name in given.keys() - {"temperature"}:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} does nothing at temperature 0, which is greedy: give --temperature, too")
        return SamplingParams(temperature=0.0)
    try:
        typed: dict[str, Any] = {
            name: (as_integer if name == "top_k" else as_number)(name, value) for name, value in values.items()
        }
        return checked_sampling(SamplingParams(**typed), vocabulary=1)  # there are no ids to check yet
    except ValueError as error:
        flag = next((name for name in given if str(error).startswith(f"{name}=")), None)
        raise ValueError(f"--{flag.replace('_', '-')}: {error}" if flag else f"{folder / FILE}: {error}") from None


def not_applied(folder: pathlib.Path) -> str:
    """One line that names the fields of generation_config.json that the engine leaves out; "" if there are none."""
    said = read_json(folder / FILE)
    wanted = [f"{name}={said[name]}" for name, off in UNKNOWN_TO_ENGINE.items() if said.get(name) not in (None, off)]
    return f"{folder / FILE}: the engine does not support {', '.join(wanted)}, and leaves this out" if wanted else ""


def _max_tokens(options: argparse.Namespace, prompt_tokens: int) -> int:
    from models.registry import read_config

    file = pathlib.Path(options.model) / "config.json"
    positions = read_config(read_json(file, needed=True)).text.max_position_embeddings
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
