"""Changes of settings that may make a run fit, each with what the run would then need."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax

import models

from ..config import Remat, Strategy
from .account import Account, Change, Rows
from .programs import Progress, RunShapes, bytes_on_device, compiled_at_depth, engine_arrays

LEAST_SLOTS = 8


def changes(run: RunShapes, rows: Rows, usable: float, few: int, progress: Progress) -> list[Change]:
    """The changes of settings that may make the run fit, in the order in which they would be tried. `few` layers are
    compiled where something must be."""
    config = run.config

    @functools.cache
    def with_remat() -> float:
        changed = copy.deepcopy(config)
        changed.sharding.remat = Remat.LAYER
        _, programs = compiled_at_depth(changed, run.model, run.devices, ["accumulate"], few, progress)
        return programs["accumulate"].temporaries

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
