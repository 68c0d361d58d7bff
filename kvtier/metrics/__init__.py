"""Every metric, declared once: name, kind, help, and labels from closed sets.

`python -m kvtier.metrics` prints docs/metrics.md. Reconcilable by design: for each call,
hits of all tiers + misses = blocks asked for.
"""

from kvtier.metrics.all import Metrics, documentation

__all__ = ["Metrics", "documentation"]
