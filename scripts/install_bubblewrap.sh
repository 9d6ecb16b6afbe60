#!/usr/bin/env bash
# Makes sure that there is a bubblewrap (Debian's package), in which the tests of code rewards run. Fails if there is none in the end.
#   bash scripts/install_bubblewrap.sh
set -euo pipefail
command -v bwrap >/dev/null && exit 0
if [ "$(id -u)" = 0 ]; then
    install() { timeout 180 apt-get install -y -q bubblewrap >/dev/null 2>&1; }
    install || { timeout 180 apt-get update -q >/dev/null 2>&1 && install; } || true
fi
command -v bwrap >/dev/null || {
    echo "error: there is no bwrap, and it can't be installed here: apt-get install bubblewrap" >&2
    exit 1
}
