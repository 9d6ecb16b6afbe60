"""The list of mutants fits the code as it is. `python tests/mutants.py` runs them, which takes minutes."""

from __future__ import annotations

import pathlib
import sys
from collections import Counter

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from mutant_list import MUTANTS, Mutant
from mutants import ROOT, main, mutated, ordered


def test_every_mutant_is_possible_and_can_be_compiled() -> None:
    for mutant in MUTANTS:
        text = mutated(mutant, ROOT)
        assert text != (ROOT / mutant.file).read_text(), mutant.name
        compile(text, mutant.file, "exec")


def test_names_are_unique_and_tests_exist() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    likely, rest = ordered(ROOT, "fluxjax/coordinator/lengths.py")
    tests = likely + rest
    assert likely[0].endswith("test_lengths.py") and len(set(tests)) == len(tests) > 10
    assert all((ROOT / test).exists() for test in tests)


def test_a_mutant_that_is_no_longer_possible_is_an_error(monkeypatch, capsys) -> None:
    gone = Mutant("gone", "fluxjax/config/schedules.py", "no such line", "")
    with pytest.raises(ValueError, match="its old text is 0 times in"):
        mutated(gone, ROOT)
    monkeypatch.setattr("mutants.MUTANTS", [gone])
    assert main([]) == 1
    assert capsys.readouterr().err.startswith("error: gone: ")
