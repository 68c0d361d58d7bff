#!/usr/bin/env bash
# Lays the Python of a vLLM release, and its tests, beside the vLLM of `make test-vllm`: out of PyPI's
# source archive (47 MB), nothing compiled. What needs no engine runs on it, under the same torch.
#
#   bash scripts/setup_vllm_source.sh VERSION
#
# In $VLLM_VENV/source/VERSION: python/vllm (for PYTHONPATH) and tests/.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VLLM_VENV:-.venv-vllm}
version=${1:?"usage: setup_vllm_source.sh VERSION"}
folder="$venv/source/$version"
if [ -e "$folder/.complete" ]; then
    exit 0
fi

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"
}

echo "setup: laying vLLM $version's Python and tests into $folder (75 MB)"
rm -rf "$folder"
mkdir -p "$folder/python" "$folder/build"
# pip asks an archive what it is before it hands it over; these are what answers, and stay apart.
pip install --no-deps --target "$folder/build" \
    setuptools-scm==10.3.4 vcs-versioning==2.6.0 setuptools-rust==1.13.0 semantic-version==2.10.0 wheel==0.48.0
PYTHONPATH="$(realpath "$folder/build")" VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE="$version" \
    pip download --no-deps --no-binary vllm --no-build-isolation --dest "$folder/build" "vllm==$version"
tar xzf "$folder/build/vllm-$version.tar.gz" -C "$folder" --strip-components=1 \
    "vllm-$version/tests" "vllm-$version/LICENSE"
tar xzf "$folder/build/vllm-$version.tar.gz" -C "$folder/python" --strip-components=1 "vllm-$version/vllm"
rm -rf "$folder/build"
touch "$folder/.complete"
