"""DecoderDrafter: what drafters with a decoder of their own share. One pass catches up, then one pass a level."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from specrun.cache import Lane
from specrun.decoder import Decoder, Row
from specrun.drafters.growth import Draft, Grower, learn
from specrun.drafters.pacing import Pacing
from specrun.proposal import Commit, FloatArray, Proposal
from specrun.rules import Rule
from specrun.sequence import Sequence
from specrun.tree import IntArray


@dataclass
class Chunk:
    """Rows that a drafter's cache lacks: ``tokens`` int64 [K] and, for heads, ``features`` float32 [K, H_in]."""

    tokens: IntArray
    features: FloatArray | None = None

    def piece(self, start: int, stop: int) -> Chunk:
        return Chunk(self.tokens[start:stop], None if self.features is None else self.features[start:stop])


@dataclass
class State:
    """One sequence's: its lane in the drafter's cache, and the draft that is being grown or judged."""

    lane: Lane
    draft: Draft | None = None
    rows: dict[int, int] = field(default_factory=dict)  # node of the draft -> its scratch row
    features: dict[int, FloatArray] = field(default_factory=dict)  # node -> what its children are conditioned on


@dataclass
class DecoderDrafter(ABC):
    """``greedy`` and ``sampled``: how drafts grow for greedy and for sampled requests. ``pacing``: None never pauses.

    Subclasses say what their cache lacks (``missing``) and what becomes of a draft (``settle``).
    """

    name: str
    decoder: Decoder
    rule: Rule
    greedy: Grower
    sampled: Grower
    pacing: Pacing | None
    prefill_chunk: int
    max_nodes: int
    taps: tuple[int, ...] = ()
    _states: dict[Sequence, State] = field(default_factory=dict)

    @abstractmethod
    def missing(self, sequence: Sequence) -> Chunk:
        """The rows to run before a draft's first token is known; its last row is the draft's root."""

    @abstractmethod
    def backlog(self, sequence: Sequence) -> int:
        """How many rows ``missing`` would give."""

    def stage(self, level: int) -> Decoder:
        """The decoder that runs the nodes of a level; level 0 is catching up."""
        return self.decoder

    def lane(self, sequence: Sequence, level: int) -> Lane:
        """The sequence's lane in the cache of that decoder."""
        return self._states[sequence].lane

    def caught_up(self, sequence: Sequence, hidden: FloatArray | None) -> None:  # noqa: B027, a hook most leave empty
        """Rows entered the cache of level 0; ``hidden`` float32 [K, H] is what they feed on."""

    def begin(self, sequence: Sequence) -> None:
        self._states[sequence] = State(self.decoder.cache.acquire())

    def end(self, sequence: Sequence) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            self.decoder.cache.release(state.lane)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        starting = self._starting([s for s, budget in zip(sequences, budgets, strict=True) if budget > 0])
        return self.draft_now(sequences, [b if s in starting else 0 for s, b in zip(sequences, budgets, strict=True)])

    def draft_now(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """See ``specrun.drafters.Priced``."""
        drafts = {s: Draft.of(s, budget) for s, budget in zip(sequences, budgets, strict=True) if budget > 0}
        seconds = 0.0
        if drafts:
            seconds = self._catch_up(list(drafts), drafts) + self._grow(list(drafts))
        return [self._finish(s, seconds) if s in drafts else Proposal.empty(s.pending) for s in sequences]

    def observe(self, sequence: Sequence, commit: Commit) -> None:
        state = self._states[sequence]
        if state.draft is not None and commit.verdict is not None and commit.proposal is not None:
            learn(state.draft, [*commit.tokens[1:].tolist(), commit.next_token], self.pacing)
        state.draft = None

    def draft_costs(self, length: int) -> list[float]:
        """See ``specrun.drafters.Priced``."""
        if self.pacing is None or length == 0:
            return [0.0] * length
        return [self.pacing.cost("first")] + [self.pacing.cost("step")] * (length - 1)

    def _grower(self, sequence: Sequence) -> Grower:
        return self.greedy if sequence.params.greedy else self.sampled

    def _starting(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those to draft for now. Drafts with laws never pause: a seed's output must not depend on time."""
        paced = [s for s in sequences if self.pacing is not None and self._grower(s) is self.greedy]
        if self.pacing is None or not paced or self.pacing.worth_starting(max(map(self.backlog, paced))):
            return sequences
        return [sequence for sequence in sequences if sequence not in paced]

    def _catch_up(self, sequences: Seq[Sequence], drafts: dict[Sequence, Draft]) -> float:
        """Brings every lane up to its sequence and grows the first level. Returns the seconds of the last pass."""
        chunks = {}
        for sequence in sequences:
            chunk = self.missing(sequence)
            # Long chunks run alone: beside a lane near its end they would not fit into a cache of fixed capacity.
            chunks[sequence] = self.flush(sequence, chunk, self.max_nodes)
        begin = time.perf_counter()
        rows = [
            Row.of_chunk(self._states[s].lane, chunks[s].tokens, logits=True, hidden_in=chunks[s].features)
            for s in sequences
        ]
        output = self.decoder.run(rows)
        logits = [row[-1].copy() for row in output.logits]
        for i, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
            state = self._states[sequence]
            self.decoder.cache.commit(state.lane, range(row.tokens.size))
            state.draft, state.rows, state.features = drafts[sequence], {}, {}
            if output.hidden is not None:
                state.features[0] = output.hidden[i][-1].copy()
            self._grower(sequence).expand(state.draft, 0, logits[i])
            self.caught_up(sequence, None if output.hidden is None else output.hidden[i])
        seconds = time.perf_counter() - begin
        if self.pacing is not None:
            self.pacing.timed("first", seconds)
        return seconds

    def flush(self, sequence: Sequence, chunk: Chunk, keep: int) -> Chunk:
        """Runs and commits the front of a long chunk, piece by piece; returns the last ``keep`` rows or fewer."""
        lane, done = self._states[sequence].lane, 0
        while chunk.tokens.size - done > keep:
            piece = chunk.piece(done, min(done + self.prefill_chunk, chunk.tokens.size - 1))
            begin = time.perf_counter()
            output = self.decoder.run([Row.of_chunk(lane, piece.tokens, logits=False, hidden_in=piece.features)])
            self.decoder.cache.commit(lane, range(piece.tokens.size))
            self.caught_up(sequence, None if output.hidden is None else output.hidden[0])
            done += piece.tokens.size
            if self.pacing is not None:
                self.pacing.timed("row", (time.perf_counter() - begin) / piece.tokens.size)
        return chunk.piece(done, chunk.tokens.size)

    def _grow(self, sequences: Seq[Sequence]) -> float:
        """Runs level after level, all sequences in one pass, until none goes on. Returns the seconds it took."""
        seconds, level = 0.0, 1
        while True:
            begin = time.perf_counter()
            if self.stage(level) is not self.stage(level - 1):
                for sequence in sequences:
                    self._states[sequence].rows = {}
            room = self.max_nodes - 1 - max(len(self._states[sequence].rows) for sequence in sequences)
            frontiers = [self._frontier(sequence, level)[: max(room, 0)] for sequence in sequences]
            if not any(frontiers):
                return seconds
            rows = [self._row(s, nodes, level) for s, nodes in zip(sequences, frontiers, strict=True)]
            output = self.stage(level).run(rows)
            for i, (sequence, nodes) in enumerate(zip(sequences, frontiers, strict=True)):
                state, grower = self._states[sequence], self._grower(sequence)
                assert state.draft is not None
                for j, node in enumerate(nodes):
                    state.rows[node] = rows[i].scratch + j
                    if output.hidden is not None:
                        state.features[node] = output.hidden[i][j].copy()
                    grower.expand(state.draft, node, output.logits[i][j])
            took = time.perf_counter() - begin
            if self.pacing is not None:
                self.pacing.timed("step", took)
            seconds, level = seconds + took, level + 1

    def _frontier(self, sequence: Sequence, level: int) -> list[int]:
        state = self._states[sequence]
        assert state.draft is not None
        return self._grower(sequence).frontier(state.draft, level)

    def _row(self, sequence: Sequence, nodes: list[int], level: int) -> Row:
        """The pass's row of a sequence: nodes of one level, which see their ancestors' scratch rows.

        A sequence that does not go on takes part with no node: its scratch rows stay as they are.
        """
        state, width = self._states[sequence], self.stage(level).record.hidden_in
        draft, scratch = state.draft, len(state.rows)
        assert draft is not None
        mask = np.zeros((len(nodes), scratch + len(nodes)), dtype=np.bool_)
        for i, node in enumerate(nodes):
            mask[i, scratch + i] = True
            mask[i, [state.rows[ancestor] for ancestor in draft.path(node)[:-1] if ancestor in state.rows]] = True
        tokens = np.array([draft.tokens[node] for node in nodes], dtype=np.int64)
        offsets = np.array([draft.depths[node] - 1 for node in nodes], dtype=np.int64)
        row = Row(self.lane(sequence, level), tokens, offsets, mask, np.arange(len(nodes)), 0, scratch=scratch)
        if width is None or not nodes:
            return row
        features = np.zeros((len(nodes), width), dtype=np.float32)
        for i, node in enumerate(nodes):
            own = state.features[draft.parents[node]]
            features[i, -own.size :] = own
        return replace(row, hidden_in=features)

    def _finish(self, sequence: Sequence, seconds: float) -> Proposal:
        draft = self._states[sequence].draft
        assert draft is not None
        proposal = self._grower(sequence).finish(draft)
        cost = 0.0 if self.pacing is None else self.pacing.passes(seconds)
        return replace(proposal, draft_cost=cost)
