"""How much memory hangs on an object: what it refers to, and so on, but for code."""

from __future__ import annotations

import gc
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType

# A method leads to its object, which counts; a function leads to its module and so to everything.
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType)


def footprint_bytes(root: object) -> int:
    seen: set[int] = set()
    waiting = [root]
    total_bytes = 0
    while waiting:  # Ends: every object is looked at once.
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _CODE):
            continue
        seen.add(id(one))
        total_bytes += 0 if isinstance(one, MethodType) else sys.getsizeof(one)
        waiting.extend(gc.get_referents(one))
    return total_bytes
