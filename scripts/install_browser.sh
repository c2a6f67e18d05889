#!/bin/sh
# Finds a Chromium or Chrome for `make test-browser`, or installs Debian's where that is allowed.
set -eu
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if ! command -v apt-get >/dev/null 2>&1; then
    echo "test-browser needs Chromium or Chrome; install one so that it is on the PATH." >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo"
else
    echo "test-browser needs Chromium: run apt-get install chromium as root." >&2
    exit 1
fi
$as_root apt-get update -qq
$as_root apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
