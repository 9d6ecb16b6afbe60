"""Rules of style that a reader relies on and no linter knows: how docstrings begin, and that one name is one thing."""

import ast
import collections
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("fluxjax", "models", "sharding", "rollout")
# A sentence begins with its subject or its verb.
OPENINGS = {"What", "Whether", "With", "Of", "Those", "How", "Where", "Who", "Which"}
EMPTY_NAMES = {"one", "made", "own", "other", "others", "both", "each", "these", "those"}
OF_ARCHITECTURES = ("modeling.py", "params.py", "positions.py")  # each folder of models/ may have its own
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files(*folders: str) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def places(path: pathlib.Path, lines: list[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in lines]


@pytest.mark.medium
@pytest.mark.parametrize("folder", [*PACKAGES, "benchmarks", "examples"])
def test_docstrings_begin_with_a_subject_or_a_verb(folder):
    found = []
    for path in files(folder):
        documented = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED)]
        texts = [(getattr(node, "lineno", 1), ast.get_docstring(node) or "") for node in documented]
        found += places(path, [(line, text.splitlines()[0]) for line, text in texts if text and opens(text)])
    assert not found, "\n".join(found)


def opens(text: str) -> bool:
    return text.split(maxsplit=1)[0].strip(",.:;") in OPENINGS


@pytest.mark.medium
@pytest.mark.parametrize("folder", [*PACKAGES, "benchmarks", "examples"])
def test_variables_are_named_for_what_they_hold(folder):
    found = []
    for path in files(folder):
        named = [(line, name) for line, name in names(ast.parse(path.read_text())) if name in EMPTY_NAMES]
        found += places(path, named)
    assert not found, "\n".join(found)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines and names of all variables, parameters and functions, but for operands, as `__eq__` has them."""
    operands = set()
    for node in ast.walk(tree):  # a function comes before its parameters
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
            if node.name.startswith("__") and node.name != "__init__":
                operands |= set(node.args.args)
        elif isinstance(node, ast.arg) and node not in operands:
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


@pytest.mark.medium
def test_no_file_and_no_class_has_the_name_of_another():
    bearers = collections.defaultdict(list)
    for path in files(*PACKAGES):
        place = str(path.relative_to(ROOT))
        if not path.name.startswith("__"):
            bearers[path.name].append(place)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bearers[node.name].append(place)
    for name in OF_ARCHITECTURES:
        elsewhere = [place for place in bearers[name] if pathlib.PurePath(place).parts[::2] != ("models", name)]
        bearers[name] = elsewhere + ["models/*"] * bool(elsewhere)
    assert not {name: found for name, found in bearers.items() if len(found) > 1}
