"""Measures the cost of streaming a judge's layers: seconds of a pass with all layers on the device, and with fewer.

    python benchmarks/streamed.py                                   random 0.5B layers, 4 prompts of 256 tokens
    python benchmarks/streamed.py --model FOLDER --tokens 8192      a checkpoint, longer prompts
    python benchmarks/streamed.py --layers 4 --repeats 2            fewer layers, to see that the command works

Prints one JSON line: for each number of resident layers, `seconds` of scoring two verdicts (medians of `--repeats`,
alternating in one run) and `slower`, the ratio to all layers; `planned` is the number of layers that the plan for an
H100 would choose. On a CPU there is no link: host and device memory are the same, and the cores that compute also copy.
Figures of a CPU therefore bound nothing and say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

VOCABULARY = 8192  # the random model's: embedding and head are not measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a checkpoint folder")
    parser.add_argument("--layers", type=int, default=24, help="of the random model")
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if min(args.layers, args.tokens, args.prompts, args.repeats) < 1:
        parser.error("--layers, --tokens, --prompts and --repeats must be positive")

    import jax
    import numpy as np

    import models
    from models.config import DecoderConfig, TextConfig
    from rollout.streamed import DeviceSpeed, StreamedModel, finish, resident_layers

    if args.model:
        model = models.load(args.model)
    else:
        shape = TextConfig(VOCABULARY, 896, 4864, args.layers, 14, 2, 64, tie_word_embeddings=True)  # Qwen2.5-0.5B's
        model = models.create(DecoderConfig("qwen2", shape))
    text = model.config.text
    prompts = np.random.default_rng(0).integers(0, text.vocab_size, (args.prompts, args.tokens)).tolist()
    counts = sorted({0, text.num_layers // 2, text.num_layers})
    judges = {
        count: StreamedModel(model, resident=count, batch_tokens=2 * args.prompts * args.tokens) for count in counts
    }
    del model
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(args.repeats + 1):
        for count, judge in judges.items():
            begin = time.perf_counter()
            finish(judge.score(prompts, [[945], [275]]))
            if repeat:  # the first time, programs are compiled
                seconds[count].append(time.perf_counter() - begin)
    medians = {count: statistics.median(times) for count, times in seconds.items()}
    pace, size = DeviceSpeed(), judges[0].layer_bytes
    compute = pace.compute_seconds(text, args.prompts, args.tokens, 0, size)
    line = {
        "benchmark": "streamed",
        "device": jax.devices()[0].device_kind,
        "link": jax.default_backend() != "cpu",
        "layers": text.num_layers,
        "layer_mib": round(size / 2**20, 2),
        "tokens": args.prompts * args.tokens,
        "repeats": args.repeats,
        "seconds": {str(count): round(median, 4) for count, median in medians.items()},
        "slower": {str(count): round(median / medians[text.num_layers], 3) for count, median in medians.items()},
        "planned": resident_layers(text.num_layers, size, compute, pace.transfer_seconds(size), float("inf")),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
