"""Which groups a step trains on: what holds for every choice, and what each switch changes."""

import collections
import copy
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.base.types import Group, Media, MediaKind, Prompt, Response, Reward, Sample, has_variance
from fluxjax.config.learning import PREFERENCES
from fluxjax.coordinator.policies.adaptive_async import compose, difficulty, due, total_tokens, versions_behind

VERSION, LIMIT = 10, 4
FAR = 100  # staleness that nothing comes near


def group(draw: int, *, age: int = 0, tokens: int = 4, correct: int = 1, source: str = "math", image=False) -> Group:
    media = (Media(MediaKind.IMAGE, "x.png"),) if image else ()
    samples = []
    for i in range(4):
        versions = (VERSION - age, *(VERSION,) * (tokens - 1)) if i == 1 else (VERSION,) * tokens
        response = Response(f"{draw}/{i}", draw, i, (7,) * tokens, (-1.0,) * tokens, versions, "stop")
        samples.append(Sample(response, Reward(float(i < correct), i < correct)))
    return Group(Prompt(f"p{draw}", source, "?", "!", media, draw), tuple(samples))


def choose(groups, count: int, prefer: tuple[str, ...] = (), *, limit: int = LIMIT, **options) -> list[int]:
    urgent = due([versions_behind(one, VERSION) for one in groups], limit, max(count, 1))
    settings = {"progress": 0.5, "seed": 0, "step": 1, "urgent": urgent} | options
    chosen = compose(groups, count, prefer, version=VERSION, **settings)
    return [g.prompt.draw for g in chosen]


# Plain values: building groups inside a strategy would check their types, which draws random numbers.
GROUPS = st.dictionaries(
    st.integers(0, 200),
    st.fixed_dictionaries(
        {
            "age": st.integers(0, LIMIT),
            "tokens": st.integers(1, 40),
            "correct": st.integers(0, 4),
            "source": st.sampled_from(["math", "code", "pans"]),
            "image": st.booleans(),
        }
    ),
    min_size=1,
    max_size=24,
)
CONFIGS = st.sets(st.sampled_from(PREFERENCES)).map(tuple)


def made(drawn: dict[int, dict]) -> list[Group]:
    return [group(draw, **options) for draw, options in drawn.items()]


class TestAlways:
    @pytest.mark.medium
    @given(drawn=GROUPS, config=CONFIGS, share=st.floats(0, 1), progress=st.floats(0, 1), seed=st.integers(0, 99))
    def test_choice(self, drawn, config: tuple[str, ...], share: float, progress: float, seed: int) -> None:
        """Exactly `count` different candidates in draw order; the urgent ones before others; inputs as they were."""
        groups = made(drawn)
        count = round(share * len(groups))
        before = copy.deepcopy((groups, config))
        chosen = choose(groups, count, config, progress=progress, seed=seed)
        assert (groups, config) == before
        assert len(chosen) == count and chosen == sorted(set(chosen))
        assert set(chosen) <= {g.prompt.draw for g in groups}
        urgent = {g.prompt.draw for g in groups if versions_behind(g, VERSION) == LIMIT}
        assert urgent <= set(chosen) or set(chosen) <= urgent
        assert choose(groups[::-1], count, config, progress=progress, seed=seed) == chosen

    @given(drawn=GROUPS, share=st.floats(0, 1), limit=st.sampled_from([LIMIT, FAR]))
    def test_everything_off(self, drawn, share: float, limit: int) -> None:
        """The first ones in draw order, whenever nothing is urgent or everything equally."""
        groups = made(drawn) if limit == FAR else [group(draw, age=1) for draw in drawn]
        count = round(share * len(groups))
        assert choose(groups, count, limit=limit) == sorted(g.prompt.draw for g in groups)[:count]

    @given(drawn=GROUPS, config=CONFIGS, share=st.floats(0, 1), seed=st.integers(0, 99))
    def test_strata(self, drawn, config: tuple[str, ...], share: float, seed: int) -> None:
        """Where nothing is urgent, each stratum gets its share of the step, to less than one group."""
        groups = made(drawn)
        count = round(share * len(groups))

        def stratum(g: Group) -> tuple:
            kind = (g.prompt.source, bool(g.prompt.media))
            return (versions_behind(g, VERSION) if "stratify" in config else 0, kind if "diversity" in config else 0)

        sizes = collections.Counter(map(stratum, groups))
        chosen = set(choose(groups, count, config, limit=FAR, seed=seed))
        taken = collections.Counter(stratum(g) for g in groups if g.prompt.draw in chosen)
        for key, size in sizes.items():
            assert abs(taken[key] - count * size / len(groups)) < 1

    def test_nothing_starves(self) -> None:
        """Candidates that nothing speaks for are trained on before they are too old."""
        config = PREFERENCES
        waiting = dict.fromkeys(range(8), (VERSION, 5, 0)) | {8: (VERSION, 900, 4)}
        version, last = VERSION, 8
        for step in range(40):
            groups = [
                group(draw, age=version - born, tokens=tokens, correct=4 - wrong, source="math" if wrong else "code")
                for draw, (born, tokens, wrong) in waiting.items()
            ]
            for draw in choose(groups, 6, config, progress=1.0, step=step):
                del waiting[draw]
            version += 1
            for _ in range(6):
                last += 1
                waiting[last] = (version, 900, 4) if last % 7 == 0 else (version, 5, 0)
        assert min(waiting) > last - 6 * LIMIT


class TestSwitches:
    def test_urgent_ones(self) -> None:
        groups = [group(0), group(1, age=2), group(2, age=3), group(3, age=4)]
        assert choose(groups, 1) == [3]
        assert choose(groups, 2) == [0, 3]  # there is another step for the one of age 3
        assert choose(groups, 2, urgent=2) == [2, 3]
        assert choose(groups, 3) == [0, 1, 3]

    @given(st.lists(st.integers(0, LIMIT), max_size=30), st.integers(1, 6))
    def test_what_is_due_and_nothing_else(self, ages: list[int], size: int) -> None:
        """If `due` groups leave, the oldest first, later steps can train on all others in time; one less is too few."""

        def in_time(ages: list[int]) -> bool:
            return all(age + 1 + i // size <= LIMIT for i, age in enumerate(ages))

        oldest_first, count = sorted(ages, reverse=True), due(ages, LIMIT, size)
        assert in_time(oldest_first[count:]) and (not count or not in_time(oldest_first[count - 1 :]))

    def test_stalest_first(self) -> None:
        groups = [group(draw, age=draw % 3) for draw in range(9)]
        assert choose(groups, 4, ("stalest",), limit=FAR) == [1, 2, 5, 8]

    def test_stratified(self) -> None:
        groups = [group(draw, age=2 if draw < 4 else 0) for draw in range(12)]
        assert choose(groups, 6, ("stratify",), limit=FAR) == [0, 1, 4, 5, 6, 7]

    def test_diverse(self) -> None:
        groups = [group(draw, source="math" if draw < 8 else "code", image=draw in (6, 7)) for draw in range(12)]
        assert choose(groups, 6, ("diversity",)) == [0, 1, 2, 6, 8, 9]

    def test_easy_first(self) -> None:
        """By difficulty at the end of the run; mostly so in the middle; by chance at its start."""
        groups = [group(draw, correct=draw % 5) for draw in range(100)]
        config = ("curriculum",)
        easiest = [g.prompt.draw for g in groups if difficulty(g) == 0]
        assert choose(groups, 20, config, limit=FAR, progress=1.0) == easiest
        mean = [
            np.mean(
                [
                    difficulty(groups[i])
                    for s in range(20)
                    for i in choose(groups, 20, config, limit=FAR, progress=p, step=s)
                ]
            )
            for p in (0.0, 0.5, 1.0)
        ]
        assert mean[0] == pytest.approx(0.5, abs=0.06) and mean[1] < 0.35 and mean[2] == 0
        assert choose(groups, 20, config, limit=FAR, progress=0.0, step=1) != choose(
            groups, 20, config, limit=FAR, progress=0.0, step=2
        )

    def test_similar_lengths(self) -> None:
        """Lognormal lengths: the largest of a step over its mean, which is what devices wait for, gets smaller."""
        rng = np.random.default_rng(0)
        spread: dict[bool, list[float]] = {False: [], True: []}
        for trial in range(20):
            groups = [group(d, tokens=int(n)) for d, n in enumerate(np.exp(rng.normal(3.5, 0.7, 32)))]
            for lengths in spread:
                chosen = choose(groups, 16, ("lengths",) * lengths, step=trial)
                assert 0 in chosen
                tokens = [total_tokens(groups[i]) for i in chosen]
                spread[lengths].append(max(tokens) / float(np.mean(tokens)))
        drawn, similar = float(np.mean(spread[False])), float(np.mean(spread[True]))
        assert similar < 0.8 * drawn


def test_group_measures() -> None:
    assert versions_behind(group(0, age=3), VERSION) == 3
    assert total_tokens(group(0, tokens=5)) == 20
    assert [difficulty(group(0, correct=c)) for c in (0, 1, 4)] == [1.0, 0.75, 0.0]
    empty = Group(Prompt("p", "math", "?", "!"), ())
    assert versions_behind(empty, VERSION) == total_tokens(empty) == 0


def test_variance_of_rewards() -> None:
    assert [has_variance(group(0, correct=c)) for c in (0, 1, 4)] == [False, True, False]
    assert not has_variance(Group(Prompt("p", "math", "?", "!"), ()))
    odd = dataclasses.replace(group(0), samples=group(0).samples[:1])
    assert not has_variance(odd) and math.isclose(difficulty(odd), 0.0)
