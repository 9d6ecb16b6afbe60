"""Measures the held-out accuracy of a finished run by length of the right answer. A part of `policies_learning.py`.

    python benchmarks/accuracy_by_length.py RUN [STRIPS]   # one JSON line, also in RUN/accuracy_by_length[_STRIPS].json

With STRIPS, the run reads that many held-out strips of digits; its own 400 strips come first among them. 400 strips
alone give the difference between two runs only to about a point.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

from common import ROOT

Counts = dict[str, dict[str, tuple[int, int]]]  # by source and length: right answers, held-out prompts


def by_length(run: pathlib.Path, strips: int = 0) -> Counts:
    """Returns the counts of a run. A process of its own measures them once and writes a file of the run's folder.
    Raises `CalledProcessError` if that process fails."""
    file = _file(run, strips)
    if not file.exists():
        command = [sys.executable, __file__, str(run), str(strips)]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return json.loads(file.read_text())


def _file(run: pathlib.Path, strips: int) -> pathlib.Path:
    return run / f"accuracy_by_length{f'_{strips}' if strips else ''}.json"


def pooled(runs: Sequence[Counts]) -> dict[str, dict[str, float]]:
    """The share of right answers over all runs, by source and length."""
    total: dict[str, dict[str, list[int]]] = {}
    for run in runs:
        for source, lengths in run.items():
            for length, (right, asked) in lengths.items():
                sums = total.setdefault(source, {}).setdefault(length, [0, 0])
                sums[0], sums[1] = sums[0] + right, sums[1] + asked
    return {
        source: {length: round(right / asked, 4) for length, (right, asked) in sorted(lengths.items(), key=_number)}
        for source, lengths in total.items()
    }


def _number(item: tuple[str, object]) -> int:
    return int(item[0])


def measure(run: pathlib.Path, strips: int = 0) -> Counts:
    from fluxjax.base.event_loop import run_async
    from fluxjax.base.process import use_compile_cache
    from fluxjax.base.types import PreparedPrompt
    from fluxjax.config.run_folder import read_config
    from fluxjax.run.trainer import FluxTrainer

    use_compile_cache()
    config = read_config(run)
    if strips:
        config.data.sources["digits"].eval_path = str(_more_strips(run.parent, strips))
        config.evaluation.samples = strips
    with FluxTrainer(config, read_only=True) as trainer:
        trainer.load_checkpoint(None)
        groups: dict[str, list[PreparedPrompt]] = collections.defaultdict(list)
        for source, prompts in trainer.held_out.prompts.items():
            for prepared in prompts:
                groups[f"{source} {len(prepared.prompt.answer)}"].append(prepared)
        held_out = dataclasses.replace(trainer.held_out, prompts=groups)

        async def shares() -> dict[str, float]:
            await trainer.engine.update_weights(trainer.learner.version, trainer.weights())
            return await held_out.accuracy(trainer.engine)

        counts: Counts = collections.defaultdict(dict)
        for name, share in run_async(shares()).items():
            source, length = name.rsplit(" ", 1)
            asked = len(groups[name])
            counts[source][length] = round(share * asked), asked
    return counts


def _more_strips(folder: pathlib.Path, strips: int) -> pathlib.Path:
    """Returns a manifest with this number of strips; writes it beside the runs if it does not exist."""
    from fluxjax.tasks.digits import DigitsRecipe
    from fluxjax.tasks.embedded import build_once

    build_once(folder / f"strips-{strips}", DigitsRecipe(held_out=strips, train=1, warm_start=1).build)
    return folder / f"strips-{strips}" / "eval.jsonl"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, help="folder of a finished run")
    parser.add_argument("strips", type=int, nargs="?", default=0, help="held-out strips (default: those of the run)")
    options = parser.parse_args(argv)
    folder = options.run.resolve()
    if not (folder / "config.json").exists():
        parser.error(f"{folder} is no run folder: it has no config.json")
    line = json.dumps(measure(folder, options.strips))
    _file(folder, options.strips).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
