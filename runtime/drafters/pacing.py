"""Pacing: how much drafting pays, from the drafter's own confidence, experience, and costs measured while running."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specrun.economics import Economics, usual

BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # of a drafter's probability
DEPTHS = 4  # deeper nodes share their experience
MEMORY = 0.05  # weight of the newest observation in a running mean
UNKNOWN_STEP = 0.08  # plain passes a draft step is taken to cost before it was measured
LONGEST_PAUSE = 64  # proposals between two tries of a drafter that does not pay
TRYING = 0.02  # of the time that such a drafter may spend on catching up for its tries


class Pacing:
    """One drafter's. All costs are in plain passes of the target at the batch at hand."""

    def __init__(self, economics: Economics) -> None:
        self.economics = economics
        self._value = 0.5  # tokens a draft brought beyond the cost of verifying it: a running mean
        self._pause = self._waited = 0
        self._seconds: dict[str, float] = {}

    # What it costs

    def timed(self, what: str, seconds: float) -> None:
        """Takes over a measurement: ``what`` is "step", "first" (the pass that gives the first token), or "row" (one of
        those that a long prompt or pause left to catch up on)."""
        self._seconds[what] = usual(self._seconds.get(what), seconds)

    def cost(self, what: str) -> float:
        if self.economics.costs.plain_seconds is None or what not in self._seconds:
            return UNKNOWN_STEP
        return self.passes(self._seconds[what])

    def passes(self, seconds: float) -> float:
        """A time as a number of plain passes; 0 before a pass was timed."""
        plain = self.economics.costs.plain_seconds
        return 0.0 if plain is None else seconds / (plain * self.economics.costs(1, self.economics.batch))

    # What it brings

    def chance(self, depth: int, prob: float) -> float:
        """The chance that a node is accepted once its parent was, by experience with such nodes."""
        return min(1.0, self.economics.acceptance.rate(_key(depth, prob), prob))

    def learn(self, depth: int, prob: float, accepted: bool) -> None:
        self.economics.acceptance.observe(_key(depth, prob), accepted)
        if prob >= 0.3:
            self.economics.acceptance.observe(("depth", min(depth, DEPTHS)), accepted)

    def brought(self, proposed: int, accepted: int) -> None:
        """What came of a draft. Outcomes, not expectations, decide whether to go on: they notice a change of text."""
        cost = self.economics.cost(proposed + 1) - self.economics.cost(1)
        self._value += MEMORY * (accepted - self.economics.pace * cost - self._value)

    def _typical(self, depth: int) -> float:
        return self.economics.acceptance.rate(("depth", min(depth, DEPTHS)), 0.6)

    # Decisions

    def worth_starting(self, rows: int = 0) -> bool:
        """Whether to draft at all now, with so many rows to catch up on first.

        A drafter that does not pay is tried again after ever longer pauses, the longer the more a try costs.
        """
        if self._value > self.economics.pace * self.cost("first"):
            self._pause = self._waited = 0
            return True
        self._waited += 1
        if self._waited > max(self._pause, rows * self.passes(self._seconds.get("row", 0.0)) / TRYING):
            self._pause, self._waited = min(2 * self._pause + 4, LONGEST_PAUSE), 0
            return True
        return False

    def worth_running(self, nodes: Seq[int], reach: Seq[float], level: int) -> list[int]:
        """The nodes (best first) whose children may pay; none when even the best one's would not pay for the step."""
        typical, pace = self._typical(level + 1), self.economics.pace
        row = pace * (self.economics.cost(level + 2) - self.economics.cost(level + 1))
        if not nodes or reach[nodes[0]] * typical <= row + pace * self.cost("step"):
            return []
        return [node for node in nodes if reach[node] * typical > row]

    def count(self, reach: Seq[float]) -> int:
        """How many nodes to verify, given their chances to be reached and accepted, best first."""
        pace, base = self.economics.pace, self.economics.cost(1)
        best, best_value, gain = 0, 0.0, 0.0
        for i, chance in enumerate(reach, start=1):
            gain += chance
            value = gain - pace * (self.economics.cost(i + 1) - base)
            if value > best_value:
                best, best_value = i, value
        return best


def _key(depth: int, prob: float) -> tuple[int, int]:
    return min(depth, DEPTHS), sum(prob >= edge for edge in BUCKETS)
