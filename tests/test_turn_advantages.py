"""Advantages of turns, with numbers worked out by hand: GiGPO's, and PPO's with the rewards of turns at their last
tokens. `test_episode_batches` has advantages of turns in packed rows."""

import dataclasses
import math

import numpy as np
import pytest
from step_cases import composed, key_of, near_policy, samples_of, trainer_of
from test_algorithms import group as one_turn_group
from turns import by_turns

from fluxjax.algorithms import ALGORITHMS
from fluxjax.base.medium import Media, MediaKind
from fluxjax.base.types import ENVIRONMENT, Group, PreparedPrompt, Prompt, Response, Reward, Sample
from fluxjax.batch.composition import unpack
from fluxjax.config import AlgorithmConfig, Config, ConfigError, cli
from fluxjax.learner.critic import estimate
from fluxjax.learner.policy_trainer import Portion, has_gradient

Turns = list[tuple[int, tuple[int, ...]]]  # tokens of the model, and the ids of the observation behind them
LEFT, RIGHT = (7, 8), (7, 9)


def episode(sample: int, turns: Turns, rewards: tuple[float, ...], total: float, pictures: str = "") -> Sample:
    """Each character of `pictures` names the picture of an observation."""
    said: list[tuple[int, int]] = []
    for tokens, observation in turns:
        said += [(1, 5)] * tokens + [(id, ENVIRONMENT) for id in observation]
    ids, versions = zip(*said, strict=True) if said else ((), ())
    media = tuple(Media(MediaKind.IMAGE, f"observations/{name}") for name in pictures)
    counts = (1,) * len(pictures) if pictures else (0,) * sum(bool(observation) for _, observation in turns)
    logprobs = tuple(0.0 if version == ENVIRONMENT else -1.0 for version in versions)
    response = Response(f"3/{sample}", 3, sample, ids, logprobs, versions, "stop", None, media, rewards, counts)
    return Sample(response, Reward(total, total > 0))


def group_of(*samples: Sample) -> Group:
    return Group(Prompt("p", "test", "?", "!", draw=3), samples)


def turns_of(group: Group, **settings) -> list[tuple[float, ...]]:
    cfg = AlgorithmConfig.of("gigpo", **settings)
    [found] = ALGORITHMS["gigpo"].advantages([group], cfg)
    return [sample.turn_advantages for sample in found.samples]


def assert_turns(got, want) -> None:
    assert [len(turns) for turns in got] == [len(turns) for turns in want]
    np.testing.assert_allclose(np.concatenate(got), np.concatenate(want), atol=2e-6)


def test_gigpo_by_hand():
    """Two episodes see LEFT behind their first turn, the third RIGHT. The second goes on to LEFT once more."""
    first = episode(0, [(2, LEFT), (1, ())], (0.0, 1.0), 1.0)
    second = episode(1, [(1, LEFT), (3, LEFT), (1, ())], (0.0, 0.5, -0.5), 0.0)
    third = episode(2, [(1, RIGHT), (1, ())], (0.0, 0.0), 0.5)  # the scorer's 0.5 is of the last turn
    group = group_of(first, second, third)
    # Returns with discount 1/2: 0.5, 1 | 0.125, 0.25, -0.5 | 0.25, 0.5. Rewards of episodes: 1, 0, 0.5, mean 0.5.
    prompt = np.array([0.5, 0.125, 0.25])  # in the state of the prompt
    left = np.array([1.0, 0.25, -0.5])
    start, there = prompt - prompt.mean(), left - left.mean()
    want = [(0.5 + start[0], 0.5 + there[0]), (-0.5 + start[1], -0.5 + there[1], -0.5 + there[2]), (start[2], 0.0)]
    assert_turns(turns_of(group, discount=0.5, normalize_std=False), want)
    # Divided by the deviations: 0.5 (of 1, 0, 0.5), and those of the states.
    a, b = start / prompt.std(ddof=1), there / left.std(ddof=1)
    divided = [(1 + a[0], 1 + b[0]), (-1 + a[1], -1 + b[1], -1 + b[2]), (a[2], 0.0)]
    got = turns_of(group, discount=0.5)
    assert [len(turns) for turns in got] == [2, 3, 2]
    np.testing.assert_allclose(np.concatenate(got), np.concatenate(divided), atol=2e-5)
    # Without a discount, returns are sums: 1, 1 | 0, 0, -0.5 | 0.5, 0.5.
    plain = turns_of(group, discount=1.0, normalize_std=False)
    assert plain[0] == pytest.approx((0.5 + 0.5, 0.5 + 1 - 0.5 / 3)) and plain[2] == pytest.approx((0.0, 0.0))


def test_the_advantage_of_an_episode_is_the_mean_over_the_tokens_of_the_model():
    group = group_of(episode(0, [(3, LEFT), (1, ())], (0.0, 1.0), 1.0), episode(1, [(1, ())], (0.0,), 0.0))
    [found] = ALGORITHMS["gigpo"].advantages([group], AlgorithmConfig.of("gigpo", discount=0.5, normalize_std=False))
    first, second = found.samples
    assert first.turn_advantages == pytest.approx((0.5 + 0.25, 0.5)) and second.turn_advantages == pytest.approx(
        (-0.75,)
    )
    assert first.advantage == pytest.approx((3 * 0.75 + 0.5) / 4)
    np.testing.assert_allclose(found.columns.advantages_GU, [[0.75, 0.5], [-0.75, 0.0]])
    again = found.with_advantages([1.0, 2.0])
    assert again.columns.advantages_GU.tolist() == [[1.0], [2.0]] and again.samples[0].turn_advantages == ()


def test_observations_with_other_pictures_are_other_states():
    """Their token ids are equal, as placeholders are."""
    turns: Turns = [(1, LEFT), (1, ())]
    same = group_of(episode(0, turns, (0.0, 1.0), 1.0, "a"), episode(1, turns, (0.0, 0.0), 0.0, "a"))
    other = group_of(episode(0, turns, (0.0, 1.0), 1.0, "a"), episode(1, turns, (0.0, 0.0), 0.0, "b"))
    assert_turns(turns_of(same, discount=1.0, normalize_std=False), [(1.0, 1.0), (-1.0, -1.0)])
    assert_turns(turns_of(other, discount=1.0, normalize_std=False), [(1.0, 0.5), (-1.0, -0.5)])


def test_equal_episodes_have_no_advantage_and_single_turns_grpos_twice():
    equal = group_of(*(episode(k, [(1, LEFT), (2, ())], (0.1, 0.6), 0.7) for k in range(3)))
    assert turns_of(equal) == [(0.0, 0.0)] * 3
    group, cfg = one_turn_group([1.0, 0.0, 0.0, 1.0]), AlgorithmConfig.of("gigpo")
    [grpo], [ours] = ALGORITHMS["grpo"].advantages([group], cfg), ALGORITHMS["gigpo"].advantages([group], cfg)
    assert [sample.advantage for sample in ours.samples] == [2 * sample.advantage for sample in grpo.samples]
    empty = group_of(episode(0, [], (), 1.0), episode(1, [(2, ())], (0.0,), 0.0))
    assert_turns(turns_of(empty, normalize_std=False), [(1.0,), (-1.0,)])
    with pytest.raises(ValueError, match=r"p: rewards must be finite"):
        turns_of(group_of(episode(0, [(1, ())], (math.nan,), math.nan)))


def test_turns_whose_advantages_cancel_out_are_trained_on():
    group = group_of(episode(0, [(1, LEFT), (1, ())], (), 0.0)).with_turn_advantages([[1.0, -1.0]])
    assert group.samples[0].advantage == 0.0 and has_gradient([group], skip_idle=True)
    assert not has_gradient([group.with_turn_advantages([[0.0, 0.0]])], skip_idle=True)


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_ppo_has_the_rewards_of_turns_at_their_last_tokens(discount):
    """From the last token of a turn, the value of the first token of the next turn is the next: observations do not
    count. Lambda is 1/2; the reward of the episode is 2, of which its environment gave 1."""
    first = episode(0, [(2, LEFT), (1, ())], (-1.0, 2.0), 2.0)
    second = episode(1, [(1, ())], (), 0.5)
    cfg = AlgorithmConfig.of("ppo", discount=discount)
    [group] = ALGORITHMS["ppo"].advantages([group_of(first, second)], cfg)
    config = Config(algorithm=cfg)
    config.critic.gae_lambda = 0.5
    values = np.array([0.1, 0.2, 0.4, 0.3])
    arrays, means, _ = estimate(np.array([3, 1]), {"values": values}, group.samples, config)
    third = (2.0 + 1.0) - 0.4
    second_token = -1.0 + discount * 0.4 - 0.2 + discount * 0.5 * third
    want = np.array([0.2 - 0.1 + 0.5 * second_token, second_token, third, 0.5 - 0.3])
    np.testing.assert_allclose(arrays["returns_BT"], want + values, atol=1e-12)
    used = (want - want.mean()) / want.std(ddof=1)
    np.testing.assert_allclose(arrays["advantages_BT"], used, atol=1e-6)
    np.testing.assert_allclose(means, [used[:3].mean(), used[3]], atol=1e-6)


def with_observations(sample: Sample) -> Sample:
    """The sample with an observation in the place of its second token, if it has three tokens or more."""
    response = sample.response
    if response.num_tokens < 3:
        return sample
    (p, _, *logprobs), (v, _, *versions) = response.logprobs, response.versions
    turns = {"logprobs": (p, 0.0, *logprobs), "versions": (v, ENVIRONMENT, *versions), "rewards": (0.5,)}
    response = dataclasses.replace(response, media_counts=(0,), **turns)
    return dataclasses.replace(sample, response=response)


def episodes_near_policy(context: str) -> tuple[list[Group], dict[int, PreparedPrompt]]:
    groups, prepared, _ = near_policy()
    episodes = []
    for group in groups:
        prompt = dataclasses.replace(group.prompt, context=context)
        episodes.append(Group(prompt, tuple(map(with_observations, group.samples))))
    return episodes, prepared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "context"),
    [("one row", "whole"), *by_turns([("rows", "turn"), ("flex_ulysses", "whole"), ("odc", "turn")])],
)
def test_a_step_of_episodes_has_these_advantages_in_every_layout(layout, context):
    """Also if each turn is computed by itself: the value behind a turn's last token is that of the next turn."""
    groups, prepared = episodes_near_policy(context)
    cfg = AlgorithmConfig.of("ppo", discount=0.7)
    trainer, _ = trainer_of(cfg, layout, critic={"gae_lambda": 0.8})
    critic, ppo = trainer._critic, ALGORITHMS["ppo"]
    assert critic is not None
    [composition] = composed(trainer, [Portion(ppo.advantages(groups, cfg), prepared)])

    def stored(name):
        return unpack(composition, [np.asarray(getattr(batch, name)) for batch in composition.batches])

    values, returns, several = stored("values_BT"), stored("returns_BT"), 0
    for sample in samples_of(groups):
        v, turns = values[key_of(sample)].astype(np.float64), sample.response.turn_tokens
        several += len(turns) > 1
        rewards, gammas = np.zeros(len(v)), np.ones(len(v))
        rewards[-1] = sample.reward.value - (0.5 if len(turns) > 1 else 0.0)
        if len(turns) > 1:
            assert turns == [1, len(v) - 1]
            rewards[0], gammas[0] = 0.5, 0.7
        advantage, following, want = 0.0, 0.0, np.zeros(len(v))
        for t in reversed(range(len(v))):
            advantage = rewards[t] + gammas[t] * following - v[t] + gammas[t] * 0.8 * advantage
            following, want[t] = v[t], advantage + v[t]
        np.testing.assert_allclose(returns[key_of(sample)], want, atol=1e-4)
    assert several > 5


@pytest.mark.slow
@pytest.mark.parametrize("context", by_turns(["whole", "turn"]))
def test_gigpos_advantages_reach_the_tokens_of_their_turns(context):
    groups, prepared = episodes_near_policy(context)
    trainer, _ = trainer_of(cfg := AlgorithmConfig.of("gigpo"))
    scored = ALGORITHMS["gigpo"].advantages(groups, cfg)
    [composition] = composed(trainer, [Portion(scored, prepared)])
    stored = unpack(composition, [np.asarray(batch.advantages_BT) for batch in composition.batches])
    for sample in samples_of(scored):
        want = np.repeat(sample.turn_advantages, sample.response.turn_tokens)
        np.testing.assert_allclose(stored[key_of(sample)], want, rtol=1e-6)
    step = trainer.train(0, groups, prepared)
    assert [s.turn_advantages for g in step.groups for s in g.samples] == [
        s.turn_advantages for g in scored for s in g.samples
    ]


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"algorithm.name is gigpo.*set algorithm.kl_in_reward off"):
        AlgorithmConfig.of("gigpo", kl_coefficient=0.1, kl_in_reward=True).validate()
    with pytest.raises(ConfigError, match=r"algorithm.discount needs algorithm.name gigpo or ppo, not grpo"):
        cli.load(["--config.algorithm.discount=0.9"])
    assert cli.load(["--config.algorithm.name=gigpo"]).algorithm.discount == 0.95
