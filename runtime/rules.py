"""Verification rules: which drafted tokens stand, and what the target says next.

`p` is the target's law after all warping, along each node's own path; `q` is the exact law a draft was drawn from.
Every rule but typical acceptance emits exactly the target's law (`specbuild prove` enumerates this code). Rules walk
the tree lazily: only visited rows of ``logits`` are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from specrun.distribution import Distribution
from specrun.errors import UserError
from specrun.proposal import FloatArray, Proposal, Verdict
from specrun.random import Chance, Stream
from specrun.sampling import SamplingParams
from specrun.warp import History, penalized, warp


class Rule(Protocol):
    """Judges one sequence's proposal."""

    name: str
    lossless: bool

    def judge(
        self,
        proposal: Proposal,
        logits: FloatArray,
        history: History,
        params: SamplingParams,
        uniforms: Chance,
        position: int,
    ) -> Verdict:
        """``logits`` is float32 [N, V], one row per node (a lazy view will do); ``history`` ends with the root's token.

        ``position`` is where the token chosen at the root will stand: the root's own position + 1. UserError when the
        proposal is not of a kind this rule verifies.
        """


@dataclass
class Walk:
    """One judgement under way: where it stands in the tree and what it has accepted."""

    proposal: Proposal
    logits: FloatArray
    history: History
    params: SamplingParams
    chance: Chance
    position: int
    path: list[int] = field(default_factory=lambda: [0])
    drafted: list[int] = field(default_factory=list)

    @property
    def node(self) -> int:
        return self.path[-1]

    @property
    def children(self) -> tuple[int, ...]:
        return self.proposal.tree.children[self.node]

    @property
    def here(self) -> int:
        """The position of the token being chosen at this node."""
        return self.position + len(self.drafted)

    def token(self, node: int) -> int:
        return int(self.proposal.tokens[node])

    def target(self) -> Distribution:
        """p at this node, along its own path."""
        return warp(self.logits[self.node], self.params, self.history, self.drafted)

    def draft(self) -> Distribution:
        """q at this node."""
        laws = self.proposal.laws
        if laws is None or self.node not in laws:
            raise UserError(
                f"proposal of {self.proposal.source or 'a drafter'}: node {self.node} has children and no law; a "
                "rejection rule needs the law of every node that has children."
            )
        return Distribution.of(laws[self.node])

    def descend(self, node: int) -> None:
        self.path.append(node)
        self.drafted.append(self.token(node))

    def after(self, node: int) -> Walk:
        """Another walk, one node further."""
        return replace(self, path=[*self.path, node], drafted=[*self.drafted, self.token(node)])

    def verdict(self, token: int) -> Verdict:
        """The end of the walk: ``token`` is the target's own choice here."""
        return Verdict(list(self.path), token, [*self.drafted, token])

    def match(self, token: int) -> int | None:
        """The first child that drafted ``token``."""
        return next((child for child in self.children if self.token(child) == token), None)


def judge_greedy(walk: Walk) -> Verdict:
    """Temperature 0, under every rule: descend while a child is the argmax. Ties go to the lowest id."""
    while True:
        row = penalized(walk.logits[walk.node], walk.params, walk.history, walk.drafted)
        best = int(np.argmax(row))
        child = walk.match(best)
        if child is None:
            return walk.verdict(best)
        walk.descend(child)


class SampleAndMatch:
    """Draw the target's own token at each node and descend while a child has it (q = 1); the default rule.

    Lossless for candidates chosen in any way that doesn't look at that draw. The draws are counted by position alone,
    so that the output is the same token for token as without drafting.
    """

    name = "sample-and-match"
    lossless = True

    def judge(
        self,
        proposal: Proposal,
        logits: FloatArray,
        history: History,
        params: SamplingParams,
        uniforms: Chance,
        position: int,
    ) -> Verdict:
        walk = Walk(proposal, logits, history, params, uniforms, position)
        if params.greedy:
            return judge_greedy(walk)
        while True:
            token = uniforms.choose(walk.target(), walk.here, Stream.TARGET)
            child = walk.match(token)
            if child is None:
                return walk.verdict(token)
            walk.descend(child)


class _Rejection:
    """What the rules for drawn candidates share: node by node, accept a child or draw from what remains."""

    name: str
    lossless = True
    shape = "trees whose children were drawn from a known law"

    def judge(
        self,
        proposal: Proposal,
        logits: FloatArray,
        history: History,
        params: SamplingParams,
        uniforms: Chance,
        position: int,
    ) -> Verdict:
        self.check(proposal, params)
        walk = Walk(proposal, logits, history, params, uniforms, position)
        return judge_greedy(walk) if params.greedy else self.walk(walk)

    def check(self, proposal: Proposal, params: SamplingParams) -> None:
        """UserError when the draft was not drawn from laws; greedy requests need none."""
        if proposal.drafted and proposal.laws is None and not params.greedy:
            raise self.refusal(proposal, "deterministic candidates (no laws)")

    def refusal(self, proposal: Proposal, found: str) -> UserError:
        return UserError(
            f"rule {self.name}: required is {self.shape}; found {found} from {proposal.source or 'the drafter'}. "
            f"Rules for deterministic candidates: {SampleAndMatch.name}; for drawn chains: {ChainRejection.name}, "
            f"{BlockVerification.name}; for drawn trees: {TreeRejectionWithReplacement.name}, "
            f"{TreeRejectionWithoutReplacement.name}. Choose the one that fits the drafter."
        )

    def walk(self, walk: Walk) -> Verdict:
        while walk.children:
            child, remaining = self.step(walk, walk.target(), walk.draft())
            if child is None:
                return walk.verdict(walk.chance.choose(remaining, walk.here, Stream.RESIDUAL))
            walk.descend(child)
        return walk.verdict(walk.chance.choose(walk.target(), walk.here, Stream.TARGET))

    def step(self, walk: Walk, p: Distribution, q: Distribution) -> tuple[int | None, Distribution]:
        """The child accepted at this node, or None and the law to draw the next token from."""
        raise NotImplementedError


class TreeRejectionWithReplacement(_Rejection):
    """Children drawn independently from q (SpecInfer, Miao et al. 2023): accept with min(1, r/q), else r = (r - q)+."""

    name = "tree-rejection-with-replacement"
    shape = "trees whose children were drawn from a known law, independently"

    def step(self, walk: Walk, p: Distribution, q: Distribution) -> tuple[int | None, Distribution]:
        remaining = p
        for child in walk.children:
            token = walk.token(child)
            if walk.chance.accept(remaining.at(token), q.at(token), walk.position, child):
                return child, remaining
            remaining, _ = remaining.excess(q)
        return None, remaining


class TreeRejectionWithoutReplacement(_Rejection):
    """Distinct children, each drawn from q conditioned on the earlier ones (arXiv 2402.14160).

    Accept with min(1, r/q_j), else r = (r - q_j)+, where q_j is that conditioned law as a whole.
    """

    name = "tree-rejection-without-replacement"
    shape = "trees whose children were drawn from a known law, without replacement"

    def step(self, walk: Walk, p: Distribution, q: Distribution) -> tuple[int | None, Distribution]:
        remaining = p
        conditioned: Distribution | None = q
        for child in walk.children:
            if conditioned is None:
                break  # the law's support ended: what follows was drawn from nothing and can't be accepted
            token = walk.token(child)
            if walk.chance.accept(remaining.at(token), conditioned.at(token), walk.position, child):
                return child, remaining
            remaining, _ = remaining.excess(conditioned)
            conditioned = conditioned.without(token)
        return None, remaining


def _refuse_branches(rule: _Rejection, proposal: Proposal) -> None:
    if any(len(children) > 1 for children in proposal.tree.children):
        raise rule.refusal(proposal, f"a tree of {proposal.tree.size} nodes that branches")


class ChainRejection(TreeRejectionWithReplacement):
    """Leviathan et al. 2022, Chen et al. 2023: a tree of one child a node."""

    name = "chain-rejection"
    shape = "a chain drawn from known laws"

    def check(self, proposal: Proposal, params: SamplingParams) -> None:
        super().check(proposal, params)
        _refuse_branches(self, proposal)


class BlockVerification(_Rejection):
    """Sun et al. 2024 (arXiv 2403.10444): judges a chain as a whole; accepts at least as much as token by token.

    With P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)) and R_i the mass of (P_i p_{i+1} - q_{i+1})+, the block
    ends at the largest i with u_i < h_i = R_i / (R_i + 1 - P_i), or h = P at the chain's end.
    """

    name = "block-verification"
    shape = "a chain drawn from known laws"

    def check(self, proposal: Proposal, params: SamplingParams) -> None:
        super().check(proposal, params)
        _refuse_branches(self, proposal)

    def walk(self, walk: Walk) -> Verdict:
        kept = 0
        prefix = 1.0  # P_i
        ending: Distribution | None = None  # the residual law at the largest i accepted so far
        while walk.children and prefix > 0:  # once P is 0 nothing further can stand
            p, q = walk.target(), walk.draft()
            residual, mass = p.excess(q, prefix)
            if len(walk.drafted) == 0 or self.ends(walk, mass, mass + 1.0 - prefix):
                kept, ending = len(walk.drafted), residual
            token = walk.token(walk.children[0])
            prefix = _carried(prefix * p.at(token), q.at(token))
            walk.descend(walk.children[0])
        if not walk.drafted or self.ends(walk, prefix, 1.0):
            return walk.verdict(walk.chance.choose(walk.target(), walk.here, Stream.TARGET))
        del walk.path[kept + 1 :], walk.drafted[kept:]
        assert ending is not None  # set at the root at the latest
        return walk.verdict(walk.chance.choose(ending, walk.here, Stream.RESIDUAL))

    @staticmethod
    def ends(walk: Walk, p: float, q: float) -> bool:
        return walk.chance.accept(p, q, walk.position, walk.node)


def _carried(p: float, q: float) -> float:
    """min(1, p / q), 0 where p is 0."""
    if p == 0:
        return 0.0
    return 1.0 if p >= q else p / q


class TypicalAcceptance:
    """Medusa's typical acceptance (Cai et al. 2024): LOSSY, the output's law is not the target's.

    A candidate stands when p(x) > min(epsilon, delta * exp(-H(p))), H the entropy in nats; the longest accepted path
    wins, the likelier one among equals, then the first. The next token is the target's own draw there.
    """

    name = "typical-acceptance"
    lossless = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.epsilon = epsilon
        self.delta = delta

    def judge(
        self,
        proposal: Proposal,
        logits: FloatArray,
        history: History,
        params: SamplingParams,
        uniforms: Chance,
        position: int,
    ) -> Verdict:
        walk = Walk(proposal, logits, history, params, uniforms, position)
        if params.greedy:
            return judge_greedy(walk)
        standing = {0: (walk, 0.0)}  # by node: where its path ends, and the log-probability of that path
        for node in range(proposal.tree.size):
            if node in standing:
                here, score = standing[node]
                for child, gain in self.typical(here):
                    standing[child] = (here.after(child), score + gain)
        best, _ = standing[max(standing, key=lambda node: (len(standing[node][0].path), standing[node][1], -node))]
        return best.verdict(uniforms.choose(best.target(), best.here, Stream.TARGET))

    def typical(self, walk: Walk) -> list[tuple[int, float]]:
        """The children of this node that stand, with their log-probabilities."""
        if not walk.children:
            return []
        p = walk.target()
        probs = p.probs[p.weights > 0]
        entropy = -float(np.sum(probs * np.log(probs)))
        bar = min(self.epsilon, self.delta * math.exp(-entropy))
        likely = [(child, p.at(walk.token(child))) for child in walk.children]
        return [(child, math.log(chance)) for child, chance in likely if chance > bar]


RULES: Sequence[type[Rule]] = (
    SampleAndMatch,
    ChainRejection,
    BlockVerification,
    TreeRejectionWithReplacement,
    TreeRejectionWithoutReplacement,
    TypicalAcceptance,
)


def rule_named(name: str) -> Rule:
    """The rule of that name with its default settings; UserError listing the names there are."""
    for rule in RULES:
        if rule.name == name:
            return rule()
    raise UserError(f"verification rule: found {name!r}, expected one of {', '.join(r.name for r in RULES)}.")
