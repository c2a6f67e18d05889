#!/bin/sh
# Builds benchmarks/.venvs/<peer>, from the package index alone: install.sh [PEER...] (default: all).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
[ $# -gt 0 ] || set -- handwritten flower pfl
for peer in "$@"; do
    needs=$here/requirements-$peer.txt
    venv=$here/../.venvs/$peer
    [ -f "$needs" ] || { echo "$peer is no peer; see requirements-*.txt" >&2; exit 2; }
    echo "installing $peer"
    "$python" -m venv --clear "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$needs"
done
