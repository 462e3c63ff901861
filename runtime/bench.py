"""Measurements: each drafter against plain decoding, alternately, on the same prompts in the same process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from specrun.engine import Engine, Generation
from specrun.prompts import Task
from specrun.rules import Rule
from specrun.sampling import SamplingParams
from specrun.sequence import Statistics

PLAIN = "none"


@dataclass(frozen=True)
class Mismatch:
    """The first token that differs from plain decoding's. ``gap``: plain's log-probability lead of its best token over
    the second there; None where tokens were drawn."""

    index: int
    plain: int | None
    drafted: int | None
    gap: float | None


@dataclass
class Request:
    """One turn: its prompt and what every drafter made of it, ``runs[drafter][round]``."""

    task: Task
    turn: int
    prompt: list[int]
    runs: dict[str, list[Generation]] = field(default_factory=dict)
    mismatches: dict[str, Mismatch] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """What to measure. ``rule`` replaces every drafter's own; ``rounds`` alternate between plain and the drafters."""

    engine: Engine
    drafters: Sequence[str]
    params: SamplingParams
    rounds: int = 3
    rule: Rule | None = None

    @property
    def contenders(self) -> list[str]:
        """Plain decoding first, then each drafter once."""
        return list(dict.fromkeys([PLAIN, *self.drafters]))

    def rule_of(self, drafter: str) -> Rule:
        return self.rule or self.engine.drafter(drafter).rule

    def run(self, tasks: Sequence[Task], done: Callable[[], None] = lambda: None) -> list[Request]:
        """Decodes every turn of every task ``rounds`` times with each contender; ``done`` is called after each run.

        Later turns build on plain decoding's answers, so that all contenders get the same prompts.
        """
        self._warm_up()
        return [request for task in tasks for request in self._turns(task, done)]

    def _warm_up(self) -> None:
        """Opens every drafter and captures the common shapes, which the first run would otherwise pay for."""
        prompt = self.engine.encode("one two three four one two three four one two")
        for drafter in self.contenders:
            self.engine.generate(prompt, SamplingParams(max_tokens=16), drafter=drafter, rule=self.rule)

    def _turns(self, task: Task, done: Callable[[], None]) -> Iterator[Request]:
        messages: list[dict[str, str]] = []
        text = ""
        for turn, words in enumerate(task.turns):
            messages.append({"role": "user", "content": words})
            text += words
            request = Request(task, turn, self._prompt(task, messages, text))
            self._measure(request, done)
            answer = request.runs[PLAIN][0].text
            messages.append({"role": "assistant", "content": answer})
            text += answer
            yield request

    def _prompt(self, task: Task, messages: Sequence[dict[str, str]], text: str) -> list[int]:
        codec = self.engine.text
        if task.chat and codec.has_chat_template:
            return self.engine.encode(codec.encode(codec.chat(messages), special=False))
        return self.engine.encode(text)

    def _measure(self, request: Request, done: Callable[[], None]) -> None:
        for number in range(self.rounds):
            order = self.contenders if number % 2 == 0 else self.contenders[::-1]
            for drafter in order:
                run = self.engine.generate(request.prompt, self.params, drafter=drafter, rule=self.rule)
                request.runs.setdefault(drafter, []).append(run)
                done()
        for drafter in self.contenders:
            if mismatch := self._mismatch(request, drafter):
                request.mismatches[drafter] = mismatch

    def _mismatch(self, request: Request, drafter: str) -> Mismatch | None:
        expected = request.runs[PLAIN][0].token_ids
        for run in request.runs[drafter]:
            for index, (plain, drafted) in enumerate(zip_longest(expected, run.token_ids)):
                if plain != drafted:
                    return Mismatch(index, plain, drafted, self._gap(request.prompt, index))
        return None

    def _gap(self, prompt: list[int], index: int) -> float | None:
        """The lead of the likeliest token over the second at ``index`` of plain decoding's output."""
        if not self.params.greedy:
            return None
        params = replace(self.params, logprobs=2, max_tokens=index + 1)
        logprobs = self.engine.generate(prompt, params, drafter=PLAIN).logprobs or []
        if len(logprobs) <= index or len(logprobs[index].top) < 2:
            return None
        (_, first), (_, second) = logprobs[index].top[:2]
        return first - second


@dataclass(frozen=True)
class Row:
    """One contender over a group of requests. Times are medians of rounds, summed or averaged over the requests.

    ``ratio``: plain decoding's time for the same tokens over this contender's, both from the same rounds.
    ``identical`` of ``requests`` gave plain decoding's tokens in every round. ``judged_by_depth[i]`` drafted tokens
    stand behind ``acceptance_by_depth[i]``.
    """

    group: str
    drafter: str
    rule: str
    lossless: bool
    requests: int
    identical: int
    tokens: int
    tokens_per_second: float
    ratio: float
    first_token_seconds: float
    token_seconds: float
    passes: int
    tokens_per_pass: float
    drafted: int
    accepted: int
    acceptance: float
    acceptance_by_depth: tuple[float | None, ...]
    judged_by_depth: tuple[int, ...]


ALL = "all"


def rows(bench: Bench, requests: Sequence[Request]) -> list[Row]:
    """A row for each group and contender, and for all groups together where there are several."""
    groups = list(dict.fromkeys(request.task.group for request in requests))
    table = [
        _row(bench, group, drafter, [request for request in requests if request.task.group == group])
        for group in groups
        for drafter in bench.contenders
    ]
    if len(groups) > 1:
        table += [_row(bench, ALL, drafter, requests) for drafter in bench.contenders]
    return table


def _row(bench: Bench, group: str, drafter: str, requests: Sequence[Request]) -> Row:
    per_token = [(_token_seconds(r, PLAIN), _token_seconds(r, drafter), _after_first(r, drafter)) for r in requests]
    spent = sum(own * count for _, own, count in per_token)
    plain = sum(plain * count for plain, _, count in per_token)
    count = sum(count for *_, count in per_token)
    total = _total([request.runs[drafter][0].stats for request in requests])
    rule = bench.rule_of(drafter)
    return Row(
        group=group,
        drafter=drafter,
        rule=rule.name,
        lossless=rule.lossless,
        requests=len(requests),
        identical=sum(drafter not in request.mismatches for request in requests),
        tokens=total.emitted,
        tokens_per_second=count / spent if spent else 0.0,
        ratio=plain / spent if spent else 1.0,
        first_token_seconds=statistics.mean(_first_token(request, drafter) for request in requests),
        token_seconds=spent / count if count else 0.0,
        passes=total.passes,
        tokens_per_pass=count / total.passes if total.passes else 0.0,
        drafted=total.drafted,
        accepted=total.accepted,
        acceptance=total.acceptance,
        acceptance_by_depth=tuple(total.acceptance_by_depth),
        judged_by_depth=tuple(total.offered),
    )


def _after_first(request: Request, drafter: str) -> int:
    return request.runs[drafter][0].stats.emitted - 1


def _token_seconds(request: Request, drafter: str) -> float:
    """Seconds a token after the first: the median of the rounds."""
    return statistics.median(run.stats.decode_seconds / max(1, run.stats.emitted - 1) for run in request.runs[drafter])


def _first_token(request: Request, drafter: str) -> float:
    return statistics.median(run.stats.prefill_seconds for run in request.runs[drafter])


def _total(parts: Sequence[Statistics]) -> Statistics:
    total = Statistics()
    for name in ("prompt_tokens", "emitted", "passes", "drafted", "accepted"):
        setattr(total, name, sum(getattr(part, name) for part in parts))
    total.offered = [sum(depth) for depth in zip_longest(*(part.offered for part in parts), fillvalue=0)]
    total.taken = [sum(depth) for depth in zip_longest(*(part.taken for part in parts), fillvalue=0)]
    return total
