"""Runs a compiled cpu engine of a bundle with ONNX Runtime alone: no runtime, no loop, copies everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from specrun import contract
from specrun.bundle import Bundle
from specrun.tree import DraftTree


class BareEngine:
    """A decoder engine with a cache of ``capacity`` rows for ``batch`` sequences."""

    def __init__(self, bundle: Bundle, name: str = "target", batch: int = 1, capacity: int = 128) -> None:
        self.record = bundle.manifest.engine(name)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(str(bundle.file(self.record.files[0])), options)
        cache = self.record.cache
        assert cache is not None
        shape = (batch, cache.kv_heads, capacity, cache.head_dim)
        names = [f(i) for i in range(cache.layers) for f in (contract.key_cache, contract.value_cache)]
        self.caches = {name: np.zeros(shape, np.float32) for name in names}
        self.lengths = np.zeros(batch, np.int64)

    def run(
        self,
        tokens: np.ndarray,
        depths: np.ndarray,
        masks: np.ndarray,
        rows: np.ndarray,
        hidden_in: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """One pass over tokens [B, N] at depths [B, N]; writes the caches, leaves the lengths as they are."""
        feed = {
            contract.TOKENS: tokens.astype(np.int64),
            contract.POSITIONS: self.lengths[:, None] + depths,
            contract.CONTEXT_LENGTHS: self.lengths,
            contract.TREE_MASK: masks,
            contract.LOGIT_ROWS: rows.astype(np.int64),
            **self.caches,
        }
        if hidden_in is not None:
            feed[contract.HIDDEN_IN] = hidden_in
        names = [output.name for output in self.session.get_outputs()]
        out = dict(zip(names, self.session.run(names, feed), strict=True))
        for name in self.caches:
            self.caches[name] = out.pop(contract.updated(name))
        return out

    def prefill(self, prompts: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """Commits prompts of any lengths in one pass; logits and hidden of every node, padding included."""
        width = max(len(prompt) for prompt in prompts)
        tokens = np.zeros((len(prompts), width), np.int64)
        masks = np.broadcast_to(np.eye(width, dtype=bool), (len(prompts), width, width)).copy()
        depths = np.zeros((len(prompts), width), np.int64)
        for b, prompt in enumerate(prompts):
            n = len(prompt)
            tokens[b, :n], depths[b, :n], masks[b, :n, :n] = prompt, np.arange(n), np.tri(n, dtype=bool)
        rows = np.tile(np.arange(width), (len(prompts), 1))
        out = self.run(tokens, depths, masks, rows)
        self.lengths = self.lengths + [len(prompt) for prompt in prompts]
        return out

    def verify(self, tokens: np.ndarray, trees: Sequence[DraftTree]) -> dict[str, np.ndarray]:
        """Logits of every node of one tree for each sequence; tokens [B, N]."""
        depths = np.stack([tree.depths for tree in trees])
        masks = np.stack([tree.mask for tree in trees])
        rows = np.tile(np.arange(tokens.shape[1]), (len(trees), 1))
        return self.run(tokens, depths, masks, rows)


def largest(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def reference_logits(model: object, tokens: Sequence[int]) -> np.ndarray:
    """transformers' logits [N, V] of one sequence, without a cache."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()  # type: ignore[operator]


def open_reference(path: Path) -> object:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
