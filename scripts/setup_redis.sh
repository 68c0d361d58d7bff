#!/usr/bin/env bash
# Installs redis-server from the distribution's packages, for tests, where we may: as root, with apt.
set -euo pipefail

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: install redis-server (or valkey-server) for the tests of the Redis tier" >&2
    exit 1
fi
install() {
    # RUNLEVEL=1: do not start the service; tests start servers of their own on free ports.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends redis-server >/dev/null
}
install || { apt-get update -qq && install; }
