"""The loop: propose -> verify -> commit -> emit."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from specrun.bundle import Limits
from specrun.cache import Lane
from specrun.decoder import Decoder, PassOutput, Row
from specrun.economics import Economics
from specrun.proposal import Commit, FloatArray, Proposal, Verdict
from specrun.sequence import Sequence, TokenLogprob
from specrun.tree import IntArray


@dataclass(frozen=True)
class Emission:
    """What one sequence gained from one pass: tokens, and the text that became certain with them."""

    sequence: Sequence
    tokens: list[int]
    text: str


class Loop:
    """Decodes any number of sequences together, up to the target's lanes. Each brings its drafter and its rule."""

    def __init__(self, target: Decoder, limits: Limits, economics: Economics, vocabulary: int) -> None:
        self.target, self.limits, self.economics = target, limits, economics
        self.vocabulary = vocabulary  # ids beyond it are padding: no rule ever sees their logits
        self.active: list[Sequence] = []

    @property
    def has_room(self) -> bool:
        """Whether another sequence finds a lane."""
        return self.target.cache.has_lane

    def admit(self, sequence: Sequence) -> Emission:
        """Prefills a sequence and emits its first token. A lane it brings along may hold a prefix of its prompt."""
        begin = time.perf_counter()
        cache = self.target.cache
        if sequence.lane is None:
            sequence.lane = cache.acquire(len(sequence.prompt))
        sequence.stats.cached_tokens = sequence.lane.length
        sequence.drafter.begin(sequence)
        self.active.append(sequence)
        chunk, output = self._prefill(sequence)
        verdict, text = self._accept(sequence, Proposal.empty(sequence.pending), output.logits[0])
        cache.commit(sequence.lane, range(chunk.tokens.size))
        self._tell(sequence, chunk.tokens, verdict.next_token, output, 0, np.arange(chunk.tokens.size))
        self._retire(sequence)
        sequence.stats.prefill_seconds = time.perf_counter() - begin
        return Emission(sequence, verdict.tokens, text)

    def step(self) -> list[Emission]:
        """One pass over every active sequence. Those that finish leave the loop and free their lane."""
        batch, begin = list(self.active), time.perf_counter()
        proposals = self.propose(batch)
        drafted = time.perf_counter()
        output = self.verify(batch, proposals)
        emissions = []
        for i, (sequence, proposal) in enumerate(zip(batch, proposals, strict=True)):
            verdict, text = self._accept(sequence, proposal, output.logits[i])
            self.commit(sequence, proposal, verdict, output, i)
            emissions.append(Emission(sequence, verdict.tokens, text))
        end = time.perf_counter()
        for sequence in batch:
            sequence.stats.draft_seconds += drafted - begin
            sequence.stats.decode_seconds += end - begin
            self._retire(sequence)
        return emissions

    def propose(self, batch: Seq[Sequence]) -> list[Proposal]:
        """Asks each drafter once for all of its sequences; a draft never outgrows what may still be emitted.

        Where only chains are exact, a tree is verified as far as its first nodes are one.
        """
        self.economics.start_pass(len(batch), self.target.cache.capacity)
        members: dict[int, list[Sequence]] = {}
        for sequence in batch:
            members.setdefault(id(sequence.drafter), []).append(sequence)
        proposals: dict[Sequence, Proposal] = {}
        for sequences in members.values():
            budgets = [self._budget(sequence) for sequence in sequences]
            drafts = sequences[0].drafter.propose(sequences, budgets)
            for sequence, budget, draft in zip(sequences, budgets, drafts, strict=True):
                kept = min(budget + 1, draft.tree.chained) if self.target.record.chains_only else budget + 1
                proposals[sequence] = draft.prefix(kept)
        return [proposals[sequence] for sequence in batch]

    def verify(self, batch: Seq[Sequence], proposals: Seq[Proposal]) -> PassOutput:
        """One target pass over all drafts."""
        rows = [
            Row.of_tree(_lane(sequence), proposal.tokens, proposal.tree, proposal.passengers)
            for sequence, proposal in zip(batch, proposals, strict=True)
        ]
        output = self.target.run(rows)
        self.economics.costs.observe(output.nodes, len(rows), output.seconds)
        return output

    def commit(self, sequence: Sequence, proposal: Proposal, verdict: Verdict, output: PassOutput, row: int) -> None:
        """Keeps the accepted rows and tells the drafter. The target's cache then holds all tokens but the last."""
        sequence.stats.count(int(proposal.tree.depths.max()), verdict, proposal.drafted)
        economics = self.economics.of(sequence.drafter.name)
        economics.observe_pass(output.nodes, len(verdict.tokens), proposal.draft_cost)
        self.target.cache.commit(_lane(sequence), verdict.path)
        self._tell(
            sequence, proposal.tokens[verdict.path], verdict.next_token, output, row, verdict.path, proposal, verdict
        )

    def cancel(self, sequence: Sequence) -> None:
        """Drops a sequence before it is finished; what it emitted stays valid."""
        if sequence in self.active:
            self._leave(sequence)

    def _prefill(self, sequence: Sequence) -> tuple[Row, PassOutput]:
        """Runs the prompt in chunks. All are committed but the last, which is returned with its pass."""
        lane = _lane(sequence)
        while True:
            end = min(len(sequence.prompt), lane.length + self.limits.prefill_chunk)
            is_last = end == len(sequence.prompt)
            tokens = np.array(sequence.prompt[lane.length : end], dtype=np.int64)
            row = Row.of_chunk(lane, tokens, logits=is_last)
            output = self.target.run([row])
            if is_last:
                return row, output
            self.target.cache.commit(lane, range(tokens.size))
            self._tell(sequence, tokens, sequence.prompt[end], output, 0, np.arange(tokens.size))

    def _accept(self, sequence: Sequence, proposal: Proposal, logits: FloatArray) -> tuple[Verdict, str]:
        """Judges a draft by the sequence's rule, then lets the request's limits cut what was accepted."""
        rows = logits[: proposal.tree.size, : self.vocabulary]
        verdict = sequence.rule.judge(
            proposal, rows, sequence.history, sequence.params, sequence.uniforms, len(sequence.tokens)
        )
        verdict, text = sequence.accept(verdict)
        if sequence.params.logprobs is not None:
            for node, token in zip(verdict.path, verdict.tokens, strict=True):
                sequence.logprobs.append(token_logprob(rows[node], token, sequence.params.logprobs))
        return verdict, text

    def _tell(
        self,
        sequence: Sequence,
        tokens: IntArray,
        next_token: int,
        output: PassOutput,
        row: int,
        nodes: IntArray | list[int],
        proposal: Proposal | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        """Reports rows that were just committed to the sequence's drafter."""
        hidden = None
        if sequence.drafter.taps and output.hidden is not None:
            hidden = select_taps(output.hidden[row][nodes], self.target.record.taps, sequence.drafter.taps)
        riders = None
        if proposal is not None and proposal.passengers is not None:
            riders = output.logits[row][proposal.tree.size :, : self.vocabulary]
        start = _lane(sequence).length - tokens.size
        commit = Commit(start, tokens, next_token, hidden, proposal, verdict, riders)
        sequence.drafter.observe(sequence, commit)

    def _budget(self, sequence: Sequence) -> int:
        return max(0, min(self.limits.max_nodes - 1, sequence.room - 1))

    def _retire(self, sequence: Sequence) -> None:
        if sequence.finish_reason is not None:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        sequence.drafter.end(sequence)
        if not sequence.keep_lane:
            self.target.cache.release(_lane(sequence))


def _lane(sequence: Sequence) -> Lane:
    if sequence.lane is None:
        raise ValueError("the sequence was not admitted")
    return sequence.lane


def token_logprob(logits: FloatArray, token: int, best: int) -> TokenLogprob:
    """Log-softmax of one row at ``token`` and at its ``best`` highest entries."""
    peak = float(logits.max())
    norm = peak + float(np.log(np.exp(logits - peak, dtype=np.float64).sum()))
    top: list[tuple[int, float]] = []
    if best:
        ids = np.argpartition(-logits, min(best, logits.size - 1))[:best]
        ids = ids[np.lexsort((ids, -logits[ids]))]
        top = [(int(i), float(logits[i]) - norm) for i in ids]
    return TokenLogprob(token, float(logits[token]) - norm, tuple(top))


def select_taps(hidden: FloatArray, have: tuple[int, ...], want: tuple[int, ...]) -> FloatArray:
    """The wanted taps' columns of hidden [K, k * H], copied out of the pass's buffer."""
    if have == want:
        return hidden.copy()
    width = hidden.shape[-1] // len(have)
    return np.concatenate([hidden[:, have.index(t) * width : (have.index(t) + 1) * width] for t in want], axis=-1)
