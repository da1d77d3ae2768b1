"""Create the disk tier of an engine's prefix cache."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from minillm.blockstore.files import BlockStore, blocks_dir
from minillm.blockstore.tier import DiskTier
from minillm.cache import BlockManager
from minillm.config import EngineConfig
from minillm.loading.describe import Description
from minillm.progress import OnMessage
from minillm.runner.pool_blocks import PoolBlocks
from minillm.runner.runner import Runner
from minillm.runner.sharded_blocks import ShardedBlocks

_FORMAT = 1  # version of the files and of the arithmetic: increase it when a kernel's results change
_CHAT_LIMIT, _FREE_SHARE = 2 * 10**9, 0.1  # maximum size in bytes; maximum fraction of the free disk space
_MOUNTS = Path("/proc/self/mounts")
# File systems on other machines: reading may block for minutes, and a checksum does not help against a lost network.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "fuse.glusterfs", "lustre", "beegfs"),
    *("gpfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"),
}


def disk_tier(
    config: EngineConfig,
    runner: Runner,
    cache: BlockManager,
    description: Description,
    on_message: OnMessage,
    send: Callable[[bytes], object] | None,
) -> DiskTier | None:
    """Return the disk tier that ``config`` asks for. Return None if it asks for none.

    If the disk cannot be used, report this to ``on_message`` in one line, and return None.

    ``send``: sends a message to the other ranks of the model; None: there are none.
    """
    if not config.disk_cache:
        return None
    facts = _facts(config, runner, description)
    identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    root = blocks_dir()
    pool = PoolBlocks(runner.kv_cache.tensors, config.block_size) if send is None else ShardedBlocks(runner, send)
    about = {"model": description.name, "dtype": facts["dtype"], "device": facts["device"]}
    about |= {"block_size": config.block_size, "block_bytes": pool.num_bytes}
    try:
        store = BlockStore(root, identity, about, config.disk_cache)
        if (kind := _file_system(root)) in _NETWORK:
            raise OSError(0, f"it is on a network disk ({kind})")
    except OSError as error:
        on_message(f"the disk cache is off: {root}: {error.strerror or error}")
        return None
    return DiskTier(store, cache, pool, on_message, runner.observers)


def _chat_limit() -> int:
    """Return the bytes that a chat's disk cache may take: 2 GB, or a tenth of the free disk space if that is less."""
    path = blocks_dir()
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        state = os.statvfs(path)
    except OSError:
        return 0
    return min(_CHAT_LIMIT, int(_FREE_SHARE * state.f_bavail * state.f_frsize))


def with_chat_cache(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` of EngineConfig for a chat, with the size of a disk cache added.

    The size is not added if ``options`` set it or exclude a disk cache.
    """
    config = EngineConfig(**options)
    excluded = "disk_cache" in options or not config.enable_prefix_caching
    return {**({} if excluded else {"disk_cache": _chat_limit()}), **options}


def _facts(config: EngineConfig, runner: Runner, description: Description) -> dict[str, Any]:
    """Return everything, apart from the tokens, that determines the K and V of a block: model, dtype, device, …"""
    model = runner.model
    on_gpu, num_ranks = model.device.type == "cuda", config.tensor_parallel_size
    return {
        **({"ranks": num_ranks} if num_ranks > 1 else {}),  # without it, blocks of earlier versions are found
        "format": _FORMAT,
        "weights": description.identity,
        "config": {
            each.name: repr(getattr(model.config, each.name))
            for each in fields(model.config)
            if each.name not in ("generation_defaults", "eos_token_ids", "bos_token_id")
        },
        "held": sorted({f"{type(linear.packed).__name__} {linear.max_low_bit_tokens}" for linear in model.linears}),
        "quantize": config.quantize,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv": [str(tensor.dtype) for tensor in runner.kv_cache.tensors],
        "shapes": [[*tensor.shape[:2], *tensor.shape[3:]] for tensor in runner.kv_cache.tensors],
        "block_size": config.block_size,
        "device": torch.cuda.get_device_name(model.device) if on_gpu else "cpu",
        "deterministic": [torch.__version__, _triton_version()] if config.deterministic else None,
    }


def _triton_version() -> str:
    from importlib.metadata import version

    return version("triton")


def _file_system(path: Path) -> str:
    """Return the type of the file system that contains ``path``, such as "ext4", or "" if it is unknown."""
    best, kind = "", ""
    place = str(path.resolve())
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for words in (line.split() for line in lines):
        point = words[1].replace("\\040", " ") if len(words) > 2 else ""
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if point and inside and len(point) >= len(best):
            best, kind = point, words[2]
    return kind
