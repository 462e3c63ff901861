"""Sequence: one continuation of one request, from prompt to finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrun.cache import Lane
from specrun.proposal import Verdict
from specrun.random import Uniforms
from specrun.sampling import SamplingParams
from specrun.text import TextStream
from specrun.warp import History

if TYPE_CHECKING:
    from specrun.drafters import Drafter
    from specrun.rules import Rule


@dataclass
class Statistics:
    """Counters of one sequence; times in seconds.

    ``emitted == accepted + passes + 1`` holds: the first token comes from prefill, every pass adds one of the
    target's own. ``offered[i]`` and ``taken[i]`` count verified and accepted tokens at depth i + 1 of the draft.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the cache
    emitted: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    offered: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    decode_seconds: float = 0.0  # passes, drafting and acceptance after the first token

    def count(self, deepest: int, verdict: Verdict, drafted: int) -> None:
        self.passes += 1
        self.drafted += drafted
        self.accepted += verdict.accepted
        while len(self.offered) < deepest:
            self.offered.append(0)
            self.taken.append(0)
        for depth in range(deepest):
            self.offered[depth] += depth <= verdict.accepted  # beyond the first rejection nothing was judged
            self.taken[depth] += depth < verdict.accepted

    @property
    def tokens_per_pass(self) -> float:
        return (self.emitted - 1) / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens, in [0, 1]; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_depth(self) -> list[float | None]:
        """Acceptance at depth i + 1 given that all above it was accepted; None where nothing was judged."""
        return [taken / offered if offered else None for offered, taken in zip(self.offered, self.taken, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over the time they took."""
        return (self.emitted - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability (natural, of the unwarped logits) of an emitted token and of the K best at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Sequence:
    """State of one continuation. ``tokens`` is prompt + output; the cache holds all of them but the last (pending)."""

    prompt: list[int]
    params: SamplingParams
    drafter: Drafter
    rule: Rule  # the drafter's own, or the one the request asked for
    stream: TextStream
    eos_token_ids: frozenset[int]
    max_length: int  # positions; prompt and output together end here
    choice: int = 0  # index among the n continuations of its request
    lane: Lane | None = None  # set by the loop on admission, or by a conversation that keeps its cache
    keep_lane: bool = False  # set by a conversation: the lane outlives the sequence
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" (EOS or stop string) or "length" (max_tokens or end of context)
    stop_reason: int | str | None = None  # the EOS id or the stop string
    stats: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        self.history = History(self.prompt)
        self.uniforms = Uniforms(self.params.seed, self.choice)
        self.tokens = list(self.prompt)
        self.stats.prompt_tokens = len(self.prompt)

    @property
    def pending(self) -> int:
        """The last token, which no pass has seen yet."""
        return self.tokens[-1]

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return min(self.params.max_tokens - len(self.output), self.max_length - len(self.tokens))

    def accept(self, verdict: Verdict) -> tuple[Verdict, str]:
        """Takes over the verdict's tokens one by one and stops where a limit falls; returns what was kept and its text.

        The verdict that comes back is cut at the same token, so that output, cache and counters agree.
        """
        shown = []
        for count, token in enumerate(verdict.tokens, start=1):
            self.tokens.append(token)
            self.output.append(token)
            self.history.append(token)
            shown.append(self.stream.push(token))
            self._check_limits(token)
            if self.finish_reason is not None:
                shown.append(self.stream.finish())
                if count < len(verdict.tokens):
                    verdict = Verdict(verdict.path[:count], token, verdict.tokens[:count])
                break
        self.stats.emitted = len(self.output)
        return verdict, "".join(shown)

    def _check_limits(self, token: int) -> None:
        if token in self.eos_token_ids and not self.params.ignore_eos:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self.stream.stopped
        elif self.room <= 0:
            self.finish_reason = "length"
