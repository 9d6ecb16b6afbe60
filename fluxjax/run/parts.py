"""Builds the parts of a run from its settled configuration."""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import itertools
import pathlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from models.config import DecoderConfig, VisionConfig
from models.decoder import Decoder
from models.inputs import ModelInput, PromptInput
from models.processing import Processor
from rollout.engine import Engine, SamplingParams
from sharding.mesh import Target
from sharding.walk import HOST_MEMORY

from ..algorithms import RLAlgorithm
from ..base.errors import DataError
from ..base.timeline import activity
from ..base.types import PreparedPrompt, Prompt, Response, Reward
from ..batch.composer import Composer, Team
from ..config import ODC, Config, ConfigError, Remat, RolloutEngine
from ..config.bounds import as_config_error
from ..coordinator.messages import ABORTED, STOPPED, Turn
from ..data.loader import read_row
from ..data.prepare import Preparer
from ..data.sources import Source
from ..learner.run_models import RunModels
from ..runtime.conversations import longer, session_of, turn_request
from ..runtime.engine_pool import EnginePool, engine_count, engines_sleep
from ..runtime.ports import Environments, EvaluationGivenUp
from .build import AnyPixels, NoPixels, build_learning, run_mesh, sampling_params
from .checkpoint import Checkpoints

if TYPE_CHECKING:
    from ..data.materializer import NoteFetch
    from ..learner.learner import Learner
    from ..runtime.fleet_pool import EngineServers, FleetPool
    from ..sizing.check import DeviceRoom

JAX_FRACTION = 0.75  # the share of a GPU's memory that JAX takes by default


def settled(
    config: Config,
    sizes: DecoderConfig,
    processor: Processor,
    gang: Team,
    note: Callable[[str], None] | None,
    own_policy: bool = False,
) -> Config:
    """Returns a copy of the configuration that refuses changes. The number from `engine_count` replaces
    `rollout.engines=0`. The result of the pre-flight's memory check replaces `sharding.remat=auto`. `note` gets the
    progress of the check (None: no check). `engines_sleep` describes `own_policy`. Raises `ConfigError` if there are
    too few devices, or if the run does not fit into the devices' memory."""
    config = copy.deepcopy(config)
    if note is not None:
        mesh, sleeping = run_mesh(config), engines_sleep(config, gang.alone, own_policy)
        config.sharding.remat = settled_remat(config, sizes, mesh, processor.media_token_ids, note, sleeping)
    config.rollout.engines = engine_count(config, jax.local_devices(), gang.processes)
    config.validate_scheduling()  # needs the settled number of engines
    config.settle()
    return config


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that every process of a run has, on its own share of the devices."""

    config: Config  # a result of `settled`
    processor: Processor
    vision: VisionConfig | None  # None: a text model
    pixels: AnyPixels
    model: Decoder  # abstract: the learner has its weights
    composer: Composer
    models: RunModels
    checkpoints: Checkpoints

    @property
    def learner(self) -> Learner:
        return self.models.learner

    def close(self) -> None:
        """Ends all threads, and waits for checkpoints under way."""
        self.models.close()
        self.checkpoints.close()
        self.pixels.close()


def assemble(
    config: Config,
    sizes: DecoderConfig,
    processor: Processor,
    algorithm: RLAlgorithm,
    gang: Team,
    run_dir: pathlib.Path,
    token: str,
    fetched: NoteFetch = lambda start, end, bytes: None,
    read_only: bool = False,
) -> Parts:
    """Builds the parts of one process from the settled configuration. Collective. `token` and `fetched` are the
    arguments `token` and `note` of `Pixels`. With `read_only`, nothing changes in the run's folder, and the checkpoint
    shows whether there is a critic. Raises `ConfigError` and the errors of `Pixels`."""
    pixels: AnyPixels = NoPixels()
    if processor.vision:
        from .pixels import Pixels

        pixels = Pixels(config, processor, gang, run_dir, token, fetched)
    learning = build_learning(
        config, sizes, processor, token_loss=algorithm.token_loss, links=gang.links, materializer=pixels.materializer
    )
    learner, critic = learning.learner, None
    gang.equip(config, pixels.place_of, None if pixels.materializer is None else pixels.materializer.expect)
    largest, folder = max(weight.nbytes for weight in jax.tree.leaves(learner.params)), run_dir / "checkpoints"
    checkpoints = Checkpoints(folder, config.checkpoint.keep, read_only=read_only, largest=largest)
    if checkpoints.holds("critic") if read_only else algorithm.critic:
        from ..learner.critic import Critic

        critic = Critic(config, learning.model, mesh=learner.mesh, links=gang.links, materializer=pixels.materializer)
    models = RunModels(config, algorithm, learner, critic, processor.media_token_ids)
    return Parts(config, processor, sizes.vision, pixels, learning.model, learning.composer, models, checkpoints)


def settled_remat(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    never_sampled: tuple[int, ...],
    progress: Callable[[str], None],
    sleeping: bool = False,
) -> Remat:
    """Returns the rematerialisation to train with. For `auto`, this is the first rematerialisation that fits into
    memory. If memory is unknown or `sharding.preflight` is false, `auto` becomes `none`. Otherwise, under odc, `auto`
    becomes `layer`.

    If a device's memory is known (on GPUs, or by `sharding.device_memory_gib`), the run's largest programs are
    compiled, except under odc. `Account` describes `sleeping`. Raises ConfigError for a run that needs more memory, and
    for `offload` on devices without host memory.
    """
    settings, room = config.sharding, _room(config)
    if settings.remat is Remat.OFFLOAD and not _has_host_memory():
        raise ConfigError(
            f"sharding.remat is offload, but {jax.default_backend()} devices have no {HOST_MEMORY} memory here; set it "
            "to layer"
        )
    if room is None:
        return Remat.NONE if settings.remat is Remat.AUTO else settings.remat
    if isinstance(settings.strategy, ODC):
        progress("memory is not checked before the start: with odc, each layer is a program of its own")
        return Remat.LAYER if settings.remat is Remat.AUTO else settings.remat

    from ..sizing.check import check

    def said(text: str) -> None:
        progress(f"does it fit? {text}")

    if config.stream_trainer:
        said("the memory that training takes on lent engines (stream_trainer) is not counted")

    devices = list(mesh.devices.flat)
    verdict = check(
        config, model, devices, room, said, never_sampled=never_sampled, longest_row=False, sleeping=sleeping
    )
    if not verdict.fits:
        raise ConfigError(
            "\n".join([*verdict.answer(), "To start without this check: --config.sharding.preflight=false"])
        )
    return verdict.remat


def _room(config: Config) -> DeviceRoom | None:
    """Returns the memory that training may use on a device, or None if the check is off or the memory is unknown."""
    if not config.sharding.preflight:
        return None
    device = jax.local_devices()[0]
    usable = (device.memory_stats() or {}).get("bytes_limit", 0) if Target.of(device).is_gpu else 0
    if not usable and not config.sharding.device_memory_gib:
        return None
    from ..sizing.account import GIB
    from ..sizing.check import DeviceRoom
    from ..sizing.topology import MEMORY_FRACTION, memory_fraction

    given = config.sharding.device_memory_gib * GIB
    if given and not 0 < usable < given:
        return DeviceRoom(given, given, f"sharding.device_memory_gib={config.sharding.device_memory_gib:g}")
    fraction = memory_fraction(JAX_FRACTION)
    return DeviceRoom(usable / fraction, usable, f"{MEMORY_FRACTION}={fraction:.2f}")


def _has_host_memory() -> bool:
    return any(memory.kind == HOST_MEMORY for memory in jax.local_devices()[0].addressable_memories())


def make_pool(
    parts: Parts, gang: Team, token: str, checkpoint: Callable[[], pathlib.Path], logs: pathlib.Path, read_only: bool
) -> EnginePool | FleetPool:
    """Returns the engines that process 0 uses. These are the embedded engines of all processes, or rollout servers.
    With `read_only`, these are embedded engines of this process. `checkpoint` makes a folder that servers can start
    from. `token` is for the engines of the other processes. Raises the errors of the pools."""
    config, model, fetch = parts.config, parts.model, parts.pixels.fetch
    embedded = config.rollout.engine is RolloutEngine.JAX
    if read_only or (embedded and gang.alone):
        return EnginePool(config, model, fetch=fetch, sampling=sampling_params(config, parts.processor))
    from ..runtime.fleet_pool import FleetPool, for_all_engines

    if not embedded:
        return FleetPool(config, model, checkpoint(), logs, fetch=fetch)
    servers = serve_engines(parts, gang, token)
    addresses = [*itertools.chain.from_iterable(gang.exchange(servers.addresses))]
    config = for_all_engines(config, addresses)
    return FleetPool(config, model, logs, logs, token, fetch=fetch, shadows=fetch is not None, local_servers=servers)


def serve_engines(parts: Parts, gang: Team, token: str) -> EngineServers:
    """Starts the engines of this process as servers for process 0. Raises ConfigError if they can't listen."""
    from ..runtime.fleet_pool import EngineServers

    links = gang.links
    assert links is not None
    given, fetch = (parts.config, parts.model, parts.processor), parts.pixels.fetch
    with as_config_error(f"the engines of {links.name} can't listen on {links.address}", ValueError):
        return EngineServers(*given, gang.processes, host=links.address, token=token, failed=links.fail, fetch=fetch)


@dataclasses.dataclass
class HeldOut:
    """The held-out prompts of every source, prepared once for all evaluations. An engine answers the prompts greedily,
    and each source's reward scores the answers. As many episodes as environments may live are played in step, so that
    the turns of all of them form a deterministic batch."""

    prompts: Mapping[str, Sequence[PreparedPrompt]]
    score: Callable[[Prompt, str, tuple[float, ...]], Awaitable[Reward]]  # prompt, answer, rewards of its environment
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    stopping: Callable[[], bool] = bool  # says whether the run should stop

    async def accuracy(
        self, engine: Engine, limit: int | None = None, *, blind: bool = False, environments: Environments | None = None
    ) -> dict[str, float]:
        """Returns, for each source, the share of right greedy answers to the first `limit` prompts. Raises
        EvaluationGivenUp if the run should stop before all answers are scored. `blind` gives every pixel the mean
        colour (zero after normalisation), to measure the accuracy without sight. Episodes whose environment fails are
        left out; without a single other one, the accuracy of their source is 0."""
        asked = [(source, p) for source, prompts in self.prompts.items() for p in prompts[:limit]]
        answers = await self._answers(engine, [p for _, p in asked], blind, environments)
        answered = [(source, p.prompt, a) for (source, p), a in zip(asked, answers, strict=True) if a is not None]
        scores = [self.score(prompt, self.decode(a.last_turn), a.rewards) for _, prompt, a in answered]
        rewards = await self._all("scoring", [asyncio.ensure_future(score) for score in scores])
        right: dict[str, list[bool]] = {source: [] for source, _ in asked}
        for (source, _, _), reward in zip(answered, rewards, strict=True):
            right[source].append(reward.correct)
        return {source: float(np.mean(values or [0.0])) for source, values in right.items()}

    async def _answers(
        self, engine: Engine, asked: Sequence[PreparedPrompt], blind: bool, environments: Environments | None
    ) -> list[Response | None]:
        """Returns the answer to each prompt; None for an episode whose environment failed."""
        prepared = dict(enumerate(asked))
        answers: dict[int, Response | None] = {}
        waiting = [i for i, p in prepared.items() if p.prompt.environment]
        going = {i: _begin(i, p.prompt) for i, p in prepared.items() if not p.prompt.environment}
        while going or waiting:
            if environments is not None:  # an episode keeps its environment until it ends
                free = max(0, environments.at_once - len(going))
                going |= {i: _begin(i, prepared[i].prompt) for i in waiting[:free]}
                waiting = waiting[free:]
            await engine.pause()  # all requests form one deterministic batch, as in training
            unit = 1 if environments is None else environments.merge_unit
            turns = [self._turn(engine, i, prepared[i], said, unit, blind) for i, said in going.items()]
            jobs = [asyncio.ensure_future(turn) for turn in turns]
            await asyncio.sleep(0)  # all requests are queued before the first is served
            await engine.resume()
            said = dict(zip(going, await self._all("evaluating", jobs), strict=True))
            acting = {i: r for i, r in said.items() if prepared[i].prompt.environment and r.finish == STOPPED}
            acts = [asyncio.ensure_future(_act(environments, prepared[i], r)) for i, r in acting.items()]
            heard = dict(zip(acting, await self._all("playing", acts), strict=True)) if acting else {}
            going = {i: answer.response for i, answer in heard.items() if answer is not None and not answer.done}
            told = said | {i: answer and answer.response for i, answer in heard.items()}
            for i in said.keys() - going.keys():
                answers[i] = told[i]
                if environments is not None and prepared[i].prompt.environment:
                    await environments.end(prepared[i].prompt.draw)
                    await engine.end_session(session_of(prepared[i].prompt))
            prepared |= {i: dataclasses.replace(prepared[i], responses={0: heard[i].inputs}) for i in going}
        return [answers[i] for i in range(len(asked))]

    async def _all(self, what: str, jobs: Sequence[asyncio.Future[Any]]) -> list[Any]:
        gathered = asyncio.gather(*jobs)
        try:
            with activity(lambda: f"{what} {sum(job.done() for job in jobs)}/{len(jobs)}"):
                while not gathered.done():
                    if self.stopping():
                        raise EvaluationGivenUp
                    await asyncio.wait([gathered], timeout=0.2)
            return gathered.result()
        finally:
            gathered.cancel()
            await asyncio.gather(gathered, return_exceptions=True)

    async def _turn(
        self, engine: Engine, index: int, prepared: PreparedPrompt, response: Response, unit: int, blind: bool
    ) -> Response:
        # Greedy answers need no random numbers. Servers order requests by seed, because a network does not keep their
        # order.
        request = turn_request(Turn(prepared.prompt, response, 0), prepared, self.sampling, index, unit)
        if blind:
            request = dataclasses.replace(request, prompt=_blanked(request.prompt))
        return longer(response, [chunk async for chunk in engine.generate(request)])

    def chance(self, limit: int | None = None) -> dict[str, float]:
        """Returns, for each source without an environment, the accuracy of the best constant answer."""
        result = {}
        for source, prompts in self.prompts.items():
            answers = collections.Counter(p.prompt.answer for p in prompts[:limit] if not p.prompt.environment)
            if answers:
                result[source] = max(answers.values()) / sum(answers.values())
        return result


def _begin(index: int, prompt: Prompt) -> Response:
    return Response(f"held-out-{index:06d}/0", prompt.draw, 0, (), (), (), ABORTED, 0.0)


async def _act(environments: Environments | None, prepared: PreparedPrompt, response: Response) -> Any:
    from ..environments import EnvironmentFailure

    assert environments is not None
    try:
        return await environments.act(prepared, response)
    except EnvironmentFailure:  # counted and noted where it arose
        return None


def _blanked(prompt: PromptInput) -> ModelInput:
    inputs = prompt.laid_out()
    patches = inputs.patches_PX  # an array or a shadow: both have a shape
    return inputs if patches is None else inputs.with_patches(np.zeros(patches.shape, patches.dtype))


def held_out_prompts(
    sources: Mapping[str, Source], count: int, preparer: Preparer, count_skip: Callable[[str], None]
) -> dict[str, list[PreparedPrompt]]:
    """Returns the usable prompts among the first `count` rows of each source. Raises DataError if a source has none."""
    prompts, first = {}, -1
    for name, source in sources.items():
        rows = range(min(count, len(source)))
        # By draws, which differ from those of the run, environments are told apart and seeded.
        prepared, skipped = preparer.prepare_all(read_row(source, name, row, draw=first - row) for row in rows)
        first -= len(rows)
        for _, reason in skipped:
            count_skip(f"held out: {reason}")
        if not prepared:
            reason = skipped[0][1]
            raise DataError(f"data.sources.{name}: none of {len(rows)} held-out prompts can be used: {reason}")
        prompts[name] = prepared
    return prompts
