"""Computes a dumped response again, from the weights that generated it."""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rollout.engine import GenerateRequest

from ..base.errors import DataError
from ..base.event_loop import run_async
from ..base.scored import ResponseNumbers, request_seed
from ..base.types import PreparedPrompt
from ..config import Config, RolloutEngine, run_folder
from ..report.samples import dumped_steps, read_samples, recorded_numbers
from .trainer import FluxTrainer


class Recomputation(NamedTuple):
    """A dumped response beside the tokens that were computed again."""

    equal: int  # tokens that agree, from the first on
    differs: str  # names the first token that differs, and the recorded token; empty if all agree
    gap: float  # the largest difference of log-probs (nats) of tokens that agree


def recompute(run_dir: pathlib.Path, step: int, line: int) -> Recomputation:
    """Computes the response in a line (from 0) of a step's samples again, on an embedded engine, with the request's
    seed and sampling. Tokens of several versions are computed version by version, each behind the recorded tokens
    before it. Changes nothing in the run's folder; the run may go on. Raises `DataError` if the sample, its prompt, or
    the weights of a version are not there, and the errors of `FluxTrainer`."""
    config = run_folder.read_config(run_dir)
    records = read_samples(run_dir, *dumped_steps(run_dir, step))
    record = records[line] if line < len(records) else {}
    recorded = recorded_numbers(record)
    if recorded is None or not len(recorded.tokens):
        raise DataError(f"sample {line} of step {step} is damaged or of an earlier release, or there is no such sample")
    _check_weights(config, run_dir, set(recorded.versions.tolist()))
    config.validate()
    config.sharding.devices = 0  # all devices of this machine
    end, gap = 0, 0.0
    with FluxTrainer(config, read_only=True) as trainer:
        for version, run in itertools.groupby(recorded.versions.tolist()):
            start, end = end, end + len(list(run))
            if (run_dir / "checkpoints" / str(version)).is_dir():
                trainer.load_checkpoint(version)
            if trainer.learner.version != version:
                raise DataError(f"the checkpoint {version} has weights of version {trainer.learner.version}")
            tokens, logprobs = run_async(_generated(trainer, _prompt(trainer, record), recorded, start, end))
            there = recorded.tokens[start:end].tolist()
            equal = next((i for i, token in enumerate(there) if tokens[i : i + 1] != [token]), len(there))
            gaps = np.abs(np.array(logprobs[:equal]) - recorded.logprobs[start : start + equal])
            gap = max(gap, float(np.max(gaps, initial=0.0)))
            if equal < len(there):
                new, old = (trainer.processor.decode(ids[equal : equal + 1]) for ids in (tokens, there))
                differs = f"{[*tokens, 'missing'][equal]} ({new!r}), not {there[equal]} ({old!r})"
                return Recomputation(start + equal, differs, gap)
    return Recomputation(end, "", gap)


def _check_weights(config: Config, run_dir: pathlib.Path, versions: set[int]) -> None:
    """Raises `DataError` unless these versions of the weights can be loaded, and an embedded engine used them."""
    if config.rollout.engine is RolloutEngine.SGLANG or min(versions) < 0:
        raise DataError("only the embedded engine's tokens can be computed again, not SGLang's or an environment's")
    steps = {int(folder.name) for folder in run_dir.glob("checkpoints/*") if folder.name.isdecimal()}
    if missing := sorted(versions - (steps if config.warm_start.steps else steps | {0})):
        raise DataError(
            f"the response has tokens of the weights after step {', '.join(map(str, missing))}, but checkpoints are of "
            f"step {', '.join(map(str, sorted(steps))) or 'none'} (checkpoint.every, checkpoint.keep)"
        )


def _prompt(trainer: FluxTrainer, record: Mapping[str, Any]) -> PreparedPrompt:
    """Returns the sample's prompt, drawn again. Raises `DataError` if the sources have another prompt now."""
    for prepared in trainer.state.prompts.again([record["draw"]]):
        prompt = prepared.prompt
        if (prompt.source, prompt.id, prompt.text) == (record["source"], record["id"], record["prompt"]):
            return prepared
    name = f"prompt {record['id']!r} of source {record['source']!r}"
    raise DataError(f"draw {record['draw']} was the {name}, which has changed or can't be prepared: restore the data")


async def _generated(
    trainer: FluxTrainer, prepared: PreparedPrompt, recorded: ResponseNumbers, start: int, end: int
) -> tuple[list[int], list[float]]:
    """Returns the tokens from `start` to `end` of the response, and their log-probs, under the learner's weights."""
    engine, sampling = trainer.engine, dataclasses.replace(trainer.sampling, max_new_tokens=end)
    if recorded.temperature is not None:
        sampling = dataclasses.replace(sampling, temperature=recorded.temperature)
    await engine.update_weights(trainer.learner.version, trainer.weights())
    request = GenerateRequest(
        rid="recomputed",
        prompt=prepared.inputs.laid_out(),
        sampling=sampling,
        seed=request_seed(trainer.config.seed, prepared.prompt.draw),
        prefix_ids=(tuple(recorded.tokens[:start].tolist()),) if start else (),
        samples=(recorded.sample,),
    )
    chunks = [chunk async for chunk in engine.generate(request)]
    return [id for chunk in chunks for id in chunk.token_ids], [p for chunk in chunks for p in chunk.logprobs]
