"""DraftTree: a draft as parents alone. Everything else (depth, mask, positions, root paths) is derived here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class DraftTree:
    """A tree of nodes in an order where parents come first.

    ``parents`` is int64 [N]; ``parents[0] == -1`` (node 0 is the pending token, the root) and ``0 <= parents[i] < i``
    for the others. A chain is a tree with one child a node.
    """

    parents: IntArray

    def __post_init__(self) -> None:
        parents = np.asarray(self.parents, dtype=np.int64)
        object.__setattr__(self, "parents", parents)
        if parents.ndim != 1 or parents.size == 0 or parents[0] != -1:
            raise ValueError(f"DraftTree: parents must be a vector whose first entry is -1, found {parents.tolist()}")
        rest = parents[1:]
        if np.any(rest < 0) or np.any(rest >= np.arange(1, parents.size)):
            raise ValueError(f"DraftTree: every node's parent must come before it, found {parents.tolist()}")

    @staticmethod
    def chain(drafted: int) -> DraftTree:
        """The root and ``drafted`` nodes in a row."""
        return DraftTree(np.arange(-1, drafted, dtype=np.int64))

    @staticmethod
    def from_paths(paths: Sequence[Sequence[int]]) -> DraftTree:
        """A static tree from choice paths as Medusa writes them: ``(0, 2)`` is child 2 of child 0 of the root.

        Nodes are ordered by (depth, path); a path whose prefix is missing is refused.
        """
        ordered = sorted({tuple(p) for p in paths}, key=lambda p: (len(p), p))
        index: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        for path in ordered:
            if path[:-1] not in index:
                raise ValueError(f"DraftTree: path {path} has no parent {path[:-1]} in the tree")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
        return DraftTree(np.array(parents, dtype=np.int64))

    @property
    def size(self) -> int:
        """Number of nodes, the root included."""
        return int(self.parents.size)

    @cached_property
    def depths(self) -> IntArray:
        """int64 [N]: edges from the root."""
        depths = np.zeros(self.size, dtype=np.int64)
        for node in range(1, self.size):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @cached_property
    def chained(self) -> int:
        """How many of the first nodes form a chain, the root included."""
        branches = np.flatnonzero(self.parents != np.arange(-1, self.size - 1))
        return int(branches[0]) if branches.size else self.size

    @cached_property
    def mask(self) -> BoolArray:
        """bool [N, N]: node i sees node j when j is i or one of its ancestors."""
        mask = np.eye(self.size, dtype=np.bool_)
        for node in range(1, self.size):
            mask[node] |= mask[self.parents[node]]
        return mask

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Each node's children in draft order."""
        lists: list[list[int]] = [[] for _ in range(self.size)]
        for node in range(1, self.size):
            lists[self.parents[node]].append(node)
        return tuple(tuple(c) for c in lists)

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def prefix(self, count: int) -> DraftTree:
        """The tree of the first ``count`` nodes: trimming never looks at which tokens were drawn."""
        return DraftTree(self.parents[:count])
