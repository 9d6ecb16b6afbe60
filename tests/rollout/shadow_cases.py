"""Prompts whose pixels are elsewhere, and who has them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np

from models.inputs import ModelInput
from models.shadow import Rows, ShadowTensor


class Elsewhere:
    """Has the pixels of prompts, and notes what is asked for. `hook` sees each call first, and may raise."""

    def __init__(self, hook: Callable[[Sequence[Rows]], None] = lambda rows: None) -> None:
        self._patches: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()
        self.hook = hook
        self.calls: list[int] = []  # patches that each call asked for
        self.tickets: list[str] = []

    def shadow(self, prompt: ModelInput, name: str, parts: int = 1) -> ModelInput:
        """The same prompt without its pixels: they are those of `parts` tickets."""
        assert prompt.vision is not None
        patches_PX = prompt.vision.patches_PX
        tensors = []
        for number, part in enumerate(np.array_split(patches_PX, parts)):
            self._patches[f"{name}.{number}"] = part.copy()
            tensors.append(ShadowTensor.of(f"{name}.{number}", part.shape, part.dtype))
        vision = dataclasses.replace(prompt.vision, patches_PX=np.concatenate(tensors))
        return dataclasses.replace(prompt, vision=vision)

    def fetch(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        with self._lock:
            self.calls.append(sum(map(len, rows)))
            self.tickets += [each.ticket for each in rows]
        self.hook(rows)
        return [self._patches[each.ticket][each.start : each.stop] for each in rows]
