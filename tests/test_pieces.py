"""What is decided for all groups of a step at once is what was decided for one after the other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.batch.composition import Item, Piece, tokens_of
from fluxjax.batch.pieces import pieces_of, sized_pieces
from fluxjax.batch.rows import Budget, _chain, _cost, _Deal, _first_fit, _spread, grid, packed

items_strategy = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 40), min_size=1, max_size=9), st.sampled_from([0, 0, 4, 8])),
    min_size=1,
    max_size=12,
).map(lambda drawn: [Item(str(i), prompt, tuple(own), media) for i, (prompt, own, media) in enumerate(drawn)])


def cut(item, index, longest):
    """First fit, longest first, of one group."""
    room, parts, free = longest - item.prompt, [], []
    if sum(item.responses) <= room:
        return [Piece(index, tuple(range(len(item.responses))))]
    for k in sorted(range(len(item.responses)), key=lambda k: -item.responses[k]):
        part = next((p for p, left in enumerate(free) if left >= item.responses[k]), len(parts))
        if part == len(parts):
            parts.append([])
            free.append(room)
        parts[part].append(k)
        free[part] -= item.responses[k]
    return [Piece(index, tuple(sorted(part))) for part in parts]


@given(items_strategy, st.integers(1, 120), st.integers(0, 60), st.booleans())
def test_groups_are_cut_as_one_after_the_other_would_be(items, longest, responses, share):
    want = []
    for index, item in enumerate(items):
        most = min(longest, item.prompt + responses) if responses else longest
        alone = [Piece(index, (k,)) for k in range(len(item.responses))]
        want += cut(item, index, max(most, item.prompt + max(item.responses))) if share else alone
    found = sized_pieces(items, longest, share, responses)
    assert found.pieces == want == pieces_of(items, longest, share, responses)
    assert found.tokens.tolist() == [tokens_of(items, piece) for piece in want]
    assert [found.pieces[i] for i in found.order.tolist()] == sorted(want)


def test_no_group_has_no_piece():
    assert pieces_of([], 8, True) == []


@given(items_strategy, st.sampled_from([52, 64, 200]), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.booleans())
def test_a_packing_is_left_out_only_where_it_can_not_win(items, tokens, rows, shards, share):
    budget = Budget(tokens, grid(rows), (4, 8, 16), shards)
    sized = sized_pieces(items, tokens, share)
    by_size = [sized.pieces[i] for i in np.argsort(-sized.tokens, kind="stable").tolist()]
    longest_first = _spread(items, _first_fit(items, by_size, budget), budget)
    in_turn = _spread(items, _chain(items, budget) if share else _first_fit(items, sized.pieces, budget), budget)
    both = [longest_first, in_turn] if share else [in_turn, longest_first]
    assert packed(items, sized, budget, share) == min(both, key=lambda plan: _cost(plan, budget))


@given(items_strategy, st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_rows_without_media_are_dealt_as_with_them(items, most, shards):
    items = [item._replace(patches=0) for item in items]
    budget = Budget(64, (most,), (0,), shards)
    waiting = [(piece,) for piece in sorted(pieces_of(items, 64, True))]
    for micro in _spread(items, waiting, budget, most, 64):
        deal = _Deal(shards, most, 0)
        waiting = [row for row in waiting if not deal.take(row, {row[0].item: 0})]
        assert micro.shards == tuple(map(tuple, deal.shards))
    assert not waiting
