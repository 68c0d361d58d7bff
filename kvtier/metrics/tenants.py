"""What tenants hold, and what they were refused."""

from __future__ import annotations

from kvtier.metrics.registry import Registry


class TenantMetrics:
    """What tenants hold, and what they were refused; where there are several."""

    def __init__(self, registry: Registry) -> None:
        tenant = {"tenant": ("NAME",)}
        self.memory_bytes = registry.gauge(
            "kvtier_tenant_memory_bytes", "DRAM in slabs of a tenant's namespaces.", tenant
        )
        self.refused_calls = registry.counter(
            "kvtier_tenant_refused_calls_total",
            "Calls beyond tenant.NAME.calls_per_second.",
            tenant,
            prefill=False,
        )
