"""What the core says and is told, as far as it is remembered or watched."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.core import events as ev
from kvtier.core import instructions as ins
from kvtier.server.base import Base
from kvtier.server.history import HappeningSeen
from kvtier.server.watch import WatchHub


def remembering_effects(base: Base, watch: WatchHub) -> dict[type, Callable[..., None]]:
    """For CoreLoop.start; belongs to the event loop."""
    history, clock = base.history, base.clock

    def on_removed(event: ins.BlocksRemoved) -> None:
        watch.on_removed(event)
        history.on_removed(event, clock.now())

    def on_cleared(event: ins.NamespaceCleared) -> None:
        watch.on_cleared(event)
        history.on_cleared(event, clock.now())

    def on_tier(event: ev.LowerChanged) -> None:
        state = "read only" if event.readable else "off"
        history.note(HappeningSeen("tier state", clock.now(), None, f"{event.tier} is {state}"))

    return {
        ins.BlocksRemoved: on_removed,
        ins.NamespaceCleared: on_cleared,
        ev.LowerChanged: on_tier,
        ev.DrainStarted: lambda _: history.note(HappeningSeen("drain began", clock.now())),
        ev.DrainEnded: lambda _: history.note(HappeningSeen("drain ended", clock.now())),
    }
