"""Gymnasium's own environments, played through processes: images, words that are actions, ends, errors, snapshots."""

import contextlib
import itertools
import json

import numpy as np
import pytest
from PIL import Image

from fluxjax.base.errors import ConfigError
from fluxjax.base.scored import Prompt
from fluxjax.environments import EnvironmentFailure, EnvironmentLimits, EnvironmentPool, Fault
from fluxjax.environments.gymnasium_game import Gymnasium

pytest.importorskip("gymnasium", reason="needs the extra `environments`")
pytestmark = pytest.mark.medium
FIRM = {"arguments": {"is_slippery": False}}
LANE = json.dumps({"desc": ["SFFG", "HHHH", "FFFF", "FFFF"]})


def prompt(answer: str = "") -> Prompt:
    return Prompt("p", "lakes", "Reach the goal.", answer)


@contextlib.asynccontextmanager
async def opened(folder):
    pool = EnvironmentPool(folder, EnvironmentLimits(concurrency=2))
    try:
        yield pool
    finally:
        await pool.close()


async def played(pool, turns, answer=LANE, seed=0, **arguments):
    episode = await pool.start("gymnasium", prompt(answer), seed, FIRM | arguments)
    seen = [episode.observation, *[await episode.act(turn) for turn in turns]]
    await episode.end()
    return seen


def walked(lake) -> int:
    """The action of a shortest way to the goal, by a search over the transitions of FrozenLake."""
    ways = {lake.s: []}
    for state in (queue := [lake.s]):
        for action, ((_, after, reward, _),) in lake.P[state].items():
            if after not in ways:
                ways[after] = [*ways[state], action]
                queue.append(after)
            if reward:
                return ways[after][0]
    raise AssertionError("no way")


async def test_frozen_lake_is_played_by_words_and_shown_as_images(tmp_path):
    async with opened(tmp_path) as pool:
        seen = await played(pool, ["I go RIGHT, not left.", "<think>up? down!</think>Right.", "right"], pixels=56)
    assert [(s.reward, s.done, s.info) for s in seen] == [
        (0.0, False, {}),
        (0.0, False, {"actions": ["right"]}),
        (0.0, False, {"actions": ["right"]}),
        (1.0, True, {"actions": ["right"]}),
    ]
    assert [(s.text, len(s.media)) for s in seen] == [("<image>", 1)] * 3 + [("", 0)]
    pictures = [np.asarray(Image.open(s.media[0].path)) for s in seen[:-1]]
    assert {picture.shape for picture in pictures} == {(56, 56, 3)}
    changed = [
        np.abs(a.astype(int) - b).reshape(4, 14, 4, 14, 3).sum((1, 3, 4)) for a, b in itertools.pairwise(pictures)
    ]
    assert [np.argwhere(cells > 2000).tolist() for cells in changed] == [[[0, 0], [0, 1]], [[0, 1], [0, 2]]]


async def test_a_turn_without_an_action_says_which_there_are(tmp_path):
    async with opened(tmp_path) as pool:
        seen = await played(pool, ["rightly upright", "", "down"], invalid_reward=-0.5, max_turns=3)
    said = "No action was found. The actions are: left, down, right, up."
    assert [(s.text, s.reward, s.done, s.media) for s in seen[1:3]] == [(said, -0.5, False, ())] * 2
    assert seen[1].info == {"actions": []}
    assert (seen[3].reward, seen[3].done) == (0.0, True)  # in the hole


async def test_several_moves_a_turn_until_the_end(tmp_path):
    async with opened(tmp_path) as pool:
        _, first, last = await played(pool, ["right, right, right", "right left down"], moves=2)
        (_, cut) = await played(pool, ["up"], max_turns=1)
        whole = (await played(pool, ["right right right down down"], moves=9))[-1]
        pole = {"id": "CartPole-v1", "actions": ["left", "right"], "arguments": {}, "image": False}
        summed = (await played(pool, ["left right left right"], "", moves=3, invalid_reward=-1.0, **pole))[-1]
    assert first.info == {"actions": ["right", "right"]} and not first.done
    assert last.info == {"actions": ["right"]} and last.done and last.reward == 1.0
    assert whole.info == {"actions": ["right"] * 3} and whole.reward == 1.0
    assert cut.done and cut.reward == 0.0
    assert summed.reward == 3.0 and not summed.done


async def test_names_that_begin_alike_and_other_alphabets(tmp_path):
    southward = "\u017füd"  # which is a capital S, too
    names = ["go", "go down", southward, "straße"]
    async with opened(tmp_path) as pool:
        seen = await played(pool, ["GO  DOWN", "Straße", "SÜD", "Go Down"], "", actions=names, imports=["json"])
    assert [s.info["actions"] for s in seen[1:]] == [["go"], ["straße"], [southward], ["go down"]]


async def test_observations_as_text(tmp_path):
    async with opened(tmp_path) as pool:
        seen = await played(pool, ["right", "nothing"], image=False)
        pole = await played(
            pool,
            ["left"],
            "[]",
            id="CartPole-v1",
            actions=["left", "right"],
            arguments={},
            image=False,
        )
    assert [(s.text, s.media) for s in seen[:2]] == [("0", ()), ("1", ())]
    assert len(json.loads(pole[1].text)) == 4


async def test_the_same_seed_plays_the_same_game(tmp_path):
    turns = ["down", "right", "nothing", "down", "right"]
    slippery = {"arguments": {"is_slippery": True, "map_name": "8x8"}}
    async with opened(tmp_path) as pool:
        first, again, *others = [await played(pool, turns, "", seed, **slippery) for seed in (3, 3, *range(4, 9))]
    assert again == first and any(other != first for other in others)


async def test_a_demonstration_reaches_the_goal_of_every_map():
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    for seed in range(8):
        lake = Gymnasium(arguments={"is_slippery": False}, demonstration=f"{__name__}:walked")
        lake.reset(prompt(json.dumps({"desc": generate_random_map(4, 0.6, seed)})), 0)
        seen = None
        while seen is None or not seen.done:
            seen = lake.step(lake.demonstrate())
        assert seen.reward == 1.0
        lake.close()
    with pytest.raises(ConfigError, match="demonstration is '', but importing"):
        Gymnasium().demonstrate()


async def test_a_mission_is_shown_once(tmp_path):
    pytest.importorskip("minigrid")
    grid = {"id": "BabyAI-GoToRedBallGrey-v0", "actions": ["left", "right", "forward"], "imports": ["minigrid"]}
    async with opened(tmp_path) as pool:
        seen = await played(pool, ["left", "forward"], "", arguments={}, **grid)
    assert seen[0].text == "<image>mission: go to the red ball" and seen[1].text == "<image>"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"id": "FrozenLake-v9"}, "id is 'FrozenLake-v9': .*v9"),
        ({"id": "Nothing-v0"}, "id is 'Nothing-v0': Environment `Nothing` doesn't exist"),
        ({"imports": ["no_such_module"]}, "No module named 'no_such_module'; pip install"),
        ({"actions": ["a"] * 2}, r"actions is \['a', 'a'\]; it must have different names"),
        ({"actions": []}, r"actions is \[\]; it must have"),
        ({"actions": ["a", "b", "c", "d", "e"]}, r"actions has 5 names; .* Discrete\(4\)"),
        ({"id": "Pendulum-v1", "arguments": {}, "image": False}, r"actions has 4 names; .* but is Box\(-2.0"),
        ({"moves": 0}, "moves is 0; it must be greater than 0"),
    ],
)
async def test_wrong_settings_are_named(arguments, text, tmp_path):
    async with opened(tmp_path) as pool:
        with pytest.raises(ConfigError, match=text):
            await played(pool, [], "", **arguments)


async def test_a_record_that_makes_no_game_fails_its_episode_only(tmp_path):
    async with opened(tmp_path) as pool:
        for answer in ('{"speed": 3}', '{"id": "CartPole-v1"}', '{"desc": ["SF", "F"]}'):
            with pytest.raises(EnvironmentFailure) as caught:
                await played(pool, [], answer)
            assert caught.value.fault is Fault.RAISED, answer
        assert (await played(pool, ["right"], "no JSON {"))[1].info == {"actions": ["right"]}
