"""The books of who looks at what: every wanted medium is answered once, whatever becomes of the places."""

import collections

import hypothesis
import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from turns import third_of

from fluxjax.coordinator.places import Forget, GiveUp, Lapsed, Look, MediumStage, Places

LEASE = 10.0
KEYS = st.sampled_from([f"medium {number}" for number in range(12)])
NAMES = st.sampled_from("ABCD")


class History(RuleBasedStateMachine):
    """Any events in any order. `queues` is what the driver was told that each place is to look at; `open` are the
    wanted keys, by this test's own account."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Places(LEASE, attempts=3)
        self.queues: dict[str, set[str]] = {}
        self.open: set[str] = set()
        self.now = 0.0

    def carry_out(self, instructions) -> None:
        for instruction in instructions:
            match instruction:
                case Look(key, place):
                    assert key in self.open and key not in self.queues[place]
                    self.queues[place].add(key)
                case Forget(key, place):
                    self.queues[place].remove(key)
                case GiveUp(key):
                    self.open.remove(key)
                case Lapsed(place):
                    del self.queues[place]

    @rule(place=NAMES)
    def join(self, place):
        self.queues[place] = set()
        self.carry_out(self.places.place_joined(place, self.now))

    @rule(place=NAMES)
    def lose(self, place):
        self.queues.pop(place, None)
        self.carry_out(self.places.place_lost(place, self.now))

    @rule(key=KEYS)
    def want(self, key):
        self.open.add(key)
        self.carry_out(self.places.wanted(key, self.now))

    @rule(key=KEYS, place=NAMES, usable=st.booleans())
    def answer(self, key, place, usable):
        """Perhaps late, perhaps again, perhaps by one that is lost."""
        wanted = key in self.open
        self.queues.get(place, set()).discard(key)
        instructions = self.places.answered(key, place, self.now, usable=usable)
        assert wanted or not instructions, "only the first answer counts"
        self.open.discard(key)
        self.carry_out(instructions)
        if wanted and usable and place in self.queues:
            assert self.places.holder(key) == place

    @precondition(lambda self: any(self.queues.values()))
    @rule(data=st.data())
    def answer_well(self, data):
        place = data.draw(st.sampled_from(sorted(place for place, keys in self.queues.items() if keys)))
        self.answer(data.draw(st.sampled_from(sorted(self.queues[place]))), place, True)

    @rule(key=KEYS, place=NAMES)
    def fail(self, key, place):
        self.queues.get(place, set()).discard(key)
        self.carry_out(self.places.failed(key, place, self.now, "no reason"))

    @rule(key=KEYS)
    def release(self, key):
        self.open.discard(key)
        self.carry_out(self.places.released(key, self.now))
        assert not self.places.holder(key)

    @rule(key=KEYS, place=NAMES)
    def hear_of(self, key, place):
        self.places.hold(key, place)

    @rule(seconds=st.sampled_from([0.5, LEASE / 2, LEASE, 3 * LEASE]))
    def tick(self, seconds):
        self.now += seconds
        self.carry_out(self.places.tick(self.now))

    @invariant()
    def all_that_is_wanted_is_looked_at_by_one_living_place_or_waits_for_one(self):
        assert set(self.places.living) == set(self.queues)
        told = collections.Counter(key for keys in self.queues.values() for key in keys)
        assert all(count == 1 for count in told.values())
        assert {place: set(self.places.looks(place)) for place in self.queues} == self.queues
        if self.queues:
            assert set(told) == self.open and not self.places.waiting
        else:
            assert set(self.places.waiting) == self.open

    @invariant()
    def only_the_living_hold(self):
        assert set(self.places._held.values()) <= set(self.queues)


TestHistory = History.TestCase
TestHistory.settings = hypothesis.settings(max_examples=third_of(80), stateful_step_count=50, deadline=None)


@hypothesis.given(st.lists(st.sampled_from(["want", "lose", "join"]), max_size=40), st.data())
def test_equal_places_have_the_same_to_do_within_one(events, data):
    """Whenever a place is lost, too, all others take the same share of what it had; and one that joins takes its."""
    places, living = Places(LEASE), ["place 0"]
    places.place_joined("place 0", 0.0)
    for number, event in enumerate(events):
        if event == "want":
            places.wanted(str(number), 0.0)
        elif event == "join":
            living.append(f"place {number + 1}")
            places.place_joined(living[-1], 0.0)
        elif len(living) > 1:
            living.remove(place := data.draw(st.sampled_from(living)))
            places.place_lost(place, 0.0)
        loads = [len(places.looks(place)) for place in living]
        assert sum(loads) == events[: number + 1].count("want") and max(loads) - min(loads) <= 1


def joined(*names, **options):
    places = Places(LEASE, **options)
    for name in names:
        places.place_joined(name, 0.0)
    return places


def test_who_holds_a_medium_looks_at_it_again():
    places = joined("A", "B")
    assert places.wanted("x", 0.0) == [Look("x", "A")]
    places.answered("x", "A", 1.0)
    assert [places.wanted(str(number), 1.0) for number in range(2)] == [[Look("0", "B")], [Look("1", "A")]]
    assert places.wanted("x", 1.0) == [Look("x", "A")] and places.nearest("x") == "A"
    assert places.nearest("new") == "B" and places.nearest("new", {"B": 5}) == "A"
    places.place_lost("A", 2.0)
    assert places.nearest("x") == "B"


def test_who_joins_takes_over_what_others_look_at_last():
    places = joined("A")
    places.hold("d", "A")
    for key in "abcd":
        places.wanted(key, 0.0)
    assert places.place_joined("B", 1.0) == [Forget("c", "A"), Look("c", "B"), Forget("b", "A"), Look("b", "B")]
    assert places.looks("A") == ("a", "d"), "what it holds, and what it looks at first"


def test_a_silent_place_is_lost_after_the_lease_and_an_answer_renews_it():
    places = joined("A", "B")
    assert not places.tick(99.0), "who has nothing to do may be silent"
    for key in "wxyz":
        places.wanted(key, 100.0)
    places.answered("w", "A", 105.0)
    assert not places.tick(109.9)
    assert places.tick(110.0) == [Lapsed("B"), Look("x", "A"), Look("z", "A")]
    assert places.answered("x", "B", 111.0) == [Forget("x", "A")], "late, but an answer"
    assert places.answered("x", "A", 112.0) == []
    assert places.tick(122.0) == [Lapsed("A")] and places.waiting == ("y", "z")
    assert places.place_joined("B", 130.0) == [Look("y", "B"), Look("z", "B")]


def test_places_that_lapse_together_hand_nothing_to_each_other():
    places = joined("A", "B", "C")
    for key in "xyz":
        places.wanted(key, 0.0)
    places.answered("z", "C", 5.0)
    instructions = places.tick(10.0)
    assert sorted(map(str, instructions)) == sorted(
        map(str, [Lapsed("A"), Lapsed("B"), Look("x", "C"), Look("y", "C")])
    )


def test_a_medium_that_fails_everywhere_is_given_up():
    places = joined("A", "B")
    places.wanted("x", 0.0)
    assert places.failed("x", "B", 1.0, "not asked") == []
    assert places.failed("x", "A", 1.0, "full disk") == [Look("x", "B")]
    assert places.failed("x", "B", 2.0, "full disk") == [Look("x", "A")]
    places.failed("x", "A", 3.0, "full disk")
    assert places.failed("x", "B", 4.0, "full disk") == [GiveUp("x", "full disk")]
    assert places.wanted("x", 5.0) == [Look("x", "A")], "it may be wanted again"


def test_only_the_newest_holders_are_known():
    places = joined("A", keep=3)
    for key in "abcd":
        places.hold(key, "A")
    places.hold("b", "A")
    places.hold("e", "A")
    assert [places.holder(key) for key in "abcde"] == ["", "A", "", "A", "A"]
    places.hold("b", "nobody")
    assert places.holder("b") == "A"


def test_the_history_tells_who_held_what_when():
    places = joined("A", remember=6)
    places.wanted("x", 1.0)
    places.place_lost("A", 2.0)
    places.place_joined("B", 3.0)
    places.answered("x", "B", 4.0)
    places.released("x", 5.0)
    told = [(place, stage, time) for _, place, stage, time in places.history()]
    assert told == [
        ("A", MediumStage.LOST, 2.0),
        ("", MediumStage.WAITS, 2.0),
        ("B", MediumStage.JOINED, 3.0),
        ("B", MediumStage.LOOKED_AT, 3.0),
        ("B", MediumStage.HELD, 4.0),
        ("B", MediumStage.RELEASED, 5.0),
    ]
