#!/usr/bin/env bash
# Installs fluxjax with its test tools into .venv (made if missing) and runs the whole test suite.
#   bash scripts/test.sh                    without PyTorch: the parity tests against transformers are skipped, visibly
#   bash scripts/test.sh parity             with PyTorch and transformers
#   bash scripts/test.sh parity,aot         and with XLA's CUDA compiler, for what is compiled without a GPU; as CI does
#   bash scripts/test.sh "" -m "not slow"   further words go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
extras="test${1:+,$1}"
[ $# -gt 0 ] && shift
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
exec .venv/bin/python -m pytest "$@"
