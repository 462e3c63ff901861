"""The card that goes with trained weights: what they were trained on, for how long, and what they reach."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.train.loop import Plan, Progress
from tools.train.objective import Acceptance


@dataclass(frozen=True)
class Card:
    """Everything the card says that is not measured."""

    kind: str
    target: str
    data: str
    command: str


def training_section(plan: Plan, progress: Progress) -> str:
    """One sentence about the run."""
    return (
        f"{progress.tokens / 1e6:.2f}M tokens in {progress.step} steps of about {plan.batch_tokens} tokens "
        f"({progress.seconds / 60:.0f} minutes of wall time); Muon at {plan.muon_rate:g} for matrices, AdamW at "
        f"{plan.adam_rate:g} for the rest, linear decay; last loss (soft cross-entropy, depth 1): {progress.loss:.3f}."
    )


def acceptance_table(measured: Mapping[str, Acceptance]) -> str:
    """Hit rates by depth and mean accepted tokens by chain length, one row for each named set."""
    depth = max(len(acceptance.hits) for acceptance in measured.values())
    columns = [*(f"depth {d}" for d in range(1, depth + 1)), *(f"chain {d}" for d in range(1, depth + 1))]
    lines = ["| set | positions | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for name, acceptance in measured.items():
        cells = [*_numbers(acceptance.by_depth()), *_numbers(acceptance.accepted())]
        lines.append(f"| {name} | {int(acceptance.positions[0])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rank_table(acceptance: Acceptance) -> str:
    """Share of positions at which the target's token is the drafter's k-th choice, for every depth."""
    lines = ["| depth | " + " | ".join(f"#{rank}" for rank in range(1, 9)) + " |", "|---" * 9 + "|"]
    for depth, shares in enumerate(acceptance.by_rank(), 1):
        lines.append(f"| {depth} | " + " | ".join(_numbers(shares)) + " |")
    return "\n".join(lines)


def _numbers(values: Sequence[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]


def write_accuracy(path: Path, acceptance: Acceptance) -> None:
    """Write the figures that the tree tuner and the runtime's economics start from."""
    content = {"by_rank": acceptance.by_rank(), "accepted_by_chain_length": acceptance.accepted()}
    rounded = json.loads(json.dumps(content), parse_float=lambda text: round(float(text), 4))
    path.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


def acceptance_section(measured: Mapping[str, Acceptance]) -> str:
    """Both tables; the ranks are those of the last set measured."""
    last = list(measured)[-1]
    return (
        "Greedy drafts against the target's greedy text. *Depth d*: share of positions whose d-th drafted token is the "
        "target's when the ones before it are. *Chain n*: mean accepted tokens of a chain of n.\n\n"
        f"{acceptance_table(measured)}\n\nBy rank ({last}):\n\n{rank_table(measured[last])}"
    )


def write_card(path: Path, card: Card, training: str, acceptance: str) -> None:
    """Write ``card.md``."""
    path.write_text(
        f"# {card.kind} for {card.target}\n\n## Data\n{card.data}\n\n## Training\n{training}\n\n"
        f"## Acceptance\n{acceptance}\n\n## Repeat\n```\n{card.command}\n```\n",
        encoding="utf-8",
    )
