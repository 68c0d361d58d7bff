"""What every hook of a scheduler side does around its own work."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Hook = Callable[Concatenate[S, P], R]


def hook(without: Callable[..., Any]) -> Callable[[Hook[S, P, R]], Hook[S, P, R]]:
    """Handle what has arrived, then the hook; both are counted in the hook's time.

    `without` answers for a side that is disabled; the first internal error makes it so. The object
    has `is_disabled`, `_desk` and `_disable(hook, error)`.
    """

    def decorate(method: Hook[S, P, R]) -> Hook[S, P, R]:
        @wraps(method)
        def run(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            if self.is_disabled:
                return cast("R", without(self, *args, **kwargs))
            desk = self._desk
            start_ns = desk.clock.now_ns()
            try:
                desk.control.drain(desk.settings.answers_per_hook_max)
                result = method(self, *args, **kwargs)
            except Exception as error:  # A bug of ours must not end the engine.
                if desk.settings.raise_internal_errors:
                    raise
                self._disable(method.__name__, error)
                return cast("R", without(self, *args, **kwargs))
            desk.stats.note_hook((desk.clock.now_ns() - start_ns) / 1e9)
            return result

        return cast("Hook[S, P, R]", run)

    return decorate


def nothing(*_: object, **__: object) -> None:
    """What a disabled side does with news."""
