"""kvtier in vLLM 0.28 to 0.33; imports vLLM, so that only vLLM's own processes import it."""

from kvtier.connector.vllm.connector import KVTierConnector

__all__ = ["KVTierConnector"]
