"""A decoder engine in numpy: the contract's tensors in, the contract's tensors out, for tests of the loop.

Two layers, grouped queries, rotary positions; float32 outputs from float64 sums, so that a row's logits do not depend
on how many rows a pass has. Weights are scaled so that argmax is never close.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specrun import contract
from specrun.bundle import CacheShape, EngineRecord, Limits
from specrun.cache import KVCache
from specrun.decoder import Decoder
from specrun.device.host import HostDevice
from specrun.economics import CPU_PRIOR, Economics, PassCosts
from specrun.loop import Loop


@dataclass
class TinyEngine:
    vocab: int = 32
    hidden: int = 16
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    seed: int = 0
    sharpness: float = 6.0
    max_length: int = 256
    taps: tuple[int, ...] = ()
    padded: int = 0  # extra vocabulary columns that must never be emitted

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        h, d = self.hidden, self.head_dim
        self.embedding = rng.normal(size=(self.vocab, h))
        self.weights = [
            {
                "q": rng.normal(size=(h, self.heads * d)) / np.sqrt(h),
                "k": rng.normal(size=(h, self.kv_heads * d)) / np.sqrt(h),
                "v": rng.normal(size=(h, self.kv_heads * d)) / np.sqrt(h),
                "o": rng.normal(size=(self.heads * d, h)) / np.sqrt(h),
                "up": rng.normal(size=(h, 2 * h)) / np.sqrt(h),
                "down": rng.normal(size=(2 * h, h)) / np.sqrt(h),
            }
            for _ in range(self.layers)
        ]
        self.head = rng.normal(size=(h, self.vocab)) * self.sharpness / np.sqrt(h)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def record(self) -> EngineRecord:
        shape = CacheShape(self.layers, self.kv_heads, self.head_dim, "float32")
        return EngineRecord(
            "target", "decoder", "cpu", "fp32", "numpy", ("none",), self.vocab + self.padded, self.hidden,
            cache=shape, taps=self.taps,
        )  # fmt: skip

    def bind(self, inputs, outputs):
        return Bound(self, inputs, outputs)

    def decoder(self, max_batch: int = 8, max_nodes: int = 16) -> Decoder:
        device = HostDevice()
        record = self.record()
        return Decoder(record, self, device, KVCache(record.cache, device, max_batch, self.max_length, max_nodes))

    def loop(self, max_batch: int = 8, max_nodes: int = 16, chunk: int = 8) -> Loop:
        economics = Economics(PassCosts(CPU_PRIOR))
        return Loop(self.decoder(max_batch, max_nodes), Limits(max_batch, max_nodes, chunk), economics, self.vocab)


def _rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _rotate(x, positions):
    half = x.shape[-1] // 2
    angles = positions[..., None, None] / 10000 ** (np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


class Bound:
    def __init__(self, model, inputs, outputs):
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def enqueue(self) -> None:
        m, i = self.model, self.inputs
        tokens, positions = i[contract.TOKENS], i[contract.POSITIONS].astype(np.float64)
        x = m.embedding[tokens]
        streams = [x]
        for layer, w in enumerate(m.weights):
            x = x + self._attention(layer, w, _rms(x), positions)
            x = x + np.maximum(_rms(x) @ w["up"], 0) @ w["down"]
            streams.append(x)
        final = _rms(x)
        rows = np.take_along_axis(final, i[contract.LOGIT_ROWS][..., None], 1)
        logits = self.outputs[contract.LOGITS]
        logits[..., : m.vocab] = rows @ m.head
        logits[..., m.vocab :] = 1e9
        if m.taps:
            self.outputs[contract.HIDDEN][:] = np.concatenate(
                [final if t == contract.FINAL_NORM else streams[t] for t in m.taps], -1
            )

    def _attention(self, layer, w, x, positions):
        m, i = self.model, self.inputs
        batch, nodes, _ = x.shape
        split = lambda y: y.reshape(batch, nodes, -1, m.head_dim)  # noqa: E731
        q, k, v = _rotate(split(x @ w["q"]), positions), _rotate(split(x @ w["k"]), positions), split(x @ w["v"])
        keys, values = self.outputs[contract.updated(contract.key_cache(layer))], self.outputs[
            contract.updated(contract.value_cache(layer))
        ]
        out = np.zeros((batch, nodes, m.heads, m.head_dim))
        for b in range(batch):
            start = int(i[contract.CONTEXT_LENGTHS][b])
            keys[b, :, start : start + nodes] = k[b].transpose(1, 0, 2)
            values[b, :, start : start + nodes] = v[b].transpose(1, 0, 2)
            seen = np.concatenate([np.ones((nodes, start), bool), i[contract.TREE_MASK][b]], 1)
            for head in range(m.heads):
                g = head * m.kv_heads // m.heads
                scores = q[b, :, head] @ keys[b, g, : start + nodes].T.astype(np.float64) / np.sqrt(m.head_dim)
                scores = np.where(seen, scores, -np.inf)
                p = np.exp(scores - scores.max(-1, keepdims=True))
                out[b, :, head] = p @ values[b, g, : start + nodes] / p.sum(-1, keepdims=True)
        return out.reshape(batch, nodes, -1) @ w["o"]
