"""Which requests' block hashes follow from their tokens alone.

Only those are described by token ids to who reads the daemon's events: for the others a router
would work out a hash that nobody has.
"""

from __future__ import annotations

from typing import Any

from kvtier.connector.requests import TokensOf

# What else goes into a hash, by whichever name a version of vLLM has for it.
_EXTRAS = ("lora_request", "mm_features", "cache_salt", "prompt_embeds")


def tokens_of(request: Any, block_tokens: int) -> TokensOf | None:
    """None when something else than tokens is in the hashes."""
    for name in _EXTRAS:
        value = getattr(request, name, None)
        if value is not None and (name == "prompt_embeds" or value):  # A tensor has no truth.
            return None

    def of_block(block: int) -> list[int]:
        ids = request.all_token_ids  # A view that grows with the request.
        return list(ids[block * block_tokens : (block + 1) * block_tokens])

    return of_block
