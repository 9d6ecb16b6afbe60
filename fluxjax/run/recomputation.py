"""Computes a dumped response again, from the weights that generated it."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rollout.engine import Engine, GenerateRequest

from ..base.errors import DataError
from ..base.event_loop import run_async
from ..base.medium import Media, MediaKind
from ..base.scored import request_seed
from ..base.types import ENVIRONMENT, PreparedPrompt, Response
from ..config import Config, RolloutEngine, run_folder
from ..coordinator.messages import Turn
from ..data.tickets import source_of
from ..report.samples import dumped_steps, read_samples, recorded_numbers
from ..runtime.conversations import turn_request
from .trainer import FluxTrainer


class Recomputation(NamedTuple):
    """A dumped response beside the tokens that were computed again. Tokens of its environment were not."""

    equal: int  # computed tokens that agree, from the first on
    differs: str  # names the first token that differs, and the recorded token; empty if all agree
    gap: float  # the largest difference of log-probs (nats) of tokens that agree
    observed: int  # tokens of observations, which were taken from the record


def recompute(run_dir: pathlib.Path, step: int, line: int) -> Recomputation:
    """Computes the response in a line (from 0) of a step's samples again, on an embedded engine (see `computed_again`).
    Changes nothing in the run's folder; the run may go on. Raises `DataError` if the sample, its prompt, its
    observations or the weights of a version are not there, and the errors of `FluxTrainer`."""
    config = run_folder.read_config(run_dir)
    records = read_samples(run_dir, *dumped_steps(run_dir, step))
    record = records[line] if line < len(records) else {}
    recorded = _recorded(record, run_dir)
    if recorded is None or not recorded.num_tokens:
        raise DataError(f"sample {line} of step {step} is damaged or of an earlier release, or there is no such sample")
    _check_weights(config, run_dir, set(recorded.versions) - {ENVIRONMENT})
    config.validate()
    config.sharding.devices = 0  # all devices of this machine
    with FluxTrainer(config, read_only=True) as trainer:

        @functools.lru_cache(maxsize=1)  # successive turns have tokens of one version
        def engine_of(version: int) -> Engine:
            if (run_dir / "checkpoints" / str(version)).is_dir():
                trainer.load_checkpoint(version)
            if trainer.learner.version != version:
                raise DataError(f"the checkpoint {version} has weights of version {trainer.learner.version}")
            run_async(trainer.engine.update_weights(version, trainer.weights()))
            return trainer.engine

        return computed_again(recorded, _prompt(trainer, record), trainer, engine_of)


def computed_again(
    recorded: Response, prepared: PreparedPrompt, run: Any, engine_of: Callable[[int], Engine]
) -> Recomputation:
    """Computes a response again with the seeds and the sampling of its requests: turn by turn, version by version, each
    behind the recorded tokens and observations. `run` is a `FluxTrainer`; `engine_of` returns a version's engine."""
    end, turn, observed, gap = 0, 0, 0, 0.0
    for version, same in itertools.groupby(recorded.versions):
        start, end = end, end + len(list(same))
        if version == ENVIRONMENT:
            turn, observed = end, observed + end - start
            continue
        engine, there, attempts = engine_of(version), recorded.token_ids[start:end], []
        # A turn that was parked goes on in a new request, a turn whose engine got new weights in the turn's request.
        for begin in sorted({turn, start}) if prepared.prompt.environment else [turn]:
            tokens, logprobs = run_async(_generated(engine, _request(recorded, prepared, run, begin, start, end)))
            equal = next((i for i, token in enumerate(there) if tokens[i : i + 1] != [token]), len(there))
            attempts.append((equal, tokens, logprobs))
        equal, tokens, logprobs = max(attempts)
        gaps = np.abs(np.array(logprobs[:equal]) - recorded.logprobs[start : start + equal])
        gap = max(gap, float(np.max(gaps, initial=0.0)))
        if equal < len(there):
            new, old = (run.processor.decode(ids[equal : equal + 1]) for ids in (tokens, there))
            differs = f"{start + equal} is {[*tokens, 'missing'][equal]} ({new!r}), not {there[equal]} ({old!r})"
            return Recomputation(start + equal - observed, differs, gap, observed)
    return Recomputation(end - observed, "", gap, observed)


def _check_weights(config: Config, run_dir: pathlib.Path, versions: set[int]) -> None:
    """Raises `DataError` unless these versions of the weights can be loaded, and an embedded engine used them."""
    if config.rollout.engine is RolloutEngine.SGLANG or min(versions) < 0:
        raise DataError("only the embedded engine's tokens can be computed again, not SGLang's or given answers")
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


def _recorded(record: Mapping[str, Any], run_dir: pathlib.Path) -> Response | None:
    """Returns the response of a record, or None if there is none. Raises `DataError` if it is damaged."""
    numbers, observed = recorded_numbers(record), record.get("observed", ())
    if numbers is None:
        return None
    media = tuple(Media(MediaKind(kind), str(run_dir / path)) for refs in observed for kind, path, *_ in refs)
    name, draw, counts = f"recomputed/{numbers.sample}", record["draw"], tuple(map(len, observed))
    ids, logprobs, versions = (tuple(column.tolist()) for column in numbers[2:])
    known = name, draw, numbers.sample, ids, logprobs, versions, record["finish"], numbers.temperature
    return Response(*known, media=media, media_counts=counts)


def _request(
    recorded: Response, prepared: PreparedPrompt, run: Any, begin: int, start: int, end: int
) -> GenerateRequest:
    """Returns a request for the tokens from `start` to `end` of a response, as if it had begun at token `begin`."""
    columns = {name: getattr(recorded, name)[:begin] for name in ("token_ids", "logprobs", "versions")}
    seen = [version for version, _ in itertools.groupby(columns["versions"])].count(ENVIRONMENT)
    media = [(m.kind.value, source_of(m)) for m in recorded.media[: sum(recorded.media_counts[:seen])]]
    behind, merge_unit = prepared.inputs.laid_out().next_position, run.processor.layout.spatial_merge_size**2
    try:
        inputs = run.processor.prepare_response(columns["token_ids"], media, start=behind)
    except ValueError as error:
        raise DataError(f"the observations of the sample can't be prepared: {error}") from error
    prepared = dataclasses.replace(prepared, responses={recorded.sample: inputs})
    turn = Turn(prepared.prompt, dataclasses.replace(recorded, **columns), 0)
    sampling, seed = dataclasses.replace(run.sampling, max_new_tokens=end), request_seed(run.config.seed, recorded.draw)
    request = turn_request(turn, prepared, sampling, seed, merge_unit)
    return dataclasses.replace(request, prefix_ids=(recorded.token_ids[begin:start],) if begin < start else ())


async def _generated(engine: Engine, request: GenerateRequest) -> tuple[list[int], list[float]]:
    chunks = [chunk async for chunk in engine.generate(request)]
    return [id for chunk in chunks for id in chunk.token_ids], [p for chunk in chunks for p in chunk.logprobs]
