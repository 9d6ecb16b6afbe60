"""A process that trains along: it does what process 0 tells it (`hosts.orders`), with its own rows and media."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import pathlib
from collections.abc import Mapping, Sequence

from models.inputs import PromptInput
from sharding.walk import Params

from ..algorithms import find_algorithm
from ..batch.composition import Composition
from ..config import Config, ConfigError, RolloutEngine, run_folder
from ..data.prepare import Preparer
from ..data.sources import open_sources, open_warm_start
from ..hosts.coming import ComingPrompts
from ..hosts.gang import Gang, brought
from ..hosts.orders import (
    Begin,
    Coming,
    Gather,
    Learn,
    MediaTold,
    Offer,
    Order,
    OrderError,
    Restore,
    Save,
    Snapshot,
    Start,
    share_of,
)
from ..learner.scoring import in_turn, with_scores
from ..learner.warm_start import begin_warm_start, warm_start_source
from ..report.prometheus import HostCollector, PrometheusPort
from ..runtime.engine_servers import EngineServers
from . import snapshot_folder
from .build import build_learning, describe_model, first_reference, training_prompts
from .checkpoint import Checkpoints
from .pixels import Pixels
from .pools import serve_engines
from .process_log import process_log
from .snapshots import Snapshots
from .state import abstract_arrays, arrays_of, reference_of

log = logging.getLogger(__name__)
_REMEMBERED = 4  # steps whose prompts are laid out before it is known whether they are trained on here


class Follower:
    """A training process other than process 0: it holds its own share of the learner, prompts and media, and carries
    out the orders of process 0. The run folder exists already."""

    def __init__(self, config: Config, gang: Gang, run_dir: pathlib.Path, token: str) -> None:
        self._config, self._gang, self._run_dir = config, gang, run_dir
        self._algorithm = find_algorithm(config.algorithm)
        self._sources = open_sources(config.data)
        sizes, self._processor = describe_model(config, self._sources)
        self._media = Pixels(config, self._processor, gang, run_dir, token)
        learning = build_learning(
            config,
            sizes,
            self._processor,
            token_loss=self._algorithm.token_loss,
            note=log.info,
            links=gang.links,
            materializer=self._media.materializer,
        )
        self._learner, self._composer = learning.learner, learning.composer
        self._reference: Params | None = None
        self._checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep, largest=learning.largest)
        self._snapshots = Snapshots(gang.process, gang.processes)
        self._prompts = training_prompts(config, self._sources, self._processor, self._media.proxy)
        self._coming = ComingPrompts(self._prompts, most=_REMEMBERED * config.rollout.prompts_per_step)
        self._warm_start: Preparer | None = None
        self._step: list[Composition] = []  # the minibatches so far of the training step under way
        self._engines: EngineServers | None = None
        if config.rollout.engine is RolloutEngine.JAX:
            self._engines = serve_engines(config, learning.model, self._processor, gang, token, self._media.fetch)
            gang.collect(self._engines.addresses)

    def close(self) -> None:
        """Waits for checkpoints under way, ends threads, and removes the snapshots of this host, which are of no use
        any more."""
        snapshot_folder.remove(self._run_dir, pathlib.Path(self._config.checkpoint.snapshot_folder))
        if self._engines is not None:
            self._engines.close()
        self._media.close()
        self._checkpoints.close()
        self._learner.gradients.close()

    def obey(self, order: Order) -> None:
        """Carries out one order of process 0. Raises what the parts that carry it out raise."""
        match order:
            case Begin():
                self._begin(order.phase)
            case Coming():
                self._media.hear(itertools.chain.from_iterable(told for _, told in order.media))
                self._coming.hear(order)
            case Learn():
                self._learn(order)
            case Gather():
                learner = self._learner
                brought(
                    learner.trained(learner.params) if order.adapters else learner.weights(), learner.mesh, keep=False
                )
            case Save():
                self._checkpoints.write(order.step, arrays_of(self._learner, self._reference), {})
            case Snapshot():
                arrays = arrays_of(self._learner, self._reference)
                self._snapshots.write(pathlib.Path(order.folder), order.step, arrays)
            case Offer():
                folder, abstract = pathlib.Path(order.folder), abstract_arrays(self._learner, self._config)
                self._gang.collect(self._snapshots.steps(folder, abstract))
            case Restore():
                self._restore(order)

    def _begin(self, phase: str, *, restored: bool = False) -> None:
        config = self._config
        if phase == "warm_start":
            begin_warm_start(config, self._learner)
            self._warm_start = warm_start_source(
                config, open_warm_start(config.data), self._processor, self._media.proxy
            )
            return
        self._warm_start = None
        self._learner.reset(self._algorithm.token_loss, never_sampled=self._processor.media_token_ids)
        if config.algorithm.kl_coefficient and not restored:
            self._reference = first_reference(config, self._learner)

    def _learn(self, order: Learn) -> None:
        watch = self._gang.watch
        with watch.stage("media"):
            share = share_of(order.rows, order.responses, self._inputs)
        with watch.stage("layout"):
            composition = self._composer.lay_out(share)
        self._media.expect(composition.batches)
        self._gang.agree(self._config, composition)
        self._step.append(composition)
        if not order.last:
            return
        minibatches, self._step, learner = self._step, [], self._learner
        if self._warm_start is None:
            self._train(minibatches)
        else:
            learner.step(composition.everywhere)
        self._gang.stepped(learner.idle)

    def _train(self, minibatches: Sequence[Composition]) -> None:
        """Computes this process's share of one training step, as `PolicyTrainer.train` does in process 0."""
        learner, config, algorithm = self._learner, self._config, self._algorithm
        scored = with_scores(minibatches, learner.gradients, learner.params, self._reference, config, algorithm)
        for composition, last in in_turn(scored, learner, config, algorithm):
            learner.step(composition.everywhere, last=last)
        if config.algorithm.renews_reference(learner.version):
            self._reference = learner.params

    def _inputs(self, media: Mapping[int, MediaTold]) -> Mapping[int, PromptInput]:
        tickets = {draw: told for draw, told in media.items() if told is not None}
        self._media.hear(itertools.chain.from_iterable(tickets.values()))
        words = {draw: [ticket for ticket, _ in told] for draw, told in tickets.items()}
        elsewhere = (self._warm_start or self._coming).laid_out(words)
        here = (self._warm_start or self._prompts).again(draw for draw, told in media.items() if told is None)
        return elsewhere | {prepared.prompt.draw: prepared.inputs for prepared in here}

    def _restore(self, order: Restore) -> None:
        abstract, source = abstract_arrays(self._learner, self._config), order.source
        self._reference = None
        if order.folder:
            folder = pathlib.Path(order.folder)
            arrays = self._snapshots.restore(folder, abstract, order.step, self._learner.forget)
        else:
            _, arrays, state = self._checkpoints.restore(abstract, order.step, self._learner.forget)
            source = state["source"]
        self._begin("rl", restored=True)
        self._learner.load_state(arrays.pop("learner"))
        self._reference = reference_of(self._learner, arrays)
        self._prompts.load_state_dict(source)
        self._prompts.loader.check(source.get("contents", {}))
        self._coming.forget()
        self._checkpoints.forget_after(order.step)


def follow(gang: Gang, impl: object = None) -> None:
    """Takes part in the training of the run that process 0 begins, until process 0 says that the run is over.

    `impl` is this process's own `algorithm.impl`, which, as an object, is not in the run's folder. Logs to
    `RUN/processes/process-N.log`; serves metrics of its own where `report.prometheus_port` says so. Raises ConfigError
    if this host does not see the run's folder, or the port is taken.
    """
    orders = gang.orders()
    start = next(orders)
    if not isinstance(start, Start):
        raise OrderError(f"process 0 begins with {start.name}; run one release in all processes")
    run_dir = pathlib.Path(start.run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"run_dir must be on a file system that all hosts share: {run_dir} is not here")
    config = run_folder.from_json(json.loads(start.config))
    config.run_dir = str(run_dir)
    if impl is not None:
        config.algorithm.impl = impl
    port = PrometheusPort(prometheus_port(config, gang), config.report.prometheus_host)
    with process_log(run_dir, gang), contextlib.closing(port):
        port.export(HostCollector(gang.statuses))
        follower = Follower(config, gang, run_dir, start.token)
        for order in orders:
            follower.obey(order)
        follower.close()


def prometheus_port(config: Config, gang: Gang) -> int:
    """Returns the Prometheus port of this process: `report.prometheus_port`, or one of the next ones where several
    processes share a host; 0: none."""
    port = config.report.prometheus_port
    return port + gang.rank_here if port else 0
