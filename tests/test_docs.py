"""What the documents say must be there: every module in the structure, every command's module in the README."""

import ast
import importlib
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("fluxjax", "rollout", "models", "sharding")


@pytest.mark.medium
def test_every_module_has_a_line_and_the_structure_names_files_that_exist():
    command = [sys.executable, str(ROOT / "scripts" / "module_tables.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            assert f"| `{file.relative_to(ROOT)}` | " in printed or not file.read_text(), file
    for document in ("structure", "parallelism"):
        text = (ROOT / "docs" / f"{document}.md").read_text()
        for file in re.findall(
            r"`((?:fluxjax|rollout|models|sharding|examples|scripts|docs|tests)/[\w/.]+\.\w+)`", text
        ):
            assert (ROOT / file).exists(), f"docs/{document}.md: {file}"


def test_commands_of_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    modules = set(re.findall(r"python -m (\w+\.\w+)", text))
    assert modules >= {"fluxjax.train", "fluxjax.evaluate", "models.generate"}
    assert all(importlib.util.find_spec(module) for module in modules)
    for file in re.findall(r"(?:configs|docs|scripts|notebooks)/[\w.]+\.\w+", text):
        assert (ROOT / file).exists(), file


SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_name_files_that_exist_and_words_of_their_tests(script):
    for command in re.sub(r"\\\n", " ", script.read_text()).splitlines():
        named = re.findall(r"(?<![\w./])(?:tests|benchmarks|examples|configs|scripts)/[\w./*{},-]*[\w}/*]", command)
        expand = ["bash", "-c", "printf '%s\\n' " + " ".join(named)]  # braces and stars
        files = subprocess.run(expand, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        assert not [file for file in files if not (ROOT / file).exists()], command
        texts = "".join((ROOT / file).read_text() for file in files if file.endswith(".py"))
        for words in re.findall(
            r'tests?\b.* -k ("[^"]+"|\w+)', command
        ):  # pytest's choice by name: an empty one exits 5
            assert all(word.strip() in texts for word in words.strip('"').split(" or ")), command


def test_the_default_run_takes_the_same_time_everywhere():
    for file in ("README.md", "CHANGELOG.md", "configs/vlm.py"):
        text = " ".join((ROOT / file).read_text().split())
        assert re.findall(r"([\w.]+ to [\w.]+) \w+ on two idle CPU cores", text) == ["425 to 450"], file


def test_imports_of_the_readme_work():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    imports = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        for alias in node.names:
            assert node.module is not None
            module = importlib.import_module(node.module)
            name = f"{node.module}.{alias.name}"
            assert hasattr(module, alias.name) or importlib.util.find_spec(name), name
