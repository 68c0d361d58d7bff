"""Requests for several answers to one prompt: how their tokens branch.

A group begins as one request. When its prompt is computed it branches: each branch goes on as a
request of its own, whose block table begins as a copy of its parent's. Blocks are shared until two
branches would write to the same one (PagedAttention: Kwon et al., SOSP 2023, sections 4.4 and 4.5).
A group only says who goes on with which token; nothing here holds a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.engine.request import FinishReason, Request, Sample
from kvtier.engine.sampler import pick_token


@dataclass(frozen=True, slots=True)
class Branch:
    """`parent`, or a fork of it, goes on with this token, as the group's answer `index`."""

    parent: Request
    token_id: int
    index: int
    generator: torch.Generator
    log_probability: float = 0.0


@dataclass(frozen=True, slots=True)
class Branching:
    """What happens to a group now; nothing, while it waits for others of its requests."""

    branches: Sequence[Branch] = ()
    dropped: Sequence[Request] = ()  # These go on in no branch.


class Group:
    """The requests and the answers of one."""

    is_streaming = True  # Whether a token, once given, stays.

    def __init__(self, leader: Request) -> None:
        self.leader = leader
        self.live = [leader]  # Will still give tokens.
        self.samples: list[Sample] = []  # In order, when all have ended.
        self.preempted_count = 0

    @property
    def request_id(self) -> str:
        """The caller's name for all of it."""
        return self.leader.request_id

    def branch(self, request: Request, logits: Tensor) -> Branching:
        """What follows from `logits` [vocab] for the next token of one of the live."""
        raise NotImplementedError

    def note_branched(self, branching: Branching, heirs: Sequence[Request]) -> None:
        """The branches that were asked for, in order, live instead of their parents."""
        gone = [*branching.dropped, *(branch.parent for branch in branching.branches)]
        self.live = [request for request in self.live if request not in gone] + list(heirs)

    def note_finished(self, request: Request, reason: FinishReason) -> None:
        """One of the live is over, with an answer."""
        self.live.remove(request)


class ParallelSamples(Group):
    """Independent draws after the same prompt."""

    def __init__(self, leader: Request) -> None:
        super().__init__(leader)
        self._ended: dict[int, Sample] = {}

    def branch(self, request: Request, logits: Tensor) -> Branching:
        params = request.params
        if request.generated_ids:
            parts = [(request.index, request.generator)]
        else:
            seeds = range(params.seed, params.seed + params.sample_count)
            parts = [(i, torch.Generator().manual_seed(seed)) for i, seed in enumerate(seeds)]
        return Branching(
            [
                Branch(request, pick_token(logits, params, generator), index, generator)
                for index, generator in parts
            ]
        )

    def note_finished(self, request: Request, reason: FinishReason) -> None:
        super().note_finished(request, reason)
        self._ended[request.index] = request.sample(reason)
        self.samples = [self._ended[index] for index in sorted(self._ended)]


class BeamSearch(Group):
    """The `beam_width` likeliest runs of tokens at every step, and the likeliest that have ended.

    A run's score is the sum of its tokens' log-probabilities, without a length penalty. Scores only
    fall: the search is over when as many runs have ended as it is wide, and no live one is likelier
    than the least of them.
    """

    is_streaming = False

    def __init__(self, leader: Request) -> None:
        super().__init__(leader)
        self._candidates: dict[Request, list[tuple[float, int]]] = {}  # Best first.

    def branch(self, request: Request, logits: Tensor) -> Branching:
        params = request.params
        # So many that as many as it is wide do not end, whatever ends.
        count = min(params.beam_width + len(params.stop_token_ids), len(logits))
        best = torch.log_softmax(logits, dim=-1).topk(count)
        self._candidates[request] = [
            (request.log_probability + score, token_id)
            for score, token_id in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        if len(self._candidates) < len(self.live):
            return Branching()
        return self._choose()

    def note_finished(self, request: Request, reason: FinishReason) -> None:
        super().note_finished(request, reason)
        if reason is not FinishReason.CANCELLED or not self.samples:
            self._note_sample(request.sample(reason))

    def _choose(self) -> Branching:
        params = self.leader.params
        branches: list[Branch] = []
        for parent, score, token_id in self._ordered():
            if token_id in params.stop_token_ids:
                ids = (*parent.generated_ids, token_id)
                self._note_sample(Sample(ids, FinishReason.STOP, score))
            elif len(branches) < params.beam_width:
                branches.append(
                    Branch(parent, token_id, len(branches), parent.generator, log_probability=score)
                )
            if len(branches) == params.beam_width:
                break
        self._candidates.clear()
        if self._is_over(branches):
            return Branching(dropped=self.live)
        parents = {branch.parent for branch in branches}
        return Branching(branches, [one for one in self.live if one not in parents])

    def _ordered(self) -> list[tuple[Request, float, int]]:
        """All candidates, the likeliest first; of equals that of the likelier parent."""
        return sorted(
            [(one, *candidate) for one in self.live for candidate in self._candidates[one]],
            key=lambda candidate: -candidate[1],
        )

    def _is_over(self, branches: Sequence[Branch]) -> bool:
        if len(self.samples) < self.leader.params.beam_width:
            return not branches
        return branches[0].log_probability <= self.samples[-1].log_probability

    def _note_sample(self, sample: Sample) -> None:
        self.samples = sorted([*self.samples, sample], key=lambda one: -one.log_probability)
        del self.samples[self.leader.params.beam_width :]


def group_of(leader: Request) -> Group | None:
    """What a new request is to become; None where one answer is wanted."""
    if leader.params.beam_width > 1:
        return BeamSearch(leader)
    if leader.params.sample_count > 1:
        return ParallelSamples(leader)
    return None
