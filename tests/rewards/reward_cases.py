"""Scores one text by a reward that is an object or a function."""

import asyncio
import inspect

from fluxjax.base.scored import Completion, Prompt
from fluxjax.base.types import Response

PROMPT = Prompt("p1", "s", "?", "12")


def scored(reward, answer, text, question="?", num_tokens=0):
    prompt = Prompt("p1", "s", question, answer)
    if inspect.isfunction(reward):
        return reward(prompt, text)
    return asyncio.run(reward.score(Completion(prompt, text, num_tokens)))


def response(*ids, draw=0, sample=0):
    return Response("r", draw, sample, ids, (0.0,) * len(ids), (0,) * len(ids), "stop")


HOSTILE = [
    "",
    " " * 10**6,
    "\\boxed{" * 150_000,
    "{" * 10**6,
    "[" * 10**6,
    "[1," * 300_000,
    "(A) " * 250_000,
    "answer " * 150_000,
    "answer is " * 100_000,
    "<answer>" * 125_000,
    "</answer>" * 110_000,
    "9" * 10**6,
    "1," * 500_000,
    "1,111" * 200_000,
    "1/" * 500_000,
    "A" * 10**6,
    "," * 10**6,
    "-" * 10**6,
    "." * 10**6,
    "é́" * 300_000,
    "\u0663\u0664",  # Arabic digits
    "\uff15",  # a full-width 5
    "\u00b2",  # a superscript: isdigit, and no int
    "\\boxed{NaN}",
    "\\boxed{inf}",
    "nan",
    "-Infinity",
    "1e999999999",
    "\\boxed{1e-400}",
    "\\boxed{1/0}",
    "\\boxed{" + "9" * 5000 + "}",
    "\\boxed{" + "\\frac{1}{" * 3000 + "}" * 3001,
    "\x00\x01\ufffe",
    "\ud800 a lone surrogate",
    "\\boxed{\ud800}",
]
"""Texts that a model may write to no good end."""
