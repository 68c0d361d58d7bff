#!/usr/bin/env bash
# `make test`, which says by marks what is left to other gates: two halves at once. Tests of whole
# processes mostly wait; beside them, and giving way to them, runs what computes, and then what of
# the first half would make it too long. What the second half said is told when the first is over.
set -u

python=${VENV:-.venv}/bin/python
marks=$1
waiting=(tests/crash tests/e2e tests/attacks)
moved=(
    tests/e2e/monitoring tests/e2e/test_fresh_install.py tests/e2e/client tests/e2e/engine
    tests/crash/test_clear.py
)

compute() {
    nice "$python" -m pytest -p no:cacheprovider -m "$marks" tests "${waiting[@]/#/--ignore=}"
    local computed=$?
    nice "$python" -m pytest -p no:cacheprovider -m "$marks" "${moved[@]}" || return 1
    return "$computed"
}

said=$(mktemp)
trap 'rm -f "$said"' EXIT
# So that pressing ctrl-C ends both.
trap 'kill -INT -- "-$computing" 2>/dev/null; wait; exit 130' INT TERM

set -m # A process group of its own, to be ended as a whole.
compute >"$said" 2>&1 &
computing=$!
set +m

"$python" -m pytest -m "$marks" "${waiting[@]}" "${moved[@]/#/--ignore=}"
first=$?
echo "--- beside it: everything but ${waiting[*]}, and ${moved[*]}"
tail -f -n +1 --pid=$computing "$said"
wait "$computing"
second=$?
[ "$first" -eq 0 ] && [ "$second" -eq 0 ] && exit 0
echo "--- ${waiting[*]}: exit $first; everything else: exit $second" >&2
exit 1
