"""The process that `kill_copy` kills: offloads into a slab that it was given, without an end."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.gpu.kill_copy import COPYING
from benchmarks.gpu.rig import Rig, Work, open_rig
from benchmarks.gpu.slabs import Slab
from kvtier.cuda.device_layout import DeviceTensor, layout_of
from kvtier.cuda.fake import FakeCudart
from kvtier.cuda.registration import SlabRegistry
from kvtier.cuda.runtime import Direction
from kvtier.cuda.streams import CopyStreams

_BLOCK_BYTES_MAX = 2 << 20
# Should nobody kill it.
_SECONDS_MAX = 60.0


def copy_for_ever(rig: Rig, slab: Slab, half_bytes: int) -> None:
    """Two sets of blocks with other bytes in turn, so that every look at the slab differs."""
    runtime = rig.runtime
    block_bytes = min(_BLOCK_BYTES_MAX, half_bytes)
    count = half_bytes // block_bytes
    device = runtime.allocate_device(2 * half_bytes)
    tensor = DeviceTensor(device, (2 * count, block_bytes), (block_bytes, 1), 1)
    compute = runtime.create_stream(0)
    content = np.repeat(np.array([0x11, 0x22], np.uint8), half_bytes)
    source = int(content.ctypes.data)
    runtime.copy(device, source, 2 * half_bytes, Direction.HOST_TO_DEVICE, compute)
    runtime.synchronize_stream(compute)
    registry = SlabRegistry(runtime)
    registry.add(slab.address, slab.length_bytes)
    registry.warm(rig.now())
    streams, layout = CopyStreams(runtime, registry), layout_of([tensor])
    slots = [slab.address + index * block_bytes for index in range(count)]
    has_said = False
    first = 0
    while not rig.is_late():
        streams.offload(layout, range(first, first + count), slots, streams.mark(compute))
        first = count - first
        while not streams.is_idle:
            streams.poll()
            rig.rest(20e-6)
        if not has_said:
            sys.stdout.buffer.write(COPYING)
            sys.stdout.buffer.flush()
            has_said = True


def main() -> None:
    fd, half_bytes = int(sys.argv[1]), int(sys.argv[2])
    if "--stand-in" in sys.argv:
        cuda = FakeCudart()
        rig = Rig(
            cuda,
            make_work=_absent,
            make_kernels=lambda: None,
            kernel_cache=None,
            now=lambda: cuda.now,
            rest=cuda.advance,
            deadline=_SECONDS_MAX,
        )
    else:
        rig = open_rig(_SECONDS_MAX, Path("unused"))
    copy_for_ever(rig, Slab(2 * half_bytes, fd=fd), half_bytes)


def _absent() -> Work:
    raise NotImplementedError("nothing is computed here")


if __name__ == "__main__":
    main()
