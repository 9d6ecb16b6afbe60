"""What a run with preprocessors reads ahead of its steps: real files and preprocessors, prompts as they are drawn."""

import asyncio
import contextlib
import json
import time

import numpy as np
import pytest
from flight_cases import PlainStore
from process_cases import until
from run_cases import picture, write_jsonl

from fluxjax.batch.composer import Team
from fluxjax.config import Config
from fluxjax.data.flight_server import FlightServer
from fluxjax.data.loader import PromptLoader, open_source
from fluxjax.data.near_pixels import NearPixels
from fluxjax.data.prepare import Preparer
from fluxjax.data.shadows import MediaIndex, ProxyMedia, rows_of
from fluxjax.data.sources import all_texts
from fluxjax.hosts.coming import ComingPrompts, ToldPrompts, tickets_of
from fluxjax.hosts.orders import Coming, decode, encode
from fluxjax.runtime.flight_store import FlightStore
from models.config import PatchLayout
from models.processing import tiny

STEP = 4


class CountingStore(PlainStore):
    """A preprocessor's store that says what pixels it was asked for."""

    def __init__(self, settings):
        super().__init__(settings)
        self.given = []

    def fetch_bytes(self, rows):
        self.given += rows
        return super().fetch_bytes(rows)


class Run:
    """The prompts of a run, whose pixels come from two preprocessors; `among` as many processes generate."""

    def __init__(self, opened, folder, near_bytes=1 << 30, steps=1, among=1):
        source = {"pictures": open_source(folder / "train.jsonl", "pictures")}
        self.processor = tiny.build(all_texts(source.values()), layout=PatchLayout(patch_size=8, window_size=32))
        self.preprocessors, addresses = [], []

        def make(settings):
            self.preprocessors.append(CountingStore(settings))
            return self.preprocessors[-1]

        for _ in range(2):
            server = FlightServer(make, "127.0.0.1", 0)
            opened.callback(server.close, 0.1)
            addresses.append(server.address)
        self.store = opened.enter_context(contextlib.closing(FlightStore(addresses, self.processor.settings)))
        index = MediaIndex()
        self.near = opened.enter_context(contextlib.closing(NearPixels(self.store, near_bytes)))
        config = Config()
        config.rollout.prompts_per_step = STEP
        loader = PromptLoader(source, {"pictures": 1.0}, 0)
        self.prompts = Preparer(
            self.processor, loader, config, proxy=ProxyMedia(self.store, index, self.near, among=among)
        )
        self.prompts._ahead = steps * STEP
        opened.callback(self.prompts.close)

    def draw(self, count=STEP):
        return asyncio.run(self.prompts.draw(count))[0]

    @property
    def given(self):
        return {rows.ticket for store in self.preprocessors for rows in store.given}


@pytest.fixture
def folder(tmp_path):
    """Pictures, no two of which are alike."""
    records = []
    for number in range(24):
        picture(tmp_path / f"{number}.png", (10 * number, 255 - 10 * number, 40), (16 + 8 * (number % 3), 24))
        records.append({"id": str(number), "prompt": "<image>What?", "answer": "a", "images": [f"{number}.png"]})
    write_jsonl(tmp_path / "train.jsonl", records)
    return tmp_path


@pytest.fixture
def run(folder):
    with contextlib.ExitStack() as opened:
        yield lambda **settings: Run(opened, folder, **settings)


def tickets(prepared):
    return {word for each in prepared for word in tickets_of(each.inputs)}


@pytest.mark.parametrize("steps", [1, 2])
def test_pixels_of_the_next_steps_come_while_this_one_goes_on(run, steps):
    """Nobody asks for anything: the step that was drawn goes on for ever."""
    here = run(steps=steps)
    drawn = here.draw()
    until(lambda: len(here.given) == (1 + steps) * STEP)
    time.sleep(0.1)
    assert len(here.given) == (1 + steps) * STEP, "and none beyond"
    until(lambda: here.prompts._reading.there(steps * STEP))
    coming = [each for _ in range(steps) for each in here.draw()]
    assert tickets([*drawn, *coming]) <= here.given
    direct = PlainStore(here.processor.settings)
    for each in [*drawn, *coming]:
        rows = rows_of(each.inputs)
        np.testing.assert_array_equal(here.near.fetch(rows)[0], direct.fetch(rows)[0])
    until(lambda: len(here.given) == (1 + 2 * steps) * STEP)
    assert sum(len(store.given) for store in here.preprocessors) == len(here.given), "each was asked for once"


def test_each_of_several_processes_expects_its_share(run):
    here = run(among=2)
    drawn = here.draw()
    until(lambda: len(here.given) == STEP)
    assert tickets(drawn[::2]) <= here.given and not tickets(drawn[1::2]) & here.given


@pytest.mark.medium
def test_prompts_that_nobody_asks_for_free_their_places(run):
    size = max(sum(map(len, rows_of(each.inputs))) for each in run().draw(24))
    here = run(near_bytes=2 * STEP * size * 3 * 8 * 8 * 2)
    for drawn in range(STEP, 24 + STEP, STEP):
        here.draw()
        assert here.near.used <= 2 * STEP * size * 3 * 8 * 8 * 2
        until(lambda: len(here.given) >= drawn)  # noqa: B023  although the room is for a step


def test_what_is_read_ahead_changes_no_order_and_no_resumption(run):
    straight = [each.prompt for each in run().draw(4 * STEP)]
    interrupted = run(steps=3)
    assert [each.prompt for each in interrupted.draw()] == straight[:STEP]
    until(lambda: len(interrupted.given) == 4 * STEP)
    state = json.loads(json.dumps(interrupted.prompts.state_dict()))
    resumed = run(steps=2, near_bytes=1 << 12)
    resumed.prompts.load_state_dict(state)
    assert [each.prompt for _ in range(3) for each in resumed.draw()] == straight[STEP:]
    interrupted.prompts.load_state_dict(state)  # what was expected is so no longer
    assert not interrupted.near._promised and not interrupted.near._expected
    assert [each.prompt for each in interrupted.draw()] == straight[STEP : 2 * STEP]


class Told(Team):
    """Process 0 of two, and what it says."""

    def __init__(self):
        self.processes, self.said = 2, []

    def tell(self, order):
        self.said.append(decode(b"".join(encode(order))))


def test_other_processes_lay_out_what_comes_before_they_learn_from_it(run):
    here, there, gang = run(), run(), Told()
    told = ToldPrompts(here.prompts, gang, here.store.holder)
    prepared, _ = asyncio.run(told.draw(STEP))
    (order,) = gang.said
    assert isinstance(order, Coming) and [draw for draw, _ in order.media] == list(range(STEP))
    assert {place for _, media in order.media for _, place in media} == set(here.store.seats)
    words = {each.prompt.draw: tickets_of(each.inputs) for each in prepared}
    coming = ComingPrompts(there.prompts, most=3)
    coming.hear(order)
    calls, laid_out = [], there.prompts.laid_out
    there.prompts.laid_out = lambda asked: calls.append(sorted(asked)) or laid_out(asked)
    found = coming.laid_out(words)
    assert calls == [[0]], "the last three were remembered"
    for each in prepared:
        got, want = found[each.prompt.draw], each.inputs.laid_out()
        assert got.token_ids_T.tolist() == want.token_ids_T.tolist() and tickets_of(got) == tickets_of(want)
    assert coming.laid_out({1: words[1]})[1].token_ids_T.tolist() == prepared[1].inputs.laid_out().token_ids_T.tolist()
    assert calls[1:] == [[1]], "nothing is kept once it was used"
    coming.hear(order)
    coming.laid_out({3: words[2]})
    assert calls[-1] == [3], "of other media, it is another prompt"
    coming.forget()
    coming.laid_out({2: words[2]})
    assert calls[-1] == [2]
