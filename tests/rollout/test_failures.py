"""Failures in an engine, and the requests that they cost (rule 17):

17. A turn that fails costs the requests it can be blamed on. Requests that shared it get their next turns alone; only
    one that fails alone is lost, with the reason. Everybody else gets the tokens that he would have got. If nothing
    works at all, every stream fails, loudly; the engine serves the next request all the same. Weights that are not
    finite are refused.
"""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
from rollout_cases import (
    IMAGE,
    TEXT,
    VL,
    assert_equal,
    assert_logprobs,
    build,
    collect,
    engine,
    media_prompt,
    request,
    run,
    serve,
    text_prompt,
)

import models
import rollout.device
from rollout.device import DeviceState
from rollout.engine import EngineError, FinishReason
from rollout.engine_weights import check_finite
from rollout.programs import EnginePrograms
from sharding.walk import Walk

pytestmark = pytest.mark.slow

PROMPT = text_prompt(7)
COMPANY = [
    request("a", text_prompt(6, seed=1), n=3, seed=5, max_new_tokens=20),
    request("b", text_prompt(11, seed=2), n=2, seed=6, temperature=0.7, max_new_tokens=14, stop_ids=(3,)),
    request("c", text_prompt(4, seed=3), n=4, seed=7, max_new_tokens=9),
]


@pytest.fixture(scope="module")
def expected():
    """The answers to the company by itself."""
    return run(engine(build(TEXT)), *COMPANY)


def assert_idle(serving):
    assert (serving.stats().running, serving.stats().waiting, serving._scheduler.jobs) == (0, 0, {})
    assert all(sample is None for sample in serving._scheduler.occupant)


def too_bright(prompt):
    """Pixels that are finite, and overflow in the vision tower. What is masked is multiplied by zero, and zero times
    infinity is no number: so the rest of the batch gets none, either."""
    vision = dataclasses.replace(prompt.vision, patches_PX=np.full_like(prompt.vision.patches_PX, 3e38))
    return dataclasses.replace(prompt, vision=vision)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 2])
async def test_17_a_picture_that_overflows_costs_its_own_request_only(place):
    picture = media_prompt(2, ("image", (1, 4, 8)), 3, seed=3)
    good = [*COMPANY[:2], request("picture", picture, n=2, seed=8, max_new_tokens=12, forbidden_ids=(IMAGE,))]
    long = media_prompt(25, ("image", (1, 4, 8)), 3, seed=4)
    bad = [request(f"bad {i}", too_bright(long), n=2, max_new_tokens=5) for i in range(2)]
    serving = engine(build(VL))
    expected = await serve(serving, good)
    asked = [*good[:place], *bad, *good[place:]]
    results = dict(zip([each.rid for each in asked], await serve(serving, asked, lossy=True), strict=True))
    for each in bad:
        assert isinstance(results[each.rid], EngineError)
        assert f"request '{each.rid}' was lost" in str(results[each.rid]) and "not finite" in str(results[each.rid])
    for each, answers in zip(good, expected, strict=True):
        assert_equal([results[each.rid]], [answers])
    assert_idle(serving)
    # The slots of the lost ones hold nothing behind a shorter prompt that spoils their next samples.
    for each, answers in zip(good, await serve(serving, good), strict=True):
        assert_equal([answers], [results[each.rid]])


async def test_17_a_slot_that_is_not_finite_costs_its_request_and_slows_nobody(expected):
    serving = engine(build(TEXT))
    await serving.pause()
    streams = [collect(serving.generate(each), each.n) for each in COMPANY]
    turns = failing_while(serving, "decode", lambda rids: False)
    work = serving._device.decode

    def spoil(plan):
        if len(turns) == 1:
            page = next(s.pages[0] for s in serving._scheduler.occupant if s and s.job.request.rid == "b")
            serving._device.cache = jax.tree.map(lambda x: x.at[:, page].set(np.nan), serving._device.cache)
        return work(plan)

    serving._device.decode = spoil
    await serving.resume()
    a, b, c = await asyncio.gather(*streams, return_exceptions=True)
    assert isinstance(b, EngineError) and "not finite" in str(b)
    assert_equal([a], [expected[0]])
    assert_equal([c], [expected[2]])
    assert turns[:3] == [["a", "b", "c"], ["a", "b", "c"], ["a", "c"]], "nobody had to go alone"


@dataclasses.dataclass(frozen=True)
class NoRoom(Walk):
    """Refuses to compile a prefill of 48 tokens a row, as a device does that has no room for them."""

    def loop(self, layers, carry, step, xs):
        if isinstance(carry, jax.Array) and carry.shape[1] >= 48:  # a round carries the cache, too
            raise MemoryError(f"no room for {carry.shape[1]} entries")
        return super().loop(layers, carry, step, xs)


def short_rounds(device, plan):
    """Decodes a round, unless a sample has 44 entries in the cache, as a device does that has no room for them."""
    if (longest := int(plan[1].length_B.max())) >= 44:
        raise MemoryError(f"no room for {longest} entries")
    return DECODE(device, plan)


DECODE = DeviceState.decode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "faulty", "big"),
    [
        (EnginePrograms, "walk", NoRoom(), request("big", text_prompt(50), n=2, max_new_tokens=5)),
        # when it has grown
        (DeviceState, "decode", short_rounds, request("big", text_prompt(20), n=3, seed=1, max_new_tokens=40)),
    ],
    ids=["prefill", "round"],
)
async def test_17_a_request_too_big_for_the_device_is_lost_alone(monkeypatch, expected, owner, name, faulty, big):
    monkeypatch.setattr(owner, name, faulty)
    monkeypatch.setattr(rollout.device, "programs", EnginePrograms)  # none that other engines have compiled
    serving = engine(build(TEXT), slots=12)
    *rest, lost = await serve(serving, [*COMPANY, big], lossy=True)
    assert isinstance(lost, EngineError) and "'big' was lost: MemoryError: no room for" in str(lost)
    assert isinstance(lost.__cause__, MemoryError)
    assert_equal(rest, expected)
    assert_idle(serving)
    assert_equal(await serve(serving, COMPANY), expected)


def failing_while(serving, kind, doomed):
    """Turns of a kind fail, after the device has taken the cache, as long as `doomed(requests at this turn)`."""
    work, turns = getattr(serving._device, kind), []

    def fail(plan):
        rids = sorted(job.request.rid for job in serving._scheduler.at_turn())
        turns.append(rids)
        results = work(plan)
        if doomed(rids):
            raise MemoryError("RESOURCE_EXHAUSTED")
        return results

    setattr(serving._device, kind, fail)
    return turns


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["start", "decode"])
async def test_17_what_fails_together_and_works_alone_costs_nobody(expected, kind):
    """As when there is memory for some requests, but not for all at once."""
    serving = engine(build(TEXT), slots=5)
    turns = failing_while(serving, kind, lambda rids: len(rids) > 1)
    assert_equal(await serve(serving, COMPANY, lossy=True), expected)
    together = [i for i, rids in enumerate(turns) if len(rids) > 1]
    assert together and min(map(len, turns)) == 1
    assert kind == "start" or len(together) > 1, "nobody stays under suspicion after a round that went well"
    assert_idle(serving)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["start", "decode"])
async def test_17_several_culprits_are_lost_and_nobody_else(expected, kind):
    serving = engine(build(TEXT), slots=6)
    failing_while(serving, kind, lambda rids: any(rid.startswith("bad") for rid in rids))
    bad = [request(f"bad {i}", PROMPT, n=2, seed=i, max_new_tokens=9) for i in range(2)]
    results = await serve(serving, [bad[0], COMPANY[0], bad[1], *COMPANY[1:]], lossy=True)
    for i in (0, 2):
        assert isinstance(results.pop(i // 2), EngineError)
    assert_equal(results, expected)
    assert_idle(serving)


async def test_17_requests_that_come_and_go_while_the_culprit_is_looked_for(expected):
    serving = engine(build(TEXT), slots=4)
    turns = failing_while(serving, "start", lambda rids: "bad" in rids)
    await serving.pause()
    bad = asyncio.ensure_future(collect(serving.generate(request("bad", PROMPT, max_new_tokens=9)), 1))
    first = asyncio.ensure_future(collect(serving.generate(COMPANY[0]), 3))
    gone = serving.generate(request("gone", PROMPT, n=9, max_new_tokens=50))
    await serving.resume()
    while not turns:
        await asyncio.sleep(0)
    await gone.aclose()
    late = asyncio.ensure_future(collect(serving.generate(COMPANY[1]), 2))
    assert_equal([await first], expected[:1])
    assert_equal([await late], expected[1:2])
    with pytest.raises(EngineError, match="'bad' was lost: MemoryError: RESOURCE_EXHAUSTED"):
        await bad
    assert_idle(serving)


async def test_17_weights_that_overflow_fail_the_streams_and_not_the_engine():
    good = models.split(build(TEXT))[1]
    serving = engine(build(TEXT), slots=4)
    asked = [request(f"r{i}", PROMPT, n=2, max_new_tokens=50) for i in range(3)]
    streams = [serving.generate(each) for each in asked]
    await anext(streams[0])
    await serving.update_weights(1, jax.tree.map(lambda x: x * np.float32(1e30), good))
    for stream, each in zip(streams, asked, strict=True):
        with pytest.raises(EngineError, match=f"'{each.rid}' was lost.*not finite under weights 1"):
            await collect(stream, 2)
    assert_idle(serving)
    await serving.update_weights(2, good)
    ((answer,),) = await serve(serving, [request("r0", PROMPT, max_new_tokens=6)])
    assert_logprobs(build(TEXT), PROMPT, answer)


async def test_17_a_device_that_is_gone_fails_all_streams_and_the_next():
    serving = engine(build(TEXT))
    streams = [serving.generate(request(f"r{i}", PROMPT, n=2, max_new_tokens=50)) for i in range(3)]
    await anext(streams[0])
    params = serving._device.params
    assert params is not None
    jax.tree.map(lambda x: x.delete(), params["layers"])
    for i, stream in enumerate(streams):
        with pytest.raises(EngineError, match=f"'r{i}' was lost") as caught:
            await collect(stream, 2)
        assert isinstance(caught.value.__cause__, Exception)
    with pytest.raises(EngineError, match="'again' was lost"):
        await collect(serving.generate(request("again", PROMPT, max_new_tokens=5)), 1)
    assert_idle(serving)


@pytest.mark.parametrize(("name", "value"), [("layers", np.nan), ("norm", np.inf), ("embedding", -np.inf)])
async def test_14_weights_that_are_not_finite_are_refused_and_the_old_ones_go_on(expected, name, value):
    serving = engine(build(TEXT), version=3)
    stream = serving.generate(COMPANY[0])
    await anext(stream)
    broken = jax.tree.map(np.array, models.split(build(TEXT, seed=1))[1])
    jax.tree.leaves(broken[name])[0].flat[-1] = value
    with pytest.raises(EngineError, match=rf"^weight \['{name}'\].* has values that are not finite") as caught:
        await serving.update_weights(4, broken)
    assert "\n" not in str(caught.value) and serving.stats().version == 3
    await stream.aclose()
    (answers,) = await serve(serving, [COMPANY[0]])
    assert_equal([answers], [expected[0]])
    assert all(set(answer.versions) == {3} for answer in answers)


@pytest.mark.parametrize(("device", "value"), [(0, np.nan), (3, -np.inf)])
def test_14_weights_are_looked_at_where_they_lie(device, value):
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.tree.map(np.array, models.split(build(TEXT))[1])

    def spread(x):
        cut = next((dim for dim in reversed(range(x.ndim)) if x.shape[dim] % 4 == 0), None)
        axes = jax.P() if cut is None else jax.P(*[None] * cut, "d")
        return jax.device_put(x, jax.NamedSharding(mesh, axes))

    whole = jax.tree.map(spread, params)
    params["embedding"]["table"][:, device * params["embedding"]["table"].shape[1] // 4] = value
    broken = jax.tree.map(spread, params)
    check_finite(whole, None)  # compiles
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        check_finite(whole, None)
        with pytest.raises(EngineError, match=r"^weight \['embedding'\]\['table'\] has values that are not finite"):
            check_finite(broken, None)


def test_14_a_model_that_is_not_finite_is_refused():
    graphdef, params = models.split(build(TEXT))
    broken = models.merge(graphdef, jax.tree.map(lambda x: x * np.float32(np.nan), params))
    with pytest.raises(EngineError, match="not finite"):
        engine(broken)


async def test_14_weights_beyond_the_range_of_the_compute_dtype_are_refused():
    serving = engine(build(TEXT), compute_dtype=jax.numpy.float16)
    wide = jax.tree.map(np.array, models.split(build(TEXT))[1])
    await serving.update_weights(1, wide)
    wide["norm"]["scale"][0] = 1e6
    with pytest.raises(EngineError, match=r"norm.*not finite"):
        await serving.update_weights(2, wide)
    wide["norm"]["scale"] = wide["norm"]["scale"].astype(np.int32)
    with pytest.raises(EngineError, match=r"norm.*int32.*float16"):
        await serving.update_weights(2, wide)
    assert serving.stats().version == 1


async def test_17_close_may_be_called_again_and_while_it_waits():
    serving = engine(build(TEXT))
    stream = serving.generate(request("r", PROMPT, max_new_tokens=50))
    await anext(stream)
    await asyncio.gather(*(serving.close() for _ in range(3)))
    await serving.close()
    with pytest.raises(EngineError, match="closed"):
        await collect(stream, 1)
    with pytest.raises(EngineError, match="closed"):
        serving.generate(request("r", PROMPT, max_new_tokens=5))
    with pytest.raises(EngineError, match="closed"):
        await serving.update_weights(1, models.split(build(TEXT))[1])
    assert_idle(serving)
    await asyncio.to_thread(asyncio.run, serving.close())  # on another loop, too
    await engine(build(TEXT)).close()  # one that never served


async def test_17_what_waits_behind_close_is_refused():
    serving = engine(build(TEXT))
    stream = serving.generate(request("r", PROMPT, max_new_tokens=50))
    await anext(stream)
    closing = asyncio.ensure_future(serving.close())
    await asyncio.sleep(0)  # it waits for the turn in flight by now, or is through
    with pytest.raises(EngineError, match="closed"):
        await serving.update_weights(1, models.split(build(TEXT))[1])
    await closing
    with pytest.raises(EngineError, match="closed"):
        await collect(stream, 1)


async def test_17_a_cancelled_close_leaves_the_engine_serving():
    serving = engine(build(TEXT))
    stream = serving.generate(request("r", PROMPT, max_new_tokens=30))
    await anext(stream)
    async with serving._turn:  # as if a turn were in flight
        closing = asyncio.ensure_future(serving.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert [chunk async for chunk in stream][-1].finish is FinishReason.LENGTH
