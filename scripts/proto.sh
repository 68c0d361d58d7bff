#!/usr/bin/env bash
# Generates kvtier/v1/kvtier_pb2.py, .pyi and kvtier_pb2_grpc.py from the protocol.
#
# With an old generator on purpose: its output checks no runtime version and runs on every protobuf
# from 4.25 on, while a newer one would refuse the older runtimes that vLLM allows. It lives in an
# environment of its own, since it wants an old protobuf.
set -euo pipefail
cd "$(dirname "$0")/.."

generator=grpcio-tools==1.62.3 # The last line before version checks in the generated service code.
venv=.venv-proto

if ! "$venv/bin/python" -c 'import grpc_tools' >/dev/null 2>&1; then
    for candidate in ${PYTHON:-python3.11 python3.12 .venv/bin/python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
            >/dev/null 2>&1; then
            "$candidate" -m venv --clear "$venv"
            break
        fi
    done
    [ -x "$venv/bin/python" ] || {
        echo "make proto: needs Python 3.11 or 3.12 (the generator has no newer wheels)" >&2
        exit 1
    }
    # grpc_tools imports pkg_resources, which newer setuptools do without.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        "$generator" 'setuptools<81'
fi
"$venv/bin/python" -m grpc_tools.protoc -I proto \
    --python_out=. --pyi_out=. --grpc_python_out=. proto/kvtier/v1/kvtier.proto
echo "proto: kvtier/v1 generated"
