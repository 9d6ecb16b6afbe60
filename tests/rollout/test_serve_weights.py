"""New weights for `rollout.serve` in buckets and from a shared folder: all of them or none, at the end only."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save
from serve_cases import Served, SlowEngine, checksum, checksums, last, on_disk, refused, serving, single

import models
from models.config import NameLayout
from models.hf import SINGLE
from rollout.weights import published
from rollout.weights.published import SharedFolders
from rollout.weights.version_folders import VersionFolders, pulled, tensors_of

TENSORS = "/update_weights_from_tensor"


def weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return load_file(folder / SINGLE)


def bucket(tensors: dict[str, np.ndarray], version: int | None = None, **changes: Any) -> dict[str, Any]:
    """A body as a fleet sends it."""
    data = base64.b64encode(save(tensors)).decode()
    named = {} if version is None else {"weight_version": str(version)}
    return {"serialized_named_tensors": [data], "load_format": "safetensors", **named, **changes}


def thirds(tensors: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[part::3]} for part in range(3)]


async def version(served: Served) -> str:
    return (await served.get("/model_info"))["weight_version"]


async def fails(served: Served, path: str, body: Any, complaint: str) -> None:
    status, reply = await served.post(path, body)
    assert status == 400 and reply["success"] is False and complaint in reply["message"], reply


async def sent(served: Served, *bodies: dict[str, Any]) -> None:
    """A whole update."""
    await served.ok("/begin_weight_update")
    for body in bodies:
        await served.ok(TENSORS, body)
    await served.ok("/end_weight_update")


async def updated(served: Served, folder: pathlib.Path, number: int) -> None:
    """A whole update, and its proof."""
    await sent(served, bucket(weights(folder), number))
    assert await checksums(served) == on_disk(folder) and await version(served) == str(number)


# --- buckets --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_buckets_take_effect_together_at_the_end(checkpoints):
    async with serving(checkpoints["vl"], SlowEngine) as served:
        (before,) = await served.in_process(served.request(max_new_tokens=40))
        stream = served.events(single(served, "r"))
        await anext(stream)
        await served.ok("/pause_generation", {"mode": "retract"})
        await served.ok("/begin_weight_update", {"selector": "all"})
        for number, part in enumerate(thirds(weights(checkpoints["other"]))):
            await served.ok(TENSORS, bucket(part, 7 if number == 2 else None))
            assert await version(served) == "0" and await checksums(served) == on_disk(checkpoints["vl"])
        await served.ok("/end_weight_update")
        assert await version(served) == "7" and await checksums(served) == on_disk(checkpoints["other"])
        await served.ok("/continue_generation", {})
        end = await last(stream)
        old, new = end["meta_info"]["weight_versions"]
        assert (old["version"], old["start"], new["version"], new["end"]) == ("0", 0, "7", len(end["output_ids"]))
        assert 0 < old["end"] == new["start"]
        assert end["output_ids"][: old["end"]] == list(before.ids[: old["end"]])


@pytest.mark.medium
async def test_a_part_of_the_weights_changes_what_it_names(checkpoints):
    async with serving(checkpoints["text"]) as served:
        held, wanted = weights(checkpoints["text"]), on_disk(checkpoints["text"])
        name = "model.layers.1.mlp.up_proj.weight"
        await sent(served, bucket({name: held[name] + 9}, 2), bucket({name: held[name] + 1}))  # the last one counts
        assert await checksums(served) == wanted | {name: checksum(held[name] + 1)}
        assert await version(served) == "2"


async def test_an_update_is_open_once(checkpoints):
    async with serving(checkpoints["text"]) as served:
        before = await checksums(served)
        await fails(served, TENSORS, bucket({}), "no update is open")
        await fails(served, "/end_weight_update", {}, "no update is open")
        await served.ok("/begin_weight_update")
        name = min(before)
        await served.ok(TENSORS, bucket({name: np.zeros(3, np.float32)}))
        await served.ok("/begin_weight_update")  # as after one that broke off: what came is forgotten
        await served.ok("/end_weight_update")
        await fails(served, "/end_weight_update", {}, "no update is open")
        assert await checksums(served) == before and await version(served) == "0"


def changed(tensors: dict[str, np.ndarray], name: str, value: Any) -> dict[str, np.ndarray]:
    return tensors | {name: np.asarray(value, np.float32)}


@pytest.mark.medium
async def test_weights_that_do_not_fit_leave_the_old_ones(checkpoints):
    async with serving(checkpoints["text"]) as served:
        before, held = await checksums(served), weights(checkpoints["text"])
        name = "model.layers.0.self_attn.q_proj.weight"
        nan = held[name].copy()
        nan[3, 2] = np.nan
        for tensors, complaint in [
            (changed(held, "model.layers.7.mlp.up_proj.weight", 3), "model.layers.7.mlp.up_proj.weight"),
            (changed({}, "weight", [3]), "weight: no tensor of this model"),
            (changed(held, name, held[name][1:]), name),
            (changed({}, name, 3), name),
            (changed(held, name, nan), "finite"),
        ]:
            await served.ok("/begin_weight_update")
            await served.ok(TENSORS, bucket(tensors, 3))
            await fails(served, "/end_weight_update", {}, complaint)
            assert await checksums(served) == before and await version(served) == "0"
            await fails(served, "/end_weight_update", {}, "no update is open")
        request = served.request()
        await served.ok("/generate", served.body(request, stream=False))
        for number in (4, 5):
            await updated(served, checkpoints["text"], number)


@pytest.mark.medium
async def test_what_is_no_bucket_is_refused_and_the_update_goes_on(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        await served.ok("/begin_weight_update")
        good = bucket(weights(checkpoints["other"]), 5)
        for body in (
            {},
            good | {"load_format": None},
            good | {"load_format": "direct"},
            good | {"serialized_named_tensors": []},
            good | {"serialized_named_tensors": [3]},
            good | {"serialized_named_tensors": good["serialized_named_tensors"][0]},
        ):
            await refused(served, body, "must be strings in base64", TENSORS)
        await refused(served, good | {"serialized_named_tensors": ["a"]}, "serialized_named_tensors", TENSORS)
        await refused(served, good | {"weight_version": "v5"}, "weight_version must be", TENSORS)
        for text in ("", base64.b64encode(b"no pickle").decode(), good["serialized_named_tensors"][0][:400]):
            await fails(served, TENSORS, good | {"serialized_named_tensors": [text]}, "SafetensorError")
        await served.ok("/end_weight_update")  # nothing of these is there
        assert await checksums(served) == on_disk(checkpoints["vl"]) and await version(served) == "0"
        await updated(served, checkpoints["other"], 5)


async def test_weights_are_cast_to_what_the_server_computes_in(checkpoints):
    async with serving(checkpoints["text"], dtype="float32") as served:
        held = weights(checkpoints["text"])
        narrow = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in held.items()}
        await sent(served, bucket(narrow, 1))
        wide = {name: tensor.astype(np.float32) for name, tensor in narrow.items()}
        assert await checksums(served) == {name: checksum(tensor) for name, tensor in wide.items()}


# --- a shared folder ------------------------------------------------------------------------------


@pytest.mark.medium
async def test_a_server_pulls_what_it_then_reads(checkpoints, tmp_path, monkeypatch):
    """A whole version, then a delta; what was pulled goes with the server."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(published, "SHARED_MEMORY", tmp_path / "memory")
    local = tmp_path / "local"
    whole = models.load(checkpoints["text"])
    config, params = whole.config, models.split(whole)[1]
    memory, shared = SharedFolders(config, "float32"), VersionFolders(tmp_path / "shared")
    async with serving(checkpoints["text"]) as served:
        before = await checksums(served)
        for number in (3, 4):
            params = jax.tree.map(lambda weight: weight.at[..., 0].add(1), params)
            written = memory.write(number, params)
            shared.publish(written)
            body = {"local_checkpoint_dir": str(local), "source_dir": str(shared.source), "target_version": number}
            answer = await served.ok("/pull_weights", body)
            assert answer["success"] and await checksums(served) == before
            read = {"model_path": answer["model_path"], "weight_version": str(number)}
            await served.ok("/update_weights_from_disk", read)
            before = on_disk(written.folder)
            assert await checksums(served) == before and await version(served) == str(number)
        await fails(served, "/pull_weights", body | {"target_version": 9}, "weight_v000009: no such version")
        await fails(served, "/pull_weights", body | {"source_dir": "/"}, "no such version")
        await fails(served, "/pull_weights", body | {"local_checkpoint_dir": "/proc/no/such"}, "/proc/no")
        for changes in ({"target_version": "4"}, {"target_version": True}, {"target_version": -1}):
            await refused(served, body | changes, "target_version must be", "/pull_weights")
        for changes in ({"source_dir": ""}, {"source_dir": None}, {"local_checkpoint_dir": 3}):
            await refused(served, body | changes, "must be strings", "/pull_weights")
        assert await checksums(served) == before
        assert list(local.rglob(SINGLE))
        (local / "not ours").write_text("")
    place = pulled(local, shared.source)  # another server of the host may be reading it
    assert {there.name for there in local.iterdir()} == {"not ours", place.name}
    shared.close()


@pytest.mark.medium
async def test_updates_wait_for_each_other(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        await served.ok("/begin_weight_update")
        parts = thirds(weights(checkpoints["other"]))
        await asyncio.gather(*(served.ok(TENSORS, bucket(part, 2)) for part in parts))
        read = {"model_path": str(checkpoints["vl"]), "weight_version": "3"}
        await asyncio.gather(
            served.ok("/end_weight_update"), *(served.ok("/update_weights_from_disk", read) for _ in range(2))
        )
        number, held = await version(served), await checksums(served)
        assert held == on_disk(checkpoints["vl" if number == "3" else "other"])


@pytest.mark.slow
async def test_a_checkpoint_with_nested_names_is_served_under_those_that_are_sent(checkpoints, tmp_path) -> None:
    """`model.language_model.*`, as transformers writes them now; a fleet sends the older names, which SGLang reads."""
    flat = models.load(checkpoints["vl"])
    nested = dataclasses.replace(flat.config, names=NameLayout.NESTED)
    whole = models.create(nested, seed=1)
    models.save(whole, tmp_path / "nested")
    for file in checkpoints["vl"].iterdir():
        if "token" in file.name or "processor" in file.name:
            shutil.copy(file, tmp_path / "nested")
    assert any("language_model" in name for name in on_disk(tmp_path / "nested"))
    with contextlib.closing(SharedFolders(nested, "float32")) as memory:
        written = memory.write(1, models.split(models.create(nested, seed=2))[1])
        async with serving(tmp_path / "nested") as served:
            await sent(served, bucket(dict(tensors_of(written.folder))))
            written.checksums.check([await checksums(served)], "the server")
