"""Sandboxes, which run the code of responses, behind one protocol that a remote service can implement, too."""

from ...base.errors import ConfigError
from .bubblewrap import Bubblewrap
from .jobs import BareSubprocess, Sandbox
from .jobs import Outcome as Outcome
from .jobs import SandboxError as SandboxError
from .jobs import SandboxJob as SandboxJob
from .jobs import SandboxLimits as SandboxLimits


def find_sandbox(name: str, python: str | None = None, slots: int = 8) -> Sandbox:
    """Returns a sandbox by its name. Raises `ConfigError` for an unknown name, and if the sandbox cannot work here."""
    kinds = {"bubblewrap": Bubblewrap, "subprocess": BareSubprocess}
    if name not in kinds:
        raise ConfigError(f"sandbox is {name!r}; it must be bubblewrap, or subprocess, which protects nothing")
    return kinds[name](python, slots)
