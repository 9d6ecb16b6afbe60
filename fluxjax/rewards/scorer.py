"""Scoring of responses: the rewards of each source, protected from rewards that raise, hang or answer nonsense."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..base.errors import ConfigError
from ..base.scored import Completion, Prompt, Response, Reward
from ..config import RewardsConfig, SourceConfig
from ..config.data import term_weights
from ..config.schedules import RunSchedule
from .guarded import GuardedReward, RewardGuard

log = logging.getLogger("fluxjax.rewards")

_KEPT = 65_536  # prompts of which the progress is remembered: far more than are in flight
_LOOKED_AT = 500  # answers of a source that are read before a run begins


@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """The rewards of a source by name, and their weights, which may change during the run; no weights: it has just one.

    Of several, the first one says what is correct. A reward that failed adds nothing to the sum.
    """

    rewards: Mapping[str, GuardedReward]
    weights: Mapping[str, RunSchedule]

    @property
    def changes(self) -> bool:
        """Says whether the sum depends on the run's progress."""
        return any(low != high for low, high in (weight.bounds for weight in self.weights.values()))

    @property
    def takes_time(self) -> bool:
        """Says whether there is more to it than built-in rules."""
        return any(reward.caller is not None for reward in self.rewards.values())

    async def score(self, completion: Completion, progress: float) -> Reward:
        """Returns the reward of a completion with the weights at `progress`, in [0, 1]; its parts are not weighted."""
        if not self.weights:
            (reward,) = self.rewards.values()
            return await reward.score(completion)
        found = await asyncio.gather(*(reward.score(completion) for reward in self.rewards.values()))
        named = dict(zip(self.rewards, found, strict=True))
        parts = {name: reward.value for name, reward in named.items()}
        parts |= {f"{name}/{part}": value for name, reward in named.items() for part, value in reward.parts.items()}
        return Reward(
            sum(self.weights[name].value(progress) * reward.value for name, reward in named.items()),
            found[0].correct,
            "; ".join(f"{name}: {reward.reason}" for name, reward in named.items() if reward.reason),
            parts,
            max(reward.seconds for reward in found),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what its rewards want to have kept in checkpoints, by name."""
        states = {name: getattr(reward.reward, "state_dict", None) for name, reward in self.rewards.items()}
        return {name: state() for name, state in states.items() if callable(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, reward in self.rewards.items():
            if name in state and callable(load := getattr(reward.reward, "load_state_dict", None)):
                load(state[name])


class Scorer:
    """Scores each response by its source's rewards; `decode` turns token ids into the text.

    The built-in rules run at once; for all other rewards see `RewardGuard`. One that raises, takes too long or returns
    neither a `Reward` nor a finite number gives a scored 0 with the reason.
    """

    def __init__(
        self,
        sources: Mapping[str, SourceConfig],
        decode: Callable[[Sequence[int]], str],
        settings: RewardsConfig | None = None,
        *,
        given: Mapping[str, Any] | None = None,
        progress: Callable[[], float] = lambda: 0.0,
        note: Callable[[str, str], None] = lambda source, text: None,
        give_up: Callable[[str], object] = log.error,
    ) -> None:
        """`given` are rewards as objects, by source, or, where that has several, by the names of these: they replace
        the configured ones. `progress` is that of the run, in [0, 1]. `note(source, text)` is told of each failure,
        `give_up` of a reward that fails too often. Raises `ConfigError`."""
        self.decode = decode
        self._settings = settings or RewardsConfig()
        self._progress = progress
        self._guard = RewardGuard(self._settings, note, give_up)
        self._begun: dict[int, float] = {}  # by draw: the progress when the first of its responses was scored
        given = dict(given or {})
        if unknown := given.keys() - sources.keys():
            raise ConfigError(f"rewards: there is no source {', '.join(sorted(unknown))}, only {', '.join(sources)}")
        self._training = {name: self._summed(name, source, given.get(name)) for name, source in sources.items()}
        self._held_out: dict[str, WeightedSum] = {}  # of sources that have rewards of their own for held-out prompts
        for name, source in sources.items():
            if source.eval_reward:
                reward = self._guard.guarded(name, source.eval_reward, f"data.sources.{name}.eval_reward")
                self._held_out[name] = WeightedSum({"": reward}, {})

    def check_answers(self, texts: Mapping[str, Iterable[str]], held_out: bool = False) -> None:
        """Takes in the prompts and answers of each source, by turns, and warns of those of the first 500 answers that a
        reward can't grade. Raises `ConfigError` where their share is above `rewards.max_unreadable`."""
        for name, prompts_and_answers in texts.items():
            some = list(itertools.islice(prompts_and_answers, 2 * _LOOKED_AT))
            pairs = [(text, answer) for text, answer in zip(some[::2], some[1::2], strict=True) if answer]
            prompts = [Prompt("", name, text, answer) for text, answer in pairs]  # a record without one is skipped
            rewards = (held_out and self._held_out.get(name)) or self._training[name]
            for reward in rewards.rewards.values():
                found = [f"{prompt.answer[:80]!r} {why}" for prompt in prompts if (why := reward.unreadable(prompt))]
                line = (
                    f"the reward {reward.name!r} of data.sources.{name} can't grade {len(found)} of the first "
                    f"{len(prompts)} {'held-out ' * held_out}answers, such as {', '.join([*dict.fromkeys(found)][:3])}"
                )
                if len(found) > self._settings.max_unreadable * len(prompts):
                    self.close()
                    share = f"a share of more than rewards.max_unreadable = {self._settings.max_unreadable:g}"
                    raise ConfigError(f"{line}: {share}; choose another reward ('math' reads formulas), or mend them")
                if found:
                    log.warning("%s: responses to such prompts score 0", line)

    # --- scoring --------------------------------------------------------------------------------

    async def score(self, prompt: Prompt, response: Response) -> Reward:
        """Returns the reward of one response. Never raises for what a reward does; `KeyError` for an unknown source.

        Up to its first wait it reads the run's progress, which decides the weights of all responses to the prompt."""
        rewards = self._training[prompt.source]
        progress = self._of_prompt(prompt.draw) if rewards.changes else 0.0
        text = self.decode(response.token_ids)
        completion = Completion(prompt, text, response.num_tokens, response.finish)
        return await self._measured(rewards, completion, progress)

    async def score_text(self, prompt: Prompt, text: str) -> Reward:
        """Returns the reward of an answer to a held-out prompt."""
        rewards = self._held_out.get(prompt.source) or self._training[prompt.source]
        return await self._measured(rewards, Completion(prompt, text), self._progress())

    async def _measured(self, rewards: WeightedSum, completion: Completion, progress: float) -> Reward:
        if not rewards.takes_time:
            return await rewards.score(completion, progress)
        with self._guard.measured():
            return await rewards.score(completion, progress)

    def _of_prompt(self, draw: int) -> float:
        """Returns the progress by which a prompt is weighed: samples of one group are compared, by the same weights."""
        if draw not in self._begun:
            self._begun[draw] = self._progress()
            if len(self._begun) > _KEPT:
                del self._begun[next(iter(self._begun))]
        return self._begun[draw]

    def metrics(self) -> dict[str, float]:
        """Returns what rewards did since the last call, by the names in `metrics.jsonl`; see `RewardGuard`."""
        return self._guard.metrics()

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON: what rewards want to have kept, and by which progress prompts are weighed."""
        return {
            "begun": [[draw, progress] for draw, progress in self._begun.items()],
            "training": {name: rewards.state_dict() for name, rewards in self._training.items()},
            "held_out": {name: rewards.state_dict() for name, rewards in self._held_out.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; checkpoints of earlier releases have nothing."""
        self._begun = dict(state.get("begun", []))
        for part, sums in (("training", self._training), ("held_out", self._held_out)):
            for name, rewards in sums.items():
                rewards.load_state_dict(state.get(part, {}).get(name, {}))

    def close(self) -> None:
        """Ends processes and threads; calls `close` of the rewards that have it, and waits a moment for that."""
        self._guard.close()

    # --- building -------------------------------------------------------------------------------

    def _summed(self, name: str, source: SourceConfig, given: Any) -> WeightedSum:
        field = f"data.sources.{name}"
        if not source.rewards:
            return WeightedSum({"": self._guard.guarded(name, source.reward, f"{field}.reward", given=given)}, {})
        given = dict(given) if isinstance(given, Mapping) else {"": given} if given is not None else {}
        if unknown := given.keys() - source.rewards.keys():
            raise ConfigError(
                f"rewards: source {name} has the rewards {', '.join(source.rewards)}; give a dictionary with some of "
                f"these names, not {', '.join(map(repr, sorted(unknown)))}"
            )
        rewards = {}
        for term, settings in source.rewards.items():
            where = f"{field}.rewards.{term}.reward"
            arguments, instead = settings.arguments, given.get(term)
            rewards[term] = self._guard.guarded(name, settings.reward or term, where, arguments, instead)
        return WeightedSum(rewards, term_weights(source.rewards, f"{field}.rewards"))
