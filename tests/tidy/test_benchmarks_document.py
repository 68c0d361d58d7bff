"""Figures in docs/benchmarks.md come from the committed results and from nowhere else."""

from benchmarks.document import DOCUMENT, render


def test_benchmarks_document_is_generated_from_the_results() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "run python -m benchmarks.document"
