"""How many bytes a value of KV takes: as asked for, or as vLLM chooses by itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import BadRequest
from kvtier.sizing.fields import Fields

AUTO = "auto"
FP8 = "fp8"
# The short names, and those of vLLM's --kv-cache-dtype and --dtype.
VALUE_BYTES = {
    FP8: 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp16": 2,
    "float16": 2,
    "half": 2,
    "bf16": 2,
    "bfloat16": 2,
    "fp32": 4,
    "float32": 4,
}
_ADVICE = "say which with --kv-dtype"


@dataclass(frozen=True, slots=True)
class KvDtype:
    """`note` says what the choice rests on where the file does not decide it."""

    name: str
    value_bytes: int
    note: str = ""

    @property
    def is_fp8(self) -> bool:
        return self.value_bytes == 1


def kv_dtype_of(top: Fields, text: Fields, asked: str) -> KvDtype:
    """The dtype asked for; for "auto" what vLLM takes without --dtype and --kv-cache-dtype."""
    if asked != AUTO:
        if asked not in VALUE_BYTES:
            raise BadRequest(
                f"--kv-dtype {asked!r}: give {AUTO} or one of {', '.join(VALUE_BYTES)}"
            )
        return KvDtype(asked, VALUE_BYTES[asked])
    for part in (top, text):
        if (scheme := _quantized(part)) is not None:
            return scheme
    name = _checkpoint_dtype(top) or _checkpoint_dtype(text)
    if name is None:
        return KvDtype("16 bits", 2, f"config.json has no dtype: 16 bits are assumed; {_ADVICE}")
    if VALUE_BYTES.get(name) == 4:
        note = "the weights are float32, which vLLM serves in 16 bits unless --dtype says otherwise"
        return KvDtype("16 bits", 2, f"{note}; for float32 say --kv-dtype fp32")
    if VALUE_BYTES.get(name) != 2:
        raise BadRequest(f"the dtype of the weights, {name[:40]!r}, does not tell KV's: {_ADVICE}")
    return KvDtype(name, 2)


def _checkpoint_dtype(part: Fields) -> str | None:
    name = part.first_of("dtype", "torch_dtype")
    text = None if name is None else part.text(name)
    return None if text in (None, "auto") else text.removeprefix("torch.")


def _quantized(part: Fields) -> KvDtype | None:
    """The dtype that a quantized checkpoint prescribes for its KV."""
    for name in ("quantization_config", "compression_config"):
        outer = part.part(name)
        for quantization in (outer, outer and outer.part("quantization")):
            if quantization is None:
                continue
            if (scheme := quantization.part("kv_cache_scheme")) is not None:
                is_fp8 = scheme.text("type") == "float" and scheme.whole("num_bits") == 8
            elif quantization.first_of("kv_cache_quant_algo") is not None:
                is_fp8 = (quantization.text("kv_cache_quant_algo") or "").lower() == FP8
            else:
                continue
            if not is_fp8:
                raise BadRequest(f"{name} prescribes another dtype than fp8 for KV: {_ADVICE}")
            return KvDtype(FP8, 1, f"fp8 because {name} says so")
    return None
