"""Keeps the stock of reserved slots filled, and gives back what the daemon wants back."""

from __future__ import annotations

from kvtier.connector.client_api import ReservationLike
from kvtier.connector.desk import Desk
from kvtier.connector.stock import SlotStock
from kvtier.errors import KVTierError


class SlotSupply:
    """The stock, and the calls around it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        settings = desk.settings
        self.stock = SlotStock(
            stock_blocks=settings.stock_blocks, stock_blocks_max=settings.stock_blocks_max
        )

    def refill(self) -> None:
        """Ask for slots in the background when the stock has run low."""
        desk, stock = self._desk, self.stock
        count = stock.refill_count(now=desk.clock.now())
        if count == 0:
            return
        namespace, life = desk.namespace, desk.life

        def on_answer(answer: ReservationLike | KVTierError) -> None:
            self._on_reserved(namespace, life, answer)

        stock.is_asking = desk.ask(lambda: desk.client.reserve(namespace, count), on_answer)

    def recall(self, count: int) -> None:
        """The daemon wants slots back: those that no copy was planned for."""
        footing, desk = self.stock.footing, self._desk
        if footing is not None:
            pause_until = desk.clock.now() + desk.settings.recall_pause_seconds
            slots = self.stock.recall(count, pause_until=pause_until)
            desk.abort(footing.namespace, footing.session, slots)

    def throw_away(self) -> None:
        """What the stock was reserved under is void."""
        footing = self.stock.footing
        slots = self.stock.discard()
        if footing is not None:
            self._desk.abort(footing.namespace, footing.session, slots)

    def _on_reserved(
        self, namespace: object, life: int, answer: ReservationLike | KVTierError
    ) -> None:
        desk = self._desk
        if life == desk.life:
            self.stock.is_asking = False
        pause_until = desk.clock.now() + desk.settings.reserve_retry_seconds
        if isinstance(answer, KVTierError):
            desk.note_error(answer)
            self.stock.pause(until=pause_until)
            return
        slots = [int(slot) for slot in answer.slots]
        if life != desk.life or answer.session != desk.session():
            desk.abort(namespace, answer.session, slots)
            return
        if not slots:
            self.stock.pause(until=pause_until)
        old_footing, old_slots = self.stock.add(namespace, answer)
        if old_footing is not None:
            desk.abort(old_footing.namespace, old_footing.session, old_slots)
