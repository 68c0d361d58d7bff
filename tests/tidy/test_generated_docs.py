"""Documents that are generated equal what generates them."""

from __future__ import annotations

from pathlib import Path

from kvtier import config, metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_configuration_document_is_generated_from_the_options() -> None:
    assert (DOCS / "configuration.md").read_text() == config.documentation()


def test_metrics_document_is_generated_from_the_declarations() -> None:
    assert (DOCS / "metrics.md").read_text() == metrics.documentation()
