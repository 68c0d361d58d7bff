"""Puts together what `kvtier explain` answers: where blocks are now, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import cast

from kvtier.core.locating import PlaceRun
from kvtier.errors import BadRequest
from kvtier.namespace import NamespaceSpec
from kvtier.server.base import Base
from kvtier.server.block_ring import shorts_of
from kvtier.server.history import BlockSeen, RequestCall, SlowCallSeen
from kvtier.server.namespaces import OpenedNamespace
from kvtier.server.security import Peer, Rights
from kvtier.server.sessions import Sessions
from kvtier.server.wire import tier_counts
from kvtier.types import BlockHash, NamespaceId
from kvtier.v1 import kvtier_pb2 as pb

EVENTS_MAX = 8
# Each is searched for in all that is remembered, while the event loop stands.
ABSENT_BLOCKS_MAX = 2048
# Namespaces that differ in more than so many facts are no twins.
TWIN_FACTS_MAX = 3
TWINS_MAX = 4

TierStates = Callable[[], list[tuple[str, str]]]


class Explainer:
    """Belongs to the event loop; changes nothing."""

    def __init__(self, base: Base, sessions: Sessions, tier_states: TierStates) -> None:
        self._core = base.core
        self._namespaces = base.namespaces
        self._clock = base.clock
        self._history = base.history
        self._sessions = sessions
        self._tier_states = tier_states
        self._started_at = base.clock.now()

    def explain(self, request: pb.ExplainRequest, peer: Peer) -> pb.ExplainResponse:
        """Of what the peer's tenant may know of."""
        about = request.WhichOneof("about")
        if about is None or not getattr(request, about):
            raise BadRequest("nothing to explain: send a hash or a request_id")
        now, history = self._clock.now(), self._history
        since = history.remembered_since
        mine = self._namespaces.seen_by(peer.tenant)
        ids = {one.id for one in mine}
        answer = pb.ExplainResponse(
            happenings=[
                pb.Happening(
                    what=seen.what,
                    seconds_ago=now - seen.at,
                    namespace_id=seen.namespace or 0,
                    detail=seen.detail,
                )
                for seen in reversed(history.happenings)
                if seen.namespace is None or seen.namespace in ids
            ],
            tiers=[pb.TierCondition(tier=tier, state=state) for tier, state in self._tier_states()],
            uptime_seconds=now - self._started_at,
            remembered_seconds=now - (self._started_at if since is None else since),
            draining=self._core.stats().draining,
        )
        if about == "hash":
            block = BlockHash(request.hash)
            known = history.namespaces_of(block)  # Once, however many namespaces there are.
            found = (
                self._place(one, mine, block, now, is_remembered=one.id in known) for one in mine
            )
            answer.places.extend(place for place in found if place is not None)
        else:
            answer.requests.extend(
                self._request(call, mine, now)
                for call in history.request(request.request_id, peer.tenant)
            )
        return answer

    def slow_calls(self, peer: Peer) -> list[pb.SlowCall]:
        """The tenant's, or everybody's for the operator; latest first."""
        now = self._clock.now()
        return [
            _slow_call(seen, now)
            for seen in reversed(self._history.slow_calls)
            if peer.rights is Rights.OPERATOR or seen.tenant == peer.tenant
        ]

    # ------------------------------------------------------------------------------------ hashes

    def _place(
        self,
        opened: OpenedNamespace,
        mine: Sequence[OpenedNamespace],
        block: BlockHash,
        now: float,
        *,
        is_remembered: bool,
    ) -> pb.PrefixPlace | None:
        """None when the namespace knows nothing of the block."""
        if len(block) != opened.spec.hash_bytes:
            return None
        found = self._core.locator.prefix(opened.id, block)
        events = self._history.events_of(opened.id, block, EVENTS_MAX) if is_remembered else []
        if found is None and not events:
            return None
        place = pb.PrefixPlace(
            namespace_id=opened.id,
            model=opened.spec.model,
            fingerprint=opened.fingerprint,
            events=[_event(seen, now) for seen in events],
        )
        if found is None:
            place.twins.extend(self._twins(opened, mine, block))
        else:
            place.block_count = found.block_count
            place.cut_off = found.is_cut_off
            place.runs.extend(map(_run, found.runs))
        return place

    # ---------------------------------------------------------------------------------- requests

    def _request(
        self, call: RequestCall, mine: Sequence[OpenedNamespace], now: float
    ) -> pb.RequestSeen:
        opened = self._namespaces.get(call.namespace)
        names = dict(self._sessions.names())
        return pb.RequestSeen(
            request_id=call.request_id,
            call=call.call,
            seconds_ago=now - call.at,
            seconds=call.seconds,
            session_id=call.session,
            session_name=names.get(call.session, ""),
            namespace_id=call.namespace,
            model=opened.spec.model,
            asked_count=call.asked_count,
            found_count=call.found_count,
            tiers=tier_counts(call.tiers),
            cut=cast("pb.Cut", int(call.cut)),
            missed_hash=call.missed or b"",
            runs=self._runs_now(call, now),
            twins=[] if call.missed is None else self._twins(opened, mine, call.missed),
        )

    def _runs_now(self, call: RequestCall, now: float) -> list[pb.PrefixRun]:
        leading = self._core.locator.leading(call.namespace, call.hashes)
        first = sum(run.count for run in leading)
        absent = call.hashes[first : first + ABSENT_BLOCKS_MAX]
        return [*map(_run, leading), *self._absent_runs(call.namespace, absent, first, now)]

    def _absent_runs(
        self, namespace: NamespaceId, hashes: Sequence[BlockHash], first: int, now: float
    ) -> list[pb.PrefixRun]:
        """Blocks that are not resident, by what was last remembered of them."""
        if not hashes:
            return []
        shorts = shorts_of(hashes)
        refused = self._history.last_refusals(namespace, shorts)
        last = refused | self._history.last_removals(namespace, shorts)
        runs: list[pb.PrefixRun] = []
        before: tuple[str, str, str] | None = None
        for index, short in enumerate(shorts.tolist(), start=first):
            seen = last.get(short)
            what = ("", "", "") if seen is None else (seen.what, seen.why, seen.tier)
            if what == before:
                runs[-1].block_count += 1
                continue
            before = what
            event = None if seen is None else _event(seen, now)
            runs.append(pb.PrefixRun(first_index=index, block_count=1, last=event))
        return runs

    # ------------------------------------------------------------------------------------- twins

    def _twins(
        self, here: OpenedNamespace, mine: Sequence[OpenedNamespace], missed: BlockHash
    ) -> list[pb.NamespaceTwin]:
        """Other namespaces that have the block, or differ in little; the likeliest first."""
        found = []
        for there in mine:
            if there.id == here.id:
                continue
            facts = differences(here.spec, there.spec)
            has_block = self._core.locator.has(there.id, missed)
            if has_block or len(facts) <= TWIN_FACTS_MAX:
                twin = pb.NamespaceTwin(
                    namespace_id=there.id,
                    model=there.spec.model,
                    has_block=has_block,
                    facts=facts,
                )
                found.append(twin)
        return sorted(found, key=lambda twin: (not twin.has_block, len(twin.facts)))[:TWINS_MAX]


def differences(here: NamespaceSpec, there: NamespaceSpec) -> list[pb.FactDifference]:
    """The facts that keep two namespaces apart."""
    mine, other = _facts_of(here), _facts_of(there)
    return [
        pb.FactDifference(name=name, here=mine.get(name, ""), there=other.get(name, ""))
        for name in sorted(mine.keys() | other.keys())
        if mine.get(name) != other.get(name)
    ]


def _facts_of(spec: NamespaceSpec) -> dict[str, str]:
    facts = asdict(spec)
    extra = facts.pop("extra")
    return {name: str(value) for name, value in facts.items()} | {
        f"extra.{name}": value for name, value in extra.items()
    }


def _run(run: PlaceRun) -> pb.PrefixRun:
    return pb.PrefixRun(
        first_index=run.first_index, block_count=run.count, tiers=[str(tier) for tier in run.tiers]
    )


def _event(seen: BlockSeen, now: float) -> pb.BlockEvent:
    return pb.BlockEvent(what=seen.what, why=seen.why, tier=seen.tier, seconds_ago=now - seen.at)


def _slow_call(seen: SlowCallSeen, now: float) -> pb.SlowCall:
    return pb.SlowCall(
        call=seen.call,
        seconds_ago=now - seen.at,
        seconds=seen.seconds,
        request_id=seen.request_id,
        block_count=seen.block_count,
        outcome=seen.outcome,
        session_id=seen.session or 0,
    )
