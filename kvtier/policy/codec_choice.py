"""Which codec a remote tier's blocks get: the one with which they are there and back soonest.

Pure. Told what was measured (the link, and each codec on live data), it compares for each codec
what one byte of payload takes on both ways:

    way down   encoding and sending; both at once but for the first and the last group of a batch
    way up     receiving and decoding, likewise

Codecs are numbers; 0 sends blocks as they are. A codec that has not been measured for a while is
due for a trial on one block, the seldomer the further it was from being the best. Speeds are means
that forget, by bytes: a link that becomes slow is noticed within some hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NONE = 0
# A change must be worth it: speeds measured on a busy machine differ by more than this anyway.
_GAIN_MIN = 1.05
_FORGET_BYTES = 256e6
# Trials: after so many bytes of payload, up to the second when a codec loses by far. A trial takes
# one block through a codec both ways, in the worst case 4 ns a byte.
_TRIAL_BYTES_MIN, _TRIAL_BYTES_MAX = 256e6, 16e9


@dataclass(slots=True)
class _Mean:
    """Of a figure per byte; forgets what is longer ago than some bytes."""

    seconds: float = 0.0
    count_bytes: float = 0.0

    def note(self, count_bytes: float, seconds: float) -> None:
        kept = 0.5 ** (count_bytes / _FORGET_BYTES)
        self.seconds = kept * self.seconds + seconds
        self.count_bytes = kept * self.count_bytes + count_bytes

    @property
    def known(self) -> bool:
        return self.count_bytes > 0

    @property
    def byte_seconds(self) -> float:
        return self.seconds / self.count_bytes if self.known else 0.0


@dataclass(slots=True)
class _Codec:
    encoding: _Mean = field(default_factory=_Mean)
    decoding: _Mean = field(default_factory=_Mean)
    size: _Mean = field(default_factory=_Mean)  # Bytes sent for a byte of payload.
    trial_at: float = 0.0  # In bytes of payload since the start.


class CodecChoice:
    """`codecs`: those that may be used, NONE among them."""

    def __init__(self, codecs: Sequence[int], *, groups_a_batch: float = 4.0) -> None:
        assert NONE in codecs
        assert groups_a_batch >= 1
        self._codecs = {codec: _Codec() for codec in codecs}
        self._alone = 1.0 / groups_a_batch  # The part of the shorter step that nothing hides.
        self._sending, self._receiving = _Mean(), _Mean()
        self._payload_bytes = 0.0
        self._chosen = NONE

    @property
    def chosen(self) -> int:
        return self._chosen

    def note_encoded(
        self, codec: int, *, payload_bytes: int, encoded_bytes: int, seconds: float
    ) -> None:
        known = self._codecs[codec]
        known.encoding.note(payload_bytes, seconds)
        known.size.note(payload_bytes, encoded_bytes)

    def note_decoded(self, codec: int, *, payload_bytes: int, seconds: float) -> None:
        if codec in self._codecs:
            self._codecs[codec].decoding.note(payload_bytes, seconds)

    def note_sent(self, *, sent_bytes: int, seconds: float) -> None:
        self._sending.note(sent_bytes, seconds)

    def note_received(self, *, received_bytes: int, seconds: float) -> None:
        self._receiving.note(received_bytes, seconds)

    def choose(self, payload_bytes: int) -> int:
        """The codec for the next batch, of so many bytes."""
        self._payload_bytes += payload_bytes
        seconds = {
            codec: self.byte_seconds(codec)
            for codec, known in self._codecs.items()
            if codec == NONE or known.size.known
        }
        best = min(seconds, key=lambda codec: seconds[codec])
        if seconds[best] * _GAIN_MIN < seconds[self._chosen]:
            self._chosen = best
        return self._chosen

    def take_trial(self) -> int | None:
        """A codec to be measured on one block now; it counts as tried."""
        if not self._sending.known:
            return None  # Nothing to compare with yet.
        for codec, known in self._codecs.items():
            if codec not in (NONE, self._chosen) and self._payload_bytes >= known.trial_at:
                known.trial_at = self._payload_bytes + self._trial_pause(codec)
                return codec
        return None

    def byte_seconds(self, codec: int) -> float:
        """What a byte of payload takes there and back, as far as is known."""
        known = self._codecs[codec]
        size = known.size.byte_seconds if known.size.known else 1.0
        sending, receiving = self._sending, self._receiving
        up = (receiving if receiving.known else sending).byte_seconds * size
        return self._way(known.encoding.byte_seconds, sending.byte_seconds * size) + self._way(
            known.decoding.byte_seconds, up
        )

    def _way(self, one: float, other: float) -> float:
        return max(one, other) + self._alone * min(one, other)

    def _trial_pause(self, codec: int) -> float:
        if not self._codecs[codec].size.known:
            return _TRIAL_BYTES_MIN
        loss = self.byte_seconds(codec) / max(self.byte_seconds(self._chosen), 1e-15)
        return min(_TRIAL_BYTES_MIN * max(loss, 1.0) ** 3, _TRIAL_BYTES_MAX)
