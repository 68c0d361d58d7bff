"""An engine's compute by torch: the matrix sizes of Llama-3-8B in bf16, with random weights."""

from __future__ import annotations

from typing import Any

from kvtier.cuda.runtime import Stream

_HIDDEN, _QKV, _INNER = 4096, 6144, 14336
_HEADS, _KV_HEADS, _WIDTH = 32, 8, 128
_LAYERS = 32
# Weights of so many layers are kept and used in turn: more than any L2 cache holds.
_KEPT_LAYERS = 4
_GEMM_SIZE = 8192
_DECODE_REQUESTS = 64


class TorchWork:
    """On the device that is current when it is made."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._streams: dict[int, Any] = {}
        shapes = ((_HIDDEN, _QKV), (_HIDDEN, _HIDDEN), (_HIDDEN, 2 * _INNER), (_INNER, _HIDDEN))
        self._layers = [[self._random(*shape) for shape in shapes] for _ in range(_KEPT_LAYERS)]
        self._square = self._random(_GEMM_SIZE, _GEMM_SIZE)
        self._square_out = torch.empty_like(self._square)
        self._tokens = self._random(_DECODE_REQUESTS, _HIDDEN)
        self._decode_out = self._decoded()
        torch.cuda.synchronize()
        # As engines do: the host queues a step in one call.
        self._decode_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._decode_graph):
            self._decode_out = self._decoded()
        torch.cuda.synchronize()

    def gemm(self, stream: Stream) -> None:
        with self._on(stream):
            self._torch.mm(self._square, self._square, out=self._square_out)

    def decode_step(self, stream: Stream) -> None:
        with self._on(stream):
            self._decode_graph.replay()

    def prefill(self, stream: Stream, token_count: int) -> None:
        """GEMMs and causal attention of all layers, the bulk of a prefill's arithmetic."""
        with self._on(stream):
            tokens = self._random(token_count, _HIDDEN)
            for layer in range(_LAYERS):
                tokens = self._mlp(self._attended(tokens, layer), layer)

    def _decoded(self) -> Any:
        tokens = self._tokens
        for layer in range(_LAYERS):
            tokens = self._mlp(self._projected(tokens, layer), layer)
        return tokens

    def _projected(self, tokens: Any, layer: int) -> Any:
        qkv, out, _, _ = self._layers[layer % _KEPT_LAYERS]
        return (tokens @ qkv)[:, :_HIDDEN] @ out

    def _attended(self, tokens: Any, layer: int) -> Any:
        qkv, out, _, _ = self._layers[layer % _KEPT_LAYERS]
        mixed = (tokens @ qkv).view(len(tokens), _HEADS + 2 * _KV_HEADS, _WIDTH).transpose(0, 1)
        queries, keys, values = mixed.split([_HEADS, _KV_HEADS, _KV_HEADS])
        shared_by = _HEADS // _KV_HEADS
        attended = self._torch.nn.functional.scaled_dot_product_attention(
            queries[None],
            keys.repeat_interleave(shared_by, 0)[None],
            values.repeat_interleave(shared_by, 0)[None],
            is_causal=True,
        )
        return attended[0].transpose(0, 1).reshape(len(tokens), _HIDDEN) @ out

    def _mlp(self, tokens: Any, layer: int) -> Any:
        _, _, up, down = self._layers[layer % _KEPT_LAYERS]
        gate, value = (tokens @ up).chunk(2, dim=-1)
        return self._torch.nn.functional.silu(gate) * value @ down

    def _on(self, stream: Stream) -> Any:
        if stream not in self._streams:
            self._streams[stream] = self._torch.cuda.ExternalStream(stream)
        return self._torch.cuda.stream(self._streams[stream])

    def _random(self, *shape: int) -> Any:
        # Small, so that 32 layers neither vanish nor overflow too soon; values do not matter.
        torch = self._torch
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * 0.02
