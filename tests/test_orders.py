"""What process 0 tells the others: nothing is lost on the way, nothing is told that a process does not need."""

import dataclasses
import functools

import jax
import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from learner_cases import random_groups
from packing_cases import MODEL, make_config, response_of
from turns import third_of

from fluxjax.batch.composer import Composer
from fluxjax.config import STRATEGIES
from fluxjax.hosts.gang import fingerprint, release
from fluxjax.hosts.orders import (
    PROTOCOL,
    Begin,
    Coming,
    End,
    Gather,
    Learn,
    OrderError,
    Restore,
    Save,
    Start,
    Value,
    decode,
    encode,
    shares_of,
    told,
)

ORDERS = [Start("/runs/a", "secret", {"steps": 3}), Begin("rl", 3), Gather(), Save(7), Restore(3, 9), End()]
ORDERS += [Coming([[3, [["a ticket", "place 1"], ["another", ""]]], [5, []]])]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_an_order_comes_as_it_was_given(order):
    assert decode(b"".join(encode(order))) == order


@pytest.mark.medium
@pytest.mark.parametrize("strategy", ["fsdp", "ulysses", "flex_ulysses"])
@given(
    seed=st.integers(0, 2**20), processes=st.sampled_from([1, 2, 4]), temperature=st.booleans(), together=st.booleans()
)
@example(seed=24560, processes=1, temperature=False, together=False)  # a group in two microbatches
@settings(deadline=None, max_examples=third_of(15))
def test_rows_come_as_they_were_told(strategy, seed, processes, temperature, together):
    """Each process lays out just the rows that one process would have laid out on its devices."""
    config = make_config(tokens_per_row=128, rows=2, share=together)
    config.rollout.temperature = "1.0" if temperature else 1.0
    config.sharding.strategy = STRATEGIES[strategy]()
    groups, prepared = random_groups(seed)
    inputs = {draw: one.inputs for draw, one in prepared.items()}
    composer = functools.partial(Composer, config, 4, MODEL.vision, MODEL.text)
    whole = composer().compose(groups, prepared)
    shares = composer().outline(groups, prepared).cut(processes)
    parts = [composer().lay_out(heard(share, inputs)) for share in shares]
    assert {key for part in parts for key in part.keys if key[0] >= 0} == set(whole.keys)
    assert sum(len(part.cells) for part in parts) == len(whole.cells)
    tokens = np.sum([part.lengths for part in parts], axis=0) if strategy != "fsdp" else whole.lengths
    np.testing.assert_array_equal(tokens, whole.lengths)
    for number, batch in enumerate(whole.batches):
        own = [jax.tree_util.tree_leaves_with_path(part.batches[number]) for part in parts]
        for k, (path, want) in enumerate(jax.tree_util.tree_leaves_with_path(batch)):
            axis = 1 if "positions_3BT" in jax.tree_util.keystr(path) else 0
            got = np.concatenate([leaves[k][1] for leaves in own], axis=axis)
            np.testing.assert_array_equal(got, want, err_msg=jax.tree_util.keystr(path))


def learn(share) -> bytes:
    """An order to learn from a share."""
    rows, responses = told(share)
    return b"".join(encode(Learn(1, [rows], responses)))


def heard(share, inputs):
    """The share as a process reads it that has these inputs."""
    order = decode(learn(share))
    assert isinstance(order, Learn)
    [read] = shares_of(order, lambda draws: {draw: inputs[draw] for draw in draws if draw in inputs})
    return read


def test_no_media_are_told_and_no_batch():
    """However large media and rows are: what is told depends on the responses."""
    groups, prepared = random_groups(8)
    assert any(one.inputs.laid_out().vision is not None for one in prepared.values())
    sizes = []
    for rows in (2, 8):
        composer = Composer(make_config(64, rows), 1, MODEL.vision)
        data = learn(composer.outline(groups, prepared))
        sizes.append(len(data))
        for one in prepared.values():
            if one.inputs.laid_out().vision is not None:
                assert one.inputs.laid_out().vision.patches_PX[0, :2].tobytes() not in data
    assert max(sizes) < min(sizes) + 100
    tokens = sum(len(sample.response.token_ids) for group in groups for sample in group.samples)
    responses = sum(len(group.samples) for group in groups)
    assert max(sizes) < 6 * tokens + 64 * responses + 256 * len(groups) + 200


def test_processes_agree_on_settings_and_shapes():
    """Not on what is in the arrays, which is each one's own."""
    groups, prepared = random_groups(3)
    config = make_config(64, 2)
    composer = Composer(config, 4, MODEL.vision)
    step = composer.outline(groups, prepared)
    first, second, whole = ([composer.lay_out(share)] for share in (*step.cut(2), step))
    assert fingerprint(config, first) == fingerprint(config, second)
    assert fingerprint(make_config(64, 3), first) == fingerprint(config, first), "packing is in the shapes"
    other = make_config(64, 2)
    other.algorithm.clip_high = 0.3
    assert fingerprint(other, first) != fingerprint(config, first)
    assert fingerprint(config, whole) != fingerprint(config, first)


def test_processes_agree_on_the_release(tmp_path):
    """One line that is another, in one of the files that make programs, is another release."""
    for room in ("fluxjax", "models", "sharding"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("scale = 1.0\n")
    first = release.__wrapped__(tmp_path)
    assert release.__wrapped__(tmp_path) == first
    (tmp_path / "models" / "a.py").write_text("scale = 1.1\n")
    assert release.__wrapped__(tmp_path) != first


def test_each_process_is_told_its_own():
    groups, prepared = random_groups(3)
    inputs = {draw: one.inputs for draw, one in prepared.items()}
    came = []
    for share in Composer(make_config(64, 2), 4, MODEL.vision).outline(groups, prepared).cut(4):
        read = heard(share, inputs)
        shown = sorted((piece.item, k) for micro in read.micros for piece in micro.pieces for k in piece.responses)
        columns = {item: group.columns for item, group in read.groups.items()}
        assert shown == [(item, k) for item, some in columns.items() for k, data in enumerate(some.data) if data]
        came += [response_of(some.draw, data) for some in columns.values() for data in some.data if data]
    sent = [sample.response for group in groups for sample in group.samples if sample.response.token_ids]
    known = {(r.draw, r.sample): dataclasses.replace(r, rid="") for r in sent}
    assert {(r.draw, r.sample): r for r in came} == known and len(came) == len(sent)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no order"),
        (b"\xc1nonsense", "no order"),
        (msgpack.packb([1, 2]), "no order"),
        (msgpack.packb({"protocol": 99, "order": "end"}), "version 99"),
        (msgpack.packb({"protocol": PROTOCOL, "order": "dance"}), "no order 'dance'"),
        (msgpack.packb({"protocol": PROTOCOL, "order": "save", "steps": 3}), "order save"),
    ],
)
def test_what_is_no_order_is_named(data, says):
    with pytest.raises(OrderError, match=says):
        decode(data)


def test_a_prompt_that_is_not_here_is_named():
    groups, prepared = random_groups(3)
    composer, inputs = Composer(make_config(64, 2), 1, MODEL.vision), {d: one.inputs for d, one in prepared.items()}
    share = composer.outline(groups, prepared)
    with pytest.raises(OrderError, match="draw 100 can't be prepared in this process"):
        heard(share, {draw: some for draw, some in inputs.items() if draw != 100})
    cut, responses = told(share)
    cut["groups"][0] = cut["groups"][0][:3]
    with pytest.raises(OrderError, match="the rows of an order can't be read"):
        shares_of(Learn(1, [cut], responses), lambda draws: {draw: inputs[draw] for draw in draws})
    with pytest.raises(OrderError, match="1 bytes after its last response"):
        rows, responses = told(share)
        shares_of(Learn(1, [rows], [*responses, b"x"]), lambda _: inputs)


def test_a_value_comes_as_it_was_sent():
    value = {"numbers": np.arange(3), "means": np.array([0.1, -np.inf]), "text": ["a", {"b": 1e-9}], "nothing": None}
    read = decode(b"".join(encode(Value(value))))
    assert isinstance(read, Value)
    for name, want in value.items():
        np.testing.assert_array_equal(read.value[name], want)


def test_fields_of_orders_are_plain():
    """Nothing that would need pickle."""
    kinds = {field.type for order in ORDERS for field in dataclasses.fields(order)}
    assert kinds <= {"str", "int", "bool", "Mapping[str, Any]", "Sequence[Any]"}
