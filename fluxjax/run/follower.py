"""A process that trains along: it does what process 0 tells it (`hosts.orders`), with its own rows and media."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from models.inputs import ModelInput
from sharding.walk import Params
from sharding.weights import like

from ..algorithms import ALGORITHMS
from ..config import Config, ConfigError, run_folder
from ..data.loader import PromptLoader
from ..data.prepare import Preparer
from ..data.sources import open_sources, open_warm_start
from ..hosts.gang import Gang, brought
from ..hosts.orders import Begin, Gather, Learn, Order, OrderError, Restore, Save, Start, share_of
from ..learner.policy_trainer import with_scores
from ..learner.warm_start import begin_warm_start, warm_start_source
from ..report.prometheus import HostCollector, PrometheusPort
from .build import build_learning, describe_model
from .checkpoint import Checkpoints
from .process_log import process_log

log = logging.getLogger(__name__)


class Follower:
    """Everything that this process needs of a run whose folder process 0 has made."""

    def __init__(self, config: Config, gang: Gang, run_dir: pathlib.Path) -> None:
        self._config, self._gang = config, gang
        self._sources = open_sources(config.data)
        sizes, self._processor = describe_model(config, self._sources)
        learning = build_learning(config, sizes, self._processor, note=log.info, links=gang.links)
        self._learner, self._composer = learning.learner, learning.composer
        self._reference: Params | None = None
        self._checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep, largest=learning.largest)
        weights = {name: config.data.sources[name].weight for name in self._sources}
        loader = PromptLoader(self._sources, weights, config.seed)
        self._prompts = Preparer(self._processor, loader, config)
        self._warm_start: Preparer | None = None

    def close(self) -> None:
        """Waits for checkpoints under way, and ends threads."""
        self._checkpoints.close()
        self._learner.gradients.close()

    def obey(self, order: Order) -> None:
        """Raises what the parts raise."""
        match order:
            case Begin():
                self._begin(order.phase)
            case Learn():
                self._learn(order)
            case Gather():
                brought(self._learner.params, self._learner.mesh, keep=False)
            case Save():
                self._checkpoints.write(order.step, self._arrays(), {})
            case Restore():
                self._restore(order.step)

    def _begin(self, phase: str) -> None:
        config = self._config
        if phase == "warm_start":
            begin_warm_start(config, self._learner)
            self._warm_start = warm_start_source(config, open_warm_start(config.data), self._processor)
            return
        self._warm_start = None
        algorithm = ALGORITHMS[config.algorithm.name]
        self._learner.reset(algorithm.token_loss, never_sampled=self._processor.media_token_ids)
        if config.algorithm.kl_coefficient:
            self._reference = self._learner.params

    def _learn(self, order: Learn) -> None:
        watch = self._gang.watch
        with watch.stage("media"):
            share = share_of(order.rows, self._inputs)
        with watch.stage("layout"):
            composition = self._composer.lay_out(share)
        self._gang.agree(self._config, composition)
        learner = self._learner
        if self._warm_start is None:
            composition = with_scores(composition, learner.gradients, learner.params, self._reference, self._config)
        learner.step(composition.everywhere)
        self._gang.stepped(learner.idle)

    def _inputs(self, draws: Sequence[int]) -> Mapping[int, ModelInput]:
        source = self._warm_start or self._prompts
        return {prepared.prompt.draw: prepared.inputs for prepared in source.again(draws)}

    def _arrays(self) -> dict[str, Any]:
        arrays = {"learner": self._learner.state()}
        return arrays if self._reference is None else arrays | {"reference": self._reference}

    def _restore(self, step: int) -> None:
        config, wanted = self._config, {"learner": self._learner.state()}
        if config.algorithm.kl_coefficient:
            wanted["reference"] = self._learner.params
        abstract = like(wanted)
        del wanted
        self._reference = None
        _, arrays, state = self._checkpoints.restore(abstract, step, self._learner.forget)
        self._begin("rl")
        self._learner.load_state(arrays.pop("learner"))
        self._reference = arrays.get("reference")
        self._prompts.load_state_dict(state["source"])
        self._checkpoints.forget_after(step)


def follow(gang: Gang) -> None:
    """Trains along in the run that process 0 begins, until it says that the run is over. Logs to
    `RUN/processes/process-N.log`; serves metrics of its own where `report.prometheus_port` says so. Raises ConfigError
    where this host does not see the run's folder, or the port is taken."""
    orders = gang.orders()
    start = next(orders)
    if not isinstance(start, Start):
        raise OrderError(f"process 0 begins with {start.name}; run one release in all processes")
    run_dir = pathlib.Path(start.run_dir)
    try:
        config = run_folder.read_config(run_dir)
    except ConfigError as error:
        raise ConfigError(f"run_dir must be on a file system that all hosts share: {error}") from error
    with process_log(run_dir, gang), contextlib.closing(_metrics_port(config, gang)) as port:
        port.export(HostCollector(gang.statuses))
        follower = Follower(config, gang, run_dir)
        for order in orders:
            follower.obey(order)
        follower.close()


def _metrics_port(config: Config, gang: Gang) -> PrometheusPort:
    return PrometheusPort(prometheus_port(config, gang), config.report.prometheus_host)


def prometheus_port(config: Config, gang: Gang) -> int:
    """`report.prometheus_port`, or the next ones where several processes share the ports of a host; 0: none."""
    port = config.report.prometheus_port
    return port + gang.rank_here if port else 0
