"""Packing and composing: nothing lost, nothing doubled, nothing over budget, whatever the sizes."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import MODEL, compose, make_config, make_groups
from turns import third_of

from fluxjax.batch.composer import sft_groups
from fluxjax.batch.composition import unpack
from fluxjax.batch.fitted import _placed
from fluxjax.batch.rows import Budget, _chain, _cost, _Deal, _first_fit, _spread, _with_room, grid, packed
from fluxjax.batch.share import Item, Outline, Piece, check, pieces_of
from fluxjax.config import ConfigError, LossAggregation
from fluxjax.learner.loss_inputs import with_logprobs

UNIQUE = 1 << 30  # a vocabulary so large that no token of a response is drawn twice
VERSION = 11  # of the trainer; tokens are of earlier ones

# --- packing: sizes only ------------------------------------------------------------------------


def test_grid_by_hand():
    assert grid(16) == (4, 8, 16)
    assert grid(1) == (1,)
    assert grid(4096, 4) == (1024, 2048, 4096)
    assert grid(22, 4) == (8, 12, 20)  # multiples of a merged feature's patches, the cap rounded down


def test_short_rows_come_in_more_numbers():
    """A batch of 5 of 8 rows pays for 6; long rows have lengths that fit instead."""
    assert Budget.of(make_config(rows=16), 1, None).rows == (4, 8, 12, 16)
    assert Budget.of(make_config(rows=1), 1, None).rows == (1,)
    assert Budget.of(make_config(tokens_per_row=1024, rows=16), 1, None).rows == (4, 8, 16)


def pack(items: list[Item], budget: Budget, *, share_prompts: bool = True) -> list[Outline]:
    check(items, budget.tokens_per_row, budget.patches[-1])
    return packed(items, pieces_of(items, budget.tokens_per_row, share_prompts), budget, share_prompts)


def shapes_of(budget: Budget) -> set[tuple[int, int, int]]:
    """All (rows, tokens a row, patches) that a microbatch may have: the bound on compiled shapes."""
    shards = budget.num_shards
    return {
        (rows * shards, budget.tokens_per_row, patches * shards) for rows in budget.rows for patches in budget.patches
    }


def sizes_of(micro):
    return micro.sizes["rows"], micro.sizes["patches"]


def places(plan):
    return [(p.item, k) for micro in plan for p in micro.pieces for k in p.responses]


def rows_of(plan):
    return [row for micro in plan for shard in micro.shards for row in shard]


# Strategies draw plain numbers only: run-time type checks draw random numbers, which hypothesis forbids inside them.
sizes_strategy = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


@pytest.mark.medium
@settings(deadline=None, max_examples=third_of(150))
@given(
    sizes=sizes_strategy,
    tokens=st.integers(40, 90),
    rows=st.integers(1, 6),
    patches=st.integers(5, 12),
    shards=st.sampled_from([1, 2, 3, 8]),
    share=st.booleans(),
)
def test_packing_places_every_response_once_within_all_budgets(sizes, tokens, rows, patches, shards, share):
    items = [Item("x", prompt, tuple(responses), 4 * features) for prompt, responses, features in sizes]
    budget = Budget(tokens, grid(rows), grid(4 * patches, 4), shards)
    plan = pack(items, budget, share_prompts=share)
    assert sorted(places(plan)) == [(i, k) for i, item in enumerate(items) for k in range(len(item.responses))]
    for micro in plan:
        most_rows, most_patches = sizes_of(micro)
        assert most_rows in budget.rows
        assert most_patches in budget.patches
        assert len(micro.shards) == shards
        for shard in micro.shards:
            assert len(shard) <= most_rows
            assert sum(items[i].patches for i in {piece.item for row in shard for piece in row}) <= most_patches
            for row in shard:
                used = sum(items[p.item].prompt + sum(items[p.item].responses[k] for k in p.responses) for p in row)
                assert 0 < used <= tokens
                assert share or all(len(piece.responses) == 1 for piece in row)
    assert pack(items, budget, share_prompts=share) == plan


def test_groups_run_over_into_the_next_row_where_that_saves_rows():
    # A whole group takes 136 of 256 cells, so whole groups would need 32 rows; 17 would hold the bare tokens.
    items = [Item(str(i), 40, (12,) * 8) for i in range(32)]
    plan = pack(items, Budget(256, (1,), (0,)))
    assert len(rows_of(plan)) <= 21


def test_many_small_groups_are_never_split():
    items = [Item(str(i), 20, (3, 4, 5)) for i in range(20)]  # 8 a row
    plan = pack(items, Budget(256, grid(4), (0,)))
    assert len(rows_of(plan)) == 3
    assert sum(len(row) for row in rows_of(plan)) == 20


@pytest.mark.parametrize(("shards", "rows"), [(1, [4]), (2, [2, 2])])
def test_a_group_larger_than_a_row_is_split_and_its_media_counted_once_a_shard(shards, rows):
    # Eight responses, two a row behind the prompt: four rows.
    plan = pack([Item("big", 10, (20,) * 8, patches=16)], Budget(50, grid(8), (8, 16), shards))
    assert sorted(places(plan)) == [(0, k) for k in range(8)]
    [micro] = plan
    assert [len(shard) for shard in micro.shards] == rows
    assert sizes_of(micro)[1] == 16


def test_rows_and_patches_shrink_with_the_batch():
    budget = Budget(64, grid(16), grid(64, 4))
    few = [Item(str(i), 30, (20,), patches=4) for i in range(3)]
    many = [Item(str(i), 30, (20,), patches=4) for i in range(19)]
    assert [sizes_of(micro) for micro in pack(few, budget)] == [(4, 16)]
    assert [sizes_of(micro) for micro in pack(many, budget)] == [(16, 64), (4, 16)]


def test_media_that_fill_the_patch_budget_go_to_the_next_microbatch():
    items = [Item(str(i), 10, (5,), patches=40) for i in range(5)]
    plan = pack(items, Budget(64, grid(16), grid(64, 4), 2))
    assert len(plan) == 3  # one medium a shard, two shards


def test_media_count_once_for_all_responses_of_a_group_in_a_row():
    plan = pack([Item("x", 10, (5, 5, 5), patches=40)], Budget(64, (1,), (64,)), share_prompts=False)
    assert [(len(rows_of([micro])[0]), sizes_of(micro)[1]) for micro in plan] == [(3, 64)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30), st.integers(1, 6), st.integers(1, 4))
def test_a_row_goes_to_the_shard_that_a_look_at_all_of_them_would_choose(rows, shards, most):
    """It adds the fewest patches, then has the fewest, then the fewest rows; `rows` are pairs of items."""
    patches, cap = {0: 0, 1: 4, 2: 8, 3: 12}, 20
    deal, held, counts = _Deal(shards, most, cap), [set() for _ in range(shards)], [0] * shards
    for pair in rows:
        added = [sum(patches[item] for item in set(pair) - have) for have in held]
        before = [sum(patches[item] for item in have) for have in held]
        keys = [(added[k], before[k], counts[k], k) for k in range(shards)]
        fitting = [key for key in keys if counts[key[3]] < most and before[key[3]] + added[key[3]] <= cap]
        row = tuple(Piece(item, (0,)) for item in pair)
        assert deal.take(row, {item: patches[item] for item in pair}) == bool(fitting)
        if fitting:
            shard = min(fitting)[3]
            assert deal.shards[shard][-1] is row
            held[shard] |= set(pair)
            counts[shard] += 1
        assert [len(shard) for shard in deal.shards] == counts


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_a_piece_goes_to_the_row_that_a_look_at_all_of_them_would_choose(sizes, room):
    """Longest first: where it leaves the least room, the first of several; and the first of all with room for it."""
    sizes, left = np.array(sizes), np.array(room)
    order = np.argsort(-sizes, kind="stable")
    where = _placed(sizes, order, left)
    for i in order.tolist():
        assert list(_with_room(left, int(sizes[i]))) == np.flatnonzero(left >= sizes[i]).tolist()
        fitting = [(free, row) for row, free in enumerate(left.tolist()) if free >= sizes[i]]
        if not fitting:
            assert where is None
            return
        row = min(fitting)[1]
        assert where is None or where[i] == row
        left[row] -= sizes[i]
    assert where is not None
    assert list(_with_room(left[:0], 1)) == []


def test_shards_are_filled_evenly():
    plan = pack([Item(str(i), 40, (20,)) for i in range(20)], Budget(64, grid(16), (0,), 4))
    assert [[len(shard) for shard in micro.shards] for micro in plan] == [[5, 5, 5, 5]]


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
    with pytest.raises(ValueError, match="arrays of shapes"):
        unpack(composition, [np.zeros((1, 1))])


items_strategy = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 40), min_size=1, max_size=9), st.sampled_from([0, 0, 4, 8])),
    min_size=1,
    max_size=12,
).map(lambda drawn: [Item(str(i), prompt, tuple(own), media) for i, (prompt, own, media) in enumerate(drawn)])


def piece_of(index, item, responses):
    """The piece of these responses, its sizes by their definitions."""
    lengths = [item.responses[k] for k in responses]
    squares = item.prompt**2 + sum((item.prompt + n) ** 2 - item.prompt**2 for n in lengths)
    return Piece(index, tuple(responses), item.prompt + sum(lengths), float(squares), item.patches)


def cut(item, index, longest):
    """First fit, longest first, of one group."""
    room, parts, free = longest - item.prompt, [], []
    if sum(item.responses) <= room:
        return [piece_of(index, item, range(len(item.responses)))]
    for k in sorted(range(len(item.responses)), key=lambda k: -item.responses[k]):
        part = next((p for p, left in enumerate(free) if left >= item.responses[k]), len(parts))
        if part == len(parts):
            parts.append([])
            free.append(room)
        parts[part].append(k)
        free[part] -= item.responses[k]
    return [piece_of(index, item, sorted(part)) for part in parts]


@given(items_strategy, st.integers(1, 120), st.integers(0, 60), st.booleans())
def test_groups_are_cut_as_one_after_the_other_would_be(items, longest, responses, share):
    want = []
    for index, item in enumerate(items):
        most = min(longest, item.prompt + responses) if responses else longest
        alone = [piece_of(index, item, [k]) for k in range(len(item.responses))]
        want += cut(item, index, max(most, item.prompt + max(item.responses))) if share else alone
    assert pieces_of(items, longest, share, responses) == want and pieces_of([], longest, share) == []


@given(items_strategy, st.sampled_from([52, 64, 200]), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.booleans())
def test_a_packing_is_left_out_only_where_it_can_not_win(items, tokens, rows, shards, share):
    budget = Budget(tokens, grid(rows), (4, 8, 16), shards)
    pieces = pieces_of(items, tokens, share)
    longest_first = _spread(_first_fit(sorted(pieces, key=lambda piece: -piece.tokens), budget), budget)
    in_turn = _spread(_chain(items, budget) if share else _first_fit(pieces, budget), budget)
    both = [longest_first, in_turn] if share else [in_turn, longest_first]
    assert packed(items, pieces, budget, share) == min(both, key=_cost)


@given(items_strategy, st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_rows_without_media_are_dealt_as_with_them(items, most, shards):
    items = [item._replace(patches=0) for item in items]
    budget = Budget(64, (most,), (0,), shards)
    waiting = [(piece,) for piece in sorted(pieces_of(items, 64, True))]
    for micro in _spread(waiting, budget, most, 64):
        deal = _Deal(shards, most, 0)
        waiting = [row for row in waiting if not deal.take(row, {row[0].item: 0})]
        assert micro.shards == tuple(map(tuple, deal.shards))
    assert not waiting
