"""Weights as the graph writer sees them: a name, a shape, and a way to read them later.

``specbuild.checkpoint.WeightSource`` is one kind; ``Stacked`` and ``Array`` are the two that the graph makes itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Weight(Hashable, Protocol):
    """A tensor that is read when it is needed. Equal weights (``==``, and hashed alike) have the same content."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_float32(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Stacked:
    """Weights one above the other along their first axis: fused projections."""

    parts: tuple[Weight, ...]

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read_float32(self) -> np.ndarray:
        joined = np.empty(self.shape, dtype=np.float32)
        start = 0
        for part in self.parts:
            joined[start : start + part.shape[0]] = part.read_float32()
            start += part.shape[0]
        return joined


@dataclass(frozen=True, eq=False)
class Array:
    """A weight already in memory; equal only to itself."""

    name: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def read_float32(self) -> np.ndarray:
        return np.asarray(self.array, dtype=np.float32)


@dataclass(frozen=True)
class Weights:
    """A checkpoint's tensors below a prefix: ``weights.below("model.layers.0")["mlp.up_proj.weight"]``."""

    tensors: Mapping[str, Weight]
    prefix: str = ""

    def below(self, name: str) -> Weights:
        return Weights(self.tensors, f"{self.prefix}{name}.")

    def __getitem__(self, name: str) -> Weight:
        return self.tensors[self.prefix + name]

    def get(self, name: str) -> Weight | None:
        return self.tensors.get(self.prefix + name)

    def stacked(self, names: Sequence[str], suffix: str) -> Weight:
        """The tensors ``names[i].suffix`` as one."""
        return Stacked(tuple(self[f"{name}.{suffix}"] for name in names))
