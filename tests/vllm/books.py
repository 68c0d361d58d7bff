"""What vLLM's Scheduler and its connector owe each other, written down as they say it.

Wrapped around a rig's hooks: a load is told as received once for each promise, a request ends once,
and its tokens come once each, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request

from tests.vllm.scheduler_rig import SchedulerRig


class Books:
    """Of one rig, from now on; what is wrong raises AssertionError where it happens."""

    def __init__(self, rig: SchedulerRig) -> None:
        self.rig = rig
        self.requests: dict[str, Request] = {}
        self.owed: Counter[str] = Counter()  # Loads between steps that have not been told.
        self.counts: Counter[str] = Counter()  # Of what has happened.
        self.before_load: Callable[[], object] | None = None  # Once, between promise and load.
        self._is_async: dict[str, bool] = {}  # The connector's last answer about a request.
        self._tokens: dict[str, list[int]] = {}  # What came out.
        self._reasons: dict[str, str] = {}  # Why it ended, as the engine's outputs say.
        self._ended: Counter[str] = Counter()  # Calls of `request_finished`.
        connector, scheduler = rig.connector, rig.scheduler
        for target, name, wrap in (
            (connector, "get_num_new_matched_tokens", self._matched),
            (connector, "update_state_after_alloc", self._allocated),
            (connector, "request_finished_all_groups", self._finished),
            (scheduler, "add_request", self._added),
            (scheduler, "update_from_output", self._updated),
        ):
            setattr(target, name, wrap(getattr(target, name)))

    # ------------------------------------------------------------------------------- hooks

    def _added(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def added(request: Request) -> Any:
            self.requests[request.request_id] = request
            self._tokens[request.request_id] = []
            return call(request)

        return added

    def _matched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def matched(request: Request, local_tokens: int) -> tuple[int | None, bool]:
            found, is_async = call(request, local_tokens)
            assert found is None or 0 <= found <= request.num_tokens - local_tokens
            assert is_async is False or found, "nothing is loaded, but between steps"
            self.counts["put off"] += found is None
            self._is_async[request.request_id] = is_async
            return found, is_async

        return matched

    def _allocated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def allocated(request: Request, blocks: Any, external_tokens: int) -> None:
            if external_tokens > 0:
                self.counts["loads"] += 1
                if self._is_async[request.request_id]:
                    self.owed[request.request_id] += 1
                    assert self.owed[request.request_id] == 1, "two loads of a request at once"
                if self.before_load is not None:
                    event, self.before_load = self.before_load, None
                    event()
            call(request, blocks, external_tokens)

        return allocated

    def _finished(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def finished(request: Request, block_ids: Any) -> Any:
            self._ended[request.request_id] += 1
            self.counts["aborted loads"] += self.owed[request.request_id] > 0
            answer = call(request, block_ids)
            assert answer == (False, None), "its blocks would wait for a word that never comes"
            return answer

        return finished

    def _updated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def updated(output: Any, told: Any) -> Any:
            transfer = told.kv_connector_output
            assert not transfer.finished_sending, "nothing was ever promised to be sent"
            failed = transfer.failed_recving or set()  # Of several groups, as a whole.
            assert failed <= (transfer.finished_recving or set()), "a failed load has ended too"
            for request_id in transfer.finished_recving or ():
                self.owed[request_id] -= 1
                assert self.owed[request_id] == 0, f"{request_id} received what nobody had promised"
                assert request_id in self.rig.scheduler.requests, f"{request_id} is not known"
            self.counts["failed loads"] += bool(transfer.invalid_block_ids or failed)
            self.counts["preemptions"] += len(output.preempted_req_ids or ())
            outputs = call(output, told)
            for outs in outputs.values():
                for out in outs.outputs:
                    self._note(out)
            return outputs

        return updated

    def _note(self, out: Any) -> None:
        request_id = out.request_id
        assert request_id not in self._reasons, f"{request_id} goes on after its end"
        self._tokens[request_id] += out.new_token_ids
        if out.finish_reason is not None:
            self._reasons[request_id] = str(out.finish_reason)

    # ------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """When all has ended: every promise was kept, once."""
        assert not +self.owed, f"loads that were never told: {+self.owed}"
        assert self._ended == Counter(dict.fromkeys(self.requests, 1))
        for request_id, request in self.requests.items():
            tokens = list(request.prompt_token_ids or ())
            for token in self._tokens[request_id]:
                assert token == self.rig.next_token(tokens), f"{request_id}: a token is lost"
                tokens.append(token)
            reason = self._reasons.get(request_id, "abort")  # The frontend drops those itself.
            if reason == "error":
                assert self.counts["failed loads"] > 0, f"{request_id} failed without a reason"
            if reason == "length":
                assert len(self._tokens[request_id]) == request.max_tokens
