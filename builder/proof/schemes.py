"""A scheme: a rule with a way of drafting that it verifies. The lossless ones, the lossy one, and the controls."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.proof import broken
from specbuild.proof.cases import CHAIN, DEEP, PENALTIES, PLAIN, UNEVEN, Case
from specbuild.proof.drafts import CAUTIOUS, WITH_REPLACEMENT, WITHOUT_REPLACEMENT, Drafter, Fixed, Table
from specrun.draft_law import draw_with_replacement, draw_without_replacement
from specrun.rules import (
    BlockVerification,
    ChainRejection,
    Rule,
    SampleAndMatch,
    TreeRejectionWithoutReplacement,
    TreeRejectionWithReplacement,
    TypicalAcceptance,
)
from specrun.sampling import SamplingParams
from specrun.tree import DraftTree


@dataclass(frozen=True)
class Scheme:
    """``chains`` limits it to cases whose shape is a chain."""

    name: str
    rule: Rule
    drafter: Drafter
    chains: bool = False

    def fits(self, case: Case) -> bool:
        return case.chain or not self.chains


LOSSLESS = (
    Scheme("sample-and-match, best candidates", SampleAndMatch(), Fixed()),
    Scheme("sample-and-match, duplicate candidates", SampleAndMatch(), Fixed(repeat=2)),
    Scheme("sample-and-match, drawn candidates", SampleAndMatch(), WITHOUT_REPLACEMENT),
    Scheme("chain-rejection", ChainRejection(), WITH_REPLACEMENT, chains=True),
    Scheme("block-verification", BlockVerification(), WITH_REPLACEMENT, chains=True),
    Scheme("chain-rejection, ends after unlikely draws", ChainRejection(), CAUTIOUS, chains=True),
    Scheme("block-verification, ends after unlikely draws", BlockVerification(), CAUTIOUS, chains=True),
    Scheme("tree-rejection-with-replacement", TreeRejectionWithReplacement(), WITH_REPLACEMENT),
    Scheme("tree-rejection-without-replacement", TreeRejectionWithoutReplacement(), WITHOUT_REPLACEMENT),
)
LOSSY = (Scheme("typical-acceptance (lossy by design)", TypicalAcceptance(), Fixed()),)


def _control(
    name: str, rule: Rule, drafter: Drafter, shape: DraftTree, params: SamplingParams = PLAIN, size: int = 3
) -> tuple[Scheme, Case]:
    target = Table(size, 1)
    return Scheme(name, rule, drafter), Case("control", target, Table(size, 2, target), shape, params, length=3)


def controls() -> list[tuple[Scheme, Case]]:
    """Every broken variant with the case that must expose it."""
    target = Table(2, 5)
    two = Case("control, two rounds", target, Table(2, 6, target), DraftTree.chain(2), rounds=2)
    with_, without, tokenwise = WITH_REPLACEMENT, WITHOUT_REPLACEMENT, ChainRejection()
    pair = DraftTree(UNEVEN.parents[:5])
    return [
        _control("best candidates judged by p/q", TreeRejectionWithoutReplacement(), broken.TopCandidates(), pair),
        _control(
            "candidates re-ranked by q",
            TreeRejectionWithoutReplacement(),
            broken.Reranked(draw_without_replacement),
            pair,
        ),
        _control("subtracts only the token", broken.SubtractsTheToken(), without, pair),
        _control("unconditional q, no replacement", broken.UnconditionalLaw(), without, pair),
        _control("returned q is not the drawn q", tokenwise, broken.HotterLaw(draw_with_replacement), CHAIN),
        _control("trimmed by the drawn token", tokenwise, broken.TrimmedByToken(draw_with_replacement), CHAIN),
        _control("rejection draws from p", broken.DrawsFromTarget(), with_, CHAIN),
        _control("rejection draws from the next row", broken.NextRow(), with_, CHAIN),
        _control("block residual without the prefix", broken.BareResidual(), with_, CHAIN),
        _control("warps reach only the bonus token", broken.BonusOnlyWarps(), with_, CHAIN, PENALTIES),
        _control("penalties ignore the path", broken.IgnoresThePath(), Fixed(), DEEP, PENALTIES, size=2),
        (Scheme("random numbers reused", broken.RepeatedNumbers(), with_), two),
    ]
