"""What the proof runs: models, shapes and settings chosen for the places where verification goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.proof.drafts import Model, Row, Table
from specrun.sampling import SamplingParams
from specrun.tree import DraftTree

PLAIN = SamplingParams(temperature=1.0)
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.85)
CUT = SamplingParams(temperature=1.3, top_k=3, min_p=0.2)
PENALTIES = SamplingParams(
    temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=-0.4, logit_bias={1: 0.5}
)

CHAIN = DraftTree.chain(3)
UNEVEN = DraftTree(np.array([-1, 0, 0, 1, 1, 2, 3], dtype=np.int64))  # depth 3; two, two, one and one children
WIDE = DraftTree(np.array([-1, 0, 0, 0, 1, 1, 4], dtype=np.int64))  # three children over two tokens: duplicates
FLAT = DraftTree(np.array([-1, 0, 0, 0], dtype=np.int64))  # three children over four tokens: two residuals in a row
DEEP = DraftTree(np.array([-1, 0, 1, 1, 2, 4], dtype=np.int64))  # depth 4


@dataclass(frozen=True)
class Case:
    """One target, one drafter's model, one shape, one request.

    ``length`` tokens are compared; ``rounds`` draft-and-verify rounds produce the first of them and the target's own
    law the rest (each round being lossless makes any number of them so; two show that rounds are independent).
    """

    name: str
    target: Model
    draft: Model
    shape: DraftTree
    params: SamplingParams = PLAIN
    length: int = 4
    rounds: int = 1
    eos: int | None = None
    prompt: tuple[int, ...] = (0, 1)

    @property
    def chain(self) -> bool:
        return all(len(children) <= 1 for children in self.shape.children)


def _zeros(row: Row, context: Sequence[int]) -> Row:
    """Every context loses a different token; on a vocabulary of four, p and q lose different ones."""
    return np.where(np.arange(row.size) == sum(context) % row.size, -np.inf, row).astype(np.float32)


def _other_zeros(row: Row, context: Sequence[int]) -> Row:
    return np.where(np.arange(row.size) == (sum(context) + 1) % row.size, -np.inf, row).astype(np.float32)


def _one_hot(row: Row, context: Sequence[int]) -> Row:
    return np.where(row == row.max(), 0, -np.inf).astype(np.float32)


def _spike(row: Row, context: Sequence[int]) -> Row:
    """All but 1e-9 of the mass on one token."""
    return np.where(row == row.max(), row + 22, row).astype(np.float32)


def _tied(row: Row, context: Sequence[int]) -> Row:
    return np.zeros_like(row)


def _on(shape: DraftTree, label: str, size: int) -> list[Case]:
    p = Table(size, 1)
    q = Table(size, 2, p)
    return [
        Case(f"{label}: p and q differ", p, q, shape),
        Case(f"{label}: p = q", p, p, shape),
        Case(f"{label}: zeros in p and q", Table(size, 1, None, _zeros), Table(size, 2, p, _other_zeros), shape),
        Case(f"{label}: q one-hot", p, Table(size, 2, p, _one_hot), shape),
        Case(f"{label}: p nearly one-hot", Table(size, 1, None, _spike), q, shape),
        Case(f"{label}: p one-hot, q tied", Table(size, 1, None, _one_hot), Table(size, 2, None, _tied), shape),
        Case(f"{label}: EOS inside", p, q, shape, eos=1),
        Case(f"{label}: top-p", p, q, shape, NUCLEUS),
        Case(f"{label}: top-k and min-p", p, q, shape, CUT),
        Case(f"{label}: penalties and bias", p, q, shape, PENALTIES),
    ]


def cases(quick: bool = False) -> list[Case]:
    """All cases; ``quick`` takes smaller vocabularies for the shapes with the most branches."""
    p = Table(2, 5)
    q = Table(2, 6, p)
    pair = DraftTree(np.array([-1, 0, 0, 1], dtype=np.int64))
    return [
        *_on(CHAIN, "chain of 3", 3 if quick else 4),
        *_on(UNEVEN, "uneven tree", 2 if quick else 3),
        *_on(FLAT, "flat tree", 4),
        *_on(WIDE, "wide tree", 2),
        *_on(DEEP, "deep tree", 2),
        Case("chain, two rounds", p, q, DraftTree.chain(2), rounds=2),
        Case("chain, two rounds, penalties", p, q, DraftTree.chain(2), PENALTIES, rounds=2),
        Case("tree, two rounds", p, q, pair, rounds=2),
    ]
