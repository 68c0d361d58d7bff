"""The version of kvtier; pyproject.toml says the same, and a tidy test compares."""

from __future__ import annotations

VERSION = "0.1.0"
