#!/usr/bin/env bash
# One rollout server on this host, for trainers on others: SGLang, or with SERVER=rollout.serve our own engine.
#   FLUXJAX_TOKEN=SECRET bash deploy/serve.sh CHECKPOINT PORT [flags of the server]
set -euo pipefail
cd "$(dirname "$0")/.."
checkpoint="$1" port="$2" python="${PYTHON:-python}"
shift 2
: "${FLUXJAX_TOKEN:?is what trainers and servers know and nobody else; set it}"
if [ "${SERVER:-sglang}" = rollout.serve ]; then
    exec "$python" -m rollout.serve --model "$checkpoint" --host 0.0.0.0 --port "$port" "$@"
fi
# docs/servers.md says what these are for.
export SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE=fluxjax_media SGLANG_VLM_CACHE_SIZE_MB=0
export SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 PYTHONPATH="$PWD/rollout/sglang_plugin"
exec "$python" -m sglang.launch_server --model-path "$checkpoint" --host 0.0.0.0 --port "$port" \
    --api-key "$FLUXJAX_TOKEN" --dtype bfloat16 --skip-server-warmup "$@"
