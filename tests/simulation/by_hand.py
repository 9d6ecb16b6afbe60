"""A synchronous step by hand from the parts of `fluxjax.simulation`: rollout, then rewards, then training."""

import dataclasses

from fluxjax.config import cli
from fluxjax.simulation.clock import Clock
from fluxjax.simulation.continuous_batch import SampleProgress
from fluxjax.simulation.hardware import TASKS, Hardware
from fluxjax.simulation.options import SimulateConfig, SimulationConfig
from fluxjax.simulation.reward_stage import Servers
from fluxjax.simulation.simulated_engine import SimulatedEngine
from fluxjax.simulation.workload import Workload


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a step by hand is made of."""

    hardware: Hardware
    gpus: int
    degree: int
    max_new_tokens: int
    median: float
    responses: int  # a prompt
    workers: dict[str, int]  # rewards that are computed at the same time


def setup_of(variant: str) -> Setup:
    """That of a variant of `configs/simulation.py`."""
    config = cli.load([f"--config=configs/simulation.py:{variant}"], SimulateConfig)
    sim, rollout = config.simulation, config.rollout
    workers = {"math": sim.rules, "code": sim.sandboxes, "judge": sim.judges}
    hardware = sim.hardware()
    return Setup(hardware, sim.gpus, sim.degree, rollout.max_new_tokens, sim.median, rollout.group_size, workers)


@dataclasses.dataclass
class Step:
    """Seconds of each stage; weight sync counts as rollout."""

    rollout: float
    reward: float
    training: float
    longest: int
    tokens: int
    preemptions: int


def workload(setup: Setup, seed: int, *tasks: str) -> Workload:
    settings = SimulationConfig(median=setup.median, tasks=tasks or TASKS)
    return Workload(seed, settings, setup.max_new_tokens)


@dataclasses.dataclass
class Rollout:
    seconds: float
    attempt: int
    launched: int  # samples a prompt
    accepted: dict[int, list[int]]  # by draw, in the order in which prompts were complete: samples
    preemptions: int


def roll_out(
    setup: Setup, work: Workload, draws: list[int], attempt: int = 0, keep: int = 0, count: int = 0, degree: int = 0
) -> Rollout:
    """Prompts are dealt to engines in turn. In a speculative step `count` responses each are generated, and it ends
    when `keep` prompts have the responses that they need."""
    clock, hardware, need = Clock(), setup.hardware, setup.responses
    count, keep = count or need, keep or len(draws)
    ended: dict[int, list[int]] = {draw: [] for draw in draws}
    complete: dict[int, list[int]] = {}

    def on_finish(progress: SampleProgress) -> None:
        draw = int(progress.rid.split(".")[0])
        ended[draw].append(progress.sample)
        if len(ended[draw]) == need:
            complete[draw] = ended[draw][:]
            for engine in engines:
                engine.abort(progress.rid)
        if len(complete) == keep:
            for one in engines:
                one.crash()

    degree = degree or setup.degree
    engines = [SimulatedEngine(clock, hardware, degree, on_finish) for _ in range(setup.gpus // degree)]
    for place, draw in enumerate(draws):
        engine, prompt = engines[place % len(engines)], work.prompt_tokens(draw)
        for sample, length in enumerate(work.samples(draw, attempt, count).lengths):
            engine.submit(f"{draw:08d}.{attempt:02d}", sample, prompt, length)
    clock.run()
    accepted = dict(list(complete.items())[:keep])
    return Rollout(clock.now, attempt, count, accepted, sum(engine.batch.preemptions for engine in engines))


def finish(setup: Setup, work: Workload, rollout: Rollout) -> Step:
    """Rewards, then training, then new weights."""
    hardware, tokens, longest, ends = setup.hardware, 0, 0, [0.0]
    servers = {task: Servers(workers) for task, workers in setup.workers.items()}
    for draw, accepted in rollout.accepted.items():
        samples = work.samples(draw, rollout.attempt, rollout.launched)
        task, prompt = work.prompt(draw).source, work.prompt_tokens(draw)
        for sample in accepted:
            length = prompt + samples.lengths[sample]
            seconds = hardware.reward_seconds(task, length, samples.sandbox[sample])
            ends.append(servers[task].submit(0.0, seconds))
            tokens += length
            longest = max(longest, samples.lengths[sample])
    return Step(
        rollout=rollout.seconds + hardware.sync_seconds(),
        reward=max(ends),
        training=hardware.train_seconds(tokens, setup.gpus),
        longest=longest,
        tokens=tokens,
        preemptions=rollout.preemptions,
    )


def synchronous_step(setup: Setup, work: Workload, draws: list[int], **how: int) -> Step:
    return finish(setup, work, roll_out(setup, work, draws, **how))
