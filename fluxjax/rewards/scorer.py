"""Scoring of responses: the rewards of each source, protected from rewards that raise, hang or answer nonsense."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..base.errors import ConfigError
from ..base.scored import Completion, Prompt, Response, Reward
from ..config import RewardsConfig, SourceConfig
from ..config.data import term_weights
from .failures import Failures
from .guarded import GuardedReward, RewardGuard
from .measures import Measures
from .named import SHAPES, find, is_reward
from .users_loop import UsersLoop, in_daemon_thread
from .weighted_sum import WeightedSum

log = logging.getLogger("fluxjax.rewards")

RewardFunction = Callable[[Prompt, str], Reward | float | Awaitable[Reward | float]]

_KEPT = 65_536  # prompts of which the progress is remembered: far more than are in flight
_LOOKED_AT = 500  # answers of a source that are read before a run begins
_CLOSING_SECONDS = 5.0  # that the `close` of a reward may take


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
        self._progress, self._note, self._give_up = progress, note, give_up
        self._users_loop = UsersLoop()
        self._guard = RewardGuard(self._settings, self._users_loop)
        self._failures: list[Failures] = []
        self._begun: dict[int, float] = {}  # by draw: the progress when the first of its responses was scored
        given = dict(given or {})
        if unknown := given.keys() - sources.keys():
            raise ConfigError(f"rewards: there is no source {', '.join(sorted(unknown))}, only {', '.join(sources)}")
        self._training = {name: self._summed(name, source, given.get(name)) for name, source in sources.items()}
        self._held_out = {
            name: WeightedSum({"": self._named(name, source.eval_reward, f"data.sources.{name}.eval_reward")}, {})
            if source.eval_reward
            else self._training[name]
            for name, source in sources.items()
        }
        self._measures = Measures(self._guard.slots, self._failures, self._guard.counting)

    def check_answers(self, texts: Mapping[str, Iterable[str]], held_out: bool = False) -> None:
        """Takes in the prompts and answers of each source, by turns, and warns of those of the first 500 answers that a
        reward can't grade. Raises `ConfigError` where their share is above `rewards.max_unreadable`."""
        for name, prompts_and_answers in texts.items():
            some = list(itertools.islice(prompts_and_answers, 2 * _LOOKED_AT))
            pairs = [(text, answer) for text, answer in zip(some[::2], some[1::2], strict=True) if answer]
            prompts = [Prompt("", name, text, answer) for text, answer in pairs]  # a record without one is skipped
            for reward in (self._held_out if held_out else self._training)[name].rewards.values():
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
        return await self._measured(self._held_out[prompt.source], Completion(prompt, text), self._progress())

    async def _measured(self, rewards: WeightedSum, completion: Completion, progress: float) -> Reward:
        if not rewards.takes_time:
            return await rewards.score(completion, progress)
        with self._measures.response():
            return await rewards.score(completion, progress)

    def _of_prompt(self, draw: int) -> float:
        """Returns the progress by which a prompt is weighed: samples of one group are compared, by the same weights."""
        if draw not in self._begun:
            self._begun[draw] = self._progress()
            if len(self._begun) > _KEPT:
                del self._begun[next(iter(self._begun))]
        return self._begun[draw]

    def metrics(self) -> dict[str, float]:
        """Returns what rewards did since the last call, by the names in `metrics.jsonl`; see `Measures`."""
        return self._measures.since_last()

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON: what rewards want to have kept, and by which progress prompts are weighed."""
        return {
            "begun": [[draw, progress] for draw, progress in self._begun.items()],
            "training": {name: rewards.state_dict() for name, rewards in self._training.items()},
            "held_out": {name: rewards.state_dict() for name, rewards in self._apart()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; checkpoints of earlier releases have nothing."""
        self._begun = dict(state.get("begun", []))
        for name, rewards in self._training.items():
            rewards.load_state_dict(state.get("training", {}).get(name, {}))
        for name, rewards in self._apart():
            rewards.load_state_dict(state.get("held_out", {}).get(name, {}))

    def _apart(self) -> Iterator[tuple[str, WeightedSum]]:
        """The rewards of held-out prompts, of those sources where they are not the rewards of training."""
        for name, rewards in self._held_out.items():
            if rewards is not self._training[name]:
                yield name, rewards

    def close(self) -> None:
        """Ends processes and threads; calls `close` of the rewards that have it, and waits a moment for that."""
        sums = [*self._training.values(), *(rewards for _, rewards in self._apart())]
        for reward in [reward for rewards in sums for reward in rewards.rewards.values()]:
            if reward.caller is not None:
                reward.caller.close()
            if callable(close := getattr(reward.reward, "close", None)):
                try:
                    in_daemon_thread(close).result(_CLOSING_SECONDS)
                except Exception as error:  # whatever a user's `close` raises, or TimeoutError
                    log.warning("closing reward %s: %s: %s", reward.name, type(error).__name__, error)
        self._users_loop.close()

    # --- building -------------------------------------------------------------------------------

    def _summed(self, name: str, source: SourceConfig, given: Any) -> WeightedSum:
        field = f"data.sources.{name}"
        if not source.rewards:
            return WeightedSum({"": self._named(name, source.reward, f"{field}.reward", given=given)}, {})
        given = dict(given) if isinstance(given, Mapping) else {"": given} if given is not None else {}
        if unknown := given.keys() - source.rewards.keys():
            raise ConfigError(
                f"rewards: source {name} has the rewards {', '.join(source.rewards)}; give a dictionary with some of "
                f"these names, not {', '.join(map(repr, sorted(unknown)))}"
            )
        rewards = {}
        for term, settings in source.rewards.items():
            where = f"{field}.rewards.{term}.reward"
            rewards[term] = self._named(name, settings.reward or term, where, settings.arguments, given.get(term))
        return WeightedSum(rewards, term_weights(source.rewards, f"{field}.rewards"))

    def _named(
        self, source: str, reward: str, field: str, arguments: Mapping[str, Any] | None = None, given: Any = None
    ) -> GuardedReward:
        name = reward if given is None else getattr(given, "__qualname__", type(given).__qualname__)
        failures = Failures(source, name, self._settings.max_failed, self._note, self._give_up)
        self._failures.append(failures)
        if given is None:
            return self._guard.of_found(find(reward, field, arguments), failures)
        if not is_reward(given) or isinstance(given, type):
            raise ConfigError(f"rewards: what is given for source {source} is {given!r}; it must be {SHAPES}")
        return self._guard.of_object(name, given, failures)
