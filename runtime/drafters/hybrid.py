"""Hybrid drafting: cheap sources where they are strong, one model drafter where they are not, in one tree.

The sequence's own text (suffix matches), the bundle's n-gram table and, where it pays, the draft of one model drafter
are grown into a single tree under a single node budget. Lossless because the tree is a set of deterministic
candidates: sample-and-match verifies it whatever proposed its nodes.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from specrun.bundle import DrafterRecord
from specrun.drafters import DraftContext, Drafter, Priced
from specrun.drafters.ngram_table import Ngram
from specrun.drafters.sources import Draft, Guess, SourceDrafter, bucket, options_for
from specrun.drafters.suffix import suffix_sources
from specrun.economics import Average, usual
from specrun.errors import BundleError
from specrun.proposal import Commit, Proposal, Verdict
from specrun.sequence import Sequence

UNKNOWN = 0.4  # a model drafter's chance to be right before anything is known of it
COMPARED = 3  # of so many drafts that it was asked for, one is compared with what would have been drafted without it
PATIENCE = 64  # passes after which a model drafter that did not seem to pay is asked again


@dataclass
class ModelReader:
    """A model drafter's proposal as a source. The cursor is a node of it."""

    name: str
    proposal: Proposal

    def append(self, token: int) -> None:
        pass

    def root(self) -> int:
        return 0

    def guesses(self, cursor: int) -> list[Guess]:
        tokens, chances = self.proposal.tokens, self.proposal.chances
        found = []
        for rank, node in enumerate(self.proposal.tree.children[cursor]):
            chance = UNKNOWN / (rank + 1) if chances is None else float(chances[node])
            depth = min(int(self.proposal.tree.depths[node]), 4)
            found.append(Guess(int(tokens[node]), chance, (self.name, depth, min(rank, 2), bucket(chance))))
        return found

    def advance(self, cursor: int, token: int) -> int | None:
        children = self.proposal.tree.children[cursor]
        return next((node for node in children if self.proposal.tokens[node] == token), None)


@dataclass
class Member:
    """The model drafter of a hybrid: when to ask it, and what it proposed for each sequence of this pass."""

    drafter: Drafter
    priced: Priced  # the same
    gains: Average = field(default_factory=Average)
    proposals: dict[Sequence, Proposal] = field(default_factory=dict)
    spent: float | None = None  # what a draft cost, in plain passes of the batch at hand; prompts are not counted
    asked: int = 0
    waited: int = 0  # passes since it was last asked

    def cost(self) -> float:
        """Of asking it, in plain passes of the batch at hand: its price, or what its drafts cost if that is more."""
        return max(self.priced.draft_costs(1)[0], self.spent or 0.0)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        proposals = self.priced.draft_now(sequences, budgets)
        if any(proposal.drafted for proposal in proposals):
            self.spent = usual(self.spent, max(proposal.draft_cost for proposal in proposals))
        self.waited, self.asked = 0, self.asked + 1
        self.proposals.update(zip(sequences, proposals, strict=True))
        return proposals

    def expected(self, sequence: Sequence, draft: Draft) -> float:
        """Tokens that asking it should bring on top of the cheap draft."""
        return self.gains.mean(_situation(sequence, draft), UNKNOWN * (1 - _strength(draft)))

    def commit(self, sequence: Sequence, commit: Commit) -> Commit:
        """The commit as the member sees it: its own proposal, and the verdict had it been verified."""
        proposal = self.proposals.pop(sequence, None)
        if proposal is None or commit.verdict is None:
            return replace(commit, proposal=None, verdict=None)
        emitted = commit.verdict.tokens
        verdict = Verdict(proposal.follow(emitted[:-1]), commit.verdict.next_token, emitted)
        return replace(commit, proposal=proposal, verdict=verdict)


def _strength(draft: Draft) -> float:
    """Chance of the cheap sources' best guess."""
    guesses = draft.nodes[0].guesses
    return guesses[0].chance if guesses else 0.0


def _situation(sequence: Sequence, draft: Draft) -> Hashable:
    return sequence.params.greedy, bucket(_strength(draft))


@dataclass
class Hybrid(SourceDrafter):
    member: Member | None = None

    @staticmethod
    def open(record: DrafterRecord, context: DraftContext) -> Hybrid:
        """``model`` of the options names the model drafter; without it the bundle's first one that runs an engine is
        taken, if there is any."""
        options, others = options_for(record, context.target), context.bundle.manifest.drafters
        model = options.pop("model", None) or next((other.name for other in others if other.engine is not None), None)
        sources = suffix_sources(f"{record.name} suffix", shared=options.pop("shared"))
        for other in others:
            table = context.open_drafter(other.name) if other.kind == "ngram" else None
            sources += table.sources if isinstance(table, Ngram) else []
        hybrid = Hybrid(record.name, context.economics, context.eos_token_ids, sources, **options)
        if model is not None:
            drafter = context.open_drafter(model)
            if not isinstance(drafter, Priced):
                raise BundleError(
                    f"Drafter {record.name!r}: its model drafter is {model!r}, expected one that runs an engine and "
                    "tells its price. Compile the bundle with another."
                )
            hybrid.member, hybrid.taps = Member(drafter, drafter), drafter.taps
        return hybrid

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        if self.member is not None:
            self.member.drafter.begin(sequence)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        drafts = [self.start(sequence) for sequence in sequences]
        spent = 0.0 if self.member is None else self._ask(self.member, sequences, budgets, drafts)
        return self.finish(drafts, budgets, draft_cost=spent)

    def _ask(self, member: Member, sequences: Seq[Sequence], budgets: Seq[int], drafts: Seq[Draft]) -> float:
        """Takes the member's proposals into the drafts where that should pay; returns what drafting them cost."""
        expected = [member.expected(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)]
        cost = self.economics.pace * member.cost()
        member.waited += 1
        asked = [i for i, gain in enumerate(expected) if budgets[i] > 0 and gain > cost / self.economics.batch]
        if sum(expected[i] for i in asked) / self.economics.batch <= cost:
            asked = [i for i, budget in enumerate(budgets) if budget > 0] if member.waited > PATIENCE else []
        if not asked:
            return 0.0
        proposals = member.propose([sequences[i] for i in asked], [budgets[i] for i in asked])
        for i, proposal in zip(asked, proposals, strict=True):
            cheap = self._alone(sequences[i], budgets[i]) if member.asked % COMPARED == 1 else None
            situation = _situation(sequences[i], drafts[i])
            drafts[i].join(ModelReader(member.drafter.name, proposal))
            if cheap is not None:
                drafts[i].grow(self.economics.floors(min(budgets[i], self.max_nodes)))
                member.gains.observe(situation, self._gain(cheap, drafts[i]))
        return member.cost()

    def _alone(self, sequence: Sequence, budget: int) -> Draft:
        """The draft of this pass without the member, for comparison."""
        kept = self.states[sequence].draft
        draft = self.start(sequence)
        self.states[sequence].draft = kept
        draft.grow(self.economics.floors(min(budget, self.max_nodes)))
        return draft

    def _gain(self, cheap: Draft, grafted: Draft) -> float:
        """Tokens gained by verifying the grafted draft rather than the cheap one, both by what is known now."""
        economics = self.economics
        (kept,), (best,) = economics.best_sizes([cheap.reaches]), economics.best_sizes([grafted.reaches])
        price = economics.pace * (economics.cost(best + 1) - economics.cost(kept + 1))
        return sum(grafted.reaches[:best]) - sum(grafted.reaches_of(cheap, kept)) - price

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        super().observe(sequence, commit)
        if self.member is not None:
            self.member.drafter.observe(sequence, self.member.commit(sequence, commit))

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        if self.member is not None:
            self.member.proposals.pop(sequence, None)
            self.member.drafter.end(sequence)
