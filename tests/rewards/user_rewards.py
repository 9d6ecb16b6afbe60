"""Rules as a user might write them, good and bad."""

import asyncio
import os
import threading
import time

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


def huge(prompt, text):
    return 10**400


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


async def blocks_its_loop(prompt, text):
    released.wait()
    return 1.0


async def never_stops(prompt, text):
    while True:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue


async def cancels_itself(prompt, text):
    raise asyncio.CancelledError


# --- for processes: no events from outside ------------------------------------------------------


def process(prompt, text):
    return Reward(float(os.getpid()), True, parts={"length": len(text)})


def misbehaves(prompt, text):
    """As the text says."""
    if "hang" in text:
        time.sleep(600)
    if "raise" in text:
        raise KeyError("nothing here")
    if "nan" in text:
        return float("nan")
    if "allocate" in text:
        grown = []
        while True:
            grown.append(bytearray(1 << 24))
    if "twice" in text:
        os.fork()
    if "list" in text:
        return [1.0, 0.0]
    if "die" in text:
        os._exit(3)
    return 1.0


def scaled(prompt, text, factor=1.0):
    return factor * len(text)


class Counts:
    """Has a state, and is closed."""

    def __init__(self, start=0):
        self.count, self.closed = start, False

    async def score(self, completion):
        self.count += 1
        return Reward(float(self.count), completion.finish == "stop", f"{completion.num_tokens} tokens")

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def close(self):
        self.closed = True


class Lengths:
    """Scores batches, and keeps how large they were."""

    def __init__(self, answers="right"):
        self.answers, self.sizes = answers, []

    def compute(self, prompts, responses):
        assert len(prompts) == len(responses)
        self.sizes.append(len(responses))
        values = [float(len(response)) for response in responses]
        if self.answers == "hangs":
            time.sleep(600)
        if self.answers == "one too many":
            return [*values, 1.0]
        if self.answers == "nan":
            return [float("nan") if value == 2 else value for value in values]
        return values


class Plain:
    def score(self, completion):
        return 0.5


class Refuses:
    def __init__(self):
        raise RuntimeError("no such model")

    def score(self, completion):
        return 0.5
