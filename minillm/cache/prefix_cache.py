"""Index from tokens to full blocks, so that cached beginnings of prompts are not computed again.

Each indexed block gets a number, its node. A block's key is (the node of the block before it, its own tokens), so a
lookup follows a chain of nodes from the first block. Python's dictionary compares whole keys, so a hash collision never
gives a wrong answer. vLLM uses a chain of hashes instead (Kwon et al. 2023).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Node = int | str | None  # a block's number, or the salt before the first block of a chain


@dataclass(frozen=True)
class PrefixEntry:
    """The index entry of a block: the block's number in the index (``node``), and its key.

    The key consists of the block's own tokens and ``before``: the node of the block before it. For a first block,
    ``before`` is the salt.
    """

    node: int
    before: Node
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class CachedPrefix:
    """The cached blocks at the beginning of a prompt, at the time of the lookup."""

    blocks: list[int]
    nodes: list[Node]  # the node of each of these blocks
    num_tokens: int  # full blocks only, and never the whole prompt: its last token's logits are needed
    num_held: int  # blocks that tables already hold: using them takes no free block


class PrefixCache:
    """The index of full blocks by their tokens. The block manager adds and removes blocks, and counts references."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[tuple[Node, tuple[int, ...]], int] = {}
        self._entries: dict[int, tuple[int, tuple[Node, tuple[int, ...]]]] = {}  # block -> (its node, its key)
        self._next_node = 0

    def __contains__(self, block: int) -> bool:
        """Return whether ``block`` is in the index."""
        return block in self._entries

    def after(self, node: Node) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of every indexed block that follows the block with number ``node``.

        If ``node`` is a salt, yield the tokens of every first block with this salt. Slow: this scans the whole index.
        """
        return (tokens for before, tokens in self._blocks if before == node and type(before) is type(node))

    def entry(self, block: int) -> PrefixEntry | None:
        """Return a block's index entry, or None if the block is not in the index."""
        if block not in self._entries:
            return None
        node, (before, token_ids) = self._entries[block]
        return PrefixEntry(node, before, token_ids)

    def nodes(self) -> set[Node]:
        """Return the nodes (numbers in the index) of all indexed blocks."""
        return {node for node, _ in self._entries.values()}

    def match(self, token_ids: Sequence[int], salt: str | None, limit: int) -> tuple[list[int], list[Node]]:
        """Return the cached blocks of a prompt's first tokens (at most ``limit`` tokens), and the blocks' nodes."""
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
        """Index a full block after node ``before``, unless an equal block is in the index. Return the block's node."""
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
        """Remove a block from the index, because its content is wrong or about to change."""
        del self._blocks[self._entries.pop(block)[1]]
