"""Models that are not sized, and why: each in one line that says what else there is to do."""

from __future__ import annotations

from collections import Counter

from kvtier.errors import BadRequest
from kvtier.sizing.families import (
    ENCODER_TYPES,
    RECURRENT_FIELDS,
    RECURRENT_TYPES,
    UNKNOWN_FORMS,
)
from kvtier.sizing.fields import Fields

ASK_VLLM = "vLLM's log tells at the start how many tokens fit into how much memory"
# What `layer_types` may say of layers that keep KV of each token; the second kind reads the last.
FULL_NAMES = ("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention")
LOCAL_NAMES = ("sliding_attention", "chunked_attention")


def check_known(model_type: str, top: Fields, text: Fields) -> None:
    """Raises BadRequest for a model whose layers are not understood."""
    kind = repr(model_type[:40])
    if any(part.flag("is_encoder_decoder") for part in (top, text)):
        raise BadRequest(f"{kind} is an encoder with a decoder: kvtier holds KV of decoders only")
    if model_type in ENCODER_TYPES:
        raise BadRequest(f"{kind} is an encoder: it keeps no KV that kvtier could hold")
    names = text.values_of("layer_types") or []
    others = Counter(
        str(name)[:40] for name in names if name not in FULL_NAMES and name not in LOCAL_NAMES
    )
    if others:
        told = ", ".join(f"{count} {name}" for name, count in others.items())
        raise BadRequest(
            f"{kind}: of {len(names)} layers {told} keep something else than KV of each token, "
            "such as a state of fixed size: kvtier does not hold such models"
        )
    is_recurrent = model_type in RECURRENT_TYPES or any(map(text.is_set, RECURRENT_FIELDS))
    # Some files of hybrid types have attention in all their layers, and say so.
    if is_recurrent and not names:
        raise BadRequest(
            f"{kind} has layers that keep a state of fixed size (Mamba, linear attention and the "
            "like) instead of KV of each token: kvtier does not hold such models"
        )
    form = next((name for name in UNKNOWN_FORMS if text.is_set(name)), None)
    if form is not None:
        raise BadRequest(
            f"{text.named(form)} tells of {UNKNOWN_FORMS[form]}, which cannot be sized; {ASK_VLLM}"
        )
