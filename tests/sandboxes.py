"""The sandbox of the tests: bubblewrap, without which they are skipped unless FLUXJAX_REQUIRE_BWRAP is set."""

import os

import pytest

from fluxjax.base.errors import ConfigError
from fluxjax.rewards.sandbox import Bubblewrap


def bubblewrap(slots: int = 4) -> Bubblewrap:
    try:
        return Bubblewrap(slots=slots)
    except ConfigError as error:
        if os.environ.get("FLUXJAX_REQUIRE_BWRAP"):
            raise
        pytest.skip(f"needs bubblewrap (scripts/install_bubblewrap.sh): {error}")
