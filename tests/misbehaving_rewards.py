"""Rewards that go wrong in every way, for a real run."""

import asyncio
import ctypes
import os
import sys
import time


def hangs(prompt, text):
    time.sleep(600)
    return 1.0


def raises(prompt, text):
    raise KeyError("nothing here")


def answers_nan(prompt, text):
    return float("nan")


def allocates(prompt, text):
    grown = []
    while True:
        grown.append(bytearray(1 << 24))


def crashes(prompt, text):
    ctypes.string_at(0)


def exits(prompt, text):
    sys.exit(3)


def forks(prompt, text):
    """And both come back."""
    os.fork()
    return float(len(text) % 3)


async def blocks(prompt, text):
    time.sleep(600)
    return 1.0


async def refuses_to_end(prompt, text):
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue


for function in (hangs, blocks, refuses_to_end):
    function.kind = "hanging"


class AnswersTwice:
    def compute(self, prompts, responses):
        return [1.0] * (2 * len(responses))


def slow(prompt, text):
    time.sleep(0.2)
    return float(len(text) % 3)
