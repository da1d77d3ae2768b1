"""``minillm cache``: list, verify, trim and clear the blocks of the KV cache on disk."""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from minillm.blockstore import files
from minillm.checks import parse_bytes
from minillm.errors import UsageError
from minillm.progress import size
from minillm.text.safe import clean_line


def run(arguments: argparse.Namespace) -> int:
    """Carry out the action that the command line names, such as ``trim``. Return the exit code."""
    action, root = arguments.action, files.blocks_dir()
    if (arguments.size is None) == (action == "trim"):
        raise UsageError("`minillm cache trim SIZE` needs a size, such as 5GB; other actions have none")
    limit = parse_bytes("cache trim", arguments.size)
    if action == "list":
        return _list(root, as_json=arguments.json)
    before = files.bytes_of(files.listed(root))
    if action == "verify":
        blocks = list(files.listed(root))
        damaged = sum(not is_whole(block) for block in blocks)
        print(f"{len(blocks):,} blocks read: {damaged:,} were damaged and are removed")
        return int(damaged > 0)
    if action == "clear":
        print(f"{size(remove_blocks(root))} are free again")
        return 0
    assert limit is not None
    files.trim(root, limit)
    print(f"{size(before - files.bytes_of(files.listed(root)))} are free again")
    return 0


def remove_blocks(root: Path, model: str | None = None) -> int:
    """Remove all blocks of a model, by default of all models. Return the freed bytes. Raises OSError."""
    freed = 0
    for home in files.homes(root):
        if model is None or files.read_about(home).get("model") == model:
            freed += files.bytes_of(files.listed_in(home))
            shutil.rmtree(home)
    return freed


def is_whole(block: files.BlockFile) -> bool:
    """Read a listed block, and return whether its checksum is right. If not, remove the block."""
    buffer = bytearray(max(0, block.num_bytes - files.HEADER_BYTES))
    return files.read_into(block.path, None, [memoryview(buffer)])


def _list(root: Path, *, as_json: bool) -> int:
    rows: list[dict[str, Any]] = []
    for home in files.homes(root):
        blocks, about = list(files.listed_in(home)), files.read_about(home)
        used = max((block.used for block in blocks), default=0) / 1e9
        facts = {name: about.get(name) for name in ("model", "dtype", "device", "block_size")}
        num_bytes = files.bytes_of(blocks)
        rows.append({**facts, "blocks": len(blocks), "bytes": num_bytes, "used": used, "path": str(home)})
    rows.sort(key=lambda row: -row["used"])
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return 0
    print(f"{'model':32}{'dtype':10}{'blocks':>9}{'tokens':>11}{'size':>10}  last used")
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"])) if row["blocks"] else "never"
        name, dtype = (clean_line(str(row[key] or "unknown"), 30) for key in ("model", "dtype"))
        tokens = row["blocks"] * row["block_size"] if isinstance(row["block_size"], int) else 0
        print(f"{name:32}{dtype:10}{row['blocks']:>9,}{tokens:>11,}{size(row['bytes']):>10}  {when}")
    print(f"in {clean_line(str(root), 1000)}: {size(sum(row['bytes'] for row in rows))}")
    return 0
