#!/usr/bin/env bash
# Tests the rollout fleet against real SGLang servers on this machine's CPU. Needs what scripts/test.sh has installed, and
# makes .sglang, an environment of SGLang's own (tests/sglang_cpu/README.md). Further words go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install_sglang.sh
export FLUXJAX_SGLANG_PYTHON="$PWD/.sglang/bin/python"
# One process: each would start servers of its own, 2 GB each.
exec .venv/bin/python -m pytest -k sglang tests/rollout/test_protocol.py tests/rollout/test_sglang_server.py \
    tests/rollout/test_judge_engines.py tests/rollout/test_gpu_hash.py "$@"
