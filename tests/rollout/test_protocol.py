"""The protocol of rollout engines, in numbered rules, against the engine in this process, `rollout.serve` and SGLang.

SGLang needs an environment of its own: `bash scripts/test_sglang.sh` makes it and runs this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import rollout_cases
from paged_device import small_chunks
from protocol_cases import (
    LONGEST,
    Subject,
    client_at,
    clip,
    fleet_by,
    limits,
    model,
    picture,
    processor,
    prompts,
    route,
    sampling,
    subject,
    versions,
)
from rollout_cases import Answer, collect, full_logits, full_logprobs, request, until
from safetensors.numpy import load_file, save_file

import models
from models.decoder import Decoder
from models.hf import SINGLE, StoredTensor, write_weights
from models.inputs import ModelInput
from rollout import turns, wire
from rollout.engine import EngineError, FinishReason, WeightsMismatch
from rollout.jax_engine import JaxEngine
from rollout.requests import checked
from rollout.sglang import PauseMode, ServerClient
from rollout.weights.published import Checksums, Published, SharedFolders
from rollout.weights.routes import Buckets, Pause, SharedMemory
from rollout.weights.version_folders import tensors_of

GAP = 1e-4  # absolute, float32: log-probs of the engine and of the trainer
LONG = [pytest.mark.slow, pytest.mark.long]
# All rules hold for Qwen2.5-VL and Qwen3.5; other models have the rules of their tokens, their weights, and their
# media, if any. `rollout.serve` with a text model is what `test_fleet.py` asks for the answers of the engine. SGLang is
# asked in every turn.
WITH_MEDIA = [
    pytest.param(("jax", "vl"), id="jax-vl", marks=pytest.mark.slow),
    pytest.param(("serve", "vl"), id="serve-vl", marks=[*LONG, pytest.mark.turn(0)]),
    pytest.param(("sglang", "vl"), id="sglang-vl", marks=[*LONG, pytest.mark.turn(0, 1, 2)]),
    pytest.param(("serve", "qwen3_5"), id="serve-qwen3_5", marks=[*LONG, pytest.mark.turn(2)]),
    pytest.param(("sglang", "qwen3_5"), id="sglang-qwen3_5", marks=[*LONG, pytest.mark.turn(1)]),
]
OF_TEXT = [
    pytest.param(("jax", "text"), id="jax-text", marks=pytest.mark.slow),
    pytest.param(("sglang", "text"), id="sglang-text", marks=[*LONG, pytest.mark.turn(2)]),
    pytest.param(("serve", "qwen3"), id="serve-qwen3", marks=[*LONG, pytest.mark.turn(2)]),
    pytest.param(("sglang", "qwen3"), id="sglang-qwen3", marks=[*LONG, pytest.mark.turn(0)]),
]
QWEN3_VL = [
    pytest.param(("serve", "qwen3_vl"), id="serve-qwen3_vl", marks=[*LONG, pytest.mark.turn(1)]),
    pytest.param(("sglang", "qwen3_vl"), id="sglang-qwen3_vl", marks=[*LONG, pytest.mark.turn(1)]),
]
every_model = pytest.mark.parametrize("engine", WITH_MEDIA + QWEN3_VL + OF_TEXT, indirect=True, scope="module")
reads_media = pytest.mark.parametrize("engine", WITH_MEDIA + QWEN3_VL, indirect=True, scope="module")
HOW: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 5}]


@pytest.fixture(scope="module", params=WITH_MEDIA)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    name, kind = request.param
    with subject(name, kind, tmp_path_factory.mktemp(f"{name}-{kind}")) as made:
        yield made


@pytest.fixture
def of_servers(engine: Subject) -> None:
    """A rule of this kind is about what a server has: routes for weights, pauses by its clients, checksums."""
    if engine.fleet is None:
        pytest.skip("the embedded engine is no server")


@pytest.fixture(autouse=True)
def long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_cases, "LONGEST", LONGEST)  # of the forward pass that answers are compared with


def spoken_of(kind: str) -> dict[str, ModelInput]:
    """All prompts but that of a video alone, which rule 11 has."""
    return {name: prompt for name, prompt in prompts(kind).items() if name != "video"}


async def begun(engine: Subject) -> None:
    """Its server is up and has weights: another fleet may bring it others."""
    await engine.serve()
    await collect(engine.engine.generate(request("first", prompts(engine.kind)["text"], max_new_tokens=1)), 1)


def gap(whole: Decoder, prompt: ModelInput, answer: Answer, prefix: tuple[int, ...] = (), **how: Any) -> float:
    """The largest distance of an answer's log-probs from the trainer's."""
    never = how.get("forbidden_ids", ())
    expected = full_logprobs(whole, prompt, [*prefix, *answer.ids], how.get("temperature") or 1.0, never)
    return float(np.abs(np.asarray(answer.logprobs) - expected[len(prefix) :]).max(initial=0.0))


@pytest.mark.slow
@every_model
async def test_rule_1_greedy_tokens_are_those_of_the_model(engine: Subject) -> None:
    whole, _ = await engine.serve()
    for name, prompt in spoken_of(engine.kind).items():
        how = sampling(engine.kind, max_new_tokens=12, temperature=0.0)
        (answer,) = await collect(engine.engine.generate(request(name, prompt, **how)), 1)
        logits = full_logits(whole, prompt, answer.ids)
        logits[:, list(how["forbidden_ids"])] = -np.inf
        assert list(answer.ids) == logits.argmax(axis=1).tolist(), name
        assert gap(whole, prompt, answer, **how) < GAP


async def test_rule_2_log_probs_are_the_trainers(engine: Subject) -> None:
    """Those of softmax(logits / temperature) without forbidden tokens, not renormalised for top-p and top-k."""
    whole, version = await engine.serve()
    for (name, prompt), how in zip(spoken_of(engine.kind).items(), HOW, strict=True):
        given = sampling(engine.kind, max_new_tokens=16, **how)
        for answer in await collect(engine.engine.generate(request(name, prompt, n=3, seed=1, **given)), 3):
            assert gap(whole, prompt, answer, **given) < GAP, name
            assert set(answer.versions) == {version}
            assert not set(answer.ids) & set(given["forbidden_ids"])


@pytest.mark.medium
async def test_rule_3_a_stop_token_ends_a_response_and_is_its_last(engine: Subject) -> None:
    await engine.serve()
    stop = processor(engine.kind).eos_ids
    how = sampling(engine.kind, max_new_tokens=150, temperature=3.0)
    answers = await collect(engine.engine.generate(request("stop", prompts(engine.kind)["text"], n=8, **how)), 8)
    for answer in answers:
        stopped = answer.finish is FinishReason.STOP  # which the last token that may be sampled can do, too
        assert [token in stop for token in answer.ids] == [False] * (len(answer.ids) - 1) + [stopped]
        assert stopped or len(answer.ids) == 150
    assert FinishReason.STOP in {answer.finish for answer in answers}


async def test_rule_4_a_response_goes_on_from_its_prefix(engine: Subject) -> None:
    """The prefix is not returned again, but counts. A whole response ends at once, with nothing new."""
    whole, _ = await engine.serve()
    stop = processor(engine.kind).eos_ids[0]
    prefixes = ((20, 21, 22), (), (15,) * 10, (20, stop))
    for name in ("text", "mixed"):
        prompt = prompts(engine.kind)[name]
        how = sampling(engine.kind, max_new_tokens=10, temperature=0.9)
        stream = engine.engine.generate(request(name, prompt, n=4, prefix=prefixes, **how))
        answers = await collect(stream, 4)
        for prefix, answer in zip(prefixes[:2], answers, strict=False):
            assert len(answer.ids) == 10 - len(prefix) or answer.finish is FinishReason.STOP
            assert gap(whole, prompt, answer, prefix, **how) < GAP, name
        assert [(a.ids, a.finish) for a in answers[2:]] == [((), FinishReason.LENGTH), ((), FinishReason.STOP)]


async def test_rule_5_an_abort_keeps_what_was_generated(engine: Subject) -> None:
    whole, _ = await engine.serve()
    prompt, how = prompts(engine.kind)["long text"], {"max_new_tokens": 150}
    await collect(engine.engine.generate(request("warm", prompt, n=3, max_new_tokens=3)), 3)  # compiled by now
    task = asyncio.create_task(collect(engine.engine.generate(request("a-1", prompt, n=3, **how)), 3))
    other = asyncio.create_task(collect(engine.engine.generate(request("a-10", prompt, **how)), 1))
    await asyncio.sleep(0.2)
    await engine.engine.abort("nobody")
    await engine.engine.abort("a-1/1")
    await asyncio.sleep(0.2)
    await engine.engine.abort("a-1")
    for answer in await task:
        assert answer.finish in (FinishReason.ABORT, FinishReason.LENGTH)
        assert gap(whole, prompt, answer) < GAP
    (untouched,) = await other
    assert (untouched.finish, len(untouched.ids)) == (FinishReason.LENGTH, 150)  # a-10 begins as a-1 does


@pytest.mark.medium
async def test_rule_6_nothing_is_generated_while_paused(engine: Subject) -> None:
    whole, _ = await engine.serve()
    prompt = prompts(engine.kind)["text"]
    running = asyncio.create_task(collect(engine.engine.generate(request("r", prompt, max_new_tokens=150)), 1))
    await asyncio.sleep(0.3)
    await engine.engine.pause()
    waiting = asyncio.create_task(collect(engine.engine.generate(request("w", prompt, max_new_tokens=3)), 1))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    await engine.engine.resume()
    for answer in [*await running, *await waiting]:
        assert answer.finish is FinishReason.LENGTH
        assert gap(whole, prompt, answer) < GAP


@pytest.mark.medium
@every_model
async def test_rule_7_after_an_update_all_is_of_the_new_weights(engine: Subject) -> None:
    """Also what is kept of prompts that were seen before: the features of their images."""
    for seed in (1, 2, 1):
        whole, version = await engine.serve(seed)
        for name, prompt in spoken_of(engine.kind).items():
            how = sampling(engine.kind, max_new_tokens=6)
            (answer,) = await collect(engine.engine.generate(request(name, prompt, **how)), 1)
            assert gap(whole, prompt, answer, **how) < GAP, (seed, name)
            assert set(answer.versions) == {version} == {engine.engine.stats().version}


@pytest.mark.slow
async def test_rule_8_tokens_know_their_weights_across_an_update(engine: Subject) -> None:
    old, before = await engine.serve(3)
    names = ["long text", "mixed"]
    how = {"max_new_tokens": 140, "temperature": 1.0}
    for name in names:  # compiled, where anything is
        await collect(engine.engine.generate(request(f"warm {name}", prompts(engine.kind)[name], **how)), 1)
    for attempt in range(5):  # where the update takes longer than the responses, they wait for it
        tasks = [
            asyncio.create_task(collect(engine.engine.generate(request(n, prompts(engine.kind)[n], **how)), 1))
            for n in names
        ]
        while not engine.under_way() and not all(task.done() for task in tasks):
            await asyncio.sleep(0.005)
        if attempt:
            await engine.engine.pause()
        new, after = await engine.serve(4)
        await engine.engine.resume()
        answers = [answer for task in tasks for answer in await task]
        firsts = [answer.versions.count(before) for answer in answers]
        if any(0 < first < 140 for first in firsts):
            break
        old, before = await engine.serve(3)
    else:
        pytest.fail("no response was ever under way")
    for name, answer, first in zip(names, answers, firsts, strict=True):
        assert answer.versions == (before,) * first + (after,) * (140 - first)
        parts = [full_logprobs(whole, prompts(engine.kind)[name], answer.ids) for whole in (old, new)]
        expected = np.concatenate([parts[0][:first], parts[1][first:]])
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=GAP)


async def test_rule_9_a_bad_request_is_refused_and_harms_nobody(engine: Subject) -> None:
    whole, _ = await engine.serve()
    good = prompts(engine.kind)["text"]
    vocabulary = whole.config.text.vocab_size
    with pytest.raises(EngineError, match="vocabulary"):
        engine.engine.generate(request("x", good, prefix=((vocabulary,),), max_new_tokens=4))
    with pytest.raises(EngineError, match="max_sequence_tokens"):
        engine.engine.generate(request("x", good, max_new_tokens=LONGEST))
    with pytest.raises(EngineError, match="temperature"):
        engine.engine.generate(request("x", good, max_new_tokens=4, temperature=float("nan")))
    (answer,) = await collect(engine.engine.generate(request("x", good, max_new_tokens=4)), 1)
    assert gap(whole, good, answer) < GAP


@pytest.mark.medium
async def test_rule_10_a_busy_engine_does_not_sleep(engine: Subject) -> None:
    """One that slept answers as before, under the same version, although a server's weights are lost in its sleep."""
    _, version = await engine.serve()
    prompt = prompts(engine.kind)["text"]
    task = asyncio.create_task(collect(engine.engine.generate(request("b", prompt, n=8, max_new_tokens=150)), 8))
    await until(lambda: engine.engine.stats().running)
    with pytest.raises(EngineError, match="running"):
        await engine.engine.sleep()
    await task
    await engine.engine.sleep()
    await engine.engine.sleep(weights=False)  # it may be told again
    task = asyncio.create_task(collect(engine.engine.generate(request("c", prompt, max_new_tokens=4)), 1))
    await asyncio.sleep(0.5)
    assert not task.done()  # what is asked for meanwhile waits
    await engine.engine.wake()
    (answer,) = await task
    assert set(answer.versions) == {version}
    assert gap(model(engine.kind), prompt, answer) < GAP


@pytest.mark.slow
@reads_media
async def test_rule_11_media_of_the_same_pixels_are_told_apart(engine: Subject) -> None:
    """By their shape, their time, and whether they are images or frames."""
    prepare = processor(engine.kind).prepare
    film = clip(16, 56, 56, 5)
    shapes = [(28, 112), (56, 56), (112, 28)]
    asked = [prepare("<image> here", [("image", picture(*shape, 0, blank=True))]) for shape in shapes]
    blank = np.zeros_like(prepare("<video>", [("video", film)]).vision.patches_PX)  # type: ignore[union-attr]
    slow = prepare("<video> here", [("video", clip(16, 56, 56, 5, rate=2))])
    fast = prepare("<video> here", [("video", film)])
    asked += [slow, fast, *(_with_pixels(prompt, blank) for prompt in (slow, fast))]
    asked.append(prepare("<image> <video>", [("image", picture(56, 56, 0, blank=True)), ("video", film)]))
    asked.append(_with_pixels(asked[-1], np.zeros((len(blank) + 16, blank.shape[1]), np.float32)))
    whole, _ = await engine.serve()
    streams = [engine.engine.generate(request(f"{i}", p, max_new_tokens=4)) for i, p in enumerate(asked)]
    answers = await asyncio.gather(*(collect(stream, 1) for stream in streams))  # together: batches mix them
    for number, (prompt, (answer,)) in enumerate(zip(asked, answers, strict=True)):
        assert gap(whole, prompt, answer) < GAP, number


def _with_pixels(prompt: ModelInput, patches_PX: np.ndarray) -> ModelInput:
    assert prompt.vision is not None
    return dataclasses.replace(prompt, vision=dataclasses.replace(prompt.vision, patches_PX=patches_PX))


async def test_rule_12_generated_placeholders_are_text(engine: Subject) -> None:
    """A model that may draw media tokens draws them as words; a response with some goes on elsewhere as it was."""
    whole, _ = await engine.serve()
    drawn = processor(engine.kind).media_token_ids
    prompt = prompts(engine.kind)["mixed"]
    prefix = (*drawn, *drawn[::-1], 20)
    (answer,) = await collect(engine.engine.generate(request("p", prompt, prefix=(prefix,), max_new_tokens=20)), 1)
    assert gap(whole, prompt, answer, prefix) < GAP


@pytest.mark.medium
@pytest.mark.parametrize("way", ["bucket", "orbax", "ipc"])
@pytest.mark.usefixtures("of_servers")
async def test_rule_13_every_route_brings_the_same_bits(engine: Subject, way: str, tmp_path: pathlib.Path) -> None:
    """A checksum a tensor says so, before anything is generated; a delta follows a whole version. Everywhere else,
    weights come through shared memory."""
    assert engine.fleet is not None
    if engine.name == "serve" and way == "ipc":
        pytest.skip("rollout.serve has no PyTorch, whose handles these are")
    if way == "ipc":
        pytest.importorskip("torch", reason="parity lane: needs torch")
    await begun(engine)
    steps = [model(engine.kind, 5), model(engine.kind, 6), model(engine.kind, 5)]
    fleet = fleet_by(route(way, engine.name, steps[0].config, tmp_path), engine)
    with contextlib.closing(fleet):
        seat = fleet.seats[0]
        for whole in steps:
            version = next(versions)
            await seat.update_weights(version, models.split(whole)[1])
            for name in ("text", "mixed"):
                prompt, how = prompts(engine.kind)[name], sampling(engine.kind, max_new_tokens=8)
                (answer,) = await collect(seat.generate(request(name, prompt, **how)), 1)
                assert set(answer.versions) == {version}
                assert gap(whole, prompt, answer, **how) < GAP


@pytest.mark.medium
@pytest.mark.parametrize("way", ["shm", "bucket"])
@pytest.mark.usefixtures("of_servers")
async def test_rule_14_an_update_that_leaves_a_tensor_out_is_never_served(
    engine: Subject, way: str, tmp_path: pathlib.Path
) -> None:
    """SGLang reports success."""
    assert engine.fleet is not None
    await begun(engine)

    class LeavesOut(Buckets):
        async def deliver(self, client: ServerClient, published: Published, pause: Pause) -> None:
            tensors = dict(tensors_of(published.folder))
            tensors.pop(next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight")))
            contents = [StoredTensor(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
            write_weights(tmp_path / SINGLE, contents, tensors.values())
            shutil.copy(published.folder / "config.json", tmp_path)
            lacking = dataclasses.replace(published, folder=tmp_path)
            deliver = super().deliver if way == "bucket" else SharedMemory(memory).deliver
            await deliver(client, lacking, pause)

    memory = SharedFolders(model(engine.kind).config, "float32")
    patience = 2.0 if engine.name == "serve" else 10.0
    fleet = fleet_by(
        LeavesOut(memory, 1 << 30, pickled=engine.name == "sglang"), engine, start_seconds=patience
    )  # what is refused is tried again until then
    with contextlib.closing(fleet):
        seat = fleet.seats[0]
        wanted = request("never", prompts(engine.kind)["text"], max_new_tokens=2)
        with pytest.raises((WeightsMismatch, EngineError), match="down_proj"):
            await seat.update_weights(next(versions), models.split(model(engine.kind, 8))[1])
            await collect(seat.generate(wanted), 1)
    whole, version = await engine.serve(9)
    prompt = prompts(engine.kind)["text"]
    (answer,) = await collect(engine.engine.generate(request("ok", prompt, max_new_tokens=4)), 1)
    assert set(answer.versions) == {version} and gap(whole, prompt, answer) < GAP


@pytest.mark.medium
@pytest.mark.parametrize("what", ["lacks one", "wrong shape", "unknown name"])
async def test_rule_15_weights_that_do_not_fit_are_refused_before_they_are_sent(engine: Subject, what: str) -> None:
    """A wrong shape ends SGLang; of the others, it reports success."""
    whole, version = await engine.serve()
    params = models.split(model(engine.kind, 1))[1]
    mlp = params["layers"]["mlp"]
    if what == "unknown name":
        mlp["side"] = mlp["down"]
    else:
        down = mlp.pop("down")
        mlp |= {"down": down[..., :-1]} if what == "wrong shape" else {}
    with pytest.raises((EngineError, ValueError), match=r"down|side"):
        await engine.engine.update_weights(next(versions), params)
    prompt = prompts(engine.kind)["text"]
    (answer,) = await collect(engine.engine.generate(request("after", prompt, max_new_tokens=4)), 1)
    assert set(answer.versions) == {version} and gap(whole, prompt, answer) < GAP


@pytest.mark.slow
@reads_media
async def test_rule_16_a_second_turn_goes_on_from_the_first(engine: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine has of earlier turns does not show. Later turns have media of their own, too; our engine computes
    the prompt in chunks."""
    small_chunks(monkeypatch, 32)
    monkeypatch.setattr(turns, "PREFILL_PATCHES", 32)
    whole, _ = await engine.serve()
    kind, how = processor(engine.kind), sampling(engine.kind, max_new_tokens=8)
    media: list[tuple[str, bytes]] = []
    ids: list[int] = []
    for number in range(3):
        further = [("video", clip(16, 56, 84, 6 + number)), ("image", picture(56, 84, number))][number % 2 :]
        media += further
        ids += kind.tokenise("".join(f"{name} is <{name}>?" for name, _ in further), further)
        prompt = kind.prepare_ids(ids, media)
        (answer,) = await collect(engine.engine.generate(request(f"turn {number}", prompt, **how)), 1)
        assert gap(whole, prompt, answer, **how) < GAP, number
        ids += answer.ids
    if isinstance(engine.engine, JaxEngine):
        assert {"features", "continue"} <= {name for name, _ in engine.engine.compiled_shapes}, "no prompt was cut"


@pytest.mark.medium
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.usefixtures("of_servers")
async def test_rule_17_a_pause_changes_no_token(engine: Subject, mode: PauseMode) -> None:
    """A greedy response that a client pauses has the tokens of one that nobody paused, in every mode. A response that
    `abort` has ended goes on from its tokens, and SGLang has their cache."""
    assert engine.fleet is not None
    await begun(engine)
    whole, prompt = model(engine.kind), prompts(engine.kind)["mixed"]
    how = {"max_new_tokens": 120, "temperature": 0.0, "forbidden_ids": processor(engine.kind).media_token_ids}
    async with client_at(engine.address) as client:

        async def answer(rid: str, prefix: tuple[int, ...] = ()) -> tuple[list[int], dict[str, Any]]:
            asked = checked(request(rid, prompt, prefix=(prefix,), **how), limits(engine.kind))
            body = wire.request_body(asked, {0: rid}, whole.config, interval=4)
            (reply,) = await client.ask("/generate", body | {"stream": False})
            return reply["output_ids"], reply["meta_info"]

        expected, _ = await answer(f"whole-{mode}")
        task = asyncio.create_task(answer(f"paused-{mode}"))
        while not (await client.load())["running"]:
            assert not task.done(), "the response ended before it was seen running: ask for a longer one"
        await client.pause(mode)
        await asyncio.sleep(0.5)
        assert task.done() == (mode == "abort")
        await client.resume()
        ids, meta = await task
        if mode == "abort":
            assert 0 < len(ids) < 120
            rest, meta = await answer("rest", tuple(ids))
            assert engine.name == "serve" or meta["cached_tokens"] >= len(prompt)
            ids += rest
    assert ids == expected
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    never = processor(engine.kind).media_token_ids
    full = full_logprobs(whole, prompt, ids, never=never)
    np.testing.assert_allclose(logprobs, full[len(ids) - len(logprobs) :], rtol=0, atol=GAP)


@pytest.mark.usefixtures("of_servers")
async def test_rule_18_a_bit_of_a_weight_is_noticed(engine: Subject, tmp_path: pathlib.Path) -> None:
    """Whichever weight has it; the error has its name, as the server says it."""
    assert engine.fleet is not None
    await begun(engine)
    whole = model(engine.kind)
    models.save(whole, tmp_path)
    tensors = load_file(tmp_path / SINGLE)

    async with client_at(engine.address) as client:
        held = await client.checksums()
    for name in ["", *np.random.default_rng().permutation(sorted(tensors))[:12].tolist()]:
        if name:
            changed = tensors[name].copy()
            changed.flat[-1] = np.nextafter(changed.flat[-1], np.float32(9))
            save_file(tensors | {name: changed}, tmp_path / SINGLE)
        sums = Checksums(tmp_path / SINGLE, whole.config.text.num_kv_heads)
        named = re.escape(name if engine.name == "serve" else sums._served_name(name))
        with pytest.raises(WeightsMismatch, match=named) if name else contextlib.nullcontext():
            sums.check(held, "server")
