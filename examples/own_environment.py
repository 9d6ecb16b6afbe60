"""An environment of your own, a number to guess, is played by a script: python examples/own_environment.py

It is named as `module:attribute`, answers each turn with an `Observation`, and may hang or die without harm to others.
"""

import asyncio
import random
import tempfile

from fluxjax.environments import EnvironmentPool, Observation
from fluxjax.rewards import Prompt


class Guess:
    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.number = random.Random(seed).randrange(int(prompt.answer))
        return Observation(f"A number below {prompt.answer}: which?")

    def step(self, text: str) -> Observation:
        right = int(text) == self.number
        return Observation("right" if right else "higher" if int(text) < self.number else "lower", done=right)


async def main(folder: str) -> None:
    pool = EnvironmentPool(folder)
    episode = await pool.start("own_environment:Guess", Prompt("p", "guess", "Guess!", "100"), seed=7)
    low, high, seen = 0, 100, episode.observation
    while not seen.done:
        seen = await episode.act(str(middle := (low + high) // 2))
        print(f"{middle}: {seen.text}")
        low, high = (middle, high) if seen.text == "higher" else (low, middle)
    await episode.end()
    await pool.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as media:
        asyncio.run(main(media))
