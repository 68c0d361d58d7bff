"""vLLM's plugin hook: registers the connector by name, in every process and as often as asked.

`kv_connector_module_path` alone is enough for one connector; inside vLLM's MultiConnector the name
must be known as well.
"""

from __future__ import annotations

NAME = "KVTierConnector"
MODULE = "kvtier.connector.vllm"


def register() -> None:
    """Make `"kv_connector": "KVTierConnector"` known to vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
