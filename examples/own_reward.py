"""A reward of your own: right letters in the wrong order earn something, too.

    python examples/own_reward.py
    python examples/own_reward.py --config.steps=50          every setting of fluxjax.train

A reward is a function of the prompt and the text of one response; it returns a number (1 counts as correct) or a
`Reward`. The configuration names it as `module:function`. It may also be a coroutine, for instance to ask a server;
docs/rewards.md has more.
"""

import sys

from fluxjax.config import cli
from fluxjax.rewards import Prompt, Reward


def letters_then_order(prompt: Prompt, text: str) -> Reward:
    """Half a mark for the letters of the answer in any order, the other half for the order."""
    answer = prompt.answer
    letters = sum(min(text.count(letter), answer.count(letter)) for letter in set(answer)) / max(len(answer), len(text))
    in_place = sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)
    return Reward(value=0.5 * letters + 0.5 * in_place, correct=text == answer)


def main() -> None:
    from fluxjax.run.trainer import FluxTrainer  # here, because the processes that score import this file, too

    config = cli.load(["--config=configs/text.py:debug", *sys.argv[1:]])
    config.data.sources["reverse"].reward = "own_reward:letters_then_order"
    with FluxTrainer(config) as trainer:
        prompt = Prompt(id="p", source="reverse", text="", answer="dcba")
        for text in ("dcba", "dcab", "abcd", "xyz"):
            print(f"answer dcba, response {text}: reward {letters_then_order(prompt, text).value:.2f}")
        trainer.fit()
    print(f"scored by {config.data.sources['reverse'].reward}; the samples are in {trainer.run_dir}/samples")


if __name__ == "__main__":
    main()
