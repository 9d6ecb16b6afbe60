"""Carries out the orders of process 0 (`hosts.orders`) in the other training processes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pathlib
from collections.abc import Mapping

from models.inputs import PromptInput

from ..algorithms import find_algorithm
from ..batch.composer import Team
from ..config import Config, ConfigError, RolloutEngine, run_folder
from ..data.loader import open_sources, open_warm_start
from ..data.prepare import Preparer
from ..hosts.coming import ComingPrompts
from ..hosts.gang import Gang, brought
from ..hosts.orders import Begin, Coming, Gather, Learn, MediaTold, Order, OrderError, Restore, Save, Start, shares_of
from ..learner.policy_trainer import PolicyTrainer
from ..learner.warm_start import begin_warm_start, given_step, warm_start_source
from ..report.metrics import process_log
from ..runtime.fleet_pool import EngineServers, check_allocator
from .build import describe_model, open_play, preparing, training_prompts
from .parts import assemble, serve_engines, settled

log = logging.getLogger(__name__)
_REMEMBERED = 4  # steps; model inputs are kept for as many announced prompts as these steps need


class Follower:
    """A training process other than 0, with its own share of learner, prompts and media. The run folder must exist."""

    def __init__(self, config: Config, gang: Gang, run_dir: pathlib.Path, token: str) -> None:
        self._gang = gang
        sources = open_sources(config)
        sizes, processor = describe_model(config, sources)
        config = settled(config, sizes, processor, gang, log.info)
        algorithm = find_algorithm(config.algorithm)
        self._parts = parts = assemble(config, sizes, processor, algorithm, gang, run_dir, token)
        self._config, self._learner, self._models, self._media = config, parts.learner, parts.models, parts.pixels
        self._trainer = PolicyTrainer(config, parts.models, parts.composer, team=gang)
        self._play = open_play(config, processor, parts.pixels.proxy, run_dir / "observations")
        self._preparing = preparing(parts.pixels, self._play)
        self._prompts = training_prompts(config, sources, processor, **self._preparing)
        self._coming = ComingPrompts(self._prompts, most=_REMEMBERED * config.rollout.prompts_per_step)
        self._warm_start: Preparer | None = None
        self._engines: EngineServers | None = None
        if config.rollout.engine is not RolloutEngine.JAX and config.servers.colocated:
            check_allocator()
        if config.rollout.engine is RolloutEngine.JAX:
            self._engines = serve_engines(parts, gang, token)
            gang.exchange(self._engines.addresses)

    def close(self) -> None:
        """Waits for checkpoints under way, and ends all threads."""
        if self._engines is not None:
            self._engines.close()
        if self._play is not None:
            self._play.close()
        self._parts.close()

    def obey(self, order: Order) -> None:
        """Carries out one order of process 0. Raises the errors of the parts of this process."""
        match order:
            case Begin():
                self._begin(order)
            case Coming():
                self._media.hear(itertools.chain.from_iterable(told for _, told in order.media))
                self._coming.hear(order)
            case Learn():
                self._learn(order)
            case Gather():
                learner = self._learner
                params = learner.trained(learner.params) if order.adapters else learner.weights()
                brought(params, learner.mesh, keep=False)
            case Save():
                self._parts.checkpoints.write(order.step, self._models.arrays(), {})
            case Restore():
                checkpoints = self._parts.checkpoints
                _, arrays, state = checkpoints.restore(self._models.abstract(), order.step, self._models.forget)
                self._models.load(arrays, order.steps)
                self._prompts.load_state_dict(state["source"])
                self._prompts.loader.check(state["source"].get("contents", {}))
                self._coming.forget()
                checkpoints.forget_after(order.step)

    def _begin(self, order: Begin) -> None:
        self._warm_start = None
        if order.phase == "rl":
            self._models.begin(order.steps)
            return
        begin_warm_start(self._config, self._learner)
        sources = open_warm_start(self._config)
        self._warm_start = warm_start_source(self._config, sources, self._parts.processor, **self._preparing)

    def _learn(self, order: Learn) -> None:
        with self._gang.watch.stage("media"):
            shares = shares_of(order, self._inputs, self._media.hear)
        if self._warm_start is None:
            self._trainer.follow(shares, order.size, order.update)
        else:
            [composition] = self._gang.laid_out(self._parts.composer, shares)
            given_step(self._learner, composition)
        if order.update:
            self._gang.stepped(self._learner.idle)

    def _inputs(self, media: Mapping[int, MediaTold]) -> Mapping[int, PromptInput]:
        tickets = {draw: told for draw, told in media.items() if told is not None}
        self._media.hear(itertools.chain.from_iterable(tickets.values()))
        words = {draw: [ticket for ticket, _ in told] for draw, told in tickets.items()}
        elsewhere = (self._warm_start or self._coming).laid_out(words)
        here = (self._warm_start or self._prompts).again(draw for draw, told in media.items() if told is None)
        return elsewhere | {prepared.prompt.draw: prepared.inputs for prepared in here}


def follow(gang: Team, algorithm: object) -> None:
    """Takes part in the run that process 0 begins, until process 0 ends the run. `algorithm` is the `algorithm.name` of
    this process, which may be an object that process 0 can't send. Logs to `RUN/processes/process-N.log`. Serves
    metrics of this process if `report.prometheus` is set. Raises ConfigError if this host does not see the run's folder
    or the port is taken. Raises the errors of `Follower.obey`."""
    assert isinstance(gang, Gang)
    orders = gang.orders()
    start = next(orders)
    if not isinstance(start, Start):
        raise OrderError(f"process 0 begins with {start.name}, not with start; run the same release in all processes")
    run_dir = pathlib.Path(start.run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"run_dir must be on a file system that all hosts share: there is no {run_dir} on this host")
    config = run_folder.from_json(start.config)
    config.run_dir = str(run_dir)
    if not isinstance(algorithm, str):
        config.algorithm.name = algorithm
    with contextlib.ExitStack() as ended:
        if port := prometheus_port(config, gang):
            from ..report.prometheus import HostCollector, PrometheusPort

            served = PrometheusPort(port, config.report.prometheus_address[0], HostCollector(gang.statuses))
            ended.callback(served.close)
        ended.enter_context(process_log(run_dir, gang.process, gang.processes))
        follower = Follower(config, gang, run_dir, start.token)
        for order in orders:
            follower.obey(order)
        follower.close()


def prometheus_port(config: Config, gang: Team) -> int:
    """Returns the Prometheus port of this process, or 0 without `report.prometheus`. The port is that of
    `report.prometheus` plus the process's rank on its host."""
    port = config.report.prometheus_address[1]
    return port + gang.rank_here if port else 0
