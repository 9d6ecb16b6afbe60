"""Generates text from a local checkpoint: `python -m models.generate --model DIR --prompt TEXT [--image FILE ...]`.

Greedy unless a temperature is given. `<image>` and `<video>` in the prompt mark where the files belong; without marks
they stand before the text, images first. The checkpoint's chat template is applied if it has one (`--raw`: not).
With `--json`, one line: prompt_ids, output_ids, logprobs (one an output id), text. Wrong input is one line on
stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face checkpoint folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--image", nargs="+", action="extend", default=[], metavar="FILE")
    parser.add_argument("--video", nargs="+", action="extend", default=[], metavar="FILE")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="at most so many (default %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of weights and compute"
    )
    parser.add_argument("--raw", action="store_true", help="don't apply the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the text")
    options = parser.parse_args(arguments)
    if options.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, not {options.max_tokens}")
    if options.temperature < 0:
        parser.error(f"--temperature must not be negative, not {options.temperature}")
    return options


def arrange(text: str, images: Sequence[str], videos: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The marked text and its media in the order of the marks; marks are put in front where the text has none.

    Raises ValueError where marks and files differ in number.
    """
    from .processing.processor import MARK, MARKS

    marks = [MARKS[mark] for mark in MARK.findall(text)]
    if not marks:
        text = "<image>" * len(images) + "<video>" * len(videos) + text
        return text, [("image", path) for path in images] + [("video", path) for path in videos]
    for kind, files in (("image", images), ("video", videos)):
        if marks.count(kind) != len(files):
            raise ValueError(f"the prompt marks {marks.count(kind)} {kind}(s), but {len(files)} were given")
    files = {"image": iter(images), "video": iter(videos)}
    return text, [(kind, next(files[kind])) for kind in marks]


def run(options: argparse.Namespace) -> None:
    # processing first: a wrong file name is reported before any weight is read
    from .processing import Processor

    processor = Processor.load(options.model)
    text, media = arrange(options.prompt, options.image, options.video)
    prompt = processor.prepare(text, media) if options.raw else processor.prepare_chat(text, media)

    import models

    from .decode import generate

    model = models.load(options.model, None if options.dtype == "auto" else options.dtype)
    result = generate(
        model,
        prompt,
        max_new_tokens=options.max_tokens,
        stop_ids=processor.eos_ids,
        temperature=options.temperature,
        seed=options.seed,
    )
    answer = processor.decode(result.token_ids)
    if options.json:
        answer = json.dumps(
            {
                "prompt_ids": prompt.token_ids_T.tolist(),
                "output_ids": list(result.token_ids),
                "logprobs": list(result.logprobs),
                "text": answer,
            }
        )
    print(answer, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        run(options)
    except (ValueError, OSError) as error:  # bad media, prompts, configurations and checkpoints are ValueErrors
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
