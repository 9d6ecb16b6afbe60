"""What the documents say must be there: every module in the structure, every command's module in the README."""

import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("fluxjax", "rollout", "models", "sharding")


def test_every_module_has_its_line_in_the_structure():
    text = (ROOT / "docs" / "structure.md").read_text()
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE))
    files = {str(file.relative_to(ROOT)) for name in PACKAGES for file in (ROOT / name).rglob("*.py")}
    files = {file for file in files if (ROOT / file).read_text().startswith('"""')}
    assert files - listed == set(), "modules without a line in docs/structure.md"
    assert {file for file in listed if not (ROOT / file).exists()} == set(), "lines without a module"


def test_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    modules = set(re.findall(r"python -m (\w+\.\w+)", text))
    assert modules >= {"fluxjax.train", "fluxjax.evaluate", "models.generate"}
    assert all(importlib.util.find_spec(module) for module in modules)
    for file in re.findall(r"(?:configs|docs|scripts|notebooks)/[\w.]+\.\w+", text):
        assert (ROOT / file).exists(), file
