"""Requests whose prefix kvtier brings: from the question to the verdict on the load.

With layer-wise loading the tokens after the prefix are computed *ahead* of the verdict. They count
when the load was in time and right; until then, and for good if it was not, nothing of them is
known to anybody: no block is cached or offloaded, no token is given out.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.engine.config import EngineConfig
from kvtier.engine.connector_api import SchedulerSide
from kvtier.engine.request import Load, Request, RequestEvent, ScheduledTokens
from kvtier.engine.tables import BlockTables
from kvtier.policy.preemption import PreemptionRule


class Onboards:
    """Those under way; without a connector there are none."""

    def __init__(
        self,
        config: EngineConfig,
        tables: BlockTables,
        connector: SchedulerSide | None,
        rule: PreemptionRule,
        now: Callable[[], float],
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.ahead: dict[str, ScheduledTokens] = {}  # Of some of these.
        self._began_at: dict[str, float] = {}
        self._config = config
        self._tables = tables
        self._connector = connector
        self._rule = rule
        self._now = now

    def announce(self, request: Request) -> None:
        """Tell kvtier of the request, once."""
        is_told, request.is_announced = request.is_announced, True
        if self._connector is None or is_told:
            return
        # Not the block of the last token: it is computed here in any case.
        reusable = request.hashes[: request.reusable_count]
        tokens_of = request.tokens_of if request.chain.is_plain else None
        self._connector.on_new_request(request.request_id, reusable, tokens_of)

    def ask(self, request: Request, local_count: int) -> int | None:
        """Blocks after the engine's own that kvtier can bring; None: ask again later."""
        if self._connector is None or self._rule.is_recomputed(request.request_id):
            return 0
        self._rule.note_asked(request.request_id, self._now())
        count = self._connector.get_onboard_count(request.request_id, local_count)
        return None if count is None else min(count, request.reusable_count - local_count)

    def begin(self, request: Request, local: list[int], count: int, budget: int) -> bool:
        """Allocate for the engine's own prefix and what kvtier brings; False: no room now. With
        layer-wise loading up to `budget` tokens are computed `ahead`."""
        assert self._connector is not None, "nobody has blocks to bring"
        self._tables.open(request, local)
        if not self._tables.grow(request, (len(local) + count) * self._config.block_tokens):
            self._tables.let_go(request)
            return False
        fresh = request.device_blocks[len(local) :]
        request.onboard_block_count = count
        self._rule.note_queued(count)
        self._began_at[request.request_id] = self._now()
        request.move(RequestEvent.ONBOARD)
        self.requests[request.request_id] = request
        if self._config.layerwise_loading and request.group is None:
            self._plan_ahead(request, budget)
        self._connector.on_allocated(request.request_id, fresh, count)
        return True

    def end(self, request_id: str, load: Load) -> Request | None:
        """The verdict. The request that may run now; None where tokens were computed ahead: it
        waits for `settle`, when the engine has them."""
        request = self.requests[request_id]
        self._account(request, is_good=load is Load.GOOD)
        if (ahead := self.ahead.get(request_id)) is not None:
            ahead.load = load
            return None
        return self._ended(request, load)

    def settle(self, ahead: ScheduledTokens) -> Request:
        """As `end`, when the tokens computed beside the load are there."""
        settled = self.ahead.pop(ahead.request.request_id)
        assert settled is ahead, f"{ahead.request.request_id} has two loads"
        return self._ended(ahead.request, ahead.load)

    def drop(self, request: Request) -> None:
        """It ends before its load."""
        del self.requests[request.request_id]
        self.ahead.pop(request.request_id, None)
        self._account(request, is_good=False)

    def _plan_ahead(self, request: Request, budget: int) -> None:
        """What follows the prefix, if there are blocks for it; else it waits for the load."""
        block_tokens, block_count = self._config.block_tokens, len(request.device_blocks)
        first = block_count * block_tokens
        count = min(len(request.token_ids) - first, budget)
        missing = -(-(first + count) // block_tokens) - block_count
        if missing <= self._tables.pool.free_count:
            request.device_blocks += self._tables.pool.take(missing)
            self.ahead[request.request_id] = ScheduledTokens(request, first, count, Load.UNDER_WAY)

    def _ended(self, request: Request, load: Load) -> Request:
        del self.requests[request.request_id]
        if load is Load.GOOD:
            count = request.local_block_count + request.onboard_block_count
            request.computed_count = count * self._config.block_tokens
            self._tables.publish(request, count)
        else:
            # The blocks meant for the onboard stay the request's own and are computed.
            request.onboard_block_count = 0
        return request

    def _account(self, request: Request, *, is_good: bool) -> None:
        began_at = self._began_at.pop(request.request_id, None)
        if began_at is None:
            return
        if is_good:
            self._rule.note_arrived(request.onboard_block_count, began_at, self._now())
        else:
            self._rule.note_failed(request.onboard_block_count)
