"""Runs one of several processes that train together, or process 0 beside scripted followers: run by
`benchmarks/hosts.py`.

`tell` does only process 0's work for the other processes in a step; `step` runs a complete step.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any, cast

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from common import Channel, Stopwatch, response_lengths
from hosts_scripted import ScriptedLinks
from ulysses_worker import text_model

from fluxjax.algorithms import grpo
from fluxjax.base.process import collector_paused, keep_freed_memory
from fluxjax.base.types import Group, PreparedPrompt, Prompt, Response, Reward, Sample
from fluxjax.batch.composer import Composer, Team
from fluxjax.batch.composition import Composition
from fluxjax.config import STRATEGIES, Config, ConfigError
from fluxjax.hosts.gang import Gang, check_across_processes, fingerprint
from fluxjax.hosts.orders import Learn, OrderError, Value, decode, encode, shares_of
from fluxjax.learner.learner import Learner
from models.decoder import parameter_count
from models.inputs import ModelInput
from sharding.links import Links, initialize

VOCABULARY = 8192
_SHAPE = {"vocab_size": VOCABULARY, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
MODELS = {  # by their numbers of parameters
    "0.2M": _SHAPE | {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2},
    "3M": _SHAPE | {"hidden_size": 128, "intermediate_size": 1024},
    "20M": _SHAPE | {"hidden_size": 512, "intermediate_size": 2048},
}
PROMPT = 100  # tokens
MOST = {True: 256, False: 2048}  # tokens of a response, with a model and without one
ROW = 4096  # tokens of a row, without a model


class Process:
    """One process of the run. All processes make the same random steps."""

    def __init__(self, settings: dict[str, Any], links: Links | ScriptedLinks | None) -> None:
        self._settings, self._links = settings, links
        self._gang = Gang(cast(Links, links)) if links is not None else Team()
        self._processes = self._gang.processes
        self._most, row = MOST["model" in settings], settings.get("row", ROW)
        self._config = Config()
        self._config.sharding.strategy = STRATEGIES[settings["strategy"]]()
        self._config.packing.tokens_per_row, self._config.packing.rows_per_device = row, 1
        self._config.rollout.max_new_tokens = self._most
        self._devices = settings["devices"] * self._processes
        self.tokens = 0  # tokens of the last step's responses
        self._vocabulary = MODELS[settings["model"]]["vocab_size"] if "model" in settings else VOCABULARY
        self._learner: Learner | None = None
        self._composer = Composer(self._config, self._devices)
        self._gang.equip(self._config, lambda ticket: "", None)
        if "model" in settings:
            if self._processes > 1:
                check_across_processes(self._config)
            model = text_model(MODELS[settings["model"]])
            self.parameters = parameter_count(model)
            assert not isinstance(links, ScriptedLinks)
            self._learner = Learner(self._config, model, grpo.token_loss, links=links)

    def tell(self, number: int) -> dict[str, Any]:
        """Does process 0's work for the other processes in a step: plans, writes their rows down, sends them, receives
        their agreement. Returns its seconds, bytes and tokens."""
        if self._gang.process:
            self._follow()
            return {}
        groups, prepared = self._step(number)
        watch, gang, links = Stopwatch(), self._gang, self._links
        with watch("arrive"):
            for group in groups:
                for sample in group.samples:
                    sample.response.packed()
                group.packed()
        before = gang.bytes_told
        with collector_paused():  # as `Team.composed` does
            with watch("plan"):
                shares = [[share] for share in self._composer.outline(groups, prepared).cut(self._processes)]
            if isinstance(links, ScriptedLinks):
                lead = fingerprint(self._config, [self._composer.lay_out(shares[0][0])])
                links.answer(b"".join(encode(Value(lead))))
            with watch("send"):  # writing down, too
                gang.hand_out(shares)
            with watch("own_rows"):
                composition = self._composer.lay_out(shares[0][0])
        with watch("agree"):
            gang.agree([composition])
        seconds = watch.take()
        tokens_told = self.tokens - int(composition.lengths.sum())
        return {
            "seconds": {name: round(value, 5) for name, value in seconds.items()},
            "bytes": gang.bytes_told - before,
            "tokens": self.tokens,
            "tokens_told": tokens_told,
        }

    def step(self, _: int) -> dict[str, Any]:
        """Runs a step, from scored groups to new parameters; always the same step, so that it compiles once."""
        learner = self._learner
        assert learner is not None
        started = time.perf_counter()
        if self._gang.process:
            composition = self._follow()
        else:
            [composition] = self._gang.composed(self._composer, [self._step(0)])
        learner.step(composition.everywhere)
        jax.block_until_ready(learner.params)
        return {"seconds": time.perf_counter() - started}

    def _follow(self) -> Composition:
        order = decode(self._gang.links.receive(0))  # type: ignore[union-attr]
        if not isinstance(order, Learn):
            raise OrderError(f"expected rows, not {order.name}")
        [composition] = self._gang.laid_out(self._composer, shares_of(order, self._inputs))
        return composition

    def _step(self, number: int) -> tuple[list[Group], dict[int, PreparedPrompt]]:
        """Returns the groups of a step, as many for each process, and their prompts by draw."""
        prompts, size = self._settings["groups"] * self._processes, self._settings["group_size"]
        lengths = response_lengths(True, prompts, size, self._most, seed=number)
        self.tokens = sum(map(sum, lengths))
        rng = np.random.default_rng(number)
        groups, prepared = [], {}
        for draw, group_lengths in enumerate(lengths):
            prompt = Prompt(str(draw), "random", "", "", draw=draw)
            prepared[draw] = PreparedPrompt(prompt, self._inputs([draw])[draw])
            samples = tuple(
                Sample(self._response(rng, draw, k, n), Reward(0.0, False), k - 1.5)
                for k, n in enumerate(group_lengths)
            )
            groups.append(Group(prompt, samples))
        return groups, prepared

    def _response(self, rng: np.random.Generator, draw: int, sample: int, length: int) -> Response:
        return Response(
            rid=f"{draw}/{sample}",
            draw=draw,
            sample=sample,
            token_ids=tuple(rng.integers(0, self._vocabulary, length).tolist()),
            logprobs=tuple((-rng.random(length)).astype(np.float32).tolist()),
            versions=(1,) * length,
            finish="stop",
        )

    def _inputs(self, draws: Iterable[int]) -> dict[int, ModelInput]:
        tokens, places = np.zeros(PROMPT, np.int32), np.tile(np.arange(PROMPT, dtype=np.int32), (3, 1))
        return {draw: ModelInput(tokens, places, np.full(PROMPT, -1, np.int32), PROMPT) for draw in draws}


def main(settings: dict[str, Any]) -> None:
    if "core" in settings:
        os.sched_setaffinity(0, {settings["core"]})  # before JAX starts its threads
    if settings.get("strangers"):
        settings |= {"processes": 1, "process": 0}
    keep_freed_memory()  # as in `fluxjax.train`
    channel = Channel()
    links: Links | ScriptedLinks | None = None
    if settings["processes"] > 1:
        initialize(f"127.0.0.1:{settings['port']}", settings["processes"], settings["process"])
        links = Links(timeout=60.0)
    elif "scripted" in settings:
        links = ScriptedLinks(settings["scripted"])
    try:
        process = Process(settings, links)
    except ConfigError as error:
        channel.say(refused=str(error))
        return
    channel.say(processes=settings["processes"])
    for request in channel.requests():
        channel.say(**getattr(process, request["do"])(request["number"]))
    channel.say(tokens=process.tokens, parameters=getattr(process, "parameters", 0))
    if isinstance(links, Links):
        links.barrier("end")
    if links is not None:
        links.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
