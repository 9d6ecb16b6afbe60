#!/usr/bin/env bash
# Downloads what a GPU machine without network lacks for benchmarks/gpu_suite.py, as wheels of Python 3.12 on Linux, and says
# their size. The machine is taken to have JAX with its CUDA plugin, Triton 3.6, PyTorch, transformers and what these need.
#   bash scripts/gpu_wheels.sh DIR [--without-av]     without av (two thirds of the bytes) no video is read: no part `loop`
set -euo pipefail
if [ $# -lt 1 ] || [ $# -gt 2 ] || [ "${2:---without-av}" != --without-av ]; then
    sed -n '2,4s/^# \?//p' "$0" >&2
    exit 2
fi
wheels=(
    grain==0.2.18 array-record==0.8.6 portpicker==1.6.0 flax==0.12.12 optax==0.2.8 orbax-checkpoint==0.12.8
    jax_triton==0.3.1 # 0.4 needs Triton 3.7
    zstandard==0.25.0 rapidfuzz==3.14.6 tensorboardx==2.6.5 starlette==1.10.0 uvicorn==0.54.0 # of fluxjax
    beartype==0.23.1 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1 # of its tests
)
[ $# = 2 ] || wheels+=(av==19.0.2)
platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do platforms+=(--platform "${platform}_x86_64"); done
python3 -m pip --quiet --disable-pip-version-check download --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" -d "$1" "${wheels[@]}"
du -ch "$1"/*.whl | sort -h
