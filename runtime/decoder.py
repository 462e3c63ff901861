"""Decoder: one engine with its cache. Turns rows of a batch into a captured pass over fixed buffers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun import contract
from specrun.backends import Session
from specrun.bundle import EngineRecord
from specrun.cache import KVCache, Lane
from specrun.device import Buffer, Device, Step
from specrun.proposal import FloatArray, Passengers
from specrun.tree import BoolArray, DraftTree, IntArray

POOLED_STEPS = 64  # captured steps a decoder keeps; the least recently used leaves first


@dataclass(frozen=True)
class Row:
    """One sequence's part of a pass: its new nodes.

    ``offsets`` are positions minus the lane's length (the nodes' depths); ``mask`` bool [N, N]; ``logit_nodes`` the
    nodes whose logits are wanted; ``keep`` the most rows a commit may keep afterwards. ``scratch`` counts the rows that
    earlier passes of the same draft wrote behind the committed ones; ``mask`` is then [N, scratch + N].
    """

    lane: Lane
    tokens: IntArray
    offsets: IntArray
    mask: BoolArray
    logit_nodes: IntArray
    keep: int
    hidden_in: FloatArray | None = None
    scratch: int = 0

    @staticmethod
    def of_tree(
        lane: Lane,
        tokens: IntArray,
        tree: DraftTree,
        passengers: Passengers | None = None,
        hidden_in: FloatArray | None = None,
    ) -> Row:
        """A verify pass: logits for every node and passenger."""
        offsets, mask = tree.depths, tree.mask
        if passengers is not None:
            total = tree.size + passengers.tokens.size
            wide = np.zeros((total, total), dtype=np.bool_)
            wide[: tree.size, : tree.size] = mask
            wide[tree.size :] = passengers.mask
            tokens = np.concatenate([tokens, passengers.tokens])
            offsets, mask = np.concatenate([offsets, passengers.offsets]), wide
        keep = int(tree.depths.max()) + 1
        return Row(lane, tokens, offsets, mask, np.arange(tokens.size), keep, hidden_in)

    @staticmethod
    def of_chunk(
        lane: Lane, tokens: IntArray, logits: bool, hidden_in: FloatArray | None = None, keep: int | None = None
    ) -> Row:
        """A prefill chunk: every node is kept (or ``keep`` of them); logits of the last one where ``logits``."""
        count = tokens.size
        mask = np.tri(count, dtype=np.bool_)
        nodes = np.array([count - 1] if logits else [], dtype=np.int64)
        return Row(lane, tokens, np.arange(count), mask, nodes, count if keep is None else keep, hidden_in)


@dataclass(frozen=True)
class PassOutput:
    """``logits[b]`` float32 [M_b, V] and ``hidden[b]`` float32 [N_b, k * H] of row b, in the order the rows came in.

    They are views of the decoder's fixed buffers: the next pass overwrites them.
    """

    logits: list[FloatArray]
    hidden: list[FloatArray] | None
    nodes: int  # N of the pass, padding included
    seconds: float


class Decoder:
    """Runs passes of one engine. Captured steps are pooled by (first slot, B, N, M, T) and die with the buffers."""

    def __init__(self, record: EngineRecord, session: Session, device: Device, cache: KVCache) -> None:
        self.record, self.cache = record, cache
        self._session, self._device = session, device
        self._arena = Arena(device)
        self._steps: OrderedDict[tuple[int, ...], tuple[Step, dict[str, Buffer]]] = OrderedDict()
        self._valid = (0, 0)

    def run(self, rows: Sequence[Row]) -> PassOutput:
        """One pass. Rows may have different node counts."""
        begin = time.perf_counter()
        given, rows = rows, self._neighbours(rows)
        nodes = max(self.record.min_rows, max(row.tokens.size for row in rows))
        logit_rows = max(self.record.min_rows, max(row.logit_nodes.size for row in rows))
        columns = nodes + max(row.scratch for row in rows)
        self.cache.reserve([row.lane for row in rows], columns, [row.keep for row in rows])
        step, buffers = self._step(rows[0].lane.slot, len(rows), nodes, logit_rows, columns)
        for name, array in self._inputs(rows, nodes, logit_rows, columns).items():
            self._device.copy(buffers[name], array)
        self._device.replay(step)
        logits = self._device.read(buffers[contract.LOGITS])
        hidden = self._device.read(buffers[contract.HIDDEN]) if self.record.taps else None
        first = rows[0].lane.slot
        return PassOutput(
            [logits[row.lane.slot - first, : row.logit_nodes.size] for row in given],
            None if hidden is None else [hidden[row.lane.slot - first, : row.tokens.size] for row in given],
            nodes,
            time.perf_counter() - begin,
        )

    def _neighbours(self, rows: Sequence[Row]) -> list[Row]:
        """The rows in slot order; a lane between them that takes no part gets one padding node in its scratch rows."""
        by_slot = {row.lane.slot: row for row in rows}
        first, last = min(by_slot), max(by_slot)
        return [
            by_slot.get(lane.slot) or Row.of_chunk(lane, np.zeros(1, dtype=np.int64), logits=False, keep=0)
            for lane in self.cache.lanes(first, last)
        ]

    def _inputs(self, rows: Sequence[Row], nodes: int, logit_rows: int, columns: int) -> dict[str, Any]:
        """A pass's arrays. Padding nodes see only themselves, sit at their row's context length, get no logits."""
        batch = len(rows)
        lengths = self.cache.lengths([row.lane for row in rows])
        tokens = np.zeros((batch, nodes), dtype=np.int64)
        positions = np.repeat(lengths[:, None], nodes, axis=1)
        mask = np.zeros((batch, nodes, columns), dtype=np.bool_)
        scratch = np.array([row.scratch for row in rows], dtype=np.int64)
        each = np.arange(nodes)
        wanted = np.zeros((batch, logit_rows), dtype=np.int64)
        for b, row in enumerate(rows):
            n = row.tokens.size
            tokens[b, :n] = row.tokens
            positions[b, :n] += row.offsets
            mask[b, each, row.scratch + each] = True
            mask[b, :n, : row.scratch + n] = row.mask
            wanted[b, : row.logit_nodes.size] = row.logit_nodes
        arrays = {
            contract.TOKENS: tokens,
            contract.POSITIONS: positions,
            contract.CONTEXT_LENGTHS: lengths,
            contract.TREE_MASK: mask,
            contract.LOGIT_ROWS: wanted,
        }
        if self.record.scratch:
            arrays[contract.WRITE_ROWS] = lengths + scratch
        if self.record.hidden_in is not None:
            features = np.zeros((batch, nodes, self.record.hidden_in), dtype=np.float32)
            for b, row in enumerate(rows):
                if row.hidden_in is not None:
                    features[b, : row.tokens.size] = row.hidden_in
            arrays[contract.HIDDEN_IN] = features
        return arrays

    def _step(
        self, first: int, batch: int, nodes: int, logit_rows: int, columns: int
    ) -> tuple[Step, dict[str, Buffer]]:
        key = (first, batch, nodes, logit_rows, columns)
        shapes = self._shapes(batch, nodes, logit_rows, columns)
        self._arena.reserve(shapes)
        if self._valid != (self.cache.generation, self._arena.generation):
            self._steps.clear()
            self._valid = (self.cache.generation, self._arena.generation)
        if key not in self._steps:
            self._steps[key] = self._capture(first, batch, shapes)
            if len(self._steps) > POOLED_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    def _capture(self, first: int, batch: int, shapes: dict[str, Shape]) -> tuple[Step, dict[str, Buffer]]:
        buffers = self._arena.views(shapes)
        caches = self.cache.views(first, batch)
        inputs = {name: b for name, b in buffers.items() if name not in (contract.LOGITS, contract.HIDDEN)}
        outputs = {name: buffers[name] for name in buffers if name not in inputs}
        bound = self._session.bind(inputs | caches, outputs | {contract.updated(n): b for n, b in caches.items()})
        with self._device.capture() as step:
            self._device.enqueue(bound)
        return step, buffers

    def _shapes(self, batch: int, nodes: int, logit_rows: int, columns: int) -> dict[str, Shape]:
        record = self.record
        shapes: dict[str, Shape] = {
            contract.TOKENS: ((batch, nodes), np.int64),
            contract.POSITIONS: ((batch, nodes), np.int64),
            contract.CONTEXT_LENGTHS: ((batch,), np.int64),
            contract.TREE_MASK: ((batch, nodes, columns), np.bool_),
            contract.LOGIT_ROWS: ((batch, logit_rows), np.int64),
            contract.LOGITS: ((batch, logit_rows, record.vocab_size), np.float32),
        }
        if record.taps:
            shapes[contract.HIDDEN] = ((batch, nodes, len(record.taps) * record.hidden_size), np.float32)
        if record.scratch:
            shapes[contract.WRITE_ROWS] = ((batch,), np.int64)
        if record.hidden_in is not None:
            shapes[contract.HIDDEN_IN] = ((batch, nodes, record.hidden_in), np.float32)
        return shapes


Shape = tuple[tuple[int, ...], type[np.generic]]


class Arena:
    """One buffer a tensor name, as large as the largest shape seen; every captured shape is a view of its front."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._flat: dict[str, Buffer] = {}
        self.generation = 0

    def reserve(self, shapes: dict[str, Shape]) -> None:
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape))
            if name not in self._flat or self._flat[name].shape[0] < size:
                self._flat[name] = self._device.allocate((size,), dtype)
                self.generation += 1

    def views(self, shapes: dict[str, Shape]) -> dict[str, Buffer]:
        return {name: self._device.view(self._flat[name], 0, shape) for name, (shape, _) in shapes.items()}
