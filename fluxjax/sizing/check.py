"""The pre-flight itself: compiles what a run would, adds up what a device holds, and says what fits."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import models
from models.config import AnyConfig
from models.decoder import parameter_count

from ..config import Config
from .account import GIB, Account, Remedy, Rows, remedies
from .advice import changes
from .programs import Compiled, Progress, RunShapes, bytes_on_device, compiled_at_depth, with_layers

PROGRAMS = ("accumulate", "update", "logprobs", "prefill", "decode")


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
    depth, run = model.text.num_layers, RunShapes.of(config, model, devices)
    few = layers if 0 < 2 * layers < depth else depth
    first, programs = compiled_at_depth(config, model, devices, PROGRAMS, few, progress)
    account = _account(run, programs)

    tokens = config.packing.tokens_per_row
    longer = copy.deepcopy(config)
    longer.packing.tokens_per_row = 2 * tokens
    fewer = RunShapes.of(longer, with_layers(model, few), devices)
    grown = fewer.compiled(["accumulate"], progress)["accumulate"].temporaries
    slope = (grown - first["accumulate"].temporaries) / tokens
    # What the other layers add grows with the row, too, but for their gradients.
    others = programs["accumulate"].temporaries - first["accumulate"].temporaries
    others -= bytes_on_device(run.learner.params) - bytes_on_device(fewer.learner.params)
    rows = Rows(tokens, slope + max(others, 0.0) / tokens)
    found: list[Remedy] = []
    if account.bytes > usable:
        found = remedies(account, usable, changes(run, rows, usable, few, progress))
    specs = jax.tree.leaves(run.learner.gradients.strategy.specs, is_leaf=lambda leaf: hasattr(leaf, "axes"))
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
        gradients=masters * jnp.dtype(config.optim.gradients_dtype.value).itemsize / 4,
        moments=bytes_on_device(learner.opt_state),
        reference=masters if config.algorithm.kl_coefficient else 0.0,
        batch=bytes_on_device(run.batch),
        engine=engines * bytes_on_device(run.engine.params),
        cache=engines * bytes_on_device(run.engine.cache),
        largest_weight=max(bytes_on_device(weight) for weight in jax.tree.leaves(run.engine.handed_in)),
        temporaries={name: compiled.temporaries for name, compiled in programs.items()},
        results={name: compiled.results for name, compiled in programs.items()},
    )
