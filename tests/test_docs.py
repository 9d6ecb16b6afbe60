"""What the documents say must be there: every module in the structure, every command's module in the README."""

import importlib.util
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("fluxjax", "rollout", "models", "sharding")


def test_every_module_has_its_line_in_the_structure():
    command = [sys.executable, str(ROOT / "scripts" / "module_tables.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    text = (ROOT / "docs" / "structure.md").read_text()
    assert all(f"| `{name}/" in text for name in PACKAGES)


def test_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    modules = set(re.findall(r"python -m (\w+\.\w+)", text))
    assert modules >= {"fluxjax.train", "fluxjax.evaluate", "models.generate"}
    assert all(importlib.util.find_spec(module) for module in modules)
    for file in re.findall(r"(?:configs|docs|scripts|notebooks)/[\w.]+\.\w+", text):
        assert (ROOT / file).exists(), file
