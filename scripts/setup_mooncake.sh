#!/usr/bin/env bash
# Installs what Mooncake's library is linked with, and its wheel does not bring, for the tests of
# that tier, where we may: as root, with apt.
set -euo pipefail

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: install libibverbs1 for the tests of the Mooncake tier" >&2
    exit 1
fi
install() {
    DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends libibverbs1 >/dev/null
}
install || { apt-get update -qq && install; }
