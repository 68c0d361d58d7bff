# Sourced by setup_*.sh of environments whose pins were tried with Python 3.11 to 3.13 only.
# find_python prints the first of $PYTHON, or of those found, that can make an environment.

is_known() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if is_known "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.11 to 3.13 (with venv) found; set PYTHON=/path/to/python" >&2
    return 1
}
