"""`kvtier format PATH… --bytes 8GiB`: make one new NVMe pool of files or block devices.

Several paths are one pool, striped; each has the size that --bytes says (a device, all it has).
What they held is lost, so paths that hold anything are refused without --force. A dax device, such
as /dev/dax0.0, is made kvtier's in the same way, alone; so is an empty folder on a shared file
system, for the remote tier. Exit codes: 0; 2 when a path is refused, and then nothing was changed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvtier.cli.output import add_json_argument, bytes_text, print_json
from kvtier.cli.sizes import size
from kvtier.errors import BadRequest
from kvtier.io.dax import find_dax_device
from kvtier.layout import SEGMENT_BYTES
from kvtier.pools.dax import format_device
from kvtier.pools.nvme_paths import PATHS_MAX, format_paths
from kvtier.pools.remote.files import MARK_NAME, prepare_root


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="PATH", help="file, device, or folder"
    )
    parser.add_argument(
        "--bytes", type=size, dest="length_bytes", metavar="SIZE", help="of each path, as 8GiB"
    )
    parser.add_argument("--force", action="store_true", help="overwrite what the paths hold")
    parser.add_argument(
        "--segment-bytes", type=size, default=SEGMENT_BYTES, metavar="SIZE", help="(256MiB)"
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    paths: list[Path] = arguments.paths
    if len({path.resolve() for path in paths}) < len(paths):
        raise BadRequest("a path is given twice")
    if any(path.is_char_device() for path in paths):
        return _format_dax(paths, arguments)
    if any(path.is_dir() for path in paths):
        return _format_share(paths, arguments)
    if len(paths) > PATHS_MAX:
        raise BadRequest(f"{len(paths)} paths; a pool has at most {PATHS_MAX}")
    if arguments.segment_bytes % 4096:
        raise BadRequest("--segment-bytes: give a multiple of 4KiB")
    superblocks = format_paths(
        paths,
        arguments.length_bytes,
        pool_id=os.urandom(16),
        generation=_draw_generation(),
        force=arguments.force,
        segment_bytes=arguments.segment_bytes,
    )
    geometry = superblocks[0].geometry
    usable_bytes = geometry.segment_count * geometry.segment_bytes * len(paths)
    if arguments.json:
        print_json(
            {
                "paths": [str(path) for path in paths],
                "pool_id": superblocks[0].pool_id.hex(),
                "segments": geometry.segment_count * len(paths),
                "segment_bytes": geometry.segment_bytes,
                "usable_bytes": usable_bytes,
            }
        )
    else:
        print(
            f"{len(paths)} path(s) formatted: {geometry.segment_count * len(paths)} segments of "
            f"{bytes_text(geometry.segment_bytes)}, {bytes_text(usable_bytes)} for blocks"
        )
    return 0


def _format_dax(paths: list[Path], arguments: argparse.Namespace) -> int:
    if len(paths) > 1:
        raise BadRequest("a dax device is a pool of its own: give it alone")
    if arguments.length_bytes is not None:
        raise BadRequest("a dax device is used whole: leave --bytes out")
    device = find_dax_device(paths[0])
    format_device(device, generation=_draw_generation(), force=arguments.force)
    if arguments.json:
        print_json(
            {
                "paths": [str(device.path)],
                "bytes": device.size_bytes,
                "align_bytes": device.align_bytes,
                "target_node": device.target_node,
            }
        )
    else:
        print(f"{device.path} formatted: {bytes_text(device.size_bytes)}")
    return 0


def _format_share(paths: list[Path], arguments: argparse.Namespace) -> int:
    """Mark the folder, so that one whose share is not mounted is told from one that is."""
    [root, *others] = paths
    if others:
        raise BadRequest("a folder is a remote engine of its own: give it alone")
    if arguments.length_bytes is not None:
        raise BadRequest("a folder has no size: leave --bytes out, set remote.capacity_bytes")
    try:
        names = os.listdir(root)
        if names and MARK_NAME not in names and not arguments.force:
            raise BadRequest(f"{root} holds something; --force puts the blocks beside it")
        prepare_root(root)
    except OSError as error:
        raise BadRequest(f"{root}: {error.strerror}") from None
    if arguments.json:
        print_json({"paths": [str(root)], "was_formatted": MARK_NAME in names})
    else:
        print(f"{root} is a remote engine" + (" already" if MARK_NAME in names else " now"))
    return 0


def _draw_generation() -> int:
    return int.from_bytes(os.urandom(8), sys.byteorder)
