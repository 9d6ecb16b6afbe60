"""The coordinator's books and its wiring: what is counted under which name, and what reaches a policy."""

import math
from typing import Any

import pytest
from coordinator_cases import changed, prompt, response

from fluxjax.base.types import Media, MediaKind, Prompt, Reward
from fluxjax.config import AprilConfig, Config, DynamicSampling, SynchronousConfig, TailBatchingConfig
from fluxjax.coordinator import CoordinatorError, Ledger, PromptStage
from fluxjax.coordinator.factory import make_policy
from fluxjax.coordinator.ledger_state import ledger_state, load_ledger_state
from fluxjax.coordinator.lengths import FEATURES, ends_by, features
from fluxjax.coordinator.messages import Park, Request
from fluxjax.coordinator.policies.april import April
from fluxjax.coordinator.policies.rounds import Rounds
from fluxjax.coordinator.policies.tail_batching import TailBatching


def running(n: int = 2, need: int = 2, **options: Any) -> Ledger:
    ledger = Ledger(**options)
    ledger.draw([prompt(0)], [])
    ledger.generate(Request(prompt(0), n=n, need=need), served=0)
    return ledger


def test_repeated_and_surplus_responses_are_counted() -> None:
    ledger = running(n=2, need=1)
    for sample in (0, 0, 1):
        ledger.finish(response(0, sample), newest_version=0)
    assert ledger.ignored == {"repeated response": 1, "surplus response": 1}


def test_an_aborted_response_loses_its_group() -> None:
    ledger = running()
    ledger.finish(changed(response(0, 0), finish="abort"), newest_version=0)
    [entry] = ledger.at(PromptStage.LOST)
    assert entry.failure == "a response was aborted" and entry.failures == 1


def test_a_prompt_goes_on_with_its_own_responses_only() -> None:
    ledger = running()
    ledger.finish(response(0, 0), newest_version=0)
    ledger.park(Park(prompt(0), 0, keep=True))
    ledger.finish(changed(response(0, 1), finish="abort"), newest_version=0)
    with pytest.raises(CoordinatorError, match="must continue the responses that its prompt has begun"):
        ledger.generate(Request(prompt(0), n=2, attempt=1, begun=(response(0, 0), None)), served=0)


def test_nothing_is_awaited_when_the_last_reward_has_come() -> None:
    ledger = running(n=1, need=1)
    ledger.finish(response(0, 0), newest_version=0)
    ledger.score(response(0, 0))
    assert ledger.awaits_something
    ledger.reward(response(0, 0).rid, Reward(1.0, True))
    assert not ledger.awaits_something


def test_only_the_newest_attempt_is_parked() -> None:
    with pytest.raises(CoordinatorError, match=r"00000000\.03 can't be parked: attempt 0 is the newest one"):
        running().park(Park(prompt(0), attempt=3))


RIGHT, SHORTER, WRONG, ROUNDED = Reward(1.0, True), Reward(0.9, True), Reward(0.3, False), Reward(0.1 + 0.2, False)


@pytest.mark.parametrize(
    ("rewards", "differ_in"),
    [
        ((RIGHT, RIGHT), []),
        ((RIGHT, WRONG), ["correct", "value"]),
        ((RIGHT, SHORTER), ["value"]),
        ((WRONG, ROUNDED), []),
        ((Reward(0.3, True), ROUNDED), ["correct"]),
    ],
)
@pytest.mark.parametrize("field", ["correct", "value"])
def test_whether_rewards_differ_is_known_after_a_resume_too(rewards, differ_in: list[str], field: str) -> None:
    ledger = running(varied_in=field)
    for sample, given in enumerate(rewards):
        ledger.finish(response(0, sample), newest_version=0)
        ledger.score(response(0, sample))
        ledger.reward(f"00000000.00/{sample}", given)
    resumed = Ledger(field)
    load_ledger_state(resumed, ledger_state(ledger), {0: prompt(0)})
    assert [books.at(PromptStage.SCORED)[0].varied for books in (ledger, resumed)] == [field in differ_in] * 2


def test_defaults_are_those_of_the_configuration() -> None:
    tail, april = TailBatching(), April()
    of_config = TailBatchingConfig()
    assert (tail.prompts, tail.responses) == (of_config.prompts, of_config.responses)
    assert tail.max_staleness == of_config.max_staleness
    assert (april.oversample, april.max_staleness) == (AprilConfig().oversample, AprilConfig().max_staleness)
    assert tail.round == "", "no round has begun"


@pytest.mark.parametrize("kind", [SynchronousConfig, TailBatchingConfig, AprilConfig])
def test_a_policy_gets_its_helpers(kind: type) -> None:
    config = Config()
    config.policy, config.rollout.dynamic_sampling = kind(), DynamicSampling.CORRECT
    config.stream_trainer, config.speculative_sync = True, 0.7
    policy = make_policy(config)
    assert isinstance(policy, Rounds) and policy.dynamic_sampling
    assert policy.stream is not None
    assert policy.speculative is not None and policy.speculative.confidence == 0.7
    config.stream_trainer, config.speculative_sync = False, 0.0
    plain = make_policy(config)
    assert isinstance(plain, Rounds) and plain.stream is plain.speculative is None


def test_features() -> None:
    """Intercept, logs of text length, words, digits and marks, their share, images, videos; then 32 hashed words."""
    media = (Media(MediaKind.IMAGE, "a.png"), Media(MediaKind.IMAGE, "b.png"), Media(MediaKind.VIDEO, "c.mp4"))
    x = features(Prompt("p", "math", "What is 12 + 30 = x", "42", media=media))
    dense = (1.0, math.log(19 / 128), math.log(4 / 24), math.log1p(4) - 1, math.log1p(2) - 1, 4 * 6 / 19 - 0.5)
    assert x[:8].tolist() == pytest.approx([*dense, math.log1p(2), math.log1p(1)])
    assert len(x) == FEATURES == 8 + 32 and abs(x[8:]).sum() in (1, 3), "three words, of which two may share a place"


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_probabilities_far_in_the_tail_are_as_smooth_as_before(sigma: float) -> None:
    near, far = (ends_by(0.0, sigma, int(1.1 * math.exp(z * sigma)), int(math.exp(z * sigma))) for z in (24.99, 25.01))
    assert 0.5 < near < 1 and far == pytest.approx(near, rel=0.02)
