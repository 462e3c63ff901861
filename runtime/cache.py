"""KVCache: the buffers of one decoder for all its sequences, behind five verbs. Length arithmetic lives here alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from specrun import contract
from specrun.bundle import CacheShape
from specrun.device import Buffer, Device, host_dtype
from specrun.errors import CapacityError
from specrun.tree import IntArray

STEP = 256  # rows: a growing cache starts with so many and grows by a multiple of them


def grown(capacity: int, needed: int) -> int:
    """Rows of a growing cache that has ``capacity`` and needs ``needed``: a quarter more, or as many as that takes.

    Attention's cost on the CPU follows the capacity, not the context, so doubling would make most contexts pay for
    rows they do not use.
    """
    least = max(needed, capacity + capacity // 4)
    return capacity if needed <= capacity else -(-least // STEP) * STEP


@dataclass(eq=False)
class Lane:
    """One sequence's place in a cache. Set by KVCache alone; ``slot`` changes when another sequence leaves."""

    slot: int
    length: int = 0  # committed rows
    live: bool = field(default=True, repr=False)


class KVCache:
    """Linear rows per sequence: ``buffer`` is [2 * layers, B, H_kv, S, D], keys of all layers, then values.

    Lanes always fill slots 0..n-1, so any pass over neighbours is a slice. Rows at ``length`` and beyond are scratch:
    a pass writes its nodes there, ``commit`` keeps the accepted ones, the rest is free at once and never zeroed.

    ``max_length`` rows can be committed per sequence; ``max_nodes`` more are scratch for a pass at the very end.
    ``generation`` counts reallocations: steps captured before the last one are void.
    """

    def __init__(self, shape: CacheShape, device: Device, max_batch: int, max_length: int, max_nodes: int) -> None:
        self.shape, self.max_batch, self.max_length = shape, max_batch, max_length
        self.generation = 0
        self._device = device
        self._limit = max_length + max_nodes
        self._width = min(max_nodes, 128)  # the longest path that commit_rows takes: static in its kernel
        self._growing = shape.capacity is None
        if shape.capacity is not None and shape.capacity < self._limit:
            raise CapacityError(
                f"cache: the engine holds {shape.capacity} rows, {self._limit} are needed for {max_length} positions "
                f"and {max_nodes} nodes a pass. Ask for fewer, or compile with a larger --max-length."
            )
        self._lanes: list[Lane] = []
        self._allocate(1 if self._growing else max_batch, shape.capacity or STEP)

    @property
    def slots(self) -> int:
        return int(self.buffer.shape[1])

    @property
    def capacity(self) -> int:
        """S: rows a lane has now."""
        return int(self.buffer.shape[3])

    @property
    def has_lane(self) -> bool:
        return len(self._lanes) < self.max_batch

    def acquire(self, rows: int = 0) -> Lane:
        """A lane for a new sequence that will fill ``rows`` soon. Raises CapacityError when all are taken.

        A growing cache without lanes shrinks to what the first one needs: after a long sequence a short one is as fast
        as before it.
        """
        if len(self._lanes) == self.max_batch:
            raise CapacityError(f"cache: all {self.max_batch} lanes are taken; wait, or compile a larger --max-batch.")
        if self._growing and not self._lanes and self.capacity > 2 * grown(STEP, rows):
            self._allocate(1, grown(STEP, rows))
        if len(self._lanes) == self.slots:
            self._allocate(min(self.max_batch, 2 * self.slots), self.capacity)
        lane = Lane(len(self._lanes))
        self._lanes.append(lane)
        return lane

    def reserve(self, lanes: Sequence[Lane], nodes: int, kept: Sequence[int]) -> None:
        """Makes room for a pass of ``nodes`` nodes over ``lanes``, of which lane i can commit ``kept[i]`` at most.

        Raises CapacityError before anything is computed.
        """
        for lane, keep in zip(lanes, kept, strict=True):
            if lane.length + keep > self.max_length:
                raise CapacityError(
                    f"cache: {lane.length} rows are in use and a pass may keep {keep} more; the context ends at "
                    f"{self.max_length}. Shorten the prompt or compile with a larger --max-length."
                )
        needed = max(lane.length for lane in lanes) + nodes
        if needed > self._limit and not self._growing:
            raise CapacityError(f"cache: a pass needs {needed} rows, the engine holds {self.capacity}.")
        if needed > self.capacity:
            self._allocate(self.slots, grown(self.capacity, needed))

    def commit(self, lane: Lane, path: Sequence[int]) -> None:
        """Keeps the rows of the accepted nodes, in path order, in every layer; the other new rows are free again."""
        if any(node != i for i, node in enumerate(path)):
            self._move(lane, path)
        lane.length += len(path)

    def rewind(self, lane: Lane, length: int) -> None:
        """Forgets the rows from ``length`` on."""
        if not 0 <= length <= lane.length:
            raise ValueError(f"rewind: to {length}, but the lane holds {lane.length} rows")
        lane.length = length

    def release(self, lane: Lane) -> None:
        """Frees a lane. The last lane moves into its slot, so that lanes stay neighbours."""
        if not lane.live:
            raise ValueError("release: the lane was released before")
        lane.live = False
        last = self._lanes.pop()
        if last is not lane:
            for target, source in zip(self._lane_views(lane.slot), self._lane_views(last.slot), strict=True):
                self._device.copy(target, source)
            last.slot = lane.slot
            self._lanes[lane.slot] = last

    def lanes(self, first: int, last: int) -> list[Lane]:
        """The lanes in slots first..last, in slot order."""
        return self._lanes[first : last + 1]

    def lengths(self, lanes: Sequence[Lane]) -> IntArray:
        """int64 [B]: committed rows, the engine's context_lengths."""
        return np.array([lane.length for lane in lanes], dtype=np.int64)

    def views(self, first: int, count: int) -> dict[str, Buffer]:
        """Every layer's cache tensors of slots first..first+count-1, by contract name."""
        layers = self.shape.layers
        names = [contract.key_cache(i) for i in range(layers)] + [contract.value_cache(i) for i in range(layers)]
        _, slots, *row = self.buffer.shape
        return {
            name: self._device.view(self.buffer, (i * slots + first) * prod(row), (count, *row))
            for i, name in enumerate(names)
        }

    def _lane_views(self, slot: int) -> list[Buffer]:
        return list(self.views(slot, 1).values())

    def _move(self, lane: Lane, path: Sequence[int]) -> None:
        """Launches commit_rows: every lane but this one is idle (a negative length)."""
        lengths, nodes, counts = (np.full(self.slots, -1), np.zeros((self.slots, self._width)), np.zeros(self.slots))
        lengths[lane.slot], counts[lane.slot] = lane.length, len(path)
        nodes[lane.slot, : len(path)] = path
        for buffer, array in zip(self._commit_buffers, (lengths, nodes, counts), strict=False):
            self._device.copy(buffer, array.astype(np.int64))
        lengths_in, path_in, counts_in, lengths_out = self._commit_buffers
        self._device.launch("commit_rows", self.buffer, lengths_in, path_in, counts_in, self.buffer, lengths_out)

    def _allocate(self, slots: int, capacity: int) -> None:
        old: Buffer | None = getattr(self, "buffer", None)
        device, shape = self._device, self.shape
        self.buffer: Buffer = device.allocate(
            (2 * shape.layers, slots, shape.kv_heads, capacity, shape.head_dim), host_dtype(shape.dtype)
        )
        vectors = [((slots,), np.int64), ((slots, self._width), np.int64), ((slots,), np.int64), ((slots,), np.int64)]
        self._commit_buffers = [device.allocate(size, dtype) for size, dtype in vectors]
        self.generation += 1
        if old is not None:
            self._carry_over(old)

    def _carry_over(self, old: Buffer) -> None:
        """Copies every lane's rows out of the old buffers, head by head (what lies together in both)."""
        for lane in self._lanes:
            for new_head, old_head in zip(self._heads(self.buffer, lane), self._heads(old, lane), strict=True):
                self._device.copy(new_head, old_head)

    def _heads(self, buffer: Buffer, lane: Lane) -> list[Buffer]:
        layers, slots, heads, capacity, width = buffer.shape
        return [
            self._device.view(
                buffer, ((layer * slots + lane.slot) * heads + head) * capacity * width, (lane.length, width)
            )
            for layer in range(layers)
            for head in range(heads)
        ]
