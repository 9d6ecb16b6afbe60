"""The length predictor: better than a source's mean on prompts it never saw, calibrated, and fair to what was cut."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from length_cases import LIMIT, questions, rank_correlation, source_means, synthetic, taught

from fluxjax.base.types import Prompt
from fluxjax.coordinator.lengths import FEATURES, LengthPredictor, Level, censored, ends_by, expected_tokens


@pytest.fixture(scope="module")
def workload():
    return synthetic(0, 1500)


@pytest.fixture(scope="module")
def predictor(workload):
    return taught(workload[:1000])


def _flat(workload) -> list[int]:
    return [length for _, lengths in workload for length in lengths]


def correlations(predictor: LengthPredictor, train, held_out) -> tuple[float, ...]:
    """Correlations with the true lengths of held-out responses: of the predictions, and of the means of each source."""
    predicted = [predictor.predict(p) for p, lengths in held_out for _ in lengths]
    return tuple(rank_correlation(said, _flat(held_out)) for said in (predicted, source_means(train, held_out)))


def confidence(predictor: LengthPredictor, prompt: Prompt) -> float:
    """The predicted probability that a length lies within a factor of two of the predicted one."""
    mean = predictor.predict(prompt)
    return predictor.ends_by(prompt, round(2 * mean)) - predictor.ends_by(prompt, round(mean / 2))


class TestSynthetic:
    def test_shape_of_the_workload(self, workload) -> None:
        lengths = np.array(_flat(workload))
        median = np.median(lengths)
        assert 450 < median < 700 and 900 < np.quantile(lengths, 0.75) < 1400
        assert 20 < np.max(lengths[:1024]) / median < 35

    def test_the_error_of_predictions_is_known(self) -> None:
        """Equal lengths are predicted ever better; a length that nobody expects is an error again."""
        prompt, predictor = Prompt("p", "math", "?", "!"), LengthPredictor(limit=5000)
        assert predictor.error == 0.0
        errors = []
        for draw, length in enumerate([100] * 300 + [3000] * 3):
            predictor.observe(dataclasses.replace(prompt, id=f"p{draw}", draw=draw), length)
            predictor.predict(dataclasses.replace(prompt, draw=draw))
            errors.append(predictor.error)
        assert errors[0] > errors[50] > errors[299] > 0 and errors[299] < 0.3 < errors[302]

    @pytest.mark.slow
    def test_held_out_prompts(self, workload, predictor) -> None:
        found, baseline = correlations(predictor, workload[:1000], workload[1000:])
        assert found > baseline + 0.1

    def test_group_mates(self, workload, predictor) -> None:
        held_out = [(p, lengths[:8]) for p, lengths in workload[1000:]]
        rest = [length for _, lengths in held_out for length in lengths[4:]]
        alone = [predictor.predict(p) for p, lengths in held_out for _ in lengths[4:]]
        told = copy.deepcopy(predictor)
        for prompt, lengths in held_out:
            for length in lengths[:4]:
                told.observe(prompt, length)
        mates = [told.predict(p) for p, lengths in held_out for _ in lengths[4:]]
        found, without = rank_correlation(mates, rest), rank_correlation(alone, rest)
        assert found > without + 0.1
        assert np.mean([confidence(told, p) for p, _ in held_out]) > 0.55

    @pytest.mark.slow
    def test_history(self, workload, predictor) -> None:
        again = [(dataclasses.replace(p, draw=p.draw + 5000, epoch=1), lengths[8:]) for p, lengths in workload[:1000]]
        found, baseline = correlations(predictor, workload[:1000], again)
        assert found > baseline + 0.25

    def test_calibration(self, workload, predictor) -> None:
        held_out = workload[1000:]
        lengths = np.array(_flat(held_out))
        mean = np.array([predictor.predict(p) for p, each in held_out for _ in each])
        assert 0.85 < lengths.mean() / mean.mean() < 1.15
        assert 0.87 < np.mean([predictor.ends_by(p, n) <= 0.9 for p, each in held_out for n in each]) < 0.94
        within = np.mean((lengths >= mean / 2) & (lengths <= 2 * mean))
        assert abs(within - np.mean([confidence(predictor, p) for p, _ in held_out])) < 0.05

    def test_survival(self, workload, predictor) -> None:
        for running in (500, 2000):
            long = [(p, n) for p, lengths in workload[1000:] for n in lengths if n > running]
            said = [predictor.predict(p, running=running) for p, _ in long]
            assert 0.85 < np.mean([n for _, n in long]) / np.mean(said) < 1.15
            assert 0.86 < np.mean([predictor.ends_by(p, n, running) <= 0.9 for p, n in long]) < 0.94

    def test_aborted_responses_do_not_bias(self, workload) -> None:
        fair, naive = LengthPredictor(LIMIT), LengthPredictor(LIMIT)
        for prompt, lengths in workload[:1000]:
            for length in lengths[:8]:
                cut = 700 + prompt.draw * 7919 % 1500
                fair.observe(prompt, min(length, cut), length <= cut)
                naive.observe(prompt, min(length, cut))
        held_out = workload[1000:]
        true = np.mean(_flat(held_out))
        ratio, wrong = (true / np.mean([p.predict(x) for x, _ in held_out]) for p in (fair, naive))
        assert abs(ratio - 1) < 0.15 and wrong > 1.2

    def test_follows_the_policy(self, workload) -> None:
        predictor = LengthPredictor()
        late = []
        for i, (prompt, lengths) in enumerate(workload):
            factor = np.exp(i / len(workload))
            late.append((predictor.predict(prompt), factor * np.mean(lengths)))
            for length in lengths[:8]:
                predictor.observe(prompt, int(length * factor))
        said, true = np.mean(late[-300:], axis=0)
        assert 0.8 < true / said < 1.3

    def test_state(self, workload, predictor) -> None:
        state = json.loads(json.dumps(predictor.state_dict()))
        again = LengthPredictor(LIMIT)
        again.load_state_dict(state)
        first = taught(workload[:1000])
        for prompt, lengths in workload[900:1100]:
            assert again.predict(prompt) == first.predict(prompt)
            for each in (again, first):
                each.observe(prompt, lengths[8])
        assert again.state_dict() == first.state_dict()

    def test_predictions_solve_for_nothing(self, workload, predictor, monkeypatch) -> None:
        """Weights are solved for when responses have come in; a prediction, of which there are many more, only applies
        them, and changes nothing."""

        def never(*_: object) -> None:
            raise AssertionError("a prediction solves for weights")

        before = predictor.state_dict()
        for name in ("inv", "solve", "cholesky", "lstsq"):
            monkeypatch.setattr(np.linalg, name, never)
        with pytest.raises(AssertionError, match="solves for weights"):
            taught(workload[:20]).state_dict()
        for prompt, _ in workload:
            predictor.predict(prompt, 300)
        assert predictor.state_dict() == before


def test_real_video_questions(shared) -> None:
    """NExT-QA: real questions and the lengths of their real answers."""
    workload = questions(shared / "data" / "nextqa_val.csv")[:4000]
    train, held_out = workload[:3000], workload[3000:]
    found, baseline = correlations(taught(train, limit=0), train, held_out)
    assert found > 0.3 and baseline == 0


class TestRules:
    PROMPT = Prompt("a", "math", "How many?", "")

    def test_before_anything_was_seen(self) -> None:
        predictor = LengthPredictor(1000)
        assert 0 < predictor.predict(self.PROMPT) < 1000 and confidence(predictor, self.PROMPT) < 0.5

    def test_responses_of_a_draw_make_its_next_one_more_certain(self) -> None:
        told = LengthPredictor()
        for length in (100, 150, 125):
            told.observe(dataclasses.replace(self.PROMPT, id="b"), length)
        other = dataclasses.replace(self.PROMPT, draw=1)
        before = confidence(told, other)
        for length in (100, 150, 125):
            told.observe(other, length)
        assert confidence(told, other) > before

    def test_full_responses_count_as_unfinished(self) -> None:
        full, cut = LengthPredictor(512), LengthPredictor(512)
        full.observe(self.PROMPT, 512)
        cut.observe(self.PROMPT, 512, False)
        assert full.predict(self.PROMPT) == cut.predict(self.PROMPT)

    def test_few_tokens_of_an_unfinished_response_tell_nothing(self) -> None:
        predictor = taught([(self.PROMPT, [500, 600, 700, 800])], limit=0)
        before = predictor.predict(self.PROMPT)
        predictor.observe(self.PROMPT, 3, finished=False)
        assert predictor.predict(self.PROMPT) == pytest.approx(before, rel=0.02)

    @given(
        mu=st.floats(0, 12),
        sigma=st.floats(0.01, 2),
        running=st.integers(0, 200_000),
        limit=st.sampled_from([0, 64, 16_384, 131_072]),
    )
    def test_survival_is_finite_and_in_range(self, mu: float, sigma: float, running: int, limit: int) -> None:
        mean = expected_tokens(mu, sigma, running, limit)
        assert running <= mean < np.inf and (not limit or mean <= max(limit, running))
        assert 0 <= ends_by(mu, sigma, round(mean), running) <= 1
        working, information, expected, variance = censored(mu, sigma, running)
        assert 0 <= information <= 1 and variance >= 0 and expected >= mu and working >= mu

    def test_a_group_mate_that_fills_the_limit_would_have_been_longer(self) -> None:
        """It tells at least as much of a long answer as one that ended just before the limit."""
        means = []
        for tokens in (1000, 999, 10):
            predictor = LengthPredictor(limit=1000)
            predictor.observe(self.PROMPT, tokens)
            means.append(predictor.predict(self.PROMPT))
        cut, ended, short = means
        assert short < ended < cut <= 1000

    def test_variances_are_shrunk_towards_what_was_assumed(self) -> None:
        level = Level()
        assumed = level.within
        level.learn(np.ones(FEATURES), 5.0, 1.0, None, 2 * assumed)  # a residual as large as is assumed
        for _ in range(32):
            level.learn(np.ones(FEATURES), 5.0, 1.0, assumed, 0.0)
        assert level.within == pytest.approx(assumed)
        for _ in range(10_000):
            level.learn(np.ones(FEATURES), 5.0, 1.0, assumed / 4, 0.0)
        assert level.within == pytest.approx(assumed / 4, rel=0.02)

    def test_the_first_responses_are_learnt_from_at_once(self) -> None:
        level = Level()
        before = level.version
        for _ in range(8):
            level.learn(np.ones(FEATURES), 5.0, 1.0, None, 0.1)
        assert level.version == before + 8

    def test_prompts_are_never_taken_to_be_all_alike(self) -> None:
        """Their variance is at least a fiftieth of all, however much the responses of one prompt differ."""
        level = Level()
        total = level.within + level.between
        level.learn(np.ones(FEATURES), 5.0, 1.0, None, total)  # a residual as large as is assumed
        for _ in range(1000):
            level.learn(np.ones(FEATURES), 5.0, 1.0, 9.0, 0.0)
        assert level.between == pytest.approx(0.02 * total)

    @pytest.mark.parametrize("tokens", [40, 4000])
    def test_the_residual_of_an_unfinished_response(self, tokens: int) -> None:
        """It is the expected square: what the censored observation leaves open counts as well."""
        predictor, level = LengthPredictor(), Level(Level())
        _, fixed, variance = predictor._regression(self.PROMPT, level)
        assumed = level.within + level.between
        *_, mean, spread = censored(fixed, math.sqrt(assumed + variance), tokens)
        predictor.observe(self.PROMPT, tokens, finished=False)
        predictor.predict(self.PROMPT)
        expected = ((mean - fixed) ** 2 + spread) * assumed / (assumed + variance)
        assert predictor._sources["math"].sums[2] == pytest.approx(expected, rel=0.01)

    def test_a_limit_of_one_token_is_certain(self) -> None:
        assert expected_tokens(6.0, 1.0, limit=1) == pytest.approx(1.0, abs=1e-6)

    def test_survival_against_drawn_lengths(self) -> None:
        drawn = np.exp(np.random.default_rng(0).normal(6.0, 1.0, 400_000))
        for running, limit in ((0, 0), (0, 600), (0, 1000), (700, 0), (700, 3000), (3000, 0)):
            rest = drawn[drawn > running]
            rest = np.minimum(rest, limit) if limit else rest
            assert expected_tokens(6.0, 1.0, running, limit) == pytest.approx(rest.mean(), rel=0.02)
            for tokens in (800, 4000):
                assert limit or ends_by(6.0, 1.0, tokens, running) == pytest.approx(np.mean(rest <= tokens), abs=0.01)
