"""What an examination found, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specbuild.doctor.readings import Options, Readings
from specbuild.doctor.scoring import Score
from specbuild.drafters import DrafterRequest

CLEARLY = 3.0  # standard errors that a lead must have
LEAST_LEAD = 0.03  # and accepted tokens of a chain of two


@dataclass(frozen=True)
class Outcome:
    """A reading (the options it changes) and its score, or why it cannot be."""

    options: Mapping[str, str]
    score: Score | None = field(repr=False)
    refusal: str | None = None

    def rank(self) -> float:
        """Lowest is best."""
        return 1.0 if self.score is None else -self.score.mean

    def beats(self, other: Outcome) -> bool:
        """Clearly: beyond the noise of so few positions."""
        if self.score is None or other.score is None:
            return other.score is None and self.score is not None
        return clearly_above(self.score, other.score)


def clearly_above(one: Score, other: Score) -> bool:
    """Whether the mean of ``one`` lies above ``other``'s beyond noise, over the same positions."""
    lead, error = one.lead(other)
    return lead > max(LEAST_LEAD, CLEARLY * error)


@dataclass(frozen=True)
class Diagnosis:
    """``told``: the reading that compile takes, given the request as it is; ``control``: the best reading with features
    of other positions (None where the drafter reads none)."""

    request: DrafterRequest
    readings: Readings = field(repr=False)
    outcomes: tuple[Outcome, ...]  # best first
    told: Outcome
    best: Outcome
    control: Score | None = field(repr=False)
    notes: tuple[str, ...] = ()
    NEARLY_NOTHING: ClassVar[float] = 0.05

    @property
    def unrelated(self) -> bool:
        """No reading drafts well, or the best owes nothing to the target's features."""
        best = self.best.score
        if best is None or best.mean < self.NEARLY_NOTHING:
            return True
        return self.control is not None and not clearly_above(best, self.control)

    @property
    def misread(self) -> bool:
        """Another reading than compile's is clearly better."""
        return not self.unrelated and self.best.beats(self.told)

    @property
    def exit_code(self) -> int:
        return int(self.unrelated or self.misread)

    @property
    def drafter(self) -> str:
        """The request with the best reading's options, as compile takes it."""
        request = self.request
        head = request.kind if request.source is None else f"{request.kind}={request.source}"
        return ",".join([head, *(f"{key}={value}" for key, value in {**request.options, **self.best.options}.items())])

    @property
    def verdict(self) -> str:
        """One paragraph: what was found, and what to do."""
        best = 0.0 if self.best.score is None else self.best.score.first
        if self.unrelated:
            cause = (
                f"every reading is accepted next to never (the best: {best:.1%} of first tokens)"
                if self.best.score is None or self.best.score.mean < self.NEARLY_NOTHING
                else f"the best reading ({best:.1%} of first tokens) does as well with the features of other positions"
            )
            return (
                f"{cause[0].upper()}{cause[1:]}: the drafter was not made for this target, or for other weights of the "
                "same shape. Check the base model that its card names."
            )
        if self.misread:
            told = "refuses" if self.told.score is None else f"takes ({self.told.score.first:.1%} of first tokens)"
            return (
                f"Another reading than the one compile {told} is right: {words(self.best.options)} ({best:.1%}). "
                f"Compile with --drafter {self.drafter}"
            )
        return f"Compile's reading is right: {best:.1%} of first tokens are accepted, and no other does clearly better."

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return {
            "drafter": self.request.kind,
            "source": self.request.source,
            "options": dict(self.request.options),
            "compile_takes": self.readings.full({}),
            "positions": 0 if self.best.score is None else int(self.best.score.counts.size),
            "readings": [_outcome(outcome) for outcome in self.outcomes],
            "told": _outcome(self.told),
            "best": _outcome(self.best),
            "control": None if self.control is None else _score(self.control),
            "notes": list(self.notes),
            "unrelated": self.unrelated,
            "misread": self.misread,
            "verdict": self.verdict,
            "use": self.drafter,
            "exit_code": self.exit_code,
        }


def words(options: Options) -> str:
    """A reading in words: what it changes."""
    return ", ".join(f"{key}={value}" for key, value in sorted(options.items())) or "as compile takes it"


def _outcome(outcome: Outcome) -> dict[str, Any]:
    score = {} if outcome.score is None else _score(outcome.score)
    return {"options": dict(outcome.options), "refusal": outcome.refusal, **score}


def _score(score: Score) -> dict[str, float]:
    return {"first": score.first, "second": score.second, "accepted_of_two": score.mean}
