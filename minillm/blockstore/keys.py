"""The key of a block on disk: a hash of everything that its K and V depend on.

A chain of hashes starts from the identity of the engine (weights, data types, rope, block size) and the salt. Each
block's hash covers the hash of the block before it and its own tokens, so equal keys mean equal K and V.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockKey:
    """The key of one block. ``index``: its position in its sequence. ``parent``: the hash of the block before it."""

    index: int
    parent: bytes
    digest: bytes

    @property
    def name(self) -> str:
        """The name of the block's file. `files.eviction_order` finds the parent's hash in it."""
        return f"{self.index:06x}-{self.parent.hex()[:16]}-{self.digest.hex()[:32]}"


def root(identity: bytes, salt: str | None) -> bytes:
    """Return the first hash of a sequence's chain: it covers the salt and the engine's ``identity`` (32 bytes)."""
    tenant = b"" if salt is None else b"\1" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(identity + tenant).digest()


def key_after(parent: bytes, index: int, token_ids: Sequence[int]) -> BlockKey:
    """Return the key of the block with ``token_ids`` after the block with hash ``parent``."""
    return BlockKey(index, parent, hashlib.sha256(parent + array("I", token_ids).tobytes()).digest())


def keys_after(parent: bytes, token_ids: Sequence[int], size: int, first: int = 0) -> Iterator[BlockKey]:
    """Yield the keys of a sequence's full blocks of ``size`` tokens. ``parent``: the hash before block ``first``."""
    for index in range(first, len(token_ids) // size):
        key = key_after(parent, index, token_ids[index * size : (index + 1) * size])
        yield key
        parent = key.digest
