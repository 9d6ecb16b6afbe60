"""Packing by sizes alone: rows and shards hold every response once, within all budgets, as evenly as they can."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import make_config
from turns import third_of

from fluxjax.batch.fitted import _placed
from fluxjax.batch.rows import Budget, _chain, _cost, _dealt, _first_fit, _spread, grid, packed
from fluxjax.batch.share import Item, Outline, Piece, check, pieces_of


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
    pieces = [tuple(Piece(item, (k,), 1, 1.0, patches[item]) for item in pair) for k, pair in enumerate(rows)]
    held, want, left = [set() for _ in range(shards)], [[] for _ in range(shards)], []
    for pair, row in zip(rows, pieces, strict=True):
        added = [sum(patches[item] for item in set(pair) - have) for have in held]
        before = [sum(patches[item] for item in have) for have in held]
        keys = [(added[k], before[k], len(want[k]), k) for k in range(shards)]
        fitting = [key for key in keys if len(want[key[3]]) < most and before[key[3]] + added[key[3]] <= cap]
        if not fitting:
            left.append(row)
            continue
        shard = min(fitting)[3]
        want[shard].append(row)
        held[shard] |= set(pair)
    fullest = max(sum(patches[item] for item in have) for have in held)
    assert _dealt(pieces, shards, most, cap) == (tuple(map(tuple, want)), fullest, left)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_a_piece_goes_to_the_row_that_a_look_at_all_of_them_would_choose(sizes, room):
    """Longest first: where it leaves the least room, the first of several."""
    sizes, left = np.array(sizes), np.array(room)
    order = np.argsort(-sizes, kind="stable")
    where = _placed(sizes, order, left)
    for i in order.tolist():
        fitting = [(free, row) for row, free in enumerate(left.tolist()) if free >= sizes[i]]
        if not fitting:
            assert where is None
            return
        row = min(fitting)[1]
        assert where is None or where[i] == row
        left[row] -= sizes[i]
    assert where is not None


def test_shards_are_filled_evenly():
    plan = pack([Item(str(i), 40, (20,)) for i in range(20)], Budget(64, grid(16), (0,), 4))
    assert [[len(shard) for shard in micro.shards] for micro in plan] == [[5, 5, 5, 5]]


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
        want, _, waiting = _dealt(waiting, shards, most, 0)
        assert micro.shards == want
    assert not waiting
