"""How fast blocks may leave a GPU, so that background copies stretch decoding by a few percent.

A token bucket whose rate follows what is measured: steps beside which blocks were copied against
steps of the same size beside which none were. As long as the former are not slower than allowed the
rate grows by a tenth; when they are it falls by a third. (Additive increase would take minutes from
a slow start to the speed of a link; both ways multiplicative settles within a few looks and then
swings by these factors, as in TCP's slow start.)

Steps differ by what they compute, so they are compared by size class, a power of two of tokens. Of
each class the last steps count, by their medians, which a hiccup does not move. When copies never
cease there is nothing to compare with: then they are held for some steps now and then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Looks at the rate: after so many steps with copies. Fewer would judge by noise.
STEPS_A_LOOK = 16
_REMEMBERED_STEPS = 32
# Steps without copies after so many of one size with them, where none came by itself: 1.5 % of the
# time. A size of which none was ever seen alone waits less; not none, for a rare one might be met
# beside copies again each time.
_STEPS_UNTIL_HELD, _STEPS_UNTIL_FIRST_HELD, _HELD_STEPS = 512, 32, 8
_GROWTH, _DECLINE = 1.1, 0.67
# A step counts as one with copies from this many bytes on: less than 1 ms of any link.
_BYTES_MIN = 1 << 20


@dataclass(slots=True)
class _Steps:
    """Of one size class, in seconds."""

    alone: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))
    beside: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))
    since_alone: int = 0
    since_look: int = 0


class StoreThrottle:
    """`note_step` belongs to the engine's thread, `may_send` to the one that copies."""

    def __init__(
        self,
        *,
        stretch_max: float = 0.05,
        bytes_per_second: float = 1e9,
        bytes_per_second_min: float = 64e6,
        bytes_per_second_max: float = 64e9,
        burst_bytes: int = 32 << 20,
    ) -> None:
        """`bytes_per_second`: where to begin. `stretch_max`: 0.05 lets a step take 1.05 times as
        long; the rate is looked for below nine tenths of it, so that swings stay below it."""
        assert stretch_max > 0
        self._stretch_max = 0.9 * stretch_max
        self._min, self._max = bytes_per_second_min, bytes_per_second_max
        self.bytes_per_second = bytes_per_second
        self._burst_bytes = burst_bytes
        self._tokens = float(burst_bytes)
        self._filled_at: float | None = None
        self._steps: dict[int, _Steps] = {}
        self._held_steps = 0

    def note_step(self, seconds: float, token_count: int, copied_bytes: int) -> None:
        """A step of the engine took so long, and so much was copied meanwhile."""
        steps = self._steps.setdefault(token_count.bit_length(), _Steps())
        self._held_steps = max(0, self._held_steps - 1)
        if copied_bytes < _BYTES_MIN:
            # What was under way when copies were held ends in the first of these steps.
            if copied_bytes == 0:
                steps.alone.append(seconds)
                steps.since_alone = 0
            return
        steps.beside.append(seconds)
        steps.since_alone += 1
        steps.since_look += 1
        if steps.since_alone >= (_STEPS_UNTIL_HELD if steps.alone else _STEPS_UNTIL_FIRST_HELD):
            steps.since_alone = 0
            self._held_steps = _HELD_STEPS
        if steps.since_look >= STEPS_A_LOOK and len(steps.alone) >= _HELD_STEPS // 2:
            self._look(steps)

    @property
    def is_holding(self) -> bool:
        """Whether nothing is sent for some steps, to see how long they take alone."""
        return self._held_steps > 0

    def note_idle(self) -> None:
        """The engine computes nothing: there are no steps to hold copies for."""
        self._held_steps = 0

    def may_send(self, bytes_count: int, now: float) -> bool:
        """Whether to send a piece now; if so it is paid for, the last one on credit."""
        if self._filled_at is not None:
            filled = self._tokens + (now - self._filled_at) * self.bytes_per_second
            self._tokens = min(float(self._burst_bytes), filled)
        self._filled_at = now
        if self.is_holding or self._tokens <= 0:
            return False
        self._tokens -= bytes_count
        return True

    def _look(self, steps: _Steps) -> None:
        stretch = median(steps.beside) / median(steps.alone) - 1
        steps.since_look = 0
        # Steps at the former rate must not be judged again.
        steps.beside.clear()
        factor = _GROWTH if stretch <= self._stretch_max else _DECLINE
        self.bytes_per_second = max(self._min, min(self._max, self.bytes_per_second * factor))
