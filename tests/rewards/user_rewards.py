"""Rules as a user might write them, good and bad."""

import asyncio
import threading

from fluxjax.base.types import Reward

released = threading.Event()
begun = threading.Event()  # a rule hangs by now
NOT_A_FUNCTION = 3


def starts_right(prompt, text):
    return Reward(0.25, False) if text.startswith(prompt.answer) else Reward(0.0, False)


def as_bool(prompt, text):
    return text == prompt.answer


async def later(prompt, text):
    await asyncio.sleep(0)
    return 0.5


def raises(prompt, text):
    raise KeyError("nothing here")


def exits(prompt, text):
    raise SystemExit(3)


def own_timeout(prompt, text):
    raise TimeoutError("the judge's server")


def not_a_number(prompt, text):
    return float("nan")


def nonsense(prompt, text):
    return "very good"


def hangs(prompt, text):
    begun.set()
    released.wait()
    return 1.0


async def refuses_to_stop(prompt, text):
    for _ in range(50):
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            if released.is_set():
                raise
    return 1.0


async def cancels_itself(prompt, text):
    raise asyncio.CancelledError
