"""scripts/vllm_upstream.py tells what goes otherwise than it states, in both directions."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_upstream.py"
FILE = "test_remote_prefill_lifecycle.py"
CLASS = "tests.v1.kv_connector.unit.test_remote_prefill_lifecycle"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("vllm_upstream", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def report_of(folder: Path, *cases: str) -> Path:
    path = folder / "report.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def case(name: str, inner: str = "") -> str:
    return f'<testcase classname="{CLASS}" name="{name}">{inner}</testcase>'


def test_failure_at_the_end_of_a_test_that_passed_is_a_failure(
    script: ModuleType, tmp_path: Path
) -> None:
    end = case("test_full_block_prompt", '<error message="a lease is left"/>')
    for cases in ((case("test_full_block_prompt"), end), (end, case("test_full_block_prompt"))):
        [found] = script.cases_of(report_of(tmp_path, *cases))
        assert (found.file, found.state) == (FILE, "failed")
        assert script.surprises([found]) == [f"{FILE}::test_full_block_prompt: a lease is left"]


def test_stated_difference_is_none_and_its_absence_is_one(
    script: ModuleType, tmp_path: Path
) -> None:
    name = "test_basic_lifecycle"
    [differs] = script.cases_of(report_of(tmp_path, case(name, '<failure message="32 of 40"/>')))
    assert script.surprises([differs]) == []
    [passes] = script.cases_of(report_of(tmp_path, case(name)))
    assert script.surprises([passes]) == [f"{FILE}::{name} passes, and is stated to differ"]


def test_loads_of_ours_are_counted_in_the_table(script: ModuleType, tmp_path: Path) -> None:
    loads = '<properties><property name="loads" value="3"/></properties>'
    cases = script.cases_of(report_of(tmp_path, case("a", loads), case("b", "<skipped/>")))
    [row] = [line for line in script.table(cases) if FILE in line]
    assert row.endswith("| 2 | 1 | 0 | 1 | 3 |")
