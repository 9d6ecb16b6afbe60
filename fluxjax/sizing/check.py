"""The pre-flight itself: compiles what a run would, adds up what a device holds, and says what fits."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import models
from models.config import AnyConfig
from models.decoder import parameter_count

from ..config import Config, Remat, Strategy
from .account import GIB, Account, Change, Remedy, Rows, remedies
from .programs import Compiled, Progress, RunShapes, bytes_on_device, engine_arrays, with_layers

PROGRAMS = ("accumulate", "update", "logprobs", "prefill", "decode")
LEAST_SLOTS = 8


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The findings of a pre-flight. Sizes in bytes, on the fullest device."""

    parameters: int
    devices: int
    memory: int  # of a device
    usable: float  # of that, by JAX
    layers: int  # decoder layers of the model
    compiled_layers: int  # fewer: memory and collectives are extrapolated from this and twice this
    account: Account
    programs: Mapping[str, Compiled]
    host: int  # bytes of a process while weights are loaded, beside what Python and XLA take
    largest_row: int  # tokens; 0: none fits
    row: int  # tokens, as configured
    remedies: Sequence[Remedy]  # where it does not fit

    @property
    def fits(self) -> bool:
        return self.account.bytes <= self.usable

    @property
    def extrapolated(self) -> bool:
        return self.compiled_layers < self.layers

    def json(self) -> dict[str, Any]:
        phase, peak = self.account.peak()
        return {
            "fits": self.fits,
            "peak_gib": round(peak / GIB, 2),
            "peak_phase": phase,
            "usable_gib": round(self.usable / GIB, 2),
            "device_gib": round(self.memory / GIB, 2),
            "devices": self.devices,
            "parameters": self.parameters,
            "layers": self.layers,
            "compiled_layers": self.compiled_layers,
            "extrapolated": self.extrapolated,
            "memory_gib": {
                phase: {kind: round(size / GIB, 3) for kind, size in kinds.items()}
                for phase, kinds in self.account.phases().items()
            },
            "collectives": {
                program: {
                    kind: {
                        "count": round(sent.count, 1),
                        "gb": round(sent.bytes / 1e9, 3),
                        "exposed": round(sent.exposed, 1),
                        "exposed_gb": round(sent.exposed_bytes / 1e9, 3),
                    }
                    for kind, sent in compiled.traffic.items()
                }
                for program, compiled in self.programs.items()
            },
            "host_gib": round(self.host / GIB, 2),
            "row_tokens": self.row,
            "largest_row_tokens": self.largest_row,
            "settings": [" ".join(remedy.settings) for remedy in self.remedies],
            "settings_gib": [round(remedy.bytes / GIB, 2) for remedy in self.remedies],
            "compile_seconds": round(sum(compiled.seconds for compiled in self.programs.values()), 1),
        }


def check(
    config: Config,
    model: AnyConfig,
    devices: Sequence[Any],
    memory: int,
    usable: float,
    progress: Progress,
    layers: int = 0,
) -> Verdict:
    """Compiles the largest shape of each program for `devices`, whose `memory` JAX may use `usable` of.

    `layers`: so many decoder layers, and twice as many, are compiled, and what all need is extrapolated along a
    straight line; 0, or half of the model's or more: all. Raises ConfigError for settings that can't work.
    """
    whole = RunShapes.of(config, model, devices)
    depth = model.text.num_layers
    few = layers if 0 < 2 * layers < depth else depth
    fewer = whole if few == depth else RunShapes.of(config, with_layers(model, few), devices)
    programs = fewer.compiled(PROGRAMS, progress)
    compiled_first = programs["accumulate"]
    if few < depth:
        twice = RunShapes.of(config, with_layers(model, 2 * few), devices).compiled(PROGRAMS, progress)
        factor = (depth - few) / few
        programs = {name: first.beyond(twice[name], factor) for name, first in programs.items()}
    account = _account(whole, programs)

    longer = _with_rows(config, 2 * config.packing.tokens_per_row)
    slope = RunShapes.of(longer, fewer.model, devices).compiled(["accumulate"], progress)["accumulate"].temporaries
    slope = (slope - compiled_first.temporaries) / config.packing.tokens_per_row
    if few < depth:  # of what a layer adds, its gradients do not grow with the row
        a_layer = (programs["accumulate"].temporaries - compiled_first.temporaries) / (depth - few)
        a_layer -= (bytes_on_device(whole.learner.params) - bytes_on_device(fewer.learner.params)) / (depth - few)
        slope += (depth - few) * max(a_layer, 0.0) / config.packing.tokens_per_row
    rows = Rows(config.packing.tokens_per_row, slope)
    found: list[Remedy] = []
    if account.bytes > usable:
        found = remedies(account, usable, _changes(whole, fewer, account, rows, usable, progress))
    specs = jax.tree.leaves(whole.learner.gradients.strategy.specs, is_leaf=lambda leaf: hasattr(leaf, "axes"))
    largest_tensor = max(math.prod(spec.shape) for spec in specs)
    return Verdict(
        parameters=parameter_count(models.abstract(model)),
        devices=len(devices),
        memory=memory,
        usable=usable,
        layers=depth,
        compiled_layers=few,
        account=account,
        programs=programs,
        host=largest_tensor * (4 + 4),  # as read, in four bytes at most, and as float32
        largest_row=rows.largest(account, usable),
        row=config.packing.tokens_per_row,
        remedies=found,
    )


def _account(run: RunShapes, programs: Mapping[str, Compiled]) -> Account:
    config, learner = run.config, run.learner
    masters = bytes_on_device(learner.params)
    engines = -(-config.policy.engines * config.parallelism.degree // len(run.devices))
    return Account(
        masters=masters,
        moments=bytes_on_device(learner.opt_state),
        reference=masters if config.algorithm.kl_coefficient else 0,
        batch=bytes_on_device(run.batch),
        engine=engines * bytes_on_device(run.engine.params),
        cache=engines * bytes_on_device(run.engine.cache),
        largest_weight=max(bytes_on_device(weight) for weight in jax.tree.leaves(run.engine.handed_in)),
        temporaries={name: compiled.temporaries for name, compiled in programs.items()},
        results={name: compiled.results for name, compiled in programs.items()},
    )


def _with_rows(config: Config, tokens: int) -> Config:
    changed = copy.deepcopy(config)
    changed.packing.tokens_per_row = tokens
    return changed


def _changes(
    run: RunShapes, fewer: RunShapes, account: Account, rows: Rows, usable: float, progress: Progress
) -> list[Change]:
    """The changes of settings that may make the run fit, in the order in which they would be tried."""
    config = run.config

    def with_remat() -> float:
        changed = copy.deepcopy(config)
        changed.sharding.remat = Remat.LAYER
        depth, few = run.model.text.num_layers, fewer.model.text.num_layers
        first = RunShapes.of(changed, fewer.model, run.devices).compiled(["accumulate"], progress)["accumulate"]
        if few == depth:
            return first.temporaries
        twice = RunShapes.of(changed, with_layers(run.model, 2 * few), run.devices)
        return first.beyond(twice.compiled(["accumulate"], progress)["accumulate"], (depth - few) / few).temporaries

    def remat(account: Account) -> tuple[str, Account] | None:
        if config.sharding.remat is Remat.LAYER:
            return None
        return "--config.sharding.remat=layer", account.with_temporaries("accumulate", with_remat())

    def shorter_rows(account: Account) -> tuple[str, Account] | None:
        room = 1 if config.sharding.strategy is Strategy.FSDP else len(run.devices)
        least = -(-config.rollout.max_sequence_tokens // room)
        tokens = rows.largest(account, usable)
        if least > tokens or tokens >= rows.tokens:
            tokens = max(rows.tokens // 2, least)
        if tokens >= rows.tokens:
            return None
        return f"--config.packing.tokens_per_row={tokens}", rows.account(account, tokens)

    def fewer_slots(account: Account) -> tuple[str, Account] | None:
        slots = config.rollout.slots
        for count in range(slots // LEAST_SLOTS * LEAST_SLOTS, 0, -LEAST_SLOTS):
            if count < slots and account.with_slots(count / slots).bytes <= usable:
                return f"--config.rollout.slots={count}", account.with_slots(count / slots)
        if slots < 4 * LEAST_SLOTS:
            return None
        return f"--config.rollout.slots={slots // 4}", account.with_slots(0.25)

    def wider_engines(account: Account) -> tuple[str, Account] | None:
        degree, wanted = config.parallelism.degree, config.policy.engines * config.parallelism.degree
        most = min(config.sharding.devices_per_host, len(run.devices), run.model.text.num_heads)
        best: tuple[str, Account] | None = None
        while 2 * degree <= most and (best is None or best[1].bytes > usable):
            degree *= 2
            arrays = engine_arrays(config, models.abstract(run.model), run.devices, degree)
            engines = -(-wanted // len(run.devices))
            changed = dataclasses.replace(
                account,
                engine=engines * bytes_on_device(arrays.params),
                cache=account.cache * bytes_on_device(arrays.cache) / bytes_on_device(run.engine.cache),
                largest_weight=max(bytes_on_device(weight) for weight in jax.tree.leaves(arrays.handed_in)),
            )
            settings = f"--config.policy.engines={max(wanted // degree, 1)} --config.parallelism.degree={degree}"
            best = settings, changed
        return best

    def more_devices(account: Account) -> tuple[str, Account] | None:
        return "twice as many hosts in --topology", account.with_devices(2)

    return [remat, shorter_rows, fewer_slots, wider_engines, more_devices]
