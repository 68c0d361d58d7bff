"""What CUDA answers, as errors whose class says what to do next."""

from __future__ import annotations

from enum import IntEnum

from kvtier.errors import KVTierError


class CudaCode(IntEnum):
    """The result codes that kvtier tells apart; the driver uses the same numbers for these."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NO_DRIVER = 35
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_CONTEXT = 201
    ECC_UNCORRECTABLE = 214
    NVLINK_UNCORRECTABLE = 220
    CONTAINED = 226
    INVALID_HANDLE = 400
    SYMBOL_ABSENT = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_TIMEOUT = 702
    ASSERTED = 710
    ALREADY_REGISTERED = 712
    NOT_REGISTERED = 713
    HARDWARE_STACK = 714
    ILLEGAL_INSTRUCTION = 715
    MISALIGNED = 716
    INVALID_ADDRESS_SPACE = 717
    INVALID_PC = 718
    LAUNCH_FAILURE = 719
    TENSOR_MEMORY_LEAK = 721
    NOT_SUPPORTED = 801
    MPS_CLIENT_ENDED = 810
    UNKNOWN = 999


STICKY_CODES = frozenset(
    {
        CudaCode.ECC_UNCORRECTABLE,
        CudaCode.NVLINK_UNCORRECTABLE,
        CudaCode.CONTAINED,
        CudaCode.ILLEGAL_ADDRESS,
        CudaCode.LAUNCH_TIMEOUT,
        CudaCode.ASSERTED,
        CudaCode.HARDWARE_STACK,
        CudaCode.ILLEGAL_INSTRUCTION,
        CudaCode.MISALIGNED,
        CudaCode.INVALID_ADDRESS_SPACE,
        CudaCode.INVALID_PC,
        CudaCode.LAUNCH_FAILURE,
        CudaCode.TENSOR_MEMORY_LEAK,
        CudaCode.MPS_CLIENT_ENDED,
        CudaCode.UNKNOWN,
    }
)
"""After one of these every call in the process fails until the process ends."""

_MEMORY_CODES = frozenset({CudaCode.OUT_OF_MEMORY})
_ABSENT_CODES = frozenset(
    {CudaCode.NO_DRIVER, CudaCode.NO_DEVICE, 3, 34, 46, 802, 803, 804}
)  # Also: not initialised, stub library, devices busy or being set up, driver mismatch.


class CudaUnavailable(KVTierError):
    """There is no usable CUDA here: go on without a GPU, or mend what the message names."""


class CudaRefused(KVTierError):
    """CUDA refused this one call and nothing was queued: take another path or mend the call."""

    def __init__(self, call: str, code: int, text: str = "") -> None:
        self.call = call
        self.code = code
        super().__init__(f"{call}: {_name(code)}{f': {text}' if text else ''}")


class CudaMemoryFull(CudaRefused):
    """Not enough memory for this call; nothing was changed. Ask for less or do without."""


class CudaBroken(CudaRefused):
    """The CUDA context is lost, in the whole process: copy nothing more and commit nothing more.

    What was queued may have landed in part, or may still land until the process has ended.
    """


class RegistrationRefused(KVTierError):
    """The slab could not be pinned; nothing was registered. Copy it as pageable memory."""


def error_of(call: str, code: int, text: str = "") -> KVTierError:
    """The error that says what to do about `code`, which is not SUCCESS."""
    assert code != CudaCode.SUCCESS, f"{call} succeeded"
    if code in STICKY_CODES:
        return CudaBroken(call, code, text)
    if code in _MEMORY_CODES:
        return CudaMemoryFull(call, code, text)
    if code in _ABSENT_CODES:
        return CudaUnavailable(f"{call}: {_name(code)}{f': {text}' if text else ''}")
    return CudaRefused(call, code, text)


def _name(code: int) -> str:
    try:
        return f"{CudaCode(code).name} ({code})"
    except ValueError:
        return f"CUDA error {code}"
