#!/usr/bin/env bash
# Makes an environment with a real SGLang that runs on a CPU (tests/sglang_cpu/README.md): a few minutes, once.
#   bash scripts/install_sglang.sh           in .sglang
#   bash scripts/install_sglang.sh FOLDER
# On a GPU, pip install 'fluxjax[sglang]' or SGLang's own instructions are the way.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-.sglang}"
done="$folder/fluxjax-$(cat tests/sglang_cpu/*.txt | cksum | cut -d' ' -f1)" # there once all is installed
if [ ! -e "$done" ]; then
    rm -rf "$folder"
    python3 -m venv "$folder"
    pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
    pip install -r tests/sglang_cpu/requirements.txt
    pip install --no-deps -r tests/sglang_cpu/requirements-nodeps.txt
fi
packages="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
cp -r tests/sglang_cpu/shim/. "$packages/"
echo 'import fluxjax_sgl_shim' >"$packages/fluxjax_sgl_shim.pth"
touch "$done"
