"""An engine on a thread of its own, asked from an event loop: all requests are in its batches."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

from kvtier.engine.config import SamplingParams
from kvtier.engine.engine import IDLE_SECONDS, Engine, TokenOutput
from kvtier.errors import BadRequest, KVTierError, LimitExceeded, Unavailable

log = logging.getLogger(__name__)
# Without work the thread looks at kvtier's copies so often.
LOOK_SECONDS = 0.05
# Orders not yet taken; the engine has its own limit on what waits in it.
ORDERS_MAX = 4096

Outcome = TokenOutput | KVTierError


class EngineService:
    """`submit` from one event loop; `close` from anywhere."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # `submit` refuses to add more, but always cancels what it has added.
        self._orders: queue.SimpleQueue[Callable[[], None]] = (
            queue.SimpleQueue()  # bounded: twice ORDERS_MAX.
        )
        self._listeners: dict[str, Callable[[Outcome], None]] = {}
        self._lock = threading.Lock()  # Who begins to listen is heard, or told that it is over.
        self._ids = itertools.count()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Requests that are not finished fail with Unavailable."""
        self._is_closing = True
        self._thread.join()

    async def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[TokenOutput]:
        """The tokens of all samples as they come; leaving early cancels the request. Raises
        BadRequest, LimitExceeded, Unavailable."""
        loop = asyncio.get_running_loop()
        outcomes: asyncio.Queue[Outcome] = asyncio.Queue()  # bounded: by tokens asked for.
        request_id = f"http-{next(self._ids)}"

        def listen(outcome: Outcome) -> None:
            loop.call_soon_threadsafe(outcomes.put_nowait, outcome)

        def add() -> None:
            try:
                self._engine.add_request(request_id, prompt_ids, params)
            except KVTierError as error:
                self._tell(request_id, error)

        if self._orders.qsize() >= ORDERS_MAX:
            raise LimitExceeded("too many requests at once: try again later")
        with self._lock:
            if self._is_closing:
                raise Unavailable("the engine is shutting down")
            self._listeners[request_id] = listen
        self._orders.put(add)
        is_over = False
        try:
            while not is_over:
                outcome = await outcomes.get()
                if isinstance(outcome, KVTierError):
                    is_over = True
                    raise outcome
                is_over = outcome.result is not None
                yield outcome
        finally:
            if not is_over:
                self._orders.put(lambda: self._cancel(request_id))

    def _run(self) -> None:
        error = Unavailable("the engine is shutting down")
        try:
            while not self._is_closing:
                self._take_orders()
                self._step()
        except Exception as bug:  # Whoever waits must hear of it.
            log.exception("the engine has ended")
            error = Unavailable(f"the engine has ended: {bug}")
        with self._lock:
            self._is_closing = True
            for request_id in list(self._listeners):
                self._tell(request_id, error)

    def _take_orders(self) -> None:
        """All there are; waits for one where there is nothing else to do."""
        try:
            is_idle = self._engine.unfinished_count == 0
            order = self._orders.get(timeout=LOOK_SECONDS) if is_idle else self._orders.get_nowait()
            while True:  # Ends when the queue is empty.
                order()
                order = self._orders.get_nowait()
        except queue.Empty:
            pass

    def _step(self) -> None:
        before = self._engine.scheduler.computed_token_count
        for output in self._engine.step():
            self._tell(output.request_id, output)
        is_waiting = self._engine.scheduler.computed_token_count == before
        if is_waiting and self._engine.unfinished_count:
            threading.Event().wait(IDLE_SECONDS)

    def _tell(self, request_id: str, outcome: Outcome) -> None:
        listen = self._listeners.get(request_id)
        if listen is None:
            return
        if isinstance(outcome, KVTierError) or outcome.result is not None:
            del self._listeners[request_id]
        try:
            listen(outcome)
        except RuntimeError:  # The loop has ended.
            self._listeners.pop(request_id, None)

    def _cancel(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None) is not None:
            try:
                self._engine.cancel(request_id)
            except BadRequest:
                log.debug("%s was refused, or had ended", request_id)
