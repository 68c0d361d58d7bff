"""The fields of a Hugging Face config.json, read with their types.

A figure of the wrong kind is refused with its name: a size that is computed from a guess is worse
than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from kvtier.errors import BadRequest

# Far above every model. Without a bound a broken file makes figures nobody can read, or lists of
# layers that fill the memory.
WHOLE_MAX = 1 << 31
LAYER_COUNT_MAX = 4096
# Where multimodal models keep the part that writes text, outermost first.
_TEXT_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")
_NESTING_MAX = 4
_SHOWN_CHARS_MAX = 60


class Fields:
    """One JSON object. None stands for a field that is absent or null."""

    def __init__(self, values: Mapping[str, object], place: str = "") -> None:
        self._values = values
        self._place = place

    def has(self, name: str) -> bool:
        """Whether the field is there, even as null: then no default stands in for it."""
        return name in self._values

    def is_set(self, name: str) -> bool:
        """Whether the field says something: 0, false and what is empty say nothing."""
        return bool(self._values.get(name))

    def first_of(self, *names: str) -> str | None:
        """The first of the names that has a value."""
        return next((name for name in names if self._values.get(name) is not None), None)

    def whole(self, *names: str, minimum: int = 1) -> int | None:
        """The number under the first of the names that has one."""
        name = self.first_of(*names)
        if name is None:
            return None
        value = self._values[name]
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(name, "a whole number")
        if not minimum <= value <= WHOLE_MAX:
            self._refuse(name, f"a whole number from {minimum} to {WHOLE_MAX}")
        return value

    def flag(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            self._refuse(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            self._refuse(name, "a text")
        return value

    def values_of(self, name: str) -> list[object] | None:
        """A list; an empty one counts as absent, as in published files."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            self._refuse(name, "a list")
        return value or None

    def part(self, name: str) -> Fields | None:
        """The object under the name."""
        value = self._values.get(name)
        return Fields(value, f"{self._place}{name}.") if isinstance(value, Mapping) else None

    def named(self, name: str) -> str:
        """The field's name as a reader finds it in the file."""
        return f"{self._place}{name}"

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        shown = repr(self._values[name])[:_SHOWN_CHARS_MAX]
        raise BadRequest(f"{self.named(name)} is {shown}: it must be {wanted}")


def text_part(top: Fields) -> Fields:
    """The fields of the part that keeps KV: those of a plain model are the top ones."""
    found = top
    for _ in range(_NESTING_MAX):
        inner = next((part for name in _TEXT_PARTS if (part := found.part(name))), None)
        if inner is None:
            break
        found = inner
    return found
