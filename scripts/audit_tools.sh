# Sourced: makes .venv-audit with the tools that pin and audit, in versions of their own.
tools=${AUDIT_VENV:-.venv-audit}
wanted="uv==0.13.9 pip-audit==2.10.1 cyclonedx-bom==7.5.0"
if [ "$(cat "$tools/.kvtier-audit" 2>/dev/null || true)" != "$wanted" ]; then
    ${PYTHON:-python3} -m venv "$tools"
    # shellcheck disable=SC2086  # Words.
    "$tools/bin/python" -m pip --disable-pip-version-check --quiet install $wanted
    printf '%s\n' "$wanted" >"$tools/.kvtier-audit"
fi
