"""The records of `configs/agent.py`, and the good turns that its warm start imitates."""

import asyncio
import inspect
import json
import pathlib
import re
import runpy
from typing import Any

import numpy as np
import pytest
from run_cases import ROOT

from fluxjax.base.medium import Media, MediaKind
from fluxjax.base.scored import Prompt
from fluxjax.config import SourceConfig
from fluxjax.environments.gymnasium_game import Gymnasium
from fluxjax.environments.tools import ToolEnvironment
from fluxjax.rewards.rules import exact, number
from fluxjax.tasks.agents import LakesRecipe, SumsRecipe, TagsRecipe, told_way
from fluxjax.tasks.embedded import ensure

SOURCES: dict[str, SourceConfig] = runpy.run_path(str(ROOT / "configs" / "agent.py"))["VARIANTS"][""]
RECIPES: dict[str, Any] = {
    "lakes": LakesRecipe(train=30, held_out=20),
    "tags": TagsRecipe(train=6, held_out=4),
    "sums": SumsRecipe(train=30, held_out=20),
}
ENVIRONMENTS = {"gymnasium": Gymnasium, "tools": ToolEnvironment}
REWARDS = {"exact": exact, "number": number}


def prompts(folder: pathlib.Path, name: str, part: str) -> list[Prompt]:
    built = ensure(name, folder, RECIPES[name])
    records = [json.loads(line) for line in (built / f"{part}.jsonl").read_text().splitlines()]
    return [
        Prompt(
            r["id"],
            name,
            r["prompt"],
            r["answer"],
            tuple(Media(MediaKind.IMAGE, str(built / path)) for path in r.get("images", ())),
        )
        for r in records
    ]


async def played(source: SourceConfig, prompt: Prompt, change: Any = str) -> tuple[list[str], list[Any]]:
    """The texts of an episode whose turns are good ones that `change` may spoil, and the observations."""
    game = ENVIRONMENTS[source.environment](**source.environment_arguments)
    seen, said = [game.reset(prompt, 0)], []
    while not seen[-1].done:
        said.append(change(game.demonstrate()))
        seen.append(await answer if inspect.isawaitable(answer := game.step(said[-1])) else answer)
    game.close()
    return said, seen


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("part", ["train", "eval"])
def test_good_turns_succeed(tmp_path: pathlib.Path, name: str, part: str):
    source, turns = SOURCES[name], set()
    for prompt in prompts(tmp_path, name, part):
        said, seen = asyncio.run(played(source, prompt))
        turns.add(len(said))
        assert not any("error" in observation.text for observation in seen)
        if source.reward == "environment":
            assert sum(observation.reward for observation in seen) == 1.0
        else:
            assert REWARDS[source.reward](prompt, said[-1]).value == 1.0
    assert turns == {"tags": {3}, "sums": {2}}.get(name, turns) and min(turns) > 1


def test_parts_share_no_record(tmp_path: pathlib.Path):
    for name in ("lakes", "sums"):
        train, held_out = ({(p.text, p.answer) for p in prompts(tmp_path, name, part)} for part in ("train", "eval"))
        assert train and held_out and not train & held_out


def test_a_lake_is_told_as_it_is_drawn():
    gymnasium = pytest.importorskip("gymnasium")
    game = gymnasium.make("FrozenLake-v1", desc=["SFH", "FHF", "FFG"], is_slippery=False).unwrapped
    game.reset(seed=0)
    told = [told_way(game)]
    for action in (1, 1):
        game.step(action)
        told.append(told_way(game))
    assert told == ["A.O .O. ..G down", "..O AO. ..G down", "..O .O. A.G right"]


def test_a_tag_is_read_where_it_was_enlarged_twice(tmp_path: pathlib.Path):
    """The last picture is of the digit alone, without a colour; the one of another place is purple."""
    [prompt, *_] = prompts(tmp_path, "tags", "eval")
    _, seen = asyncio.run(played(SOURCES["tags"], prompt))

    def elsewhere(text: str) -> str:
        """The second call enlarges the cell behind the right one."""
        return (
            text if '"image": 1' in text else re.sub(r'(?<="cell": )\d+', lambda cell: f"{int(cell[0]) % 16 + 1}", text)
        )

    _, other = asyncio.run(played(SOURCES["tags"], prompt, elsewhere))

    def purple(observations: list[Any]) -> float:
        [*_, last] = [image.convert("RGB") for observation in observations for image in observation.images]
        red, green, _ = np.moveaxis(np.asarray(last, float), 2, 0)
        return float((red - green > 30).mean())

    assert purple(seen) < 0.2 and purple(other) > 0.5  # a JPEG file blurs colours at borders
