"""The three sibling packages have common names: another one on the path must end in a clear ImportError."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_shadowing_package_is_named(tmp_path):
    impostor = tmp_path / "models"
    impostor.mkdir()
    (impostor / "__init__.py").write_text("")
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import fluxjax"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode != 0
    assert "ImportError" in run.stderr and str(impostor) in run.stderr
