"""The files by which a client shows a daemon on another machine who it is, and knows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files; each new session reads them anew, so that they may be replaced meanwhile."""

    certificate: Path  # Ours, and those between it and the root.
    private_key: Path  # Not encrypted.
    authorities: Path  # Who may vouch for the daemon; its certificate names the host we call.

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError for a file that cannot be read."""
        texts = []
        for path in (self.authorities, self.private_key, self.certificate):
            try:
                texts.append(path.expanduser().read_bytes())
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror}") from None
        return grpc.ssl_channel_credentials(*texts)
