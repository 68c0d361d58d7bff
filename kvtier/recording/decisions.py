"""What the core decided, as a digest that grows with every event."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from kvtier.core.instructions import Continue, Instruction
from kvtier.recording.values import Encoder, Names

MARK_BYTES = 4
DIGEST_BYTES = 16


class Decisions:
    """Of all instructions from the first event on, each with every value in it. Of `Continue` only
    that it came: what it leads to is the next decision."""

    def __init__(self, names: Names) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        self.use_names(names)

    def use_names(self, names: Names) -> None:
        """Salted alike, of the next file."""
        self._encoder = Encoder(names, {}, names_new=False)

    def note(self, found: Iterable[Instruction], refused: str | None) -> bytes:
        """What one event led to: instructions, or an error of this class. Returns the mark after
        it: the first bytes of the digest so far."""
        encoder = self._encoder
        encoder.out.clear()
        encoder.put(refused)
        for one in found:
            encoder.put("continue" if type(one) is Continue else one)
        self._hash.update(encoder.out)
        return self._hash.digest()[:MARK_BYTES]

    def digest(self) -> bytes:
        return self._hash.digest()
