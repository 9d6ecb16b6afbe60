#!/usr/bin/env bash
# Compares our losses and advantages with those of verl and TRL, whose packages it puts into .peers (a minute, once).
# PyTorch and transformers are those of the `parity` extra: run `bash scripts/test.sh parity` first. Words go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(
    "verl==0.9.1" "trl==1.16.0" accelerate antlr4-python3-runtime==4.9.3 certifi cloudpickle codetiming datasets dill
    hydra-core jsonschema msgpack multiprocess omegaconf orjson pandas pyvers ray requests tensordict urllib3 xxhash
)
export FLUXJAX_PEERS="$PWD/.peers/$(echo "${packages[@]}" | cksum | cut -d' ' -f1)"
if [ ! -d "$FLUXJAX_PEERS" ]; then # complete or not there
    rm -rf .peers/unfinished
    .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check install --no-deps --target .peers/unfinished \
        "${packages[@]}"
    mv .peers/unfinished "$FLUXJAX_PEERS"
fi
exec .venv/bin/python -m pytest -n 0 tests/test_peers.py "$@"
