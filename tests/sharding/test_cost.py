"""The cost model: it fits what was published, scales, overlaps as said, and survives its file."""

import dataclasses
import importlib.util
import json
import pathlib

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from benchmarks import cost_fit as tables
from benchmarks.cost_fit import (
    QWEN2_5_VL_7B,
    fit_attention,
    fit_link,
    fitted,
    launch_seconds,
    non_negative,
    published,
    save,
)
from benchmarks.dynamic_packing import packed_rounds
from sharding.cost import AttentionFit, CostError, CostModel, Link, ModelSizes
from sharding.planner.plan import PlanError, Round, ShardPlan

H800, H200 = published("h800"), published("h200")
CLUSTERS = {"h800": H800, "h200": H200}

# One head of size 1, one layer; attention takes length^2 seconds, an all-to-all half of its tokens in each direction.
UNIT = ModelSizes("unit", layers=1, width=1, heads=2, kv_heads=2, head_size=1, value_bytes=1)
TOY = CostModel(
    source="by hand",
    model=UNIT,
    attention=AttentionFit(per_square=0.5, per_token=0.0, per_launch=0.0),
    within=Link(alpha=0.0, per_byte=0.5, congestion=0.0),  # wire_bytes is 8, a quarter of a token's leaves: 1 s a token
    across=None,
    node=2,
    linear_flops=1.0,
    vision_flops=1.0,
)


def made(devices: int, lengths, degrees, firsts, **packing) -> ShardPlan:
    work = tuple(float(n) ** 2 for n in lengths)
    packed = packed_rounds(devices, lengths, degrees, firsts, **packing)
    return ShardPlan(devices, tuple(lengths), work, tuple(degrees), tuple(firsts), packed)


# --- the fits ---------------------------------------------------------------------------------------


def test_attention_reproduces_table_3_within_two_percent():
    model = H800.of(tables.TABLE3_MODEL)
    for (count, length), ms in tables.TABLE3_MS.items():
        assert launch_seconds(model, [length] * count) == pytest.approx(ms / 1e3, rel=0.02)
    assert H800.fits["attention"]["r2"] > 0.999


@pytest.mark.parametrize(("cluster", "worst", "r2"), [("h800", 0.28, 0.95), ("h200", 0.19, 0.97)])
def test_all_to_all_reproduces_tables_4_and_5(cluster, worst, r2):
    model = CLUSTERS[cluster].of(tables.TABLE5_MODEL)
    runs = tables.TABLE5_MS[cluster]
    errors = [float(model.all_to_all_seconds(n, degree)) * 1e3 / ms - 1 for (degree, n), ms in runs.items()]
    figures = model.fits["all_to_all"]
    assert np.abs(errors).max() <= worst
    assert figures["worst_relative_error"] == pytest.approx(np.abs(errors).max(), abs=1e-4)
    assert figures["r2"] >= r2 and figures["measurements"] == len(runs) == 18


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_all_coefficients_are_physical(cluster):
    model = CLUSTERS[cluster]
    assert model.across is not None
    for part in (model.attention, model.within, model.across):
        assert min(dataclasses.astuple(part)) >= 0
    assert model.within.alpha <= tables.ALPHA_WITHIN


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_leaving_the_node_costs_a_jump_and_long_sequences_more_than_in_proportion(cluster):
    model = CLUSTERS[cluster].of(tables.TABLE5_MODEL)
    assert model.all_to_all_seconds(131072, 16) > model.all_to_all_seconds(131072, 8)
    assert model.all_to_all_seconds(1 << 20, 8) > 8 * model.all_to_all_seconds(1 << 17, 8)


def test_non_negative_least_squares_of_relative_errors_is_optimal():
    random = np.random.default_rng(0)
    for _ in range(20):
        columns, seconds = random.normal(size=(9, 4)), random.uniform(0.5, 2, 9)
        system, target = columns / seconds[:, None], np.ones(9)
        found = non_negative(columns, seconds)
        np.testing.assert_allclose(found, scipy.optimize.nnls(system, target)[0], atol=1e-9)
        slope = system.T @ (system @ found - target)  # Karush-Kuhn-Tucker: no way is down, but below 0
        assert (found >= 0).all() and (slope > -1e-9).all() and np.abs(slope * found).max() < 1e-9


def test_exact_measurements_give_back_their_coefficients():
    model, truth = tables.TABLE5_MODEL, AttentionFit(3e-14, 2e-11, 5e-5)
    channels = model.heads * model.head_size
    runs = {
        (count, length): float(truth.seconds(count * length**2, count * length, channels)) + truth.per_launch
        for count, length in ((1, 512), (1, 4096), (8, 512), (4, 2048))
    }
    np.testing.assert_allclose(dataclasses.astuple(fit_attention(runs, model)), dataclasses.astuple(truth), rtol=1e-6)

    link = Link(2e-5, 1e-11, 1e-21)
    toy = dataclasses.replace(TOY, model=model, within=link, node=8)
    runs = {(p, n): float(toy.all_to_all_seconds(n, p)) for p in (2, 4, 8) for n in (4096, 65536, 524288)}
    np.testing.assert_allclose(dataclasses.astuple(fit_link(runs, model, 8)), dataclasses.astuple(link), rtol=1e-6)
    assert fit_link(runs, model, 8, most_alpha=1e-5).alpha == 1e-5


def test_what_cannot_be_fitted_is_said():
    with pytest.raises(CostError, match="at least two"):
        fit_attention({(1, 128): 1.0}, UNIT)
    with pytest.raises(CostError, match="positive and finite"):
        fit_attention({(1, 128): 1.0, (1, 256): float("nan")}, UNIT)
    with pytest.raises(CostError, match="within a node"):
        runs = {(1, 128): 1.0, (1, 256): 2.0}
        fitted("", attention=(runs, UNIT), all_to_all=({}, UNIT), node=8, flops=(1.0, 1.0))
    with pytest.raises(CostError, match="h200, h800"):
        published("a100")
    with pytest.raises(CostError, match=QWEN2_5_VL_7B.name):
        published(model="gpt")


# --- laws -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=third_of(50))
@given(
    length=st.integers(1, 10**6),
    more=st.integers(1, 10**5),
    degree=st.sampled_from([1, 2, 4, 8, 16]),
    cluster=st.sampled_from(sorted(CLUSTERS)),
)
def test_longer_takes_longer(length, more, degree, cluster):
    model = CLUSTERS[cluster]
    assert model.attention_seconds(length + more, degree) > model.attention_seconds(length, degree)
    assert model.linear_seconds(length + more) > model.linear_seconds(length)
    assert model.vision_seconds(length + more) > model.vision_seconds(length)
    if degree > 1:
        assert model.all_to_all_seconds(length + more, degree) > model.all_to_all_seconds(length, degree) > 0


def test_devices_share_the_attention_up_to_the_padding_of_heads():
    whole = H800.attention_seconds(30000)
    assert H800.attention_seconds(30000, 4) == pytest.approx(whole / 4)
    assert H800.attention_seconds(30000, 8) == pytest.approx(whole / 7)  # 28 heads are filled up to 32
    with pytest.raises(PlanError, match="28 attention heads"):
        H800.attention_seconds(30000, 32)


def test_other_models_scale_flops_and_bytes():
    double = dataclasses.replace(QWEN2_5_VL_7B, layers=2 * QWEN2_5_VL_7B.layers, vocabulary=0, head_size=256)
    half = dataclasses.replace(QWEN2_5_VL_7B, vocabulary=0)
    one, two = H200.of(half), H200.of(double)
    assert two.attention_seconds(5000) == pytest.approx(4 * one.attention_seconds(5000))
    assert two.all_to_all_seconds(5000, 4) > 4 * one.all_to_all_seconds(5000, 4)  # more bytes, more congestion


def test_linear_work_is_two_flops_a_weight():
    weights = QWEN2_5_VL_7B.linear_flops() / 2
    assert 7.0e9 < weights < 7.1e9  # 7.07e9 weights of the language model, without its input embedding
    assert 0.62e9 < QWEN2_5_VL_7B.vision_flops() / 2 < 0.68e9
    assert H800.linear_seconds(1000) == pytest.approx(1000 * 2 * weights / (0.5 * 989e12))


# --- seconds of a plan ------------------------------------------------------------------------------


def test_a_plan_of_two_devices_by_hand():
    """Device 0 has 3 tokens of its own (9 s of attention) and half of 8 (32 s), device 1 only the latter.

    2 query and 2 KV heads: 3/4 of the 8 s of transfers bring q, k, v, 1/4 the outputs. Both begin at once; those of
    device 0 are hidden by its own sequence. It is done with that at 9, with all attention at 41, the output is out at
    43. Then 7 tokens of linear work.
    """
    model = dataclasses.replace(TOY, linear_flops=UNIT.linear_flops(), recompute=0.0)  # a second a token
    plan = made(2, [3, 8], [1, 2], [0, 0])
    assert model.all_to_all_seconds(8, 2) == 8.0
    assert model.step_seconds(plan, train=False) == pytest.approx(43 + 7)
    # Backward: 2.5 times the attention, and the output's gradient comes with 1/4, those of q, k, v leave with 3/4.
    backward = 2.5 * 9 + 2.5 * 32 + 6 + 2 * 7
    assert model.step_seconds(plan) == pytest.approx(50 + backward)
    again = dataclasses.replace(model, recompute=1.0)
    assert again.step_seconds(plan) == pytest.approx(50 + 50 + backward)


def test_only_the_first_transfer_in_and_the_last_one_out_are_exposed():
    """Sequence groups of 8 tokens: 6 s in, 32 s of attention, 2 s out. Two of them: 6 + 32 + 32 + 2, not 2 * 40."""
    forward = dataclasses.replace(TOY, linear_flops=1e18)
    apart = made(2, [8, 8], [2, 2], [0, 0], short=1, cap=8, most=2)
    assert len(apart.rounds) == 2
    assert forward.step_seconds(apart, train=False) == pytest.approx(6 + 32 + 32 + 2)
    together = made(2, [8, 8], [2, 2], [0, 0])
    assert forward.step_seconds(together, train=False) == pytest.approx(12 + 64 + 4)


def test_a_transfer_longer_than_the_attention_before_it_is_exposed_in_part():
    slow = dataclasses.replace(TOY, linear_flops=1e18, within=Link(0.0, 5.0, 0.0))  # 60 s in, 20 s out
    apart = made(2, [8, 8], [2, 2], [0, 0], short=1, cap=8, most=2)
    # In until 60; attention until 92, the second in until 120; attention until 152; out (first done at 140) until 172.
    assert slow.step_seconds(apart, train=False) == pytest.approx(172)


def test_a_group_waits_for_its_latest_member():
    """On 4 devices: 2 and 3 compute 10 tokens (100 s) of their own first; 0 and 1 meet them in the group of 4."""
    model = dataclasses.replace(TOY, model=dataclasses.replace(UNIT, heads=4, kv_heads=4), linear_flops=1e18, node=4)
    plan = made(4, [16, 10, 10], [4, 1, 1], [0, 2, 3])
    alone = made(4, [16], [4], [0])
    busy = 200.0  # 10^2 * 4 heads * 0.5
    inputs, attention = 0.75 * model.all_to_all_seconds(16, 4), 0.5 * 16**2
    assert inputs < busy  # hidden where there is other work
    assert model.step_seconds(alone, train=False) == pytest.approx(inputs + attention + inputs / 3)
    assert model.step_seconds(plan, train=False) == pytest.approx(busy + attention + inputs / 3)


def test_the_step_is_that_of_the_slowest_device():
    model = dataclasses.replace(TOY, linear_flops=UNIT.linear_flops(), recompute=0.0)
    plan = made(2, [3, 5], [1, 1], [0, 1])
    assert model.step_seconds(plan, train=False) == pytest.approx(25 + 5)
    assert model.step_seconds(plan, train=False, squares=[9.0, 16.0]) == pytest.approx(16 + 5)


@settings(deadline=None, max_examples=third_of(30))
@given(st.lists(st.integers(1, 40000), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_step_is_between_its_busiest_device_and_everything_in_a_row(lengths, random):
    degrees = [random.choice([1, 2, 4, 8]) for _ in lengths]
    firsts = [random.randrange(8 // p) * p for p in degrees]
    plan = made(8, lengths, degrees, firsts, short=4096, cap=8192, most=random.choice([1, 3]))
    attention = sum(float(H800.attention_seconds(n, p)) for n, p in zip(lengths, degrees, strict=True))
    wires = sum(
        H800.all_to_all_seconds(sum(lengths[i] for i in group), one.degree)
        for one in plan.rounds
        for group in one.groups
    )
    linear = float(H800.linear_seconds(plan.memory().max()))
    step = H800.step_seconds(plan, train=False)
    busiest = max(
        sum(
            float(H800.attention_seconds(n, p)) + float(H800.linear_seconds(n / p))
            for n, p, first in zip(lengths, degrees, firsts, strict=True)
            if first <= device < first + p
        )
        for device in range(8)
    )
    assert busiest * (1 - 1e-9) <= step <= (attention + wires + linear) * (1 + 1e-9)
    assert step < H800.step_seconds(plan)


def test_empty_groups_cost_nothing():
    plan = ShardPlan(4, (8,), (64.0,), (2,), (0,), (Round(2, ((0,), ())),))
    wide = dataclasses.replace(TOY, linear_flops=1e18, within=Link(5.0, 0.5, 0.0))
    assert wide.step_seconds(plan, train=False) == pytest.approx(0.75 * 13 + 32 + 0.25 * 13)
    assert wide.all_to_all_seconds(0, 2) == wide.all_to_all_seconds(8, 1) == 0.0


def test_a_width_that_was_never_measured_is_refused():
    model = dataclasses.replace(TOY, model=dataclasses.replace(UNIT, heads=4, kv_heads=4))
    with pytest.raises(CostError, match=r"over 4 devices was not measured.*by hand.*at 2"):
        model.all_to_all_seconds(100, 4)


# --- its file ---------------------------------------------------------------------------------------


def test_json_round_trip(tmp_path):
    for model in (H800, TOY):
        save(model, tmp_path / "cost.json")
        assert CostModel.load(tmp_path / "cost.json") == model
    assert CostModel.load(tmp_path / "cost.json", QWEN2_5_VL_7B).model is QWEN2_5_VL_7B


def test_files_that_are_no_cost_model(tmp_path):
    with pytest.raises(CostError, match=r"no cost model at .*calibrate\.py"):
        CostModel.load(tmp_path / "absent.json")
    raw = dataclasses.asdict(H800)
    broken = ["", "[]", "3", json.dumps(raw | {"surplus": 1}), json.dumps(raw | {"linear_flops": 0})]
    for text in [*broken, json.dumps({key: raw[key] for key in raw if key != "within"})]:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(CostError, match=r"bad\.json: this is no cost model"):
            CostModel.load(tmp_path / "bad.json")


# --- the simulation ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "flex_ulysses_simulated.py"
    spec = importlib.util.spec_from_file_location("flex_ulysses_simulated", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_simulation_of_a_skewed_mix(simulated):
    long = {"length": 40000, "vision_tokens": 39000, "frames": 250}
    short = [{"length": n, "vision_tokens": n // 2, "frames": 1} for n in range(600, 3100, 100)]
    mix = {"name": "image_heavy_32", "devices": 16, "sequences": [long, *short]}
    result = simulated.simulate([mix, mix])
    seconds = result["simulated_seconds"]["image_heavy_32"]
    update = {method: figures["simulated_update_seconds"] for method, figures in seconds.items()}
    assert update["flex_ulysses_calibrated"] <= update["flex_ulysses"] < update["bucketing"] / 2
    for degree in (2, 4, 8):
        assert update[f"ulysses_{degree}"] < update[f"ulysses_{degree}_whole_vision"]
    assert result["simulated_speedup"]["image_heavy_32"]["over_bucketing"]["update"]["paper"] == 10.7
    assert all(key.startswith("simulated") for key in result)


def test_vision_towers_patches_are_all_there(simulated):
    plan = made(4, [100, 50, 10], [2, 1, 1], [0, 2, 3])
    patches = np.array([80.0, 40.0, 0.0])
    assert simulated._in_place(plan, patches).tolist() == [40, 40, 40, 0]
    assert simulated._in_place(plan, patches, every=True).tolist() == [80, 80, 40, 0]
    # The three frame pairs of a video and an image: a device each. The image is at home, at most two of the pairs are.
    video = [{"vision_tokens": 30, "frames": 6}, {"vision_tokens": 0, "frames": 0}, {"vision_tokens": 10, "frames": 1}]
    loads, moved = simulated._planned_vision(video, plan, 4)
    assert loads.tolist() == [40, 40, 40, 40]
    assert moved == 10


def test_simulation_says_what_is_wrong_with_its_file(simulated, tmp_path, capsys):
    assert simulated.main([str(tmp_path / "absent.json")]) == 2
    (tmp_path / "bad.json").write_text('[{"name": "x", "sequences": []}]')
    assert simulated.main([str(tmp_path / "bad.json")]) == 2
    assert simulated.main(["--cluster=a100", str(tmp_path / "bad.json")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert all(
        text in error for text, error in zip(("no mixes at", "bad.json holds no mixes", "a100"), errors, strict=True)
    )
