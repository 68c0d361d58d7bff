from __future__ import annotations

import json

import pytest

from kvtier.cli.output import bytes_text, plain, print_json, table
from kvtier.v1 import kvtier_pb2 as pb


def test_a_message_becomes_json_with_every_field_and_numbers_as_numbers() -> None:
    message = pb.StatsResponse(generation=2**63 + 1, uptime_seconds=1.5)
    message.namespaces.add(namespace_id=1, fingerprint=b"\x01\xff")
    message.counters["kvtier_leases"] = 2.0

    found = json.loads(json.dumps(plain(message)))

    assert found["generation"] == 2**63 + 1
    assert found["namespaces"][0]["fingerprint"] == "01ff"
    assert found["counters"] == {"kvtier_leases": 2.0}
    assert found["draining"] is False, "a field at its default is told too"
    assert found["sessions"] == []


def test_json_stands_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": 1})
    print_json({"a": 1}, compact=True)
    output = capsys.readouterr().out
    assert output == '{\n  "a": 1\n}\n{"a": 1}\n'


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    text = table(("name", "count"), [("long name", 5), ("x", 12345)])
    assert text == "name       count\nlong name      5\nx          12345"


def test_numbers_with_commas_stand_to_the_right_as_well() -> None:
    assert table(("tokens",), [("12,345",), ("5",)]) == "tokens\n12,345\n     5"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2 << 40, "2.0 TiB")]
)
def test_bytes_are_told_in_the_largest_fitting_unit(count: int, text: str) -> None:
    assert bytes_text(count) == text
