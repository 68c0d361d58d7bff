"""Copies of an engine whose KV is on a GPU: torch's tensors and stream as plain numbers.

torch itself is used for nothing else: no copy goes through it, and no stream of its own waits.
"""

from __future__ import annotations

import logging

import torch

from kvtier.connector.settings import ConnectorSettings
from kvtier.connector.stream_copying import DeviceBlocks
from kvtier.connector.vllm.geometry import BlockGeometry
from kvtier.connector.vllm.unsupported import Unsupported
from kvtier.cuda.cudart import open_cudart
from kvtier.cuda.device_layout import DeviceTensor, layout_of
from kvtier.cuda.errors import CudaRefused, CudaUnavailable
from kvtier.cuda.kernel_copies import find_run_kernels
from kvtier.cuda.numa import device_node
from kvtier.cuda.runtime import Stream
from kvtier.errors import BadRequest

log = logging.getLogger(__name__)


def device_blocks(
    geometry: BlockGeometry, device: torch.device, settings: ConnectorSettings
) -> DeviceBlocks:
    """Tries every way of copying first, which takes milliseconds. Raises Unsupported."""
    if vars(torch.version).get("hip") is not None:
        raise Unsupported("kvtier: AMD GPUs are not supported; run without kvtier")
    index = device.index  # A tensor's device has one.

    def compute() -> Stream:
        return Stream(torch.cuda.current_stream(index).cuda_stream)

    try:
        layout = layout_of(device_tensors(geometry))
        runtime = open_cudart()
        blocks = DeviceBlocks(
            runtime,
            index,
            layout,
            compute,
            kernels=find_run_kernels(runtime, index),
            offload_stretch_max=settings.offload_stretch_max,
        )
        wrong = blocks.streams.try_paths()
    except (BadRequest, CudaRefused, CudaUnavailable) as error:
        raise Unsupported(f"kvtier: {error}; run without kvtier") from error
    log.warning(
        "kvtier: copies on a GPU are tested without one, and were never run on one by us:"
        " try `kvtier selftest vllm` first"
    )
    if wrong:
        log.error("kvtier: this GPU or its driver copies wrongly by %s: not used", ", ".join(wrong))
    return blocks


def memory_node(device: torch.device) -> int | None:
    """The NUMA node nearest to the GPU; None when nobody tells."""
    if device.type != "cuda":
        return None
    return device_node(open_cudart().attributes(device.index))


def device_tensors(geometry: BlockGeometry) -> list[DeviceTensor]:
    """What of torch's tensors decides where bytes lie; a slot's bytes are those of a CPU engine."""
    found = []
    for plane in geometry.planes:
        tensor, size = plane.blocks, plane.blocks.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        found.append(DeviceTensor(tensor.data_ptr(), tuple(tensor.shape), strides, size))
    return found
