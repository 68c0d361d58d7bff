"""From a Hugging Face config.json to the KV that vLLM keeps of each token.

Layers that are alike make a group. What is not understood is refused: an engine would use more or
less than was said. Everything here is per copy of the model; ranks and slots are `capacity.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvtier.errors import BadRequest
from kvtier.sizing.dtypes import AUTO, KvDtype, kv_dtype_of
from kvtier.sizing.families import FAMILIES, Family
from kvtier.sizing.fields import LAYER_COUNT_MAX, Fields, text_part
from kvtier.sizing.groups import AttentionKind, KvGroup, ModelKv
from kvtier.sizing.refusals import ASK_VLLM, FULL_NAMES, check_known

# DeepSeek's packed form of a latent in fp8: 512 values, 4 scales of 4 bytes, 64 values of 2 bytes.
_PACKED_LATENT = (512, 64)
_PACKED_LATENT_BYTES = 656
# The keys that choose the tokens of sparse attention: a byte a value, 4 for the scale of 128.
_INDEX_SCALE_VALUES = 128
_INDEX_SCALE_BYTES = 4


def model_kv(config: Mapping[str, object], *, kv_dtype: str = AUTO) -> ModelKv:
    """Raises BadRequest, in one line, for a model that cannot be sized."""
    top = Fields(config)
    text = text_part(top)
    model_type = text.text("model_type") or top.text("model_type") or "unknown"
    check_known(model_type, top, text)
    family = FAMILIES.get(model_type, Family())
    dtype = kv_dtype_of(top, text, kv_dtype)
    reader = _Reader(model_type, family, text, dtype)
    groups = reader.latent_groups() if family.is_latent else reader.head_groups()
    notes = [dtype.note] if dtype.note else []
    if model_type not in FAMILIES:
        notes.append(f"model type {model_type[:40]!r} is sized by its fields alone; {ASK_VLLM}")
    attention_head_count = reader.attention_head_count()
    return ModelKv(
        model_type="".join(c if c.isprintable() else "?" for c in model_type[:40]),
        dtype=dtype,
        attention_head_count=attention_head_count,
        groups=tuple(groups),
        positions_max=text.whole("max_position_embeddings", "n_positions", "max_seq_len"),
        notes=(*notes, *reader.notes()),
    )


class _Reader:
    """Reads one model's fields, with the defaults of its family."""

    def __init__(self, model_type: str, family: Family, text: Fields, dtype: KvDtype) -> None:
        self._model_type = model_type
        self._family = family
        self._text = text
        self._dtype = dtype
        self._assumed: dict[str, int] = {}
        self._notes: list[str] = []

    def notes(self) -> list[str]:
        """What the groups rest on beside the file; asked when they have been read."""
        if not self._assumed:
            return self._notes
        told = ", ".join(f"{name} {value}" for name, value in self._assumed.items())
        kind = repr(self._model_type)
        return [f"not in config.json, taken as transformers does for {kind}: {told}", *self._notes]

    def head_groups(self) -> list[KvGroup]:
        """Groups of layers with keys and values, those with full attention first."""
        if self._text.first_of("kv_lora_rank") is not None:
            known = ", ".join(name for name, family in FAMILIES.items() if family.is_latent)
            raise BadRequest(
                f"{self._model_type[:40]!r} has kv_lora_rank, but what it keeps is known of these "
                f"model types only: {known}; {ASK_VLLM}"
            )
        counts = Counter(self._kinds())
        groups = []
        for kind in (AttentionKind.FULL, AttentionKind.WINDOW):
            if not counts[kind]:
                continue
            is_global = kind is AttentionKind.FULL and self._family.has_global_heads
            kv_heads, head_dim = self._heads(is_global=is_global)
            groups.append(
                KvGroup(
                    kind=kind,
                    layer_count=counts[kind],
                    kv_head_count=kv_heads,
                    head_dim=head_dim,
                    head_bytes=2 * head_dim * self._dtype.value_bytes,
                    window_tokens=self._window() if kind is AttentionKind.WINDOW else None,
                )
            )
        return groups

    def latent_groups(self) -> list[KvGroup]:
        """Groups of a model with multi-head latent attention."""
        rank, rope = (self._required(name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        layer_count = self._layer_count()
        index_count = self._index_count(layer_count)
        head_bytes = (rank + rope) * self._dtype.value_bytes
        if index_count and self._dtype.is_fp8:
            if (rank, rope) != _PACKED_LATENT:
                raise BadRequest(
                    f"sparse attention over latents of {rank} + {rope} values is not known in fp8: "
                    "give --kv-dtype bf16"
                )
            head_bytes = _PACKED_LATENT_BYTES
            self._notes.append(f"fp8 latents are packed with their scales: {head_bytes} B each")
        groups = [
            KvGroup(
                kind=AttentionKind.LATENT,
                layer_count=layer_count,
                kv_head_count=1,
                head_dim=rank + rope,
                head_bytes=head_bytes,
            )
        ]
        if index_count:
            width = self._required("index_head_dim")
            scale_count = width // _INDEX_SCALE_VALUES
            groups.append(
                KvGroup(
                    kind=AttentionKind.INDEX,
                    layer_count=index_count,
                    kv_head_count=1,
                    head_dim=width,
                    head_bytes=width + scale_count * _INDEX_SCALE_BYTES,
                )
            )
        return groups

    def attention_head_count(self) -> int:
        return self._required("num_attention_heads", "n_head", "n_heads")

    def _layer_count(self) -> int:
        count = self._required("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if count > LAYER_COUNT_MAX:
            raise BadRequest(f"{count} layers: at most {LAYER_COUNT_MAX} can be sized")
        return count

    def _index_count(self, layer_count: int) -> int:
        """Layers that keep keys for choosing tokens; the others use an earlier layer's choice."""
        if self._optional("index_topk") is None:
            return 0
        pattern = self._text.first_of("index_topk_pattern", "indexer_types")
        if pattern is not None:
            raise BadRequest(f"{self._text.named(pattern)} is not known here; {ASK_VLLM}")
        every = self._text.whole("index_topk_freq") or 1
        first = self._text.whole("index_skip_topk_offset", minimum=0)
        offset = 2 if first is None else first
        return sum(max(layer - offset + 1, 0) % every == 0 for layer in range(layer_count))

    def _heads(self, *, is_global: bool) -> tuple[int, int]:
        """(KV heads, values in one head's key)."""
        kv_heads, head_dim = self._kv_head_count(), self._head_dim()
        if is_global:
            head_dim = self._required("global_head_dim")
            if self._text.flag("attention_k_eq_v"):
                kv_heads = self._text.whole("num_global_key_value_heads") or kv_heads
        heads = self.attention_head_count()
        if heads % kv_heads:
            raise BadRequest(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
        value_dim = self._text.whole("v_head_dim")
        if value_dim not in (None, head_dim):
            raise BadRequest(
                f"keys of {head_dim} and values of {value_dim} (v_head_dim) are not known in "
                f"{self._model_type[:40]!r}; {ASK_VLLM}"
            )
        return kv_heads, head_dim

    def _kv_head_count(self) -> int:
        text, heads = self._text, self.attention_head_count()
        given = text.whole(
            *("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"),
            "num_attention_groups",
        )
        is_one = text.flag("multi_query")
        if is_one is None:
            is_one = self._family.is_multi_query
        # Falcon's files may name all heads beside it; its newer form ignores it.
        if is_one and not text.flag("new_decoder_architecture"):
            return 1 if given is None or self._family.is_multi_query else given
        if given is None and (attention := text.part("attn_config")) is not None:
            given = attention.whole("kv_n_heads")
        if given is not None:
            return given
        if (default := self._optional("num_key_value_heads")) is not None:
            return default
        if self._model_type not in FAMILIES:
            self._notes.append(
                f"no field tells the number of KV heads: all {heads} attention heads are counted"
            )
        return heads

    def _head_dim(self) -> int:
        given = self._optional("head_dim", "kv_channels", "hidden_size_per_head")
        if given is not None:
            return given
        hidden, heads = (
            self._required("hidden_size", "n_embd", "d_model"),
            self.attention_head_count(),
        )
        if hidden % heads:
            raise BadRequest(
                f"hidden_size {hidden} is no multiple of {heads} attention heads, and head_dim is "
                "missing: add head_dim to config.json"
            )
        return hidden // heads

    def _kinds(self) -> list[AttentionKind]:
        """What each layer keeps; layers that keep nothing are left out."""
        layer_count = self._layer_count()
        kinds = self._given_kinds(layer_count) or self._pattern_kinds(layer_count)
        shared = self._optional("num_kv_shared_layers", minimum=0) or 0
        if not shared:
            return kinds
        if not self._family.shares_kv or shared >= layer_count:
            raise BadRequest(
                f"num_kv_shared_layers is {shared} of {layer_count} layers, which is not known in "
                f"{self._model_type[:40]!r}; {ASK_VLLM}"
            )
        self._notes.append(f"the last {shared} of {layer_count} layers read the KV of earlier ones")
        return kinds[:-shared]

    def _given_kinds(self, layer_count: int) -> list[AttentionKind] | None:
        """From `layer_types`, where the file has them."""
        names = self._text.values_of("layer_types")
        if names is None:
            return None
        if len(names) != layer_count:
            raise BadRequest(
                f"{self._text.named('layer_types')} has {len(names)} layers and num_hidden_layers "
                f"says {layer_count}: config.json contradicts itself"
            )
        # Other names are refused before. Without a window all tokens are read.
        local = AttentionKind.WINDOW if self._window() else AttentionKind.FULL
        return [AttentionKind.FULL if name in FULL_NAMES else local for name in names]

    def _pattern_kinds(self, layer_count: int) -> list[AttentionKind]:
        """From what the family does."""
        full, window = AttentionKind.FULL, AttentionKind.WINDOW
        if self._window() is None:
            return [full] * layer_count
        if self._family.is_window_optional:
            full_count = min(self._optional("max_window_layers", minimum=0) or 0, layer_count)
            return [full] * full_count + [window] * (layer_count - full_count)
        uses_rope = self._text.values_of("no_rope_layers")
        if self._model_type == "llama4_text" and uses_rope is not None:
            return [window if one else full for one in uses_rope[:layer_count]]
        every = (
            self._text.whole("sliding_window_pattern", "_sliding_window_pattern")
            or self._family.full_every
        )
        kinds = [
            window if every is None or (layer + 1) % every else full for layer in range(layer_count)
        ]
        if self._family.is_last_full:
            kinds[-1] = full
        return kinds

    def _window(self) -> int | None:
        """How many tokens layers with a window read; None where there is no window."""
        is_used = self._text.flag("use_sliding_window")
        if is_used is False or (is_used is None and self._family.is_window_optional):
            return None
        return (
            self._optional("sliding_window", minimum=0)
            or self._optional("attention_chunk_size")
            or None
        )

    def _optional(self, *names: str, minimum: int = 1) -> int | None:
        """A field; where it is absent, and not null, the family's default."""
        given = self._text.whole(*names, minimum=minimum)
        if given is not None or any(self._text.has(name) for name in names):
            return given
        default = self._family.defaults.get(names[0])
        if default:
            self._assumed[names[0]] = default
        return default

    def _required(self, *names: str) -> int:
        found = self._optional(*names)
        if found is None:
            raise BadRequest(
                f"config.json has no {self._text.named(names[0])}, and model type "
                f"{self._model_type[:40]!r} has no default: give the model's own config.json"
            )
        return found
