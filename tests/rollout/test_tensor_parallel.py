"""The embedded engine on several devices that compute together. The rules, each tested under its number:

19. Tokens are those of one device, greedy and by seed, log-probs to 1e-5 (float32), vision prompts included.
20. Weights and cache are divided: heads, inner width and vocabulary over all devices, KV heads over as many as there
    are heads.
21. Between requests an engine moves to other devices, with its weights and version; while samples run or wait, it
    refuses. Whatever it did before, what it generates then is what one device generates.
"""

import asyncio

import jax
import pytest
from rollout_cases import (
    IMAGE,
    QWEN3_VL,
    TEXT,
    VIDEO,
    VL,
    _text,
    assert_equal,
    build,
    engine,
    media_prompt,
    request,
    run,
    text_prompt,
)

import models
from models.config import DecoderConfig
from rollout.engine import EngineError
from rollout.engine_weights import EngineLayout

DEVICES = jax.devices("cpu")
MEDIA = (IMAGE, VIDEO)


def requests(vision=False):
    prompts = [text_prompt(9, seed=2), text_prompt(15, seed=3)]
    if vision:
        prompts += [
            media_prompt(3, ("image", (1, 4, 8)), 4, seed=1),
            media_prompt(("video", (2, 4, 4)), 2, ("image", (1, 4, 4)), 1, seed=3),
        ]
    how = {"max_new_tokens": 9, "forbidden_ids": MEDIA}
    return [
        *(request(f"greedy{i}", p, temperature=0.0, **how) for i, p in enumerate(prompts)),
        *(request(f"drawn{i}", p, n=2, seed=i, **how) for i, p in enumerate(prompts)),
        request("cut", prompts[-1], n=2, top_p=0.8, top_k=9, prefix=((1, 2, 3), ()), **how),
    ]


@pytest.fixture(scope="module")
def alone():
    """The answers that one device generates."""
    return run(engine(build(VL)), *requests(vision=True))


@pytest.mark.slow
@pytest.mark.turn(2)
def test_19_several_devices_add_the_features_of_several_layers():
    wanted = requests(vision=True)[2:]
    serving = engine(build(QWEN3_VL), devices=DEVICES[:2])
    assert_equal(run(serving, *wanted), run(engine(build(QWEN3_VL)), *wanted))


@pytest.mark.slow
def test_19_and_20_several_devices_generate_what_one_does(alone):
    degree = 4
    serving = engine(build(VL), devices=DEVICES[3 : 3 + degree])
    assert serving.devices == tuple(DEVICES[3 : 3 + degree])
    assert_equal(run(serving, *requests(vision=True)), alone)

    params = serving._device.params
    assert params is not None
    layer = params["layers"][-1]
    attention = layer["attention"]
    assert_part(attention["q"], degree)
    assert_part(attention["o"], degree)
    assert_part(attention["k"], 2)  # there are two KV heads
    assert_part(layer["mlp"]["down"], degree)
    assert_part(params["embedding"]["table"], degree)
    assert_part(params["norm"]["scale"], 1)
    assert_part(serving._device.cache.k_LCKSH, 2)
    assert_part(params["visual"]["blocks"]["qkv"], 2)  # and two heads in the vision tower


def assert_part(array, parts):
    shards = array.addressable_shards
    assert {shard.data.size for shard in shards} == {array.size // parts}


def test_20_a_device_has_the_kv_head_that_its_query_heads_read():
    layout = EngineLayout.of(DEVICES[:8])
    config = DecoderConfig("qwen2", _text(num_heads=8, num_kv_heads=2))
    weights = layout.weights(models.abstract(config))["layers"]["attention"]
    queries = weights["q"].devices_indices_map((2, 32, 8, 8))
    keys = weights["k"].devices_indices_map((2, 32, 2, 8))
    for number, device in enumerate(DEVICES[:8]):
        assert queries[device][2] == slice(number, number + 1)
        assert keys[device][2] == slice(number // 4, number // 4 + 1)
    # 6 heads on 4 devices: over 2 of them; 5: everywhere
    for heads, parts in ((6, 2), (5, 1)):
        config = DecoderConfig("qwen2", _text(num_heads=heads, num_kv_heads=heads))
        cut = EngineLayout.of(DEVICES[:4]).weights(models.abstract(config))["layers"]["attention"]["q"]
        assert cut.shard_shape((2, 32, heads, 8)) == (2, 32, heads // parts, 8)


@pytest.mark.parametrize("wrong", [[], DEVICES[:3], [DEVICES[0], DEVICES[0]]], ids=["none", "three", "twice"])
def test_20_devices_are_a_power_of_two_and_different(wrong):
    with pytest.raises(EngineError, match="different devices"):
        engine(build(TEXT), devices=wrong)


@pytest.mark.slow
def test_21_moves_between_requests():
    serving = engine(build(TEXT), version=3)
    before = run(serving, *requests())
    for devices in (DEVICES[:2], DEVICES[1:2]):
        asyncio.run(serving.set_parallelism(devices))
        assert serving.devices == tuple(devices) and serving.stats().version == 3
        assert_equal(run(serving, *requests()), before)
    asyncio.run(serving.set_parallelism(DEVICES[:2]))
    changed = build(TEXT, seed=5)
    asyncio.run(serving.update_weights(7, models.split(changed)[1]))
    after = run(serving, *requests())
    assert_equal(after, run(engine(changed), *requests()))
    assert after[0][0].versions[0] == serving.stats().version == 7
    assert serving.stats().preemptions == 0
    asyncio.run(serving.close())


@pytest.mark.slow
async def test_21_refuses_while_samples_run_or_wait():
    serving = engine(build(TEXT), slots=2)
    stream = serving.generate(request("r", text_prompt(5), n=4, max_new_tokens=40))
    await anext(stream)
    with pytest.raises(EngineError, match="2 samples are running and 2 waiting"):
        await serving.set_parallelism(DEVICES[:2])
    await serving.abort("r")
    await serving.set_parallelism(DEVICES[:2])
    assert serving.devices == tuple(DEVICES[:2])
    await serving.close()
