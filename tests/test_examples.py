"""Every file of `examples/` runs as its own words say, with a smaller model for fewer steps, and shows what it did."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT
from forked import forked
from run_cases import flags

SHOWN = {
    "own_reward": "response dcab: reward 0.75",
    "own_data": "64 pictures to train on",
    "own_policy": "hopeless prompts were replaced",
    "own_algorithm": "nats a token",
    "own_environment": ": right",
    "browser_environment": "reward 1, done: True",
    "plain_loop": "step 2/2: correct",
}
WITHOUT_RUN = ("own_environment", "browser_environment", "plain_loop")  # these do not end with the last line of a run


def test_every_example_is_run() -> None:
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} == SHOWN.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, tmp_path: pathlib.Path) -> None:
    # Chromium is a package of the system, which CI lacks; without it, the example says what to install.
    if name == "browser_environment" and not (importlib.util.find_spec("miniwob") and shutil.which("chromedriver")):
        pytest.skip("needs miniwob, chromium and chromium-driver")
    command = [sys.executable, f"examples/{name}.py", f"--config.run_dir={tmp_path / 'run'}", *flags(steps=2)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with forked(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text[-4000:]
    assert SHOWN[name] in text and (name in WITHOUT_RUN or "all 2 steps are done" in text)


def test_the_readme_shows_the_loop_of_the_example() -> None:
    blocks = (ROOT / "README.md").read_text().split("```python\n")
    (shown,) = (block.partition("```")[0] for block in blocks if "learner.step(" in block)
    assert textwrap.indent(shown, "    ") in (ROOT / "examples" / "plain_loop.py").read_text()
