#!/usr/bin/env bash
# Makes .venv-rivals/lmcache (1.6 GB) and .venv-rivals/mooncake: what `make bench-rivals` measures beside
# kvtier, published wheels in environments of their own.
#
# As scripts/setup.sh: a stamp names what an environment was made from; while that has not changed, nothing
# is done. A rival that cannot be installed is told of and left out: the benchmark says so.
set -uo pipefail
cd "$(dirname "$0")/.."

torch_index=${TORCH_INDEX:-}

. scripts/find_python.sh # Both have wheels for what it finds.

install() { # NAME MODULE: into .venv-rivals/NAME; the module must be importable afterwards
    local venv=.venv-rivals/$1 requirements=benchmarks/rivals/$1.txt wanted python
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python) || return 1
        "$python" -m venv "$venv" || return 1
    fi
    wanted=$({
        "$venv/bin/python" -c 'import sys; print(sys.version)'
        printf '%s\n' "$PWD" "$torch_index"
        cat "$requirements" scripts/setup_rivals.sh
    } | sha256sum)
    if [ "$(cat "$venv/.kvtier-setup" 2>/dev/null || true)" = "$wanted" ]; then
        return 0
    fi
    echo "setup: installing $1 into $venv"
    # torch's +cpu builds are not on every index; the pin makes pip stop where only CUDA builds are.
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps \
        ${torch_index:+--extra-index-url "$torch_index"} -r "$requirements" || return 1
    "$venv/bin/python" -c "import $2" || return 1
    # Written last: an interrupted setup starts again.
    printf '%s\n' "$wanted" >"$venv/.kvtier-setup"
}

for rival in "lmcache lmcache.v1.multiprocess.server" "mooncake mooncake.store"; do
    # shellcheck disable=SC2086
    set -- $rival
    if ! install "$1" "$2"; then
        rm -f ".venv-rivals/$1/.kvtier-setup"
        echo "setup: $1 could not be installed, see above: the benchmark will leave it out" >&2
    fi
done
