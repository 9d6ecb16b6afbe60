"""The pre-flight: compiles a run's programs, adds up a device's memory, and says whether the run fits. If the run does
not fit, says which changes of settings would help, and how much memory the run would need with each change."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import models
from models.config import DecoderConfig
from models.decoder import parameter_count
from rollout.slots import PAGE_TOKENS
from sharding.weights import adapted

from ..config import FSDP, Config, Remat, RolloutEngine
from ..runtime.engine_pool import engine_count
from .account import CACHE, ENGINE, GIB, STATES, Account, Change, Remedy, RowGrowth, in_gib, remedies
from .run_programs import (
    Compiled,
    Progress,
    RunShapes,
    bytes_on_device,
    cache_bytes,
    cache_tokens,
    compiled_at_depth,
    engine_arrays,
    with_layers,
)

LEAST_SLOTS = 8
REMATS = (Remat.NONE, Remat.DOTS, Remat.LAYER, Remat.OFFLOAD)  # from the fastest to the one that needs least memory
PROGRAMS = ("accumulate", "update", "logprobs", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class DeviceRoom:
    """The memory of a device."""

    memory: float  # bytes
    usable: float  # bytes that JAX may use
    said_by: str  # the setting that bounds `usable`, and its value

    def __str__(self) -> str:
        return f"{in_gib(self.usable)} of {in_gib(self.memory)} GiB with {self.said_by}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The findings of a pre-flight. Sizes are bytes on the fullest device."""

    parameters: int
    devices: int
    room: DeviceRoom
    remat: Remat  # as configured, or as chosen
    layers: int  # decoder layers of the model
    compiled_layers: int  # if fewer than `layers`, sizes are extrapolated from this and twice this number
    account: Account
    programs: Mapping[str, Compiled]
    host: int  # bytes of a process while weights are loaded, beside the memory of Python and XLA
    largest_row: int | None  # tokens; 0: no row fits; None: not computed
    row: int  # tokens, as configured
    remedies: Sequence[Remedy]  # empty if the run fits

    @property
    def fits(self) -> bool:
        return self.account.bytes <= self.room.usable

    @property
    def extrapolated(self) -> bool:
        return self.compiled_layers < self.layers

    @property
    def attention(self) -> dict[str, str]:
        """The kernels of attention in each compiled program: `mosaic`, `triton` or both; without any, `portable`."""
        attending = {name: program for name, program in self.programs.items() if name != "update"}
        return {name: " and ".join(sorted(program.kernels)) or "portable" for name, program in attending.items()}

    @property
    def offloaded(self) -> float:
        """The most bytes of a device's temporaries that a program keeps in the host's memory."""
        return max(program.offloaded for program in self.programs.values())

    def answer(self) -> list[str]:
        """Returns lines that say whether the run fits, and if not, with which settings it would fit."""
        phase, peak = self.account.peak()
        fits = "FITS" if self.fits else "DOES NOT FIT"
        lines = [f"{fits}: the peak is {in_gib(peak)} GiB ({phase}); JAX may use {self.room}."]
        if self.fits:
            return lines
        if any(remedy.bytes <= self.room.usable for remedy in self.remedies):
            lines.append("It would fit with" + (" any one of:" if len(self.remedies) > 1 else ":"))
        elif self.remedies:
            lines.append("None of these makes it fit, not even all together; use a smaller model or more devices:")
        return lines + [f"  {remedy}" for remedy in self.remedies]

    def json(self) -> dict[str, Any]:
        phase, peak = self.account.peak()
        return {
            "fits": self.fits,
            "peak_gib": round(peak / GIB, 2),
            "peak_phase": phase,
            "usable_gib": round(self.room.usable / GIB, 2),
            "device_gib": round(self.room.memory / GIB, 2),
            "remat": self.remat.value,
            "attention": self.attention,
            "offloaded_gib": round(self.offloaded / GIB, 3),
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
    model: DecoderConfig,
    devices: Sequence[Any],
    room: DeviceRoom,
    progress: Progress,
    *,
    layers: int = 0,
    never_sampled: tuple[int, ...] | None = None,
    longest_row: bool = True,
    sleeping: bool = False,
) -> Verdict:
    """Compiles the largest shape of each program for `devices`, each of which has `room`.

    Programs of `layers` decoder layers, and of twice as many, are compiled, and sizes for all layers are extrapolated
    along a straight line. If `layers` is 0 or at least half of the model's, programs of all layers are compiled. For a
    model with layers of several kinds, `layers` is rounded up to a multiple of `attention_interval`, at least twice the
    interval. A loop over a single interval would be unrolled, and would need another amount of memory. With
    `sharding.remat` auto, the first of `REMATS` with which `accumulate` fits is taken, else the last. Without
    `longest_row`, the longest row of a run that fits is not computed. `Account` explains `sleeping`, and `RunShapes.of`
    explains `never_sampled`. Raises ConfigError for settings that can't work.
    """
    depth = model.text.num_layers
    period = model.text.attention_interval  # only multiples of the period have the model's mixture of layers
    few = -(-layers // period) * period
    few = max(few, 2 * period) if few and period > 1 else few
    few = few if 0 < 2 * few < depth else depth
    first: dict[str, Compiled] = {}
    programs: dict[str, Compiled] = {}

    def compiled(remat: Remat, names: Sequence[str]) -> tuple[RunShapes, Account]:
        changed = with_remat(config, remat)
        run = RunShapes.of(changed, model, devices, usable=room.usable)
        sized = copy.deepcopy(changed)  # programs of fewer layers have the cache of the complete model
        sized.rollout.kv_tokens = run.engine.cache.k_LCKSH.shape[1] * PAGE_TOKENS
        shallow, whole = compiled_at_depth(sized, model, devices, names, few, progress, never_sampled)
        first.update(shallow)
        programs.update(whole)
        return run, dataclasses.replace(_account(run, programs, room), sleeping=sleeping)

    quickest, *smaller = REMATS if config.sharding.remat is Remat.AUTO else [config.sharding.remat]
    run, account = compiled(quickest, PROGRAMS if config.rollout.engine is RolloutEngine.JAX else PROGRAMS[:3])
    for remat in smaller:
        if account.totals()["accumulate"] <= room.usable:  # no other phase depends on remat
            break
        run, account = compiled(remat, ["accumulate"])
    fits = account.bytes <= room.usable
    rows = _rows(run, few, first, programs, progress) if longest_row or not fits else None
    found: list[Remedy] = []
    if rows is not None and not fits:
        found = remedies(account, room.usable, changes(run, rows, room.usable, few, progress))
    specs = jax.tree.leaves(run.learner.gradients.strategy.specs, is_leaf=lambda leaf: hasattr(leaf, "axes"))
    largest_tensor = max(math.prod(spec.shape) for spec in specs)
    return Verdict(
        parameters=parameter_count(models.abstract(model)),
        devices=len(devices),
        room=room,
        remat=run.config.sharding.remat,
        layers=depth,
        compiled_layers=few,
        account=account,
        programs=programs,
        host=largest_tensor * (4 + 4),  # as read, at most 4 bytes a value, and as float32
        largest_row=None if rows is None else rows.largest(account, room.usable),
        row=config.packing.tokens_per_row,
        remedies=found,
    )


def _rows(
    run: RunShapes, few: int, first: Mapping[str, Compiled], programs: Mapping[str, Compiled], progress: Progress
) -> RowGrowth:
    """Measures the growth of temporaries with the tokens of a row, with `few` layers and rows of twice the length."""
    tokens = run.config.packing.tokens_per_row
    longer = copy.deepcopy(run.config)
    longer.packing.tokens_per_row = 2 * tokens
    fewer = RunShapes.of(longer, with_layers(run.model, few), run.devices)
    grown = fewer.compiled(["accumulate"], progress)["accumulate"].temporaries
    slope = (grown - first["accumulate"].temporaries) / tokens
    # The temporaries of further layers grow with the row, too, except their gradients.
    further_layers = programs["accumulate"].temporaries - first["accumulate"].temporaries
    further_layers -= (run.copies or run.trained) - (fewer.copies or fewer.trained)
    return RowGrowth(tokens, slope + max(further_layers, 0.0) / tokens)


def _account(run: RunShapes, programs: Mapping[str, Compiled], room: DeviceRoom) -> Account:
    cache, states = (run.engines_a_device * size for size in cache_bytes(run.engine))
    return Account(
        run.resident() | {CACHE: cache, STATES: states},
        gradients=run.trained,
        batch=bytes_on_device(run.batch),
        largest_weight=max(bytes_on_device(weight) for weight in jax.tree.leaves(run.engine.handed_in)),
        copies=run.copies,
        merged=bytes_on_device(adapted(run.learner.params, run.learner.gradients.strategy.specs)),
        temporaries={name: compiled.temporaries for name, compiled in programs.items()},
        results={name: compiled.results for name, compiled in programs.items()},
        servers=run.servers(room.usable),
    )


def with_remat(config: Config, remat: Remat) -> Config:
    """Returns a copy of the configuration with this rematerialisation."""
    changed = copy.deepcopy(config)
    changed.sharding.remat = remat
    return changed


def changes(run: RunShapes, rows: RowGrowth, usable: float, few: int, progress: Progress) -> list[Change]:
    """Returns the changes of settings that may make the run fit, in the order in which they are tried. For each
    rematerialisation that it tries, `less_kept` compiles programs of `few` layers and of twice as many."""
    config = run.config

    @functools.cache
    def temporaries(remat: Remat) -> float:
        changed = with_remat(config, remat)
        _, programs = compiled_at_depth(changed, run.model, run.devices, ["accumulate"], few, progress)
        return programs["accumulate"].temporaries

    def less_kept(account: Account) -> tuple[str, Account] | None:
        found: tuple[str, Account] | None = None
        smaller = REMATS[REMATS.index(config.sharding.remat) + 1 :]
        for remat in smaller if account.totals()["accumulate"] > usable else ():
            changed = account.with_temporaries("accumulate", temporaries(remat))
            if found is None or changed.bytes < found[1].bytes:
                found = f"--config.sharding.remat={remat.value}", changed
            if found[1].bytes <= usable:
                break
        return found

    def shorter_rows(account: Account) -> tuple[str, Account] | None:
        room = 1 if isinstance(config.sharding.strategy, FSDP) else len(run.devices)
        least = -(-config.rollout.max_sequence_tokens // room)
        tokens = rows.largest(account, usable)
        if least > tokens or tokens >= rows.tokens:
            tokens = max(rows.tokens // 2, least)
        if tokens >= rows.tokens:
            return None
        return f"--config.packing.tokens_per_row={tokens}", rows.account(account, tokens)

    def smaller_cache(account: Account) -> tuple[str, Account] | None:
        tokens, (kept, _) = cache_tokens(config), cache_bytes(run.engine)
        now = int(tokens * kept / cache_bytes(engine_arrays(config, models.abstract(run.model), run.devices))[0])
        for share in (0.75, 0.5, 0.25):
            count = int(share * now) // PAGE_TOKENS * PAGE_TOKENS
            if count >= config.rollout.max_sequence_tokens and account.with_cache(share).bytes <= usable:
                return f"--config.rollout.kv_tokens={count}", account.with_cache(share)
        return None

    def fewer_slots(account: Account) -> tuple[str, Account] | None:
        if config.rollout.kv_tokens:
            return None  # the cache's size does not depend on slots
        slots = config.rollout.slots
        for count in range(slots // LEAST_SLOTS * LEAST_SLOTS, 0, -LEAST_SLOTS):
            if count < slots and account.with_slots(count / slots).bytes <= usable:
                return f"--config.rollout.slots={count}", account.with_slots(count / slots)
        if slots < 4 * LEAST_SLOTS:
            return None
        return f"--config.rollout.slots={slots // 4}", account.with_slots(0.25)

    def wider_engines(account: Account) -> tuple[str, Account] | None:
        degree = config.parallelism.degree
        wanted = engine_count(config, run.devices) * degree
        most = min(config.sharding.devices_per_host, len(run.devices), run.model.text.num_heads)
        best: tuple[str, Account] | None = None
        while 2 * degree <= most and (best is None or best[1].bytes > usable):
            degree *= 2
            arrays = engine_arrays(config, models.abstract(run.model), run.devices, degree)
            engines = -(-wanted // len(run.devices))
            (cache, states), (before, _) = cache_bytes(arrays), cache_bytes(run.engine)
            cache = account.resident[CACHE] * cache / before
            sizes = {ENGINE: engines * bytes_on_device(arrays.params), CACHE: cache, STATES: engines * states}
            largest = max(bytes_on_device(weight) for weight in jax.tree.leaves(arrays.handed_in))
            changed = dataclasses.replace(account, resident={**account.resident, **sizes}, largest_weight=largest)
            settings = f"--config.rollout.engines={max(wanted // degree, 1)} --config.parallelism.degree={degree}"
            best = settings, changed
        return best

    def more_devices(account: Account) -> tuple[str, Account] | None:
        return "twice as many devices", account.with_devices(2.0)

    ours = [smaller_cache, fewer_slots, wider_engines] if run.engines_a_device else []
    return [less_kept, shorter_rows, *ours, more_devices]
