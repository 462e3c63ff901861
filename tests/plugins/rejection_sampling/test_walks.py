"""The walks: kernel against oracle against the runtime's rules, given the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from specrun.distribution import Distribution
from specrun.plugins.registry import OPS
from specrun.plugins.rejection_sampling import reference
from specrun.proposal import DenseLaw, Proposal, SparseLaw
from specrun.random import Stream, Uniforms
from specrun.rules import (
    BlockVerification,
    SampleAndMatch,
    TreeRejectionWithoutReplacement,
    TreeRejectionWithReplacement,
    TypicalAcceptance,
)
from specrun.sampling import SamplingParams
from specrun.tree import DraftTree
from specrun.warp import History
from tests.compare import assert_equal

CHAIN = (-1, 0, 1, 2, 3)
TREE = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 7)  # depth 4; three, two, one, two and one children
WALKS = {
    "match_walk": (reference.match_walk, {}, SampleAndMatch(), TREE),
    "typical_walk": (reference.typical_walk, {}, TypicalAcceptance(), TREE),
    "with": (reference.rejection_walk, {"replacement": True}, TreeRejectionWithReplacement(), TREE),
    "without": (reference.rejection_walk, {"replacement": False}, TreeRejectionWithoutReplacement(), TREE),
    "block": (reference.block_walk, {}, BlockVerification(), CHAIN),
}


@dataclass(frozen=True)
class Case:
    walk: str
    width: int
    dense: bool = False
    batch: int = 14
    temperature: float = 0.9
    agreement: float = 0.7  # how near the draft's logits are to the target's
    cut: bool = True

    def __str__(self) -> str:
        return f"{self.walk}-{self.width}{'-dense' if self.dense else ''}{'' if self.cut else '-uncut'}"


CASES = [
    Case("match_walk", 6),
    Case("typical_walk", 6, batch=24),
    Case("with", 6),
    Case("with", 300, dense=True, agreement=1.0, cut=False),
    Case("without", 6),
    Case("without", 8, batch=40, agreement=0.2, cut=False),  # second and third children are judged often
    Case("without", 7, dense=True),
    Case("without", 600, agreement=0.9),
    Case("block", 6),
    Case("block", 300, dense=True, cut=False),
]


class Round:
    """Random sequences with their drafts, in the kernels' form and in the runtime's."""

    def __init__(self, case: Case, seed: int = 5) -> None:
        rng = np.random.default_rng(seed)
        self.case, self.rng = case, rng
        shape = WALKS[case.walk][3]
        batch, nodes = case.batch, len(shape)
        self.params = SamplingParams(
            temperature=case.temperature, top_k=min(5, case.width - 1) if case.cut else 0, top_p=0.95 if case.cut else 1
        )
        size = (batch, nodes, case.width)
        logits = rng.normal(0, 1.5, size).astype(np.float32)
        drafted = case.agreement * logits + (1.01 - case.agreement) * rng.normal(0, 1.5, size)
        self.laws = self.law(drafted)
        self.tokens = self.draw(shape)
        sizes = rng.integers(1, nodes + 1, batch)
        sizes[:2] = nodes
        self.uniforms = rng.random((4, batch, nodes)).astype(np.float32)
        depths = DraftTree(np.array(shape)).depths
        self.uniforms[:2] = self.uniforms[:2][..., depths]  # target and residual draws: one a depth, as on the host
        settings = np.full(batch, 1, np.float32)
        temperature = settings * np.float32(case.temperature)
        temperature[::5] = 0
        rows = reference.sample_rows(
            logits=logits,
            temperature=temperature,
            top_k=settings.astype(np.int32) * self.params.top_k,
            top_p=settings * np.float32(self.params.top_p),
            min_p=settings * 0,
            penalties=np.tile(np.float32([1, 0, 0]), (batch, 1)),
            adjust_tokens=np.full((batch, nodes, 1), -1),
            adjust_counts=np.full((batch, nodes, 1), -1, np.int32),
            adjust_bias=np.zeros((batch, nodes, 1), np.float32),
            uniforms=self.uniforms[0],
        )
        self.inputs = {
            "tokens": self.tokens,
            "parents": np.tile(np.array(shape), (batch, 1)),
            "nodes": sizes.astype(np.int32),
            "drawn": rows["drawn"],
        }
        if case.walk != "match_walk":
            self.inputs |= {"logits": logits, "statistics": rows["statistics"], "temperature": temperature}
        self.temperature, self.logits = temperature, logits

    def law(self, logits: np.ndarray) -> np.ndarray:
        """Laws of at most 4 tokens, or of all, float32 [B, N, V]."""
        if not self.case.dense:
            fourth = np.sort(logits, axis=-1)[..., -4:][..., :1]
            logits = np.where(logits >= fourth, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)

    def draw(self, shape: tuple[int, ...]) -> np.ndarray:
        """Tokens [B, N] drawn from the laws as the walk's rule expects."""
        tokens = np.zeros((self.case.batch, len(shape)), dtype=np.int64)
        tree = DraftTree(np.array(shape))
        for b, n in np.ndindex(tokens.shape):
            if tree.children[n]:
                law = self.laws[b, n].astype(np.float64)
                count = len(tree.children[n])
                again = self.case.walk != "without"
                drawn = self.rng.choice(law.size, count, replace=again, p=law / law.sum())
                tokens[b, list(tree.children[n])] = drawn
        return tokens

    def with_laws(self) -> dict[str, np.ndarray]:
        """All inputs of a rejection walk."""
        draws = {"accept_uniforms": self.uniforms[2], "residual_uniforms": self.uniforms[1]}
        if self.case.dense:
            return self.inputs | {"draft_probs": self.laws} | draws
        listed = np.argsort(-self.laws, axis=-1, kind="stable")[..., :6]
        probs = np.take_along_axis(self.laws, listed, -1)
        listed = np.where(probs > 0, listed, -1)
        return self.inputs | {"draft_tokens": listed, "draft_probs": probs} | draws

    def judged_by_the_runtime(self, b: int, rule):
        """The runtime's rule on sequence ``b``, with the same uniforms."""
        nodes = int(self.inputs["nodes"][b])
        tree = DraftTree(self.inputs["parents"][b][:nodes])
        laws = {n: self.runtime_law(b, n) for n in range(nodes) if tree.children[n]}
        proposal = Proposal(self.tokens[b, :nodes], tree, laws)
        greedy = self.temperature[b] == 0
        params = SamplingParams(temperature=0.0) if greedy else self.params
        return rule.judge(proposal, self.logits[b], History([0]), params, Fixed(self, b, tree.depths), 1)

    def runtime_law(self, b: int, n: int):
        law = self.laws[b, n]
        return DenseLaw(law) if self.case.dense else SparseLaw(np.flatnonzero(law), law[law > 0])


class Fixed:
    """The runtime's source of chance, reading the kernels' uniforms."""

    def __init__(self, made: Round, b: int, depths: np.ndarray) -> None:
        self.target, self.residual, self.acceptance = made.uniforms[0][b], made.uniforms[1][b], made.uniforms[2][b]
        self.at = {int(depth): node for node, depth in enumerate(depths)}

    def choose(self, law: Distribution, position: int, stream: Stream, index: int = 0) -> int:
        return law.quantile((self.target if stream is Stream.TARGET else self.residual)[self.at[position - 1]])

    def accept(self, p: float, q: float, position: int, index: int) -> bool:
        return float(self.acceptance[index]) * q < p


def run(interpreter, case: Case, made: Round):
    oracle, attributes, rule, _ = WALKS[case.walk]
    name = {"with": "rejection_walk", "without": "rejection_walk", "block": "block_walk"}.get(case.walk, case.walk)
    inputs = made.inputs if name == case.walk else made.with_laws()
    found = interpreter.run(OPS[name + ("_dense" if case.dense else "")], inputs, **attributes)
    return found, oracle(**attributes, **inputs), rule


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_oracle_and_runtime_agree(interpreter, case: Case):
    """A09 too: a batch whose rows accept nothing, everything and part of it, trees wider than deep, padded nodes."""
    made = Round(case)
    found, expected, rule = run(interpreter, case, made)
    assert len(set(expected.accepted.tolist())) >= 3, "the case should accept in many ways"
    for name in ("accepted", "next_token", "path"):
        assert_equal(found[name], getattr(expected, name), name)
    for b in range(case.batch):
        verdict = made.judged_by_the_runtime(b, rule)
        assert verdict.path == [n for n in expected.path[b].tolist() if n >= 0], b
        assert verdict.next_token == expected.next_token[b], b


@pytest.mark.parametrize("walk", ["with", "without", "block"])
def test_b10_edges_of_the_laws(interpreter, walk):
    """p = q always accepted, p one-hot, q(x) = 0, ties, a vocabulary of one; no NaN, no token out of range."""
    case = Case(walk, 4, dense=True, batch=5)
    made = Round(case)
    p = np.array([[0.1, 0.2, 0.3, 0.4], [0, 1, 0, 0], [0.5, 0, 0.5, 0], [0.25] * 4, [1, 0, 0, 0]], np.float32)
    q = np.array([[0.1, 0.2, 0.3, 0.4], [0, 1, 0, 0], [0, 1, 0, 0], [0.25] * 4, [0, 0, 0, 1]], np.float32)
    nodes = made.tokens.shape[1]
    chain = np.arange(-1, nodes - 1)
    inputs = made.with_laws()
    with np.errstate(divide="ignore"):
        inputs["logits"] = np.repeat(np.log(p)[:, None], nodes, 1)
    best = inputs["logits"].max(-1)
    inputs["statistics"] = np.stack(
        [best, np.ones_like(best), np.full_like(best, -3e38), np.exp(-best), np.zeros_like(best)], -1
    ).astype(np.float32)
    inputs["draft_probs"] = np.repeat(q[:, None], nodes, 1)
    inputs["temperature"] = np.ones(5, np.float32)
    inputs["nodes"] = np.full(5, nodes, np.int32)
    inputs["parents"] = np.tile(chain, (5, 1))
    inputs["tokens"] = np.tile(np.array([[3], [1], [1], [2], [1]]), (1, nodes))  # the last was never drawn from q
    inputs["drawn"] = np.tile(np.array([[3], [1], [0], [2], [0]]), (1, nodes))
    oracle, attributes, _, _ = WALKS[walk]
    name = "block_walk_dense" if walk == "block" else "rejection_walk_dense"
    found, expected = interpreter.run(OPS[name], inputs, **attributes), oracle(**attributes, **inputs)
    for key in ("accepted", "next_token", "path"):
        assert_equal(found[key], getattr(expected, key), key)
    assert found["accepted"].tolist() == [nodes - 1, nodes - 1, 0, nodes - 1, 0]
    assert found["next_token"][2] in (0, 2) and found["next_token"][4] == 0


class Twin:
    """Drafts after one context, drawn with the runtime's uniforms, and the row kernel's draws at their roots."""

    size, batch = 4, 160

    def __init__(self, interpreter) -> None:
        rng = np.random.default_rng(3)
        self.table = rng.normal(0, 0.7, (self.size, self.size)).astype(np.float32)  # logits after each token
        drafts = np.exp(0.3 * self.table + rng.normal(0, 0.8, (self.size, self.size)))
        self.laws = (drafts / drafts.sum(-1, keepdims=True)).astype(np.float32)
        self.sources = [Uniforms(seed) for seed in range(self.batch)]
        roots = self.rows(np.zeros((self.batch, 1), np.int64))
        self.root = interpreter.run(OPS["sample_rows"], roots, capacity=128)

    def rows(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        ones, shape = np.ones(self.batch, np.float32), (*tokens.shape, 1)
        return {
            "logits": self.table[tokens],
            "temperature": ones,
            "top_k": np.zeros(self.batch, np.int32),
            "top_p": ones,
            "min_p": 0 * ones,
            "penalties": np.tile(np.float32([1, 0, 0]), (self.batch, 1)),
            "adjust_tokens": np.full(shape, -1),
            "adjust_counts": np.full(shape, -1, np.int32),
            "adjust_bias": np.zeros(shape, np.float32),
            "uniforms": self.draws(Stream.TARGET, tokens.shape[1]),
        }

    def draws(self, stream: Stream, nodes: int) -> np.ndarray:
        return np.array([[u.draw(n, stream) for n in range(nodes)] for u in self.sources], np.float32)

    def drafts(self, tree: DraftTree, again: bool) -> np.ndarray:
        tokens = np.zeros((self.batch, tree.size), np.int64)
        for b, n in np.ndindex(tokens.shape):
            law = self.laws[tokens[b, n]].copy()
            for child in tree.children[n]:
                u = self.sources[b].draw(n, Stream.DRAFT, child)
                tokens[b, child] = Distribution(None, law).quantile(u)
                law[tokens[b, child]] *= again
        return tokens

    def inputs(self, parents: tuple[int, ...], again: bool) -> dict[str, np.ndarray]:
        tokens = self.drafts(DraftTree(np.array(parents)), again)
        rows = reference.sample_rows(**self.rows(tokens))
        rows["drawn"][:, :1], rows["statistics"][:, :1] = self.root["drawn"], self.root["statistics"]
        nodes = len(parents)
        return {
            "tokens": tokens,
            "parents": np.tile(np.array(parents), (self.batch, 1)),
            "nodes": np.full(self.batch, nodes, np.int32),
            "drawn": rows["drawn"],
            "logits": rows["adjusted"],
            "statistics": rows["statistics"],
            "temperature": np.ones(self.batch, np.float32),
            "draft_probs": self.laws[tokens],
            "accept_uniforms": self.draws(Stream.ACCEPT, nodes),
            "residual_uniforms": self.draws(Stream.RESIDUAL, nodes),
        }


@pytest.fixture(scope="module")
def twin(interpreter):
    return Twin(interpreter)


@pytest.mark.parametrize("walk", ["match", "with", "without", "block"])
def test_the_kernels_emit_the_targets_law(interpreter, twin, walk):
    """Statistical twin of the proof, through both kernels: chi-square of the first token emitted, fixed seeds."""
    inputs = twin.inputs((-1, 0, 1) if walk == "block" else (-1, 0, 0), again=walk != "without")
    name, attributes = {
        "match": ("match_walk", {}),
        "with": ("rejection_walk_dense", {"replacement": True}),
        "without": ("rejection_walk_dense", {"replacement": False}),
        "block": ("block_walk_dense", {}),
    }[walk]
    needed = [tensor.name for tensor in OPS[name].contract.inputs]
    found = interpreter.run(OPS[name], {key: inputs[key] for key in needed}, **attributes)
    first = np.where(found["accepted"] > 0, found["path"][:, 1], 0)
    emitted = np.where(found["accepted"] > 0, np.take_along_axis(inputs["tokens"], first[:, None], 1)[:, 0], -1)
    emitted = np.where(emitted < 0, found["next_token"], emitted)
    target = np.exp(twin.table[0].astype(np.float64))
    target /= target.sum()
    assert 0.3 < np.mean(found["accepted"] > 0) < 1
    assert stats.chisquare(np.bincount(emitted, minlength=twin.size), target * twin.batch).pvalue > 0.05
    drafted = np.bincount(inputs["tokens"][:, 1], minlength=twin.size)
    assert stats.chisquare(drafted, target * twin.batch).pvalue < 0.01, "the drafts alone have another law"


def test_reference_refuses_a_law_of_another_shape():
    made = Round(Case("with", 6, dense=True))
    inputs = made.with_laws() | {"draft_probs": made.laws[..., :5]}
    with pytest.raises(ValueError, match="rejection_walk_dense: argument 'draft_probs'"):
        reference.rejection_walk(**inputs)
