#!/usr/bin/env bash
# Installs fluxjax with its test tools into .venv (made if missing) and runs the tests, in one process more than there are
# cores (many wait for other processes), but in four at most.
#   bash scripts/test.sh                    without PyTorch: the parity tests against transformers are skipped, visibly
#   bash scripts/test.sh parity             with PyTorch and transformers
#   bash scripts/test.sh parity,aot         and with XLA's CUDA compiler and Triton, for what is compiled without a GPU
#   bash scripts/test.sh --long ...         also a third of the tests marked `long`, by turns; as CI does, with parity,aot
#   bash scripts/test.sh --all ...          everything: what CI leaves to its other two turns (tests/turns.py), and shapes are checked
#   bash scripts/test.sh "" -m "not medium" further words go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
lane=(-m "not long")
case "${1:-}" in
--long) lane=() && shift ;;
--all) lane=() && all=1 && shift ;;
esac
if [ -z "${all:-}" ]; then
    export FLUXJAX_TURN="${FLUXJAX_TURN:-$(($(git rev-list --count HEAD 2>/dev/null || echo 0) % 3))}"
    export FLUXJAX_SHAPE_CHECKS="${FLUXJAX_SHAPE_CHECKS:-0}" # the newest lane checks them
fi
extras="${1:-}"
[ $# -gt 0 ] && shift
pip() { .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check "$@"; }
[ -x .venv/bin/python ] || python3 -m venv .venv
case ",$extras," in *,aot,*) aot=1 ;; *) aot= ;; esac
extras="$(tr , '\n' <<<"$extras" | { grep -vx aot || true; } | paste -sd, -)"
pip install -e ".[test${extras:+,$extras}]"
if [ "$aot" ]; then
    FLUXJAX_AOT="$(bash scripts/install_aot.sh .venv/bin/python cuda12)"
    export FLUXJAX_AOT
fi
export PYTEST_XDIST_AUTO_NUM_WORKERS="${PYTEST_XDIST_AUTO_NUM_WORKERS:-$(($(nproc 2>/dev/null || sysctl -n hw.ncpu) + 1))}"
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "${lane[@]}" "$@"
