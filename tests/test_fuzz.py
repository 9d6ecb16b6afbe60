"""A short draw of each fuzzer: `python -m tests.fuzz` draws more of them."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys

import pytest
from fuzz.__main__ import KINDS

from fluxjax.data import locations
from fluxjax.data.flight_wire import BadQuestion, refusal
from models.processing.media_file import MediaError

TESTS = pathlib.Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of libraries that were given damaged files
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_ends_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(TESTS), str(TESTS / "rollout"), *sys.path])
    module = importlib.import_module(f"fuzz.{kind}")
    assert module.run(module.DRAWS, 0) == []


@pytest.mark.parametrize("path", ["\ud800.png", "a\0b.png"])
def test_a_path_that_no_file_has_is_one_line(path: str) -> None:
    with pytest.raises(OSError, match="is no name of a file"):
        locations.stamp_of(path)
    str(MediaError(path, "is missing")).encode()  # it can be printed
    for error in (MediaError(path, "is missing"), BadQuestion(path)):
        str(refusal(error)).encode()
