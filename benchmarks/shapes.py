"""Counts the programs that a run compiles, and the padding of their buffers, in random steps of images and videos.

    python benchmarks/shapes.py                                     the mixes of ../shared, all strategies: minutes
    python benchmarks/shapes.py --mixes FILE --steps 100            other mixes: a JSON list of cases with `name` and
                                                                    `sequences` (`frames`, `vision_tokens`,
                                                                    `prompt_tokens`, `response_tokens`)
    python benchmarks/shapes.py --strategy fsdp --devices 32        one strategy, another number of devices

A step is `--sequences` prompts sampled from all sequences of a mix, each with one response, for `--devices` devices.
`Composer.outline` lays them out as in training, but writes no arrays; no model is run. Each mix is a run of its own
that begins without compiled shapes.

Prints one JSON line. For each strategy the worst of the mixes: `programs` (different shapes in all steps),
`new_after_half` (`new_after_500` for 1,000 steps), `padding` (the share of the token buffers' cells that no token uses,
over all steps), `patch_padding` (the same for the vision tower's buffers), `all_to_all_padding` (the mean share of
padding in the traffic of the device that sends most), `microbatches` (a step). `balance` is the largest over the mean
attention work of a device: the mean over all microbatches, the worst of the freely planned ones, and the worst of those
planned for compiled shapes. Under `odc`, `balance` is that of the predicted work of complete steps, and
`balance_over_bound` the worst balance over the bound that unsplit sequences set. `mixes` has all figures for each mix.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import numpy as np
from common import ROOT, cores

from fluxjax.base.types import Group, PreparedPrompt, Prompt, Response, Reward, Sample
from fluxjax.batch import composer
from fluxjax.batch.composer import Composer
from fluxjax.batch.share import Outline
from fluxjax.batch.work import estimate
from fluxjax.config import STRATEGIES, Config
from models.config import RopeConfig, TextConfig, VisionConfig
from models.inputs import ModelInput, VisionInput, frame_bound
from sharding.planner.plan import least_load
from sharding.spread.buffers import SizedLayout

MIXES = ROOT.parent / "shared" / "data" / "lengths" / "flexrl_mixes.json"
# Qwen2.5-VL-7B: the heads bound the degrees, the sizes weigh work.
TEXT = TextConfig(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rope=RopeConfig(mrope_section=(16, 24, 24)),
)
VISION = VisionConfig(
    hidden_size=1280,
    intermediate_size=3420,
    depth=32,
    num_heads=16,
    out_hidden_size=3584,
    full_attention_layers=(7, 15, 23, 31),
)


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error for mixes or settings that cannot work."""
    options = _parser().parse_args(argv)
    try:
        pools = read(pathlib.Path(options.mixes))
        result = measure(pools, options)
    except (OSError, ValueError) as error:  # damaged JSON is a ValueError
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def read(path: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """The sequences of each mix, over all its cases. Raises ValueError, naming the path, for a file that is missing or
    holds no mixes."""
    try:
        pools: dict[str, list[dict[str, Any]]] = {}
        for case in json.loads(path.read_text()):
            for sequence in case["sequences"]:
                sizes = {name: int(sequence[name]) for name in FIELDS}
                pools.setdefault(case["name"], []).append(sizes)
    except OSError as error:
        raise ValueError(f"no mixes at {path}: {error.strerror}; give a file with --mixes") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no mixes: {type(error).__name__} {error}") from error
    if not pools:
        raise ValueError(f"{path} holds no mixes: it is empty")
    return pools


FIELDS = ("frames", "vision_tokens", "prompt_tokens", "response_tokens")


def measure(pools: Mapping[str, Sequence[dict[str, int]]], options: argparse.Namespace) -> dict[str, Any]:
    """Runs the whole benchmark. Raises ValueError (a ConfigError is one) for settings that cannot work."""
    names = options.mix or list(pools)
    if unknown := sorted(set(names) - set(pools)):
        raise ValueError(f"no mix {unknown[0]!r} in {options.mixes}; there are {', '.join(pools)}")
    runs = [(strategy, name) for strategy in options.strategy or STRATEGIES for name in names]
    started = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(
        min(cores(), len(runs)), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        pending = {run: pool.submit(simulate, run[0], pools[run[1]], options.steps, settings(options)) for run in runs}
        results: dict[str, dict[str, Any]] = {}
        for (strategy, name), future in pending.items():
            results.setdefault(strategy, {})[name] = future.result()
            print(f"{strategy} {name}: {results[strategy][name]}", file=sys.stderr, flush=True)
    return {
        "benchmark": "shapes",
        **dataclasses.asdict(settings(options)),
        "steps": options.steps,
        "seconds": round(time.perf_counter() - started),
        **{strategy: _worst(mixes) | {"mixes": mixes} for strategy, mixes in results.items()},
    }


@dataclasses.dataclass(frozen=True)
class Settings:
    devices: int
    sequences: int
    tokens_a_device: int
    max_shapes: int
    seed: int


def settings(options: argparse.Namespace) -> Settings:
    return Settings(*(getattr(options, field.name) for field in dataclasses.fields(Settings)))


def _worst(mixes: Mapping[str, dict[str, float]]) -> dict[str, float]:
    return {name: max(figures[name] for figures in mixes.values()) for name in next(iter(mixes.values()))}


def simulate(strategy: str, pool: Sequence[dict[str, int]], steps: int, settings: Settings) -> dict[str, float]:
    """Lays out the steps of one run and returns their figures."""
    config = _config(strategy, settings)
    composer = Composer(config, settings.devices, VISION, TEXT)
    inputs = [_input(sequence) for sequence in pool]
    sizes = np.array(
        [[len(prompt), sequence["response_tokens"]] for prompt, sequence in zip(inputs, pool, strict=True)]
    )
    tokens, patches = sizes.sum(axis=1).astype(float), np.array([sequence["vision_tokens"] for sequence in pool], float)
    work = estimate(config, TEXT, VISION)(tokens, tokens**2, VISION.merge_unit * patches)
    rng = np.random.default_rng(settings.seed)
    programs: set[tuple[object, ...]] = set()
    after_half, tally = 0, Tally(settings.devices)
    for step in range(steps):
        chosen = rng.integers(0, len(pool), settings.sequences).tolist()
        outlines = composer.outline(*_groups(chosen, pool, inputs)).micros
        new = {outline.program for outline in outlines} - programs
        after_half += len(new) if step >= steps // 2 else 0
        programs |= new
        tally.add(outlines, work[chosen])
    half = "new_after_500" if steps == 1000 else "new_after_half"
    return {"programs": len(programs), half: after_half} | tally.figures()


class Tally:
    """Adds up the padding, balance and traffic of steps."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._cells = np.zeros(4, np.int64)
        self._sent: list[float] = []
        self._balance: dict[bool, list[float]] = {False: [], True: []}  # by whether a compiled shape was planned for
        self._bounds: list[float] = []  # bounds of complete steps, if devices have a pace of their own
        self._microbatches: list[int] = []

    def add(self, outlines: Sequence[Outline], work: np.ndarray) -> None:
        """Adds a step, given the predicted work of each sequence."""
        self._microbatches.append(len(outlines))
        loads, owned = np.zeros(self._devices), False
        for outline in outlines:
            self._cells += np.array(outline.filled)
            if (part := outline.part) is None:
                continue
            if part.owner is None:
                self._balance[part.shaped].append(part.plan.balance)
                self._sent.append(SizedLayout(part.layout, outline.sizes).padding()["all_to_all"])
                loads += part.work or 0.0
            else:
                owned = True
                loads[part.owner] += part.work or 0.0
        if owned:
            self._balance[False].append(float(loads.max() / loads.mean()))
            self._bounds.append(least_load(work, self._devices, 1) * self._devices / float(work.sum()))

    def figures(self) -> dict[str, float]:
        tokens, token_cells, patches, patch_cells = self._cells.tolist()
        balances = self._balance[False] + self._balance[True]
        found = {
            "padding": 1 - tokens / token_cells,
            "patch_padding": 1 - patches / patch_cells,
            "all_to_all_padding": float(np.mean(self._sent)) if self._sent else 0.0,
            "microbatches": float(np.mean(self._microbatches)),
        }
        if balances:
            found["balance"] = float(np.mean(balances))
            found["balance_free"] = max(self._balance[False], default=1.0)
            found["balance_shaped"] = max(self._balance[True], default=1.0)
            found["shaped"] = len(self._balance[True]) / len(balances)
        if self._bounds:
            over = [balance / bound for balance, bound in zip(self._balance[False], self._bounds, strict=True)]
            found["balance_over_bound"] = max(over)
        return {name: round(value, 4) for name, value in found.items()}


def _config(strategy: str, settings: Settings) -> Config:
    config = Config()
    config.sharding.strategy = STRATEGIES[strategy]()
    composer.MAX_SHAPES = settings.max_shapes
    config.packing.tokens_per_row, config.packing.rows_per_device = settings.tokens_a_device, 1
    config.packing.patches_per_device = VISION.merge_unit * settings.tokens_a_device
    return config


def _input(sequence: dict[str, int]) -> ModelInput:
    """A prompt of these sizes; all pixels are one broadcast zero, and so are all positions."""
    tokens, features = sequence["prompt_tokens"] + sequence["vision_tokens"], sequence["vision_tokens"]
    frames = -(-sequence["frames"] // 2)
    index = np.full(tokens, -1, np.int32)
    index[:features] = np.arange(features)
    merged = np.repeat(np.arange(1, frames + 1, dtype=np.int32), _shares(features, frames))
    segments = np.repeat(merged, VISION.merge_unit)
    patches = len(segments)
    vision = VisionInput(
        patches_PX=np.broadcast_to(np.float32(0), (patches, VISION.patch_values)),
        positions_P2=np.broadcast_to(np.int32(0), (patches, 2)),
        frame_segments_P=segments,
        window_segments_P=np.broadcast_to(np.int32(1), (patches,)),
        frame_bound=frame_bound(segments),
    )
    token_ids = np.broadcast_to(np.int32(0), (tokens,))
    return ModelInput(token_ids, np.broadcast_to(np.int32(0), (3, tokens)), index, tokens, vision)


def _shares(total: int, count: int) -> np.ndarray:
    """`count` nearly equal numbers that add up to `total`."""
    return np.diff(np.arange(count + 1) * total // count)


def _groups(
    chosen: Sequence[int], pool: Sequence[dict[str, int]], inputs: Sequence[ModelInput]
) -> tuple[list[Group], dict[int, PreparedPrompt]]:
    groups, prepared = [], {}
    for draw, index in enumerate(chosen):
        tokens = pool[index]["response_tokens"]
        prompt = Prompt(f"prompt {draw}", "", "", "", draw=draw)
        response = Response(f"{draw}/0", draw, 0, (0,) * tokens, (0.0,) * tokens, (0,) * tokens, "length", 1.0)
        groups.append(Group(prompt, (Sample(response, Reward(1.0, True), advantage=1.0),)))
        prepared[draw] = PreparedPrompt(prompt, inputs[index])
    return groups, prepared


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", default=str(MIXES), help="JSON file of sequence lengths")
    parser.add_argument("--mix", action="append", help="only this mix; may be given several times")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, help="only this one; may be given again")
    parser.add_argument("--steps", type=int, default=1000, help="of each mix")
    parser.add_argument("--sequences", type=int, default=64, help="of a step")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--tokens-a-device", type=int, default=49152, help="most tokens of a device in a microbatch")
    parser.add_argument("--max-shapes", type=int, default=16, help="shapes that are compiled at most")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
