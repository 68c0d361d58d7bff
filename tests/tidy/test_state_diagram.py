"""The diagram in docs/architecture.md is the table in core/replica.py."""

from pathlib import Path

from kvtier.core.replica import transition_diagram

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_documented_diagram_equals_the_transition_table() -> None:
    assert transition_diagram() in ARCHITECTURE.read_text(encoding="utf-8"), (
        "paste kvtier.core.replica.transition_diagram() into docs/architecture.md"
    )
