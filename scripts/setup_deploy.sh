#!/usr/bin/env bash
# Installs what checks the files of deploy/ from the distribution's packages, where we may: as root, with
# apt. systemd's tools, without making it this machine's init, and kubectl, to render kustomizations.
set -euo pipefail

missing=()
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v systemd-nspawn >/dev/null || missing+=(systemd-container)
command -v kubectl >/dev/null || missing+=(kubernetes-client)
[ "${#missing[@]}" = 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: install ${missing[*]} for the tests of deploy/" >&2
    exit 1
fi
install() {
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}
install || { apt-get update -qq && install; }
