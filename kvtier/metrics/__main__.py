"""`python -m kvtier.metrics` prints docs/metrics.md."""

import sys

from kvtier.metrics import documentation

sys.stdout.write(documentation())
