"""Runs the full forms of the long tests, one at a time, and writes a report.

Resumable: what has passed at this commit is not run again, so that an interrupted run goes on where
it stopped. The state lies in .kvtier/torture/, the report in docs/reports/.

Those that need vLLM run in its environment, if `make test-vllm` has made one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE_DIR = ROOT / ".kvtier" / "torture"
REPORT_DIR = ROOT / "docs" / "reports"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LONG = "(torture or full_form) and not gpu"
# Which tests each Python runs.
MARKS_OF = {sys.executable: f"{LONG} and not vllm", str(VLLM_PYTHON): f"{LONG} and vllm"}
ENVIRONMENT = {**os.environ, "KVTIER_TORTURE": "1"}


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def pytest_command(python: str, *words: str) -> list[str]:
    marks = ["-m", MARKS_OF[python]]
    return [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *marks, *words]


def collect_all(selection: str) -> dict[str, str]:
    """Every test that has a full form, with the Python that runs it."""
    found = dict.fromkeys(collect(sys.executable, selection), sys.executable)
    if VLLM_PYTHON.exists():
        return found | dict.fromkeys(collect(str(VLLM_PYTHON), selection), str(VLLM_PYTHON))
    print("torture: those that need vLLM are left out: `make test-vllm` makes its environment")
    return found


def collect(python: str, selection: str) -> list[str]:
    """In pytest's order; one with parameters, which may be thousands of seeds, is one run."""
    words = ["--collect-only", "tests" if python == sys.executable else "tests/vllm"]
    if selection:
        words += ["-k", selection]
    done = subprocess.run(
        pytest_command(python, *words),
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 5):  # 5: none collected.
        sys.exit(f"make torture: the tests could not be collected:\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    ids = [line for line in lines if line.startswith("tests/") and "::" in line]
    return list(dict.fromkeys(one.partition("[")[0] for one in ids))


def run_one(python: str, test: str, seconds_max: int) -> dict[str, object]:
    began = time.monotonic()
    words = [f"--timeout={seconds_max}", test]
    findings = STATE_DIR / "findings.txt"
    findings.write_text("", encoding="utf-8")
    environment = {**ENVIRONMENT, "KVTIER_TORTURE_FINDINGS": str(findings)}
    done = subprocess.run(pytest_command(python, *words), cwd=ROOT, env=environment, check=False)
    return {
        "outcome": "passed" if done.returncode == 0 else "failed",
        "seconds": round(time.monotonic() - began, 1),
        "findings": " ".join(findings.read_text(encoding="utf-8").split()),
    }


def write_report(commit: str, results: dict[str, dict[str, object]], todo_count: int) -> Path:
    REPORT_DIR.mkdir(parents=True, exist_ok=True)
    path = REPORT_DIR / f"torture-{commit}.md"
    failed_count = sum(result["outcome"] == "failed" for result in results.values())
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    lines = [
        f"# Full forms at {commit}",
        "",
        f"{today}, {machine}, Python {platform.python_version()}.",
        f"{len(results)} run, {failed_count} failed, {todo_count} not run yet.",
        "",
        "| test | outcome | seconds |",
        "| --- | --- | --- |",
        *(f"| `{test}` | {row['outcome']} | {row['seconds']} |" for test, row in results.items()),
        "",
        *(f"* `{test}`: {row['findings']}" for test, row in results.items() if row["findings"]),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-k", dest="selection", default="", help="pytest's -k: run only these")
    parser.add_argument("--again", action="store_true", help="forget what has passed")
    parser.add_argument("--test-seconds-max", type=int, default=5400, help="limit of one test")
    options = parser.parse_args()

    commit = git("rev-parse", "--short=12", "HEAD")
    if git("status", "--porcelain", "--untracked-files=no"):
        commit += "-changed"  # Nothing is known of such a tree: run everything again.
        options.again = True
    state_path = STATE_DIR / f"{commit}.json"
    STATE_DIR.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, object]] = {}
    if state_path.exists() and not options.again:
        results = json.loads(state_path.read_text(encoding="utf-8"))

    tests = collect_all(options.selection)
    if not tests:
        print("make torture: no test has a full form", file=sys.stderr)
        return 1
    todo = [test for test in tests if results.get(test, {}).get("outcome") != "passed"]
    print(f"torture: {len(tests)} full forms, {len(tests) - len(todo)} passed before")
    for number, test in enumerate(todo, start=1):
        print(f"torture: {number}/{len(todo)} {test}", flush=True)
        results[test] = run_one(tests[test], test, options.test_seconds_max)
        state_path.write_text(json.dumps(results, indent=1), encoding="utf-8")
        write_report(commit, results, len(todo) - number)
    path = write_report(commit, results, 0)
    failed = [test for test in tests if results[test]["outcome"] != "passed"]
    print(f"torture: report in {path.relative_to(ROOT)}")
    print("\n".join(f"failed: {test}" for test in failed) or "torture: all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
