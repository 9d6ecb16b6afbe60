"""What a simulated engine must be told about the hardware it runs on."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class EngineCost(Protocol):
    """What steps take on an engine of `degree` GPUs, in seconds."""

    def step_seconds(self, batch: int, degree: int) -> float:
        """A decode step of so many samples, without reading the cache; more than 0."""
        ...

    def kv_seconds(self, degree: int) -> float:
        """Reading one token of the cache, in a decode step."""
        ...

    def prefill_seconds(self, tokens: int, degree: int) -> float:
        """Computing so many tokens at once."""
        ...

    def kv_limit(self, degree: int) -> int:
        """Tokens that the cache holds."""
        ...
