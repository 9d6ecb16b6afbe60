"""Writes the prompts of configs/qwen3_vl_8b.py:agent: python scripts/agent_manifests.py [FOLDER]

FOLDER is `agent` by default. `babyai/` and `miniwob/` in it get `train.jsonl` and `eval.jsonl`: an answer has the
arguments of the environment. Rooms of BabyAI differ by their size and their number of things; those held out have more
things than any room of training, and are seeded by the run. Pages of MiniWoB are seeded by the record, so that no page
is in both files. Its tasks are those that 8 turns can solve by clicks and keys, and whose pages don't change with time.
"""

import json
import pathlib
import sys
from collections.abc import Iterable

ROOMS = "You are the red triangle, whose tip is in front. Answer each turn with one to three moves, and nothing else: \
left or right to turn, forward for a step. The mission is done in front of the thing that it names."
PAGES = "Do the task at the top of the web page."
SIZES = (6, 7, 8)  # fields of a room's side, its walls included; MiniGrid searches long for a way through smaller ones
THINGS = {"train": (1, 2, 3, 4), "eval": (5, 6)}  # in a room
TASKS = [
    "click-test",
    "click-test-2",
    "click-button",
    "click-button-sequence",
    "click-link",
    "click-dialog",
    "click-dialog-2",
    "click-tab",
    "click-tab-2-easy",
    "click-option",
    "click-checkboxes",
    "click-color",
    "click-shape",
    "click-widget",
    "focus-text",
    "focus-text-2",
    "enter-text",
    "enter-text-dynamic",
    "enter-password",
    "login-user",
    "identify-shape",
    "grid-coordinate",
    "count-shape",
    "simple-arithmetic",
    "read-table",
    "drag-box",
]
COUNTS = {"train": (2000, 80), "eval": (160, 6)}  # rooms, and pages of each task
EVAL_SEEDS = 1_000_000  # held-out pages have seeds from this one on


def rooms(part: str) -> Iterable[dict[str, object]]:
    kinds = [(side, things) for side in SIZES for things in THINGS[part]]
    for number in range(COUNTS[part][0]):
        side, things = kinds[number % len(kinds)]
        yield {"room_size": side, "num_dists": things}


def pages(part: str) -> Iterable[dict[str, object]]:
    begin = EVAL_SEEDS * (part == "eval")
    for number in range(COUNTS[part][1] * len(TASKS)):
        seed, task = divmod(number, len(TASKS))
        yield {"task": TASKS[task], "seed": begin + seed}


def main(folder: pathlib.Path) -> None:
    for source, prompt, arguments in (("babyai", ROOMS, rooms), ("miniwob", PAGES, pages)):
        (folder / source).mkdir(parents=True, exist_ok=True)
        for part in COUNTS:
            records = (
                {"id": f"{part}-{number:05d}", "prompt": prompt, "answer": json.dumps(answer)}
                for number, answer in enumerate(arguments(part))
            )
            lines = [json.dumps(record) + "\n" for record in records]
            (folder / source / f"{part}.jsonl").write_text("".join(lines))
            print(f"{folder / source / part}.jsonl: {len(lines)} records")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "agent"))
