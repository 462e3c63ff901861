"""Heads: a head engine (Medusa). Maps features of the target to one row of logits a head, in one call."""

from __future__ import annotations

import numpy as np

from specrun import contract
from specrun.backends import Session
from specrun.bundle import EngineRecord
from specrun.device import Buffer, Device, Enqueueable
from specrun.proposal import FloatArray


class Heads:
    """Calls are bound once per number of rows and kept."""

    def __init__(self, record: EngineRecord, session: Session, device: Device) -> None:
        self.record = record
        self._session, self._device = session, device
        self._bound: dict[int, tuple[Enqueueable, Buffer, Buffer]] = {}

    def run(self, hidden: FloatArray) -> FloatArray:
        """``hidden`` float32 [B, H_in] to logits float32 [B, heads, V], a view that the next call overwrites."""
        rows = max(hidden.shape[0], self.record.min_rows)
        if rows not in self._bound:
            self._bound[rows] = self._bind(rows)
        bound, features, logits = self._bound[rows]
        padded = np.zeros(features.shape, dtype=np.float32)
        padded[0, : hidden.shape[0]] = hidden
        self._device.copy(features, padded)
        self._device.enqueue(bound)
        return np.asarray(self._device.read(logits)[0, : hidden.shape[0]])

    def _bind(self, rows: int) -> tuple[Enqueueable, Buffer, Buffer]:
        record = self.record
        features = self._device.allocate((1, rows, record.hidden_in or 0), np.float32)
        logits = self._device.allocate((1, rows, record.heads, record.vocab_size), np.float32)
        bound = self._session.bind({contract.HIDDEN_IN: features}, {contract.HEAD_LOGITS: logits})
        return bound, features, logits
