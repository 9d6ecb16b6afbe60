#!/usr/bin/env bash
# Asks pip whether the extras of pyproject.toml that tests do not install can be resolved: `pip install --dry-run`, which
# may download what it must read, and installs nothing. Says so and does nothing where no package index is reachable.
#   bash scripts/check_extras.sh            cuda12, cuda13 and sglang, as CI does
#   bash scripts/check_extras.sh sglang     this one
set -euo pipefail
cd "$(dirname "$0")/.."
pip() { .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check "$@"; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
pip --version >/dev/null # a missing environment is no missing index
if ! pip download --no-deps --dest "$work" packaging; then
    echo "SKIPPED: no package index is reachable (see above), so nobody knows whether the extras resolve"
    exit 0
fi
[ $# -gt 0 ] || set -- cuda12 cuda13 sglang
status=0
for extra in "$@"; do
    if pip install --dry-run --ignore-installed ".[$extra]"; then
        echo "the extra '$extra' resolves"
    else
        echo "the extra '$extra' does not resolve"
        status=1
    fi
done
exit $status
