#!/usr/bin/env bash
# `make test-systemd`: tests/systemd, in a container that systemd-nspawn boots from an overlay of this
# machine's root. Where that cannot be, it says why and passes; with REQUIRED=1 it fails.
set -euo pipefail

cannot() {
    echo "make test-systemd: $([ "${REQUIRED:-}" = 1 ] && echo FAILED || echo skipped): $1"
    [ "${REQUIRED:-}" != 1 ]
    exit
}

[ "$(id -u)" = 0 ] || cannot "it needs root, for namespaces and mounts"
if ! command -v systemd-nspawn >/dev/null; then
    command -v apt-get >/dev/null || cannot "it needs systemd-nspawn (Debian: systemd-container)"
    install() {
        DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends systemd systemd-container >/dev/null
    }
    install || { apt-get update -qq && install; } || cannot "apt-get could not install systemd-container"
fi
mkdir -p .kvtier
exec "${VENV:-.venv}/bin/python" -m pytest -p no:cacheprovider -m systemd tests/systemd
