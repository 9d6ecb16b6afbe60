"""Tools as users might write them, good and bad."""

import asyncio
import io
import os
import typing

import numpy as np
from PIL import Image


def png(colour="green"):
    content = io.BytesIO()
    Image.new("RGB", (8, 4), colour).save(content, "png")
    return content.getvalue()


async def add(a: int, b: float = 0.5, *, unit: typing.Literal["m", "cm"] = "m") -> str:
    """Adds two lengths."""
    await asyncio.sleep(0)
    return f"{a + b:g} {unit}"


def echo(text: str, times: int = 1, tags: list[str] | None = None):
    return text * times if tags is None else [text, *tags]


def data(kind: str):
    kinds = {
        "numbers": {"a": np.arange(3), "b": np.float32(0.5), "c": [1, None, True]},
        "list": [1, 2],
        "nothing": None,
        "empty": [],
        "texts": ["a", "b"],
        "images": ["first", png(), "then", np.zeros((4, 8, 3), np.uint8), Image.new("L", (8, 4))],
        "many images": [png()] * 30,
        "much text": "x" * 100_000,
        "half a surrogate": "a\ud800b",
        "corrupt image": png()[:40],
        "marks": "<image> and <video>",
    }
    return kinds[kind]


def sizes(images: list, factor: int = 1):
    return [[image.mode, image.width * factor, image.height * factor] for image in images]


def fails(how: str):
    if how == "exits":
        os._exit(3)
    raise {
        "value": ValueError("no such value"),
        "key": KeyError("x"),
        "zero": ZeroDivisionError(),
        "disk": OSError("full"),
    }[how]


def nothing():
    """Does nothing."""


NUMBER = 3
