#!/usr/bin/env bash
# What is known against the pinned dependencies, and a bill of materials of them (CycloneDX, JSON) in
# dist/. Needs the network of the vulnerability databases; exit code 1 when something is found.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/audit_tools.sh

mkdir -p dist
"$tools/bin/cyclonedx-py" requirements deploy/requirements.lock --pyproject pyproject.toml \
    --output-reproducible --of JSON -o dist/sbom.cdx.json
echo "audit: bill of materials in dist/sbom.cdx.json"
"$tools/bin/pip-audit" --require-hashes --disable-pip --strict --requirement deploy/requirements.lock
