#!/usr/bin/env bash
# Puts XLA's CUDA compiler, Triton and jax-triton into a folder below .aot, if they are not there, and prints its name: what is
# compiled for GPUs without one. Beside the environment, not in it: there, JAX would look for GPUs at every start and complain.
#   bash scripts/install_aot.sh PYTHON cuda12          for this interpreter's jaxlib; or cuda13
#   bash scripts/install_aot.sh PYTHON cuda13 0.11.2   for this JAX, which is put there, too, with jax-triton 0.4
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 cuda=$2 others=("jax-triton>=0.3.1,<0.4" "triton>=3.6,<3.8")
version="${3:-$("$python" -c 'import jaxlib; print(jaxlib.__version__)')}"
folder="$PWD/.aot/$version-triton"
[ "$cuda" = cuda12 ] || folder="$PWD/.aot/$version-$cuda-triton"
[ $# -lt 3 ] || others=("jax==$version" "jaxlib==$version" "jax-triton>=0.4,<0.5" "triton>=3.7,<3.8") folder="$folder-0.4"
if [ ! -d "$folder" ]; then # complete or not there
    rm -rf .aot/unfinished
    "$python" -m pip --quiet --quiet --disable-pip-version-check install --no-deps --target .aot/unfinished \
        "jax-$cuda-plugin==$version" "jax-$cuda-pjrt==$version" "${others[@]}" >&2
    mv .aot/unfinished "$folder"
fi
echo "$folder"
