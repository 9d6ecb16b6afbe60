"""Packing and composing: nothing lost, nothing doubled, nothing over budget, whatever the sizes."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import random_groups
from packing_cases import MODEL, QWEN3_5, compose, make_config, make_groups, shapes_of
from turns import third_of

from fluxjax.batch.composer import sft_groups
from fluxjax.batch.composition import unpack
from fluxjax.batch.rows import Budget
from fluxjax.batch.share import Item, chunks_for, pieces_of, runs_of
from fluxjax.config import ODC, ConfigError, FlexUlysses, LossAggregation, Ulysses
from fluxjax.learner.loss_inputs import with_logprobs
from fluxjax.sizing.largest import largest_batch
from sharding.kernels.runs import CHUNK, packed_runs

UNIQUE = 1 << 30  # a vocabulary so large that no token of a response is drawn twice
VERSION = 11  # of the trainer; tokens are of earlier ones

# --- composing ----------------------------------------------------------------------------------

content_strategy = st.lists(
    st.one_of(st.integers(1, 6), st.sampled_from([(1, 2, 2), (1, 2, 4), (1, 6, 4), (2, 2, 2), (2, 4, 2)])),
    min_size=1,
    max_size=3,
)


@st.composite
def case_strategy(draw):
    contents = draw(st.lists(content_strategy, min_size=1, max_size=5))
    sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5)
    lengths = [draw(sizes) for _ in contents]
    lengths[0][0] = max(lengths[0][0], 1)
    limits = {
        "tokens_per_row": draw(st.integers(45, 70)),
        "rows": draw(st.integers(1, 5)),
        "patches": draw(st.integers(72, 130)),
        "share": draw(st.booleans()),
    }
    aggregation = draw(st.sampled_from(LossAggregation))
    return contents, lengths, draw(st.integers(0, 99)), limits, aggregation, draw(st.sampled_from([1, 2, 4]))


def build(case):
    contents, lengths, seed, limits, aggregation, shards = case
    config = make_config(**limits)
    config.algorithm.loss_aggregation = aggregation
    return *make_groups(contents, lengths, seed, UNIQUE), config, shards


def visible(inputs, row, query):
    """The cells that a query attends to, straight from the docstring of PackedTokens."""
    segments, branches = inputs.segments_BT[row], inputs.branches_BT[row]
    return [
        s
        for s in range(query + 1)
        if segments[s] == segments[query] != 0 and (branches[s] == 0 or branches[s] == branches[query])
    ]


def ancestry(inputs, row, cell):
    """The cells of a sequence up to `cell`, found backwards through the predecessors."""
    cells = [cell]
    while inputs.predecessor_BT[row, cells[-1]] != cells[-1]:
        cells.append(int(inputs.predecessor_BT[row, cells[-1]]))
    return cells[::-1]


@pytest.mark.slow
@settings(deadline=None, max_examples=third_of(150))
@given(case_strategy())
def test_every_response_is_there_once_behind_its_own_prompt(case):
    groups, prepared, config, shards = build(case)
    composition = compose(groups, prepared, config, shards, vision=MODEL.vision, version=VERSION)
    owners = {s.response.token_ids[0]: s for g in groups for s in g.samples if s.response.token_ids}
    found = []
    for batch in composition.batches:
        inputs = batch.inputs
        B, T = inputs.tokens_BT.shape
        assert (B, T, inputs.vision.num_patches) in shapes_of(Budget.of(config, shards, MODEL.vision))
        trained = batch.lags_BT >= 0
        np.testing.assert_array_equal(trained, batch.loss_weights_BT > 0)
        ends = trained & ~np.pad(trained, ((0, 0), (0, 1)))[:, 1:]
        if config.packing.share_prompts:
            ends |= trained & (inputs.branches_BT != np.pad(inputs.branches_BT, ((0, 0), (0, 1)))[:, 1:])
        else:
            assert not inputs.branches_BT.any()
        for row, end in np.argwhere(ends).tolist():
            cells = ancestry(inputs, row, end)
            assert visible(inputs, row, end) == cells
            sample = owners[int(inputs.tokens_BT[row, cells][trained[row, cells]][0])]
            check_sequence(batch, row, cells, sample, prepared[sample.response.draw].inputs, shards)
            found.append((sample.response.draw, sample.response.sample))
        check_padding(batch, shards, prepared)
    assert sorted(found) == sorted((s.response.draw, s.response.sample) for s in owners.values())
    check_weights(composition, groups, config)


def check_sequence(batch, row, cells, sample, prompt, shards):
    inputs, response = batch.inputs, sample.response
    P, G = len(prompt), len(response.token_ids)
    assert len(cells) == P + G
    assert inputs.tokens_BT[row, cells].tolist() == [*prompt.token_ids_T.tolist(), *response.token_ids]
    np.testing.assert_array_equal(inputs.positions_3BT[:, row, cells[:P]], prompt.positions_3T)
    expected = np.tile(np.arange(prompt.next_position, prompt.next_position + G), (3, 1))
    np.testing.assert_array_equal(inputs.positions_3BT[:, row, cells[P:]], expected)
    assert batch.behaviour_logprobs_BT[row, cells[P:]].tolist() == list(response.logprobs)
    assert batch.lags_BT[row, cells].tolist() == [-1] * P + [VERSION - version for version in response.versions]
    assert set(batch.advantages_BT[row, cells[P:]].tolist()) == {sample.advantage}
    assert not batch.loss_weights_BT[row, cells[:P]].any()

    index = inputs.feature_index_BT[row, cells]
    np.testing.assert_array_equal(index >= 0, np.pad(prompt.feature_index_T >= 0, (0, G)))
    if prompt.vision is not None:
        unit = MODEL.vision.merge_unit
        shard = row // (len(inputs.tokens_BT) // shards)
        start = shard * (inputs.vision.num_patches // shards)
        pixels = inputs.vision.patches_PX[start:].reshape(-1, unit, MODEL.vision.patch_values)[index[index >= 0]]
        own = prompt.vision.patches_PX.reshape(-1, unit, MODEL.vision.patch_values)
        np.testing.assert_array_equal(pixels, own[prompt.feature_index_T[prompt.feature_index_T >= 0]])


def check_padding(batch, shards, prepared):
    inputs = batch.inputs
    padding = inputs.segments_BT == 0
    assert not (batch.loss_weights_BT[padding].any() or batch.advantages_BT[padding].any())
    assert (inputs.feature_index_BT[padding] == -1).all()
    assert ((inputs.predecessor_BT >= 0) & (inputs.predecessor_BT < inputs.tokens_BT.shape[1])).all()
    for part in np.split(np.arange(inputs.vision.num_patches), shards):
        for segments in (inputs.vision.frame_segments_P[part], inputs.vision.window_segments_P[part]):
            runs = segments[np.flatnonzero(np.diff(segments, prepend=-1))]
            assert len(set(runs.tolist())) == len(runs)  # each id is one contiguous run
        counts = np.bincount(inputs.vision.frame_segments_P[part])[1:]
        assert counts.size == 0 or counts.max() <= inputs.vision.frame_bound


def check_weights(composition, groups, config):
    lengths = [len(sample.response.token_ids) for group in groups for sample in group.samples]
    total = sum(batch.loss_weights_BT.sum(dtype=np.float64) for batch in composition.batches)
    constant = config.algorithm.loss_aggregation is LossAggregation.CONSTANT
    expected = sum(lengths) / (len(lengths) * config.rollout.max_new_tokens) if constant else 1.0
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    logprobs = unpack(composition, [batch.behaviour_logprobs_BT for batch in composition.batches])
    wanted = {(s.response.draw, s.response.sample): s.response for g in groups for s in g.samples}
    assert set(logprobs) == {key for key, response in wanted.items() if response.token_ids}
    for key, values in logprobs.items():
        assert values.tolist() == list(wanted[key].logprobs)


def assert_same(one, other):
    assert one.keys == other.keys
    leaves, others = jax.tree.leaves(one.batches), jax.tree.leaves(other.batches)
    assert jax.tree.structure(one.batches) == jax.tree.structure(other.batches)
    for a, b in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(deadline=None, max_examples=third_of(20))
@given(case_strategy(), st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(case, shuffle: random.Random):
    groups, prepared, config, shards = build(case)
    shuffled = []
    for group in groups:
        samples = list(group.samples)
        shuffle.shuffle(samples)
        shuffled.append(dataclasses.replace(group, samples=tuple(samples)))
    shuffle.shuffle(shuffled)
    reference = compose(groups, prepared, config, shards, vision=MODEL.vision)
    assert_same(compose(shuffled, dict(reversed(prepared.items())), config, shards, vision=MODEL.vision), reference)


def test_media_of_a_group_over_several_rows_are_there_once():
    groups, prepared = make_groups([[3, (1, 4, 4), 2]], [[9] * 6])
    [batch] = compose(groups, prepared, make_config(tokens_per_row=30), vision=MODEL.vision).batches
    assert np.count_nonzero((batch.inputs.segments_BT != 0).any(axis=1)) > 1
    assert np.count_nonzero(batch.inputs.vision.frame_segments_P) == 16


def test_a_batch_without_media_has_an_empty_vision_buffer_of_fixed_size():
    groups, prepared = make_groups([[4]], [[3, 2]])
    [batch] = compose(groups, prepared, make_config(patches=128), 2, vision=MODEL.vision).batches
    assert batch.inputs.vision.patches_PX.shape == (2 * 32, MODEL.vision.patch_values)
    assert not batch.inputs.vision.frame_segments_P.any()


def test_a_text_model_has_no_vision_buffer():
    groups, prepared = make_groups([[4], [5]], [[3, 2], [1]])
    for batch in compose(groups, prepared, make_config()).batches:
        assert batch.inputs.vision is None
    assert shapes_of(Budget.of(make_config(rows=4), 2, None)) == {(2 * rows, 48, 0) for rows in (1, 2, 3, 4)}


def test_all_microbatches_of_a_step_have_one_frame_bound():
    groups, prepared = make_groups([[3, (1, 4, 4)], [3, (1, 2, 2)], [30]], [[9], [9], [9]])
    config = make_config(tokens_per_row=40, rows=1)
    composition = compose(groups, prepared, config, vision=MODEL.vision)
    assert [batch.inputs.vision.frame_bound for batch in composition.batches] == [16] * len(composition.batches)
    assert len(composition.batches) > 1


def test_reference_logprobs_are_filled_in_where_tokens_are_trained():
    groups, prepared = make_groups([[4], [5, (1, 2, 2)]], [[3, 2], [1]])
    composition = compose(groups, prepared, make_config(), vision=MODEL.vision)
    filled = with_logprobs(
        composition, "reference_logprobs_BT", [np.full(b.loss_weights_BT.shape, -2.5) for b in composition.batches]
    )
    for before, after in zip(composition.batches, filled.batches, strict=True):
        assert not before.reference_logprobs_BT.any()
        expected = np.where(before.lags_BT >= 0, np.float32(-2.5), np.float32(0))
        np.testing.assert_array_equal(after.reference_logprobs_BT, expected)
        assert after.reference_logprobs_BT.dtype == np.float32


def test_idle_groups_are_left_out_on_request_and_still_counted():
    groups, prepared = make_groups([[4], [5], [6]], [[3, 2], [4, 1], [2]])
    idle = tuple(dataclasses.replace(sample, advantage=0.0) for sample in groups[1].samples)
    groups[1] = dataclasses.replace(groups[1], samples=idle)
    composition = compose(groups, prepared, make_config(), skip_idle=True)
    assert {draw for draw, _ in composition.keys} == {100, 106}
    [batch] = composition.batches
    np.testing.assert_allclose(batch.loss_weights_BT[batch.lags_BT >= 0], 1 / 12, rtol=1e-6)
    all_idle = [
        dataclasses.replace(g, samples=tuple(dataclasses.replace(s, advantage=0.0) for s in g.samples)) for g in groups
    ]
    assert {draw for draw, _ in compose(all_idle, prepared, make_config(), skip_idle=True).keys} == {100}


def test_sft_groups_are_composed_like_any_other():
    _, prepared = make_groups([[4], [5, (1, 2, 2)]], [[1], [1]])
    answers = [[7, 8, 9], (3, 2)]
    composition = compose(sft_groups(list(prepared.values()), answers), prepared, make_config(), vision=MODEL.vision)
    tokens = unpack(composition, [batch.inputs.tokens_BT for batch in composition.batches])
    assert {key: ids.tolist() for key, ids in tokens.items()} == {(100, 0): [7, 8, 9], (103, 0): [3, 2]}
    assert np.isclose(sum(batch.loss_weights_BT.sum() for batch in composition.batches), 1.0)
    assert all((batch.lags_BT == -1).all() for batch in composition.batches)  # no engine generated them


# --- what is refused ----------------------------------------------------------------------------


def test_a_sequence_longer_than_a_row_names_prompt_and_field():
    groups, prepared = make_groups([[4], [30]], [[3], [5, 19]])
    with pytest.raises(ConfigError, match=r"prompt-103: 30 prompt tokens .* 19 make 49.* packing\.tokens_per_row = 48"):
        compose(groups, prepared, make_config(tokens_per_row=48))


def test_media_larger_than_the_buffer_name_prompt_and_field():
    groups, prepared = make_groups([[4, (1, 6, 6)]], [[3]])
    with pytest.raises(ConfigError, match=r"prompt-100: .* 36 patches.* packing\.patches_per_device = 32"):
        compose(groups, prepared, make_config(patches=33), vision=MODEL.vision)


@pytest.mark.parametrize("field", ["tokens_per_row", "rows_per_device", "patches_per_device"])
def test_buffers_that_hold_nothing_are_refused(field):
    groups, prepared = make_groups([[4]], [[3]])
    config = make_config()
    setattr(config.packing, field, 0)
    with pytest.raises(ConfigError, match=field):
        compose(groups, prepared, config, vision=MODEL.vision)


def test_contradictions_are_refused():
    groups, prepared = make_groups([[4], [4, (1, 2, 2)]], [[3], [2]])
    with pytest.raises(ValueError, match="same draw 100"):
        compose([groups[0], groups[0]], prepared, make_config(), vision=MODEL.vision)
    with pytest.raises(ValueError, match=r"prompt-103.*not among the prepared"):
        compose(groups, {100: prepared[100]}, make_config(), vision=MODEL.vision)
    with pytest.raises(ValueError, match=r"prompt-103 has media.*no vision tower"):
        compose(groups, prepared, make_config())
    empty, prepared_empty = make_groups([[4]], [[0, 0]])
    with pytest.raises(ValueError, match="nothing to train on"):
        compose(empty, prepared_empty, make_config())
    composition = compose(groups, prepared, make_config(), vision=MODEL.vision)
    with pytest.raises(ValueError, match="the arrays have the shapes"):
        unpack(composition, [np.zeros((1, 1))])


@pytest.mark.parametrize("strategy", [Ulysses(), FlexUlysses(), ODC()])
@pytest.mark.parametrize("share", [True, False])
def test_tables_of_streams_hold_every_token_once(strategy, share):
    """Each device of a group has the table of its stream."""
    for seed in range(6):
        config = make_config(tokens_per_row=64, share=share)
        config.sharding.strategy = strategy
        composition = compose(*random_groups(seed), config, 4, vision=QWEN3_5.vision, text=QWEN3_5.text)
        for microbatch in composition.microbatches:
            spread, tokens = microbatch.batch.inputs.spread, microbatch.layout.plan.lengths
            columns = [runs.columns_BNC.reshape(len(runs.columns_BNC), -1) for runs in spread.runs]
            held = [(table >= 0).sum() / degree for table, (degree, _) in zip(columns, spread.rounds, strict=True)]
            assert sum(held) == sum(tokens)
            for table in (row[row >= 0] for rows in columns for row in rows):
                assert len(np.unique(table)) == len(table)


@pytest.mark.parametrize("seed", range(20))
def test_a_table_of_runs_holds_every_row(seed):
    """Whatever the lengths of prompts and responses; a row has a run for each of them."""
    rng = np.random.default_rng(seed)
    prompts = [int(rng.integers(1, 150)) for _ in range(int(rng.integers(1, 6)))]
    answers = [rng.integers(1, 150, int(rng.integers(1, 9))).tolist() for _ in prompts]
    items = [Item("", prompt, tuple(lengths)) for prompt, lengths in zip(prompts, answers, strict=True)]
    pieces = pieces_of(items, 1 << 20, share_prompts=True)
    segments = [n for n, piece in enumerate(pieces, 1) for _ in range(piece.tokens)]
    lengths = [[prompts[piece.item], *answers[piece.item]] for piece in pieces]
    branches = [branch for runs in lengths for branch, length in enumerate(runs) for _ in range(length)]
    size = (8, 16, 32, CHUNK)[seed % 4]
    chunks = chunks_for(len(segments), runs_of(pieces, True), size)
    runs = packed_runs(np.array([segments]), np.array([branches]), chunks, size=size)
    assert sorted(runs.columns_BNC[runs.columns_BNC >= 0].tolist()) == list(range(len(segments)))
    assert chunks <= len(segments) // size + max(len(segments) // 32, 2 * sum(map(len, lengths)))


@pytest.mark.parametrize(("tokens_per_row", "size"), [(48, 8), (128, 8), (256, 16), (1023, 32), (1024, 64), (4096, 64)])
def test_one_size_of_chunks_for_all_rows_of_a_run(tokens_per_row, size):
    """Also for rows that are fitted to fewer tokens, and for the largest batch."""
    config = make_config(tokens_per_row=tokens_per_row)
    config.rollout.max_new_tokens, config.rollout.max_sequence_tokens = 8, 48
    batches = [largest_batch(config, QWEN3_5, 1)]
    for prompts in (1, 4, 16):
        groups = make_groups([[5, (1, 4, 4)]] * prompts, [[8, 3]] * prompts)
        batches += compose(*groups, config, vision=QWEN3_5.vision, text=QWEN3_5.text).batches
    assert {batch.inputs.runs.columns_BNC.shape[2] for batch in batches} == {size}
