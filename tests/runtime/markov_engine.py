"""A decoder engine whose logits are a table by the last token: its law is known exactly, and a pass costs nothing."""

from __future__ import annotations

import numpy as np

from specrun import contract
from specrun.bundle import CacheShape, EngineRecord, Limits
from specrun.cache import KVCache
from specrun.decoder import Decoder
from specrun.device.host import HostDevice
from specrun.economics import CPU_PRIOR, Economics, PassCosts
from specrun.loop import Loop


class MarkovEngine:
    """``logits`` float32 [V, V]: row t is the law after token t."""

    max_length = 100_000

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits.astype(np.float32)
        self.vocab = len(logits)

    def bind(self, inputs, outputs):
        return _Bound(self.logits, inputs, outputs)

    def loop(self, max_batch: int) -> Loop:
        record = EngineRecord(
            "target", "decoder", "cpu", "fp32", "table", ("none",), self.vocab, 1, cache=CacheShape(1, 1, 1, "float32")
        )
        device = HostDevice()
        decoder = Decoder(record, self, device, KVCache(record.cache, device, max_batch, self.max_length, 16))
        return Loop(decoder, Limits(max_batch, 16, 64), Economics(PassCosts(CPU_PRIOR)), self.vocab)


class _Bound:
    def __init__(self, table, inputs, outputs):
        self.table, self.inputs, self.outputs = table, inputs, outputs

    def enqueue(self) -> None:
        tokens = np.take_along_axis(self.inputs[contract.TOKENS], self.inputs[contract.LOGIT_ROWS], 1)
        self.outputs[contract.LOGITS][:] = self.table[tokens]
