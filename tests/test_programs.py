"""How many programs a run compiles: what the outlines of its microbatches say is what JAX traces."""

import dataclasses
import json
import threading
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from learner_cases import alone, assert_equal, outcome, random_groups, tiny
from learner_cases import learner as learner_on
from packing_cases import MODEL, compose, make_config, make_groups
from run_cases import flags, letters
from turns import by_turns

from fluxjax.algorithms import grpo
from fluxjax.batch import composer as composer_module
from fluxjax.batch import rows
from fluxjax.batch.composer import Composer, shape_book
from fluxjax.batch.fitted import fit_rows, lengths_between
from fluxjax.batch.share import Item, pieces_of
from fluxjax.config import FSDP, ODC, STRATEGIES, FlexUlysses
from fluxjax.config.cli import load
from fluxjax.learner.learner import Learner
from fluxjax.run.callbacks import Callback
from fluxjax.run.trainer import FluxTrainer
from sharding.mesh import make_mesh
from sharding.spread.shapes import ShapeBook

HEADS = (4, 2)
STEPS, MOST = 60, 4


def shape_of(batch):
    """Everything of a batch that a program is compiled for."""
    vision, spread = batch.inputs.vision, batch.inputs.spread
    sends = vision.route and (vision.route.axes, *(send.shape for send in vision.route.sends))
    around = spread and (spread.rounds, spread.axes, spread.exports_BX.shape)
    return batch.inputs.tokens_BT.shape, vision.num_patches, vision.frame_bound, sends, around


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch):
    monkeypatch.setattr(composer_module, "MAX_SHAPES", MOST)


def config_of(strategy, **packing):
    config = make_config(**(packing or {"tokens_per_row": 128, "rows": 2, "patches": 256}))
    config.sharding.strategy = strategy
    return config


def composer_of(strategy, devices=2, vision=None, **packing):
    return Composer(config_of(strategy, **packing), devices, vision, tiny(HEADS).config.text)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [kind() for kind in STRATEGIES.values()])
def test_outlines_name_the_shapes_of_their_batches(strategy):
    """Equal programs have equal shapes and others have others, and there are never more than allowed."""
    composer, again = (composer_of(strategy, vision=MODEL.vision) for _ in range(2))
    shapes = {}
    for seed in range(40):
        groups, prepared = random_groups(seed)
        outlines = composer.outline(groups, prepared).micros
        composition = again.compose(groups, prepared)
        for outline, batch in zip(outlines, composition.batches, strict=True):
            shapes.setdefault(outline.program, set()).add(shape_of(batch))
            (tokens, token_cells, patches, patch_cells), vision = outline.filled, batch.inputs.vision
            assert token_cells == batch.inputs.tokens_BT.size and patch_cells == vision.num_patches
            assert tokens == np.count_nonzero(batch.inputs.segments_BT)
            assert patches == np.count_nonzero(vision.frame_segments_P)
    assert all(len(found) == 1 for found in shapes.values())
    assert len(set.union(*shapes.values())) == len(shapes) <= MOST
    assert len(composer.shapes) <= MOST and composer.shapes == again.shapes


@pytest.mark.long
@pytest.mark.parametrize("strategy", by_turns([FSDP(), FlexUlysses(), ODC()]))
def test_as_many_programs_are_traced_as_outlines_name(strategy):
    config, traced = config_of(strategy), []

    def token_loss(logprobs_BT, entropies_BT, batch, algorithm):
        traced.append(shape_of(batch))
        return grpo.token_loss(logprobs_BT, entropies_BT, batch, algorithm)

    learner = Learner(config, tiny(HEADS), token_loss, mesh=make_mesh(2))
    composer, counted = (Composer(config, 2, MODEL.vision, learner.text) for _ in range(2))
    programs, late = set(), 0
    for seed in range(STEPS):
        groups, prepared = random_groups(seed)
        before = len(traced)
        learner.step(composer.compose(groups, prepared).microbatches)
        late += len(traced) - before if seed >= STEPS // 2 else 0
        programs |= {outline.program for outline in counted.outline(groups, prepared).micros}
    assert len(traced) == len(programs) <= MOST
    assert late == 0


# --- rows whose length fits them ----------------------------------------------------------------


def drawn(seed, count, longest):
    rng = np.random.default_rng(seed)
    return [Item(str(i), int(n), (1 + int(n) // 9,)) for i, n in enumerate(rng.integers(1, longest, count))]


@pytest.mark.parametrize("seed", range(20))
def test_fitted_rows_hold_every_piece_once(seed):
    items = drawn(seed, 3 + 5 * seed, 3000)
    pieces, lengths = pieces_of(items, 4096, True), lengths_between(64, 4096)
    tokens = np.array([piece.tokens for piece in pieces])
    fit = fit_rows(tokens, 8, lengths)
    assert fit is not None
    plan = fit.filled(pieces)
    assert {length for length, _ in plan} <= set(lengths) and fit.columns() == sum(length for length, _ in plan)
    assert sorted(piece.item for _, members in plan for row in members for piece in row) == list(range(len(items)))
    for length, members in plan:
        assert len(members) <= 8
        assert all(sum(piece.tokens for piece in row) <= length for row in members)
    again = fit_rows(tokens, 8, sorted({length for length, _ in plan}))
    assert again is not None and again.columns() <= fit.columns()


def test_fitted_rows_need_a_row_that_holds_the_longest_piece():
    tokens = np.array([piece.tokens for piece in pieces_of(drawn(0, 5, 3000), 4096, True)])
    assert fit_rows(tokens, 8, [64, 128]) is None
    assert fit_rows(tokens, 8, []) is None


def test_rows_of_sequences_that_are_just_longer_than_half_a_row_are_not_half_empty(monkeypatch):
    config = make_config(tokens_per_row=2048, rows=2, patches=8192)
    monkeypatch.setattr(composer_module, "MAX_SHAPES", 6)
    composer, programs = Composer(config, 4, None), set()
    for step in range(40):
        sizes = np.random.default_rng(step).integers(1030, 1200, 24).tolist()
        groups, prepared = make_groups([[size - 10] for size in sizes], [[10]] * len(sizes), step)
        outlines = composer.outline(groups, prepared).micros
        tokens, cells, _, _ = (sum(of_all) for of_all in zip(*(o.filled for o in outlines), strict=True))
        assert tokens == sum(sizes) and 1 - tokens / cells < 0.12
        programs |= {outline.program for outline in outlines}
    assert len(programs) <= 6


def test_rows_whose_media_exceed_a_device_are_not_fitted(monkeypatch):
    monkeypatch.setattr(rows, "LONG", 1)
    groups, prepared = make_groups([[3, (1, 8, 8)]] * 6, [[2]] * 6)
    config = make_config(tokens_per_row=96, rows=1, patches=64)  # of four prompts in a row
    composition = compose(groups, prepared, config, 2, vision=MODEL.vision)
    assert all(np.count_nonzero(b.inputs.vision.frame_segments_P) <= 2 * 64 for b in composition.batches)
    assert len(composition.batches) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "share", by_turns([pytest.param(True, id="shared"), pytest.param(False, id="plain", marks=pytest.mark.long)])
)
def test_fitted_rows_equal_one_ordinary_batch(share, monkeypatch):
    groups, prepared = random_groups(7)
    want = alone(HEADS, groups, prepared)
    monkeypatch.setattr(rows, "LONG", 1)
    config = make_config(tokens_per_row=96, rows=1, patches=256, share=share)
    composition = compose(groups, prepared, config, 2, vision=MODEL.vision)
    lengths = {batch.inputs.tokens_BT.shape for batch in composition.batches}
    assert lengths != {(2, 96)}
    assert_equal(outcome(learner_on(HEADS, 2), composition), want)


def test_a_run_of_short_rows_keeps_its_length():
    groups, prepared = make_groups([[30]] * 5, [[10]] * 5)
    for batch in compose(groups, prepared, make_config(tokens_per_row=64, rows=4), 2).batches:
        assert batch.inputs.tokens_BT.shape[1] == 64


def test_places_are_divided_under_odc(monkeypatch):
    monkeypatch.setattr(composer_module, "MAX_SHAPES", 16)
    book = shape_book(config_of(ODC()))
    assert (book.places(1), book.places(8)) == (14, 2)
    assert dataclasses.replace(book, alone=0).places(8) == 16


@pytest.mark.medium
def test_rows_that_fit_have_patches_for_the_tower(monkeypatch):
    """The tower is in the program of every microbatch, also where no group has an image."""
    monkeypatch.setattr(rows, "LONG", 64)
    groups, prepared = make_groups([[10], [9], [11]], [[60], [61], [62]])
    composer = composer_of(FSDP(), 1, MODEL.vision, tokens_per_row=128, rows=4, patches=256)
    batches = composer.compose(groups, prepared).batches
    assert min(batch.inputs.tokens_BT.shape[1] for batch in batches) < 128, "rows of another length"
    assert min(batch.inputs.vision.num_patches for batch in batches) >= MODEL.vision.merge_unit


def test_an_image_that_many_responses_show_needs_one_shape():
    """Each response has a prompt of its own, on several devices, so that the image is wanted on all of them."""
    groups, prepared = make_groups([[4, (1, 4, 8)]], [[9, 10, 11, 12, 13, 14]])
    composer = composer_of(FlexUlysses(), 4, MODEL.vision, tokens_per_row=24, rows=2, patches=32, share=False)
    programs = {outline.program for _ in range(4) for outline in composer.outline(groups, prepared).micros}
    assert len(composer.shapes) == len(programs)
    assert len(programs) <= len(composer.outline(groups, prepared).micros)


@pytest.mark.parametrize("steps", [20, 400])
def test_a_run_that_is_settled_rather_computes_one_more_microbatch_than_another_program(steps):
    """A step larger than all before gets a program early in a run; later it is divided over those that there are."""
    composer = composer_of(FlexUlysses(), tokens_per_row=512, rows=1)
    small, large = (make_groups([[20]] * count, [[20, 20]] * count) for count in (8, 16))
    for _ in range(steps):
        (outline,) = composer.outline(*small).micros
    found = [other.program for other in composer.outline(*large).micros]
    assert len(found) == (1 if steps < 300 else 2)
    assert (set(found) == {outline.program}) == (steps >= 300)
    again = [other.program for other in composer.outline(*large).micros]
    assert len(again) == 1 and again != [outline.program], "where steps have grown, the program is worth it"


def test_a_step_that_a_program_holds_is_not_divided():
    """However much of it stays empty: that is for `ShapeBook.patience` to say."""
    composer = composer_of(FlexUlysses(), tokens_per_row=512, rows=1)
    small, large, middle = (make_groups([[20]] * count, [[20, 20]] * count) for count in (2, 16, 4))
    for _ in range(400):
        composer.outline(*small)
        composer.outline(*large)
    assert len(composer.outline(*middle).micros) == 1


# --- programs compiled ahead --------------------------------------------------------------------

AHEAD = 3


def test_a_new_entry_is_used_some_steps_later_and_a_larger_one_until_then():
    def area(sizes):
        return float(sizes["columns"])

    book = ShapeBook(8, ahead=AHEAD)
    large, coming = book.choose({"columns": 1000}, {}, area)
    assert coming is None, "nothing is larger: it has to be compiled at once"
    small: list[Any] = []
    for _ in range(AHEAD + 2):
        book.next_step()
        small.append(book.choose({"columns": 100}, {}, area))
        again = ShapeBook(8, ahead=AHEAD)
        again.load_state(json.loads(json.dumps(book.state())))
        assert again == book
    new = small[-1][0]
    assert new["columns"] < 200
    assert small == [*[(large, new)] * AHEAD, (new, None), (new, None)]
    book.choose({"columns": 2000}, {}, area)
    found, coming = book.choose({"columns": 400}, {}, area)
    assert found == large and coming is not None and coming["columns"] < 500
    found, coming = book.choose({"columns": 3000}, {}, area)
    assert found["columns"] >= 3000 and coming is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", by_turns([pytest.param(FSDP(), marks=pytest.mark.long), FlexUlysses()]))
def test_what_was_compiled_ahead_computes_the_same(strategy, monkeypatch):
    """In the first step that uses it nothing is traced any more, and gradients are those of one device."""
    config = config_of(strategy)
    config.sharding.compile_ahead = AHEAD
    learner = Learner(config, tiny(HEADS), grpo.token_loss, mesh=make_mesh(2))
    composer = Composer(config, 2, MODEL.vision, learner.text)
    many, few = random_groups(31), make_groups([[5]], [[2]])
    first = composer.compose(*many)
    learner.gradients.compile_ahead(learner.params, first.coming, scores=True)
    outcome(learner, first)
    shapes = []
    for step in range(AHEAD + 1):
        composition = composer.compose(*few)
        assert bool(composition.coming) is (step < AHEAD)
        learner.gradients.compile_ahead(learner.params, composition.coming, scores=True)
        shapes.append(shape_of(composition.batches[0]))
        if step == AHEAD:
            assert [future.result() for future in learner.gradients._ahead.values()]
            for name in ("_accumulate", "_logprobs"):
                monkeypatch.setattr(learner.gradients, name, pytest.fail)
        assert_equal(outcome(learner, composition), alone(HEADS, *few))
    assert len(set(shapes[:AHEAD])) == 1 and shapes[AHEAD] not in shapes[:AHEAD]


@pytest.fixture
def alone_here():
    """A learner on one device and its composer."""
    learner = Learner(make_config(), tiny(HEADS), grpo.token_loss, mesh=make_mesh(1))
    return learner, Composer(make_config(), 1, MODEL.vision, learner.text)


@pytest.mark.medium
def test_a_program_that_does_not_compile_fails_the_step_that_needs_it(alone_here, monkeypatch):
    learner, composer = alone_here
    composition = composer.compose(*random_groups(1))

    def no_memory(*_):
        raise MemoryError("no room for the program")

    monkeypatch.setattr(learner.gradients, "lowered", no_memory)
    learner.gradients.compile_ahead(learner.params, composition.batches, scores=False)
    with pytest.raises(MemoryError, match="no room for the program"):
        learner.step(composition.microbatches)


def test_what_is_not_waited_for_is_not_compiled(alone_here, monkeypatch):
    """At the end of a run or a phase, minutes of compilation would be for nothing."""
    learner, composer = alone_here
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*_):
        begun.set()
        assert go_on.wait(60)
        raise RuntimeError("of no interest")

    monkeypatch.setattr(learner.gradients, "lowered", slowly)
    before = learner.gradients
    for seed in (1, 2):
        before.compile_ahead(learner.params, composer.compose(*random_groups(seed)).batches, scores=True)
    assert begun.wait(60)
    learner.reset(grpo.token_loss, temperature=0.5)
    go_on.set()
    assert learner.gradients is not before
    assert [future.cancelled() for future in before._ahead.values()].count(False) == 1


@pytest.mark.slow
def test_programs_of_the_warm_start_serve_none_of_rl(tmp_path):
    """They are of another loss: what RL asks for first is compiled at once, not beside a larger new one."""
    own = letters(tmp_path) | {"steps": 2, "warm_start__steps": 3, "sharding__compile_ahead": 2}
    config = load([f"--config={ROOT / 'configs' / 'text.py'}:debug", *flags(run_dir=tmp_path / "run", **own)])
    served = []

    class Watch(Callback):
        def on_step(self, trainer, step, groups, metrics):
            served.append(run.parts.composer.shapes.served[1])

    with FluxTrainer(config) as run:
        assert run.fit(callbacks=[Watch()]).summary.complete
    assert served == [0, 1]
