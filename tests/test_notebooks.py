"""Every notebook runs from top to bottom, as somebody who opens it would run it; at each landing, one of them."""

import os
import pathlib
import re
import socket

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
TURNS = {"first_light": (0,), "flex_ulysses": (1, 2)}
assert NOTEBOOKS


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
    assert_pictures(notebook)


def assert_pictures(notebook: nbformat.NotebookNode) -> None:
    """A cell that shows pictures has them as PNG: text in their place is a display, too."""
    shows = re.compile(r"display\((figure|draw|Image)|^Image\(", re.M)
    showing = [cell for cell in notebook.cells if shows.search(cell.source)]
    assert showing
    for cell in showing:
        shown = [output.data for output in cell.outputs if output.output_type in ("display_data", "execute_result")]
        assert shown and all("image/png" in data for data in shown), cell.source


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_is_committed_with_outputs(file):
    """Outputs come from the code beside them, run in order and without an error, and name no folder of a machine."""
    notebook = nbformat.read(file, as_version=4)
    assert_pictures(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error"
        text = output.get("text", "") + "".join(v for k, v in output.get("data", {}).items() if k.startswith("text/"))
        assert not re.search(r"(?<![\w.])(~|[A-Z]:\\|/)(?:[\w.-]+/)+[\w.-]+", text), text
        assert socket.gethostname() not in text
