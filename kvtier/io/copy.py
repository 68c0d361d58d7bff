"""Copies between slots, and between slots and the byte strings of put and get.

The GIL rule of the daemon: no operation may hold it on block-sized data. np.copyto lets it go;
`tobytes`, and anything else that makes a bytes object, does not: so values are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.checksum import begin_shard_checksum
from kvtier.memory import Bytes

PIECE_BYTES_MAX = 256 << 10  # About 25 µs with the GIL held.
# Copied and then summed: the piece is still in a cache for the second step. Smaller ones cost more
# waits for the GIL: with two threads 256 KiB reached 0.62 to 0.75 of a bare copy, this 0.73 to 0.76.
_SUMMED_BYTES = 1 << 20
