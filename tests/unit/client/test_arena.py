"""What an arena says before anything is mapped."""

from __future__ import annotations

import pytest

from kvtier.client.arena import Arena, ArenaTable
from kvtier.client.values import Namespace, SessionRef
from kvtier.errors import StaleSlot
from kvtier.namespace import NamespaceSpec

SPEC = NamespaceSpec("m", "v1", "bf16", "LBHD", block_tokens=16, shard_bytes=4096)
SESSION = SessionRef(generation=7, session_id=1)


def test_a_miss_has_no_views_even_where_no_slab_is_mapped() -> None:
    table = ArenaTable()
    table.enter_generation(7)
    arena = Arena(table, Namespace(SPEC, about=1), 0)
    assert arena.views([], SESSION) == []
    with arena.hold([], SESSION) as views:
        assert views == []
    with pytest.raises(StaleSlot):
        arena.view(0, SESSION)
