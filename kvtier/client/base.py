"""What the sync and the asyncio face have in common: everything but the waiting."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from types import TracebackType

import grpc

from kvtier.client.address import TcpAddress, parse_address
from kvtier.client.arena import Arena, SlabPins
from kvtier.client.doors import Door, Identity
from kvtier.client.forks import check_not_forked, watch_forks
from kvtier.client.greet_door import GreetDoor
from kvtier.client.link import Link, QuietHandler, RecallHandler
from kvtier.client.plans import AcquirePlan, AnyPlan, Plans
from kvtier.client.session import SessionKeeper, Waker
from kvtier.client.settings import ClientSettings
from kvtier.client.socket_door import SocketDoor
from kvtier.client.values import Namespace, SessionRef
from kvtier.clock import Clock, SystemClock
from kvtier.errors import ConfigError, KVTierError, Unavailable
from kvtier.namespace import SHARD_COUNT_MAX, NamespaceSpec
from kvtier.paths import default_socket_path
from kvtier.types import EngineId, Role

ENGINE_ID_BYTES = 16
NAME_CHARS_MAX = 64


class ClientBase:
    """Connects in the background from the first moment, and again whenever it must."""

    def __init__(
        self,
        socket_path: Path | str | None = None,
        *,
        engine_id: bytes | None = None,
        role: Role = Role.BOTH,
        shards: tuple[int, ...] = (0,),
        name: str = "",
        memory_node: int | None = None,
        maps_segments: bool = False,
        settings: ClientSettings = ClientSettings(),
        clock: Clock = SystemClock(),
    ) -> None:
        """Neither blocks nor raises when the daemon is absent; ConfigError for wrong arguments.

        `socket_path`: the session socket, or "tcp://HOST:PORT" for a by-value session.
        `engine_id`: 16 bytes, equal in every process of one engine.
        `memory_node`: the NUMA node nearest to a worker's device; its slots are to lie there.
        `maps_segments`: this worker may be leased blocks in the CXL tier: it copies with its
        processor, not with a device that would have to pin that memory.
        """
        identity = Identity(
            EngineId(engine_id or secrets.token_bytes(ENGINE_ID_BYTES)),
            role,
            shards,
            name,
            memory_node,
            maps_segments,
        )
        _check_identity(identity)
        self._link = Link(settings, clock)
        self._plans = Plans(self._link)
        self._owner_pid = os.getpid()
        waker = Waker()
        address = parse_address(socket_path or default_socket_path())
        door: Door
        if isinstance(address, TcpAddress):
            if settings.tls is not None:
                settings.tls.credentials()  # Raises ConfigError now; later it is a retry.
            door = GreetDoor(self._link, address.target)
        elif settings.tls is not None:
            raise ConfigError(f"{address.path} is a socket, and TLS is for tcp://HOST:PORT")
        else:
            door = SocketDoor(self._link, address.path, identity, waker.fd)
        self._keeper = SessionKeeper(self._link, door, waker)
        self.engine_id = identity.engine_id
        watch_forks(self._keeper)
        self._keeper.start()

    @property
    def connected(self) -> bool:
        """Whether calls pass now."""
        return self._link.session is not None

    @property
    def by_value(self) -> bool:
        """Whether blocks travel by value here: put and get, no slots."""
        session = self._link.current
        return session is not None and session.by_value

    @property
    def session(self) -> SessionRef | None:
        """The session calls pass under now."""
        session = self._link.session
        return None if session is None else session.ref

    def open_namespace(self, spec: NamespaceSpec) -> Namespace:
        """Returns at once; the namespace is opened in the background and at each reconnect."""
        return self._link.open_namespace(spec)

    def arena(self, namespace: Namespace, shard: int = 0) -> Arena:
        check_not_forked(self._owner_pid)
        return Arena(self._link.arenas, namespace, shard)

    def add_quiet_handler(self, handler: QuietHandler) -> None:
        """`handler(session)` returns when every copy begun under `session` has ended.

        It is called in a background thread when that session is lost (ours or another process's of
        the engine); after that Quiet is sent. One that raises is called again.
        """
        self._link.add_quiet_handler(handler)

    def set_slab_pins(self, pins: SlabPins) -> None:
        """Every slab that this client maps is told to `pins`, and given up by it before it goes."""
        self._link.arenas.set_pins(pins)

    def set_recall_handler(self, handler: RecallHandler | None) -> None:
        """`handler(namespace, count)`: the daemon wants reserved slots back that wait for no copy.

        Called in a background thread; the handler may abort them itself.
        """
        self._link.set_recall_handler(handler)

    def _reported(self, plan: AnyPlan) -> Reported:
        return Reported(self._link, plan)

    def _acquiring(self, plan: AcquirePlan) -> Acquiring:
        return Acquiring(self._link, plan)

    def _close_link(self) -> None:
        if os.getpid() != self._owner_pid:
            return  # A forked child: what it inherited is closed already.
        self._link.start_closing()
        self._keeper.stop()
        self._link.callbacks.join(self._link.settings.connect_timeout_seconds)
        self._link.arenas.void_all()


class Reported:
    """Bracket around the waiting part of a call: names what it raises, tells the breaker."""

    def __init__(self, link: Link, plan: AnyPlan, *, changes_state: bool | None = None) -> None:
        """`changes_state`: when it is known better than by the call."""
        self._link = link
        self._session = plan.session
        self._changes_state = plan.call.changes_state if changes_state is None else changes_state

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, changes_state = self._session, self._changes_state
        if isinstance(error, grpc.RpcError):
            raise self._link.failed(session, changes_state, error.code(), error.details()) from None
        if isinstance(error, ValueError) and "closed channel" in str(error):
            raise Unavailable("the session was replaced during the call") from None
        if error is not None and not isinstance(error, KVTierError):
            # Interrupted or cancelled in the middle: nobody knows what the call did.
            self._link.missed(session, changes_state)


class Acquiring:
    """Bracket around the waiting part of an acquire: a lease that nobody will hear of is released.

    The daemon ends the lease of a call that is cancelled before its answer was sent; whether it was
    sent is what we cannot know. So a lease whose name has come is released by name, and the session
    goes on; without a name only a new session tells what is ours, as after every lost change.
    """

    def __init__(self, link: Link, plan: AcquirePlan) -> None:
        self._link = link
        self._plan = plan

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, answers = self._plan.session, self._plan.answers
        if error is None and answers.lease is not None:
            return
        lease_id = answers.lease_id
        if lease_id is not None:
            # Also when the answer is here, but the call ended badly: it may have been taken back.
            self._link.release_unheard(session, lease_id)
        if error is None:
            if lease_id is None:
                self._link.missed(session, changes_state=True)
            raise Unavailable("the daemon ended an acquire without an answer")
        if lease_id is None:
            Reported(self._link, self._plan).__exit__(kind, error, traceback)
        elif isinstance(error, grpc.RpcError | ValueError) and not _is_overdue(error):
            Reported(self._link, self._plan, changes_state=False).__exit__(kind, error, traceback)
        elif isinstance(error, grpc.RpcError):
            # Nothing against the daemon yet: it has answered once, and the release will tell.
            raise Unavailable("the daemon did not end a wait in time") from None


def _is_overdue(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _check_identity(identity: Identity) -> None:
    if len(identity.engine_id) != ENGINE_ID_BYTES:
        raise ConfigError(f"engine_id is {len(identity.engine_id)} bytes: it must be 16")
    if len(identity.name) > NAME_CHARS_MAX:
        raise ConfigError(f"name is longer than {NAME_CHARS_MAX} characters")
    if len(identity.shards) > SHARD_COUNT_MAX or len(set(identity.shards)) < len(identity.shards):
        raise ConfigError(f"shards: at most {SHARD_COUNT_MAX} different ones")
