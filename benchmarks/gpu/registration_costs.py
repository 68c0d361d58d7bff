"""Stage: what pinning costs a GiB, by the kind of pages, and again for a second mapping."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.slabs import Pages, Slab, huge_bytes_of
from kvtier.cuda.errors import CudaRefused, RegistrationRefused
from kvtier.cuda.registration import SlabRegistry, SlabState

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    slab_bytes: int = GIB
    slab_count: int = 4


def measure(rig: Rig, findings: Findings, sizes: Sizes = Sizes()) -> None:
    for pages in Pages:
        if rig.is_late(2.0):
            findings.cut_short(f"registration on {pages.value} pages")
            continue
        try:
            slabs = [Slab(sizes.slab_bytes, pages) for _ in range(sizes.slab_count)]
        except OSError as error:
            findings.add("registration", {"pages": pages.value, "absent": str(error)})
            continue
        try:
            findings.add("registration", {"pages": pages.value, **_costs(rig, slabs)})
        finally:
            for slab in slabs:
                slab.close()
    _check_registry(rig, findings, sizes)


def _costs(rig: Rig, slabs: list[Slab]) -> dict[str, float | int | None]:
    """Seconds a GiB: to register, as another mapping of the same memory, and to unregister."""
    runtime = rig.runtime
    gibs = sum(slab.length_bytes for slab in slabs) / GIB
    start = rig.now()
    for slab in slabs:
        runtime.register_host(slab.address, slab.length_bytes)
    registered = rig.now()
    second = Slab(slabs[0].length_bytes, fd=slabs[0].fd)
    second_start = rig.now()
    runtime.register_host(second.address, second.length_bytes)
    second_end = rig.now()
    runtime.unregister_host(second.address)
    second.close()
    unregister_start = rig.now()
    for slab in slabs:
        runtime.unregister_host(slab.address)
    return {
        "seconds_a_gib": round((registered - start) / gibs, 5),
        "second_mapping_seconds_a_gib": round(
            (second_end - second_start) / (second.length_bytes / GIB), 5
        ),
        "unregister_seconds_a_gib": round((rig.now() - unregister_start) / gibs, 5),
        "slab_bytes": slabs[0].length_bytes,
        "huge_bytes": huge_bytes_of(slabs[0].address),
    }


def _check_registry(rig: Rig, findings: Findings, sizes: Sizes) -> None:
    """Slabs are pinned one at a time and given back exactly."""
    slab = Slab(sizes.slab_bytes)
    registry = SlabRegistry(rig.runtime)
    registry.add(slab.address, slab.length_bytes)
    findings.claim("a slab that is added costs nothing yet", registry.registered_bytes == 0)
    registry.warm(rig.now())
    findings.claim(
        "a warmed slab is registered as a whole",
        registry.registered_bytes == slab.length_bytes and not registry.refusals,
    )
    findings.claim("a slab that is given up goes at once", registry.give_up(slab.address))
    try:
        rig.runtime.register_host(slab.address, slab.length_bytes)
        rig.runtime.unregister_host(slab.address)
        is_free = True
    except (RegistrationRefused, CudaRefused):
        is_free = False
    findings.claim(f"and is no longer {SlabState.REGISTERED.name}", is_free)
    slab.close()
