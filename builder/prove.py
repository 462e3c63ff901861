"""The certificate: every lossless rule over every case, with the exact distance of what it emits from the target.

What runs is the runtime's own code (`specrun.rules`, `specrun.warp`, `specrun.draft_law`) with its random source
replaced by one that takes every branch (`specbuild.proof.enumeration`). Total variation is half the sum of absolute
differences between two laws over the next L tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from specbuild.proof.cases import Case, cases
from specbuild.proof.drafts import Row
from specbuild.proof.enumeration import Branches, ReusedDraw, outcomes
from specbuild.proof.schemes import LOSSLESS, LOSSY, Scheme, controls
from specrun.proposal import Proposal
from specrun.warp import History, warp

TOLERANCE = 1e-12
DETECTED = 1e-3  # a control's distance must be no rounding

Tokens = tuple[int, ...]
SequenceLaw = dict[Tokens, float]


@dataclass(frozen=True)
class Finding:
    """One scheme on one case. ``reused`` names a random number that was consulted twice; then nothing else counts."""

    scheme: str
    case: str
    total_variation: float
    accepted: float  # mean accepted drafted tokens in the first round
    outcomes: int  # branches enumerated
    reused: str | None = None

    @property
    def lossless(self) -> bool:
        return self.total_variation <= TOLERANCE and self.reused is None

    @property
    def detected(self) -> bool:
        return self.total_variation > DETECTED or self.reused is not None


@dataclass(frozen=True)
class Certificate:
    """What was proved, what is lossy by design, and the broken variants that the same machinery must catch."""

    proved: list[Finding]
    lossy: list[Finding]
    controls: list[Finding]

    @property
    def holds(self) -> bool:
        """Every lossless rule within the tolerance, and every control caught."""
        return all(f.lossless for f in self.proved) and all(f.detected for f in self.controls)

    def to_json(self) -> dict[str, Any]:
        return {"tolerance": TOLERANCE, "holds": self.holds, **asdict(self)}


class _Rows:
    """A pass's logits, made when read: the rules read visited rows only."""

    def __init__(self, case: Case, history: History, proposal: Proposal) -> None:
        self._case, self._history, self._proposal = case, history, proposal

    def __getitem__(self, node: int) -> Row:
        path = [int(self._proposal.tokens[n]) for n in self._proposal.tree.path_to(node)[1:]]
        return self._case.target.row([*self._history.tokens, *path])


def generate(case: Case, scheme: Scheme, chance: Branches) -> tuple[Tokens, int]:
    """Draft and verify ``case.rounds`` times: what was emitted, cut at EOS and length, and what round one accepted."""
    history = History(case.prompt)
    emitted: list[int] = []
    accepted = 0
    for turn in range(case.rounds):
        proposal = scheme.drafter.propose(case.draft, case.shape, history, case.params, chance, case.eos)
        rows: Any = _Rows(case, history, proposal)
        verdict = scheme.rule.judge(proposal, rows, history, case.params, chance, len(history.tokens))
        accepted = accepted if turn else verdict.accepted
        for token in verdict.tokens:
            history.append(token)
            emitted.append(token)
            if token == case.eos or len(emitted) == case.length:
                return tuple(emitted), accepted
    return tuple(emitted), accepted


def continuations(case: Case, emitted: Tokens) -> Iterator[tuple[Tokens, float]]:
    """Every way the target itself goes on to ``case.length`` tokens, and its probability."""
    if len(emitted) == case.length or (emitted and emitted[-1] == case.eos):
        yield emitted, 1.0
        return
    history = History(case.prompt)
    for token in emitted:
        history.append(token)
    law = warp(case.target.row(history.tokens), case.params, history)
    tokens = range(law.probs.size) if law.tokens is None else law.tokens.tolist()
    for token, p in zip(tokens, law.probs.tolist(), strict=True):
        if p > 0:
            for whole, rest in continuations(case, (*emitted, token)):
                yield whole, p * rest


def target_law(case: Case, prefixes: SequenceLaw) -> SequenceLaw:
    """The law of ``case.length`` tokens whose beginnings follow ``prefixes`` and whose rest is the target's own."""
    law: SequenceLaw = defaultdict(float)
    for prefix, weight in prefixes.items():
        for whole, p in continuations(case, prefix):
            law[whole] += weight * p
    return law


def examine(scheme: Scheme, case: Case) -> Finding:
    """Enumerate one scheme on one case."""
    prefixes: SequenceLaw = defaultdict(float)
    mean, count = 0.0, 0
    try:
        for (emitted, accepted), weight in outcomes(lambda chance: generate(case, scheme, chance)):
            prefixes[emitted] += weight
            mean += weight * accepted
            count += 1
    except ReusedDraw as found:
        return Finding(scheme.name, case.name, 1.0, mean, count, str(found))
    apart = distance(target_law(case, prefixes), target_law(case, {(): 1.0}))
    return Finding(scheme.name, case.name, apart, mean, count)


def distance(found: SequenceLaw, expected: SequenceLaw) -> float:
    """Total variation between two laws; missing mass counts as well."""
    keys = found.keys() | expected.keys()
    return sum(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in sorted(keys)) / 2


def prove(quick: bool = False, progress: Console | None = None) -> Certificate:
    """The whole certificate, or (``quick``) a smaller one of the same kinds; a bar on ``progress`` while it runs."""
    listed = cases(quick)
    jobs = [
        [(scheme, case) for scheme in LOSSLESS for case in listed if scheme.fits(case)],
        [(scheme, listed[0]) for scheme in LOSSY],
        controls(),
    ]
    with Progress(console=progress, transient=True, disable=progress is None) as bar:
        task = bar.add_task("Enumerating", total=sum(map(len, jobs)))

        def examined(scheme: Scheme, case: Case) -> Finding:
            bar.update(task, advance=1, description=scheme.name)
            return examine(scheme, case)

        proved, lossy, caught = ([examined(*job) for job in part] for part in jobs)
        return Certificate(proved, lossy, caught)
