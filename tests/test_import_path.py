"""What libraries find when they are imported."""

import subprocess
import sys

import pytest
from conftest import ROOT

from fluxjax.base.import_path import as_if_missing


def test_a_package_is_missing_for_a_while():
    sys.modules.pop("colorsys", None)
    with as_if_missing("colorsys"), pytest.raises(ImportError):
        import colorsys
    import colorsys

    with as_if_missing("colorsys"):
        import colorsys as still_there
    assert still_there is colorsys is sys.modules["colorsys"]


@pytest.mark.slow
def test_a_run_does_not_import_pytorch():
    """It takes a second and 200 MB of every process, where it is installed."""
    code = "import sys, fluxjax.run.main; print('torch' in sys.modules, 'tensorboardX' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False", "True"]


def test_shadowing_package_is_named(tmp_path):
    """Our packages have common names."""
    impostor = tmp_path / "models"
    impostor.mkdir()
    (impostor / "__init__.py").write_text("")
    script = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import fluxjax"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode != 0
    assert "ImportError" in run.stderr and str(impostor) in run.stderr
