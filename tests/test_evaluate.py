"""`python -m fluxjax.evaluate`: the numbers of the run, nothing changed in its folder, mistakes in one line."""

import json

import pytest

from fluxjax import evaluate
from fluxjax.config import cli
from fluxjax.run.trainer import FluxTrainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    config = cli.load(
        [
            "--config=configs/text.py:debug",
            f"--config.run_dir={folder}",
            "--config.steps=2",
            "--config.warm_start.steps=3",
            "--config.checkpoint.every=1",
            "--config.rollout.prompts_per_step=4",
            "--config.sharding.devices=2",
        ]
    )
    with FluxTrainer(config) as trainer:
        result = trainer.fit()
    return folder, result


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))  # the command would set one of its own


def files(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_numbers_are_those_of_the_run_and_nothing_is_changed(run, capsys):
    folder, result = run
    before = files(folder)
    assert evaluate.main(["--run", str(folder), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["step"] == 2 and out["prompts"] == {"reverse": 40}
    assert out["accuracy"] == {"reverse": result.summary.accuracy["reverse"]["end"]}
    assert files(folder) == before


def test_an_older_checkpoint_and_fewer_samples(run, capsys):
    folder, _ = run
    assert evaluate.main(["--run", str(folder), "--step", "1", "--samples", "10"]) == 0
    out = capsys.readouterr().out
    assert "step 1" in out and "of 10 held-out prompts" in out


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["--step", "99"], "99"), (["--samples", "0"], "evaluation.samples is 0")]
)
def test_mistakes(run, capsys, arguments, expected):
    folder, _ = run
    assert evaluate.main(["--run", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert evaluate.main(["--run", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
