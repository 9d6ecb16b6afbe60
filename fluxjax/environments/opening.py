"""Asks environments for the first observations of their prompts, which the model sees behind the prompt's text."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping

from models.processing import Processor
from models.processing.media_file import PromptError

from ..base.errors import ConfigError
from ..base.scored import Prompt, request_seed
from ..config.data import DataConfig
from ..data.loader import Drawn, SkippedPrompt
from ..rewards.calls import UsersLoop
from .environment_pool import EnvironmentPool, Observed
from .observation import EnvironmentFailure

_AT_ONCE = 4  # environments, in processes of their own: a draw must not wait for episodes that wait for the draw


class Openings:
    """Opens prompts of sources with environments: names the environment, and adds its first observation. All
    environments of a prompt begin with the same seed, and must begin alike. `seed` is that of the run."""

    def __init__(
        self,
        data: DataConfig,
        folder: pathlib.Path,
        processor: Processor,
        seed: int,
        note: Callable[[str, str], None] = lambda environment, text: None,
    ) -> None:
        """`folder` and `note` are those of `EnvironmentPool`, whose errors are raised."""
        count = min(data.environments.concurrency, _AT_ONCE, os.cpu_count() or 1)
        self._sources, self._processor, self._seed = data.sources, processor, seed
        self._pool = EnvironmentPool(folder, dataclasses.replace(data.environments, concurrency=count), note=note)
        self._loop = UsersLoop()

    def __call__(self, drawn: Drawn) -> Drawn:
        """Opens a prompt. Returns a `SkippedPrompt` if the environment fails to begin. Blocks; any thread but the
        loop's may call. Raises ConfigError and DataError."""
        if isinstance(drawn, SkippedPrompt) or not (name := self._sources[drawn.source].environment):
            return drawn
        prompt = dataclasses.replace(drawn, environment=name, context=self._sources[drawn.source].context)
        try:
            seen = self._loop.submit(self._first, prompt).result()
        except EnvironmentFailure as failure:
            return SkippedPrompt(prompt, f"the environment {name} failed to begin", failure.reason)
        except ConfigError as error:
            raise ConfigError(f"data.sources.{drawn.source}: {error}") from None
        if seen.done:
            return SkippedPrompt(prompt, f"the environment {name} is done before the first turn", "")
        if spells_added(self._processor, seen.text):
            return SkippedPrompt(prompt, f"the environment {name} begins with a special token", repr(seen.text)[:200])
        return prompt.opened(seen.text, seen.media)

    async def _first(self, prompt: Prompt) -> Observed:
        arguments: Mapping[str, object] = self._sources[prompt.source].environment_arguments
        seed = request_seed(self._seed, prompt.draw)
        episode = await self._pool.start(prompt.environment, prompt, seed, arguments)
        await episode.end()
        return episode.observation

    def close(self) -> None:
        self._loop.submit(self._pool.close).result()
        self._loop.close()


def spells_added(processor: Processor, text: str) -> bool:
    """Says whether a text would be tokenised with an added token, such as `<|im_end|>`, that it only spells."""
    try:
        ids = processor.encode(text)
    except PromptError:  # the prompt is skipped for this
        return False
    return not processor.tokenizer.get_added_tokens_decoder().keys().isdisjoint(ids)
