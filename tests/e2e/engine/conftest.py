"""The engine's say about OpenMP must come before torch, which the tests import first."""

import kvtier.engine  # noqa: F401
