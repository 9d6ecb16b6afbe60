#!/usr/bin/env bash
# Runs the tests of models, sharding, learner and engine, but the `long` ones, and a short run on four devices, with the
# newest Python that is found (3.13 or 3.12) and the newest JAX that pyproject.toml allows, in .venv-newest (made if
# missing). Says so and does nothing where there is no such Python.
#   bash scripts/test_newest.sh             all of that; with FLUXJAX_TURN, as CI has it, a third of the files
#   bash scripts/test_newest.sh tests       another choice of tests; further words go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."

newest_python() { # on PATH, or installed by pyenv and perhaps not chosen there
    local version candidate
    for version in 3.13 3.12; do
        for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
            if "$candidate" -c "import sys, venv; sys.exit(sys.version_info[:2] != (3, ${version#3.}))" 2>/dev/null; then
                echo "$candidate"
                return
            fi
        done
    done
}

python="$(newest_python)"
if [ -z "$python" ]; then
    echo "SKIPPED: the newest JAX needs Python 3.12 or later, and neither python3.13 nor python3.12 is on PATH or in pyenv"
    exit 0
fi
version="$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')"
[ "$(.venv-newest/bin/python -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null)" = "$version" ] ||
    "$python" -m venv --clear .venv-newest
.venv-newest/bin/python -m pip --quiet --quiet --disable-pip-version-check install --upgrade --upgrade-strategy eager -e ".[test]"
.venv-newest/bin/python -c 'import platform, jax; print(f"Python {platform.python_version()}, JAX {jax.__version__}")'

tests() { .venv-newest/bin/python -m pytest -q -p no:cacheprovider -n auto --maxprocesses 4 --dist worksteal "$@"; }
if [ $# -gt 0 ]; then
    tests "$@"
    exit
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
status=0
if [ "${FLUXJAX_TURN:-0}" = 0 ]; then # kernels for all architectures, with CUDA 13's names, and with jax-triton 0.4
    FLUXJAX_AOT="$(bash scripts/install_aot.sh .venv-newest/bin/python cuda13)"
    FLUXJAX_TURN='' FLUXJAX_AOT="$FLUXJAX_AOT" tests tests/sharding/test_gpu_kernels.py \
        tests/test_preflight.py::test_programs_are_traced_for_the_described_device || status=1
    FLUXJAX_AOT="$(bash scripts/install_aot.sh .venv-newest/bin/python cuda13 0.11.2)" # the newest JAX that it knows
    FLUXJAX_TURN='' FLUXJAX_AOT="$FLUXJAX_AOT" tests tests/sharding/test_gpu_kernels.py -k "gpus_call or an_h100" || status=1
fi
parts=("tests/sharding tests/test_learner.py"
    "tests/models tests/test_spread_equivalence.py tests/rollout/test_protocol.py"
    "tests/rollout tests/test_decoupled.py tests/test_layout_steps.py --ignore=tests/rollout/test_protocol.py")
if [ -n "${FLUXJAX_TURN:-}" ]; then parts=("${parts[FLUXJAX_TURN]}"); else parts=("${parts[@]% --ignore=*}"); fi
# shellcheck disable=SC2086 # parts are lists of words
tests -m "not long" ${parts[*]} || status=1
export XLA_FLAGS=--xla_force_host_platform_device_count=4
.venv-newest/bin/python -m fluxjax.train --config=configs/vlm.py:debug --config.run_dir="$work/run" \
    --config.warm_start.steps=3 --config.steps=2 || status=1
exit $status
