"""Deliberately broken verification, as found in the wild: the proof must see through every one of these.

Each is one plausible line away from the rule it breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbuild.proof.drafts import Drawn, Fixed, Growing, Model
from specrun.distribution import Distribution
from specrun.draft_law import draft_law
from specrun.proposal import FloatArray, Proposal, Verdict
from specrun.random import Chance
from specrun.rules import (
    BlockVerification,
    ChainRejection,
    SampleAndMatch,
    TreeRejectionWithoutReplacement,
    TreeRejectionWithReplacement,
    Walk,
)
from specrun.sampling import SamplingParams
from specrun.tree import DraftTree, IntArray
from specrun.warp import History, warp


class TopCandidates(Fixed):
    """The best tokens of q, verified with p / q as if they had been drawn."""

    def propose(
        self, model: Model, wanted: DraftTree, history: History, params: SamplingParams, chance: Chance, eos: int | None
    ) -> Proposal:
        drafted = super().propose(model, wanted, history, params, chance, eos)
        laws = {}
        for node in (n for n in range(drafted.tree.size) if drafted.tree.children[n]):
            path = [int(drafted.tokens[n]) for n in drafted.tree.path_to(node)[1:]]
            laws[node] = draft_law(model.row([*history.tokens, *path]), params, history, path)
        return replace(drafted, laws=laws)


class Reranked(Drawn):
    """Drawn without replacement, then put in order of q: the best first."""

    def grow(
        self,
        growing: Growing,
        node: int,
        count: int,
        model: Model,
        history: History,
        params: SamplingParams,
        chance: Chance,
    ) -> None:
        before = len(growing.tokens)
        super().grow(growing, node, count, model, history, params, chance)
        law = Distribution.of(growing.laws[node])
        growing.tokens[before:] = sorted(growing.tokens[before:], key=lambda token: -law.at(token))


class HotterLaw(Drawn):
    """The law handed over is not the one drawn from: it misses the request's temperature and cuts."""

    def grow(
        self,
        growing: Growing,
        node: int,
        count: int,
        model: Model,
        history: History,
        params: SamplingParams,
        chance: Chance,
    ) -> None:
        super().grow(growing, node, count, model, history, params, chance)
        hotter = SamplingParams(temperature=2.0 * params.temperature)
        growing.laws[node] = draft_law(model.row([*history.tokens, *growing.path(node)]), hotter, history)


class TrimmedByToken(Drawn):
    """A drawn token that q thinks unlikely is dropped: whether it is judged depends on what it is."""

    def grow(
        self,
        growing: Growing,
        node: int,
        count: int,
        model: Model,
        history: History,
        params: SamplingParams,
        chance: Chance,
    ) -> None:
        before = len(growing.tokens)
        super().grow(growing, node, count, model, history, params, chance)
        law = Distribution.of(growing.laws[node])
        likely = [token for token in growing.tokens[before:] if law.at(token) > 0.3]
        del growing.tokens[before:], growing.parents[before:], growing.places[before:]
        growing.add(node, likely)


class SubtractsTheToken(TreeRejectionWithoutReplacement):
    """After a rejection only the rejected token leaves the residual, not the whole of q_j."""

    def step(self, walk: Walk, p: Distribution, q: Distribution) -> tuple[int | None, Distribution]:
        remaining, conditioned = p, q
        for child in walk.children:
            token = walk.token(child)
            if walk.chance.accept(remaining.at(token), conditioned.at(token), walk.position, child):
                return child, remaining
            remaining = remaining.without(token) or remaining
            conditioned = conditioned.without(token) or conditioned
        return None, remaining


class UnconditionalLaw(TreeRejectionWithReplacement):
    """Candidates drawn without replacement, judged with q as if each had been drawn afresh."""


class DrawsFromTarget(ChainRejection):
    """A rejection draws from p instead of the residual."""

    def step(self, walk: Walk, p: Distribution, q: Distribution) -> tuple[int | None, Distribution]:
        child, _ = super().step(walk, p, q)
        return child, p


class NextRow(ChainRejection):
    """A rejection draws from the row after the rejected draft (a public engine did)."""

    def step(self, walk: Walk, p: Distribution, q: Distribution) -> tuple[int | None, Distribution]:
        child, remaining = super().step(walk, p, q)
        if child is not None:
            return child, remaining
        rejected = walk.children[0]
        return None, warp(walk.logits[rejected], walk.params, walk.history, [*walk.drafted, walk.token(rejected)])


class BareResidual(BlockVerification):
    """Block verification whose residual is (p - q)+ as in the token rule, without the prefix's P."""

    def walk(self, walk: Walk) -> Verdict:
        return super().walk(_Unscaled(**vars(walk)))


class _Unscaled(Walk):
    def target(self) -> Distribution:
        law = super().target()
        return _BareExcess(law.tokens, law.weights)


class _BareExcess(Distribution):
    def excess(self, other: Distribution, scale: float = 1.0) -> tuple[Distribution, float]:
        _, mass = super().excess(other, scale)
        return super().excess(other)[0], mass


class RepeatedNumbers(BlockVerification):
    """Counts the block's uniforms by the token's position: a rejected block's places meet them again next round."""

    @staticmethod
    def ends(walk: Walk, p: float, q: float) -> bool:
        return walk.chance.accept(p, q, walk.here, 0)


class BonusOnlyWarps(ChainRejection):
    """Penalties, bias and cuts reach only the bonus token (a public engine did)."""

    def walk(self, walk: Walk) -> Verdict:
        return super().walk(_Bare(**vars(walk)))


class _Bare(Walk):
    def target(self) -> Distribution:
        params = SamplingParams(temperature=1.0) if self.children else self.params
        return warp(self.logits[self.node], params, self.history, self.drafted)


class _Rootbound(History):
    """A history that forgets a drafted path."""

    def __init__(self, history: History) -> None:
        vars(self).update(vars(history))

    def along(self, path: Sequence[int]) -> tuple[IntArray, IntArray]:
        return super().along(())


class IgnoresThePath(SampleAndMatch):
    """Penalties count the sequence's tokens but not the drafted ones before a node."""

    def judge(
        self,
        proposal: Proposal,
        logits: FloatArray,
        history: History,
        params: SamplingParams,
        uniforms: Chance,
        position: int,
    ) -> Verdict:
        return super().judge(proposal, logits, _Rootbound(history), params, uniforms, position)
