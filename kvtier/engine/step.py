"""One step: the tokens of a batch through the model, on the engine's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kvtier.engine.attention import plan_attention
from kvtier.engine.device import EngineDevice
from kvtier.engine.model import Forward
from kvtier.engine.request import Load, ScheduledTokens


class Step:
    """`sampled` are those of the batch whose request's last token is among theirs: in the order of
    their logits."""

    def __init__(
        self, device: EngineDevice, batch: Sequence[ScheduledTokens], block_tokens: int
    ) -> None:
        self._device = device
        self._is_ahead = any(scheduled.load is not Load.NONE for scheduled in batch)
        self.sampled: list[ScheduledTokens] = []
        tables, spans, token_ids, logit_rows = [], [], list[int](), list[int]()
        for scheduled in batch:
            request = scheduled.request
            first, end = scheduled.first, scheduled.first + scheduled.count
            tables.append(request.device_blocks)
            spans.append((first, end))
            token_ids += request.token_ids[first:end]
            if end == len(request.token_ids):
                logit_rows.append(len(token_ids) - 1)
                self.sampled.append(scheduled)
        self._plan = plan_attention(tables, spans, block_tokens, device.put)
        ids, rows = device.put(
            [torch.tensor(token_ids), torch.tensor(logit_rows, dtype=torch.int64)]
        )
        self._forward = Forward(device.model, device.attention, self._plan, ids, rows)

    def launch(self, follow_layer: Callable[[int], None]) -> None:
        """All parts of the model. Beside a load each layer waits for its own part of that."""
        device, forward = self._device, self._forward
        device.launch(forward.begin)
        for layer in range(device.model.config.layer_count):
            if self._is_ahead:
                follow_layer(layer)
            device.launch_layer(partial(forward.run_layer, layer), layer, self._plan)
        device.launch(forward.finish)

    def read(self) -> Iterator[tuple[ScheduledTokens, torch.Tensor, int]]:
        """Of `sampled` the logits and the likeliest token: all that a step waits for."""
        if not self.sampled:
            return iter(())
        self._device.wait_computed()
        likeliest = self._forward.likeliest.tolist()
        return zip(self.sampled, self._forward.logits, likeliest, strict=True)
