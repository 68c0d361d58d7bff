#!/usr/bin/env bash
# Installs what checks the files of deploy/ from the distribution's packages, where we may: as root, with
# apt. systemd's tools without systemd as this machine's init, and kubectl, to render kustomizations.
set -euo pipefail

packages=(systemd systemd-container kubernetes-client)
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: install ${packages[*]} for the tests of deploy/" >&2
    exit 1
fi
install() {
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}
install || { apt-get update -qq && install; }
