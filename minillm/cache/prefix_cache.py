"""Which full blocks hold which tokens: a prompt's beginning costs nothing where it was computed before.

A block is found by the tokens in it and by the block before it, all the way back to the first: a chain. Each link is a
node with a number of its own, and the key of a block is (node before it, its tokens). Python's dictionary compares keys
that hash alike: a collision never gives a wrong answer. (vLLM's chain of hashes, Kwon et al. 2023, without the hash.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Node = int | str | None  # a block's number, or the salt that a chain begins with


@dataclass(frozen=True)
class PrefixEntry:
    """A findable block: its node, and its key."""

    node: int
    before: Node
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class CachedPrefix:
    """The blocks that hold the beginning of a prompt at this moment."""

    blocks: list[int]
    nodes: list[Node]  # of these blocks
    num_tokens: int  # in them: full blocks only, and never all of the prompt, for the last one's logits are needed
    num_held: int  # blocks that tables hold already, and that cost nothing


class PrefixCache:
    """The index. It neither owns nor counts blocks: the block manager says which are findable and which are gone."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[tuple[Node, tuple[int, ...]], int] = {}
        self._entries: dict[int, tuple[int, tuple[Node, tuple[int, ...]]]] = {}  # block -> (its node, its key)
        self._next_node = 0

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def after(self, node: Node) -> Iterator[tuple[int, ...]]:
        """The tokens of every block that can be found after ``node``; looks at all blocks, which takes time."""
        return (tokens for before, tokens in self._blocks if before == node and type(before) is type(node))

    def entry(self, block: int) -> PrefixEntry | None:
        """Return the entry under which a block can be found, if there is one."""
        if block not in self._entries:
            return None
        node, (before, token_ids) = self._entries[block]
        return PrefixEntry(node, before, token_ids)

    def match(self, token_ids: Sequence[int], salt: str | None, limit: int) -> tuple[list[int], list[Node]]:
        """The cached blocks of the first ``limit`` tokens at most, and their nodes."""
        size = self.block_size
        blocks: list[int] = []
        nodes: list[Node] = []
        node: Node = salt
        tokens = tuple(token_ids)  # its parts need not be copied again
        for end in range(size, limit + 1, size):
            block = self._blocks.get((node, tokens[end - size : end]))
            if block is None:
                break
            node = self._entries[block][0]
            blocks.append(block)
            nodes.append(node)
        return blocks, nodes

    def add(self, block: int, before: Node, token_ids: Sequence[int]) -> Node:
        """Make a full block findable after node ``before``; returns its node, or that of an equal block."""
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
        """Let nobody find a block whose content is about to change."""
        del self._blocks[self._entries.pop(block)[1]]
