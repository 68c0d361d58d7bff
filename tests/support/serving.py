"""`kvtier serve` as a test's own process runs it, once what is to be otherwise is."""

from __future__ import annotations

import argparse
import sys

from kvtier.cli import serve
from kvtier.errors import ConfigError


def serve_daemon() -> int:
    """By the words of this process's command line; the exit code."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    try:
        return serve.run(parser.parse_args())
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
