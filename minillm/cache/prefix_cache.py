"""Index from tokens to full blocks, so that cached beginnings of prompts are not computed again.

The key of a block is (the node before it, its tokens), and each block gets a new numbered node. Blocks are thus found
along a chain from the first one. Python's dictionary compares keys whole, so a hash collision never gives a wrong
answer. vLLM uses a chain of hashes instead (Kwon et al. 2023).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Node = int | str | None  # a number, or the salt that a chain begins with


@dataclass(frozen=True)
class PrefixEntry:
    """A findable block: its node, and its key."""

    node: int
    before: Node
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class CachedPrefix:
    """The cached blocks of a prompt's beginning at this moment."""

    blocks: list[int]
    nodes: list[Node]  # of these blocks
    num_tokens: int  # full blocks only, and never the whole prompt: its last token's logits are needed
    num_held: int  # blocks that tables already hold: using them takes no free block


class PrefixCache:
    """The index. It neither owns nor counts blocks; the block manager adds and removes them."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[tuple[Node, tuple[int, ...]], int] = {}
        self._entries: dict[int, tuple[int, tuple[Node, tuple[int, ...]]]] = {}  # block -> (its node, its key)
        self._next_node = 0

    def __contains__(self, block: int) -> bool:
        """Return whether ``block`` can be found by its tokens."""
        return block in self._entries

    def after(self, node: Node) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of every block that can be found after ``node``. Scans all blocks, which is slow."""
        return (tokens for before, tokens in self._blocks if before == node and type(before) is type(node))

    def entry(self, block: int) -> PrefixEntry | None:
        """Return the entry under which a block can be found, or None."""
        if block not in self._entries:
            return None
        node, (before, token_ids) = self._entries[block]
        return PrefixEntry(node, before, token_ids)

    def match(self, token_ids: Sequence[int], salt: str | None, limit: int) -> tuple[list[int], list[Node]]:
        """Return the cached blocks of the first ``limit`` tokens at most, and their nodes."""
        size = self.block_size
        blocks: list[int] = []
        nodes: list[Node] = []
        node: Node = salt
        tokens = tuple(token_ids)  # slices of a tuple need no conversion
        for end in range(size, limit + 1, size):
            block = self._blocks.get((node, tokens[end - size : end]))
            if block is None:
                break
            node = self._entries[block][0]
            blocks.append(block)
            nodes.append(node)
        return blocks, nodes

    def add(self, block: int, before: Node, token_ids: Sequence[int]) -> Node:
        """Make a full block findable after node ``before``; return its node, or that of an equal block."""
        key = (before, tuple(token_ids))
        known = self._blocks.get(key)
        if known is not None:
            return self._entries[known][0]
        node = self._next_node
        self._next_node += 1
        self._blocks[key] = block
        self._entries[block] = (node, key)
        return node

    def remove(self, block: int) -> None:
        """Make a block unfindable, because its content is about to change."""
        del self._blocks[self._entries.pop(block)[1]]
