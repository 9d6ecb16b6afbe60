"""Changes of settings that may make a run fit, each with what the run would then need."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax

import models
from rollout.slots import PAGE_TOKENS

from ..config import FSDP, Config, Remat
from ..runtime.engine_pool import engine_count
from .account import Account, Change, RowGrowth
from .run_programs import (
    Progress,
    RunShapes,
    bytes_on_device,
    cache_tokens,
    compiled_at_depth,
    engine_arrays,
)

LEAST_SLOTS = 8
REMATS = (Remat.NONE, Remat.DOTS, Remat.LAYER, Remat.OFFLOAD)  # from the quickest to the one that needs least


def with_remat(config: Config, remat: Remat) -> Config:
    """A copy of the configuration with this rematerialisation."""
    changed = copy.deepcopy(config)
    changed.sharding.remat = remat
    return changed


def changes(run: RunShapes, rows: RowGrowth, usable: float, few: int, progress: Progress) -> list[Change]:
    """The changes of settings that may make the run fit, in the order in which they would be tried. `few` layers are
    compiled where something must be."""
    config = run.config

    @functools.cache
    def temporaries(remat: Remat) -> float:
        changed = with_remat(config, remat)
        _, programs = compiled_at_depth(changed, run.model, run.devices, ["accumulate"], few, progress)
        return programs["accumulate"].temporaries

    def less_kept(account: Account) -> tuple[str, Account] | None:
        found: tuple[str, Account] | None = None
        if account.totals()["accumulate"] <= usable:
            return None
        for remat in REMATS[REMATS.index(config.sharding.remat) + 1 :]:
            if found is None or found[1].bytes > usable:
                changed = account.with_temporaries("accumulate", temporaries(remat))
                if found is None or changed.bytes < found[1].bytes:
                    found = f"--config.sharding.remat={remat.value}", changed
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
        tokens, kept = cache_tokens(config), bytes_on_device(run.engine.cache)
        now = int(tokens * kept / bytes_on_device(engine_arrays(config, models.abstract(run.model), run.devices).cache))
        for share in (0.75, 0.5, 0.25):
            count = int(share * now) // PAGE_TOKENS * PAGE_TOKENS
            if count >= config.rollout.max_sequence_tokens and account.with_cache(share).bytes <= usable:
                return f"--config.rollout.kv_tokens={count}", account.with_cache(share)
        return None

    def fewer_slots(account: Account) -> tuple[str, Account] | None:
        if config.rollout.kv_tokens:
            return None  # the cache is as large with fewer
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
            changed = dataclasses.replace(
                account,
                engine=engines * bytes_on_device(arrays.params),
                cache=account.cache * bytes_on_device(arrays.cache) / bytes_on_device(run.engine.cache),
                largest_weight=max(bytes_on_device(weight) for weight in jax.tree.leaves(arrays.handed_in)),
            )
            settings = f"--config.rollout.engines={max(wanted // degree, 1)} --config.parallelism.degree={degree}"
            best = settings, changed
        return best

    def more_devices(account: Account) -> tuple[str, Account] | None:
        return "twice as many devices", account.with_devices(2.0)

    ours = [smaller_cache, fewer_slots, wider_engines] if run.engines_a_device else []
    return [less_kept, shorter_rows, *ours, more_devices]
