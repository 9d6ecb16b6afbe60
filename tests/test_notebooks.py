"""Every notebook runs from top to bottom, as somebody who opens it would run it; at each landing, one of them."""

import os
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
TURNS = {"first_light": (0,), "flex_ulysses": (1, 2)}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those of the kernel machinery
@pytest.mark.parametrize(
    "file", [pytest.param(file, id=file.stem, marks=pytest.mark.turn(*TURNS[file.stem])) for file in NOTEBOOKS]
)
def test_notebook_runs(file, tmp_path, monkeypatch):
    monkeypatch.setenv("FLUXJAX_NOTEBOOK_RUN", str(tmp_path / "run"))
    notebook = nbformat.read(file, as_version=4)
    [devices] = re.findall(r"--xla_force_host_platform_device_count=\d+", file.read_text())
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {devices}")  # the last one counts
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(file.parent.parent)}}).execute()
    assert any(output.output_type == "display_data" for cell in notebook.cells for output in cell.get("outputs", []))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_is_committed_without_outputs(file):
    notebook = nbformat.read(file, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
