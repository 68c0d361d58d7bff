"""The other prefix index: a radix tree, which SGLang has (Zheng et al., NeurIPS 2024).

Runs of tokens are on the edges, split where prompts part. It finds the blocks that chained hashes
find, and can say besides how many tokens of the next block are there, which a copy of that block
would save (`extra_count`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.engine.prefix_index import Prefix

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A run of blocks after its parent's. A home is None where the block was removed from between
    others, or is not there yet."""

    parent: _Node | None
    blocks: list[Tokens] = field(default_factory=list)
    homes: list[int | None] = field(default_factory=list)
    children: dict[Tokens, _Node] = field(default_factory=dict)  # By their first block.


class RadixTree:
    """Edges are whole blocks long: only blocks have homes, so prompts that part within a block part
    at its beginning. A node without children and homes does not stay."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._roots: dict[str | None, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # By device block.

    def match(self, prefix: Prefix) -> list[int]:
        return self._walk(prefix)[0]

    def extra_count(self, prefix: Prefix) -> int:
        found, node, offset = self._walk(prefix)
        start = len(found) * self._block_tokens
        wanted = tuple(prefix.token_ids[start : start + self._block_tokens])
        return max((_common_count(wanted, block) for block in _next(node, offset)), default=0)

    def add(self, prefix: Prefix, index: int, device_block: int) -> bool:
        node, offset = self._root_of(prefix.salt), 0
        for block in self._blocks_of(prefix, index + 1):
            node, offset = self._step(node, offset, block)
        if node.homes[offset - 1] is not None:
            return False
        node.homes[offset - 1] = device_block
        self._nodes[device_block] = node
        return True

    def remove(self, device_block: int) -> None:
        node = self._nodes.pop(device_block, None)
        if node is None:
            return
        node.homes[node.homes.index(device_block)] = None
        while not node.children:
            while node.homes and node.homes[-1] is None:
                node.homes.pop()
                node.blocks.pop()
            if node.homes or node.parent is None:
                break
            node.parent.children = {
                first: child for first, child in node.parent.children.items() if child is not node
            }
            node = node.parent

    def __contains__(self, device_block: int) -> bool:
        return device_block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def _walk(self, prefix: Prefix) -> tuple[list[int], _Node, int]:
        """The match, and where it ends: after `offset` blocks of a node."""
        node, offset, found = self._root_of(prefix.salt), 0, list[int]()
        for block in self._blocks_of(prefix, len(prefix.hashes)):
            if offset < len(node.blocks):
                then, after = node, offset
            elif block in node.children:
                then, after = node.children[block], 0
            else:
                break
            home = then.homes[after]
            if then.blocks[after] != block or home is None:
                break
            found.append(home)
            node, offset = then, after + 1
        return found, node, offset

    def _step(self, node: _Node, offset: int, block: Tokens) -> tuple[_Node, int]:
        """One block on from there; the way is made where there is none."""
        if offset < len(node.blocks):
            if node.blocks[offset] == block:
                return node, offset + 1
            self._split(node, offset)
        if (child := node.children.get(block)) is not None:
            return child, 1
        if node.parent is not None and not node.children:
            node.blocks.append(block)
            node.homes.append(None)
            return node, offset + 1
        child = node.children[block] = _Node(node, [block], [None])
        return child, 1

    def _split(self, node: _Node, offset: int) -> None:
        rest = _Node(node, node.blocks[offset:], node.homes[offset:], node.children)
        for child in rest.children.values():
            child.parent = rest
        for home in rest.homes:
            if home is not None:
                self._nodes[home] = rest
        del node.blocks[offset:], node.homes[offset:]
        node.children = {rest.blocks[0]: rest}

    def _root_of(self, salt: str | None) -> _Node:
        return self._roots.setdefault(salt, _Node(None))

    def _blocks_of(self, prefix: Prefix, count: int) -> list[Tokens]:
        size = self._block_tokens
        return [tuple(prefix.token_ids[i * size : (i + 1) * size]) for i in range(count)]


def _next(node: _Node, offset: int) -> list[Tokens]:
    """The blocks with a home that may come after."""
    if offset < len(node.blocks):
        return [node.blocks[offset]] if node.homes[offset] is not None else []
    return [child.blocks[0] for child in node.children.values() if child.homes[0] is not None]


def _common_count(first: Tokens, second: Tokens) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
