#!/usr/bin/env bash
# Installs Prometheus and a headless Chromium from the distribution's packages, for the tests of
# dashboards, alerts and the status page, where we may: as root, with apt.
set -euo pipefail

wanted=()
command -v promtool >/dev/null && command -v prometheus >/dev/null || wanted+=(prometheus)
command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null ||
    wanted+=(chromium-headless-shell)
if [ ${#wanted[@]} = 0 ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: install ${wanted[*]} for the tests of dashboards and the status page" >&2
    exit 1
fi
install() {
    # RUNLEVEL=1: do not start the service; tests start servers of their own on free ports.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$1" >/dev/null
}
for package in "${wanted[@]}"; do # One by one: a distribution may have one of them only.
    install "$package" || { apt-get update -qq && install "$package"; }
done
