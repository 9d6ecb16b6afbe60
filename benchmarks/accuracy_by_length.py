"""Held-out accuracy of a finished run by the length of the right answer. A part of `policies_learning.py`.

python benchmarks/accuracy_by_length.py RUN        # one JSON line, kept in RUN/accuracy_by_length.json
"""

from __future__ import annotations

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


def by_length(run: pathlib.Path) -> Counts:
    """Measured in a process of its own, once. Raises `CalledProcessError` if that does not end well."""
    file = run / "accuracy_by_length.json"
    if not file.exists():
        subprocess.run([sys.executable, __file__, str(run)], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return json.loads(file.read_text())


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


def measure(run: pathlib.Path) -> Counts:
    from fluxjax.base.event_loop import run_async
    from fluxjax.base.process import use_compile_cache
    from fluxjax.base.types import PreparedPrompt
    from fluxjax.config.run_folder import read_config
    from fluxjax.run.trainer import FluxTrainer

    use_compile_cache()
    with FluxTrainer(read_config(run), read_only=True) as trainer:
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


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    line = json.dumps(measure(folder))
    (folder / "accuracy_by_length.json").write_text(line + "\n")
    print(line)
