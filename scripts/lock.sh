#!/usr/bin/env bash
# Pins everything that pip installs for the daemon, by version and by hash: deploy/requirements.lock.
# A release runs it again, then `make test`, then `make audit`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/audit_tools.sh

"$tools/bin/uv" pip compile pyproject.toml --extra remote --extra events --extra encryption \
    --universal --python-version 3.11 --generate-hashes --no-header --quiet \
    --custom-compile-command "make lock" ${UPGRADE:+--upgrade} --output-file deploy/requirements.lock
echo "lock: $(grep -c '==' deploy/requirements.lock) packages in deploy/requirements.lock"
