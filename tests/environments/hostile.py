"""Environments as users might write them, good and bad."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
from PIL import Image

from fluxjax.environments import Observation

leaked = []
Wrong: Any = Observation  # whose fields get values of other types


def picture(seed, size=12):
    return np.random.default_rng(seed).integers(0, 256, (size, size + 4, 3), np.uint8)


class Counter:
    """Counts the turns from the seed; says the prompt and its process."""

    def __init__(self, turns=3):
        self.turns = turns

    def reset(self, prompt, seed):
        self.count = seed
        self.end = seed + self.turns
        return Observation(f"{prompt.text} {self.count}", info={"pid": os.getpid(), "images": "jax" in sys.modules})

    def step(self, text):
        self.count += 1
        return Observation(f"{text} {self.count}", reward=0.5, done=self.count == self.end, info={"pid": os.getpid()})

    def snapshot(self):
        return json.dumps([self.count, self.end]).encode()

    def restore(self, snapshot):
        self.count, self.end = json.loads(snapshot)


class Async:
    async def reset(self, prompt, seed):
        self.answers = asyncio.Queue()
        self.worker = asyncio.create_task(self.later())
        return Observation(await self.answers.get())

    async def later(self):
        for count in range(9):
            await asyncio.sleep(0.001)
            await self.answers.put(f"answer {count}")

    async def step(self, text):
        return Observation(await self.answers.get())

    async def close(self):
        self.worker.cancel()


class Pictures:
    """Shows pictures of the seed: arrays, PIL images of several modes, encoded files, frames."""

    def reset(self, prompt, seed):
        self.pixels = picture(seed)
        return Observation("first <image> and <video>", images=[self.pixels], videos=[np.stack([self.pixels] * 3)])

    def step(self, text):
        image = Image.fromarray(self.pixels)
        content = io.BytesIO()
        image.save(content, text if text in ("png", "jpeg", "webp") else "png")
        forms = {
            "array": self.pixels,
            "image": image,
            "grey": image.convert("L"),
            "palette": image.convert("P"),
            "clear": image.convert("RGBA"),
            "cmyk": image.convert("CMYK"),
        }
        return Observation(images=[forms.get(text, content.getvalue())])


class Hostile:
    """Misbehaves in the way that the prompt (at reset) or the turn names."""

    def reset(self, prompt, seed):
        return self.step(prompt.text)

    def step(self, how):
        if how == "hangs":
            time.sleep(600)
        if how == "blocks signals and hangs":
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
            time.sleep(600)
        if how == "raises":
            raise KeyError("nothing here")
        if how == "raises what can't be said":
            raise Mute
        if how == "exits":
            sys.exit(3)
        if how == "exits at once":
            os._exit(3)
        if how == "kills itself":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leaks":
            while True:
                leaked.append(bytearray(b"x" * (1 << 24)))
                time.sleep(0.002)
        if how == "leaks a little":
            leaked.append(np.ones(150 << 20, np.uint8))  # without a second copy, whose peak is too much
        if how == "starts a child":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            return Observation(str(child.pid), info={"pid": os.getpid()})
        whole = io.BytesIO()
        Image.fromarray(picture(0)).save(whole, "jpeg")
        results = {
            "corrupt image": lambda: Wrong(images=[whole.getvalue()[:-40]]),
            "no image": lambda: Wrong(images=[b"nothing"]),
            "no video": lambda: Wrong(videos=[b"nothing"]),
            "floats": lambda: Wrong(images=[picture(0) / 255]),
            "images of another type": lambda: Wrong(images=picture(0)),
            "an image of another type": lambda: Wrong(images=["image.png"]),
            "frames of two sizes": lambda: Wrong(videos=[[picture(0), picture(0, 13)]]),
            "no frames": lambda: Wrong(videos=[[]]),
            "much text": lambda: Wrong("x" * 100_000_000),
            "much info": lambda: Wrong(info={"much": "x" * 10_000_000}),
            "many images": lambda: Wrong(images=[picture(0)] * 5),
            "many pixels": lambda: Wrong(images=[np.zeros((300, 300), np.uint8)]),
            "many encoded bytes": lambda: Wrong(images=[b"x" * 2_000_000]),
            "many frames": lambda: Wrong(videos=[np.zeros((9, 4, 4, 3), np.uint8)]),
            "another type": lambda: "some text",
            "nothing": lambda: None,
            "text of another type": lambda: Wrong(b"text"),
            "half a surrogate": lambda: Wrong("\ud800"),
            "done of another type": lambda: Wrong(done="yes"),
            "info of another type": lambda: Wrong(info={"object": object()}),
            "nan": lambda: Wrong(reward=float("nan")),
            "infinite": lambda: Wrong(reward=np.float32("inf")),
            "no number": lambda: Wrong(reward="1.0"),
            "too few marks": lambda: Wrong("<image>", images=[picture(0), picture(1)]),
        }
        return results.get(how, lambda: Observation(f"good {how}", info={"pid": os.getpid()}))()


class Mute(Exception):
    def __str__(self):
        raise ValueError


class BadSnapshots(Counter):
    def snapshot(self):
        return "text"

    def restore(self, snapshot):
        raise OSError("no state")


class ClosesBadly(Counter):
    def close(self):
        raise KeyError("still open")


def lasting(seconds):
    """A factory of environments that take `seconds` to reset."""
    environment = Counter()
    reset = environment.reset

    def slow(prompt, seed):
        time.sleep(seconds)
        return reset(prompt, seed)

    environment.reset = slow
    return environment


def needs_two(first, second):
    return Counter()


def no_environment():
    return object()


OBJECT = Counter(turns=1)
