"""What people and programs read of a run: counters in words and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from specrun.engine import Choice
from specrun.rules import Rule
from specrun.sequence import Statistics, TokenLogprob
from specrun.text import Text


def law_of(rule: Rule) -> str:
    """How the output relates to the target's own, in words; part of every output that mentions speed."""
    if rule.lossless:
        return f"{rule.name}, lossless"
    return f"{rule.name}, LOSSY: the output is not distributed as the target model's"


def stats_lines(stats: Statistics, drafter: str, rule: Rule) -> list[str]:
    """Counters and speed of one continuation, for people."""
    lines = [
        f"prompt: {stats.prompt_tokens} tokens ({stats.cached_tokens} from the cache) in {stats.prefill_seconds:.3f} s",
        f"output: {stats.emitted} tokens, {stats.tokens_per_second:.1f} tokens/s after the first; "
        f"{stats.passes} passes, {stats.tokens_per_pass:.2f} tokens a pass",
    ]
    drafts = f"drafter: {drafter} ({law_of(rule)})"
    if stats.drafted:
        drafts += f"; {stats.drafted} drafted, {stats.accepted} accepted ({stats.acceptance:.0%})"
        rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in stats.acceptance_by_depth)
        lines.append(f"acceptance by depth: {rates}")
    return [*lines[:2], drafts, *lines[2:]]


def stats_to_json(stats: Statistics) -> dict[str, Any]:
    """All counters, and what follows from them. Times in seconds."""
    return {
        **asdict(stats),
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_pass": stats.tokens_per_pass,
        "acceptance": stats.acceptance,
        "acceptance_by_depth": stats.acceptance_by_depth,
    }


def choice_to_json(choice: Choice, text: Text) -> dict[str, Any]:
    """One continuation with its tokens, text, logprobs and counters."""
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": None if choice.logprobs is None else [_logprob_to_json(e, text) for e in choice.logprobs],
        "stats": stats_to_json(choice.stats),
    }


def _logprob_to_json(entry: TokenLogprob, text: Text) -> dict[str, Any]:
    def named(token: int, value: float) -> dict[str, Any]:
        return {"token": token, "text": text.decode([token], skip_special=False), "logprob": value}

    return {**named(entry.token, entry.logprob), "top": [named(token, value) for token, value in entry.top]}
